"""Heads beside each other by what they do, on sampled rows: maps, values and outputs, summed over all pairs.

Only the sampled rows of a map are ever made, and only a group of texts is held at a time.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.metric import Measure
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import Unit, make_batch
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.similarity.weight_similarity import product_norms, square_norms
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen, Site
from headwise.kernels.precision import at_least_float32
from headwise.kernels.score_params import raw_scores, spread, visible_scores, weights
from headwise.model import AnyModel
from headwise.spec import Address

POOL = 2048  # texts at the beginning of a corpus, among which those that are read are drawn
GROUP = 8  # texts read side by side
PER_TEXT = 16  # rows taken from a text, unless texts are few
HELD = 1 << 25  # attention weights held at once: heads × rows × keys
CELLS = 1 << 11  # of them compared at once, so that they stay in the cache


def sample(
    model: AnyModel, corpus: Any, rows: int, longest: int, heads: int, seed: int
) -> Iterator[tuple[list[Unit], list[int]]]:
    """Groups of texts of about one length, and the places whose rows are taken from each of them."""
    dice = np.random.default_rng(seed)
    first = 0 if model.spec.kind == "encoder" else 1  # the first row of a causal map is the same in every head
    longest = min(longest, model.spec.context) if model.spec.positions == "learned" else longest
    pool = [unit for unit in islice(Reading.of(model, corpus, longest), POOL) if first < len(unit.ids) <= longest]
    if not pool:
        raise HeadwiseError(
            f"no text of {first + 1} to {longest} tokens to compare heads on; give others, or longest=…."
        )
    pool.sort(key=lambda unit: len(unit.ids))
    groups = [pool[start : start + GROUP] for start in range(0, len(pool), GROUP)]
    each = max(PER_TEXT, -(-rows // len(pool)))
    for number in dice.permutation(len(groups)):
        if rows < 1:
            return
        group = groups[number][:rows]
        eligible = np.arange(first, len(group[0].ids))  # the shortest stands first
        room = max(1, HELD // (heads * len(group) * len(group[-1].ids)))
        take = min(each, len(eligible), rows // len(group), room)
        yield group, sorted(dice.choice(eligible, take, replace=False).tolist())
        rows -= take * len(group)


class SampledRows(NamedTuple):
    """What the heads did at some places of some texts."""

    maps: Tensor  # (H, B·r, S + 1): the last column is the sink's share
    v: Tensor  # (H, B·r, e)
    z: Tensor  # (H, B·r, e)
    texts: int  # B


class RowSampler(Measure):
    """Keeps some rows of some heads while a group of texts is read: it has no numbers of its own, for it is pairs of heads
    that are compared."""

    def __init__(self, places: list[int], wanted: set[Address]) -> None:
        self.places, self.wanted = places, wanted
        self.maps: list[Tensor] = []
        self.v: list[Tensor] = []
        self.z: list[Tensor] = []
        self._called: set[Site] = set()

    def at(self, call: Call) -> None:
        """One call at one site."""
        seen, places = call.seen, self.places
        here = [i for i, address in enumerate(seen.site.addresses) if address in self.wanted]
        if here and seen.site in self._called:
            raise HeadwiseError(
                f"layer {seen.site.address} is called several times in one pass, so its heads have no one map to compare; "
                f"record them, and take a call: hw.record(model), recording[…].call(0)."
            )
        self._called.add(seen.site)
        if here:
            first = call.scene.batch.first
            self.maps.append(_by_head(_rows_of_texts(seen, places, first)[:, here]))
            self.v.append(_by_head(_at(spread(seen.v, seen.terms.groups)[:, here], places, first)))
            self.z.append(_by_head(_at(seen.z[:, here], places, first)))


def look(model: AnyModel, units: list[Unit], places: list[int], wanted: set[Address]) -> SampledRows:
    """One pass over a group of texts, these rows alone kept."""
    kept = RowSampler(places, wanted)
    Runner(Tally(len(wanted)), [kept]).read(model, [make_batch(units, device=model.device)])
    return SampledRows(torch.cat(kept.maps), torch.cat(kept.v), torch.cat(kept.z), len(units))


def _by_head(x: Tensor) -> Tensor:
    """Texts one after the other, heads first, in at least float32: (B, h, r, ·) → (h, B·r, ·)."""
    return at_least_float32(x.transpose(0, 1).flatten(1, 2))


def _at(x: Tensor, places: list[int], first: Tensor) -> Tensor:
    """What stands at some places of each text, counted from its first token: (B, h, T, e) → (B, h, r, e)."""
    if not bool(first.any()):
        return x[:, :, places]
    rows = first[:, None] + torch.tensor(places, device=first.device)  # (B, r)
    return x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _rows_of_texts(seen: Seen, places: list[int], first: Tensor) -> Tensor:
    """`rows_of` places counted from each text's first token, whose key has column 0."""
    begins = first.tolist()
    if not any(begins):
        return rows_of(seen, places)
    rows = sorted({begin + place for begin in begins for place in places})
    made = rows_of(seen, rows)  # (B, H, n, S + 1)
    texts = []
    for text, begin in zip(made, begins, strict=True):
        own = text[:, [rows.index(begin + place) for place in places]]  # (H, r, S + 1)
        texts.append(torch.cat((own[..., :-1].roll(-begin, -1), own[..., -1:]), -1))
    return torch.stack(texts)


def rows_of(seen: Seen, places: list[int]) -> Tensor:
    """Some rows of every head's map, and what the sink took of each: (B, H, r, S + 1)."""
    terms, q = seen.terms, at_least_float32(seen.q[:, :, places])
    k = spread(seen.k, terms.groups).to(q)
    T, S = seen.q.shape[2], k.shape[2]
    scores = raw_scores(q, k, terms)  # (B, H, r, S)
    rows = [
        visible_scores(scores[:, :, n : n + 1], terms, range(i, i + 1), range(S), T, S) for n, i in enumerate(places)
    ]
    share = weights(torch.cat(rows, 2), terms, terms.may_be_empty(T, S))
    rest = (
        (1 - share.sum(-1, keepdim=True)).clamp(min=0) if terms.sink is not None else torch.zeros_like(share[..., :1])
    )
    return torch.cat((share, rest), -1)


class Sums:
    """Sums over rows for all pairs of heads, (H, H), and the same for each head beside the others on another text."""

    def __init__(self, W_O: Tensor) -> None:
        self.W_O = W_O  # (H, e, D)
        self.rows, self.other_rows = 0, 0
        self.here = {name: np.zeros((len(W_O),) * 2) for name in ("js", "map_cosine", "position", "subspace", "output")}
        self.other = {name: np.zeros_like(sums) for name, sums in self.here.items()}
        self.squares = np.zeros(len(W_O))  # ‖P‖² of the rows that have another text

    def add(self, rows: SampledRows) -> None:
        """A group of texts. The next text of the group is the other one."""
        n, texts = rows.maps.shape[1], rows.texts
        keys = rows.maps[..., :-1]
        self.rows += n
        self.here["js"] += js_sums(rows.maps.flatten(1))
        pairs = [("map_cosine", keys), ("position", _unit(keys)), ("subspace", _unit(rows.v))]
        for name, x in pairs:
            self._add_products(name, x, texts)
        # What is written has D channels: a few rows at a time, the same of every text.
        z = rows.z.unflatten(1, (texts, -1))  # (H, B, r, e)
        for some in z.split(max(1, GROUP // texts), 2):
            self._add_products("output", _unit(some.flatten(1, 2) @ self.W_O.to(z)), texts)
        if texts > 1:
            self.other_rows += n
            self.squares += keys.double().square().sum((1, 2)).cpu().numpy()
            self.other["js"] += np.diag(_js_beside(rows.maps, _next_text(rows.maps, texts)))

    def _add_products(self, name: str, x: Tensor, texts: int) -> None:
        flat = x.flatten(1)
        self.here[name] += (flat @ flat.mT).double().cpu().numpy()
        if texts > 1:
            self.other[name] += (flat @ _next_text(x, texts).flatten(1).mT).double().cpu().numpy()

    def matrices(self) -> dict[str, np.ndarray]:
        """Means over rows; for whole maps, cosines."""
        made = {name: sums / self.rows for name, sums in self.here.items()}
        made["map_cosine"] = _cosines(self.here["map_cosine"], np.diag(self.here["map_cosine"]))
        return made

    def nulls(self) -> dict[str, np.ndarray]:
        """The same beside another text; NaN if there was only one. For js one number per head, as [a, b] of a alone."""
        if not self.other_rows:
            return {name: np.array(np.nan) for name in self.other}
        made = {name: (sums + sums.T) / 2 / self.other_rows for name, sums in self.other.items()}
        made["map_cosine"] = _cosines((self.other["map_cosine"] + self.other["map_cosine"].T) / 2, self.squares)
        return made | {"js": np.diag(made["js"])[:, None]}


def js_sums(rows: Tensor) -> np.ndarray:
    """Σ over rows of the Jensen–Shannon divergence of every pair, in nats; rows laid end to end: (H, N) → (H, H)."""
    H = len(rows)
    rows = rows[:, (rows > 0).any(0)]  # places that no head looks at add nothing
    own, mixed = np.zeros(H), np.zeros((H, H))
    for part in rows.split(CELLS, 1):
        own += _p_log_p(part)
        for a in range(H - 1):
            mixed[a, a + 1 :] += _p_log_p((part[a] + part[a + 1 :]) * 0.5)
    upper = np.triu((own[:, None] + own) / 2 - mixed, 1).clip(min=0)  # below 0 by rounding alone
    return upper + upper.T


def _js_beside(rows: Tensor, others: Tensor) -> np.ndarray:
    """The same of each head's rows and others', head by head: (H, n, S) twice → (H,)."""
    made = [(_p_log_p(p) + _p_log_p(q)) / 2 - _p_log_p((p + q) * 0.5) for p, q in zip(rows, others, strict=True)]
    return np.array([row.sum() for row in made]).clip(min=0)


def _p_log_p(p: Tensor) -> np.ndarray:
    logs = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
    return logs.mul_(p).sum(-1).double().cpu().numpy()


def cka(X: Tensor, Y: Tensor, debiased: bool = True) -> float:
    """How alike two sets of vectors are up to rotation and scale, (n, p) and (n, q): 1 the same; debiased, 0 by chance.

    https://arxiv.org/abs/1905.00414, debiased as in https://arxiv.org/abs/2010.15327

    >>> X = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> round(cka(X, X.flip(1)), 4)
    1.0
    """
    return float(_alike(X[None], Y[None], debiased)[0, 0])


def cka_matrix(features: Tensor) -> np.ndarray:
    """Debiased CKA of all pairs, without any n×n matrix: (H, n, e) → (H, H)."""
    return _alike(features, features)


def permuted_cka(features: Tensor, seed: int, heads: int = 32, draws: int = 4) -> np.ndarray:
    """What 95 % of pairs stay below when the rows of one head are permuted; on some of the heads."""
    dice = np.random.default_rng(seed)
    some = features[torch.from_numpy(dice.permutation(len(features))[:heads])]
    made = [_alike(some, some[:, torch.from_numpy(dice.permutation(some.shape[1]))]) for _ in range(draws)]
    return np.array(np.nanquantile(made, 0.95) if not np.isnan(made).all() else np.nan)


def _alike(X: Tensor, Y: Tensor, debiased: bool = True) -> np.ndarray:
    n = X.shape[1]
    if debiased and n < 4:
        return np.full((len(X), len(Y)), np.nan)
    same = X is Y
    X = X - X.mean(1, keepdim=True)
    Y = X if same else Y - Y.mean(1, keepdim=True)

    def independence(A: Tensor, B: Tensor) -> np.ndarray:
        """HSIC; debiased, of rows against *other* rows only. Of centred rows the sums over rows vanish."""
        cross = square_norms(A) if A is B else product_norms(A.mT, B)
        if not debiased:
            return cross
        a, b = (x.double().square().sum(-1).cpu().numpy() for x in (A, B))  # (H, n): each row with itself
        return cross - n / (n - 2) * a @ b.T + np.outer(a.sum(1), b.sum(1)) / (n - 1) / (n - 2)

    own = [np.array([independence(x[None], x[None])[0, 0] for x in side]) for side in (X, Y)]
    return _cosines(independence(X, Y), *own)


def _cosines(products: np.ndarray, squares: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    # A debiased square may fall below 0 where there is next to nothing: that has no direction.
    sizes = squares.clip(min=0)[:, None] * (squares if others is None else others).clip(min=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sizes > 0, products / np.sqrt(sizes), np.nan)


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)


def _next_text(x: Tensor, texts: int) -> Tensor:
    """Every text replaced by the next: (H, B·r, ·)."""
    return x.unflatten(1, (texts, -1)).roll(1, 1).flatten(1, 2)
