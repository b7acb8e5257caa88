"""Accuracy of a model of the synthetic language on cloze probes: positions at which one word is correct."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from headwise.errors import UnsupportedModelError
from headwise.model import Transformer, eval_mode
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.synthetic import VOCABULARY, ClozeProbe, SyntheticLanguage, cloze_probes
from headwise.text.synthetic.cloze_probes import PROBE_KINDS


class ClozeScore(NamedTuple):
    """Accuracy on one kind of cloze probe.

    Attributes:
        probe: Kind of probe.
        num_probes: Number of probes.
        accuracy: Accuracy of the top prediction of the model among all words.
        chance_accuracy: Accuracy of guessing among the candidate words.
        bigram_accuracy: Accuracy of the candidate word that follows the previous word most often.
    """

    probe: str
    num_probes: int
    accuracy: float
    chance_accuracy: float
    bigram_accuracy: float


def supports_synthetic_eval(model: Transformer) -> bool:
    """Return whether the model is a decoder with the vocabulary of the synthetic language."""
    tokenizer = model.tokenizer
    return (
        model.spec.kind == "decoder"
        and isinstance(tokenizer, Tokenizer)
        and set(tokenizer.backend.get_vocab()) >= set(VOCABULARY)
    )


def synthetic_eval(
    model: Transformer, *, documents: int = 1000, split: str = "held-out", seed: int = 1
) -> tuple[ClozeScore, ...]:
    """Evaluate a model on cloze probes of the synthetic language.

    Args:
        model: A decoder trained on the synthetic language.
        documents: Number of documents.
        split: "held-out" uses word pairs that never occur in training, "train" those of training.
        seed: Seed of the documents.

    Returns:
        Accuracy for each kind of probe.
    """
    tokenizer = model.tokenizer
    if (
        not isinstance(tokenizer, Tokenizer)
        or tokenizer.encode("the dog .", add_special_tokens=False) == [tokenizer.unk] * 3
    ):
        raise UnsupportedModelError(
            "model: its tokenizer does not have the words of the synthetic language. "
            "Use a model trained on it: hw.train(hw.preset('synthetic'))."
        )
    bigrams = bigram_counts(islice(SyntheticLanguage(seed + 1), 4 * documents))
    correct, chance_correct, bigram_correct, counts = (defaultdict(float) for _ in range(4))
    for document, probe, prediction in _predictions(
        model, tokenizer, islice(SyntheticLanguage(seed, split), documents)
    ):
        word, previous = document.words[probe.position], document.words[probe.position - 1]
        counts[probe.kind] += 1
        correct[probe.kind] += prediction == word
        chance_correct[probe.kind] += 1 / len(probe.choices)
        bigram_correct[probe.kind] += max(probe.choices, key=lambda choice: bigrams[previous, choice]) == word
    return tuple(
        ClozeScore(
            kind,
            int(counts[kind]),
            *(count[kind] / counts[kind] for count in (correct, chance_correct, bigram_correct)),
        )
        for kind in PROBE_KINDS
        if counts[kind]
    )


def bigram_counts(documents: Iterable[Document]) -> Counter[tuple[str, str]]:
    """Count how often each word follows each other word."""
    return Counter(pair for document in documents for pair in pairwise(document.words))


@torch.no_grad()
def _predictions(
    model: Transformer, tokenizer: Tokenizer, documents: Iterable[Document]
) -> Iterator[tuple[Document, ClozeProbe, str]]:
    """Yield the top prediction of the model at each probe. Documents of similar length are batched."""
    prefix_length = len(tokenizer.template_ids[0])
    items = sorted(((d, cloze_probes(d)) for d in documents), key=lambda pair: len(pair[0].words))
    for first in range(0, len(items), 32):
        batch = items[first : first + 32]
        rows = [tokenizer.encode(document.text) for document, _ in batch]
        max_length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (max_length - len(row)) for row in rows], device=model.device)
        with eval_mode(model):
            predicted = model(ids).argmax(-1).tolist()  # (B, T); predictions after the end of a document are not used
        for (document, probes), row in zip(batch, predicted, strict=True):
            for probe in probes:
                # The position before the word predicts it.
                yield (document, probe, tokenizer.token(row[prefix_length + probe.position - 1]))
