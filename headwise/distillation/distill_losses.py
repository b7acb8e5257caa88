"""The losses, one by one. Each looks at one pass of student and teacher and gives one number, 0 where they agree."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.distillation.activations import Glimpse, main_stack
from headwise.distillation.attention_kl import kl_of_rows
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.kernels.score_params import Terms, raw_scores, spread, visible_scores
from headwise.model import AnyModel
from headwise.spec import Address, SiteAddress

MOST_RELATIONS, LEAST_CHANNELS = 48, 16  # relation heads, and channels of one, as in the paper, unless said otherwise


class Hidden(nn.Module):
    """States behind chosen layers, each as a norm would read it; through a learned projection where widths differ."""

    def __init__(self, student: AnyModel, teacher: AnyModel, layers: Sequence[tuple[int, int]] | None) -> None:
        super().__init__()
        ours, theirs = student.spec.layers, teacher.spec.layers
        self.layers = tuple(layers) if layers is not None else spread_layers(ours, theirs)
        for one, other in self.layers:
            if not (0 <= one < ours and 0 <= other < theirs):
                raise HeadwiseError(
                    f"states of layers {one} and {other} were asked for; the student has layers 0 to {ours - 1}, "
                    f"the teacher 0 to {theirs - 1}."
                )
        widths = student.spec.width, teacher.spec.width
        same = widths[0] == widths[1]
        self.projections = nn.ModuleList(nn.Identity() if same else nn.Linear(*widths, bias=False) for _ in self.layers)

    def forward(self, ours: Glimpse, theirs: Glimpse, real: Tensor) -> Tensor:
        """The mean squared difference over real tokens, channels and pairs of layers."""
        total = torch.zeros((), device=real.device)
        for (one, other), project in zip(self.layers, self.projections, strict=True):
            learned = project(ours.states[one])[real].float()  # (n, D)
            taught = theirs.states[other][real].float()
            total = total + F.mse_loss(_normed(learned), _normed(taught))
        return total / len(self.layers)


class Maps(nn.Module):
    """Each of some heads looks where a teacher's head looks: KL of its rows, averaged over the pairs."""

    def __init__(self, pairs: Sequence[tuple[Address, Address]]) -> None:
        super().__init__()
        self.pairs = tuple(pairs)
        self.sites: dict[tuple[SiteAddress, SiteAddress], list[tuple[Address, Address]]] = {}
        for one, other in self.pairs:
            self.sites.setdefault((one.site, other.site), []).append((one, other))

    def forward(self, ours: Glimpse, theirs: Glimpse, real: dict[str, Tensor]) -> Tensor:
        """`real` are the tokens that count, (B, T), by stack."""
        total = torch.zeros((), device=next(iter(real.values())).device)
        for (one, other), pairs in self.sites.items():
            student, teacher = ours.calls[one], theirs.calls[other]
            rows = real[one.stack]
            for some in _alike(student, teacher, pairs):
                scores = [
                    _scores(seen, heads)
                    for seen, heads in zip((student, teacher), zip(*some, strict=True), strict=True)
                ]
                total = total + len(some) * kl_of_rows(scores[0], scores[1], rows)
        return total / len(self.pairs)


class RelationTerm(nn.Module):
    """q–q, k–k and v–v relations of one layer, its channels split anew into relation heads (https://arxiv.org/abs/2012.15828)."""

    def __init__(self, student: AnyModel, teacher: AnyModel, layers: tuple[int, int], heads: int | None) -> None:
        super().__init__()
        self.sites = _site_of(student, layers[0], "student"), _site_of(teacher, layers[1], "teacher")
        self.heads = heads
        specs = [model.spec.attention_at(site) for model, site in zip((student, teacher), self.sites, strict=True)]
        for letter, widths in zip("qkv", zip(*map(_widths, specs), strict=True), strict=True):
            relation_heads(letter, widths, heads)

    def forward(self, ours: Glimpse, theirs: Glimpse, real: dict[str, Tensor]) -> Tensor:
        """The mean over the three relations of the mean KL of their rows."""
        seen = ours.calls[self.sites[0]], theirs.calls[self.sites[1]]
        total = torch.zeros((), device=seen[0].q.device)
        for letter in "qkv":
            sides = [getattr(one, letter) for one in seen]  # (B, H, T, d)
            heads = relation_heads(letter, tuple(side.shape[1] * side.shape[3] for side in sides), self.heads)
            scores = [
                partial(_relations, resplit(side, heads), one.terms) for side, one in zip(sides, seen, strict=True)
            ]
            total = total + kl_of_rows(scores[0], scores[1], real[self.sites[0].stack])
        return total / 3


def spread_layers(ours: int, theirs: int) -> tuple[tuple[int, int], ...]:
    """For every layer of the student one of the teacher, spread evenly, the last for the last.

    >>> spread_layers(2, 6), spread_layers(3, 3)
    (((0, 2), (1, 5)), ((0, 0), (1, 1), (2, 2)))
    """
    return tuple((layer, max(0, round((layer + 1) * theirs / ours) - 1)) for layer in range(ours))


def relation_heads(letter: str, widths: tuple[int, int], count: int | None) -> int:
    """How many relation heads two widths are split into: as asked, or as many as both allow, up to 48 of 16 channels or more.

    >>> relation_heads("q", (320, 576), None), relation_heads("q", (768, 768), None), relation_heads("q", (24, 36), 4)
    (16, 48, 4)
    """
    if count is not None:
        if widths[0] % count or widths[1] % count:
            raise HeadwiseError(
                f"the {letter} of the student and of the teacher have {widths[0]} and {widths[1]} channels, which {count} "
                f"relation heads cannot share; they must divide {gcd(*widths)}."
            )
        return count
    shared = gcd(*widths)
    most = max(1, min(MOST_RELATIONS, min(widths) // LEAST_CHANNELS))
    return next(count for count in range(most, 0, -1) if shared % count == 0)


def resplit(x: Tensor, heads: int) -> Tensor:
    """The channels of all heads as so many relation heads: (B, H, T, d) → (B, R, T, H·d / R)"""
    return x.transpose(1, 2).flatten(2).unflatten(2, (heads, -1)).transpose(1, 2)


def _relations(x: Tensor, terms: Terms, rows: range) -> Tensor:
    """Scores of x with itself, some rows, where the layer's mask allows: (B, R, T, c) → (B, R, rows, T)"""
    T = x.shape[2]
    scores = (x[:, :, rows.start : rows.stop] * x.shape[-1] ** -0.5) @ x.mT
    allowed = terms.mask_block(rows, range(T), T, T, x.device)
    if allowed is None:
        return scores
    allowed = allowed if allowed.shape[1] == 1 else allowed.any(1, keepdim=True)  # relation heads are not heads
    return scores.masked_fill(~allowed, -torch.inf)


def _alike(student: Seen, teacher: Seen, pairs: list[tuple[Address, Address]]) -> list[list[tuple[int, int]]]:
    """Pairs as places on the head axes; all at once where heads of a layer have one mask, else one by one."""
    places = [(student.site.index(one), teacher.site.index(other)) for one, other in pairs]
    plain = all(
        one.terms.bias is None and (one.terms.mask is None or one.terms.mask.planes()[1] == 1)
        for one in (student, teacher)
    )
    return [places] if plain else [[place] for place in places]


def _scores(seen: Seen, heads: Sequence[int]) -> "partial[Tensor]":
    """Scores of some heads by rows; the sink, which writes nothing, is left aside."""
    terms = replace(seen.terms, sink=None)
    if len(heads) == 1:
        head, group = heads[0], terms.groups[heads[0]]
        some = terms.for_heads(range(head, head + 1), range(group, group + 1))
        return partial(_rows, seen.q[:, head : head + 1], seen.k[:, group : group + 1], some)
    which = torch.tensor(heads, device=seen.q.device)
    q, k = seen.q.index_select(1, which), spread(seen.k, tuple(terms.groups[head] for head in heads))
    return partial(_rows, q, k, replace(terms, groups=tuple(range(len(heads)))))


def _rows(q: Tensor, k: Tensor, terms: Terms, rows: range) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    scores = raw_scores(q[:, :, rows.start : rows.stop], k, terms)
    return visible_scores(scores, terms, rows, range(S), T, S)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _widths(spec) -> tuple[int, int, int]:
    """Channels of q, k and v."""
    K = len(spec.kv_ids)
    return len(spec.head_ids) * spec.head_dim, K * spec.head_dim, K * spec.value_dim


def _site_of(model: AnyModel, layer: int, who: str) -> SiteAddress:
    own = [site.address for site in model.all_sites() if site.address.stack == main_stack(model) and site.head_ids]
    number = layer if layer >= 0 else model.spec.layers + layer
    for address in own:
        if address.layer == number:
            return address
    raise HeadwiseError(
        f"the {who} has no heads in layer {layer} whose relations could be learned; it has heads in "
        f"{', '.join(str(address.layer) for address in own)}."
    )
