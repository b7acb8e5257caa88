"""What the last rung asks of the roles on prompts: their own prompts, and beside each the same answer in a list said twice.

The word due at the end of a prompt is the answer: the other name, the next of days. The control is a list of such words,
`Anna, Tom, Mary, Anna, Tom,`, drawn anew and without those of the prompt: there the same word is due because of what stood
before it the first time, and neither whose turn it is nor what comes next has a part in it. What holds back copies has no
prompts here: it is tried on the lists that induction is (trials.py), where an answer must *gain* without the head.

Roles about two names (name mover, name suppression) are judged by the lead of the name due over the other name, and have two
controls: such lists, and single-name prompts, `Then Mary went home. Somebody gave a book to`. A name mover lifts a single
name as much as the name due among two; a head that lifts any earlier name lifts the single name and leaves the lead among
two as it is. So the lead must lose more than half of what it loses with a single name. A head that suppresses the wrong
candidate has nothing to suppress with a single name, so its lead must lose more than there.
"""

from collections.abc import Callable, Sequence

import numpy as np

from headwise.analysis.metrics.name_movers import make_name_pairs
from headwise.analysis.metrics.prompts import DuePrompt
from headwise.analysis.metrics.statistics import FEWEST
from headwise.analysis.metrics.successor import find_members, list_prompt
from headwise.analysis.metrics.tasks import bare_unit
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.causal_cases import LISTED, Prompt, Trial, foreseen, paired
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.text import Tokenizer

PROMPTS = 32  # at most
# Share of the loss in single-name prompts that the loss of the lead between two names must exceed.
SHARES = {"name mover": 0.5, "name suppression": 1.0}


def prompt_trial(model: AnyModel, role: str, seed: int) -> Trial:
    """Prompts of a role, each beside a list; those the whole model foresees in both. No cases: it has no prompts."""
    tokenizer, room, dice = tokenizer_of(model), model.spec.room, np.random.default_rng(seed)
    try:
        prompts = PROMPTS_OF[role](tokenizer, seed) if role in PROMPTS_OF else []
    except HeadwiseError:  # this tokenizer leaves too little to ask
        prompts = []
    prompts = [prompt for prompt in prompts if len(prompt.ids) <= room]
    some = [prompts[i] for i in dice.permutation(len(prompts))[:PROMPTS]]
    some.sort(key=lambda prompt: len(prompt.ids))  # a head borrows from the prompt before: from one of its own length
    pool = sorted({prompt.dues[0].answer for prompt in prompts})
    between = _comma(tokenizer)
    length = min(LISTED, (room - len(tokenizer.around[0])) // (2 + 2 * len(between)))
    asked, lists = [], []
    for number, prompt in enumerate(some):
        due = prompt.dues[0]
        asked.append(_row(tokenizer, number, (*prompt.ids[: due.row + 1], due.answer)))
        lists.append(_row(tokenizer, number, (*tokenizer.around[0], *_list(prompt, pool, length, between, dice))))
    return paired(asked, foreseen(model, asked), foreseen(model, lists))


def lead_trial(model: AnyModel, role: str, seed: int) -> Trial:
    """Sentences about two people, by the lead of the name due over the other; each with a list and a single-name prompt for
    the same name. The whole model foresees it in all three. In turns the first and the second name are due."""
    tokenizer, room, dice = tokenizer_of(model), model.spec.room, np.random.default_rng(seed)
    try:
        pairs = make_name_pairs(tokenizer, seed)
    except HeadwiseError:  # this tokenizer leaves too few names
        return Trial(())
    chosen = [(pair.sentences[i % 2], pair.singles[i % 2]) for i, pair in enumerate(pairs)]
    chosen = [(sentence, single) for sentence, single in chosen if single is not None and len(sentence.ids) < room]
    some = sorted((chosen[i] for i in dice.permutation(len(chosen))[:PROMPTS]), key=lambda both: len(both[0].ids))
    pool, between = sorted({sentence.due for sentence, _ in chosen}), _comma(tokenizer)
    length = min(LISTED, (room - len(tokenizer.around[0])) // (2 + 2 * len(between)))
    kinds: list[list[Prompt]] = [[], [], []]  # sentences about two, lists, sentences about one
    for number, (sentence, single) in enumerate(some):
        listed = _list(sentence.prompt(), pool, length, between, dice)
        texts = ((*sentence.ids, sentence.due), (*tokenizer.around[0], *listed), (*single.ids, sentence.due))
        for rows, ids in zip(kinds, texts, strict=True):
            rows.append(_row(tokenizer, number, ids)._replace(rivals={len(ids) - 1: sentence.other}))
    answered = zip(*(foreseen(model, rows) for rows in kinds), strict=True)
    kept = [triple for triple in answered if all(row.wanted for row in triple)]
    if len(kept) < FEWEST:
        return Trial(tuple(kinds[0]))
    cases, lists, singles = (tuple(rows) for rows in zip(*kept, strict=True))
    numbers = tuple((number,) for number in range(len(cases)))
    return Trial(cases, lists, numbers, singles=singles, share=SHARES[role])


def _list(
    prompt: DuePrompt, pool: Sequence[int], length: int, between: tuple[int, ...], dice: np.random.Generator
) -> tuple[int, ...]:
    """A list of so many with the answer in it, and the beginning of the same list up to the answer, which comes last."""
    answer = prompt.dues[0].answer
    others = [int(token) for token in dice.permutation(pool) if token != answer and token not in prompt.ids]
    said = others[: length - 1]
    place = int(dice.integers(1, len(said) + 1)) if said else 0  # nobody can foresee the first of a list
    said.insert(place, answer)
    *before, last = (*said, *said[: place + 1])
    return (*(token for word in before for token in (word, *between)), last)


def _comma(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The comma behind a word, if it is a token: names without one between them are no list that models go on with."""
    word, both = (tokenizer.encode(text, special=False) for text in ("Then", "Then,"))
    alone = len(both) == len(word) + 1 and both[:-1] == word and both[-1] != tokenizer.special["unk"]
    return tuple(both[-1:]) if alone else ()


def _row(tokenizer: Tokenizer, number: int, ids: tuple[int, ...]) -> Prompt:
    """The last token is asked for."""
    return Prompt(bare_unit(number, ids, tokenizer), {len(ids) - 1: ids[-1]})


def _list_prompts(tokenizer: Tokenizer, seed: int) -> list[DuePrompt]:
    return [list_prompt(tokenizer, member) for member in find_members(tokenizer)]


PROMPTS_OF: dict[str, Callable[[Tokenizer, int], list[DuePrompt]]] = {
    "successor": _list_prompts,
}
