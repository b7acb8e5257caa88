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

from headwise.analysis.metrics.statistics import max_t_test
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.text.token_alignment import Alignment

MAX_WORDS = 96  # of a text; what is longer is left out
MIN_WORDS = 3  # words: in less there is nothing to tell
NUM_TWINS = 3  # untrained ones: how near a head comes by chance hangs on their weights, too
# two heads do the same below this family-wise p, at less than this share of the distance
MAX_P, MAX_DISTANCE_RATIO = 0.05, 0.5
CHUNK_WEIGHTS = 1 << 22  # weights compared at once


@dataclass(frozen=True)
class HeadMatch:
    """A head, the head of the other model that looks most like it, and how sure that is."""

    head: Address
    partner: Address
    distance: float  # in bits, on the texts that were not chosen on: 0 is the same everywhere, 1 never the same
    untrained_distance: float  # the same for the best head of the untrained twins
    p: float  # family-wise, that it is no nearer than that
    # how alike the words are made by what they write, 0 to 1; None where it cannot be shown
    output_similarity: float | None
    roles: tuple[str, str] | None  # theirs, where profiles were given

    @property
    def is_match(self) -> bool:
        """Whether they do the same, beyond what heads that know nothing have in common."""
        return self.p < MAX_P and self.distance < MAX_DISTANCE_RATIO * self.untrained_distance


@dataclass(frozen=True)
class HeadMatching:
    """Every head of the second model with its partner in the first."""

    matches: tuple[HeadMatch, ...]
    texts: tuple[int, int]  # chosen on, judged on

    def __iter__(self) -> Iterator[HeadMatch]:
        return iter(self.matches)

    def __len__(self) -> int:
        return len(self.matches)

    def __getitem__(self, head: str | Address) -> HeadMatch:
        address = Address.parse(head) if isinstance(head, str) else head
        for head_match in self.matches:
            if head_match.head == address:
                return head_match
        raise HeadwiseError(f"there is no head {address}; there are {len(self.matches)}.")

    @property
    def matched(self) -> tuple[HeadMatch, ...]:
        """Those that do the same."""
        return tuple(head_match for head_match in self.matches if head_match.is_match)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = [
            {
                **asdict(head_match),
                "head": str(head_match.head),
                "partner": str(head_match.partner),
                "is_match": head_match.is_match,
            }
            for head_match in self.matches
        ]
        return {"texts": list(self.texts), "heads": rows}


def match_heads(
    a: ModelProtocol,
    b: ModelProtocol,
    corpus: Any = None,
    *,
    max_texts: int = 64,
    profiles: tuple[Profile, Profile] | None = None,
    seed: int = 0,
) -> HeadMatching:
    """For every head of `b` the head of `a` that does the same, on up to `max_texts` texts; none: the probe set.

    For a model and its cut or distilled child, two seeds of one recipe, or two families. `profiles` of a and b tell roles.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(replace(preset("nano").resized(layers=2, heads=2), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> matching = match_heads(model, model, max_texts=8)
    >>> [str(match.partner) for match in matching], matching["1.0"].distance
    (['0.0', '0.1', '1.0', '1.1'], 0.0)
    """
    for model in (a, b):
        if model.spec.kind == "encoder-decoder":
            raise HeadwiseError("heads are matched on single texts; an encoder-decoder reads two.")
        if not model.spec.head_addresses:
            raise HeadwiseError("a model without heads has none to match.")
    shared_texts = _shared_texts(a, b, corpus, max_texts)
    with eval_mode(a), eval_mode(b), torch.no_grad():
        written, distances = (_WrittenStates(a), _WrittenStates(b)), []
        for text in shared_texts:
            first, second = _word_maps(a, text), _word_maps(b, text)
            distances.append(_distances(first[0], second[0]))
            for states, result in zip(written, (first, second), strict=True):
                states.add(result[1])
        twin_distances = []
        for i in range(NUM_TWINS):  # one after the other: each is as large as the model
            twin = a.untrained(seed * NUM_TWINS + i).eval()
            twin_distances.append(
                [_distances(_word_maps(twin, text)[0], _word_maps(b, text)[0]) for text in shared_texts]
            )
    # (texts, heads of a, heads of b)
    distances, twin_distances = (
        np.stack(distances),
        np.concatenate([np.stack(values) for values in twin_distances], 1),
    )
    choosing, judging = np.arange(len(shared_texts)) % 2 == 0, np.arange(len(shared_texts)) % 2 == 1
    # (heads of b,)
    chosen, chosen_twin = (values[choosing].mean(0).argmin(0) for values in (distances, twin_distances))
    heads = np.arange(distances.shape[2])
    # (texts, heads of b)
    distance, untrained = (distances[judging][:, chosen, heads], twin_distances[judging][:, chosen_twin, heads])
    p, _ = max_t_test(untrained, distance, np.ones_like(distance), seed=seed)
    similarity = _cka(*written)
    addresses_a, addresses_b = a.spec.head_addresses, b.spec.head_addresses
    partners = tuple(
        HeadMatch(
            head,
            addresses_a[chosen[i]],
            float(distance[:, i].mean()),
            float(untrained[:, i].mean()),
            float(p[i]),
            None if similarity is None else float(similarity[chosen[i], i]),
            None if profiles is None else (profiles[0][addresses_a[chosen[i]]].role, profiles[1][head].role),
        )
        for i, head in enumerate(addresses_b)
    )
    return HeadMatching(partners, (int(choosing.sum()), int(judging.sum())))


def _shared_texts(a: ModelProtocol, b: ModelProtocol, corpus: Any, limit: int) -> list[str]:
    """Texts that both can read whole, of a few words."""
    tokenizers = tokenizer_of(a), tokenizer_of(b)
    max_lengths = [model.spec.context if model.spec.positions == "learned" else None for model in (a, b)]

    def fits(text: str) -> bool:
        if not MIN_WORDS <= len(tokenizers[0].align(text).words) <= MAX_WORDS:
            return False
        sizes = [len(tokenizer.encode(text)) for tokenizer in tokenizers]
        return all(limit is None or size <= limit for size, limit in zip(sizes, max_lengths, strict=True))

    corpus = Corpus.probe_set() if corpus is None else Corpus.of(corpus)
    texts = list(islice(dict.fromkeys(chunk.text for chunk in corpus.chunks() if fits(chunk.text)), limit))
    if len(texts) < 4:
        raise HeadwiseError(
            f"heads are matched on at least 4 different texts of {MIN_WORDS} to {MAX_WORDS} words that both models can read; "
            f"there are {len(texts)}."
        )
    return texts


def _word_maps(model: ModelProtocol, text: str) -> tuple[Tensor, Tensor | None]:
    """Where heads look and what they write, word by word: maps (H, W, W + 1), the last column what is on no word; states of
    what is written (H, W, D), or None where W_O cannot be shown."""
    alignment = tokenizer_of(model).align(text)
    maps: dict[Address, Tensor] = {}
    written_by_head: dict[Address, Tensor] = {}

    def listener(call: AttentionCall) -> None:
        mean, total = _word_matrices(alignment, call.q)
        weights = mean @ call.maps()[0].to(mean) @ total  # (H, W, W)
        states = mean @ call.z[0].to(mean)  # (H, W, e)
        try:
            written = torch.einsum("hwe,hed->hwd", states, call.hook_point.W_O.to(states))
        except HeadwiseError:
            written = None
        for i, head in enumerate(call.hook_point.head_addresses):
            maps[head] = weights[i]
            if written is not None:
                written_by_head[head] = written[i]

    with ExitStack() as stack:
        for hook_point in model.gathered_hook_points():
            stack.enter_context(hook_point.listen(listener))
        model(torch.tensor([alignment.ids], device=model.device), hidden=True)
    word_maps = torch.stack([maps[head] for head in model.spec.head_addresses]).cpu()
    word_maps = torch.cat((word_maps, (1 - word_maps.sum(-1, keepdim=True)).clamp(min=0)), -1)
    word_maps = word_maps / word_maps.sum(-1, keepdim=True)  # a token of two words is counted in both
    is_complete = len(written_by_head) == len(maps)
    return word_maps, torch.stack(
        [written_by_head[head] for head in model.spec.head_addresses]
    ).cpu() if is_complete else None


def _word_matrices(alignment: Alignment, reference: Tensor) -> tuple[Tensor, Tensor]:
    """What takes means over the tokens of a word, (W, T), and what adds them up, (T, W), in float64."""
    total = torch.zeros(len(alignment.ids), len(alignment.words), dtype=torch.double, device=reference.device)
    for word, tokens in enumerate(alignment.tokens_of_word):
        total[list(tokens), word] = 1.0
    mean = total.mT / total.sum(0)[:, None].clamp(min=1)
    return mean, total


def _distances(maps_a: Tensor, maps_b: Tensor) -> np.ndarray:
    """Mean Jensen–Shannon divergences of rows in bits, the first row aside: (H, W, S), (K, W, S) → (H, K)"""
    maps_a, maps_b = maps_a[:, 1:], maps_b[:, 1:]
    result = np.empty((len(maps_a), len(maps_b)))
    entropy = _entropy(maps_b)  # (K, W)
    step = max(1, CHUNK_WEIGHTS // max(1, maps_b.numel()))
    for start in range(0, len(maps_a), step):
        chunk = maps_a[start : start + step, None]  # (h, 1, W, S)
        divergence = _entropy((chunk + maps_b) / 2) - (_entropy(chunk) + entropy) / 2  # (h, K, W)
        result[start : start + step] = divergence.mean(-1).clamp(min=0).numpy() / np.log(2)
    return result


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


class _WrittenStates:
    """What the heads of a model wrote at all words, or nothing, where a text does not show it."""

    def __init__(self, model: ModelProtocol) -> None:
        self.model, self.parts, self.is_known = model, list[Tensor](), True

    def add(self, written: Tensor | None) -> None:
        """(H, W, D) of one text."""
        self.is_known = self.is_known and written is not None
        if self.is_known and written is not None:
            self.parts.append(written.float())

    def similarity(self) -> Tensor:
        """How alike what is written makes any two words, centred and normed: (H, n²)"""
        states = torch.cat(self.parts, 1)[:, :256].double()  # (H, n, D): a few hundred words tell
        states = states - states.mean(1, keepdim=True)
        gram = (states @ states.mT).flatten(1)
        return gram / gram.norm(dim=1, keepdim=True).clamp(min=1e-30)


def _cka(states_a: _WrittenStates, states_b: _WrittenStates) -> np.ndarray | None:
    """Linear CKA of what heads write: (heads of a, heads of b)"""
    if not (states_a.is_known and states_b.is_known):
        return None
    return (states_a.similarity() @ states_b.similarity().mT).clamp(0, 1).numpy()
