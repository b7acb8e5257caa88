"""Which head is which: for every head of one model the head of another that does the same, on texts both read.

Two models may have other tokenizers, widths and head counts, so heads are compared word by word: where they look, as
Jensen–Shannon divergence of rows over the words of a text, and what they write, as how alike words are made by it (linear
CKA, https://arxiv.org/abs/1905.00414). The partner is chosen on one half of the texts and judged on the other, beside heads
that know nothing: the best of all heads of three untrained twins of the other model, chosen and judged alike. Two heads are
said to do the same where they are less than half as far apart as those, and nearer on more texts than chance would have it.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.statistics import max_t
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel, quiet
from headwise.spec import Address
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus

WORDS = 96  # of a text; what is longer is left out
FEWEST = 3  # words: in less there is nothing to tell
TWINS = 3  # untrained ones: how near a head comes by chance hangs on their weights, too
CERTAIN, NEAR = 0.05, 0.5  # two heads do the same below this family-wise p, at less than this share of the distance
CELLS = 1 << 22  # weights compared at once


@dataclass(frozen=True)
class Partner:
    """A head, the head of the other model that looks most like it, and how sure that is."""

    head: Address
    like: Address
    distance: float  # in bits, on the texts that were not chosen on: 0 is the same everywhere, 1 never the same
    untrained: float  # the same for the best head of the untrained twins
    p: float  # family-wise, that it is no nearer than that
    write: float | None  # how alike the words are made by what they write, 0 to 1; None where it cannot be shown
    roles: tuple[str, str] | None  # theirs, where profiles were given

    @property
    def matches(self) -> bool:
        """Whether they do the same, beyond what heads that know nothing have in common."""
        return self.p < CERTAIN and self.distance < NEAR * self.untrained


@dataclass(frozen=True)
class Match:
    """Every head of the second model with its partner in the first."""

    partners: tuple[Partner, ...]
    texts: tuple[int, int]  # chosen on, judged on

    def __iter__(self) -> Iterator[Partner]:
        return iter(self.partners)

    def __len__(self) -> int:
        return len(self.partners)

    def __getitem__(self, head: str | Address) -> Partner:
        wanted = Address.parse(head) if isinstance(head, str) else head
        for partner in self.partners:
            if partner.head == wanted:
                return partner
        raise HeadwiseError(f"there is no head {wanted}; there are {len(self.partners)}.")

    @property
    def matched(self) -> tuple[Partner, ...]:
        """Those that do the same."""
        return tuple(partner for partner in self.partners if partner.matches)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = [
            {**asdict(one), "head": str(one.head), "like": str(one.like), "matches": one.matches}
            for one in self.partners
        ]
        return {"texts": list(self.texts), "heads": rows}


def match(
    a: AnyModel,
    b: AnyModel,
    corpus: Any = None,
    *,
    texts: int = 64,
    profiles: tuple[Profile, Profile] | None = None,
    seed: int = 0,
) -> Match:
    """For every head of `b` the head of `a` that does the same, on up to `texts` texts; none: the probe set.

    For a model and its cut or distilled child, two seeds of one recipe, or two families. `profiles` of a and b tell roles.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(replace(preset("nano").resized(layers=2, heads=2), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> found = match(model, model, texts=8)
    >>> [str(one.like) for one in found], found["1.0"].distance
    (['0.0', '0.1', '1.0', '1.1'], 0.0)
    """
    for model in (a, b):
        if model.spec.kind == "encoder-decoder":
            raise HeadwiseError("heads are matched on single texts; an encoder-decoder reads two.")
        if not model.spec.addresses:
            raise HeadwiseError("a model without heads has none to match.")
    read = _texts(a, b, corpus, texts)
    with quiet(a), quiet(b), torch.no_grad():
        writes, near = (_Writes(a), _Writes(b)), []
        for text in read:
            first, second = _maps(a, text), _maps(b, text)
            near.append(_distances(first[0], second[0]))
            for one, made in zip(writes, (first, second), strict=True):
                one.add(made[1])
        null = []
        for i in range(TWINS):  # one after the other: each is as large as the model
            twin = a.untrained(seed * TWINS + i).eval()
            null.append([_distances(_maps(twin, text)[0], _maps(b, text)[0]) for text in read])
    near, null = np.stack(near), np.concatenate([np.stack(some) for some in null], 1)  # (texts, heads of a, heads of b)
    choosing, judging = np.arange(len(read)) % 2 == 0, np.arange(len(read)) % 2 == 1
    chosen, unlearned = (some[choosing].mean(0).argmin(0) for some in (near, null))  # (heads of b,)
    heads = np.arange(near.shape[2])
    distance, untrained = near[judging][:, chosen, heads], null[judging][:, unlearned, heads]  # (texts, heads of b)
    p, _ = max_t(untrained, distance, np.ones_like(distance), seed=seed)
    alike = _cka(*writes)
    ours, theirs = a.spec.addresses, b.spec.addresses
    partners = tuple(
        Partner(
            head,
            ours[chosen[i]],
            float(distance[:, i].mean()),
            float(untrained[:, i].mean()),
            float(p[i]),
            None if alike is None else float(alike[chosen[i], i]),
            None if profiles is None else (profiles[0][ours[chosen[i]]].role, profiles[1][head].role),
        )
        for i, head in enumerate(theirs)
    )
    return Match(partners, (int(choosing.sum()), int(judging.sum())))


def _texts(a: AnyModel, b: AnyModel, corpus: Any, most: int) -> list[str]:
    """Texts that both can read whole, of a few words."""
    tokenizers = tokenizer_of(a), tokenizer_of(b)
    longest = [model.spec.context if model.spec.positions == "learned" else None for model in (a, b)]

    def fits(text: str) -> bool:
        if not FEWEST <= len(tokenizers[0].align(text).words) <= WORDS:
            return False
        sizes = [len(one.encode(text)) for one in tokenizers]
        return all(most is None or size <= most for size, most in zip(sizes, longest, strict=True))

    corpus = Corpus.probe() if corpus is None else Corpus.of(corpus)
    made = list(islice(dict.fromkeys(piece.text for piece in corpus.pieces() if fits(piece.text)), most))
    if len(made) < 4:
        raise HeadwiseError(
            f"heads are matched on at least 4 different texts of {FEWEST} to {WORDS} words that both models can read; "
            f"there are {len(made)}."
        )
    return made


def _maps(model: AnyModel, text: str) -> tuple[Tensor, Tensor | None]:
    """Where heads look and what they write, word by word: maps (H, W, W + 1), the last column what is on no word; states of
    what is written (H, W, D), or None where W_O cannot be shown."""
    aligned = tokenizer_of(model).align(text)
    maps: dict[Address, Tensor] = {}
    wrote: dict[Address, Tensor] = {}

    def listener(seen: Seen) -> None:
        mean, total = _words(aligned, seen.q)
        weights = mean @ seen.maps()[0].to(mean) @ total  # (H, W, W)
        states = mean @ seen.z[0].to(mean)  # (H, W, e)
        try:
            written = torch.einsum("hwe,hed->hwd", states, seen.site.W_O.to(states))
        except HeadwiseError:
            written = None
        for i, head in enumerate(seen.site.addresses):
            maps[head] = weights[i]
            if written is not None:
                wrote[head] = written[i]

    with ExitStack() as stack:
        for site in model.all_sites():
            stack.enter_context(site.listen(listener))
        model(torch.tensor([aligned.ids], device=model.device), hidden=True)
    made = torch.stack([maps[head] for head in model.spec.addresses]).cpu()
    made = torch.cat((made, (1 - made.sum(-1, keepdim=True)).clamp(min=0)), -1)
    made = made / made.sum(-1, keepdim=True)  # a token of two words is counted in both
    whole = len(wrote) == len(maps)
    return made, torch.stack([wrote[head] for head in model.spec.addresses]).cpu() if whole else None


def _words(aligned: Alignment, like: Tensor) -> tuple[Tensor, Tensor]:
    """What takes means over the tokens of a word, (W, T), and what adds them up, (T, W), in float64."""
    total = torch.zeros(len(aligned.ids), len(aligned.words), dtype=torch.double, device=like.device)
    for word, tokens in enumerate(aligned.tokens_of_word):
        total[list(tokens), word] = 1.0
    mean = total.mT / total.sum(0)[:, None].clamp(min=1)
    return mean, total


def _distances(ours: Tensor, theirs: Tensor) -> np.ndarray:
    """Mean Jensen–Shannon divergences of rows in bits, the first row aside: (H, W, S), (K, W, S) → (H, K)"""
    ours, theirs = ours[:, 1:], theirs[:, 1:]
    made = np.empty((len(ours), len(theirs)))
    entropy = _entropy(theirs)  # (K, W)
    step = max(1, CELLS // max(1, theirs.numel()))
    for start in range(0, len(ours), step):
        some = ours[start : start + step, None]  # (h, 1, W, S)
        apart = _entropy((some + theirs) / 2) - (_entropy(some) + entropy) / 2  # (h, K, W)
        made[start : start + step] = apart.mean(-1).clamp(min=0).numpy() / np.log(2)
    return made


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


class _Writes:
    """What the heads of a model wrote at all words, or nothing, where a text does not show it."""

    def __init__(self, model: AnyModel) -> None:
        self.model, self.parts, self.known = model, list[Tensor](), True

    def add(self, written: Tensor | None) -> None:
        """(H, W, D) of one text."""
        self.known = self.known and written is not None
        if self.known and written is not None:
            self.parts.append(written.float())

    def alike(self) -> Tensor:
        """How alike what is written makes any two words, centred and normed: (H, n²)"""
        states = torch.cat(self.parts, 1)[:, :256].double()  # (H, n, D): a few hundred words tell
        states = states - states.mean(1, keepdim=True)
        gram = (states @ states.mT).flatten(1)
        return gram / gram.norm(dim=1, keepdim=True).clamp(min=1e-30)


def _cka(ours: _Writes, theirs: _Writes) -> np.ndarray | None:
    """Linear CKA of what heads write: (heads of a, heads of b)"""
    if not (ours.known and theirs.known):
        return None
    return (ours.alike() @ theirs.alike().mT).clamp(0, 1).numpy()
