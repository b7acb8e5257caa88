"""Match the heads of two models: for every head of one model, find the most similar head of the other.

The models may have different tokenizers, widths and head counts, so heads are compared per word: attention by the
Jensen–Shannon divergence of rows over the words of a text, and outputs by linear CKA over words
(https://arxiv.org/abs/1905.00414). The partner is selected on one half of the texts and evaluated on the other half. The
baseline is the best head among three untrained copies of the other model, selected and evaluated in the same way. Two heads
match if their distance is less than half of the baseline, and the difference is significant over texts.
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
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import float64_device, to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.text.token_alignment import Alignment

MAX_WORDS = 96  # longer texts are skipped
MIN_WORDS = 3  # shorter texts are skipped
NUM_TWINS = 3  # untrained copies; the baseline distance also depends on their random weights
# heads match below this family-wise p-value and below this fraction of the baseline distance
MAX_P, MAX_DISTANCE_RATIO = 0.05, 0.5
CHUNK_WEIGHTS = 1 << 22  # attention weights compared at once


@dataclass(frozen=True)
class HeadMatch:
    """A head and the most similar head of the other model.

    Attributes:
        head: Head of the second model.
        partner: Most similar head of the first model.
        distance: Mean Jensen–Shannon divergence of attention rows in bits on held-out texts. 0 for equal rows, 1 for
            disjoint rows.
        untrained_distance: Distance to the best head of the untrained copies (baseline).
        p: Family-wise p-value of the hypothesis that `distance` is not smaller than the baseline.
        output_similarity: Linear CKA of the outputs, 0 to 1. None if W_O of a layer is not accessible.
        roles: Roles of partner and head. None without profiles.
    """

    head: Address
    partner: Address
    distance: float
    untrained_distance: float
    p: float
    output_similarity: float | None
    roles: tuple[str, str] | None

    @property
    def is_match(self) -> bool:
        """Whether the heads match: significant, and less than half of the baseline distance."""
        return self.p < MAX_P and self.distance < MAX_DISTANCE_RATIO * self.untrained_distance


@dataclass(frozen=True)
class NearestHeadMatches:
    """The most similar head in the first model for every head of the second. `matching["5.1"]` returns one match.

    Attributes:
        matches: One entry per head of the second model.
        texts: Number of texts for selection and for evaluation.
    """

    matches: tuple[HeadMatch, ...]
    texts: tuple[int, int]

    def __repr__(self) -> str:
        from headwise.ui.result_text import matching_table

        return matching_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import matching_table

        return matching_table(self).as_html()

    def __iter__(self) -> Iterator[HeadMatch]:
        return iter(self.matches)

    def __len__(self) -> int:
        return len(self.matches)

    def __getitem__(self, head: str | Address) -> HeadMatch:
        address = Address.parse(head) if isinstance(head, str) else head
        for head_match in self.matches:
            if head_match.head == address:
                return head_match
        raise ArgumentError(
            f"head: unknown head {address}. The matching has {len(self.matches)} heads. "
            f"List them with [match.head for match in matching]."
        )

    @property
    def matched(self) -> tuple[HeadMatch, ...]:
        """The entries that match."""
        return tuple(head_match for head_match in self.matches if head_match.is_match)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
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
) -> NearestHeadMatches:
    """Find, for every head of `b`, the most similar head of `a`.

    For a model and its pruned or distilled version, two seeds of one recipe, or two families.

    Args:
        a: First model. Partners are heads of this model.
        b: Second model.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the probe set.
        max_texts: Maximum number of texts.
        profiles: Profiles of `a` and `b`. They add the roles of the heads.
        seed: Seed of the untrained copies and of the significance test.

    Returns:
        One match per head of `b`, with distance, baseline and p-value.

    Raises:
        ArgumentError: If fewer than 4 texts fit both models.
        UnsupportedModelError: If a model is an encoder-decoder or has no heads.

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
            raise UnsupportedModelError(
                f"{'a' if model is a else 'b'}: heads of an encoder-decoder cannot be matched, because matching uses single "
                f"texts. Use a decoder or an encoder."
            )
        if not model.spec.head_addresses:
            raise UnsupportedModelError(
                f"{'a' if model is a else 'b'}: the model has no heads to match. Use a model with heads."
            )
    shared_texts = _shared_texts(a, b, corpus, max_texts)
    with eval_mode(a), eval_mode(b), torch.no_grad():
        written, distances = (_WrittenStates(a), _WrittenStates(b)), []
        for text in shared_texts:
            first, second = _word_maps(a, text), _word_maps(b, text)
            distances.append(_distances(first[0], second[0]))
            for states, result in zip(written, (first, second), strict=True):
                states.add(result[1])
        twin_distances = []
        for i in range(NUM_TWINS):  # one at a time, because each is as large as the model
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
    return NearestHeadMatches(partners, (int(choosing.sum()), int(judging.sum())))


def _shared_texts(a: ModelProtocol, b: ModelProtocol, corpus: Any, limit: int) -> list[str]:
    """Return texts of suitable length that fit the context of both models."""
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
        raise ArgumentError(
            f"corpus: at least 4 different texts of {MIN_WORDS} to {MAX_WORDS} words that fit the context of both models are "
            f"needed. Got {len(texts)}. Add texts."
        )
    return texts


def _word_maps(model: ModelProtocol, text: str) -> tuple[Tensor, Tensor | None]:
    """Run a text and average per word.

    Returns maps (H, W, W + 1), whose last column is the weight outside all words, and head outputs after W_O (H, W, D),
    or None if W_O is not accessible.
    """
    alignment = tokenizer_of(model).align(text)
    maps: dict[Address, Tensor] = {}
    written_by_head: dict[Address, Tensor] = {}

    def listener(call: AttentionCall) -> None:
        mean, total = _word_pooling_matrices(alignment, call.q)
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
    word_maps = word_maps / word_maps.sum(-1, keepdim=True)  # a token that belongs to two words is counted twice
    is_complete = len(written_by_head) == len(maps)
    return word_maps, torch.stack(
        [written_by_head[head] for head in model.spec.head_addresses]
    ).cpu() if is_complete else None


def _word_pooling_matrices(alignment: Alignment, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices that average (W, T) and sum (T, W) over the tokens of each word, in float64."""
    total = torch.zeros(
        len(alignment.ids), len(alignment.words), dtype=torch.double, device=float64_device(like.device)
    )
    for word, tokens in enumerate(alignment.tokens_of_word):
        total[list(tokens), word] = 1.0
    mean = total.mT / total.sum(0)[:, None].clamp(min=1)
    return mean, total


def _distances(maps_a: Tensor, maps_b: Tensor) -> np.ndarray:
    """Mean Jensen–Shannon divergence of rows in bits, without the first row: (H, W, S), (K, W, S) → (H, K)."""
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
    """Outputs of the heads of a model at all words. Unknown if W_O of a layer is not accessible."""

    def __init__(self, model: ModelProtocol) -> None:
        self.model, self.parts, self.is_known = model, list[Tensor](), True

    def add(self, written: Tensor | None) -> None:
        """Add the outputs of one text, (H, W, D)."""
        self.is_known = self.is_known and written is not None
        if self.is_known and written is not None:
            self.parts.append(written.float())

    def similarity(self) -> Tensor:
        """Return centered and normalized Gram matrices over words, (H, n²)."""
        states = to_float64(torch.cat(self.parts, 1)[:, :256])  # (H, n, D): 256 words are enough
        states = states - states.mean(1, keepdim=True)
        gram = (states @ states.mT).flatten(1)
        return gram / gram.norm(dim=1, keepdim=True).clamp(min=1e-30)


def _cka(states_a: _WrittenStates, states_b: _WrittenStates) -> np.ndarray | None:
    """Linear CKA of head outputs, (heads of a, heads of b)."""
    if not (states_a.is_known and states_b.is_known):
        return None
    return (states_a.similarity() @ states_b.similarity().mT).clamp(0, 1).numpy()
