"""What a profile holds, and how it is asked, saved, merged and compared."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.metric import Number
from headwise.analysis.metrics.relation_metrics import Question
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.role_examples import Cases, Example
from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, RESTING, SHARE
from headwise.analysis.metrics.top_contexts import Context
from headwise.analysis.recording.text_buckets import REPORTING
from headwise.analysis.roles.merge import (
    check_alike,
    keep_effects,
    merge_evidence,
    merge_relations,
    merge_sources,
    merge_tallies,
)  # fmt: skip
from headwise.analysis.roles.profile_io import VERSION, number_of, pack, role_of, support_of, unpack
from headwise.analysis.roles.prompt_roles import with_choices
from headwise.analysis.roles.roles import TABLE, Case, Role, Support, judge, make_cases, rest
from headwise.errors import HeadwiseError
from headwise.spec import Address

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwise.model import AnyModel
    from headwise.ui.figures.plot import Plot
    from headwise.ui.head_summary import Story

SHOWN = tuple(number.name for number in (ENTROPY, CONFIDENCE, DISTANCE, RESTING, SHARE))
Supports = Sequence[Sequence[Support]]  # for each head, best first


@dataclass(frozen=True)
class HeadProfile:
    """One head: its best-supported role with rung, score, null and interval; all its roles; where it rests; its evidence."""

    address: Address
    role: str  # `unclear` where nothing is supported
    rung: str
    score: float | None
    null: float | None
    interval: tuple[float, float] | None
    detail: str
    effect: float | None
    roles: tuple[Support, ...]  # all that stand, best first
    supports: tuple[Support, ...]  # the same and mere patterns, which random heads show too
    rest: tuple[str, ...]
    on: str  # the texts on which its role was shown
    evidence: tuple[Example, ...]  # cases of its role, from the half for reporting: hits as often as they are
    cases: dict[str, tuple[Example, ...]]  # the same for each of its roles
    hardest: tuple[Context, ...]  # where it looked hardest, whatever for
    measures: dict[str, float]

    @property
    def causal_on(self) -> tuple[str, ...]:
        """Token sets, or prompts, on which the causal test of its first role holds."""
        return self.roles[0].causal_on if self.roles else ()

    @property
    def evidence_level(self) -> str:
        """Evidence level of its first role in words, with the token sets on which the causal test holds."""
        return self.roles[0].evidence_level if self.roles else self.rung

    @property
    def role_label(self) -> str:
        """Its first role, and how many more it has: `possessive > +4`."""
        return " ".join(
            (self.role, *[self.detail] * bool(self.detail), *[f"+{len(self.roles) - 1}"] * (len(self.roles) > 1))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        made = asdict(self)
        made["address"] = str(self.address)
        made["measures"] = {name: value for name, value in self.measures.items() if np.isfinite(value)}
        return made


@dataclass(frozen=True, eq=False)
class Profile:
    """Every head of a model, measured. `profile["5.1"]` is one of them. Once made it stays as it is."""

    addresses: tuple[Address, ...]
    tally: Tally
    relations: Relations | None
    hardest: Sequence[Sequence[Context]]
    cases: Cases
    supports: Supports
    rests: Sequence[tuple[str, ...]]
    family: int  # how many tests were made
    about: dict[str, Any]
    numbers: Mapping[str, Number]  # what was measured, by name
    own: tuple[Role, ...] = ()  # roles beside those everybody is asked

    @staticmethod
    def of(
        addresses: tuple[Address, ...],
        tally: Tally,
        relations: Relations | None,
        hardest: Sequence[Sequence[Context]],
        cases: Cases,
        about: dict[str, Any],
        numbers: Mapping[str, Number],
        own: Sequence[Role] = (),
        climb: Callable[[Supports], Supports] | None = None,
    ) -> "Profile":
        """What follows from what was counted: roles and where heads rest. `climb` tries the last rung, by ablations."""
        found, family = judge(make_cases(tally, relations, roles=(*TABLE, *own)), len(addresses))
        found = with_choices([[replace(s, on=s.on or _shown_on(s, about)) for s in some] for some in found], about)
        found = found if climb is None else tuple(map(tuple, climb(found)))
        in_layer = Counter(address.site for address in addresses)
        per_layer = np.array([in_layer[address.site] for address in addresses])
        rests = rest(tally, per_layer)
        return Profile(addresses, tally, relations, hardest, cases, found, rests, family, about, numbers, tuple(own))

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[HeadProfile]:
        return (self[address] for address in self.addresses)

    def __getitem__(self, which: str | Address) -> HeadProfile:
        address = which if isinstance(which, Address) else Address.parse(which)
        if address not in self.addresses:
            raise HeadwiseError(
                f"there is no head {address} in this profile; it has {self.addresses[0]} to {self.addresses[-1]}."
            )
        place = self.addresses.index(address)
        supports = self.supports[place]
        roles = tuple(one for one in supports if one.stands)
        told = ("unclear", "unclear", None, None, None, "", None)  # a pattern alone is nothing: random heads show some
        if roles:
            best = roles[0]
            told = (best.role, best.rung, best.score, best.null, best.interval, best.detail, best.effect)
        measures = {name: float(values[place]) for name, values in self._measures.items()}
        cases = {one.role: self._examples(one, place) for one in roles}
        on, evidence = (roles[0].on, cases[roles[0].role]) if roles else ("", ())
        return HeadProfile(
            address, *told, roles, tuple(supports), self.rests[place], on, evidence, cases, tuple(self.hardest[place]),
            measures,
        )  # fmt: skip

    def _examples(self, role: Support, head: int) -> tuple[Example, ...]:
        """Cases of a role; how often a head hits is known where that is its score."""
        case = self._role_cases.get((role.role, role.detail))
        if case is None:  # it was not found here
            return ()
        return self.cases.examples(
            case.role.measure.target, case.half(REPORTING), head, role.score if case.role.hits else None
        )

    @cached_property
    def _role_cases(self) -> dict[tuple[str, str], Case]:
        """What was asked for each role, by its name and detail."""
        cases = make_cases(self.tally, self.relations, roles=(*TABLE, *self.own))
        return {(case.role.name, case.role.detail): case for case in cases}

    @cached_property
    def _measures(self) -> dict[str, np.ndarray]:
        """Every measure of every head, taken once: a profile is read head by head."""
        return {name: self.measure(name) for name in self.tally.fields if self.numbers[name].shown}

    def measure(self, name: str) -> np.ndarray:
        """One measure of every head, (heads,): `entropy`, `offset 1`, `delimiter`, `det > hits` …"""
        return self.tally.mean(name)

    def by_layer(self, name: str) -> np.ndarray:
        """A measure's mean in each layer, early to late: (layers,); NaN where there are no heads, or nothing was measured."""
        values = self.measure(name)
        layers: dict[str, list[float]] = {layer: [] for layer in self.about["layers"]}
        for value, address in zip(values, self.addresses, strict=True):
            if np.isfinite(value):
                layers[str(address.site)].append(value)
        return np.array([np.mean(some) if some else np.nan for some in layers.values()])

    def best(self, role: str) -> HeadProfile | None:
        """The head with the best support for a role, or None."""
        heads = self.roles().get(role)
        return self[heads[0]] if heads else None

    @property
    def tried(self) -> int:
        """Number of causal tests: heads × roles × token sets that have a control, in both families."""
        return sum(effect.control is not None for some in self.supports for one in some for effect in one.effects)

    def roles(self) -> dict[str, list[Address]]:
        """Every role that some head has, be it its first or not, with its heads, best first."""
        found: dict[str, list[tuple[tuple[int, float], Address]]] = {}
        for address, supports in zip(self.addresses, self.supports, strict=True):
            for one in supports:
                if one.stands:
                    found.setdefault(one.role, []).append((one.rank, address))
        return {
            role: [a for _, a in sorted(heads, key=lambda x: x[0], reverse=True)]
            for role, heads in sorted(found.items())
        }

    @property
    def columns(self) -> tuple[str, ...]:
        """The measures that have a column in the table of heads."""
        there = tuple(name for name in SHOWN if name in self.numbers)  # of pictures some are not asked
        return (*there, *(name for name, number in self.numbers.items() if number.column and name not in SHOWN))

    def table(self) -> list[dict[str, Any]]:
        """One row per head."""
        return [
            {
                "head": str(head.address), "role": head.role, "roles": "; ".join(one.role for one in head.roles),
                "detail": head.detail, "on": head.on, "rung": head.rung, "causal_on": " and ".join(head.causal_on),
                "score": head.score, "null": head.null, "low": (head.interval or (None, None))[0],
                "high": (head.interval or (None, None))[1], "effect": head.effect, "rest": ", ".join(head.rest),
                **{name: head.measures[name] for name in self.columns},
            }
            for head in self
        ]  # fmt: skip

    def to_frame(self) -> "DataFrame":
        """The table as a pandas DataFrame, indexed by head, with every measure."""
        try:
            import pandas
        except ImportError:
            raise HeadwiseError(
                "a frame needs pandas: pip install 'headwise[frame]'; or use profile.table()."
            ) from None
        rows = [{**row, **head.measures} for row, head in zip(self.table(), self, strict=True)]
        return pandas.DataFrame(rows).set_index("head")

    def merge(self, other: "Profile") -> "Profile":
        """Both together: what one pass over this corpus and then the other's, and over the documents of both, would give.

        Documents with relations that are not the texts themselves and the same in both count once, as repeated tokens do.
        Roles and rests are judged anew on all that was counted. Ablations are not made again: a role keeps what they
        showed for it, here or in the other. `variability`, which compares texts with each other, stays that of the larger
        sample.
        """
        check_alike(self, other)
        texts, (asked, same) = self.about["texts"], merge_sources(self.about, other.about)
        parts = [(made.tally, made.relations) for made in (self, other) if made.relations is not None]
        numbers = {**self.numbers, **other.numbers}
        tally = merge_tallies(self.tally, other.tally, numbers, [part.names[0] for _, part in parts if part.names])
        relations = merge_relations(tally, parts[:1] if same else parts)
        about = {
            **self.about, "texts": texts + other.about["texts"], "tokens": self.about["tokens"] + other.about["tokens"],
            "documents": self.about["documents"] + (0 if same else other.about["documents"]),
            "relations": asked,
            **{name: _both(self.about[name], other.about[name]) for name in ("read", "asked")},
        }  # fmt: skip
        hardest = [merge_evidence(a, b, texts) for a, b in zip(self.hardest, other.hardest, strict=True)]
        cases = self.cases.merge(other.cases)

        def remembered(found: Supports) -> Supports:
            before = [(*a, *b) for a, b in zip(self.supports, other.supports, strict=True)]
            kept = zip(found, before, strict=True)
            return [keep_effects(some, earlier) for some, earlier in kept]

        return Profile.of(self.addresses, tally, relations, hardest, cases, about, numbers, self.own, remembered)

    def diff(self, other: "Profile") -> list[dict[str, Any]]:
        """What changed from this profile to another, head by head: roles, rungs, measures; heads that are gone or new.

        Both must be of one model, at two times of its training, say, or with heads cut: elsewhere 5.1 is another head.
        """
        if self.about["model"] != other.about["model"]:
            raise HeadwiseError(
                f"these are profiles of two models, a {self.about['model']} and a {other.about['model']}: heads of the same "
                f"address have nothing to do with each other. Give two profiles of one model."
            )
        rows = []
        for address in dict.fromkeys((*self.addresses, *other.addresses)):
            before = self[address] if address in self.addresses else None
            after = other[address] if address in other.addresses else None
            row: dict[str, Any] = {
                "head": str(address),
                "before": before.role if before else "absent", "after": after.role if after else "absent",
                "rung before": before.rung if before else "", "rung after": after.rung if after else "",
            }  # fmt: skip
            if before and after:
                row |= {name: after.measures[name] - before.measures[name] for name in SHOWN if name in after.measures}
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: one record per head."""
        return {
            "version": VERSION,
            "about": self.about,
            "family": self.family,
            "heads": [head.to_dict() for head in self],
        }

    @property
    def plot(self) -> "Plot":
        """Pictures: `profile.plot.roles().save("roles.svg")`; see `headwise.ui.figures.plot` for all of them."""
        from headwise.ui.figures.plot import Plot

        return Plot(self)

    def story(self, head: str | Address, model: "AnyModel | None" = None) -> "Story":
        """One head in plain sentences; with the model also what it writes, is worth, could cost less and works with."""
        from headwise.ui.head_summary import tell_story

        return tell_story(self, self[head], model)

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import profile_html

        return profile_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_bundle

        return widget_bundle(self)

    def report(self, path: str | Path, model: "AnyModel | None" = None, **more: Any) -> Path:
        """Write one file that shows every head in a browser, offline. With the model it can tell more of them.

        `more`: `name`, `sentences` to show (texts), `importance`, `history`, `curve`, `claims`, `sensitivity`, `plan`, as
        `headwise.ui.report_data.make_book` takes them.
        """
        from headwise.ui.report import write_report
        from headwise.ui.report_data import make_book

        return write_report(make_book(self, model, **more), path)

    def save(self, path: str | Path) -> Path:
        """Write one compressed file; `Profile.load` brings it back."""
        arrays = {f"sums/{group}": value for group, value in self.tally.sums.items()}
        arrays |= {f"counts/{group}": value for group, value in self.tally.counts.items()}
        told = {
            "about": self.about, "family": self.family, "heads": [str(a) for a in self.addresses],
            "fields": self.tally.fields, "numbers": [asdict(number) for number in self.numbers.values()],
            "roles": [asdict(role) for role in self.own], "rests": self.rests,
            "hardest": [[asdict(c) for c in some] for some in self.hardest], "cases": self.cases.to_dict(),
            "supports": [[asdict(s) for s in some] for some in self.supports],
        }  # fmt: skip
        if self.relations is not None:
            told["questions"] = [(one.relation, one.way) for one in self.relations.questions]
            told["causal"] = self.relations.causal
            arrays |= {f"relations/{name}": value for name, value in self.relations.arrays().items()}
        arrays |= {f"cases/{name}": value for name, value in self.cases.arrays.items()}
        return pack(path, told, arrays)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Read a file written by `save`; one that is damaged or of another version is refused."""
        told, arrays = unpack(path)
        try:
            return _rebuilt(told, arrays)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise HeadwiseError(f"{path} lacks something a profile has ({error}); make it anew.") from None


def _rebuilt(stored: dict[str, Any], arrays: dict[str, np.ndarray]) -> Profile:
    addresses = tuple(Address.parse(text) for text in stored["heads"])
    tally = Tally(len(addresses), {name: (group, place) for name, (group, place) in stored["fields"].items()})
    for name, value in arrays.items():
        kind, _, group = name.partition("/")
        if kind in ("sums", "counts"):
            getattr(tally, kind)[group] = value
    relations = None
    if "questions" in stored:
        relations = Relations(tally, tuple(Question(name, way) for name, way in stored["questions"]), stored["causal"])
        for name in relations.arrays():
            setattr(relations, name, arrays[f"relations/{name}"])
    return Profile(
        addresses, tally, relations, [[Context(**c) for c in some] for some in stored["hardest"]],
        Cases.of(len(addresses), stored["cases"], {name: value for name, value in arrays.items() if "cases/" in name}),
        tuple(tuple(support_of(s) for s in some) for some in stored["supports"]), [tuple(r) for r in stored["rests"]],
        stored["family"], stored["about"], {one["name"]: number_of(one) for one in stored["numbers"]},
        tuple(map(role_of, stored["roles"])),
    )  # fmt: skip


def _shown_on(one: Support, about: dict[str, Any]) -> str:
    """The texts on which a role was shown, in words: its name claims no more."""
    return about["asked"] if one.relation else about["read"]


def _both(one: str, other: str) -> str:
    """The names of two corpora."""
    return " and ".join(dict.fromkeys(name for both in (one, other) for name in both.split(" and ") if name))
