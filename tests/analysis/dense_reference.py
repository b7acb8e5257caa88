"""The dense way: calls built by hand, batches of plain ids, and every surface measure from whole maps in float64."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.analysis.metrics.top_contexts import Evidence
from headwise.analysis.recording.batching import Batch, Unit, make_batch, run
from headwise.heads import Site
from headwise.heads.hook_point import Seen
from headwise.kernels import Mask, Terms, causal, maps
from headwise.model import Transformer
from headwise.spec import SiteAddress
from headwise.text.align import Alignment

FAR = 32  # where long range begins
Rows = dict[str, tuple[np.ndarray, np.ndarray]]  # a measure: sums and counts, (units, heads)


def by_scores(
    scores: Tensor, mask: Mask | None = None, sink: Tensor | None = None, norms: Tensor | None = None
) -> Seen:
    """A call whose scores are these, (B, H, T, S): queries are the scores, keys the unit vectors.

    `norms` (S,) are the lengths of what each key writes; 1 if left out.
    """
    B, H, _, S = scores.shape
    eye = torch.eye(S, dtype=scores.dtype).expand(B, H, S, S)
    v = (torch.ones(S) if norms is None else norms).to(scores)[None, None, :, None].expand(B, H, S, 1)
    output: Any = SimpleNamespace(slices=torch.eye(3, dtype=scores.dtype)[None, :1].expand(H, 1, 3))
    terms = Terms(scale=1.0, groups=tuple(range(H)), mask=mask, sink=sink)
    z = maps(scores, eye, terms) @ v
    return Seen(Site(SiteAddress("", 0), tuple(range(H)), output), scores, eye, v, terms, z)


def unit(number: int, ids: Sequence[int]) -> Unit:
    """A unit of ids alone; its text is the ids."""
    words = [str(i) for i in ids]
    starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
    spans = [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]
    return Unit(number, number, tuple(ids), None, partial(Alignment.of, " ".join(words), tuple(ids), words, spans))


def distinct(n: int, batch: int = 1) -> Batch:
    """A batch without padding and without a repeated token."""
    return make_batch([unit(number, range(n)) for number in range(batch)])


def measured(seen: Seen, batch: Batch, flags: Tensor | None = None, **options: Any) -> Tally:
    """What the streaming measures make of one call."""
    tally = Tally(seen.q.shape[1])
    flags = torch.zeros(int(batch.ids.max()) + 1, len(CLASSES)) if flags is None else flags
    evidence = [one for one in (options.pop("evidence", None),) if one is not None]
    Runner(tally, [*evidence, *usual_measures(flags)], **options).see(seen, batch, 0)
    return tally


def head_of(scores: Tensor, n: int, **options: Any) -> Tally:
    """One causal head with these scores, (n, n)."""
    return measured(by_scores(scores.double()[None, None], causal(), **options), distinct(n))


def watch(
    model: Transformer, batches: list[Batch], flags: Tensor, evidence: bool = False, block: int = 0, **options: Any
) -> tuple[Tally, Rows]:
    """The streaming measures of a model and the dense ones, of the same passes; `block`: rows of a block, with `every`."""
    heads = sum(len(site.head_ids) for site in model.sites())
    tally = Tally(heads)
    runner = Runner(tally, [*[Evidence(heads)] * evidence, *usual_measures(flags)], **options)
    dense: Rows = {}
    for batch in batches:
        with ExitStack() as stack:
            first = 0
            for site in model.sites():
                stack.enter_context(site.listen(partial(_both, runner, dense, batch, first, heads, flags, block)))
                first += len(site.head_ids)
            with torch.no_grad():
                run(model, batch)
    return tally, dense


def _both(
    runner: Runner, dense: Rows, batch: Batch, first: int, heads: int, flags: Tensor, block: int, seen: Seen
) -> None:
    runner.see(seen, batch, first)
    T, every = seen.q.shape[2], runner.every
    rows = np.array([not block or i // block % every == _middle(i // block, every, -(-T // block)) for i in range(T)])
    for name, (sums, counts) in dense_measures(seen, batch, flags, rows).items():
        old = dense.setdefault(name, (np.zeros(heads), np.zeros(heads)))
        here = slice(first, first + sums.shape[1])
        old[0][here] += sums.sum(0)
        old[1][here] += counts.sum(0)


def _middle(block: int, every: int, blocks: int) -> int:
    """Which block of its run is looked at: the one in the middle; the last run may be short."""
    return min(every, blocks - block // every * every) // 2


def dense_measures(seen: Seen, batch: Batch, flags: Tensor, rows: np.ndarray | None = None) -> Rows:
    """Every surface measure by its definition, from the whole map: sums over rows and how many there were, (B, H). Of some
    rows alone, (T,), but for what is written, which costs nothing to know of all."""
    p = maps(seen.q.double(), seen.k.double(), seen.terms).numpy()  # (B, H, T, S)
    B, H, T, _ = p.shape
    mask = seen.terms.mask
    sight = torch.ones(1, 1, T, T) if mask is None else mask.dense(T, T)
    sight = sight.expand(B, H, T, T).bool().numpy()
    real, ids = batch.real.numpy(), batch.ids.numpy()
    first = batch.first.numpy()
    wrote = torch.einsum("bhse,hed->bhsd", seen.v.double()[:, list(seen.terms.groups)], seen.site.W_O.double())
    norms = wrote.norm(dim=-1).numpy()  # (B, H, S)
    heavy = p * norms[:, :, None]
    heavy = heavy / np.maximum(heavy.sum(-1, keepdims=True), 1e-30)
    back = np.arange(T)[:, None] - np.arange(T)  # (T, S): how far back
    pairs = (real[:, :, None] & real[:, None])[:, None]  # of tokens
    start = (np.arange(T) == first[:, None])[:, None, None]  # (B, 1, 1, S)
    visible = sight.sum(-1)
    made: Rows = {}

    def keep(name: str, values: np.ndarray, counted: np.ndarray) -> None:
        """Values (B, H, T) over the rows that count."""
        some = True if rows is None or name.startswith("write") else rows
        counted = np.broadcast_to(counted & some, values.shape)
        made[name] = (np.where(counted, values, 0.0).sum(-1), counted.sum(-1))

    row = real[:, None]
    entropy = -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0).sum(-1)
    keep("entropy", entropy, row)
    keep("relative entropy", entropy / np.log(np.maximum(visible, 2)), row & (visible > 1))
    keep("participation", 1 / np.maximum((p**2).sum(-1), 1e-12), row)
    ordinary = real & ~flags[batch.ids][..., CLASSES.index("special")].bool().numpy()  # (B, T)
    sees = (sight & ordinary[:, None, None]).any(-1)  # (B, H, T): whether it sees an ordinary token
    keep("confidence", (p * ordinary[:, None, None]).max(-1), ordinary[:, None] & sees)
    keep("distance", (p * abs(back)).sum(-1), row)
    keep("signed distance", (p * back).sum(-1), row)
    keep("first", (p * start).sum(-1), row)
    keep("abstention", 1 - p.sum(-1), row)
    keep("uniform", 1 / np.maximum(visible, 1), row)
    for c, name in enumerate(CLASSES):
        there = (flags[batch.ids][..., c].bool().numpy() & real)[:, None, None]
        there = there if name == "special" else there & ~start  # a sink is no interest in a class
        could = row if name == "special" else row & (sight & there).any(-1)  # rows that see the class
        keep(name, (p * there).sum(-1), could)
        keep(f"{name} null", (sight & there).sum(-1) / np.maximum(visible, 1), could)
        keep(f"{name} valued", (heavy * there).sum(-1), could)
    length = torch.einsum("bhte,hed->bhtd", seen.z.double(), seen.site.W_O.double()).norm(dim=-1).numpy()
    keep("write", length, row)
    keep("write share", length / np.maximum(length.sum(1, keepdims=True), 1e-30), row)
    ahead = bool((sight & (back < 0) & pairs).any())  # only a head that can look ahead has offsets ahead
    for offset in range(1 - FAR if ahead else 0, FAR):
        here = (back == offset) & pairs  # (B, 1, T, S): one cell a row at most
        aimed = here & ~start
        at = {kind: (here * values).sum(-1) for kind, values in (("p", p), ("top", p == p.max(-1, keepdims=True)))}
        keep(f"offset {offset}", at["p"], here.any(-1))
        keep(f"argmax {offset}", at["top"], here.any(-1))
        keep(f"aimed {offset}", at["p"], aimed.any(-1))
        keep(f"aimed null {offset}", 1 / np.maximum(visible, 1), aimed.any(-1))
        keep(f"aimed valued {offset}", (here * heavy).sum(-1), aimed.any(-1))
    beside = (abs(back) <= 3) & (back != 0) & pairs & ~start & (ahead | (back > 0))
    keep("local", (p * beside).sum(-1), beside.any(-1))
    keep("local null", beside.sum(-1) / np.maximum(visible, 1), beside.any(-1))
    keep("local valued", (heavy * beside).sum(-1), beside.any(-1))
    for low in (FAR << i for i in range(11)):
        inside = (abs(back) >= low) & (abs(back) < 2 * low) & pairs
        reach = ((abs(back) >= low) & pairs & (ahead | (back > 0))).any(-1)
        keep(f"distance {low}-{2 * low - 1}", (p * inside).sum(-1), reach)
    follows = np.concatenate((np.full((B, 1), -2), np.where(real, ids, -1)[:, :-1]), 1)
    repeats = (ids[:, :, None] == ids[:, None]) | (ids[:, :, None] == follows[:, None])
    far = (abs(back) >= FAR) & ~repeats[:, None] & ~start & pairs
    could = (sight & far).any(-1)
    keep("long range", (p * far).sum(-1), could)
    keep("long range null", (sight & far).sum(-1) / np.maximum(visible, 1), could)
    keep("long range valued", (heavy * far).sum(-1), could)
    return made


def assert_alike(tally: Tally, dense: Rows, names: Sequence[str] | None = None) -> None:
    """Sums over counts agree to 1e-5, and what could not be measured was not."""
    for name in dense if names is None else names:
        sums, counts = dense[name]
        mine, rows = (x.sum(0) for x in tally.per_bucket(name))
        np.testing.assert_array_equal(rows, counts, err_msg=f"rows of {name}")
        with np.errstate(invalid="ignore", divide="ignore"):
            np.testing.assert_allclose(mine / rows, sums / counts, rtol=1e-5, atol=1e-5, err_msg=name)
