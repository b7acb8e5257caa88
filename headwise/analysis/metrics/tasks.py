"""Tasks: measures on texts or prompts of their own, whatever the corpus is."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.metric import Measure
from headwise.analysis.metrics.role_examples import Cases
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import Batch, Unit, make_batches
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.text import Tokenizer
from headwise.text.align import Alignment

TOKENS = 2048  # in a batch
SCORE, NULL, VALUED = range(3)  # where they stand in a task's numbers, three by three


class TaskMeasure(Measure):
    """A measure that reads what it needs by itself: three numbers, the score, its null and its valued twin, or several times
    three."""

    @property
    def chosen(self) -> Mapping[str, Sequence[int]]:
        """What was chosen for each head while it was asked, by number: told beside its role."""
        return {}

    @property
    def shown(self) -> Cases | None:
        """What heads did at some of the places it asked about; None: nothing is shown."""
        return None

    @abstractmethod
    def run(self, model: AnyModel, tally: Tally, seed: int = 0, progress: Progress | None = None) -> str:
        """Ask, and add up what is found. What comes back says why nothing was asked; empty where something was."""


class TextTask(TaskMeasure):
    """A measure on texts of its own.

    The score and the twin are taken from some texts; the null is the score at the same places of others, which have
    everything but what is looked for. Each pair of texts is a unit of the statistics.
    """

    tokens = TOKENS

    @abstractmethod
    def texts(self, model: AnyModel, seed: int) -> tuple[list[Unit], list[Unit]]:
        """The texts, and the others, one for each. None at all where the model cannot be asked."""

    def run(self, model: AnyModel, tally: Tally, seed: int = 0, progress: Progress | None = None) -> str:
        """Read both."""
        run_task(model, self, tally, seed, progress=progress)
        return ""


def run_task(
    model: AnyModel,
    task: TextTask,
    tally: Tally,
    seed: int = 0,
    *,
    null: bool = True,
    beside: Sequence[Measure] = (),
    progress: Progress | None = None,
) -> None:
    """Read the texts of a task and add up what it takes. `null`: and the others. `beside`: measures without numbers that see
    the texts too."""
    tally.expect(task.names)
    group, (texts, others) = task.names[0], task.texts(model, seed)
    of, counted = len(texts) + len(others) * null, [Tally(tally.heads), Tally(tally.heads)]
    told, asks = task.score.on or task.score.name, [(texts, beside), (others if null else [], ())]
    done = 0

    def batches(units: list[Unit]) -> Iterator[Batch]:
        nonlocal done
        for batch in make_batches(units, task.tokens, device=model.device):
            if progress is not None:
                progress(told, done, of)
            yield batch
            done += len(batch.units)

    for made, (units, more) in zip(counted, asks, strict=True):
        Runner(made, [task, *more]).read(model, batches(units))
    if progress is not None:
        progress(told, of, of)
    for kind in ("sums", "counts"):
        here, there = (getattr(made, kind)[group] for made in counted)  # (buckets, heads, numbers)
        taken = np.empty_like(here)
        for place, source in ((SCORE, here), (NULL, there), (VALUED, here)):
            taken[..., place::3] = source[..., SCORE if place == NULL else place :: 3]
        getattr(tally, kind)[group] += taken


def bare_unit(number: int, ids: tuple[int, ...], tokenizer: Tokenizer) -> Unit:
    """Ids as a text of their own, each in its own bucket; it is no text that anybody wrote."""
    pieces = [tokenizer.token(i) for i in ids]
    return Unit(number, number, ids, None, partial(Alignment.of, "", ids, pieces, [(0, 0)] * len(ids)))


def token_names(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """Tokens as they are shown, one by one.

    >>> from headwise.text.build_tokenizers import word_tokenizer
    >>> token_names(word_tokenizer(["the", "cat"]), [1, 0])
    ('cat', 'the')
    """
    return tuple(tokenizer.decode([i], special=True).strip() or tokenizer.token(i) for i in ids)
