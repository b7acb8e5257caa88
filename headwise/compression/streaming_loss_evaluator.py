"""Loss increase of KV heads that stream, on texts that need tokens outside the window.

On ordinary text, a retrieval head attends to the first token, and streaming hardly changes the loss. So streaming is measured
on four kinds of text, each longer than the sink tokens and the window:

    running text             texts of a corpus; all tokens after the first eviction count
    random tokens repeated   R R, where R is longer than the window; the second copy counts
    nouns repeated           R R, where R is a list of everyday nouns; the second copy counts
    facts recalled later     a fact, text that pushes it out of the window, a question; the answer counts

A kind is measured only if the model needs its context there: with the full cache, the loss of the second copy, or of the
answer, must be lower by more than BOUND than after another first copy, or another fact. Otherwise no increase could be
measured, whatever the head does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.metrics.induction import make_repeated_sequences
from headwise.analysis.metrics.prompt_metric import single_token_of_word
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.spec import CachePolicy
from headwise.text import Tokenizer

BOUND = 0.05  # nats per token: streaming is recommended only if the upper end of each interval is below it
RUNNING, TOKENS, NOUN_LISTS, FACTS = KINDS = (
    "running text", "random tokens repeated", "nouns repeated", "facts recalled later"
)  # fmt: skip
TEXTS = {RUNNING: 8, TOKENS: 12, NOUN_LISTS: 12, FACTS: 24}
MARGIN = 13  # a repeated list has this many tokens more than the window
LEAD = 8  # tokens before a fact, so that the fact is not among the sink tokens, which are never evicted
BATCH_TOKENS = 2048
CHARACTERS = 16  # upper bound of characters per token in running text
NOUNS = (
    "apple", "baby", "ball", "bank", "bed", "bird", "boat", "book", "box", "boy", "bread", "bridge", "car", "card", "cat",
    "chair", "child", "church", "city", "coat", "cow", "cup", "dog", "door", "dress", "egg", "farm", "field", "fire",
    "fish", "floor", "flower", "food", "foot", "game", "garden", "girl", "glass", "gold", "grass", "hair", "hand", "hat",
    "heart", "hill", "horse", "house", "ice", "island", "key", "king", "lake", "leaf", "letter", "map", "milk", "money",
    "moon", "mouth", "music", "paper", "plant", "rain", "ring", "river", "road", "rock", "roof", "room", "rose", "salt",
    "sea", "ship", "shoe", "snow", "star", "stone", "street", "sun", "table", "tea", "tree", "wall", "water", "wind",
    "window", "wood",
)  # fmt: skip
QUESTIONS = (
    ("The secret word is {} today.", "What is the secret word? The secret word is"),
    ("Anna hid the letter under the {} last night.", "Where is the letter? Anna hid the letter under the"),
    ("For his birthday Tom was given a {} by his aunt.", "What was Tom given? For his birthday Tom was given a"),
    ("The old sign shows a {} in bright colors.", "What is on the sign? The old sign shows a"),
)


@dataclass(frozen=True)
class TextKindStreamingCost:
    """Loss increase on one kind of text.

    Attributes:
        kind: One of KINDS.
        full_loss: Loss with the full cache, in nats per token.
        loss_increase: Increase if KV heads stream, with its 95% confidence interval.
        texts: Number of texts.
    """

    kind: str
    full_loss: float
    loss_increase: LossEstimate
    texts: int


@dataclass(frozen=True)
class StreamingTestResult:
    """Loss increases on all kinds of text that could be measured.

    Attributes:
        policy: Cache policy of the streaming KV heads.
        costs: Loss increase on each kind of text.
    """

    policy: CachePolicy
    costs: tuple[TextKindStreamingCost, ...]

    @property
    def passed(self) -> bool:
        """Whether all kinds were measured and the upper end of each interval is below BOUND."""
        return len(self.costs) == len(KINDS) and all(cost.loss_increase.high < BOUND for cost in self.costs)


@dataclass(frozen=True)
class ControlledRetrievalText:
    """A text that needs retrieval.

    Attributes:
        ids: Token ids.
        control: Token ids of the same text with another context.
        targets: Positions of the tokens whose loss counts.
    """

    ids: tuple[int, ...]
    control: tuple[int, ...]
    targets: range


@dataclass(frozen=True, eq=False)
class StreamingHeadLossEvaluator:
    """Texts of each kind, and the losses of a model with its full cache on them.

    Attributes:
        policy: Cache policy of KV heads that stream.
        kinds: Evaluator of each measurable kind of text.
    """

    policy: CachePolicy
    kinds: dict[str, PairedEvaluator]

    @staticmethod
    def of(
        model: ModelProtocol,
        policy: CachePolicy,
        corpus: Any = None,
        *,
        include_running_text: bool = True,
        seed: int = 0,
    ) -> "StreamingHeadLossEvaluator":
        """Make the texts and evaluate the model with its full cache.

        Args:
            model: A decoder with a language modeling head.
            policy: Sink tokens and window of a KV head that streams.
            corpus: Running text, and the text between a fact and its question. None: the texts of a profile.
            include_running_text: Also measure running text.
            seed: Seed of the random texts.

        Returns:
            An evaluator of the kinds that can be measured. A missing kind does not fit into the context or the vocabulary
            of the model, or the model does not use its context there.
        """
        kinds = {}
        if include_running_text and (running_text := _make_running_text_evaluator(model, policy, corpus)) is not None:
            kinds[RUNNING] = running_text
        prompts_by_kind = {
            TOKENS: _random_token_prompts(model, policy, seed),
            NOUN_LISTS: _noun_lists(model, policy, seed),
            FACTS: list(islice(_fact_retrieval_texts(model, policy, corpus, seed), TEXTS[FACTS])),
        }
        for kind, prompts in prompts_by_kind.items():
            if (
                len(prompts) == TEXTS[kind]
                and max(len(prompt.ids) for prompt in prompts) <= model.spec.max_input_tokens
            ):
                evaluation = PairedEvaluator.of_batches(model, _batch_prompts_or_controls(model, prompts))
                control = PairedEvaluator.of_batches(model, _batch_prompts_or_controls(model, prompts, control=True))
                if evaluation.difference(control.full_losses_per_text, evaluation.full_losses_per_text).low > BOUND:
                    kinds[kind] = evaluation
        return StreamingHeadLossEvaluator(policy, kinds)

    def test(self, model: ModelProtocol) -> StreamingTestResult:
        """Return the loss increase of a model with streaming KV heads over the full cache."""
        costs = []
        for kind, evaluation in self.kinds.items():
            loss_increase = evaluation.difference(evaluation.losses_per_text(model), evaluation.full_losses_per_text)
            full_loss = float(evaluation.full_losses_per_text.sum() / evaluation.counts.sum())
            costs.append(TextKindStreamingCost(kind, full_loss, loss_increase, int((evaluation.counts > 0).sum())))
        return StreamingTestResult(self.policy, tuple(costs))


def _require_window(policy: CachePolicy) -> int:
    if policy.window is None:
        raise ArgumentError(
            f"policy: it has no window, so no token is evicted. Got {policy}. "
            "Set a window: CachePolicy(sink_tokens=4, window=128)."
        )
    return policy.window


def _join_corpus_text(model: ModelProtocol, corpus: Any, tokens: int) -> str:
    """Join texts of a corpus to at least `tokens` tokens. Single sentences are too short for an eviction."""
    texts: list[str] = []
    for item in TokenizedCorpus.of(model, corpus).corpus.items():
        texts.append(item.text[: CHARACTERS * tokens])
        if sum(map(len, texts)) > CHARACTERS * tokens:
            break
    return " ".join(texts)


def _make_running_text_evaluator(model: ModelProtocol, policy: CachePolicy, corpus: Any) -> PairedEvaluator | None:
    """Return texts eight times as long as the streaming cache. None if the corpus is too short."""
    retained = policy.sink_tokens + _require_window(policy)
    length = min(8 * retained, model.spec.max_input_tokens)
    text = _join_corpus_text(model, corpus, length * TEXTS[RUNNING])
    if length <= retained + 1 or not text:
        return None
    tokenized = TokenizedCorpus.of(model, text, length)
    samples = [sample for sample in tokenized.first(TEXTS[RUNNING]) if len(sample.ids) > retained + 1]
    return PairedEvaluator.of(model, tokenized.subset(samples), skip_tokens=retained) if samples else None


def _random_token_prompts(model: ModelProtocol, policy: CachePolicy, seed: int) -> list[ControlledRetrievalText]:
    length = _require_window(policy) + MARGIN
    repeats = make_repeated_sequences(model, TEXTS[TOKENS], length, seed)
    if repeats.length < length:
        return []
    start, stop = repeats.second_copy.start, repeats.second_copy.stop
    prompts = []
    for twice, once in zip(repeats.repeated.tolist(), repeats.control.tolist(), strict=True):
        lead, other = twice[: repeats.start], once[start:stop]  # R′, which is not R
        control = (*lead, *other, *twice[start:])
        prompts.append(ControlledRetrievalText(tuple(twice[:stop]), control[:stop], range(start + 1, stop)))
    return prompts


def _noun_lists(model: ModelProtocol, policy: CachePolicy, seed: int) -> list[ControlledRetrievalText]:
    tokenizer, rng = tokenizer_of(model), np.random.default_rng(seed)
    before, length, prompts = tokenizer.template_ids[0], _require_window(policy) + MARGIN, []
    for _ in range(TEXTS[NOUN_LISTS]):
        first, other = (_nouns(tokenizer, length, rng) for _ in range(2))
        if first is None or other is None:
            return []
        start = len(before) + length
        ids, control = ((*before, *context, *first) for context in (first, other))
        prompts.append(ControlledRetrievalText(ids, control, range(start + 1, start + length)))
    return prompts


def _nouns(tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> tuple[int, ...] | None:
    """Return `length` tokens of nouns in random order. None if the tokenizer does not know them."""
    words: list[str] = []
    while len(words) < length:
        words += [NOUNS[i] for i in rng.permutation(len(NOUNS))]
    ids = tokenizer.encode("".join(f" {word}" for word in words), add_special_tokens=False)[:length]
    return None if tokenizer.special["unk"] in ids else tuple(ids)


def _fact_retrieval_texts(
    model: ModelProtocol, policy: CachePolicy, corpus: Any, seed: int
) -> Iterator[ControlledRetrievalText]:
    """Yield a fact, text that pushes it out of the window, and its question. The control states another fact."""
    tokenizer, rng = tokenizer_of(model), np.random.default_rng(seed)
    before, unknown = tokenizer.template_ids[0], tokenizer.special["unk"]
    needed = LEAD + _require_window(policy) + MARGIN
    text = _join_corpus_text(model, corpus, 4 * needed * TEXTS[FACTS])
    hay = [i for i in tokenizer.encode(text, add_special_tokens=False) if i != unknown]
    if len(hay) < needed:
        return
    for number in range(4 * TEXTS[FACTS]):  # prompts with nouns of several tokens are skipped
        fact, question = QUESTIONS[number % len(QUESTIONS)]
        noun, other = (NOUNS[i] for i in rng.choice(len(NOUNS), 2, replace=False))
        answer = single_token_of_word(tokenizer, question, noun)
        start = int(rng.integers(0, len(hay) - needed + 1))
        filler = hay[start : start + needed]
        asks = tokenizer.encode(f" {question}", add_special_tokens=False)
        stated = [tokenizer.encode(f" {fact.format(word)}", add_special_tokens=False) for word in (noun, other)]
        if answer is None or len(stated[0]) != len(stated[1]) or unknown in (*asks, *stated[0], *stated[1]):
            continue
        ids, control = ((*before, *filler[:LEAD], *fact_ids, *filler[LEAD:], *asks, answer) for fact_ids in stated)
        yield ControlledRetrievalText(ids, control, range(len(ids) - 1, len(ids)))


def _batch_prompts_or_controls(
    model: ModelProtocol, prompts: Sequence[ControlledRetrievalText], *, control: bool = False
) -> tuple[TargetBatch, ...]:
    """Batch prompts, padded on the right, to which a causal decoder does not attend."""
    max_length = max(len(prompt.ids) for prompt in prompts)
    rows = torch.zeros(len(prompts), max_length, dtype=torch.long, device="cpu")
    real, counts = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids = prompt.control if control else prompt.ids
        rows[row, : len(ids)], real[row, : len(ids)] = torch.tensor(ids, device="cpu"), True
        counts[row, prompt.targets.start : prompt.targets.stop] = True
    rows, real, counts = (table.to(model.device) for table in (rows, real, counts))
    step = max(1, BATCH_TOKENS // max_length)
    targets = rows[:, 1:].masked_fill(~counts[:, 1:], IGNORE_INDEX)
    return tuple(
        TargetBatch(rows[i : i + step, :-1], real[i : i + step, :-1], targets[i : i + step], None)
        for i in range(0, len(prompts), step)
    )
