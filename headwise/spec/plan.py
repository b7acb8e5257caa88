"""A plan: changes to the heads of one model, as plain data. `hw.apply(plan, model)` returns the changed model.

A plan lists the heads to prune, the cache policies of KV heads, and the bits of quantized weights. Does not import torch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, FileFormatError
from headwise.spec.address import Address, LayerAddress, select
from headwise.spec.cache_policy import CacheRule, rules_from_policies
from headwise.spec.json_spec import JSONSpec
from headwise.spec.model import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION, Basis, WeightRule, check_basis, describe_weight_rules

PLAN_FORMAT = 2  # format of plan files


@dataclass(frozen=True)
class FoldedBias:
    """Mean output of the pruned heads of one layer, added to the output bias of the layer.

    Attributes:
        layer: Address of the layer.
        bias: Values to add, (D,).
    """

    layer: str
    bias: tuple[float, ...]


@dataclass(frozen=True)
class Plan(JSONSpec):
    """Changes to the heads of one model, by their original numbers. `hw.apply` returns the changed model.

    Attributes:
        spec: Spec of the model that the plan was made for.
        digest: Digest of the weights of that model.
        pruned_heads: Addresses of the heads that are pruned.
        cache: Cache rules of KV heads. A KV head that no rule names caches everything.
        weight_rules: Bits of the weights of the remaining heads, the MLPs and the vocabulary.
        basis: Basis in which the weights of heads are quantized.
        activation_bits: Bits of the activations that quantized weights are multiplied by.
        ranking: Ranking method that chose the pruned heads, or "named" if the user chose them.
        rounds: Number of pruning rounds.
        corpus: Corpus on which heads were ranked and whose means are folded.
        scores: Score of each head of the model; heads with the lowest scores are pruned.
        folded_biases: Mean outputs of pruned heads, as biases of their layers.
        cache_ranking: Ranking method that chose the streaming KV heads, or "named".
        cache_corpus: Corpus on which KV heads were ranked.
        cache_scores: Score of each KV head; KV heads with the lowest scores stream.

    >>> from headwise.spec import preset
    >>> plan = Plan(preset("nano"), digest="", pruned_heads=("3.0", "5.1"))
    >>> print(plan)
    2 of 36 heads are pruned, named by hand; nothing is folded.
      layer 3 loses 0
      layer 5 loses 1
    >>> len(plan.changed_spec.head_addresses)
    34
    """

    spec: ModelSpec = field(repr=False)
    digest: str = field(repr=False)
    pruned_heads: tuple[str, ...] = ()
    cache: tuple[CacheRule, ...] = ()
    weight_rules: tuple[WeightRule, ...] = ()
    basis: Basis = "given"
    activation_bits: int = FULL_PRECISION
    ranking: str = "named"
    rounds: int = 1
    corpus: str = ""
    scores: tuple[float, ...] = field(default=(), repr=False)
    folded_biases: tuple[FoldedBias, ...] = field(default=(), repr=False)
    cache_ranking: str = "named"
    cache_corpus: str = ""
    cache_scores: tuple[float, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(select(self.pruned_heads, self.spec.head_addresses)) != len(self.pruned_heads):
            raise ArgumentError(
                f"plan pruned_heads: a head is listed twice. Got {', '.join(self.pruned_heads)}. List each head once."
            )
        object.__setattr__(self, "cache", rules_from_policies(self.cache, self.spec.cached_kv_head_addresses))
        check_basis(self.basis)
        if self.weight_rules:
            self.quantized_spec(self.spec.without(self.pruned_addresses))
        for name, scores, heads in (
            ("scores", self.scores, self.spec.head_addresses),
            ("cache_scores", self.cache_scores, self.spec.cached_kv_head_addresses),
        ):
            if scores and len(scores) != len(heads):
                raise ArgumentError(
                    f"plan {name}: needs one score per head. Got {len(scores)} scores for {len(heads)} heads. "
                    f"Make the plan again."
                )
        for folded_bias in self.folded_biases:
            layer = LayerAddress.parse(folded_bias.layer)
            if layer not in self.spec.layer_addresses or len(folded_bias.bias) != self.spec.width:
                raise ArgumentError(
                    f"plan folded_biases: the bias does not match the model. Got layer {layer} with {len(folded_bias.bias)} "
                    f"values. The model has the layers {', '.join(map(str, self.spec.layer_addresses))}, and each bias must "
                    f"have {self.spec.width} values (its width). Make the plan again."
                )
        values = [
            *self.scores,
            *self.cache_scores,
            *(value for folded_bias in self.folded_biases for value in folded_bias.bias),
        ]
        if not all(map(math.isfinite, values)):
            raise ArgumentError("plan: scores or folded biases are NaN or infinite. Make the plan again.")

    @property
    def pruned_addresses(self) -> tuple[Address, ...]:
        """Addresses of the pruned heads."""
        return tuple(map(Address.parse, self.pruned_heads))

    @property
    def head_scores(self) -> dict[Address, float]:
        """Score of each head from its last ranking. Empty if the user named the heads."""
        return dict(zip(self.spec.head_addresses, self.scores, strict=True)) if self.scores else {}

    @property
    def changed_spec(self) -> ModelSpec:
        """Spec of the changed model, without output biases that folding adds."""
        return self.quantized_spec(replace(self.spec, cache=self.cache, weight_rules=()).without(self.pruned_addresses))

    def quantized_spec(self, spec: ModelSpec) -> ModelSpec:
        """Return a spec of the remaining heads with the weight bits of this plan."""
        return replace(spec, weight_rules=self.weight_rules, activation_bits=self.activation_bits)

    def cache_spec(self) -> ModelSpec:
        """Return the spec of the model with the cache rules of this plan; raise if the plan changes weights too."""
        if self.pruned_heads or self.weight_rules:
            raise ArgumentError(
                "plan: it prunes heads or quantizes weights, so it cannot be used as a cache alone. "
                "Use hw.apply(plan, model).cache()."
            )
        return self.spec.with_cache(self.cache)

    def check_spec(self, spec: ModelSpec) -> None:
        """Raise if the plan was made for a model of another spec."""
        if spec != self.spec:
            names = [spec_field.name for spec_field in fields(ModelSpec)]
            differs = [name for name in names if getattr(spec, name) != getattr(self.spec, name)]
            raise ArgumentError(
                f"plan: made for another model. The plan's model has {_describe_sizes(self.spec)}. This model has "
                f"{_describe_sizes(spec)}. The specs differ in {', '.join(differs)}. Make a plan for this model."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data with its format, without fields that have their default value."""
        return {"format": PLAN_FORMAT, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """Build a plan from plain data.

        Args:
            data: The fields as `to_dict` returns them.

        Raises:
            FileFormatError: The format is not supported, or a field is unknown, missing or has the wrong type.
        """
        if isinstance(data, dict):
            data = dict(data)
            plan_format = data.pop("format", 1)
            if plan_format != PLAN_FORMAT:
                raise FileFormatError(
                    f"plan: has format {plan_format!r}, but this version of headwise reads format {PLAN_FORMAT}. Make the "
                    "plan again: headwise prune … --save-plan FILE, or headwise cache … --save-plan FILE."
                )
        return super().from_dict(data)

    def save(self, path: str | Path) -> Path:
        """Write the plan to a JSON file. If writing fails, an existing file stays unchanged.

        Args:
            path: Path of the file.

        Returns:
            The path of the written file.
        """
        import headwise

        return headwise.save_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan from a file that `save` wrote.

        Args:
            path: Path of the file.
        """
        import headwise

        return headwise.load_plan(path)

    def __repr__(self) -> str:
        from headwise.ui.result_text import plan_table

        return plan_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import plan_table

        return plan_table(self).as_html()

    def __str__(self) -> str:
        lines = _describe_pruning(self) if self.pruned_heads or not (self.cache or self.weight_rules) else []
        lines += _describe_cache(self) if self.cache else []
        return "\n".join([*lines, *(describe_weight_rules(self.weight_rules) if self.weight_rules else [])])


def plans_from_dicts(plan_dicts: object, present_heads: Iterable[Address], file: object) -> tuple[Plan, ...]:
    """Build the plans of a saved model with these heads. Errors name `file`."""
    if not isinstance(plan_dicts, list):
        raise FileFormatError(
            f"{file}: must be a list of plans. Got {type(plan_dicts).__name__}. The folder is damaged; save the model again."
        )
    plans, present = tuple(map(Plan.from_dict, plan_dicts)), set(present_heads)
    if any(present.intersection(plan.pruned_addresses) for plan in plans):
        raise FileFormatError(
            f"{file}: a plan prunes heads that the saved model still has. The folder is damaged; save the model again."
        )
    return plans


def _describe_pruning(plan: Plan) -> list[str]:
    method = "named by hand" if plan.ranking == "named" else f"chosen by {plan.ranking}"
    folding = "their mean outputs are folded into biases" if plan.folded_biases else "nothing is folded"
    lines = [f"{len(plan.pruned_heads)} of {len(plan.spec.head_addresses)} heads are pruned, {method}; {folding}."]
    lines += [f"  on {plan.corpus}"] if plan.corpus else []
    if plan.spec.shared_layers and plan.pruned_heads:
        numbers = " ".join(map(str, sorted({head.head for head in plan.pruned_addresses})))
        lines.append(f"  The layers share their weights: head {numbers} is pruned in all {plan.spec.layers} layers.")
    pruned = set(plan.pruned_heads)
    for layer_address in plan.spec.layer_addresses:
        layer_heads = [
            layer_address.head_address(head_id) for head_id in plan.spec.attention_at(layer_address).head_ids
        ]
        removed = [head for head in layer_heads if str(head) in pruned]
        if removed:
            suffix = " (all heads)" if len(removed) == len(layer_heads) else ""
            lines.append(f"  layer {layer_address} loses {' '.join(str(head.head) for head in removed)}{suffix}")
    return lines


def _describe_cache(plan: Plan) -> list[str]:
    method = "named by hand" if plan.cache_ranking == "named" else f"chosen by {plan.cache_ranking}"
    count = sum(len(rule.heads) for rule in plan.cache)
    lines = [f"{count} of {len(plan.spec.cached_kv_head_addresses)} KV heads cache less, {method}."]
    lines += [f"  on {plan.cache_corpus}"] if plan.cache_corpus else []
    return lines + [f"  {rule.policy}: {' '.join(rule.heads)}" for rule in plan.cache]


def _describe_sizes(spec: ModelSpec) -> str:
    heads = len(spec.head_addresses)
    return (
        f"{heads} heads in {len(spec.layer_addresses)} layers, width {spec.width}, vocabulary {spec.vocab}, {spec.kind}"
    )
