"""Cases of the causal test: prompts whose answers need a role, and controls with the same answers for another reason.

    lists    tokens in random order, repeated (induction, duplicate, previous token). At least half of them are drawn from the
             vocabulary. The answers are tokens that the model predicts in a text at their first occurrence; that text is the
             control
    texts    the beginning of a text, repeated, for the same roles. The answers are the tokens of the second copy. Answers
             that the model also predicts in the text read once have a control: that text
    words    documents with a relation (brackets, quotes, if-then …): the later word of the arc, or the word that depends on
             the referent. The control is another text in which the same token is predicted without the role

The unmodified model predicts the answers in cases and controls, so both can get worse. Controls have the same answers because
a head that harms all predictions, or that promotes answers however they were found, costs as much there
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
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.text.annotated_document import Document
from headwise.text.synthetic.cloze_probes import PROBE_CHOICES

MAX_LISTS = 16  # maximum number of repeated lists
MAX_DOCUMENTS = 20  # maximum number of documents with a relation
MAX_TEXTS = 64  # maximum number of texts searched for predicted tokens
LIST_LENGTH = 8  # tokens in a list
REPEATED_TEXT_TOKENS = 16  # tokens of a repeated text
MAX_TEXT_TOKENS = 24  # tokens of a text searched for answers
# An answer is predicted if its loss is at most 3 nats (p = 0.05) and at least 1 nat below that of a uniform guess.
MAX_NLL = 3.0
BATCH_TOKENS = 512  # usually fits all cases, so that resample donors are in the same batch
# Relations of nearly every sentence: only gold arcs identify words outside them.
NEEDS_GOLD_ARCS = {"subject-verb", "nsubj", "coreference"}


class TrialPrompt(NamedTuple):
    """A text and its target tokens. Tokens after the last target are not run.

    Attributes:
        sample: The text.
        targets: Position → target token.
        rivals: Position → token whose loss is subtracted, so that the result is a lead.
    """

    sample: TextSample
    targets: Mapping[int, int]
    rivals: Mapping[int, int] = {}

    @property
    def truncated_sample(self) -> TextSample:
        """The text up to its last target."""
        return replace(self.sample, ids=self.sample.ids[: max(self.targets)])


@dataclass(frozen=True, eq=False)
class CausalTrial:
    """Cases of a role, with controls that have the same answers for another reason.

    Attributes:
        cases: Prompts whose answers need the role.
        controls: Control prompts. Empty if none were found.
        controls_of_case: Indices of the controls of each case.
        is_suppression: Whether the role suppresses the answers, so that the cost is the loss decrease.
        single_name_prompts: One single-name prompt per case, for roles about two names.
        single_name_fraction: Fraction of the cost in single-name prompts that the cost of a case must exceed.
        matched: The cases with only the answers that have a control. Empty if all answers have one.
    """

    cases: tuple[TrialPrompt, ...]
    controls: tuple[TrialPrompt, ...] = ()
    controls_of_case: tuple[tuple[int, ...], ...] = ()
    is_suppression: bool = False
    single_name_prompts: tuple[TrialPrompt, ...] = ()
    single_name_fraction: float = 1.0
    matched: tuple[TrialPrompt, ...] = ()

    def sum_controls_by_case(self, values: np.ndarray) -> np.ndarray:
        """Sum over the controls of each case: (controls, heads) → (cases, heads)."""
        return np.stack([values[list(indices)].sum(0) for indices in self.controls_of_case])


class DocumentSample:
    """The first documents of a streamed corpus for each role and each control."""

    def __init__(self) -> None:
        self.samples: dict[int, TextSample] = {}
        self._counts: Counter[str] = Counter()

    def add_if_needed(self, sample: TextSample) -> None:
        """Store a text if a role or control needs it."""
        if sample.document is None:
            return
        relation_names = {name for name, _, _ in sample.document.relations}
        for name, where in RELATION_PROBES.items():
            role = ROLE_OF_RELATION.get(name, name)
            self._keep_if_needed(sample, role, needed=bool(target_positions(sample, role, where)))
            self._keep_if_needed(
                sample, f"control of {role}", needed=not relation_names.isdisjoint(CONTROLS.get(name, ()))
            )

    def _keep_if_needed(self, sample: TextSample, category: str, *, needed: bool) -> None:
        if needed and self._counts[category] < MAX_DOCUMENTS:
            self._counts[category] += 1
            self.samples[sample.index] = sample


def repeated_list_trial(model: ModelProtocol, texts: Sequence[TextSample], seed: int) -> CausalTrial:
    """Build cases of repeated random tokens. The control is a text in which the model predicts the answers at their
    first occurrence. At least half of a list is drawn from the vocabulary."""
    rng = np.random.default_rng(seed)
    answered = _predicted_in_texts(model, [texts[i] for i in rng.permutation(len(texts))])
    tokenizer = tokenizer_of(model)
    prefix, suffix = tokenizer.template_ids
    ordinary = [token for token in _ordinary_token_mask(model).nonzero()[:, 0].tolist() if token < len(tokenizer)]
    length = min(LIST_LENGTH, len(ordinary) // 2, (model.spec.max_input_tokens - len(prefix) - len(suffix)) // 2)
    if len(answered) < MIN_UNITS or length < 3:
        return _random_token_lists(model, seed)
    lists: list[TrialPrompt] = []
    for index, row in enumerate(answered):
        answers = [int(token) for token in rng.permutation(list(row.targets.values()))][: length // 2]
        sampled = rng.permutation(ordinary)[: length + len(answers)].tolist()
        first, *others = [token for token in sampled if token not in answers][: length - len(answers)]
        # The first token of a list cannot be predicted, so it is not a target.
        remaining = [*answers, *others]
        list_tokens = [first, *(remaining[i] for i in rng.permutation(len(remaining)))]
        start = len(prefix) + len(list_tokens)
        targets = {
            start + position: token for position, token in enumerate(list_tokens) if position and token in answers
        }
        lists.append(TrialPrompt(sample_from_ids(index, (*prefix, *list_tokens, *list_tokens), tokenizer), targets))
    return pair_trial_with_controls(lists, drop_unpredicted_targets(model, lists), answered)


def repeated_text_trial(model: ModelProtocol, texts: Sequence[TextSample], seed: int) -> CausalTrial:
    """Build cases of repeated beginnings of texts. The control is the text read once, with the answers that the model
    predicts there too. The cost is measured on all tokens of the second copy, because tokens predicted by the text itself do
    not need the copy."""
    rng, tokenizer, ordinary = np.random.default_rng(seed), tokenizer_of(model), _ordinary_token_mask(model)
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
    """Build cases from documents with a relation: the word that depends on it, with controls that have the same token."""
    samples = list(samples)
    prompts = [
        TrialPrompt(sample, {position: sample.ids[position] for position in target_positions(sample, role, where)})
        for sample in samples
        if target_positions(sample, role, where)
    ][:MAX_DOCUMENTS]
    costs = answer_nll(model, prompts)
    limit = _max_answer_nll(model)
    partners: dict[int, set[str]] = {}  # answer → words that the role would attend to
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
    pool: dict[int, list[tuple[float, int]]] = {}  # answer → (loss, index) of its controls
    for index, (row, cost) in enumerate(zip(control_prompts, answer_nll(model, control_prompts), strict=True)):
        for position, nats in cost.items():
            if nats <= limit:
                pool.setdefault(row.targets[position], []).append((nats, index))
    use_counts: Counter[int] = Counter()
    cases, controls_of_case = [], []
    for row, cost in zip(prompts, costs, strict=True):
        targets, control_ids = {}, []
        for position, token in row.targets.items():
            if cost[position] <= limit and token in pool:  # prefer rarely used controls, then the most similar loss
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
    """Return the target positions of a text, each with the word at the other end of the arc."""
    if sample.document is None:
        return {}
    words = sample.alignment.tokens_of_word
    partners = {
        words[word][0]: partner
        for word, partner in _query_positions_and_targets(sample.document, role, answer_kind)
        if words[word]
    }
    return {position: partner for position, partner in partners.items() if position}


def answer_nll(model: ModelProtocol, rows: Sequence[TrialPrompt]) -> list[dict[int, float]]:
    """Return the loss of each answer in the unmodified model, in nats, by position."""
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
    """Yield rows in batches; `sample_ids` are their indices. No attention mask is needed, because a decoder does not attend
    to padding on the right."""
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
    """Return the first texts with tokens that the model predicts at their first occurrence."""
    ordinary = _ordinary_token_mask(model)
    answered: list[TrialPrompt] = []
    for start in range(0, len(texts), MAX_LISTS):  # stop as soon as there are enough
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


def _ordinary_token_mask(model: ModelProtocol) -> torch.Tensor:
    """True at tokens of the vocabulary that are not special, (V,)."""
    return token_class_flags(tokenizer_of(model), model.spec.vocab)[:, CLASSES.index(SPECIAL)] == 0


def _first_occurrences(ids: Sequence[int], ordinary: torch.Tensor) -> dict[int, int]:
    """Return the first occurrences of ordinary tokens by position, except position 0, which has no prediction."""
    return {
        position: token
        for position, token in enumerate(ids)
        if position and ordinary[token] and token not in ids[:position]
    }


def drop_unpredicted_targets(model: ModelProtocol, rows: Sequence[TrialPrompt]) -> list[TrialPrompt]:
    """Drop the targets that the unmodified model does not predict."""
    limit = _max_answer_nll(model)
    return [
        row._replace(targets={position: token for position, token in row.targets.items() if cost[position] <= limit})
        for row, cost in zip(rows, answer_nll(model, rows), strict=True)
    ]


def pair_trial_with_controls(
    rows: Sequence[TrialPrompt], predicted_rows: Sequence[TrialPrompt], control_rows: Sequence[TrialPrompt]
) -> CausalTrial:
    """Pair each row with its control and reduce both to the answers predicted in both."""
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


def _random_token_lists(model: ModelProtocol, seed: int) -> CausalTrial:
    """Build lists of arbitrary tokens without controls, if the texts have no suitable answers."""
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


def _query_positions_and_targets(document: Document, role: str, where: str) -> Iterator[tuple[int, str]]:
    words = document.words
    for name, source, target in document.relations:
        if ROLE_OF_RELATION.get(name, name) != role:
            continue
        if where == "later word":
            yield max(source, target), words[min(source, target)]
        elif where == "referent" and words[source + 2 : source + 3] and words[source + 2] in PROBE_CHOICES[where]:
            yield source + 2, words[target]  # the predicate of the referent, as in "they are tired"


def _control_positions(
    model: ModelProtocol, sample: TextSample, role: str, where: str, partners: Mapping[int, set[str]]
) -> Iterator[int]:
    """Yield positions where an answer follows for another reason: by gold arcs, or because the role's word is absent."""
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
    """Return whether a text contains a word. Punctuation matches anywhere.

    >>> _contains_word("a different one", "if"), _contains_word("see (above", "(")
    (False, True)
    """
    if not word[:1].isalnum():
        return word in text
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _max_answer_nll(model: ModelProtocol) -> float:
    return min(MAX_NLL, math.log(model.spec.vocab) - 1)
