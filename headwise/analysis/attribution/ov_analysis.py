"""What heads write: OV eigenvalue score, promoted words, the share of each head in its layer's output."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import Attribution, layer_inputs, logit_attribution
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.recording.attention_maps import attend
from headwise.analysis.recording.batching import make_batches, read_sites, run, tokenizer_of
from headwise.analysis.recording.recording import pick, record
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile_result import HeadProfile
from headwise.errors import HeadwiseError
from headwise.heads.head import Circuit, Head, Pattern
from headwise.heads.hook_point import Seen
from headwise.heads.per_head_output import PerHead
from headwise.kernels.precision import at_least_float32
from headwise.model import AnyModel, Step, Wiring, quiet
from headwise.spec import Address

__all__ = [
    "Attribution",
    "Promoted",
    "ValueWeighted",
    "WriteShare",
    "copying",
    "logit_attribution",
    "promoted",
    "value_weighted",
    "vocabulary",
    "write_share",
]


def copying(model: AnyModel, heads: Pattern = "*") -> dict[str, float]:
    """OV eigenvalue score of each head: ReΣλ / Σ|λ| over the eigenvalues of W_V W_O, from −1 to 1.

    The score is 1 if W_V W_O maps every eigenvector to a positive multiple of itself, −1 if to a negative one
    (https://transformer-circuits.pub/2021/framework). Random weights give 0 with a standard deviation of about
    1.5 / head_dim. The eigenvectors are directions of the residual stream, not tokens: the score does not say what the head
    writes for the token it attends to. `direct_effects` measures that. Norms are left out. NaN if all eigenvalues are 0.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> -1 <= copying(Transformer(preset("nano")), "5.1")["5.1"] <= 1
    True
    """
    scores = {}
    for head in model.heads.select(pick(heads, model.spec.addresses)):
        values = Circuit(head.W_V.detach().double(), head.W_O.detach().double()).eigenvalues()  # (e,), complex
        size = values.abs().sum()
        scores[str(head.address)] = float(values.real.sum() / size) if size > 0 else float("nan")
    return scores


class Promoted(NamedTuple):
    """What a head does with one token it looks at: the words it makes likelier and less likely, with their scores."""

    token: str
    promotes: list[tuple[str, float]]
    suppresses: list[tuple[str, float]]


def vocabulary(
    model: AnyModel, head: str | Address, tokens: str | Sequence[int], k: int = 10, *, typical: bool = False,
    corpus: Any = None,
) -> list[Promoted]:  # fmt: skip
    """The words a head promotes and suppresses when it looks at nothing but a token, for each token given.

    The token's vector goes through the norm before the layer, W_V, W_O, the final norm's weight and the output layer (and
    where a norm stands behind attention, as in Gemma 3, through its weight). Two things are approximate. The vector: by
    default the bare embedding, which is what the first layer reads (positions left out) and less and less what later ones
    do; with `typical` the mean of what this layer reads where the token stands in a corpus. And the scale of norms behind
    the head, which depends on everything else: scores are right up to a positive factor.
    """
    one = _decoder_head(model, head)
    ids = tokenizer_of(model).encode(tokens, special=False) if isinstance(tokens, str) else [int(i) for i in tokens]
    if not ids:
        raise HeadwiseError("there is no token to look at; give a text or token ids.")
    with quiet(model), torch.no_grad():
        wiring = model.wiring()
        step = wiring.steps[one.address.layer]
        if step.unread:
            raise HeadwiseError(f"what {one.address} promotes cannot be read off: {step.unread}")
        read = _typical_inputs(model, one, ids, corpus) if typical else _bare_inputs(model, wiring, step, ids)  # (n, D)
        read = at_least_float32(read)
        value = read @ one.W_V.to(read)
        value = value if one.b_V is None else value + one.b_V  # (n, e)
        scores = _to_vocabulary(wiring, step, value @ one.W_O.to(read))  # (n, V)
        k = min(k, scores.shape[1])
        up, down = scores.topk(k), scores.topk(k, largest=False)
    return [
        Promoted(_word(model, i), _named(model, *_row(up, row)), _named(model, *_row(down, row)))
        for row, i in enumerate(ids)
    ]


def promoted(model: AnyModel, head: HeadProfile, k: int = 6, *, tokens: int = 3) -> list[Promoted]:
    """The same for the first tokens of the words it was seen looking at hardest, so many of them; none if none was seen."""
    words = dict.fromkeys(one.attended for one in head.hardest)
    first = (tokenizer_of(model).encode(f" {word}", special=False)[:1] for word in words)
    ids = list(dict.fromkeys(i for some in first for i in some))[:tokens]
    return vocabulary(model, head.address, ids, k) if ids else []


@dataclass(frozen=True, eq=False)
class ValueWeighted:
    """A head's map before and after weighing what is looked at by how much it brings: (words, words)."""

    words: tuple[str, ...]  # that look
    seen: tuple[str, ...]  # that are looked at: others where a head looks across to a source
    attention: Tensor
    weighted: Tensor


def value_weighted(
    model: AnyModel, text: str, head: str | Address, *, words: bool = True, source: str | None = None
) -> ValueWeighted:
    """Attention times the length of what is brought, p_ij ‖v_j W_O‖, each row scaled to sum to 1.

    A look at a token whose value is next to nothing moves nothing (https://arxiv.org/abs/2004.10102). v_j holds its bias.
    `source` is what an encoder-decoder reads.
    """
    address = Address.parse(head) if isinstance(head, str) else head
    with record(model, address, what=("v", "map")) as recording:
        seen = attend(model, text, address, words=words, source=source)
    (looking, looked), found = seen.sides(address), recording[address]
    with torch.no_grad():
        v = at_least_float32(found.v[0])
        lengths = (v @ model.heads[address].W_O.to(v)).norm(dim=-1)  # (S,): ‖v_j W_O‖
        weights = found.map()[0] * lengths  # (T, S)
        total = weights.sum(-1, keepdim=True)
        weights = (weights / total.where(total > 0, 1.0)).float()
    by_words = looking.means(weights) @ (weights @ looked.sums(weights))
    return ValueWeighted(looking.labels, looked.labels, seen.map(address), by_words)


class WriteShare(NamedTuple):
    """A head's part in its layer's output: along the output, and by length. Each sums to 1 over the heads of a layer."""

    share: float  # mean of ⟨o_h, Σo⟩ / ‖Σo‖²; below 0 where a head writes against the others
    norm_share: float  # mean of ‖o_h‖ / Σ‖o‖
    rows: int


def write_share(
    model: AnyModel, corpus: Any = None, *, longest: int | None = None, tokens: int = 4096
) -> dict[str, WriteShare]:
    """How much of its layer's output each head carries through W_O, mean over the tokens of a corpus.

    The bias b_O is nobody's. One streaming pass; nothing of the shape (B, T, H, D) is built.
    """
    sites = read_sites(model)
    starts = dict(zip(sites, _starts([len(site.head_ids) for site in sites]), strict=True))
    tally = Tally(sum(len(site.head_ids) for site in sites))
    with quiet(model), torch.no_grad():
        for batch in make_batches(Reading.of(model, corpus, longest), tokens, device=model.device):
            buckets = [unit.bucket for unit in batch.units]

            def hear(seen: Seen, real: Tensor = batch.real, buckets: list[int] = buckets) -> None:
                if seen.z.shape[1]:
                    shares, counted = _shares(seen, real)
                    heads = slice(starts[seen.site], starts[seen.site] + seen.z.shape[1])
                    tally.add(("share", "norm_share"), heads, buckets, shares, counted[:, None, None])

            with ExitStack() as listening:
                for site in sites:
                    listening.enter_context(site.listen(hear))
                run(model, batch)
    addresses = [address for site in sites for address in site.addresses]
    if not addresses:
        return {}
    along, lengths = tally.mean("share"), tally.mean("norm_share")
    rows = tally.per_bucket("share")[1].sum(0)
    return {str(a): WriteShare(float(along[i]), float(lengths[i]), int(rows[i])) for i, a in enumerate(addresses)}


def _shares(seen: Seen, real: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the rows of each text, (B, H, 2), and how many rows counted, (B,)."""
    z, W_O = at_least_float32(seen.z), at_least_float32(seen.site.W_O)
    writes = PerHead(z, W_O, None)
    whole = torch.einsum("bhte,hed->btd", z, W_O)  # (B, T, D)
    along = (torch.einsum("btd,hed->bhte", whole, W_O) * z).sum(-1)  # ⟨o_h, Σo⟩: (B, H, T)
    size = whole.square().sum(-1)  # (B, T)
    counts = real & (size > 0)  # a row to which nobody wrote has no shares
    lengths = writes.norms()  # (B, H, T)
    along = along / size.where(counts, 1.0)[:, None]
    lengths = lengths / lengths.sum(1, keepdim=True).where(counts[:, None], 1.0)
    both = torch.stack((along, lengths), -1) * counts[:, None, :, None]  # (B, H, T, 2)
    return both.sum(2), counts.sum(1)


def _decoder_head(model: AnyModel, head: str | Address) -> Head:
    one = model.heads[head if isinstance(head, Address) else Address.parse(head)]
    if model.spec.form == "post" or model.spec.output != "lm" or one.address.stack in ("enc", "cross"):
        raise HeadwiseError(
            f"what {one.address} promotes cannot be read off: that takes a pre-norm decoder with a language-model output, "
            f"and a head that reads its stream."
        )
    return one


def _bare_inputs(model: AnyModel, wiring: Wiring, step: Step, ids: list[int]) -> Tensor:
    """The embeddings as the first layer reads them, positions left out: (n, D)."""
    if wiring.embed is None:
        raise HeadwiseError(
            "between this model's table of tokens and its first layer stands more than positions that are added, so bare "
            "embeddings are not what is read; give typical=True."
        )
    x = wiring.embed(torch.tensor(ids, device=model.device))  # (n, D)
    return x if step.norm is None else step.norm(x)


def _typical_inputs(model: AnyModel, one: Head, ids: list[int], corpus: Any) -> Tensor:
    """The mean of what the layer reads where each token stands in a corpus: (n, D)."""
    wanted = torch.tensor(ids, device=model.device)
    sums, counts = torch.zeros(len(ids), model.spec.width, dtype=torch.double), torch.zeros(len(ids))
    layer = next(layer for layer in model.attention_layers() if layer.site.address == one.address.site)
    for batch in make_batches(Reading.of(model, corpus), device=model.device):
        with layer_inputs(layer) as caught:
            run(model, batch)
        stands = (batch.ids[..., None] == wanted) & batch.real[..., None]  # (B, T, n)
        sums += torch.einsum("btn,btd->nd", stands.double(), caught[0].double()).cpu()
        counts += stands.sum((0, 1)).cpu()
    missing = [_word(model, i) for i, count in zip(ids, counts.tolist(), strict=True) if not count]
    if missing:
        raise HeadwiseError(
            f"{', '.join(map(repr, missing))} does not stand in the corpus; give corpus=… where it does, or typical=False."
        )
    return at_least_float32((sums / counts[:, None]).to(one.W_V))


def _to_vocabulary(wiring: Wiring, step: Step, wrote: Tensor) -> Tensor:
    """Scores of all words, up to the scale of norms on the way: (n, D) → (n, V)"""
    wrote = wrote if step.after is None else step.after.turn(wrote)
    return wiring.logits(wiring.norm.turn(wrote))


def _row(found: Any, row: int) -> tuple[list[int], list[float]]:
    return found.indices[row].tolist(), found.values[row].tolist()


def _named(model: AnyModel, ids: list[int], scores: list[float]) -> list[tuple[str, float]]:
    return [(_word(model, i), score) for i, score in zip(ids, scores, strict=True)]


def _word(model: AnyModel, id: int) -> str:
    """A token as it would be written, or its number if the vocabulary is longer than the tokenizer."""
    tokenizer = tokenizer_of(model)
    return tokenizer.backend.decode([id], skip_special_tokens=False) if id < len(tokenizer) else f"#{id}"


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
