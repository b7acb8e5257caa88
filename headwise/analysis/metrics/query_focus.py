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

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.example_sampler import ShownPlaces
from headwise.analysis.metrics.metric import ALIKE, Column, Number, Target
from headwise.analysis.metrics.prompts import ENOUGH, MOST_SHOWN
from headwise.analysis.metrics.role_examples import Cases, Place
from headwise.analysis.metrics.row_stats import Rows
from headwise.analysis.metrics.tasks import TextTask, bare_unit, run_task, token_names
from headwise.analysis.recording.batching import Unit, tokenizer_of
from headwise.analysis.recording.text_buckets import BUCKETS
from headwise.model import AnyModel
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


class Query(NamedTuple):
    """Documents and a question, as a model reads them: which tokens are of the document in question, which ask."""

    ids: tuple[int, ...]
    gold: tuple[bool, ...]
    asks: tuple[bool, ...]


class QueryFocus(TextTask):
    """`hw.profile(model, prompts=True)`; for encoders too.

    >>> QueryFocus().names
    ('query focus', 'query focus null', 'query focus valued')
    """

    numbers = Number(
        "query focus", "weight of a question on the document it is about", more="finds what a question is about",
        merge=ALIKE, on="questions about one of three documents", target=Target("prompt", "query focus"),
    ).three()  # fmt: skip
    GOLD, ASKS = "in question", "asks"

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], Query] = {}  # by the ids of a text
        self._shown: Cases | None = None
        self.columns = (
            Column(self.GOLD, lambda text: self.known[text.ids].gold),
            Column(self.ASKS, lambda text: self.known[text.ids].asks),
        )

    @property
    def shown(self) -> Cases | None:
        """Where heads looked from the last token of some questions."""
        return self._shown

    def run(self, model: AnyModel, tally: Tally, seed: int = 0, progress: Progress | None = None) -> str:
        """Ask, and add up what is found; or why nothing is asked."""
        tally.expect(self.names)
        if model.spec.kind == "encoder-decoder":
            return "questions and documents are one text, which an encoder-decoder reads on two sides."
        texts, _ = self.texts(model, seed)
        if len(texts) < ENOUGH:
            return (
                f"{len(texts)} of {PROMPTS} prompts can be read with this tokenizer and context; {ENOUGH} are needed."
            )
        self._shown = Cases(tally.heads, rows=tuple(self._place(model, unit) for unit in texts[:MOST_SHOWN]))
        beside = [ShownPlaces(self._shown, self.score.name)]
        run_task(model, self, tally, seed, beside=beside, progress=progress)
        return ""

    def _place(self, model: AnyModel, unit: Unit) -> Place:
        """The end of a question, and all of what it is about."""
        query, names = self.known[unit.ids], token_names(tokenizer_of(model), unit.ids)
        last, gold = max(np.flatnonzero(query.asks), default=0), tuple(np.flatnonzero(query.gold).tolist())
        return Place(self.score.name, unit.number, unit.number % BUCKETS, unit.number, int(last), names, gold)

    def texts(self, model: AnyModel, seed: int) -> tuple[list[Unit], list[Unit]]:
        """Documents with a question about one of them, and with one about another."""
        tokenizer = tokenizer_of(model)
        room = model.spec.room
        pairs = [
            (one, other) for one, other in make_queries(tokenizer, seed) if max(map(len, (one.ids, other.ids))) <= room
        ]
        self.known = {query.ids: query for pair in pairs for query in pair}
        made = [[bare_unit(number, pair[i].ids, tokenizer) for number, pair in enumerate(pairs)] for i in (0, 1)]
        return made[0], made[1]

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Over the tokens that ask, which see all documents: the weight, nothing, the weight of what is fetched."""
        marks = rows.scene.marks[..., rows.scene.layout.marks.index(self.ASKS)]  # (B, S)
        asks = (
            (marks[:, rows.places] > 0)[:, None] & (rows.marked(self.GOLD) > 0) & rows.counted[:, None]
        )  # (B, 1 or H, n)
        heavy = rows.valued(self.GOLD) / rows.part(rows.NORM).clamp(min=1e-30)
        sums = [(one * asks).sum(2) for one in (rows.part(self.GOLD), heavy)]  # (B, H)
        return torch.stack((sums[0], torch.zeros_like(sums[0]), sums[1]), -1), asks.sum(2)[..., None]


def make_queries(tokenizer: Tokenizer, seed: int = 0, prompts: int = PROMPTS) -> list[tuple[Query, Query]]:
    """Three documents each, and a question about one of them; the twin has the same documents, of which the same is marked,
    and a question about another. None where the tokenizer does not know the words."""
    dice, made = np.random.default_rng(seed), []
    for number in range(prompts):
        drawn = dice.permutation(len(FACTS))[:DOCUMENTS]
        gold, other = (number % DOCUMENTS, (number + 1 + number // DOCUMENTS % (DOCUMENTS - 1)) % DOCUMENTS)
        facts = [FACTS[i][0] for i in drawn]
        pair = [_query(tokenizer, facts, FACTS[drawn[about]][1], gold) for about in (gold, other)]
        made.append((pair[0], pair[1]))
    unknown = tokenizer.special["unk"]
    return [pair for pair in made if not any(unknown in one.ids for one in pair)]


def _query(tokenizer: Tokenizer, facts: Sequence[str], question: str, gold: int) -> Query:
    """A text, with marks by the characters that tokens cover."""
    text = " ".join((*facts, question))
    aligned = tokenizer.align(text)
    start = sum(len(fact) + 1 for fact in facts[:gold])
    inside = [start <= a < b <= start + len(facts[gold]) for a, b in aligned.spans]
    asks = [a < b and a >= len(text) - len(question) for a, b in aligned.spans]
    return Query(aligned.ids, tuple(inside), tuple(asks))
