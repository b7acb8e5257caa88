"""Query-focused retrieval: attention from a question to the document that it is about, among several documents.

    The baker ran out of flour. The pilot landed in heavy fog. The nurse lost her keys. Who could not make bread?

The score is the mean weight from the tokens of the question on the tokens of its document (QRHead:
https://arxiv.org/abs/2506.09944, which uses long contexts). The baseline is the weight from another question on the same
document at the same position, so neither a salient document nor a fixed position scores. A question shares no content word
with its document, so attention to repeated words does not score either. No answer is generated, so encoders are supported.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.example_sampler import ExampleAttentionRecorder
from headwise.analysis.metrics.metric import IDENTICAL, MetricSpec, RoleTarget, TokenFeature
from headwise.analysis.metrics.prompt_metric import MAX_EXAMPLES, MIN_SAMPLES
from headwise.analysis.metrics.role_example_positions import ExamplePosition, ExampleStore
from headwise.analysis.metrics.row_stats import RowStats
from headwise.analysis.metrics.task_metric import (
    ControlledTextMetric,
    TaskMetricDetails,
    run_task_into_accumulator,
    sample_from_ids,
    token_names,
)
from headwise.analysis.recording.batching import TextSample, tokenizer_of
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.text import Tokenizer

FACTS = (
    ("The baker ran out of flour.", "Who could not make bread?"),
    ("The pilot landed in heavy fog.", "Which plane came down?"),
    ("The nurse lost her keys.", "Who cannot open the door?"),
    ("The farmer sold twelve cows.", "Which animals were bought?"),
    ("A storm broke the old oak.", "What did the wind do to the tree?"),
    ("The painter used too much blue.", "Which colour is in the picture?"),
    ("The judge sent him to prison.", "What was decided in court?"),
    ("The dentist pulled two molars.", "Whose teeth were taken out?"),
    ("The train from Leeds was late.", "When did the railway passengers arrive?"),
    ("Her violin has three strings.", "What kind of music can she play?"),
    ("The soup needs more salt.", "How does the meal taste?"),
    ("The goalkeeper caught every shot.", "Who won the football match?"),
    ("The river rose over its banks.", "Where is the flood?"),
    ("The librarian hid the novel.", "Where did the books go?"),
    ("The clock stopped at noon.", "What time is it?"),
    ("The thief climbed over the wall.", "How did the burglar escape?"),
    ("The carpenter cut the planks.", "What was done to the wood?"),
    ("The astronomer saw a comet.", "What was in the sky last night?"),
    ("The tailor shortened my coat.", "Who worked on these clothes?"),
    ("The miners found silver.", "Which metal is under the ground?"),
    ("The bride wore green shoes.", "What was special at the wedding?"),
    ("The sailor drew a map.", "How can one find the island at sea?"),
    ("The chemist mixed two acids.", "What happened in the laboratory?"),
    ("The shepherd counted his flock.", "How many sheep are there?"),
)
PROMPTS, DOCUMENTS = 48, 3  # number of prompt pairs, and documents per prompt


class QueryPrompt(NamedTuple):
    """A tokenized prompt of documents and a question.

    Attributes:
        ids: Token ids.
        gold: Whether each token belongs to the marked document.
        is_question: Whether each token belongs to the question.
    """

    ids: tuple[int, ...]
    gold: tuple[bool, ...]
    is_question: tuple[bool, ...]


class QueryFocusMetric(ControlledTextMetric):
    """Query focus score. Computed by `hw.profile(model, prompts=True)`, also for encoders.

    >>> QueryFocusMetric().names
    ('query focus', 'query focus baseline', 'query focus value-weighted')
    """

    metric_specs = MetricSpec(
        "query focus", "weight of a question on the document it is about", high_means="finds the document of a question",
        merge=IDENTICAL, corpus_label="questions about one of three documents", target=RoleTarget("prompt", "query focus"),
    ).with_variants()  # fmt: skip
    GOLD, QUESTION = "in question", "asks"

    def __init__(self) -> None:
        self.prompts: dict[tuple[int, ...], QueryPrompt] = {}  # by the ids of a text
        self.features = (
            TokenFeature(self.GOLD, lambda text: self.prompts[text.ids].gold),
            TokenFeature(self.QUESTION, lambda text: self.prompts[text.ids].is_question),
        )

    def run(
        self, model: ModelProtocol, accumulator: Accumulator, seed: int = 0, progress: Progress | None = None
    ) -> TaskMetricDetails:
        """Read the questions and add up the weights. The examples start at the last token of some questions."""
        accumulator.register_metrics(self.names)
        if model.spec.kind == "encoder-decoder":
            return TaskMetricDetails(
                "encoder-decoder models are not supported: questions and documents must be in one text."
            )
        texts, _ = self.texts_and_controls(model, seed)
        if len(texts) < MIN_SAMPLES:
            return TaskMetricDetails(
                f"{len(texts)} of {PROMPTS} prompts fit this tokenizer and context. {MIN_SAMPLES} are needed."
            )
        examples = ExampleStore(
            accumulator.heads, rows=tuple(self._example_position(model, sample) for sample in texts[:MAX_EXAMPLES])
        )
        recorders = [ExampleAttentionRecorder(examples, self.score_spec.name)]
        run_task_into_accumulator(model, self, accumulator, seed, observers=recorders, progress=progress)
        return TaskMetricDetails(examples=examples)

    def _example_position(self, model: ModelProtocol, sample: TextSample) -> ExamplePosition:
        """Return the position of the last question token, with all tokens of its document as targets."""
        query, names = self.prompts[sample.ids], token_names(tokenizer_of(model), sample.ids)
        last, gold = max(np.flatnonzero(query.is_question), default=0), tuple(np.flatnonzero(query.gold).tolist())
        return ExamplePosition(
            self.score_spec.name, sample.index, sample.index % BUCKETS, sample.index, int(last), names, gold
        )

    def texts_and_controls(self, model: ModelProtocol, seed: int) -> tuple[list[TextSample], list[TextSample]]:
        """Return prompts with a question about the marked document, and controls with a question about another one."""
        tokenizer = tokenizer_of(model)
        max_tokens = model.spec.max_input_tokens
        pairs = [
            (prompt, twin)
            for prompt, twin in make_query_prompts(tokenizer, seed)
            if max(map(len, (prompt.ids, twin.ids))) <= max_tokens
        ]
        self.prompts = {query.ids: query for pair in pairs for query in pair}
        samples = [[sample_from_ids(index, pair[i].ids, tokenizer) for index, pair in enumerate(pairs)] for i in (0, 1)]
        return samples[0], samples[1]

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute the weight and the value-weighted score over the question tokens. The baseline comes from the controls."""
        # (B, S)
        question_mask = rows.batch_context.feature_values[
            ..., rows.batch_context.layout.feature_names.index(self.QUESTION)
        ]
        # (B, 1 or H, n)
        eligible = (
            (question_mask[:, rows.positions] > 0)[:, None]
            & (rows.visible_feature_sum(self.GOLD) > 0)
            & rows.counted[:, None]
        )
        value_weighted = rows.value_weighted_sum(self.GOLD) / rows.feature_fraction(rows.NORM).clamp(min=1e-30)
        sums = [(weights * eligible).sum(2) for weights in (rows.feature_fraction(self.GOLD), value_weighted)]  # (B, H)
        return torch.stack((sums[0], torch.zeros_like(sums[0]), sums[1]), -1), eligible.sum(2)[..., None]


def make_query_prompts(
    tokenizer: Tokenizer, seed: int = 0, prompts: int = PROMPTS
) -> list[tuple[QueryPrompt, QueryPrompt]]:
    """Make pairs of prompts with the same documents and the same marked document.

    The question of the first prompt is about the marked document, that of the second about another one. Pairs with unknown
    tokens are left out.
    """
    rng, pairs = np.random.default_rng(seed), []
    for index in range(prompts):
        fact_ids = rng.permutation(len(FACTS))[:DOCUMENTS]
        gold, other = (index % DOCUMENTS, (index + 1 + index // DOCUMENTS % (DOCUMENTS - 1)) % DOCUMENTS)
        facts = [FACTS[i][0] for i in fact_ids]
        pair = [_make_query(tokenizer, facts, FACTS[fact_ids[topic]][1], gold) for topic in (gold, other)]
        pairs.append((pair[0], pair[1]))
    unknown = tokenizer.special["unk"]
    return [pair for pair in pairs if not any(unknown in prompt.ids for prompt in pair)]


def _make_query(tokenizer: Tokenizer, facts: Sequence[str], question: str, gold: int) -> QueryPrompt:
    """Make a prompt. Tokens are assigned to the document and the question by their character spans."""
    text = " ".join((*facts, question))
    aligned = tokenizer.align(text)
    start = sum(len(fact) + 1 for fact in facts[:gold])
    in_gold = [start <= a < b <= start + len(facts[gold]) for a, b in aligned.spans]
    is_question = [a < b and a >= len(text) - len(question) for a, b in aligned.spans]
    return QueryPrompt(aligned.ids, tuple(in_gold), tuple(is_question))
