"""Query-focused retrieval: of several short documents a question is about one. Do its words look there?

    The baker ran out of flour. The pilot landed in heavy fog. The nurse lost her keys. Who could not make bread?

The score is the mean weight from the tokens of the question on those of the document it is about (QRHead:
https://arxiv.org/abs/2506.09944, where it is read off long contexts). The baseline is the weight from another question on
the same document, at the same place among the same others: so neither what stands out in a text nor where it stands scores.
Questions share no word of content with their documents: whoever looks at repeated words does not score either. No answer is
asked for, so encoders are asked as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.example_sampler import ExampleRecorder
from headwise.analysis.metrics.metric import IDENTICAL, MetricSpec, RoleTarget, TokenFeature
from headwise.analysis.metrics.prompt_metric import MAX_EXAMPLES, MIN_SAMPLES
from headwise.analysis.metrics.role_examples import ExamplePosition, ExampleStore
from headwise.analysis.metrics.row_stats import RowStats
from headwise.analysis.metrics.task_metric import (
    ControlledTextMetric,
    TaskResult,
    run_task,
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
PROMPTS, DOCUMENTS = 48, 3  # pairs of prompts, and documents in each


class QueryPrompt(NamedTuple):
    """Documents and a question, as a model reads them: which tokens are of the document in question, which ask."""

    ids: tuple[int, ...]
    gold: tuple[bool, ...]
    is_question: tuple[bool, ...]


class QueryFocusMetric(ControlledTextMetric):
    """`hw.profile(model, prompts=True)`; for encoders too.

    >>> QueryFocusMetric().names
    ('query focus', 'query focus baseline', 'query focus value-weighted')
    """

    metric_specs = MetricSpec(
        "query focus", "weight of a question on the document it is about", high_means="finds what a question is about",
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
    ) -> TaskResult:
        """Read the questions and add up the weights. The examples start at the last token of some questions."""
        accumulator.register_metrics(self.names)
        if model.spec.kind == "encoder-decoder":
            return TaskResult("questions and documents are one text, which an encoder-decoder reads on two sides.")
        texts, _ = self.texts_and_controls(model, seed)
        if len(texts) < MIN_SAMPLES:
            return TaskResult(
                f"{len(texts)} of {PROMPTS} prompts can be read with this tokenizer and context; {MIN_SAMPLES} are needed."
            )
        examples = ExampleStore(
            accumulator.heads, rows=tuple(self._example_position(model, sample) for sample in texts[:MAX_EXAMPLES])
        )
        recorders = [ExampleRecorder(examples, self.score_spec.name)]
        run_task(model, self, accumulator, seed, observers=recorders, progress=progress)
        return TaskResult(examples=examples)

    def _example_position(self, model: ModelProtocol, sample: TextSample) -> ExamplePosition:
        """The end of a question, and all of what it is about."""
        query, names = self.prompts[sample.ids], token_names(tokenizer_of(model), sample.ids)
        last, gold = max(np.flatnonzero(query.is_question), default=0), tuple(np.flatnonzero(query.gold).tolist())
        return ExamplePosition(
            self.score_spec.name, sample.index, sample.index % BUCKETS, sample.index, int(last), names, gold
        )

    def texts_and_controls(self, model: ModelProtocol, seed: int) -> tuple[list[TextSample], list[TextSample]]:
        """Documents with a question about one of them, and with one about another."""
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
        """Over the tokens that ask, which see all documents: the weight, nothing, the weight of what is fetched."""
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
    """Three documents each, and a question about one of them; the twin has the same documents, of which the same is marked,
    and a question about another. None where the tokenizer does not know the words."""
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
    """A text, with marks by the characters that tokens cover."""
    text = " ".join((*facts, question))
    aligned = tokenizer.align(text)
    start = sum(len(fact) + 1 for fact in facts[:gold])
    in_gold = [start <= a < b <= start + len(facts[gold]) for a, b in aligned.spans]
    is_question = [a < b and a >= len(text) - len(question) for a, b in aligned.spans]
    return QueryPrompt(aligned.ids, tuple(in_gold), tuple(is_question))
