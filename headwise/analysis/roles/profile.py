"""A profile: every head of a model, measured over a corpus in one streaming pass."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.batch_context import ColumnLayout
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.example_sampler import Draw, ShownPlaces
from headwise.analysis.metrics.induction import Echo, Repeats, make_repeats
from headwise.analysis.metrics.metric import Measure, Number
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.role_examples import Cases, Place, echo_places
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.tasks import TaskMeasure, run_task, token_names
from headwise.analysis.metrics.token_classes import class_flags
from headwise.analysis.metrics.top_contexts import Evidence
from headwise.analysis.metrics.variability import LENGTH, TEXTS, Variability, read_alike
from headwise.analysis.recording.batching import Batch, Unit, make_batches, read_sites, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.causal import climb
from headwise.analysis.roles.causal_cases import TEXTS as ANSWERS
from headwise.analysis.roles.causal_cases import Few
from headwise.analysis.roles.image_profile import profile_pictures
from headwise.analysis.roles.merge import OWN
from headwise.analysis.roles.profile_result import Profile, Supports
from headwise.analysis.roles.prompt_roles import PROMPTED, prompted_measures
from headwise.analysis.roles.roles import Role, check_roles
from headwise.distributed.head_parallel import check_same
from headwise.distributed.process_group import Team, join_team
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, quiet
from headwise.model.random_attention import control_model
from headwise.model.shard import Shard
from headwise.progress import Progress
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus

CONTROLS = ("random-init", "random-attention", "shuffled")
OTHER_TEXTS = "the processes do not read the same texts; give every machine the same files."
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
    prompts: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """What every head does, over a corpus: a text, a list of texts, a path or a Corpus; none is the embedded probe set,
    or the little language for its own models.

    `relations` are documents with gold arcs, if not the corpus's own; False: none are asked. `measures` and `roles` of your
    own are taken and judged beside the usual ones (docs/look.md). `longest`: tokens of a unit of
    plain text. `tokens`: in a batch. `detail="light"`: of the texts only what the fused kernel can tell; `every`: for very
    long texts, one block of 64 rows in so many is looked at. `causal`: climb the last rung, by ablation. `prompts`: ask for
    the roles that need prompts of their own too (`headwise.analysis.roles.prompt_roles`).
    `control`: profile a model with random weights throughout (`random-init`), this model with random attention weights and
    everything else as trained (`random-attention`), or texts whose tokens are shuffled (`shuffled`).

    An encoder-decoder reads each text as its source and as its target. Its relations are those that lead back, which both
    stacks can see. Cross-attention has no distances, so none of those, no relations and no repeats are asked of it.

    A model that reads pixels looks at pictures: a folder of them, a list of paths, Pillow images or tensors. Its tokens are
    patches, and it is asked what needs no words (`headwise.analysis.roles.image_profile`).
    """
    if model.pictures is not None:
        if relations or longest is not None or detail != "full" or prompts:
            raise HeadwiseError(
                "pictures have no relations, and are read whole; leave relations, longest, detail and prompts out."
            )
        own: dict[str, Any] = {"tokens": tokens, "every": every, "control": control, "seed": seed, "progress": progress}
        return profile_pictures(model, corpus, measures=measures, roles=roles, **own)
    if control is not None and control not in CONTROLS:
        raise HeadwiseError(f"control={control!r}: not a control. Use {', '.join(CONTROLS)} or none.")
    if detail not in ("full", "light") or every < 1:
        raise HeadwiseError(f"detail is 'full' or 'light' and every at least 1, got {detail!r} and {every}.")
    model = control_model(model, control, seed)
    if prompts:
        if control == "shuffled" or model.is_shared:
            raise HeadwiseError("prompts are read as they are, by a model that one process holds; leave them out here.")
        measures, roles = (*prompted_measures(), *measures), (*PROMPTED, *roles)
    progress = progress or (lambda what, done, of: None)
    with quiet(model), torch.no_grad(), join_team(model.device, alone=model.is_shared) as team:
        made = _Pass(model, longest, tokens, every, detail, seed, control, progress, team, measures, roles)
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
        progress: Progress,
        team: Team,
        measures: Sequence[Measure],
        roles: Sequence[Role],
    ) -> None:
        self.model, self.longest, self.tokens, self.every, self.progress = model, longest, tokens, every, progress
        self.detail, self.seed, self.control, self.team = detail, seed, control, team
        self.sites = read_sites(model)
        self.addresses = tuple(address for site in self.sites for address in site.addresses)
        self.tally, self.evidence = Tally(len(self.addresses)), Evidence(len(self.addresses))
        self.tasks = [measure for measure in measures if isinstance(measure, TaskMeasure)]
        usual = usual_measures(class_flags(tokenizer_of(model), model.spec.vocab))
        taken = [*usual, *(measure for measure in measures if not isinstance(measure, TaskMeasure))]
        self.measures = [measure for measure in taken if detail == "full" or not measure.full]
        self.echo = Echo(make_repeats(model, SEQUENCES, REPEATED, seed))
        told = _numbers([*self.measures, *self.tasks, self.echo, Variability()])
        self.numbers = {number.name: number for number in told}
        self.roles = tuple(roles)
        check_roles(self.roles, told)

    def run(self, corpus: Any, arcs: Any, causal: bool) -> Profile:
        texts = Reading.of(self.model, corpus, self.longest)
        self.team.agree(texts.corpus.fingerprint, OTHER_TEXTS)
        if isinstance(self.model, Shard):  # all look at all of them, together
            check_same(self.model.together, texts.corpus.fingerprint, "text")
        asked = self._documents_for_relations(texts, arcs)
        documents = (
            () if asked is None or self.control == "shuffled" else asked.documents()
        )  # where words have moved arcs
        first = next(iter(documents), None)  # mean nothing
        related = None if first is None else asked
        relations = None
        if related is not None:
            relations = Relations.of(self.tally, related.documents(), self.model.spec.kind != "encoder")
        asks = causal and self.model.spec.kind == "decoder" and self.model.output is not None
        kept = KeptTexts(asks)
        echoes, ahead = self._echoes(self.echo.repeats), self.model.spec.kind != "decoder"
        draw = Draw(len(self.addresses), echoes, ColumnLayout.of(self.measures), ahead)
        self._read(texts, related, relations, draw, kept)
        cases = draw.finish()
        self._share(texts, relations, cases)
        run_task(self.model, self.echo, self.tally, self.seed, beside=[ShownPlaces(cases)], progress=self.progress)
        read_alike(self.model, kept.long, self.tally)
        asked_apart, cases = run_tasks(self.model, self.tasks, self.tally, cases, self.seed, self.progress)
        about = {
            "texts": texts.texts, "tokens": texts.tokens, "documents": kept.documents,
            "relations": OWN if related is texts else kept.digest(), "layers": [str(s.address) for s in self.sites],
            "model": _shape(self.model), "control": self.control, "seed": self.seed, "detail": self.detail,
            "every": self.every, "read": in_words(texts.corpus), "asked": "" if asked is None else in_words(asked.corpus),
            **asked_apart,
        }  # fmt: skip
        numbers = {**self.numbers, **{number.name: number for number in (relations.numbers if relations else ())}}
        climbs = partial(self._climb, kept) if asks else None
        return Profile.of(
            self.addresses, self.tally, relations, self.evidence.contexts(), cases, about, numbers, self.roles, climbs
        )

    def _documents_for_relations(self, texts: Reading, arcs: Any) -> Reading | None:
        """Where relations are taken from: the texts themselves, if they have some, other documents, or nowhere."""
        if arcs is False or (isinstance(arcs, list) and not arcs):
            return None
        if arcs is None and self.control != "shuffled" and next(texts.documents(), None) is not None:
            return texts
        return Reading.of(self.model, arcs, self.longest)

    def _batches(self, units: Iterable[Unit], known: int | None, what: str) -> Iterator[Batch]:
        """This process's share of the units; the others pass it by, and are counted."""
        all_, done = 0, 0
        of = None if known is None else len(range(self.team.rank, known, self.team.size))

        def mine() -> Iterator[Unit]:
            nonlocal all_
            for unit in units:
                if all_ % self.team.size == self.team.rank:
                    yield unit
                all_ += 1

        for batch in make_batches(mine(), self.tokens, device=self.model.device):
            self.progress(what, done, of)
            yield batch
            done += len(batch.units)
        if 0 < all_ < self.team.size:  # each needs one, to know what is counted
            raise HeadwiseError(f"{all_} {what} cannot be shared out over {self.team.size} processes; start fewer.")
        self.progress(what, done, done)

    def _echoes(self, repeats: Repeats) -> list[Place]:
        """The places that are shown of repeated tokens."""
        names = [token_names(tokenizer_of(self.model), ids) for ids in repeats.twice.tolist()]
        return echo_places(names, repeats.start, repeats.length)

    def _read(
        self, texts: Reading, related: Reading | None, relations: Relations | None, draw: Draw, kept: "KeptTexts"
    ) -> None:
        """The texts, and the documents with relations: in one pass where they are the same. What is shown and what is asked
        later is drawn and kept while they stream by."""
        together = relations if related is texts else None
        asked = [draw, self.evidence, *self.measures, *([] if together is None else [together])]
        runner = Runner(self.tally, asked, self.every, self.detail)
        if relations is not None:
            relations.draw = draw

        def units() -> Iterator[Unit]:
            for given in texts:
                unit = _shuffled(given, self.seed) if self.control == "shuffled" else given
                draw.tokens(unit)
                kept.see_text(unit)
                if together is not None:
                    draw.words(together.rows_of(unit))
                    kept.see_document(unit)
                yield unit

        def documents(found: Reading, rows: Relations) -> Iterator[Unit]:
            for unit in found:
                if unit.document is not None:
                    draw.words(rows.rows_of(unit))
                    kept.see_document(unit)
                    yield unit

        runner.read(self.model, self._batches(units(), texts.count_ahead(), "texts"))
        if relations is not None and related is not None and together is None:
            batches = self._batches(documents(related, relations), None, "documents with relations")
            Runner(self.tally, [relations]).read(self.model, batches)

    def _share(self, texts: Reading, relations: Relations | None, cases: Cases) -> None:
        """What every process counted, added up; the evidence of all."""
        if self.team.size == 1:
            return
        self.team.agree(texts.fingerprint, OTHER_TEXTS)  # as they were read: a tokenizer may be another one too
        for arrays in (self.tally.sums, self.tally.counts, *([] if relations is None else [relations.arrays()])):
            for name in sorted(arrays):
                self.team.add_up(arrays[name])
        self.evidence.gather(self.team)
        cases.gather(self.team)

    def _climb(self, kept: "KeptTexts", found: Supports) -> Supports:
        """The last rung."""
        related = kept.few.units.values()
        return climb(self.model, self.addresses, found, related, kept.first, self.seed + 1, self.progress)


def run_tasks(
    model: AnyModel, tasks: Iterable[TaskMeasure], tally: Tally, cases: Cases, seed: int, progress: Progress
) -> tuple[dict[str, Any], Cases]:
    """Ask what reads texts or prompts of its own: what is told about it, and the cases with those it shows."""
    unasked, chosen = {}, {}
    for task in tasks:
        why = task.run(model, tally, seed, progress)
        if why:
            unasked[task.score.name] = why
        chosen |= {name: list(places) for name, places in task.chosen.items()}
        cases = cases if task.shown is None else cases.merge(task.shown)
    return {"unasked": unasked, "chosen": chosen}, cases


class KeptTexts:
    """What is needed again when all texts have been read: a few of them, and counts."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks
        self.long: list[Unit] = []  # the first that are long enough to be compared place by place
        self.first: list[Unit] = []  # in which the last rung looks for answers
        self.few = Few()
        self.documents, self._digest = 0, hashlib.sha256()

    def see_text(self, unit: Unit) -> None:
        """One text."""
        if len(self.long) < TEXTS and len(unit.ids) >= LENGTH:
            self.long.append(unit)
        if self.asks and len(self.first) < ANSWERS:
            self.first.append(unit)

    @property
    def full(self) -> bool:
        """Whether further texts would change nothing."""
        return len(self.long) == TEXTS and (not self.asks or len(self.first) == ANSWERS)

    def see_document(self, unit: Unit) -> None:
        """One text that relations are asked about."""
        self._digest.update(f"{', ' if self.documents else '['}{unit.ids!r}".encode())
        self.documents += 1
        if self.asks:
            self.few.see(unit)

    def digest(self) -> str:
        """What was read, in a few characters: whether two profiles read the same."""
        whole = self._digest.copy()
        whole.update(b"]" if self.documents else b"[]")
        return whole.hexdigest()[:16]


def _numbers(measures: Iterable[Measure]) -> list[Number]:
    """All numbers; two of one name would be added up as one."""
    made = [number for measure in measures for number in measure.numbers]
    twice = [name for name, often in Counter(number.name for number in made).items() if often > 1]
    if twice:
        raise HeadwiseError(f"there is a measure {sorted(twice)[0]!r} already; give yours another name.")
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


def _shuffled(unit: Unit, seed: int) -> Unit:
    """The same tokens in another order; the first and the last stay where they are, as special tokens do."""
    n = len(unit.ids)
    inner = np.random.default_rng([seed, *unit.ids]).permutation(max(0, n - 2)) + 1  # wherever in a corpus it stands
    order = [0, *inner.tolist(), n - 1][:n]
    return replace(unit, ids=tuple(unit.ids[i] for i in order), document=None, _align=partial(_reordered, unit, order))


def _reordered(unit: Unit, order: list[int]) -> Alignment:
    """The tokens of a unit in another order, as a text of its own."""
    aligned = unit.alignment
    pieces = [aligned.text[slice(*aligned.spans[i])].strip() or aligned.tokens[i] for i in order]
    ends = np.cumsum([len(piece) + 1 for piece in pieces])
    spans = [(int(end) - 1 - len(piece), int(end) - 1) for end, piece in zip(ends, pieces, strict=True)]
    ids, tokens = [unit.ids[i] for i in order], [aligned.tokens[i] for i in order]
    return Alignment.of(" ".join(pieces), ids, tokens, spans)
