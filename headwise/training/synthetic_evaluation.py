"""What a model of the synthetic language knows: at places where one word is right, is it the model's first choice?"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from headwise.errors import HeadwiseError
from headwise.model import Transformer, eval_mode
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.synthetic import VOCABULARY, ClozeProbe, SyntheticLanguage, cloze_probes
from headwise.text.synthetic.cloze_probes import PROBE_KINDS


class ClozeScore(NamedTuple):
    """One kind of quiz: how many, the share answered rightly, and what guessing and a bigram model would get."""

    probe: str
    num_probes: int
    accuracy: float  # by the model's first choice among all words
    chance_accuracy: float  # by guessing among the words that compete
    bigram_accuracy: float  # by the one of those that follows the word before most often


def supports_synthetic_eval(model: Transformer) -> bool:
    """Whether the exam is for this model: a decoder that reads the words of the synthetic language."""
    tokenizer = model.tokenizer
    return (
        model.spec.kind == "decoder"
        and isinstance(tokenizer, Tokenizer)
        and set(tokenizer.backend.get_vocab()) >= set(VOCABULARY)
    )


def synthetic_eval(
    model: Transformer, *, documents: int = 1000, split: str = "held-out", seed: int = 1
) -> tuple[ClozeScore, ...]:
    """Put a model to the test on documents of the synthetic language; by default on word pairs that training never has."""
    tokenizer = model.tokenizer
    if (
        not isinstance(tokenizer, Tokenizer)
        or tokenizer.encode("the dog .", add_special_tokens=False) == [tokenizer.unk] * 3
    ):
        raise HeadwiseError("the exam is for models of the synthetic language, trained with its words.")
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
    """How often each word follows each."""
    return Counter(pair for document in documents for pair in pairwise(document.words))


@torch.no_grad()
def _predictions(
    model: Transformer, tokenizer: Tokenizer, documents: Iterable[Document]
) -> Iterator[tuple[Document, ClozeProbe, str]]:
    """The model's first choice at each quiz; documents of like length are read together."""
    prefix_length = len(tokenizer.template_ids[0])
    items = sorted(((d, cloze_probes(d)) for d in documents), key=lambda pair: len(pair[0].words))
    for first in range(0, len(items), 32):
        batch = items[first : first + 32]
        rows = [tokenizer.encode(document.text) for document, _ in batch]
        max_length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (max_length - len(row)) for row in rows], device=model.device)
        with eval_mode(model):
            predicted = model(ids).argmax(-1).tolist()  # (B, T); what is behind a document's end is not asked for
        for (document, probes), row in zip(batch, predicted, strict=True):
            for probe in probes:
                # the word before it asks
                yield (document, probe, tokenizer.token(row[prefix_length + probe.position - 1]))
