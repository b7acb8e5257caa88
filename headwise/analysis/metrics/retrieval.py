"""Retrieval score: how often the largest weight of a head is on the token that the model copies from a needle in a haystack
(https://arxiv.org/abs/2404.15574).

Texts are concatenated to a haystack, a needle is inserted, and the beginning of the needle is repeated at the end. The model
continues it. A token counts if the model predicts it correctly. The baseline is how often the largest weight is on the same
position if another needle is there. The default texts are those of the default corpus.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.analysis.metrics.metric import IDENTICAL, AttentionToPosition
from headwise.analysis.metrics.task_metric import BATCH_TOKENS, ControlledTextMetric, sample_from_ids
from headwise.analysis.recording.batching import TextSample, forward_batch, make_batches, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import default_corpus
from headwise.model import ModelProtocol
from headwise.text.corpus import Corpus

TEXTS = 32  # number of haystacks
NEEDLE, CUE = 10, 3  # tokens of a needle, and tokens of it that are given at the end
HAYSTACK = 48  # half of the maximum number of haystack tokens


@dataclass(frozen=True, eq=False)
class NeedleText:
    """A haystack with a needle, and a control with another needle at the same position.

    Attributes:
        ids: Token ids.
        control_ids: Token ids of the control.
        start: Position of the needle.
        repeat_start: Position at which the needle is repeated.
    """

    ids: tuple[int, ...]
    control_ids: tuple[int, ...]
    start: int
    repeat_start: int

    @property
    def copy_source_positions(self) -> list[int]:
        """Position in the needle of the next token of each row. -1 for rows that copy nothing."""
        positions = [-1] * len(self.ids)
        for step in range(CUE - 1, NEEDLE - 1):
            positions[self.repeat_start + step] = self.start + step + 1
        return positions


class RetrievalMetric(ControlledTextMetric, AttentionToPosition):
    """Retrieval score of decoders: `hw.profile(model, metrics=[RetrievalMetric()])`. Other models get no score.

    Args:
        corpus: Texts for needles and haystacks. None selects the default corpus of a profile.

    >>> RetrievalMetric().names
    ('retrieval', 'retrieval baseline', 'retrieval value-weighted')
    """

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus
        self.positions: dict[tuple[int, ...], list[int]] = {}  # target position of each row, by the ids of a text
        super().__init__(
            "retrieval", lambda text: self.positions[text.ids], label="copied tokens with the largest weight on their source",
            high_means="finds the copied token", hue=285, hits=True, merge=IDENTICAL, corpus_label="needles in texts",
        )  # fmt: skip

    def texts_and_controls(self, model: ModelProtocol, seed: int) -> tuple[list[TextSample], list[TextSample]]:
        """Return haystacks, and controls with other needles."""
        if model.spec.kind != "decoder" or model.output is None:
            return [], []
        needles, tokenizer = make_needle_texts(model, self.corpus, seed), tokenizer_of(model)
        samples = [sample_from_ids(index, needle.ids, tokenizer) for index, needle in enumerate(needles)]
        others = [sample_from_ids(index, needle.control_ids, tokenizer) for index, needle in enumerate(needles)]
        copied = _copied_positions(model, samples)
        for needle in needles:  # text and control have the same targets
            correct = [position if position in copied[needle.ids] else -1 for position in needle.copy_source_positions]
            self.positions[needle.ids] = self.positions[needle.control_ids] = correct
        return samples, others


def make_needle_texts(model: ModelProtocol, corpus: Any = None, seed: int = 0, texts: int = TEXTS) -> list[NeedleText]:
    """Make haystacks with needles. A needle is the beginning of a text without repeated tokens.

    The result is empty if the context is too short or there are fewer than two needles.
    """
    tokenizer = tokenizer_of(model)
    prefix, suffix = tokenizer.template_ids
    max_context = model.spec.max_input_tokens
    documents = default_corpus(model) if corpus is None else Corpus.of(corpus)
    encoded = [tokenizer.encode(item.text) for item in documents.items()]
    token_ids = [tuple(ids[len(prefix) : len(ids) - len(suffix)]) for ids in encoded]
    needles = list(dict.fromkeys(ids[:NEEDLE] for ids in token_ids if len(set(ids[:NEEDLE])) == NEEDLE))
    hay_length = min(2 * HAYSTACK, max_context - len(prefix) - 2 * NEEDLE)
    if hay_length < NEEDLE or len(needles) < 2:
        return []
    rng, haystacks = np.random.default_rng(seed), []
    for _ in range(texts):
        needle, other = (needles[i] for i in rng.permutation(len(needles))[:2])
        hay = [
            token
            for i in rng.permutation(len(token_ids))
            if token_ids[i][:NEEDLE] not in (needle, other)
            for token in token_ids[i]
        ]
        hay = hay[:hay_length]
        first = int(rng.integers(len(hay) // 4, len(hay) // 2 + 1))  # random, so that no fixed offset finds the needle
        left, right = hay[:first], hay[first:]
        start = len(prefix) + len(left)
        ids, control = ((*prefix, *left, *inserted, *right, *needle) for inserted in (needle, other))
        haystacks.append(NeedleText(ids, control, start, start + NEEDLE + len(right)))
    return haystacks


def _copied_positions(model: ModelProtocol, samples: list[TextSample]) -> dict[tuple[int, ...], set[int]]:
    """Return for each text the needle positions whose tokens the model predicts correctly at the end."""
    copied = {}
    for batch in make_batches(samples, BATCH_TOKENS, device=model.device):
        best = forward_batch(model, batch, hidden=False).argmax(-1)[:, :-1]  # (B, T - 1)
        correct = (best == batch.ids[:, 1:]).cpu()
        for row, sample in enumerate(batch.samples):
            repeat_start = len(sample.ids) - NEEDLE
            rows = range(repeat_start + CUE - 1, repeat_start + NEEDLE - 1)
            start = next(i for i in range(repeat_start) if sample.ids[i : i + NEEDLE] == sample.ids[repeat_start:])
            copied[sample.ids] = {start + i - repeat_start + 1 for i in rows if bool(correct[row, i])}
    return copied
