"""A plan: what is done to heads, and why. Made once, printed, saved, and applied now or later.

A head is kept or cut; a key head keeps all tokens in its cache or a few, at its bits; weights are stored at their bits. The
spec of the model that comes out says it all.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from headwise.analysis.ablation.head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.compression.prune_heads import M, compute_folded_biases, prune_heads
from headwise.compression.prune_request import PruneOptions, PruneRequest
from headwise.compression.quantize import quantize_to_spec
from headwise.compression.rankers import RANKERS
from headwise.compression.select_heads import select_heads_to_prune
from headwise.compression.streaming_selection import STREAM_RANKERS, select_streaming_heads
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.balanced_basis import Basis, check_basis
from headwise.heads.head import HeadPattern
from headwise.io.atomic_write import write_atomic
from headwise.io.resolve_path import read_text
from headwise.model import ModelProtocol, Transformer, check_model
from headwise.model.prune import heads_to_prune
from headwise.progress import Progress
from headwise.spec import Address, CachePolicy, CacheRule, LayerAddress, ModelSpec, WeightRule, select
from headwise.spec.cache_policy import CachePolicies, rules_from_policies
from headwise.spec.json_spec import JSONSpec
from headwise.spec.weight_bits import (
    FULL_PRECISION,
    GROUP_SIZE,
    BitAllocation,
    describe_weight_rules,
    drop_pruned_heads,
)
from headwise.text.corpus import Corpus
from headwise.weights.migration import FORMAT_1_DIGEST, format_1_tensor_name

PLAN_FORMAT = 2  # of plan files


@dataclass(frozen=True)
class FoldedBias:
    """What is added to one layer's output bias, (D,)."""

    layer: str
    bias: tuple[float, ...]


@dataclass(frozen=True)
class Plan(JSONSpec):
    """What is done to the heads of one model, by their original numbers. `apply` gives the changed model.

    `pruned_heads` names heads; `cache` names key heads, which are fewer where several heads share their keys;
    `weight_rules` says at how many bits weights are stored, by head and part.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> plan = plan_pruning(model, prune="5.1,3.*", fold_mean=False)
    >>> print(plan)
    7 of 36 heads are cut, named by hand; nothing is folded.
      layer 3 loses 0 1 2 3 4 5, all it had
      layer 5 loses 1
    >>> len(apply(plan, model).spec.head_addresses)
    29
    >>> print(plan_pruning(model, cache={"0-1.*": CachePolicy(sink_tokens=4, window=64), "2.0": 8}))
    13 of 36 key heads keep less, named by hand.
      streaming 4 + 64: 0.0 0.1 0.2 0.3 0.4 0.5 1.0 1.1 1.2 1.3 1.4 1.5
      8 bits: 2.0
    >>> print(plan_pruning(model, weights={"*": 8, "5.1": 4, "mlp": 8}))
    Weights are stored at few bits, in groups of 32.
      mlp: 8 bits
      W_Q: 35 at 8 bits, 1 at 4 bits
      W_K: 35 at 8 bits, 1 at 4 bits
      W_V: 35 at 8 bits, 1 at 4 bits
      W_O: 35 at 8 bits, 1 at 4 bits
    """

    spec: ModelSpec = field(repr=False)  # of the model it was made for
    digest: str = field(repr=False)  # of its numbers
    pruned_heads: tuple[str, ...] = ()
    cache: tuple[CacheRule, ...] = ()  # what key heads keep; those not named keep everything
    weight_rules: tuple[WeightRule, ...] = ()  # bits of the weights of heads that stay, MLPs and vocabulary
    basis: Basis = "given"  # in which heads are rounded
    activation_bits: int = FULL_PRECISION
    ranking: str = "named"  # how heads to cut were chosen: this, or one of RANKERS
    rounds: int = 1
    corpus: str = ""  # the corpus heads were ranked on, and whose means are folded in
    scores: tuple[float, ...] = field(default=(), repr=False)  # one per head of the model: those with the least go
    folded_biases: tuple[FoldedBias, ...] = field(default=(), repr=False)
    cache_ranking: str = "named"  # how key heads were chosen: this, or one of STREAM_RANKERS
    cache_corpus: str = ""
    cache_scores: tuple[float, ...] = field(default=(), repr=False)  # one per key head: those with the least stream

    def __post_init__(self) -> None:
        for ranking, rankers in ((self.ranking, RANKERS), (self.cache_ranking, STREAM_RANKERS)):
            if ranking not in ("named", *rankers):
                raise HeadwiseError(
                    f"a plan cannot be made by {ranking!r}; {suggest_names(ranking, ('named', *rankers))}"
                )
        if len(select(self.pruned_heads, self.spec.head_addresses)) != len(self.pruned_heads):
            raise HeadwiseError("the plan names a head twice; name each one once.")
        object.__setattr__(self, "cache", rules_from_policies(self.cache, self.spec.kv_head_addresses))
        check_basis(self.basis)
        if self.weight_rules:
            self._quantized_spec(self.spec.without(self.pruned_addresses))
        for scores, heads in (
            (self.scores, self.spec.head_addresses),
            (self.cache_scores, self.spec.kv_head_addresses),
        ):
            if scores and len(scores) != len(heads):
                raise HeadwiseError(f"the plan has {len(scores)} scores for {len(heads)} heads.")
        for folded_bias in self.folded_biases:
            layer = LayerAddress.parse(folded_bias.layer)
            if layer not in self.spec.layer_addresses or len(folded_bias.bias) != self.spec.width:
                raise HeadwiseError(
                    f"the plan folds {len(folded_bias.bias)} numbers into layer {layer}, which does not fit."
                )
        values = [
            *self.scores,
            *self.cache_scores,
            *(value for folded_bias in self.folded_biases for value in folded_bias.bias),
        ]
        if not all(map(math.isfinite, values)):
            raise HeadwiseError("the plan holds numbers that are NaN or infinite; make it again.")

    def apply_unchecked(self, model: M) -> M:
        """`apply` for a model this plan was made for just now: its weights are not hashed again."""
        biases = {
            LayerAddress.parse(folded_bias.layer): torch.tensor(folded_bias.bias, dtype=torch.float64)
            for folded_bias in self.folded_biases
        }
        changed = prune_heads(model, self.pruned_addresses, biases, self.cache)
        if self.weight_rules:
            changed = quantize_to_spec(changed, self._quantized_spec(changed.spec), self.basis)  # pyright: ignore  # ours, as was checked
        changed.plans = (*changed.plans, self)  # saved with the model
        return changed  # pyright: ignore[reportReturnType]

    def spec_with_cache(self, model: Transformer) -> ModelSpec:
        """What `model.cache(plan)` asks: the spec that says what key heads keep."""
        self.check_model(model)
        if self.pruned_heads or self.weight_rules:
            raise HeadwiseError("the plan changes more than caches; use hw.apply(plan, model).cache().")
        return self.spec.with_cache(self.cache)

    def _quantized_spec(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, weight_rules=self.weight_rules, activation_bits=self.activation_bits)

    def check_model(self, model: ModelProtocol) -> None:
        """Raise if the plan was made for another model or for other weights."""
        check_model(model)
        if model.spec != self.spec:
            names = [spec_field.name for spec_field in fields(ModelSpec)]
            differs = [name for name in names if getattr(model.spec, name) != getattr(self.spec, name)]
            raise HeadwiseError(
                f"the plan was made for another model: {_describe_sizes(self.spec)}; this one has "
                f"{_describe_sizes(model.spec)}. Their specs differ in {', '.join(differs)}. Make a plan for it."
            )
        by_old_names = self.digest.startswith(FORMAT_1_DIGEST)
        if model_digest(model, format_1_tensor_name if by_old_names else str) != self.digest.removeprefix(
            FORMAT_1_DIGEST
        ):
            raise HeadwiseError(
                "the plan was made for other weights of the same sizes, or in another dtype; make a plan for this model."
            )

    @property
    def changed_spec(self) -> ModelSpec:
        """What the changed model is; biases that folding adds are not told."""
        return self._quantized_spec(
            replace(self.spec, cache=self.cache, weight_rules=()).without(self.pruned_addresses)
        )

    @property
    def pruned_addresses(self) -> tuple[Address, ...]:
        """The heads that are cut."""
        return tuple(map(Address.parse, self.pruned_heads))

    @property
    def head_scores(self) -> dict[Address, float]:
        """Every head's score, where heads were ranked; in rounds, as each was ranked last."""
        return dict(zip(self.spec.head_addresses, self.scores, strict=True)) if self.scores else {}

    def to_json(self) -> str:
        """Write the plan as JSON, with its format, defaults left out."""
        return json.dumps({"format": PLAN_FORMAT, **json.loads(super().to_json())}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan back; a plan of another format, an unknown or ill-typed field is an error that names it."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            return super().from_json(text)  # says where
        if isinstance(data, dict):
            plan_format = data.pop("format", 1)
            if plan_format != PLAN_FORMAT:
                raise HeadwiseError(
                    f"the plan has format {plan_format!r}, this version reads format {PLAN_FORMAT}. Make the plan again: "
                    "headwise prune … --save-plan FILE, or headwise cache … --save-plan FILE."
                )
        return super().from_json(json.dumps(data))

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, whole or not at all."""
        return write_atomic(path, self.to_json().encode())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan back."""
        return Plan.from_json(read_text(Path(path)))

    def __str__(self) -> str:
        lines = self._describe_pruning() if self.pruned_heads or not (self.cache or self.weight_rules) else []
        lines += self._describe_cache() if self.cache else []
        return "\n".join([*lines, *(describe_weight_rules(self.weight_rules) if self.weight_rules else [])])

    def _describe_pruning(self) -> list[str]:
        method = "named by hand" if self.ranking == "named" else f"chosen by {self.ranking}"
        folding = "what they gave on average is folded in" if self.folded_biases else "nothing is folded"
        lines = [f"{len(self.pruned_heads)} of {len(self.spec.head_addresses)} heads are cut, {method}; {folding}."]
        lines += [f"  on {self.corpus}"] if self.corpus else []
        pruned = set(self.pruned_heads)
        for layer_address in self.spec.layer_addresses:
            layer_heads = [
                layer_address.head_address(head_id) for head_id in self.spec.attention_at(layer_address).head_ids
            ]
            removed = [head for head in layer_heads if str(head) in pruned]
            if removed:
                suffix = ", all it had" if len(removed) == len(layer_heads) else ""
                lines.append(f"  layer {layer_address} loses {' '.join(str(head.head) for head in removed)}{suffix}")
        return lines

    def _describe_cache(self) -> list[str]:
        method = "named by hand" if self.cache_ranking == "named" else f"chosen by {self.cache_ranking}"
        count = sum(len(rule.heads) for rule in self.cache)
        lines = [f"{count} of {len(self.spec.kv_head_addresses)} key heads keep less, {method}."]
        lines += [f"  on {self.cache_corpus}"] if self.cache_corpus else []
        return lines + [f"  {rule.policy}: {' '.join(rule.heads)}" for rule in self.cache]


def plan_pruning(
    model: ModelProtocol,
    request: PruneRequest | None = None,
    *,
    prune: HeadPattern | None = None,
    cache: CachePolicies | None = None,
    weights: BitAllocation | None = None,
    group_size: int = GROUP_SIZE,
    basis: Basis = "given",
    activation_bits: int = FULL_PRECISION,
    means: MeanActivations | None = None,
    progress: Progress | None = None,
    **options: Unpack[PruneOptions],
) -> Plan:
    """Decide what is done to heads. `prune` names those that go; or a `PruneRequest` chooses them, or its fields by name:
    `keep=0.5`, `ranking`, `fold_mean`, `corpus`, …

    `cache` says what key heads keep, {"5.*": CachePolicy(sink_tokens=4, window=128), "0.1": 8}, a number being bits; key
    heads that are not named keep what they kept. `plan_streaming` chooses them. `weights`, `group_size`, `basis` and
    `activation_bits` are those of `hw.quantize`, for the heads that stay; `hw.allocate_bits(…).weights` chooses them.
    `means` are the heads' means over `corpus`, where they were taken already. `progress(label, done, total)` hears how
    far it is.
    """
    check_model(model)
    model = model.to_memory()
    if "heads" in options:
        raise HeadwiseError("a plan may do several things to heads; name those that go: prune='5.1,6.*'.")
    if prune is not None:
        options["heads"] = prune
    resolved = PruneRequest.of(request, options)
    rules = model.spec.cache if cache is None else _merged_cache_rules(model, cache)
    quantization_fields: dict[str, Any] = {}
    if weights is not None:
        model.check_native("weights are packed by head in headwise's own models")
        quantization_fields = {"basis": basis, "activation_bits": activation_bits}
        # What is wrong is refused before long work.
        model.spec.quantized(weights, group_size=group_size, activation_bits=activation_bits)
    if (cache is not None or weights is not None) and not resolved.selects_heads:
        quantization_fields |= (
            {}
            if weights is None
            else {"weight_rules": model.spec.quantized(weights, group_size=group_size).weight_rules}
        )
        return Plan(spec=model.spec, digest=model_digest(model), cache=rules, **quantization_fields)
    resolved.check(model)
    tokenized = None if resolved.corpus is None else eval_corpus(model, resolved.corpus)
    pruned = () if resolved.heads is None else heads_to_prune(model.spec, resolved.heads)
    if resolved.fold_mean and means is None:
        means = mean_activations(model, tokenized, heads=pruned or "*")
    means = means if resolved.fold_mean else None
    scores: dict[Address, float] = {}
    if resolved.keep is not None:
        rank_options = {"rounds": resolved.rounds, "seed": resolved.seed, "gate_steps": resolved.gate_steps}
        pruned, scores = select_heads_to_prune(
            model, tokenized, resolved.keep, resolved.ranking, means=means, progress=progress, **rank_options
        )
    biases = {} if means is None else compute_folded_biases(model, pruned, means)
    if weights is not None:  # of what is left, so that a head that goes asks for no bits of shared keys
        quantization_fields["weight_rules"] = (
            model.spec.without(pruned)
            .quantized(drop_pruned_heads(weights, model.spec.head_addresses, pruned), group_size=group_size)
            .weight_rules
        )
    return Plan(
        spec=model.spec,
        digest=model_digest(model),
        pruned_heads=tuple(map(str, pruned)),
        cache=rules,
        **quantization_fields,
        ranking="named" if resolved.keep is None else resolved.ranking,
        rounds=resolved.rounds,
        corpus=_describe_corpus(tokenized.corpus) if tokenized is not None and resolved.needs_corpus else "",
        scores=tuple(scores[head] for head in model.spec.head_addresses) if scores else (),
        folded_biases=tuple(
            FoldedBias(str(layer_address), tuple(bias.tolist())) for layer_address, bias in biases.items()
        ),
    )


def plan_streaming(
    model: Transformer,
    fraction: float = 0.5,
    *,
    sink_tokens: int = 4,
    window: int = 128,
    bits: int = 32,
    ranking: str = "output",
    corpus: Any = None,
    max_length: int | None = None,
    seed: int = 0,
    gate_steps: int = 60,
    rounds: int = 1,
    protected_fraction: float = 0.0,
    progress: Progress | None = None,
) -> Plan:
    """A plan in which the share of key heads that need it least keep the `sink_tokens` and the `window` alone.

    `ranking` ranks key heads on texts of `max_length` tokens of the `corpus`: attention (how much they look beyond),
    output (how far what they write moves), loss (what is lost when one streams), gates that learn (`gate_steps`), role
    (those that find what is repeated stay whole), random (`seed`). In several `rounds` a few are chosen at a time, and
    the others asked about again with those streaming. `protected_fraction` is the part of the key heads, those that find
    what is repeated or to be copied best, that never streams, whatever the ranking. With `bits`, all key heads keep keys
    and values at so many.
    """
    check_model(model)
    policy, base_policies = (
        CachePolicy(sink_tokens=sink_tokens, window=window),
        {} if bits == 32 else {"*": CachePolicy(bits)},
    )
    selected, scores, corpus_name = select_streaming_heads(
        model, fraction, policy, ranking, corpus, max_length, seed, gate_steps, rounds, protected_fraction, progress
    )
    return Plan(
        spec=model.spec,
        digest=model_digest(model),
        cache=_merged_cache_rules(
            model, base_policies | ({",".join(map(str, selected)): replace(policy, bits=bits)} if selected else {})
        ),
        cache_ranking=ranking,
        cache_corpus=corpus_name,
        cache_scores=tuple(scores[head] for head in model.spec.kv_head_addresses),
    )


def apply(plan: Plan, model: M) -> M:
    """Return the model that a plan describes. The given model is not changed.

    Args:
        plan: A plan made for this model.
        model: The model, with the weights the plan was made for.
    """
    plan.check_model(model)
    return plan.apply_unchecked(model)


def plans_from_dicts(plan_dicts: object, present_heads: Iterable[Address], file: object) -> tuple[Plan, ...]:
    """Plans as a folder tells them, of a model that has these heads."""
    if not isinstance(plan_dicts, list):
        raise HeadwiseError(f"{file} tells no list of plans; the folder is damaged.")
    plans, present = tuple(Plan.from_json(json.dumps(plan)) for plan in plan_dicts), set(present_heads)
    if any(set(plan.pruned_addresses).intersection(present) for plan in plans):
        raise HeadwiseError(f"{file} holds a plan that cuts heads which are there; the folder is damaged.")
    return plans


def model_digest(model: ModelProtocol, tensor_name: Callable[[str], str] = str) -> str:
    """A model's numbers as one short text: names and bytes of all its tensors, tied ones once."""
    sha = hashlib.sha256()
    for name, tensor in model.to_memory().state_dict().items():
        if not (model.spec.tied and name == "output.vocabulary.weight"):
            sha.update(f"{tensor_name(name)}:{tuple(tensor.shape)}".encode())
            sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _describe_corpus(corpus: Corpus) -> str:
    return f"{corpus.name} ({corpus.fingerprint[:12]})"


def _merged_cache_rules(model: ModelProtocol, cache: CachePolicies) -> tuple[CacheRule, ...]:
    """What key heads keep after this: those not named what they kept before."""
    model.check_native("caches by head are for headwise's own models, or leave cache out")
    new = model.spec.with_cache(cache).cache
    old = {",".join(rule.heads): rule.policy for rule in model.spec.cache}
    return rules_from_policies(old | {",".join(rule.heads): rule.policy for rule in new}, model.spec.kv_head_addresses)


def _describe_sizes(spec: ModelSpec) -> str:
    """A model in a few words, to tell it from another."""
    heads = len(spec.head_addresses)
    return (
        f"{heads} heads in {len(spec.layer_addresses)} layers, width {spec.width}, vocabulary {spec.vocab}, {spec.kind}"
    )
