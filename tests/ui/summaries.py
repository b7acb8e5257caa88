"""Summaries of heads with known behavior: constructed attention over gold documents, and constructed models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch

from headwise.analysis.head_facts import HeadFacts
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.analysis.recording.batching import TextSample, make_batch
from headwise.analysis.recording.text_hash_split import bucket_of_text
from headwise.analysis.roles.profile_result import Profile, ProfileSums, build_profile
from headwise.analysis.roles.roles import assess, score
from headwise.compression.head_compression_cost import HeadCompressionCost
from headwise.kernels import causal
from headwise.spec import Address
from headwise.text import Alignment
from headwise.text.annotated_document import Document, Relation
from headwise.text.corpus import Corpus
from headwise.text.probe import probe_set
from headwise.text.token_alignment import find_word_spans
from headwise.ui.head_summary import summary_lines
from tests.analysis.dense_reference import call_from_scores

# For each word of a document, the position of the word with all the weight.
Rule = Callable[[Document], Sequence[int]]
SHARP = 200.0  # a score that dominates the softmax
MARKS = {"[SEP]": "special", ",": "delimiter", "Anna": "capitalized", "7": "digit"}


def summary(
    profile: Profile, head: str, facts: HeadFacts | None = None, cost: HeadCompressionCost | None = None
) -> list[str]:
    """Return the summary lines of one head."""
    return [sentence.text for sentence in summary_lines(profile, profile[head], facts, cost)]


def profile_of(
    documents: Sequence[Document], rules: Sequence[Rule], *, ahead: bool = True, surface: bool = False
) -> Profile:
    """Return the profile of heads that attend by rules. Every word is one token.

    Args:
        documents: Input documents with gold arcs.
        rules: One rule per head.
        ahead: Whether heads see later words.
        surface: Measure offsets and token classes instead of relations.
    """
    vocabulary = sorted({word for document in documents for word in document.words})
    accumulator, heads = Accumulator(len(rules)), tuple(Address.parse(f"0.{number}") for number in range(len(rules)))
    flags = torch.zeros(len(vocabulary), len(CLASSES))
    for word, name in MARKS.items():
        if word in vocabulary:
            flags[vocabulary.index(word), CLASSES.index(name)] = 1
    relations = None if surface else RelationMetric.of(accumulator, documents, causal=not ahead)
    metrics: list[Metric] = default_metrics(flags) if relations is None else [relations]
    runner = MetricRunner(accumulator, metrics)
    for number, document in enumerate(documents):
        spans = find_word_spans(document.text, document.words)
        ids = [vocabulary.index(word) for word in document.words]
        aligned = Alignment.of(document.text, ids, document.words, spans, document.words)
        sample = TextSample(
            number, bucket_of_text(document.text), aligned.ids, document, partial(lambda alignment: alignment, aligned)
        )
        eye = torch.eye(len(ids), dtype=torch.float64)
        scores = torch.stack([SHARP * eye[list(rule(document))] for rule in rules])[None]
        runner.on_call(call_from_scores(scores, None if ahead else causal()), make_batch([sample]), 0)
    metric_specs = {metric_spec.name: metric_spec for metric in metrics for metric_spec in metric.metric_specs}
    about = {"texts": len(documents), "layers": ["0"], "corpus": "texts made by hand", "relations_corpus": "gold arcs"}
    sums = ProfileSums(
        heads, accumulator, relations, [[] for _ in rules], ExampleStore(len(rules)), about, metric_specs
    )
    return build_profile(sums, *assess(score(accumulator, relations), len(heads), about))


def follow(*relations: str, rate: float = 1.0, gold: dict[str, Document] | None = None) -> Rule:
    """Attend along the gold arcs of relations such as `possessive >` with probability `rate`; else to the first word.

    Args:
        relations: Names and directions of relations.
        rate: Fraction of texts in which arcs are followed.
        gold: Documents whose arcs are followed, by text. None: the arcs of the input document.
    """

    def rule(document: Document) -> list[int]:
        targets = [0] * len(document.words)
        if np.random.default_rng(list(document.text.encode())).random() >= rate:
            return targets
        for arc in (gold or {}).get(document.text, document).relations:
            for relation in relations:
                name, direction = relation.rsplit(" ", 1)
                if name == arc.name:
                    source, target = (arc.source, arc.target) if direction == ">" else (arc.target, arc.source)
                    targets[source] = targets[source] or target
        return targets

    return rule


def shuffled_gold(documents: Sequence[Document], seed: int = 0) -> list[Document]:
    """Return the texts with random targets for the arcs, never the first word nor the gold target."""
    draw, shuffled = np.random.default_rng(seed), []
    for document in documents:
        gold = {frozenset((arc.source, arc.target)) for arc in document.relations}
        arcs = []
        for arc in document.relations:
            free = [i for i in range(1, len(document.words)) if i != arc.source and {i, arc.source} not in gold]
            arcs.append(Relation(arc.name, arc.source, int(draw.choice(free))))
        shuffled.append(replace(document, relations=tuple(arcs)))
    return shuffled


# Heads that follow gold arcs.

GOLD = {document.text: document for document in probe_set()}
ARCS = tuple(
    f"{relation} {direction}"
    for relation in sorted({a.name for d in probe_set() for a in d.relations})
    for direction in "><"
)
SEVERAL = ("bracket >", "possessive >", "quote >", "cause-effect >", "question-answer <")


def attend_to_owned(document: Document) -> list[int]:
    """Attend from a possessive pronoun to the next word, which is the possession or modifies it."""
    pronouns = ("his", "her", "its", "their", "whose")
    last = len(document.words) - 1
    return [min(place + 1, last) if word in pronouns else 0 for place, word in enumerate(document.words)]


def several(document: Document) -> list[int]:
    """Follow five relations, each in a smaller fraction of its texts than the one before."""
    rules = [follow(name, rate=rate) for name, rate in zip(SEVERAL, (1.0, 0.95, 0.9, 0.75, 0.6), strict=True)]
    return [max(targets) for targets in zip(*(rule(document) for rule in rules), strict=True)]


@cache
def followers() -> dict[str, list[str]]:
    """Return summaries on the gold arcs of the probe set, by the rule of the head."""
    rules = {name: follow(name) for name in ARCS}
    rules |= {
        "possessive both ways": follow("possessive >", "possessive <"),
        "possessive > at times": follow("possessive >", rate=0.7),
        "owned": attend_to_owned, "several": several, "first word": follow(),
    }  # fmt: skip
    return _named(profile_of(probe_set(), list(rules.values())), rules)


@cache
def followers_of_shuffled_gold() -> dict[str, list[str]]:
    """Return the summaries of the gold-arc heads on arcs with random targets."""
    rules = {name: follow(name, gold=GOLD) for name in ARCS}
    return _named(profile_of(shuffled_gold(probe_set()), list(rules.values())), rules)


@cache
def synthetic_followers() -> dict[str, list[str]]:
    """Return summaries on the gold arcs, phrases and word classes of the synthetic language, and on a renamed relation."""
    corpus = Corpus.synthetic("held-out", documents=150, seed=1)
    documents = [_with_nsubj(document) for document in corpus.items() if isinstance(document, Document)]
    rules: dict[str, Rule] = {
        f"{name} {direction}": follow(f"{name} {direction}")
        for name in ("copy", "delimiter", "nsubj")
        for direction in "><"
    }
    for direction, later in ((">", True), ("<", False)):
        rules[f"same phrase {direction}"] = partial(attend_to_mate, mates=phrase_mates, later=later)
        rules[f"same class {direction}"] = partial(attend_to_mate, mates=class_mates, later=later)
    return _named(profile_of(documents, list(rules.values())), rules)


def attend_to_mate(document: Document, mates: Callable[[Document, int], set[int]], *, later: bool) -> list[int]:
    """Attend to the nearest mate of a word, after it or before it; else to the first word."""
    targets = []
    for place in range(len(document.words)):
        free = sorted(mate for mate in mates(document, place) if (mate > place if later else 0 < mate < place))
        targets.append((free[0] if later else free[-1]) if free else 0)
    return targets


def phrase_mates(document: Document, place: int) -> set[int]:
    """Return the words in the same phrase of at most 8 words."""
    phrases = [range(*phrase) for phrase in document.phrases if phrase[1] - phrase[0] <= 8]
    return {mate for phrase in phrases if place in phrase for mate in phrase}


def class_mates(document: Document, place: int) -> set[int]:
    """Return the words of the same word class."""
    return {mate for mate, kind in enumerate(document.classes) if kind == document.classes[place]}


@cache
def surface_heads() -> dict[str, list[str]]:
    """Return summaries of heads that attend to token classes, to distant tokens, or to attention sinks."""
    draw, documents = np.random.default_rng(0), []
    for number in range(60):
        words = [f"w{i}" for i in draw.integers(0, 400, 56)]
        for place, mark in zip(draw.choice(np.arange(2, 12), 4, replace=False), MARKS, strict=True):
            words[place] = mark
        documents.append(Document.of([f"text{number}", *words]))
    rules: dict[str, Rule] = {name: partial(attend_to_word, word=word) for word, name in MARKS.items()}
    rules |= {
        "before delimiter": lambda document: [max(place - 1, 0) for place in attend_to_word(document, ",")],
        "long range": lambda document: [max(place - 32 - place % 7, 0) for place in range(len(document.words))],
        "near": lambda document: [max(place - 20 - place % 7, 0) for place in range(len(document.words))],
        "first token": lambda document: [0] * len(document.words),
    }
    return _named(profile_of(documents, list(rules.values()), ahead=False, surface=True), rules)


def attend_to_word(document: Document, word: str) -> list[int]:
    """Attend to a word wherever it is visible; else to the token itself."""
    at = document.words.index(word)
    return [at if at <= place else place for place in range(len(document.words))]


def _with_nsubj(document: Document) -> Document:
    """Return the subject-verb arcs under their treebank name."""
    renamed = (arc._replace(name="nsubj") if arc.name == "subject-verb" else arc for arc in document.relations)
    return replace(document, relations=tuple(renamed))


def _named(profile: Profile, names: dict[str, Rule]) -> dict[str, list[str]]:
    return {name: summary(profile, str(address)) for name, address in zip(names, profile.addresses, strict=True)}
