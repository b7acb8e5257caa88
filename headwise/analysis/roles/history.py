"""A history: every head's measures again and again while a model is trained, on the same few texts.

Heads begin alike and find their work at different times, some of them suddenly (https://arxiv.org/abs/2209.11895).
"""

import hashlib
import json
from bisect import bisect_left
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.induction import DUPLICATE, INDUCTION, Echo, Repeats, make_repeats
from headwise.analysis.metrics.offsets import OFFSET
from headwise.analysis.metrics.relation_metrics import HITS
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, RESTING
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.tasks import run_task
from headwise.analysis.metrics.token_classes import class_flags
from headwise.analysis.recording.batching import Unit, make_batches, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import Reading, fitting
from headwise.errors import HeadwiseError, close_names
from headwise.io.atomic_write import whole_file
from headwise.model import Transformer, quiet
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY

MEASURES = tuple(
    number.name for number in (ENTROPY, CONFIDENCE, DISTANCE, RESTING, OFFSET[1], INDUCTION[0], DUPLICATE[0])
)
VERSION = 2
DOCUMENTS = 48  # a look must be cheap beside the steps between two looks


class Life(NamedTuple):
    """What became of one measure: the head with most of it, beside the most any head had at the first look."""

    measure: str
    head: str
    value: float
    baseline: float  # the most of any head at the first look
    cases: int  # rows or arcs it is a mean over
    half_at: int | None  # the step at which that head first had half of it


class HeadHistory:
    """Give it to `hw.train(…, call=history, every=100)`, or call it with a model and a step.

    The texts are made at the first look and stay: `corpus`, or some documents of the little language for models that read
    it, or some of the probe set. `relations`: ask for gold arcs too, where the corpus has some; `coreference > hits` is the
    share of arcs whose target is the word looked at most.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.training import Recipe, train
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> history = HeadHistory("to be or not to be")
    >>> recipe = Recipe(steps=6, batch=4, warmup=2)
    >>> made = train(spec, "to be or not to be " * 50, recipe, call=history, every=4, progress=False)
    >>> history.steps, history.addresses, len(history.of("0.1", "induction"))
    ([0, 4, 6], ('0.0', '0.1'), 3)
    """

    def __init__(self, corpus: Any = None, relations: bool = True) -> None:
        self.corpus, self.relations = corpus, relations
        self.steps: list[int] = []
        self.addresses: tuple[str, ...] = ()
        self.names: tuple[str, ...] = ()
        self.counts: tuple[int, ...] = ()  # rows or arcs each measure is a mean over
        self._rows: list[np.ndarray] = []  # for each step (heads, measures)
        self._digest = ""  # of the texts, so that two sets of them never share a curve
        self._probe: tuple[list[Unit], Repeats] | None = None
        self.path: Path | None = None  # a file that is written at every look

    @staticmethod
    def kept_in(path: str | Path, corpus: Any = None) -> "HeadHistory":
        """One that is saved at every look, in a file; what a stopped run left there is gone on with.

        >>> import tempfile
        >>> HeadHistory.kept_in(tempfile.mkdtemp() + "/heads.npz").steps
        []
        """
        made = HeadHistory.load(path, corpus) if Path(path).is_file() else HeadHistory(corpus)
        made.path = Path(path)
        return made

    def __call__(self, model: Transformer, step: int) -> None:
        """Look at a model as it is at a step; a step that was seen before is seen anew."""
        if model.spec.kind == "encoder-decoder":
            raise HeadwiseError("a history reads one text at a time; an encoder-decoder needs two.")
        addresses = tuple(str(address) for site in model.all_sites() for address in site.addresses)
        if self.addresses and addresses != self.addresses:
            raise HeadwiseError(
                f"this history is of {len(self.addresses)} heads, {self.addresses[0]} to {self.addresses[-1]}; the model "
                f"has {len(addresses)} heads that are not the same. Begin another for it."
            )
        with quiet(model), torch.no_grad():
            units, repeats = self._read(model)
            names, counts, row = _look(model, len(addresses), units, repeats, self.relations)
        if self.names and names != self.names:
            raise HeadwiseError(
                f"this history keeps {len(self.names)} measures, this look gave {len(names)}; begin another."
            )
        self.addresses, self.names, self.counts = addresses, names, counts
        self._keep(step, row)
        if self.path is not None:
            self.save(self.path)

    @property
    def values(self) -> np.ndarray:
        """Everything: (steps, heads, measures), float32."""
        empty = np.zeros((0, len(self.addresses), len(self.names)), dtype=np.float32)
        return np.stack(self._rows) if self._rows else empty

    def of(self, head: str, measure: str) -> list[float]:
        """One head's life in one measure: a number for each of `steps`."""
        if head not in self.addresses:
            raise HeadwiseError(f"there is no head {head!r} here; {close_names(head, self.addresses)}")
        return self.values[:, self.addresses.index(head), self._place(measure)].tolist()

    def born(self, measure: str, threshold: float) -> dict[str, int]:
        """The first step at which each head reached a threshold; heads that never did are left out."""
        reached = self.values[..., self._place(measure)] >= threshold  # (steps, heads)
        return {
            head: self.steps[int(reached[:, i].argmax())]
            for i, head in enumerate(self.addresses)
            if reached[:, i].any()
        }

    def best(self, measure: str) -> tuple[str, float]:
        """The head with the most of a measure at the last step, and how much."""
        place = self._place(measure)
        last = self._rows[-1][:, place]  # (heads,)
        if np.isnan(last).all():
            raise HeadwiseError(f"{measure!r} has no number for any head; the texts never ask for it.")
        head = int(np.nanargmax(last))
        return self.addresses[head], float(last[head])

    def baseline(self, measure: str) -> float:
        """The most any head had of a measure at the first look: of a new model, what one sees that has learned nothing."""
        first = self._rows[0][:, self._place(measure)]
        return float("nan") if np.isnan(first).all() else float(np.nanmax(first))

    def lives(self) -> list[Life]:
        """For each measure the head with most of it, how much, and the step at which it first had half of that."""
        made = []
        for measure, cases in zip(self.names, self.counts, strict=True) if self.steps else ():
            head, value = self.best(measure)
            half = self.born(measure, value / 2).get(head) if value > 0 else None  # half of nothing is no news
            made.append(Life(measure, head, value, self.baseline(measure), cases, half))
        return made

    def save(self, path: str | Path) -> Path:
        """Write one compressed file; `HeadHistory.load` brings it back."""
        told = {
            "version": VERSION, "steps": self.steps, "heads": self.addresses, "names": self.names,
            "counts": self.counts,
            "relations": self.relations, "texts": self._digest,
        }  # fmt: skip
        written = BytesIO()
        np.savez_compressed(written, values=self.values, told=np.frombuffer(json.dumps(told).encode(), dtype=np.uint8))
        return whole_file(path, written.getvalue())

    @staticmethod
    def load(path: str | Path, corpus: Any = None) -> "HeadHistory":
        """Read a file written by `save`. To go on with it, give the corpus it was made with, if there was one."""
        try:
            data = BytesIO(Path(path).read_bytes())  # numpy leaves a damaged file open
            with np.load(data, allow_pickle=False) as file:
                values, told = file["values"], json.loads(file["told"].tobytes())
            if told["version"] != VERSION:
                raise HeadwiseError(f"it is of version {told['version']}, this is {VERSION}")
            return _restored(values, told, corpus)
        except FileNotFoundError:
            raise HeadwiseError(f"there is no file {path}.") from None
        except Exception as error:  # zipfile, zlib, numpy and json each have their own
            raise HeadwiseError(
                f"{path} is not a history that can be read here ({error}); move it away and begin anew."
            ) from None

    def _place(self, measure: str) -> int:
        if not self.steps:
            raise HeadwiseError("this history is empty; give it to hw.train(…, call=history), or call it.")
        if measure not in self.names:
            raise HeadwiseError(f"{measure!r} was not measured; {close_names(measure, self.names)}")
        return self.names.index(measure)

    def _keep(self, step: int, row: np.ndarray) -> None:
        place = bisect_left(self.steps, step)
        known = self.steps[place : place + 1] == [step]
        self.steps[place : place + known] = [step]
        self._rows[place : place + known] = [row]

    def _read(self, model: Transformer) -> tuple[list[Unit], Repeats]:
        """The texts, the same at every look."""
        if self._probe is None:
            corpus = _default(model) if self.corpus is None else self.corpus
            units, repeats = list(Reading.of(model, corpus)), make_repeats(model, sequences=8, length=16)
            told = json.dumps([[unit.ids for unit in units], repeats.twice.tolist(), repeats.once.tolist()])
            digest = hashlib.sha256(told.encode()).hexdigest()
            if self._digest not in ("", digest):
                raise HeadwiseError("this history was made with other texts; load it with the same corpus=….")
            self._probe, self._digest = (units, repeats), digest
        return self._probe


def _default(model: Transformer) -> Corpus:
    """Documents in a language the model may know; where none fits into its context, their texts, to be cut."""
    tokenizer = tokenizer_of(model)
    little = set(tokenizer.backend.get_vocab()) >= set(VOCABULARY)
    corpus = Corpus.little("held-out", documents=DOCUMENTS, seed=7) if little else Corpus.probe()
    return fitting(model, corpus, DOCUMENTS)


def _look(
    model: Transformer, heads: int, units: list[Unit], repeats: Repeats, ask: bool
) -> tuple[tuple[str, ...], tuple[int, ...], np.ndarray]:
    """One look: the names of the measures, what they are means over, and (heads, measures)."""
    tally = Tally(heads)
    usual = usual_measures(class_flags(tokenizer_of(model), model.spec.vocab))
    documents = [unit.document for unit in units if unit.document is not None]
    asked = ask and documents
    relations = Relations.of(tally, documents, model.spec.kind == "decoder") if asked else None
    runner = Runner(tally, [*usual, *([] if relations is None else [relations])])
    runner.read(model, make_batches(units, 2048, device=model.device))
    run_task(model, Echo(repeats), tally, null=False)
    names = MEASURES
    if relations is not None:
        there = relations.arcs.sum(0) > 0  # a decoder is never asked about words to come
        names += tuple(one.numbers[HITS].name for one, some in zip(relations.questions, there, strict=True) if some)
    counts = tuple(int(tally.per_bucket(name)[1].sum(0).max()) for name in names)
    return names, counts, np.stack([tally.mean(name) for name in names], 1).astype(np.float32)


def _restored(values: np.ndarray, stored: dict[str, Any], corpus: Any) -> HeadHistory:
    made = HeadHistory(corpus, bool(stored["relations"]))
    made.steps = [int(step) for step in stored["steps"]]
    made.addresses = tuple(str(Address.parse(head)) for head in stored["heads"])
    made.names, made._digest = tuple(map(str, stored["names"])), str(stored["texts"])
    made.counts = tuple(map(int, stored["counts"]))
    shape = (len(made.steps), len(made.addresses), len(made.names))
    if values.shape != shape or values.dtype != np.float32 or made.steps != sorted(set(made.steps)):
        raise HeadwiseError(f"its numbers are {values.dtype} {values.shape}, not float32 {shape} in the order of steps")
    made._rows = list(values)
    return made
