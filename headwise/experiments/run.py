"""Put claims to the test: train the models they share, measure them side by side, then those that need the machine alone."""

import hashlib
import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.distributed.executor import check_executor, work
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Verdict
from headwise.experiments.engine.pool import check_same, train_all
from headwise.experiments.engine.statistic import LEVEL, Figures
from headwise.experiments.engine.store import Store
from headwise.experiments.engine.versions import declared
from headwise.experiments.experiment import FULL, QUICK, SEEN, Lab, LabSize
from headwise.experiments.registry import find_claims
from headwise.progress import Progress
from headwise.weights import load

if TYPE_CHECKING:
    from headwise.model import AnyModel


@dataclass(frozen=True)
class Result:
    """A claim that was put to the test."""

    claim: Claim
    figures: Figures
    verdict: Verdict
    seeds: tuple[int, ...]
    on: str = ""  # the model it was tried on, where one was given
    again: str = ""  # how to do it again

    @property
    def indicative(self) -> bool:
        """One seed shows the way, no more."""
        return len(self.seeds) < 3

    @property
    def seen(self) -> bool:
        """Whether its seeds were looked at while rules were made: then its verdict is for exploring."""
        return not self.on and any(seed in SEEN for seed in self.seeds)

    @property
    def ends(self) -> str:
        """What `low` and `high` of its figures are."""
        levels = [figure.level for _, _, figure in self.figures if figure.level != LEVEL]
        more = f"; {100 * levels[0]:.4g} % each for the {len(levels)} the rule looks at" if levels else ""
        return f"{100 * LEVEL:g} %{more}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        claim = self.claim
        return {
            "number": claim.number, "name": claim.name, "says": claim.says, "against": claim.against,
            "setup": claim.setup, "rule": claim.rule, "identity": claim.identity, "verdict": self.verdict.word,
            "depends_on": self.verdict.on, "indicative": self.indicative, "seeds": list(self.seeds), "seen": self.seen,
            "on": self.on, "again": self.again, "ends": self.ends,
            "figures": self.figures.to_rows(),
        }  # fmt: skip


def claims(
    names: Iterable[str] = (),
    *,
    full: bool = False,
    seeds: int | None = None,
    first_seed: int = 0,
    on: "AnyModel | str | None" = None,
    corpus: Any = None,
    size: LabSize | None = None,
    cache: str | Path | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
) -> list[Result]:
    """Run claims by name, or all: with one seed, with three (`full`), or with as many as `seeds` says, from `first_seed` on.

    `on` tries those that apply on a model, with a corpus if given; seeds are for models that are trained here. What was
    found before by the same code is not done again. `executor` trains and measures, all but what needs a machine alone: that
    is measured here. `say` is told which claims a model does not fit, and why.
    """
    names = list(names)
    chosen = find_claims(names)
    check_executor(executor)
    if full and seeds is not None:
        raise HeadwiseError(f"full takes three seeds, seeds={seeds} so many; give one of them.")
    if on is not None and (seeds is not None or first_seed):
        raise HeadwiseError("seeds are for models that are trained here; the one that is given is there already.")
    if on is not None:
        return _try_all(_applying(chosen, bool(names)), on, corpus, bool(names), progress, say)
    if seeds is not None and seeds < 1:
        raise HeadwiseError(f"an experiment needs at least one seed, got {seeds}.")
    if first_seed < 0:
        raise HeadwiseError(f"seeds are counted from 0 on; the first one cannot be {first_seed}.")
    many = seeds if seeds is not None else FULL if full else QUICK
    lab = Lab(Store(cache), tuple(range(first_seed, first_seed + many)), size or LabSize())
    found = {claim.name: _kept(claim, lab) for claim in chosen}
    todo = [claim for claim in chosen if found[claim.name] is None]
    train_all([point for claim in todo for point in claim.points(lab)], lab.store, processes, progress, executor)
    aside, alone = [c for c in todo if not c.timed], [c for c in todo if c.timed]
    done = 0

    def tell() -> None:
        if progress is not None:
            progress("measuring claims", done, len(todo))

    jobs = [(claim.name, str(lab.store.folder), lab.seeds, lab.size.to_json(), _key(claim, lab)) for claim in aside]
    for place, rows in work(_measure, jobs, processes, tell, executor=executor, folder=lab.store.folder):
        found[aside[place].name] = Figures.from_rows(rows)
        _keep(aside[place], lab, rows)
        done += 1
    for claim in alone:
        tell()
        figures = found[claim.name] = claim.measure(lab)
        _keep(claim, lab, figures.to_rows())
        done += 1
    tell()
    known = ((claim, figures) for claim in chosen if (figures := found[claim.name]) is not None)
    how = (f" --seeds {seeds}" if seeds is not None else " --full" * full) + f" --first-seed {first_seed}" * (
        first_seed > 0
    )
    return [_judged(claim, figures, lab.seeds, again=f"headwise claims {claim.name}{how}") for claim, figures in known]


def _measure(name: str, folder: str, seeds: tuple[int, ...], size: str, key: str) -> list[dict[str, Any]]:
    """In another process."""
    (claim,) = find_claims([name])
    lab = Lab(Store(folder), seeds, LabSize.from_json(size))
    check_same(_key(claim, lab), key)
    return claim.measure(lab).to_rows()


def _judged(claim: Claim, figures: Figures, seeds: tuple[int, ...], on: str = "", again: str = "") -> Result:
    """The verdict is drawn anew each time: a rule is not a measurement."""
    return Result(claim, *claim.decide(figures), seeds, on, again)


def _key(claim: Claim, lab: Lab) -> str:
    code = f"{declared('texts', 'training', 'measures')}, {claim.name} {claim.version}"
    told = f"{code} {lab.seeds} {lab.size.to_json()} {claim.also()}"
    return hashlib.sha256(told.encode()).hexdigest()[:20]


def _kept(claim: Claim, lab: Lab) -> Figures | None:
    rows = lab.store.result(claim.name, _key(claim, lab))
    return None if rows is None else Figures.from_rows(rows)


def _keep(claim: Claim, lab: Lab, rows: list[dict[str, Any]]) -> None:
    lab.store.keep(claim.name, _key(claim, lab), rows)


def _applying(chosen: tuple[Claim, ...], named: bool) -> list[Claim]:
    """Those that can be tried on a model that is given; one that was named and cannot is refused."""
    unfit = [claim.name for claim in chosen if claim.on is None]
    if named and unfit:
        known = ", ".join(claim.name for claim in find_claims() if claim.on is not None)
        raise HeadwiseError(
            f"{', '.join(unfit)} cannot be tried on a given model: models are trained for it; {known} can."
        )
    return [claim for claim in chosen if claim.on is not None]


def _try_all(
    chosen: list[Claim],
    on: "AnyModel | str",
    corpus: Any,
    named: bool,
    progress: Progress | None,
    say: Callable[[str], object] | None,
) -> list[Result]:
    """Each claim on the model; one that does not fit it is left out, unless it was asked for by name."""
    name = on if isinstance(on, str) else type(on).__name__
    model = load(on) if isinstance(on, str) else on
    made = []
    for done, claim in enumerate(chosen):
        if progress is not None:
            progress(f"claims on {name}", done, len(chosen))
        try:
            assert claim.on is not None
            made.append(_judged(claim, claim.on(model, corpus), (0,), name, _again(claim, on, corpus)))
        except HeadwiseError as error:
            if named:
                raise
            if say is not None:
                say(f"{claim.name} is left out: {error}")
    return made


def _again(claim: Claim, on: "AnyModel | str", corpus: Any) -> str:
    if not isinstance(on, str):
        return f'hw.claims(["{claim.name}"], on=model{"" if corpus is None else ", corpus=corpus"})'
    return f"headwise claims {claim.name} --on {shlex.quote(on)}" + (
        f" --text {shlex.quote(str(corpus))}" if corpus else ""
    )
