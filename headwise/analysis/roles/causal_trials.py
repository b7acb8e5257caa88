"""What the last evidence level asks: cases of a role, and beside each the same answers reached another way.

    lists    tokens in random order, said twice (induction, duplicate, previous token). Half of them or more are drawn from
             the vocabulary. The answers are tokens that the whole model foresees in a text, each where it is said for the
             first time; that text is the control
    texts    the beginning of a text, said twice, for the same roles. The answers are the tokens of the second copy. Those
             that the model foresees in the text as well have a control: the text, read once
    words    documents with a relation (brackets, quotes, if-then …): the later word of the arc, or what is said of the noun
             meant. The control is another text in which the same token is foreseen and the role has no part

Both answers are foreseen by the whole model, so that there is something to lose on either side. Why the same answer: a head
that hurts whatever is asked, or that writes answers however they were found, costs as much there
(https://arxiv.org/abs/2606.08292).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.directed_relations import CONTROLS
from headwise.analysis.metrics.induction import make_repeated_sequences
from headwise.analysis.metrics.statistics import MIN_UNITS
from headwise.analysis.metrics.task_metric import sample_from_ids
from headwise.analysis.metrics.token_classes import CLASSES, token_class_flags
from headwise.analysis.recording.batching import TextSample, make_batches, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.roles import RELATION_PROBES, ROLE_OF_RELATION
from headwise.analysis.roles.unopened_bracket_sentences import CONTROL_SENTENCES
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol
from headwise.model.loss import IGNORE_INDEX
from headwise.text.annotated_document import Document
from headwise.text.synthetic.cloze_probes import PROBE_CHOICES

MAX_LISTS = 16  # lists said twice, at most
MAX_DOCUMENTS = 20  # documents with a relation, at most
MAX_TEXTS = 64  # texts in which answers to put into lists are looked for, at most
LIST_LENGTH = 8  # tokens in a list
REPEATED_TEXT_TOKENS = 16  # tokens of a text that is said twice
MAX_TEXT_TOKENS = 24  # tokens of a text that are read for its answers
MAX_NLL = (
    3.0  # an answer counts as foreseen if it costs the whole model no more (p is .05), and a nat less than guessing
)
BATCH_TOKENS = 512  # in a batch: as a rule all cases, so that what one borrows from another is at hand
# Relations that every sentence has, so that only gold arcs can tell a word that has no part in them.
NEEDS_GOLD_ARCS = {"subject-verb", "nsubj", "coreference"}


class TrialPrompt(NamedTuple):
    """A text, and the tokens asked for, by their places; nothing behind the last of them is read."""

    sample: TextSample
    targets: Mapping[int, int]
    rivals: Mapping[int, int] = {}  # by place, a token whose surprise is subtracted: then the answer is a lead

    @property
    def truncated_sample(self) -> TextSample:
        """The text as it is read."""
        return replace(self.sample, ids=self.sample.ids[: max(self.targets)])


@dataclass(frozen=True, eq=False)
class CausalTrial:
    """Cases of a role, and for each the rows that ask for the same answers another way; no controls: none were found."""

    cases: tuple[TrialPrompt, ...]
    controls: tuple[TrialPrompt, ...] = ()
    controls_of_case: tuple[tuple[int, ...], ...] = ()  # for each case its controls
    is_suppression: bool = (
        False  # whether the role holds answers back: then what counts is what they gain without a head
    )
    single_name_prompts: tuple[TrialPrompt, ...] = ()  # one for each case
    single_name_fraction: float = 1.0  # of the loss in single-name prompts that the loss of a case must exceed
    matched: tuple[TrialPrompt, ...] = ()  # the cases with the answers that have a control; none: all answers have one

    def sum_controls_by_case(self, values: np.ndarray) -> np.ndarray:
        """Sums over the controls of each case: (controls, heads) → (cases, heads)."""
        return np.stack([values[list(indices)].sum(0) for indices in self.controls_of_case])


class DocumentSample:
    """The documents asked about, kept while a corpus streams by: of each role, and of each control, the first so many."""

    def __init__(self) -> None:
        self.samples: dict[int, TextSample] = {}
        self._counts: Counter[str] = Counter()

    def add_if_needed(self, sample: TextSample) -> None:
        """Keep a text if it is needed."""
        if sample.document is None:
            return
        relation_names = {name for name, _, _ in sample.document.relations}
        for name, where in RELATION_PROBES.items():
            role = ROLE_OF_RELATION.get(name, name)
            self._keep_if_needed(sample, role, bool(target_positions(sample, role, where)))
            self._keep_if_needed(sample, f"control of {role}", not relation_names.isdisjoint(CONTROLS.get(name, ())))

    def _keep_if_needed(self, sample: TextSample, category: str, needed: bool) -> None:
        if needed and self._counts[category] < MAX_DOCUMENTS:
            self._counts[category] += 1
            self.samples[sample.index] = sample


def repeated_list_trial(model: ModelProtocol, texts: Sequence[TextSample], seed: int) -> CausalTrial:
    """Lists of random tokens said twice. The model foresees the answers in one of the texts as well, where they were not said
    before; at least half of a list is drawn from the vocabulary."""
    rng = np.random.default_rng(seed)
    answered = _predicted_in_texts(model, [texts[i] for i in rng.permutation(len(texts))])
    tokenizer = tokenizer_of(model)
    prefix, suffix = tokenizer.template_ids
    ordinary = [token for token in _ordinary(model).nonzero()[:, 0].tolist() if token < len(tokenizer)]
    length = min(LIST_LENGTH, len(ordinary) // 2, (model.spec.max_input_tokens - len(prefix) - len(suffix)) // 2)
    if len(answered) < MIN_UNITS or length < 3:
        return _random_lists(model, seed)
    lists: list[TrialPrompt] = []
    for index, row in enumerate(answered):
        answers = [int(token) for token in rng.permutation(list(row.targets.values()))][: length // 2]
        sampled = rng.permutation(ordinary)[: length + len(answers)].tolist()
        first, *others = [token for token in sampled if token not in answers][: length - len(answers)]
        # The first token of a list cannot be foreseen: it is not asked for.
        remaining = [*answers, *others]
        list_tokens = [first, *(remaining[i] for i in rng.permutation(len(remaining)))]
        start = len(prefix) + len(list_tokens)
        targets = {
            start + position: token for position, token in enumerate(list_tokens) if position and token in answers
        }
        lists.append(TrialPrompt(sample_from_ids(index, (*prefix, *list_tokens, *list_tokens), tokenizer), targets))
    return make_controlled_trial(lists, drop_unpredicted_targets(model, lists), answered)


def repeated_text_trial(model: ModelProtocol, texts: Sequence[TextSample], seed: int) -> CausalTrial:
    """Beginnings of texts said twice, in their own order. The control is the same text, read once: it asks for the answers
    that the model foresees there too. Whether the second copy depends on a head is asked of all its tokens, because what the
    text itself foretells needs no copy."""
    rng, tokenizer, ordinary = np.random.default_rng(seed), tokenizer_of(model), _ordinary(model)
    answered = _predicted_in_texts(model, [texts[i] for i in rng.permutation(len(texts))])
    prefix, suffix = tokenizer.template_ids
    length = min(REPEATED_TEXT_TOKENS, (model.spec.max_input_tokens - len(prefix) - len(suffix)) // 2)
    rows, shifts = [], []
    for index, row in enumerate(answered):
        ids = row.sample.ids
        start = len(prefix) if ids[: len(prefix)] == prefix else 0
        end = len(ids) - len(suffix) if suffix and ids[-len(suffix) :] == suffix else len(ids)
        body = ids[start:end][:length]
        first_occurrences = _first_occurrences(ids[: start + len(body)], ordinary)
        targets = {position + len(body): token for position, token in first_occurrences.items() if position > start}
        rows.append(TrialPrompt(sample_from_ids(index, (*ids[:start], *body, *body), tokenizer), targets))
        shifts.append(len(body))
    cases, matched, controls = [], [], []
    for row, once, shift in zip(drop_unpredicted_targets(model, rows), answered, shifts, strict=True):
        shared = {position: token for position, token in row.targets.items() if position - shift in once.targets}
        if shared:
            cases.append(row)
            matched.append(row._replace(targets=shared))
            controls.append(once._replace(targets={position - shift: token for position, token in shared.items()}))
    if len(cases) < MIN_UNITS:
        return CausalTrial(tuple(row for row in rows if row.targets))
    controls_of_case = tuple((index,) for index in range(len(cases)))
    return CausalTrial(tuple(cases), tuple(controls), controls_of_case, matched=tuple(matched))


def relation_trial(
    model: ModelProtocol, samples: Iterable[TextSample], texts: Sequence[TextSample], role: str, where: str
) -> CausalTrial:
    """Documents with a relation: the word that depends on it; beside it, where the same token comes for another reason."""
    samples = list(samples)
    prompts = [
        TrialPrompt(sample, {position: sample.ids[position] for position in target_positions(sample, role, where)})
        for sample in samples
        if target_positions(sample, role, where)
    ][:MAX_DOCUMENTS]
    costs = answer_nll(model, prompts)
    limit = _max_nll(model)
    partners: dict[int, set[str]] = {}  # for each answer the words that the role would look at
    for row in prompts:
        for position, partner in target_positions(row.sample, role, where).items():
            partners.setdefault(row.sample.ids[position], set()).add(partner)
    control_samples = (
        list(TokenizedCorpus.of(model, list(CONTROL_SENTENCES[role]))) if role in CONTROL_SENTENCES else []
    )
    control_prompts = [
        TrialPrompt(sample, {position: sample.ids[position]})
        for sample in {id(sample): sample for sample in (*control_samples, *samples, *texts)}.values()
        for position in _control_positions(model, sample, role, where, partners)
    ]
    pool: dict[int, list[tuple[float, int]]] = {}  # for each answer what it costs there, and where
    for index, (row, cost) in enumerate(zip(control_prompts, answer_nll(model, control_prompts), strict=True)):
        for position, nats in cost.items():
            if nats <= limit:
                pool.setdefault(row.targets[position], []).append((nats, index))
    use_counts: Counter[int] = Counter()
    cases, controls_of_case = [], []
    for row, cost in zip(prompts, costs, strict=True):
        targets, control_ids = {}, []
        for position, token in row.targets.items():
            if cost[position] <= limit and token in pool:  # those used least, then the one that costs the model as much
                selected = min(
                    pool[token], key=lambda option: (use_counts[option[1]], abs(option[0] - cost[position]))
                )[1]
                use_counts[selected] += 1
                targets[position] = token
                control_ids.append(selected)
        if control_ids:
            cases.append(TrialPrompt(row.sample, targets))
            controls_of_case.append(control_ids)
    selected = sorted(use_counts)
    if len(cases) < MIN_UNITS or len({control_prompts[index].sample.ids for index in selected}) < MIN_UNITS:
        return CausalTrial(tuple(prompts))
    return CausalTrial(
        tuple(cases),
        tuple(control_prompts[i] for i in selected),
        tuple(tuple(selected.index(i) for i in indices) for indices in controls_of_case),
    )


def target_positions(sample: TextSample, role: str, answer_kind: str) -> dict[int, str]:
    """The tokens of a text that are asked for, and for each the word at the other end of the arc."""
    if sample.document is None:
        return {}
    words = sample.alignment.tokens_of_word
    partners = {
        words[word][0]: partner for word, partner in _target_words(sample.document, role, answer_kind) if words[word]
    }
    return {position: partner for position, partner in partners.items() if position}


def answer_nll(model: ModelProtocol, rows: Sequence[TrialPrompt]) -> list[dict[int, float]]:
    """What each answer costs the whole model, in nats, by its place."""
    nll_by_position: list[dict[int, float]] = [{} for _ in rows]
    assert model.output is not None
    for batch in target_batches(rows, model.device, batch_tokens=2048):
        assert batch.targets is not None
        hidden, has_target = batch.final_hidden_states(model), batch.targets != IGNORE_INDEX
        logits = at_least_float32(model.output(hidden[has_target]))  # (n, V)
        costs = F.cross_entropy(logits, batch.targets[has_target], reduction="none").tolist()
        for (row, position), cost in zip(has_target.nonzero().tolist(), costs, strict=True):
            nll_by_position[batch.sample_ids[row]][position + 1] = cost
    return nll_by_position


def target_batches(
    rows: Sequence[TrialPrompt], device: torch.device | str = "cpu", batch_tokens: int = BATCH_TOKENS
) -> Iterator[TargetBatch]:
    """Rows side by side; `sample_ids` says which they are. A decoder never sees the padding behind them, so it is not told of
    it: the plain causal kernel serves."""
    numbered = [replace(row.truncated_sample, index=index) for index, row in enumerate(rows)]
    for batch in make_batches(numbered, batch_tokens, device=device):
        targets, rivals = torch.full_like(batch.ids, IGNORE_INDEX), torch.full_like(batch.ids, IGNORE_INDEX)
        for i, sample in enumerate(batch.samples):
            row = rows[sample.index]
            for position, token in row.targets.items():
                targets[i, position - 1] = token
                rivals[i, position - 1] = row.rivals.get(position, IGNORE_INDEX)
        subtracted = rivals if bool((rivals != IGNORE_INDEX).any()) else None
        sample_ids = tuple(sample.index for sample in batch.samples)
        yield TargetBatch(batch.ids, batch.real_tokens, targets, None, sample_ids, rivals=subtracted)


def _predicted_in_texts(model: ModelProtocol, texts: Sequence[TextSample]) -> list[TrialPrompt]:
    """Of the first texts that have some: the tokens that the model foresees there and that were not said before."""
    ordinary = _ordinary(model)
    answered: list[TrialPrompt] = []
    for start in range(0, len(texts), MAX_LISTS):  # no more are read than needed
        truncated = [replace(sample, ids=sample.ids[:MAX_TEXT_TOKENS]) for sample in texts[start : start + MAX_LISTS]]
        candidates = [TrialPrompt(sample, _first_occurrences(sample.ids, ordinary)) for sample in truncated]
        answered += [
            row
            for row in drop_unpredicted_targets(model, [row for row in candidates if row.targets])
            if len(row.targets) > 1
        ]
        if len(answered) >= MAX_LISTS:
            break
    return answered[:MAX_LISTS]


def _ordinary(model: ModelProtocol) -> torch.Tensor:
    """True at tokens of the vocabulary that are not special, (V,)."""
    return token_class_flags(tokenizer_of(model), model.spec.vocab)[:, CLASSES.index(SPECIAL)] == 0


def _first_occurrences(ids: Sequence[int], ordinary: torch.Tensor) -> dict[int, int]:
    """Ordinary tokens where they are said for the first time, by their places; nobody is asked for the first of all."""
    return {
        position: token
        for position, token in enumerate(ids)
        if position and ordinary[token] and token not in ids[:position]
    }


def drop_unpredicted_targets(model: ModelProtocol, rows: Sequence[TrialPrompt]) -> list[TrialPrompt]:
    """The same rows, with the answers that the whole model foresees."""
    limit = _max_nll(model)
    return [
        row._replace(targets={position: token for position, token in row.targets.items() if cost[position] <= limit})
        for row, cost in zip(rows, answer_nll(model, rows), strict=True)
    ]


def make_controlled_trial(
    rows: Sequence[TrialPrompt], predicted_rows: Sequence[TrialPrompt], control_rows: Sequence[TrialPrompt]
) -> CausalTrial:
    """Each row beside its control, with the answers foreseen in both; `answered` are the rows with those foreseen there."""
    cases, controls = [], []
    for prompt, control in zip(predicted_rows, control_rows, strict=True):
        shared = {*prompt.targets.values()} & {*control.targets.values()}
        if shared:
            cases.append(
                TrialPrompt(
                    prompt.sample, {position: token for position, token in prompt.targets.items() if token in shared}
                )
            )
            controls.append(
                TrialPrompt(
                    control.sample, {position: token for position, token in control.targets.items() if token in shared}
                )
            )
    if len(cases) < MIN_UNITS:
        return CausalTrial(tuple(rows))
    return CausalTrial(tuple(cases), tuple(controls), tuple((index,) for index in range(len(cases))))


def _random_lists(model: ModelProtocol, seed: int) -> CausalTrial:
    """Lists of any tokens, where the texts give no answers: what a head costs is told, and no more."""
    repeats = make_repeated_sequences(model, MAX_LISTS, LIST_LENGTH, seed)
    rows = []
    for index, ids in enumerate(repeats.repeated.tolist()):
        positions = range(repeats.second_copy.start + 1, repeats.second_copy.stop)
        rows.append(
            TrialPrompt(
                sample_from_ids(index, tuple(ids), tokenizer_of(model)),
                {position: ids[position] for position in positions},
            )
        )
    return CausalTrial(tuple(row for row in rows if row.targets))


def _target_words(document: Document, role: str, where: str) -> Iterator[tuple[int, str]]:
    words = document.words
    for name, source, target in document.relations:
        if ROLE_OF_RELATION.get(name, name) != role:
            continue
        if where == "later word":
            yield max(source, target), words[min(source, target)]
        elif where == "referent" and words[source + 2 : source + 3] and words[source + 2] in PROBE_CHOICES[where]:
            yield source + 2, words[target]  # they are tired: what is said of the one meant


def _control_positions(
    model: ModelProtocol, sample: TextSample, role: str, where: str, partners: Mapping[int, set[str]]
) -> Iterator[int]:
    """Where an answer comes for another reason: gold says so, or what the role would look at does not stand before it."""
    candidates = [position for position, token in enumerate(sample.ids) if position and token in partners]
    if not candidates:
        return
    role_targets, relation_of_role = (
        target_positions(sample, role, where),
        {ROLE_OF_RELATION.get(name, name): name for name in RELATION_PROBES},
    )
    control_targets = {
        position
        for name in CONTROLS.get(relation_of_role[role], ())
        for position in target_positions(sample, name, "later word")
    }
    annotated = sample.document is not None and any(
        ROLE_OF_RELATION.get(relation, relation) == role for relation, _, _ in sample.document.relations
    )
    for position in candidates:
        if position in role_targets or (role in NEEDS_GOLD_ARCS and not annotated):
            continue
        if position in control_targets or role in NEEDS_GOLD_ARCS:
            yield position
            continue
        prefix = tokenizer_of(model).decode(list(sample.ids[:position]))
        if not any(_contains_word(prefix, word) for word in partners[sample.ids[position]]):
            yield position


def _contains_word(text: str, word: str) -> bool:
    """Whether a text has a word; marks count wherever they stand.

    >>> _contains_word("a different one", "if"), _contains_word("see (above", "(")
    (False, True)
    """
    if not word[:1].isalnum():
        return word in text
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _max_nll(model: ModelProtocol) -> float:
    return min(MAX_NLL, math.log(model.spec.vocab) - 1)
