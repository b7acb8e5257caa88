"""The retrieval score: of the tokens a model copies from a needle in a haystack, the share at which the head's largest weight
is on the token being copied (https://arxiv.org/abs/2404.15574).

Texts, of the probe set if no others are given, are laid end to end; among them stands a needle, and at the end the needle is
begun again. The model goes on with it; a token counts if the model itself would have written it. The baseline is how often
the largest weight is on the same place when another needle stands there.
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

# haystacks; tokens of a needle, of its beginning that is given, and around it
TEXTS, NEEDLE, CUE, HAYSTACK = 32, 10, 3, 48


@dataclass(frozen=True, eq=False)
class NeedleText:
    """A haystack with a needle, the same with another needle in its place, and where each copied token comes from."""

    ids: tuple[int, ...]
    control_ids: tuple[int, ...]
    start: int  # where the needle stands
    repeat_start: int  # where it is begun again

    @property
    def copy_source_positions(self) -> list[int]:
        """For each row the place of the token to be written next, in the needle; -1: nothing is copied there."""
        positions = [-1] * len(self.ids)
        for step in range(CUE - 1, NEEDLE - 1):
            positions[self.repeat_start + step] = self.start + step + 1
        return positions


class RetrievalMetric(ControlledTextMetric, AttentionToPosition):
    """`hw.profile(model, metrics=[RetrievalMetric()])`; for decoders, whose next token is known. Others have none of it.

    >>> RetrievalMetric().names
    ('retrieval', 'retrieval baseline', 'retrieval value-weighted')
    """

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus  # where needles and haystacks are taken from
        self.positions: dict[tuple[int, ...], list[int]] = {}  # where each row should look, by the ids of a text
        super().__init__(
            "retrieval", lambda text: self.positions[text.ids], label="copied tokens it looks at hardest",
            high_means="finds what is copied", hue=285, hits=True, merge=IDENTICAL, corpus_label="needles in texts",
        )  # fmt: skip

    def texts_and_controls(self, model: ModelProtocol, seed: int) -> tuple[list[TextSample], list[TextSample]]:
        """Haystacks, and the same with other needles."""
        if model.spec.kind != "decoder" or model.output is None:
            return [], []
        needles, tokenizer = make_needle_texts(model, self.corpus, seed), tokenizer_of(model)
        samples = [sample_from_ids(index, needle.ids, tokenizer) for index, needle in enumerate(needles)]
        others = [sample_from_ids(index, needle.control_ids, tokenizer) for index, needle in enumerate(needles)]
        copied = _copied_positions(model, samples)
        for needle in needles:  # the same rows of both
            correct = [position if position in copied[needle.ids] else -1 for position in needle.copy_source_positions]
            self.positions[needle.ids] = self.positions[needle.control_ids] = correct
        return samples, others


def make_needle_texts(model: ModelProtocol, corpus: Any = None, seed: int = 0, texts: int = TEXTS) -> list[NeedleText]:
    """Needles are beginnings of texts without a repeated token, haystacks the other texts; none where there is no room."""
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
        first = int(rng.integers(len(hay) // 4, len(hay) // 2 + 1))  # no fixed distance leads there
        left, right = hay[:first], hay[first:]
        start = len(prefix) + len(left)
        ids, control = ((*prefix, *left, *inserted, *right, *needle) for inserted in (needle, other))
        haystacks.append(NeedleText(ids, control, start, start + NEEDLE + len(right)))
    return haystacks


def _copied_positions(model: ModelProtocol, samples: list[TextSample]) -> dict[tuple[int, ...], set[int]]:
    """For each text the places from which the model copies: there it would write the next token of the needle itself."""
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
