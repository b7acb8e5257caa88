"""The trade-off of heads: one model for each head count and seed, all else equal."""

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.distributed.executor import check_executor, work
from headwise.errors import HeadwiseError
from headwise.experiments.depth import same_cut
from headwise.experiments.diversity import diversity
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.pool import train_all
from headwise.experiments.engine.statistic import Figure
from headwise.experiments.engine.store import Store
from headwise.experiments.engine.versions import declared
from headwise.experiments.experiment import LITTLE_WORDS, usual_point, usual_recipe
from headwise.progress import Progress
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.corpus import Corpus

SHORTEST = 128  # context that holds every document of the little language
DOCUMENTS = 100  # held out, on which the maps of heads are compared


@dataclass(frozen=True)
class SweepRow:
    """One head count: its sizes, and what its models came to, over seeds."""

    name: str
    heads: int
    head_dim: int
    layers: int
    parameters: int
    loss: Figure  # held out, nats a token
    marks: dict[str, Figure]  # right answers by kind of quiz, on the little language
    diversity: dict[str, Figure]  # js: how far the maps of a layer's heads are apart; write: how far they write alike
    speed: Figure  # tokens a second, with the other points running beside
    memory: Figure  # megabytes at the peak of training, above what the process held before


@dataclass(frozen=True)
class Sweep:
    """Every row, in the order asked for. `constant` says what stayed the same."""

    constant: str
    width: int
    steps: int
    seeds: int
    rows: tuple[SweepRow, ...]
    curves: dict[str, list[dict[str, Any]]]  # the held-out loss through training, by the name of a row

    @property
    def best(self) -> SweepRow:
        """The row with the lowest loss."""
        return min(self.rows, key=lambda row: row.loss.mean)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return json.loads(json.dumps(asdict(self)), parse_constant=str)  # NaN is a word there


def head_sweep(
    heads: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    width: int = 64,
    head_dim: int | None = None,
    layers: int = 2,
    context: int = 128,
    corpus: str | Path | None = None,
    tokenizer: str | None = None,
    steps: int = 2000,
    batch: int = 16,
    rate: float = 2e-3,
    seeds: int = 3,
    cache: str | Path | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Train a model for each head count and seed, at constant heads × head_dim, or with `head_dim` at that constant.

    All points have learned positions: heads of one channel cannot rotate. `corpus` is a file or a folder; none is the little
    language. Points are trained in so many processes, or by an `executor` ("dask", "slurm", any of
    `concurrent.futures`), and kept in the cache; those that are there are not trained again.
    """
    specs = {}
    for count in check_heads(heads, width, head_dim):
        attention = AttentionSpec(width=width, heads=count, head_dim=head_dim or 0)
        specs[str(count)] = ModelSpec(vocab=LITTLE_WORDS, context=context, layers=layers, attention=attention)
    constant = "heads × head_dim" if head_dim is None else f"head_dim {head_dim}"
    return compare(
        specs, constant, corpus=corpus, tokenizer=tokenizer, steps=steps, batch=batch, rate=rate, seeds=seeds, cache=cache,
        processes=processes, executor=executor, progress=progress,
    )  # fmt: skip


def depth_or_heads(*, width: int = 64, heads: int = 8, layers: int = 6, context: int = 128, **training: Any) -> Sweep:
    """The same parameters taken from layers or from heads: the whole model, one block less, and fewer heads everywhere.

    `training` is what `compare` takes: corpus, steps, seeds and so on.
    """
    attention = AttentionSpec(width=width, heads=heads)
    whole = ModelSpec(vocab=LITTLE_WORDS, context=context, layers=layers, attention=attention)
    shallow, narrow = same_cut(whole)
    specs = {"whole": whole, "fewer layers": shallow, "fewer heads": narrow}
    return compare(specs, "what is cut, in parameters", **training)


def compare(
    specs: dict[str, ModelSpec],
    constant: str,
    *,
    corpus: str | Path | None = None,
    tokenizer: str | None = None,
    steps: int = 2000,
    batch: int = 16,
    rate: float = 2e-3,
    seeds: int = 3,
    cache: str | Path | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Train any models side by side, each with every seed, and measure them alike."""
    if seeds < 1:
        raise HeadwiseError(f"a sweep needs at least one seed, got {seeds}.")
    check_executor(executor)
    if corpus is None:
        _check_little(specs, tokenizer)
    store = Store(cache)
    rows = "texts" if corpus is None else "windows"
    read = str(corpus or ""), tokenizer or ("word" if corpus is None else "byte")
    recipes = [usual_recipe(steps, seed=seed, batch=batch, rate=rate, rows=rows) for seed in range(seeds)]
    points = {name: [usual_point(spec, recipe, "usual", *read) for recipe in recipes] for name, spec in specs.items()}
    train_all([point for some in points.values() for point in some], store, processes, progress, executor)
    made = {name: [_there(store, point) for point in some] for name, some in points.items()}
    apart = _diversities([each for some in made.values() for each in some], store, processes, progress, executor)
    told = tuple(_row(name, some, [apart[each.folder.name] for each in some]) for name, some in made.items())
    width = next(iter(specs.values())).width
    return Sweep(constant, width, steps, seeds, told, {name: _curve(some) for name, some in made.items()})


def _check_little(specs: dict[str, ModelSpec], tokenizer: str | None) -> None:
    """The little language is read word by word, and a row is a whole document."""
    if tokenizer not in (None, "word"):
        raise HeadwiseError(
            f"the little language is read in words, got tokenizer {tokenizer!r}; give a text of your own."
        )
    short = min(spec.context for spec in specs.values())
    if short < SHORTEST:
        raise HeadwiseError(f"documents of the little language need a context of {SHORTEST} tokens, got {short}.")


def check_heads(heads: Sequence[int], width: int, head_dim: int | None = None) -> list[int]:
    """Head counts that divide the width, each once; others are refused, with the nearest that do.

    >>> check_heads([1, 8, 8], 64)
    [1, 8]
    """
    chosen = list(dict.fromkeys(heads))
    if width < 1 or (head_dim is not None and head_dim < 1):
        raise HeadwiseError(f"width and head_dim must be at least 1, got {width} and {head_dim}.")
    if not chosen or any(type(count) is not int or count < 1 for count in chosen):
        raise HeadwiseError(f"head counts are whole numbers of at least 1, e.g. 1,2,4,8; got {list(heads)}.")
    for count in chosen:
        if head_dim is None and width % count:
            fit = [d for d in range(1, width + 1) if width % d == 0]
            near = [max(d for d in fit if d < count), *[d for d in fit if d > count][:1]]
            told = " and ".join(map(str, near))
            raise HeadwiseError(
                f"{count} heads do not divide a width of {width}; nearest to it {told} would. "
                f"Or keep the size of a head with head_dim."
            )
    return chosen


def _there(store: Store, point: Point) -> Made:
    made = store.made(point)
    if made is None:
        raise HeadwiseError(f"{store.place(point)} was taken away meanwhile; run the same again.")
    return made


def _diversities(
    made: list[Made],
    store: Store,
    processes: int | None,
    progress: Progress | None,
    executor: Executor | str | None,
) -> dict[str, dict[str, float]]:
    """How far apart the heads of each model are, by the name of its point; what was measured before is taken as it is."""
    version = hashlib.sha256(declared("measures").encode()).hexdigest()[:16]
    found = {each.folder.name: store.result("diversity", f"{each.folder.name}-{version}") for each in made}
    todo = [each for each in made if found[each.folder.name] is None]

    def look() -> None:
        if progress is not None:
            progress("comparing heads", sum(told is not None for told in found.values()), len(found))

    jobs = [(each.point.to_json(), str(store.folder)) for each in todo]
    for place, told in work(_diversity, jobs, processes, look, executor=executor, folder=store.folder):
        name = todo[place].folder.name
        found[name] = told
        store.keep("diversity", f"{name}-{version}", told)
    return found


def _diversity(point: str, folder: str) -> dict[str, float]:
    made = _there(Store(folder), Point.from_json(point))
    if made.diverged:
        return {}
    text, seed = made.point.text, made.point.recipe.seed
    read = Corpus.of(Path(text)) if text else Corpus.little("held-out", documents=DOCUMENTS, seed=seed)
    return diversity(made.model(), read)


def _row(name: str, made: list[Made], apart: list[dict[str, float]]) -> SweepRow:
    ended = [each for each in made if not each.diverged]
    spec = ended[0].model().spec if ended else made[0].point.spec
    measured = [told for told in apart if told]
    return SweepRow(
        name, spec.attention.heads, spec.attention.head_dim, spec.layers, spec.parameters,
        Figure.over([each.loss for each in made]),
        {kind: Figure.over([each.marks[kind] for each in ended]) for kind in (ended[0].marks if ended else ())},
        {kind: Figure.over([told[kind] for told in measured]) for kind in (measured[0] if measured else ())},
        *(Figure.over([_known(each.results[what]) for each in made]) for what in ("speed", "memory")),
    )  # fmt: skip


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _curve(made: list[Made]) -> list[dict[str, Any]]:
    """Of the runs that came to an end."""
    curves = [dict(each.curve) for each in made if not each.diverged]
    losses = {step: Figure.over([curve[step] for curve in curves]) for step in (curves[0] if curves else ())}
    return [{"step": step, "mean": f.mean, "low": f.low, "high": f.high} for step, f in losses.items()]
