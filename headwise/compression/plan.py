"""A plan: what is done to heads, and why. Made once, printed, saved, and applied now or later.

A head is kept or cut; a key head keeps all tokens in its cache or a few, at its bits; weights are stored at their bits. The
spec of the model that comes out says it all.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from headwise.analysis.ablation.head_outputs import Means, mean_activations, read_on
from headwise.compression.prune_heads import M
from headwise.compression.prune_heads import cut as cut_heads
from headwise.compression.prune_heads import fold as fold_means
from headwise.compression.prune_request import PruneRequest, PruneWords
from headwise.compression.quantize import packed_as
from headwise.compression.rankers import WAYS
from headwise.compression.select_heads import choose
from headwise.compression.streaming_selection import STREAM_WAYS, choose_streaming
from headwise.errors import HeadwiseError, close_names
from headwise.heads.balanced_basis import Basis, check_basis
from headwise.heads.head import Pattern
from headwise.io.atomic_write import whole_file
from headwise.io.resolve_path import read_text
from headwise.model import AnyModel, Transformer, check_model
from headwise.model.prune import heads_to_cut
from headwise.progress import Progress
from headwise.spec import Address, CacheRule, Keeps, ModelSpec, SiteAddress, WeightRule, select
from headwise.spec.cache_policy import Treatments, cache_rules
from headwise.spec.json_spec import Wire
from headwise.spec.weight_bits import FULL, GROUP, Bits, for_those_left, weight_lines
from headwise.text.corpus import Corpus


@dataclass(frozen=True)
class Folded:
    """What is added to one layer's output bias, (D,)."""

    layer: str
    bias: tuple[float, ...]


@dataclass(frozen=True)
class Plan(Wire):
    """What is done to the heads of one model, by their original numbers. `apply` gives the changed model.

    `cut` names heads; `cache` names key heads, which are fewer where several heads share their keys; `weights` says at how
    many bits weights are stored, by head and part.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> plan = Plan.make(model, cut="5.1,3.*", fold=False)
    >>> print(plan)
    7 of 36 heads are cut, named by hand; nothing is folded.
      layer 3 loses 0 1 2 3 4 5, all it had
      layer 5 loses 1
    >>> len(plan.apply(model).spec.addresses)
    29
    >>> print(Plan.make(model, cache={"0-1.*": Keeps(first=4, last=64), "2.0": 8}))
    13 of 36 key heads keep less, named by hand.
      streaming 4 + 64: 0.0 0.1 0.2 0.3 0.4 0.5 1.0 1.1 1.2 1.3 1.4 1.5
      8 bits: 2.0
    >>> print(Plan.make(model, weights={"*": 8, "5.1": 4, "mlp": 8}))
    Weights are stored at few bits, in groups of 32.
      mlp: 8 bits
      W_Q: 35 at 8 bits, 1 at 4 bits
      W_K: 35 at 8 bits, 1 at 4 bits
      W_V: 35 at 8 bits, 1 at 4 bits
      W_O: 35 at 8 bits, 1 at 4 bits
    """

    spec: ModelSpec = field(repr=False)  # of the model it was made for
    digest: str = field(repr=False)  # of its numbers
    cut: tuple[str, ...] = ()
    cache: tuple[CacheRule, ...] = ()  # what key heads keep; those not named keep everything
    weights: tuple[WeightRule, ...] = ()  # at how many bits those of heads that stay, MLPs and vocabulary are stored
    basis: Basis = "given"  # in which heads are rounded
    activations: int = FULL
    by: str = "named"  # how heads to cut were chosen: this, or one of WAYS
    rounds: int = 1
    on: str = ""  # the corpus heads were ranked on, and whose means are folded in
    scores: tuple[float, ...] = field(default=(), repr=False)  # one per head of the model: those with the least go
    folded: tuple[Folded, ...] = field(default=(), repr=False)
    cache_by: str = "named"  # how key heads were chosen: this, or one of STREAM_WAYS
    cache_on: str = ""
    cache_scores: tuple[float, ...] = field(default=(), repr=False)  # one per key head: those with the least stream

    def __post_init__(self) -> None:
        for by, ways in ((self.by, WAYS), (self.cache_by, STREAM_WAYS)):
            if by not in ("named", *ways):
                raise HeadwiseError(f"a plan cannot be made by {by!r}; {close_names(by, ('named', *ways))}")
        if len(select(self.cut, self.spec.addresses)) != len(self.cut):
            raise HeadwiseError("the plan names a head twice; name each one once.")
        object.__setattr__(self, "cache", cache_rules(self.cache, self.spec.key_heads))
        check_basis(self.basis)
        if self.weights:
            self._packed_spec(self.spec.without(self.addresses))
        for scores, heads in ((self.scores, self.spec.addresses), (self.cache_scores, self.spec.key_heads)):
            if scores and len(scores) != len(heads):
                raise HeadwiseError(f"the plan has {len(scores)} scores for {len(heads)} heads.")
        for part in self.folded:
            layer = SiteAddress.parse(part.layer)
            if layer not in self.spec.sites or len(part.bias) != self.spec.width:
                raise HeadwiseError(f"the plan folds {len(part.bias)} numbers into layer {layer}, which does not fit.")
        numbers = [*self.scores, *self.cache_scores, *(number for part in self.folded for number in part.bias)]
        if not all(map(math.isfinite, numbers)):
            raise HeadwiseError("the plan holds numbers that are NaN or infinite; make it again.")

    @staticmethod
    def make(
        model: AnyModel,
        request: PruneRequest | None = None,
        *,
        cut: Pattern | None = None,
        cache: Treatments | None = None,
        weights: Bits | None = None,
        group: int = GROUP,
        basis: Basis = "given",
        activations: int = FULL,
        means: Means | None = None,
        progress: Progress | None = None,
        **words: Unpack[PruneWords],
    ) -> "Plan":
        """Decide what is done to heads. `cut` names those that go; or a `PruneRequest` chooses them, or its fields by name:
        `keep=0.5`, `by`, `fold`, `on`, …

        `cache` says what key heads keep, {"5.*": Keeps(first=4, last=128), "0.1": 8}, a number being bits; key heads that
        are not named keep what they kept. `Plan.streaming` chooses them. `weights`, `group`, `basis` and `activations` are
        those of `hw.quantise`, for the heads that stay; `hw.allocate(…).weights` chooses them.
        `means` are the heads' means over `on`, where they were taken already. `progress(what, done, of)` hears how far it is.
        """
        check_model(model)
        model = model.in_memory()
        if "heads" in words:
            raise HeadwiseError("a plan may do several things to heads; name those that go: cut='5.1,6.*'.")
        if cut is not None:
            words["heads"] = cut
        asked = PruneRequest.of(request, words)
        rules = model.spec.cache if cache is None else _rules(model, cache)
        bits: dict[str, Any] = {}
        if weights is not None:
            model.check_own("weights are packed by head in headwise's own models")
            bits = {"basis": basis, "activations": activations}
            model.spec.quantised(
                weights, group=group, activations=activations
            )  # what is wrong is refused before long work
        if (cache is not None or weights is not None) and not asked.cuts:
            bits |= {} if weights is None else {"weights": model.spec.quantised(weights, group=group).weights}
            return Plan(spec=model.spec, digest=digest(model), cache=rules, **bits)
        asked.check(model)
        reading = None if asked.on is None else read_on(model, asked.on)
        gone = () if asked.heads is None else heads_to_cut(model.spec, asked.heads)
        if asked.fold and means is None:
            means = mean_activations(model, reading, heads=gone or "*")
        means = means if asked.fold else None
        scores: dict[Address, float] = {}
        if asked.keep is not None:
            how = {"rounds": asked.rounds, "seed": asked.seed, "steps": asked.steps}
            gone, scores = choose(model, reading, asked.keep, asked.by, means=means, progress=progress, **how)
        biases = {} if means is None else fold_means(model, gone, means)
        if weights is not None:  # of what is left, so that a head that goes asks for no bits of shared keys
            bits["weights"] = (
                model.spec.without(gone)
                .quantised(for_those_left(weights, model.spec.addresses, gone), group=group)
                .weights
            )
        return Plan(
            spec=model.spec,
            digest=digest(model),
            cut=tuple(map(str, gone)),
            cache=rules,
            **bits,
            by="named" if asked.keep is None else asked.by,
            rounds=asked.rounds,
            on=_named(reading.corpus) if reading is not None and asked.reads else "",
            scores=tuple(scores[head] for head in model.spec.addresses) if scores else (),
            folded=tuple(Folded(str(site), tuple(bias.tolist())) for site, bias in biases.items()),
        )

    @staticmethod
    def streaming(
        model: Transformer,
        share: float = 0.5,
        *,
        first: int = 4,
        last: int = 128,
        bits: int = 32,
        by: str = "writes",
        on: Any = None,
        longest: int | None = None,
        seed: int = 0,
        steps: int = 60,
        rounds: int = 1,
        spare: float = 0.0,
        progress: Progress | None = None,
    ) -> "Plan":
        """A plan in which the share of key heads that need it least keep the `first` tokens and the `last` alone.

        `by` ranks key heads on texts of `longest` tokens of the corpus `on`: mass (how much they look beyond), writes (how
        far what they write moves), loss (what is lost when one streams), gates that learn (`steps`), role (those that find
        what is repeated stay whole), random (`seed`). In several `rounds` a few are chosen at a time, and the others asked
        about again with those streaming. The part `spare` of the key heads, those that find what is repeated or to be copied
        best, never streams, whatever the ranking. With `bits`, all key heads keep keys and values at so many.
        """
        check_model(model)
        keeps, rest = Keeps(first=first, last=last), {} if bits == 32 else {"*": Keeps(bits)}
        chosen, scores, told = choose_streaming(
            model, share, keeps, by, on, longest, seed, steps, rounds, spare, progress
        )
        return Plan(
            spec=model.spec,
            digest=digest(model),
            cache=_rules(model, rest | ({",".join(map(str, chosen)): replace(keeps, bits=bits)} if chosen else {})),
            cache_by=by,
            cache_on=told,
            cache_scores=tuple(scores[head] for head in model.spec.key_heads),
        )

    def apply(self, model: M) -> M:
        """The changed model; only for the model this plan was made for."""
        self._check_model(model)
        return self.carry_out(model)

    def carry_out(self, model: M) -> M:
        """The same, for a model this plan was made for just now: its weights are not hashed again."""
        biases = {SiteAddress.parse(part.layer): torch.tensor(part.bias, dtype=torch.float64) for part in self.folded}
        small = cut_heads(model, self.addresses, biases, self.cache)
        if self.weights:
            small = packed_as(small, self._packed_spec(small.spec), self.basis)  # pyright: ignore  # ours, as was checked
        small.plans = (*small.plans, self)  # saved with the model
        return small  # pyright: ignore[reportReturnType]

    def cache_spec(self, model: Transformer) -> ModelSpec:
        """What `model.cache(plan)` asks: the spec that says what key heads keep."""
        self._check_model(model)
        if self.cut or self.weights:
            raise HeadwiseError("the plan changes more than caches; use plan.apply(model).cache().")
        return self.spec.caching(self.cache)

    def _packed_spec(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, weights=self.weights, activations=self.activations)

    def _check_model(self, model: AnyModel) -> None:
        check_model(model)
        if model.spec != self.spec:
            names = [one.name for one in fields(ModelSpec)]
            differs = [name for name in names if getattr(model.spec, name) != getattr(self.spec, name)]
            raise HeadwiseError(
                f"the plan was made for another model: {_sizes(self.spec)}; this one has {_sizes(model.spec)}. "
                f"Their specs differ in {', '.join(differs)}. Make a plan for it."
            )
        if digest(model) != self.digest:
            raise HeadwiseError(
                "the plan was made for other weights of the same sizes, or in another dtype; make a plan for this model."
            )

    @property
    def after(self) -> ModelSpec:
        """What the changed model is; biases that folding adds are not told."""
        return self._packed_spec(replace(self.spec, cache=self.cache, weights=()).without(self.addresses))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The heads that are cut."""
        return tuple(map(Address.parse, self.cut))

    @property
    def worth(self) -> dict[Address, float]:
        """Every head's score, where heads were ranked; in rounds, as each was ranked last."""
        return dict(zip(self.spec.addresses, self.scores, strict=True)) if self.scores else {}

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, whole or not at all."""
        return whole_file(path, self.to_json().encode())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan back."""
        return Plan.from_json(read_text(Path(path)))

    def __str__(self) -> str:
        told = self._cut_lines() if self.cut or not (self.cache or self.weights) else []
        told += self._cache_lines() if self.cache else []
        return "\n".join([*told, *(weight_lines(self.weights) if self.weights else [])])

    def _cut_lines(self) -> list[str]:
        how = "named by hand" if self.by == "named" else f"chosen by {self.by}"
        folded = "what they gave on average is folded in" if self.folded else "nothing is folded"
        lines = [f"{len(self.cut)} of {len(self.spec.addresses)} heads are cut, {how}; {folded}."]
        lines += [f"  on {self.on}"] if self.on else []
        gone = set(self.cut)
        for site in self.spec.sites:
            there = [site.head(number) for number in self.spec.attention_at(site).head_ids]
            loses = [head for head in there if str(head) in gone]
            if loses:
                whole = ", all it had" if len(loses) == len(there) else ""
                lines.append(f"  layer {site} loses {' '.join(str(head.head) for head in loses)}{whole}")
        return lines

    def _cache_lines(self) -> list[str]:
        how = "named by hand" if self.cache_by == "named" else f"chosen by {self.cache_by}"
        less = sum(len(rule.heads) for rule in self.cache)
        lines = [f"{less} of {len(self.spec.key_heads)} key heads keep less, {how}."]
        lines += [f"  on {self.cache_on}"] if self.cache_on else []
        return lines + [f"  {rule.keeps}: {' '.join(rule.heads)}" for rule in self.cache]


def read_plans(stored: object, there: Iterable[Address], file: object) -> tuple[Plan, ...]:
    """Plans as a folder tells them, of a model that has these heads."""
    if not isinstance(stored, list):
        raise HeadwiseError(f"{file} tells no list of plans; the folder is damaged.")
    plans, present = tuple(Plan.from_json(json.dumps(plan)) for plan in stored), set(there)
    if any(set(plan.addresses).intersection(present) for plan in plans):
        raise HeadwiseError(f"{file} holds a plan that cuts heads which are there; the folder is damaged.")
    return plans


def digest(model: AnyModel) -> str:
    """A model's numbers as one short text: names and bytes of all its tensors, tied ones once."""
    made = hashlib.sha256()
    for name, tensor in model.in_memory().state_dict().items():
        if not (model.spec.tied and name == "output.vocabulary.weight"):
            made.update(f"{name}:{tuple(tensor.shape)}".encode())
            made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def _named(corpus: Corpus) -> str:
    return f"{corpus.name} ({corpus.fingerprint[:12]})"


def _rules(model: AnyModel, cache: Treatments) -> tuple[CacheRule, ...]:
    """What key heads keep after this: those not named what they kept before."""
    model.check_own("caches by head are for headwise's own models, or leave cache out")
    new = model.spec.caching(cache).cache
    before = {",".join(rule.heads): rule.keeps for rule in model.spec.cache}
    return cache_rules(before | {",".join(rule.heads): rule.keeps for rule in new}, model.spec.key_heads)


def _sizes(spec: ModelSpec) -> str:
    """A model in a few words, to tell it from another."""
    heads = len(spec.addresses)
    return f"{heads} heads in {len(spec.sites)} layers, width {spec.width}, vocabulary {spec.vocab}, {spec.kind}"
