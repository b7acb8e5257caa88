"""What the causal test asks of the roles on prompts: their own prompts, and beside each the same answer in a list said twice.

The word due at the end of a prompt is the answer: the other name, the next of days. The control is a list of such words,
`Anna, Tom, Mary, Anna, Tom,`, drawn anew and without those of the prompt: there the same word is due because of what stood
before it the first time, and neither whose turn it is nor what comes next has a part in it. What holds back copies has no
prompts here: it is tried on the lists that induction is (causal_cases.py), where an answer must *gain* without the head.

Roles about two names (name mover, name suppression) are judged by the lead of the name due over the other name, and have two
controls: such lists, and single-name prompts, `Then Mary went home. Somebody gave a book to`. A name mover lifts a single
name as much as the name due among two; a head that lifts any earlier name lifts the single name and leaves the lead among
two as it is. So the lead must lose more than half of what it loses with a single name. A head that suppresses the wrong
candidate has nothing to suppress with a single name, so its lead must lose more than there.
"""

from collections.abc import Callable, Sequence

import numpy as np

from headwise.analysis.metrics.name_movers import make_name_pairs
from headwise.analysis.metrics.prompt_metric import PromptWithTargets
from headwise.analysis.metrics.statistics import MIN_UNITS
from headwise.analysis.metrics.successor import list_prompt, single_token_words
from headwise.analysis.metrics.task_metric import sample_from_ids
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.causal_trials import (
    LIST_LENGTH,
    CausalTrial,
    TrialPrompt,
    drop_unpredicted_targets,
    make_controlled_trial,
)
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.text import Tokenizer

MAX_PROMPTS = 32  # at most
# Share of the loss in single-name prompts that the loss of the lead between two names must exceed.
SINGLE_NAME_FRACTIONS = {"name mover": 0.5, "name suppression": 1.0}


def prompt_trial(model: ModelProtocol, role: str, seed: int) -> CausalTrial:
    """Prompts of a role, each beside a list; those the whole model foresees in both. No cases: it has no prompts."""
    tokenizer, max_tokens, rng = tokenizer_of(model), model.spec.max_input_tokens, np.random.default_rng(seed)
    try:
        prompts = PROMPT_MAKERS[role](tokenizer, seed) if role in PROMPT_MAKERS else []
    except HeadwiseError:  # this tokenizer leaves too little to ask
        prompts = []
    prompts = [prompt for prompt in prompts if len(prompt.ids) <= max_tokens]
    sampled = [prompts[i] for i in rng.permutation(len(prompts))[:MAX_PROMPTS]]
    sampled.sort(
        key=lambda prompt: len(prompt.ids)
    )  # a head borrows from the prompt before: from one of its own length
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
    return make_controlled_trial(
        prompt_rows, drop_unpredicted_targets(model, prompt_rows), drop_unpredicted_targets(model, list_rows)
    )


def name_lead_trial(model: ModelProtocol, role: str, seed: int) -> CausalTrial:
    """Sentences about two people, by the lead of the name due over the other; each with a list and a single-name prompt for
    the same name. The whole model foresees it in all three. In turns the first and the second name are due."""
    tokenizer, max_tokens, rng = tokenizer_of(model), model.spec.max_input_tokens, np.random.default_rng(seed)
    try:
        pairs = make_name_pairs(tokenizer, seed)
    except HeadwiseError:  # this tokenizer leaves too few names
        return CausalTrial(())
    chosen = [(pair.sentences[i % 2], pair.singles[i % 2]) for i, pair in enumerate(pairs)]
    chosen = [
        (sentence, single) for sentence, single in chosen if single is not None and len(sentence.ids) < max_tokens
    ]
    sampled = sorted((chosen[i] for i in rng.permutation(len(chosen))[:MAX_PROMPTS]), key=lambda pair: len(pair[0].ids))
    pool, separator = sorted({sentence.answer for sentence, _ in chosen}), _comma_tokens(tokenizer)
    length = min(LIST_LENGTH, (max_tokens - len(tokenizer.template_ids[0])) // (2 + 2 * len(separator)))
    kinds: list[list[TrialPrompt]] = [[], [], []]  # sentences about two, lists, sentences about one
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
    """A list of so many with the answer in it, and the beginning of the same list up to the answer, which comes last."""
    answer = prompt.targets[0].answer
    others = [int(token) for token in rng.permutation(pool) if token != answer and token not in prompt.ids]
    words = others[: length - 1]
    position = int(rng.integers(1, len(words) + 1)) if words else 0  # nobody can foresee the first of a list
    words.insert(position, answer)
    *leading, last = (*words, *words[: position + 1])
    return (*(token for word in leading for token in (word, *separator)), last)


def _comma_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The comma behind a word, if it is a token: names without one between them are no list that models go on with."""
    word, with_comma = (tokenizer.encode(text, add_special_tokens=False) for text in ("Then", "Then,"))
    is_token = (
        len(with_comma) == len(word) + 1 and with_comma[:-1] == word and with_comma[-1] != tokenizer.special["unk"]
    )
    return tuple(with_comma[-1:]) if is_token else ()


def _ask_last_token(tokenizer: Tokenizer, index: int, ids: tuple[int, ...]) -> TrialPrompt:
    """The last token is asked for."""
    return TrialPrompt(sample_from_ids(index, ids, tokenizer), {len(ids) - 1: ids[-1]})


def _list_prompts(tokenizer: Tokenizer, seed: int) -> list[PromptWithTargets]:
    return [list_prompt(tokenizer, member) for member in single_token_words(tokenizer)]


PROMPT_MAKERS: dict[str, Callable[[Tokenizer, int], list[PromptWithTargets]]] = {
    "successor": _list_prompts,
}
