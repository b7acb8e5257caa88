"""A plan: which heads go, why, and what is folded in for them. Made once, printed, saved, and applied now or later."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

import torch

from headwise.attach import Attached
from headwise.change.cut import M, check_model, cut, heads_to_cut
from headwise.change.cut import fold as fold_means
from headwise.change.rank import choose
from headwise.change.request import PruneRequest, PruneWords
from headwise.change.ways import WAYS
from headwise.errors import HeadwiseError, close_names
from headwise.files.places import read_text
from headwise.files.whole import whole_file
from headwise.look.profile.make import Note
from headwise.look.worth.outputs import mean_activations
from headwise.model import AnyModel
from headwise.spec import Address, ModelSpec, SiteAddress, select
from headwise.spec.wire import Wire
from headwise.text.corpus import Corpus


@dataclass(frozen=True)
class Folded:
    """What is added to one layer's output bias, (D,)."""

    layer: str
    bias: tuple[float, ...]


@dataclass(frozen=True)
class Plan(Wire):
    """Heads to cut from one model, by their original numbers. `apply` gives the smaller model.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> plan = Plan.make(model, heads="5.1,3.*", fold=False)
    >>> print(plan)
    7 of 36 heads are cut, named by hand; nothing is folded.
      layer 3 loses 0 1 2 3 4 5, all it had
      layer 5 loses 1
    >>> len(plan.apply(model).spec.addresses)
    29
    """

    spec: ModelSpec = field(repr=False)  # of the model it was made for
    weights: str = field(repr=False)  # and a digest of its numbers
    heads: tuple[str, ...]  # these are cut
    by: str = "named"  # or one of WAYS
    rounds: int = 1
    on: str = ""  # the corpus heads were ranked on, and whose means are folded in
    scores: tuple[float, ...] = field(default=(), repr=False)  # one per head of the model: those with the least go
    folded: tuple[Folded, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.by not in ("named", *WAYS):
            raise HeadwiseError(f"a plan cannot be made by {self.by!r}; {close_names(self.by, ('named', *WAYS))}")
        if len(select(self.heads, self.spec.addresses)) != len(self.heads):
            raise HeadwiseError("the plan names a head twice; name each one once.")
        if self.scores and len(self.scores) != len(self.spec.addresses):
            raise HeadwiseError(f"the plan has {len(self.scores)} scores for {len(self.spec.addresses)} heads.")
        for part in self.folded:
            layer = SiteAddress.parse(part.layer)
            if layer not in self.spec.sites or len(part.bias) != self.spec.width:
                raise HeadwiseError(f"the plan folds {len(part.bias)} numbers into layer {layer}, which does not fit.")
        numbers = [*self.scores, *(number for part in self.folded for number in part.bias)]
        if not all(map(math.isfinite, numbers)):
            raise HeadwiseError("the plan holds numbers that are NaN or infinite; make it again.")

    @staticmethod
    def make(
        model: AnyModel,
        request: PruneRequest | None = None,
        *,
        note: Note | None = None,
        **words: Unpack[PruneWords],
    ) -> "Plan":
        """Decide which heads go, by a `PruneRequest` or by its fields: `keep=0.5`, `heads="5.1,6.*"`, `by`, `fold`, `on`, …

        `note(what, done, of)` hears how far it is.
        """
        check_model(model)
        asked = PruneRequest.of(request, words)
        asked.check(model)
        corpus = None if asked.on is None else Corpus.of(asked.on)
        gone = () if asked.heads is None else heads_to_cut(model, asked.heads)
        means = mean_activations(model, corpus, heads=gone or "*") if asked.fold else None
        scores: dict[Address, float] = {}
        if asked.keep is not None:
            how = {"rounds": asked.rounds, "seed": asked.seed, "steps": asked.steps}
            gone, scores = choose(model, corpus, asked.keep, asked.by, means=means, note=note, **how)
        biases = {} if means is None else fold_means(model, gone, means)
        return Plan(
            spec=model.spec,
            weights=digest(model),
            heads=tuple(map(str, gone)),
            by="named" if asked.keep is None else asked.by,
            rounds=asked.rounds,
            on=f"{corpus.name} ({corpus.fingerprint[:12]})" if corpus is not None and asked.reads else "",
            scores=tuple(scores[head] for head in model.spec.addresses) if scores else (),
            folded=tuple(Folded(str(site), tuple(bias.tolist())) for site, bias in biases.items()),
        )

    def apply(self, model: M) -> M:
        """The smaller model; only for the model this plan was made for."""
        check_model(model)
        if model.spec != self.spec:
            raise HeadwiseError(
                f"the plan was made for another model: {_sizes(self.spec)}; this one has {_sizes(model.spec)}. "
                f"Make a plan for it."
            )
        if digest(model) != self.weights:
            raise HeadwiseError(
                "the plan was made for other weights of the same sizes, or in another dtype; make a plan for this model."
            )
        return self.carry_out(model)

    def carry_out(self, model: M) -> M:
        """The same, for a model this plan was made for just now: its weights are not hashed again."""
        biases = {SiteAddress.parse(part.layer): torch.tensor(part.bias, dtype=torch.float64) for part in self.folded}
        small = cut(model, self.addresses, biases)
        if isinstance(small, Attached):
            small.plans = (*small.plans, self)  # saved with the model; our own models say in their spec what they kept
        return small

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The heads that are cut."""
        return tuple(map(Address.parse, self.heads))

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
        how = "named by hand" if self.by == "named" else f"chosen by {self.by}"
        folded = "what they gave on average is folded in" if self.folded else "nothing is folded"
        lines = [f"{len(self.heads)} of {len(self.spec.addresses)} heads are cut, {how}; {folded}."]
        lines += [f"  on {self.on}"] if self.on else []
        gone = set(self.heads)
        for site in self.spec.sites:
            there = [site.head(number) for number in self.spec.attention_at(site).head_ids]
            loses = [head for head in there if str(head) in gone]
            if loses:
                whole = ", all it had" if len(loses) == len(there) else ""
                lines.append(f"  layer {site} loses {' '.join(str(head.head) for head in loses)}{whole}")
        return "\n".join(lines)


def digest(model: AnyModel) -> str:
    """A model's numbers as one short text: names and bytes of all its tensors, tied ones once."""
    made = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if not (model.spec.tied and name == "output.vocabulary.weight"):
            made.update(f"{name}:{tuple(tensor.shape)}".encode())
            made.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()


def _sizes(spec: ModelSpec) -> str:
    """A model in a few words, to tell it from another."""
    heads = len(spec.addresses)
    return f"{heads} heads in {len(spec.sites)} layers, width {spec.width}, vocabulary {spec.vocab}, {spec.kind}"
