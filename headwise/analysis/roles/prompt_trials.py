"""Causal test cases of the roles on prompts: their prompts, with controls that have the same answer in a repeated list.

The answer is the word that completes a prompt: the other name, or the next day of the week. The control is a list of such
words, `Anna, Tom, Mary, Anna, Tom,`, drawn at random without the words of the prompt. There, the same word follows
because the list is repeated, not because of the role. Copy suppression has no prompts here: it is tested on the repeated
lists of induction (build_causal_trials.py), where the loss of an answer must *decrease* without the head.

Roles about two names (name mover, name suppression) are measured by the lead of the correct name over the other name.
They have two controls: repeated lists, and single-name prompts, `Then Mary went home. Somebody gave a book to`. A name
mover promotes a single name as much as the correct name of two. A head that promotes any earlier name promotes the single
name and does not change the lead between two names. So the lead must decrease by more than half of its decrease with a
single name. A head that suppresses the wrong name has nothing to suppress with a single name, so its lead must decrease
by more than there.
"""

from collections.abc import Callable, Sequence

import numpy as np

from headwise.analysis.metrics.name_movers import make_name_sentence_pairs
from headwise.analysis.metrics.prompt_metric import PromptWithTargets
from headwise.analysis.metrics.statistics import MIN_UNITS
from headwise.analysis.metrics.successor import list_prompt, single_token_words
from headwise.analysis.metrics.task_metric import sample_from_ids
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.build_causal_trials import (
    LIST_LENGTH,
    CausalTrial,
    TrialPrompt,
    drop_unpredicted_targets,
    pair_trial_with_controls,
)
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.text import Tokenizer

MAX_PROMPTS = 32  # maximum number of prompts per trial
# Fraction of the cost in single-name prompts that the cost of the lead between two names must exceed.
SINGLE_NAME_FRACTIONS = {"name mover": 0.5, "name suppression": 1.0}


def prompt_trial(model: ModelProtocol, role: str, seed: int) -> CausalTrial:
    """Build cases from the prompts of a role, with list controls; both answers are predicted. Empty without prompts."""
    tokenizer, max_tokens, rng = tokenizer_of(model), model.spec.max_input_tokens, np.random.default_rng(seed)
    try:
        prompts = PROMPT_MAKERS[role](tokenizer, seed) if role in PROMPT_MAKERS else []
    except HeadwiseError:  # the tokenizer has too few single-token words
        prompts = []
    prompts = [prompt for prompt in prompts if len(prompt.ids) <= max_tokens]
    sampled = [prompts[i] for i in rng.permutation(len(prompts))[:MAX_PROMPTS]]
    sampled.sort(
        key=lambda prompt: len(prompt.ids)
    )  # the resample donor is the previous prompt, which should have the same length
    pool = sorted({prompt.targets[0].answer for prompt in prompts})
    separator = _comma_tokens(tokenizer)
    length = min(LIST_LENGTH, (max_tokens - len(tokenizer.template_ids[0])) // (2 + 2 * len(separator)))
    prompt_rows, list_rows = [], []
    for index, prompt in enumerate(sampled):
        target = prompt.targets[0]
        prompt_rows.append(_ask_last_token(tokenizer, index, (*prompt.ids[: target.row + 1], target.answer)))
        list_rows.append(
            _ask_last_token(
                tokenizer, index, (*tokenizer.template_ids[0], *_repeated_list(prompt, pool, length, separator, rng))
            )
        )
    return pair_trial_with_controls(
        prompt_rows, drop_unpredicted_targets(model, prompt_rows), drop_unpredicted_targets(model, list_rows)
    )


def name_lead_trial(model: ModelProtocol, role: str, seed: int) -> CausalTrial:
    """Build cases from sentences about two people, measured by the lead of the correct name over the other name. Each has
    a list and a single-name prompt for the same name. The model predicts the name in all three. First and second name
    alternate."""
    tokenizer, max_tokens, rng = tokenizer_of(model), model.spec.max_input_tokens, np.random.default_rng(seed)
    try:
        pairs = make_name_sentence_pairs(tokenizer, seed)
    except HeadwiseError:  # the tokenizer has too few single-token names
        return CausalTrial(())
    chosen = [(pair.sentences[i % 2], pair.singles[i % 2]) for i, pair in enumerate(pairs)]
    chosen = [
        (sentence, single) for sentence, single in chosen if single is not None and len(sentence.ids) < max_tokens
    ]
    sampled = sorted((chosen[i] for i in rng.permutation(len(chosen))[:MAX_PROMPTS]), key=lambda pair: len(pair[0].ids))
    pool, separator = sorted({sentence.answer for sentence, _ in chosen}), _comma_tokens(tokenizer)
    length = min(LIST_LENGTH, (max_tokens - len(tokenizer.template_ids[0])) // (2 + 2 * len(separator)))
    kinds: list[list[TrialPrompt]] = [[], [], []]  # two-name sentences, lists, single-name sentences
    for index, (sentence, single) in enumerate(sampled):
        listed = _repeated_list(sentence.to_prompt(), pool, length, separator, rng)
        answer = sentence.answer
        texts = ((*sentence.ids, answer), (*tokenizer.template_ids[0], *listed), (*single.ids, answer))
        for rows, ids in zip(kinds, texts, strict=True):
            rows.append(_ask_last_token(tokenizer, index, ids)._replace(rivals={len(ids) - 1: sentence.other}))
    triples = zip(*(drop_unpredicted_targets(model, rows) for rows in kinds), strict=True)
    answered = [triple for triple in triples if all(row.targets for row in triple)]
    if len(answered) < MIN_UNITS:
        return CausalTrial(tuple(kinds[0]))
    cases, lists, single_name_prompts = (tuple(rows) for rows in zip(*answered, strict=True))
    controls_of_case = tuple((index,) for index in range(len(cases)))
    return CausalTrial(
        cases,
        lists,
        controls_of_case,
        single_name_prompts=single_name_prompts,
        single_name_fraction=SINGLE_NAME_FRACTIONS[role],
    )


def _repeated_list(
    prompt: PromptWithTargets, pool: Sequence[int], length: int, separator: tuple[int, ...], rng: np.random.Generator
) -> tuple[int, ...]:
    """Return a list of `length` words with the answer, followed by the same list up to and including the answer."""
    answer = prompt.targets[0].answer
    others = [int(token) for token in rng.permutation(pool) if token != answer and token not in prompt.ids]
    words = others[: length - 1]
    position = int(rng.integers(1, len(words) + 1)) if words else 0  # the first word of a list cannot be predicted
    words.insert(position, answer)
    *leading, last = (*words, *words[: position + 1])
    return (*(token for word in leading for token in (word, *separator)), last)


def _comma_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the comma after a word, if it is a single token. Models do not continue a list of names without commas."""
    word, with_comma = (tokenizer.encode(text, add_special_tokens=False) for text in ("Then", "Then,"))
    is_token = (
        len(with_comma) == len(word) + 1 and with_comma[:-1] == word and with_comma[-1] != tokenizer.special["unk"]
    )
    return tuple(with_comma[-1:]) if is_token else ()


def _ask_last_token(tokenizer: Tokenizer, index: int, ids: tuple[int, ...]) -> TrialPrompt:
    """Make a prompt whose target is the last token."""
    return TrialPrompt(sample_from_ids(index, ids, tokenizer), {len(ids) - 1: ids[-1]})


def _list_prompts(tokenizer: Tokenizer, seed: int) -> list[PromptWithTargets]:
    return [list_prompt(tokenizer, member) for member in single_token_words(tokenizer)]


PROMPT_MAKERS: dict[str, Callable[[Tokenizer, int], list[PromptWithTargets]]] = {
    "successor": _list_prompts,
}
