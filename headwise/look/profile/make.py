"""A profile: every head of a model, measured over a corpus in one streaming pass."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.errors import HeadwiseError
from headwise.look.measure.cases import Cases, echo_places
from headwise.look.measure.classes import class_flags
from headwise.look.measure.evidence import Evidence
from headwise.look.measure.listening import listening, read_repeats, read_texts
from headwise.look.measure.measure import Measure, Number
from headwise.look.measure.relations import Relations
from headwise.look.measure.repeats import NUMBERS as ECHOED
from headwise.look.measure.repeats import Echo, Repeats, make_repeats
from headwise.look.measure.scene import Layout
from headwise.look.measure.surface import Surface, usual_measures
from headwise.look.measure.tally import Tally
from headwise.look.measure.trials import Trial, run_trial
from headwise.look.measure.variability import VARIABILITY, Varying, sample
from headwise.look.profile.causal import climb
from headwise.look.profile.result import OWN, Profile, Supports
from headwise.look.profile.roles import Role, check_roles
from headwise.look.record.units import Batch, Unit, documents_for, make_batches, read, read_units, tokenizer_of
from headwise.look.worth.outputs import mean_activations
from headwise.model import AnyModel, Transformer, quiet
from headwise.team.team import Team, gather
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus

Note = Callable[[str, int, int], object]  # what is done, how much of it, of how much
CONTROLS = ("random-init", "shuffled")
# Repeated tokens, many and short: a sequence is a unit of the statistics, and a dozen prove nothing among 10,000 tests.
SEQUENCES, REPEATED = 64, 16


def profile(
    model: AnyModel,
    corpus: Any = None,
    *,
    relations: Any = None,
    measures: Sequence[Measure] = (),
    roles: Sequence[Role] = (),
    longest: int | None = None,
    tokens: int = 2048,
    every: int = 1,
    detail: str = "full",
    causal: bool = True,
    control: str | None = None,
    seed: int = 0,
    note: Note | None = None,
) -> Profile:
    """What every head does, over a corpus: a text, a list of texts, a path or a Corpus; none is the embedded probe set,
    or the little language for its own models.

    `relations` are documents with gold arcs, if not the corpus's own; False: none are asked. `measures` and `roles` of your
    own are taken and judged beside the usual ones (docs/look.md). `longest`: tokens of a unit of
    plain text. `tokens`: in a batch. `detail="light"`: of the texts only what the fused kernel can tell; `every`: for very
    long texts, light for all rows, and full for one block of 64 in so many. `causal`: climb the last rung, by ablation.
    `control`: the same for the model with random weights, or for texts whose tokens are shuffled.

    An encoder-decoder reads each text as its source and as its target. Its relations are those that lead back, which both
    stacks can see. Cross-attention has no distances, so none of those, no relations and no repeats are asked of it.
    """
    if control is not None and control not in CONTROLS:
        raise HeadwiseError(f"there is no control {control!r}; use {' or '.join(CONTROLS)}.")
    if detail not in ("full", "light") or every < 1:
        raise HeadwiseError(f"detail is 'full' or 'light' and every at least 1, got {detail!r} and {every}.")
    if control == "random-init":
        model = random_twin(model, seed)
    note = note or (lambda what, done, of: None)
    with quiet(model), torch.no_grad(), gather(model.device) as team:
        made = _Pass(model, longest, tokens, every, detail, seed, control, note, team, measures, roles)
        return made.run(corpus, relations, causal)


class _Pass:
    """One profile in the making."""

    def __init__(
        self,
        model: AnyModel,
        longest: int | None,
        tokens: int,
        every: int,
        detail: str,
        seed: int,
        control: str | None,
        note: Note,
        team: Team,
        measures: Sequence[Measure],
        roles: Sequence[Role],
    ) -> None:
        self.model, self.longest, self.tokens, self.every, self.note = model, longest, tokens, every, note
        self.detail, self.seed, self.control, self.team = detail, seed, control, team
        self.sites = model.sites()
        self.addresses = tuple(address for site in self.sites for address in site.addresses)
        self.tally, self.evidence = Tally(len(self.addresses)), Evidence(len(self.addresses))
        self.trials = [measure for measure in measures if isinstance(measure, Trial)]
        usual = usual_measures(class_flags(tokenizer_of(model), model.spec.vocab))
        taken = [*usual, *(measure for measure in measures if not isinstance(measure, Trial))]
        self.measures = [measure for measure in taken if detail == "full" or not measure.full]
        told = [*_numbers([*self.measures, *self.trials]), *ECHOED, VARIABILITY]
        self.numbers = {number.name: number for number in told}
        self.roles = tuple(roles)
        check_roles(self.roles, told)

    def run(self, corpus: Any, arcs: Any, causal: bool) -> Profile:
        read = Corpus.of(documents_for(self.model) if corpus is None else corpus)
        units = self._units(read)
        if arcs is None and any(unit.document for unit in units):
            asked, related = read, units
        elif arcs is False or (isinstance(arcs, list) and not arcs):
            asked, related = None, []
        else:  # documents that are not the texts themselves; where tokens are shuffled arcs mean nothing
            asked = Corpus.of(documents_for(self.model) if arcs is None else arcs)
            related = [unit for unit in self._units(asked) if unit.document is not None]
        for some, what in ((units, "texts"), (related, "documents with relations")):
            if 0 < len(some) < self.team.size:  # each needs one, to know what is counted
                raise HeadwiseError(
                    f"{len(some)} {what} cannot be shared out over {self.team.size} processes; start fewer."
                )
        repeats = make_repeats(self.model, SEQUENCES, REPEATED, self.seed)
        relations = Relations.of(self.tally, related, self.model.spec.kind != "encoder") if related else None
        self.cases = self._draw(units, related, relations, repeats)
        self._read(units, related, relations)
        self._share(relations, units)
        self._repeats(repeats)
        self._vary(units)
        for trial in self.trials:
            run_trial(self.model, trial, self.tally, self.seed)
        about = {
            "texts": len(units), "tokens": sum(len(unit.ids) for unit in units), "documents": len(related),
            "relations": OWN if related is units else _digest(related), "layers": [str(s.address) for s in self.sites],
            "model": _shape(self.model), "control": self.control, "seed": self.seed, "detail": self.detail,
            "every": self.every, "read": in_words(read), "asked": "" if asked is None else in_words(asked),
        }  # fmt: skip
        asks = causal and self.model.spec.kind == "decoder" and self.model.output is not None
        numbers = {**self.numbers, **{number.name: number for number in (relations.numbers if relations else ())}}
        return Profile.of(
            self.addresses, self.tally, relations, self.evidence.contexts(), self.cases, about, numbers, self.roles,
            partial(self._climb, related, units) if asks else None,
        )  # fmt: skip

    def _units(self, corpus: Any) -> list[Unit]:
        units = list(read_units(self.model, corpus, self.longest))
        return [_shuffled(unit, self.seed) for unit in units] if self.control == "shuffled" else units

    def _batches(self, units: list[Unit], what: str) -> Iterator[Batch]:
        done, mine = 0, units[self.team.rank :: self.team.size]
        for batch in make_batches(mine, self.tokens, device=self.model.device):
            self.note(what, done, len(mine))
            yield batch
            done += len(batch.units)
        self.note(what, len(mine), len(mine))

    def _draw(self, units: list[Unit], related: list[Unit], relations: Relations | None, repeats: Repeats) -> Cases:
        """The places that are shown for roles, before anything is measured."""
        asked = () if relations is None else (one for unit in related for one in relations.rows_of(unit))
        tokenizer = tokenizer_of(self.model)
        shown = [
            [tokenizer.decode([i], special=True).strip() or tokenizer.token(i) for i in ids]
            for ids in repeats.twice.tolist()
        ]
        echoes = echo_places(shown, repeats.start, repeats.length)
        return Cases.draw(len(self.addresses), units, asked, echoes, Layout.of(self.measures))

    def _read(self, units: list[Unit], related: list[Unit], relations: Relations | None) -> None:
        """The texts, and the documents with relations: in one pass where they are the same."""
        surface = Surface(self.tally, self.evidence, self.measures, self.every, self.detail, self.cases)
        if relations is not None:
            relations.cases = self.cases
        together = relations is not None and related is units
        read_texts(self.model, self._batches(units, "texts"), surface, relations if together else None)
        if relations is not None and not together:
            read_texts(self.model, self._batches(related, "relations"), None, relations)

    def _share(self, relations: Relations | None, units: list[Unit]) -> None:
        """What every process counted, added up; the evidence of all."""
        if self.team.size == 1:
            return
        for arrays in (self.tally.sums, self.tally.counts, *([] if relations is None else [relations.arrays()])):
            for name in sorted(arrays):
                self.team.add_up(arrays[name])
        self.evidence.gather(self.team, units)
        self.cases.gather(self.team)

    def _repeats(self, repeats: Repeats) -> None:
        def batches() -> Iterator[tuple[slice, torch.Tensor, bool]]:
            for some, ids, repeated in repeats.batches():
                self.note("repeats", some.start, len(repeats.twice))
                yield some, ids, repeated
            self.note("repeats", len(repeats.twice), len(repeats.twice))

        read_repeats(self.model, batches(), Echo(self.tally, repeats, self.cases))

    def _vary(self, units: list[Unit]) -> None:
        """The same places in several texts; of fewer than two nothing can be said."""
        some = sample(units)
        varying = Varying(self.tally, some)
        if len(some) > 1:
            with listening(self.sites, varying.see):
                read(self.model, varying.ids.to(self.model.device))

    def _climb(self, related: list[Unit], units: list[Unit], found: Supports) -> Supports:
        """The last rung."""
        texts = [tokenizer_of(self.model).decode(unit.ids) for unit in units[:64]]
        means = mean_activations(self.model, texts)
        short = make_repeats(self.model, sequences=10, length=12, seed=self.seed + 1)
        return climb(self.model, self.addresses, found, related, short, means, partial(self.note, "ablations"))


def _numbers(measures: Iterable[Measure]) -> list[Number]:
    """All numbers; two of one name would be added up as one."""
    made = [number for measure in measures for number in measure.numbers]
    twice = [name for name, often in Counter(number.name for number in made).items() if often > 1]
    taken = {*twice, *({number.name for number in made} & {number.name for number in (*ECHOED, VARIABILITY)})}
    if taken:
        raise HeadwiseError(f"there is a measure {sorted(taken)[0]!r} already; give yours another name.")
    return made


def _shape(model: AnyModel) -> str:
    """What a model is, whatever was cut from it: whether a head's address means the same in two profiles."""
    spec = model.spec
    layers = f"{spec.encoder_layers} + {spec.layers}" if spec.encoder_layers else str(spec.layers)
    return (
        f"{spec.kind} of {layers} layers with {spec.attention.heads} heads, width {spec.width}, {spec.vocab:,} tokens"
    )


def in_words(corpus: Corpus) -> str:
    """What a corpus is, as it is told beside the roles that were shown on it.

    >>> in_words(Corpus.probe()), in_words(Corpus.of(["A text."]))
    ('the probe set', 'the texts given')
    """
    if corpus.name.endswith(".tsv"):
        return "names in GAP"  # the only files of this kind
    listed = re.fullmatch(r"a list of \d+ (\w+)", corpus.name)  # how many there are is told elsewhere
    return f"the {listed[1]} given" if listed else ", ".join(Path(part).name for part in corpus.name.split(", "))


def random_twin(model: AnyModel, seed: int) -> AnyModel:
    """A model of the same spec that has learned nothing."""
    if not isinstance(model, Transformer):
        return model.untrained(seed)  # pyright: ignore[reportAttributeAccessIssue]  # an attached one knows how
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        twin = Transformer(model.spec).to(model.device)
    twin.tokenizer = model.tokenizer
    return twin


def _shuffled(unit: Unit, seed: int) -> Unit:
    """The same tokens in another order; the first and the last stay where they are, as special tokens do."""
    n = len(unit.ids)
    inner = np.random.default_rng([seed, *unit.ids]).permutation(max(0, n - 2)) + 1  # wherever in a corpus it stands
    order = [0, *inner.tolist(), n - 1][:n]
    return replace(unit, ids=tuple(unit.ids[i] for i in order), document=None, _align=partial(_reordered, unit, order))


def _digest(units: list[Unit]) -> str:
    """What was read, in a few characters: whether two profiles read the same."""
    return hashlib.sha256(repr([unit.ids for unit in units]).encode()).hexdigest()[:16]


def _reordered(unit: Unit, order: list[int]) -> Alignment:
    """The tokens of a unit in another order, as a text of its own."""
    aligned = unit.alignment
    pieces = [aligned.text[slice(*aligned.spans[i])].strip() or aligned.tokens[i] for i in order]
    ends = np.cumsum([len(piece) + 1 for piece in pieces])
    spans = [(int(end) - 1 - len(piece), int(end) - 1) for end, piece in zip(ends, pieces, strict=True)]
    ids, tokens = [unit.ids[i] for i in order], [aligned.tokens[i] for i in order]
    return Alignment.of(" ".join(pieces), ids, tokens, spans)
