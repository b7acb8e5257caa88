"""What tells which key heads may stream: where they look, what is lost, gates that learn, and what they are for."""

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.analysis.metrics.hooks import listening
from headwise.analysis.metrics.induction import make_repeats
from headwise.analysis.metrics.long_offsets import mass_beyond
from headwise.analysis.metrics.retrieval import make_needles
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.compression.l0_gates import LED, LearnedGates, along, prepared
from headwise.compression.streaming_selection import Scores, StreamQuestion, layer_keeping, streaming_now
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.kernels.batched import maps_of_rows
from headwise.kernels.gradients import gradients_enabled
from headwise.kernels.precision import at_least_float32
from headwise.model import Block, Transformer, quiet
from headwise.model.block import Beside
from headwise.spec import Address, AttentionSpec, SiteAddress

ROWS = 64  # queries of a text whose attention is looked at


@torch.no_grad()
def looks_beyond(model: Transformer, ask: StreamQuestion) -> Scores:
    """The share of attention on keys the key head would have forgotten, over queries that have forgotten any: of that head
    among its readers which looks there most. A mean would hide one that needs them behind two that do not."""
    total = {site.address: torch.zeros(len(site.head_ids), dtype=torch.float64) for site in model.all_sites()}
    seen_rows = 0

    def see(seen: Seen, rows: list[int], _first: int) -> None:
        for row in rows:
            forgotten = mass_beyond(seen.rows([row])[0], [row], ask.keeps)  # (H, 1)
            total[seen.site.address] += forgotten[:, 0].double().cpu()

    texts = _texts(model, ask)
    for number, ids in enumerate(texts):
        rows = torch.linspace(ask.room, ids.shape[1] - 1, min(ROWS, ids.shape[1] - ask.room)).long().tolist()
        seen_rows += len(rows)
        with quiet(model), listening(model.all_sites(), see, rows):
            model(ids, hidden=True)
        _note(ask, "attention beyond the window", number + 1, len(texts))
    means = {site: sums / seen_rows for site, sums in total.items()}
    return _by_key_head(model, means, torch.amax)


@torch.no_grad()
def moved_writes(model: Transformer, ask: StreamQuestion) -> Scores:
    """How far what its heads write moves when it streams: the square of that against the square of the stream it is added to,
    over rows that have forgotten any. Heads that spread their attention evenly may look far and write the same without it."""
    moved: Scores = dict.fromkeys(model.spec.key_heads, 0.0)
    texts = _texts(model, ask)
    for number, ids in enumerate(texts):
        with quiet(model):
            x, beside = model.begin(ids)
            for block in model.blocks:
                assert isinstance(block, Block)
                layer, here = block.attention, block.attention.site.address
                whole, few = _both_ways(block, block.reads(x), beside, ask)  # (1, H, T, e)
                gone = at_least_float32(whole - few)[0, :, ask.room :]  # (H, n, e)
                stream = at_least_float32(x[0, ask.room :]).square().sum(-1)  # (n,)
                for key, kv in enumerate(layer.spec.kv_ids):
                    heads = [head for head, other in enumerate(layer.spec.kv_of_head) if other == key]
                    lost = torch.einsum("hne,hed->nd", gone[heads], layer.site.W_O[heads].to(gone))
                    moved[here.head(kv)] += (lost.square().sum(-1) / stream).mean().item() / len(texts)
                x = block(x, beside)
        _note(ask, "what each key head's heads write", number + 1, len(texts))
    return moved


@torch.no_grad()
def loss_of_each(model: Transformer, ask: StreamQuestion) -> Scores:
    """What the loss of tokens gains, where anything is forgotten, when this key head alone streams."""
    lost: Scores = dict.fromkeys(model.spec.key_heads, 0.0)
    texts, asked = _texts(model, ask), 0
    for number, ids in enumerate(texts):
        with quiet(model):
            x, beside = model.begin(ids)
            before = []  # the stream that each block reads
            for block in model.blocks:
                before.append(x)
                x = block(x, beside)
            whole = _loss_past(model, x, ids, ask.room)
            asked += ids.shape[1] - 1 - ask.room
            for head in lost:  # what comes before its layer stays as it was
                x = before[head.layer]
                with streaming_now(model, (head,), ask.keeps):
                    for block in model.blocks[head.layer :]:
                        x = block(x, beside)
                lost[head] += _loss_past(model, x, ids, ask.room) - whole
        _note(ask, "loss of each key head", number + 1, len(texts))
    return {head: value / asked for head, value in lost.items()}


def gates_of_each(model: Transformer, ask: StreamQuestion, rate: float = 0.1) -> Scores:
    """A gate on each key head blends what its heads find among all keys with what they find among few, and learns to close.

    What is made small is how far the last states move, as in DuoAttention (https://arxiv.org/abs/2410.10819); the share of
    open gates is led down to what shall stay whole, as gates on heads are that may be cut.
    """
    if ask.steps < 1:
        raise HeadwiseError(f"gates learn in steps, 1 or more; got {ask.steps}.")
    texts = _texts(model, ask)
    with gradients_enabled(model), prepared(model, False), torch.random.fork_rng():
        torch.manual_seed(ask.seed)
        gates = LearnedGates({layer.site.address: len(layer.spec.kv_ids) for layer in model.attention_layers()})
        gates = gates.to(model.device)
        optimizer = torch.optim.Adam(gates.parameters(), lr=rate)
        first, keep = gates.open_share().item(), 1 - ask.share
        for step in range(ask.steps):
            ids = texts[step % len(texts)]
            with torch.no_grad():
                wanted = at_least_float32(model(ids, hidden=True)[:, ask.room :])  # (1, n, D)
            moved = _blended(model, ids, gates.sample(1), ask)[:, ask.room :] - wanted
            loss = moved.square().sum(-1).mean() / wanted.square().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            along(gates)
            optimizer.step()
            gates.set_open_share(first + (keep - first) * min(1.0, (step + 1) / max(1.0, LED * ask.steps)))
            _note(ask, "gates", step + 1, ask.steps)
        open_now = gates.open_chance().tolist()
    return dict(zip(model.spec.key_heads, open_now, strict=True))


def _blended(model: Transformer, ids: Tensor, gates: dict[SiteAddress, Tensor], ask: StreamQuestion) -> Tensor:
    """Last states with a gate on each key head, (B, K) for each layer: open, its heads see all; closed, what streams."""
    x, beside = model.begin(ids)
    for block in model.blocks:
        assert isinstance(block, Block)
        layer, read = block.attention, block.reads(x)
        whole, few = _both_ways(block, read, beside, ask)
        gate = gates[layer.site.address][:, list(layer.spec.kv_of_head), None, None]  # (B, H, 1, 1)
        x = block.finish(x, read, layer.write(few + gate.to(few) * (whole - few)), beside)
    return x if model.norm is None else model.norm(x)


def _both_ways(block: Block, read: Tensor, beside: Beside, ask: StreamQuestion) -> tuple[Tensor, Tensor]:
    """What heads find among all keys, and among those they would keep: (B, H, T, e) twice."""
    layer, mask = block.attention, beside.mask_for(None, read.shape[1])
    whole = layer.attend(read, mask=mask, positions=beside.angles)
    with layer_keeping(layer, list(layer.spec.kv_ids), ask.keeps):
        return whole, layer.attend(read, mask=mask, positions=beside.angles)


@torch.no_grad()
def finds_repeats(model: Transformer, ask: StreamQuestion) -> Scores:
    """The most that any of its heads looks at what is repeated: the token behind the first copy, the first copy itself, or,
    of a needle being copied, the token that comes next; such heads stay whole (https://arxiv.org/abs/2407.15891)."""
    repeats, H = make_repeats(model, seed=ask.seed), {site.address: len(site.head_ids) for site in model.all_sites()}
    sums = {site: torch.zeros(3, n, dtype=torch.float64) for site, n in H.items()}
    second = range(repeats.second.start, repeats.second.stop)

    def see(seen: Seen, _first: int) -> None:
        shares = maps_of_rows(at_least_float32(seen.q), at_least_float32(seen.k), seen.terms, second)  # (B, H, m, S)
        for number, offset in enumerate((repeats.length - 1, repeats.length)):
            behind = shares.diagonal(second.start - offset, -2, -1)[..., : len(second)]  # (B, H, m)
            sums[seen.site.address][number] += behind.mean((0, 2)).double().cpu()

    if repeats.length:
        with quiet(model), listening(model.all_sites(), see):
            model(repeats.twice, hidden=True)
    needles = make_needles(model, ask.on, ask.seed)
    copied = 0
    for number, needle in enumerate(needles):
        places = {row: place for row, place in enumerate(needle.places) if place >= 0}
        found: dict[SiteAddress, Tensor] = {}

        def look(seen: Seen, _first: int, places=places, found=found) -> None:
            best = seen.rows(list(places))  # (1, H, rows, S)
            wanted = torch.tensor(list(places.values()), device=best.device)
            found[seen.site.address] = (best[0].argmax(-1) == wanted).double().cpu()  # (H, rows)

        ids = torch.tensor([needle.ids], device=model.device)
        with quiet(model), listening(model.all_sites(), look):
            said = model(ids)[0].argmax(-1)  # (T,)
        right = torch.tensor([int(said[row]) == needle.ids[row + 1] for row in places], dtype=torch.float64)
        copied += int(right.sum())
        for site, hits in found.items():
            sums[site][2] += (hits * right).sum(-1)
        _note(ask, "needles", number + 1, len(needles))
    means = {site: torch.stack((one[0], one[1], one[2] / max(1, copied))).amax(0) for site, one in sums.items()}
    return _by_key_head(model, means, torch.amax)


def _texts(model: Transformer, ask: StreamQuestion) -> list[Tensor]:
    """Texts long enough that something is forgotten: (1, T) each."""
    units = Reading.of(model, ask.on, ask.longest)
    made = [torch.tensor([unit.ids], device=model.device) for unit in units if len(unit.ids) > ask.room + 1]
    if not made:
        raise HeadwiseError(
            f"no text is longer than the {ask.room} tokens that are kept, so nothing is forgotten; give longer ones."
        )
    return made


def _loss_past(model: Transformer, x: Tensor, ids: Tensor, room: int) -> float:
    """The summed loss of the tokens that come after something was forgotten."""
    x = x if model.norm is None else model.norm(x)
    assert model.output is not None
    return model.output.cross_entropy(x[0, room:-1], ids[0, room + 1 :], total=1).item()


def _by_key_head(model: Transformer, values: dict[SiteAddress, Tensor], together: Callable[[Tensor], Tensor]) -> Scores:
    """Values of heads, (H,) for each layer, brought together over the heads that share keys."""
    made: Scores = {}
    for head in model.spec.key_heads:
        layer = model.spec.attention_at(head.site)
        made[head] = float(together(values[head.site][_readers(layer, head)]))
    return made


def _readers(layer: AttentionSpec, head: Address) -> list[int]:
    """The heads that read a key head's keys, by where they stand."""
    key = layer.kv_ids.index(head.head)
    return [i for i, other in enumerate(layer.kv_of_head) if other == key]


def _note(ask: StreamQuestion, what: str, done: int, of: int) -> None:
    if ask.progress is not None:
        ask.progress(what, done, of)
