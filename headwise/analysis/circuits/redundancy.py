"""Redundancy and self-repair: heads ablated alone and in pairs, with later layers live and frozen.

The effect of ablating a set of heads is the metric of the model minus the metric with the heads ablated. It is measured in
three ways:

    direct        all later heads and MLPs keep their clean output: the effect on the logits through the final norm
    heads frozen  later heads keep their clean output; MLPs are live
    live          everything after the heads is live

    repaired by later heads   = heads frozen − live
    repaired by later layers  = direct − live
    interaction of a pair     = effect of both − effect of the first − effect of the second
    redundant share of a pair = interaction / effect of both, live

Two heads of which each alone suffices have a redundant share of 1: neither matters alone, both matter together. Heads that
add up have 0. Self-repair: https://arxiv.org/abs/2307.15771.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.ablation.decoder_parts import BlockRecord, DecoderParts
from headwise.analysis.circuits.circuit_result import CircuitEstimate
from headwise.analysis.circuits.circuit_statistics import TemplateBootstrapSampler
from headwise.analysis.circuits.circuit_task import CircuitTask, EncodedPrompt, PromptEncoder, PromptPair, add_partners
from headwise.analysis.circuits.find_circuit import resolve_task
from headwise.analysis.circuits.prompt_batch import PromptBatch, make_prompt_batches
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.io.atomic_write import write_atomic
from headwise.io.json_values import nonfinite_to_none
from headwise.model import ModelProtocol, check_model, eval_mode
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec import Address, select

RedundancyAblation = Literal["resample", "zero"]
CONDITIONS = ("direct", "heads_frozen", "live")
BATCH_TOKENS = 2048
MAX_HEADS = 16  # 120 pairs
PROGRESS_LABEL = "redundancy"


@dataclass(frozen=True)
class HeadAblationRepair:
    """Effect of ablating one head, or two heads together, with their 95% intervals.

    Attributes:
        heads: The ablated heads.
        direct: Effect with all later heads and MLPs frozen.
        heads_frozen: Effect with later heads frozen and MLPs live.
        live: Effect with everything after the heads live.
        repaired_by_heads: `heads_frozen` minus `live`: the part that later heads repair. Negative if they add to the loss.
        repaired_by_layers: `direct` minus `live`.
    """

    heads: tuple[str, ...]
    direct: CircuitEstimate
    heads_frozen: CircuitEstimate
    live: CircuitEstimate
    repaired_by_heads: CircuitEstimate
    repaired_by_layers: CircuitEstimate


@dataclass(frozen=True)
class HeadPairEffects:
    """Effects of ablating two heads together.

    Attributes:
        joint: Effects of ablating the two together.
        interaction: Live effect of both minus the live effects of each.
        interaction_direct: The interaction with all later layers frozen.
        redundant_share: `interaction` divided by the live effect of both. 1: each head alone suffices. 0: the heads add up.
            NaN if the effect of both is 0.
    """

    joint: HeadAblationRepair
    interaction: CircuitEstimate
    interaction_direct: CircuitEstimate
    redundant_share: CircuitEstimate


@dataclass(frozen=True)
class RedundancyResult:
    """Redundancy and self-repair of some heads on a task.

    Attributes:
        task: Name of the task.
        ablation: Replacement of z of ablated heads: "resample" (corrupted prompt) or "zero".
        prompts: Number of prompts.
        templates: Number of templates, over which intervals are computed.
        clean_metric: Mean metric of the model.
        heads: Effects of each head.
        pairs: Effects of each pair.
    """

    task: str
    ablation: str
    prompts: int
    templates: int
    clean_metric: float
    heads: tuple[HeadAblationRepair, ...]
    pairs: tuple[HeadPairEffects, ...]

    def __repr__(self) -> str:
        from headwise.ui.result_text import redundancy_table

        return redundancy_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import redundancy_table

        return redundancy_table(self).as_html()

    def pair(self, first: str, second: str) -> HeadPairEffects:
        """Return the effects of one pair.

        Args:
            first: Address of one head.
            second: Address of the other head.
        """
        for item in self.pairs:
            if set(item.joint.heads) == {first, second}:
                return item
        measured = ", ".join("+".join(item.joint.heads) for item in self.pairs)
        raise ArgumentError(f"pair: {first} and {second} were not measured together. Measured: {measured}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. Numbers that are not finite become None."""
        return nonfinite_to_none(asdict(self))

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON, and write it to a file if a path is given.

        Args:
            path: Output file.
        """
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_atomic(path, text.encode())
        return text


@shows_progress
@torch.no_grad()
def redundancy(
    model: ModelProtocol,
    task: str | Path | CircuitTask | Sequence[PromptPair | Mapping[str, Any]],
    heads: HeadPattern,
    num_prompts: int | None = None,
    *,
    ablation: RedundancyAblation = "resample",
    seed: int = 0,
    progress: ProgressOption = None,
) -> RedundancyResult:
    """Measure redundancy and self-repair: ablate heads alone and in pairs, with later layers live and frozen.

    Args:
        model: A decoder whose residual stream is a sum, native or attached.
        task: Name of a shipped task, a JSON Lines file, a `CircuitTask`, or a list of prompts, as in `find_circuit`.
        heads: Head pattern of 1 to 16 heads, for example `"16.0,18.6,18.7"`.
        num_prompts: Number of prompts. None: 80, or all prompts of your own task.
        ablation: "resample" takes z of the corrupted prompt, "zero" takes zeros.
        seed: Seed of the prompts and of the bootstrap.
        progress: Called with a label, done and total. None shows one line in a terminal or notebook, False nothing.

    Returns:
        Effects of each head and pair with intervals from a bootstrap over templates.

    Raises:
        ArgumentError: If the task or the heads are unknown, or there are more than 16 heads.
        UnsupportedModelError: If the residual stream of the model is not a sum.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import word_tokenizer
    >>> words = ["a", "b", "c", "d"]
    >>> model = Transformer(preset("nano")).eval()
    >>> model.tokenizer = word_tokenizer(["<unk>", *words])
    >>> answers = {"right": " b", "wrong": " c"}
    >>> rows = [{"clean": f"{w} b {w}", "corrupted": f"{w} c {w}", "template": w, **answers} for w in words]
    >>> result = redundancy(model, rows, "3.1,4.2")
    >>> len(result.heads), result.pairs[0].joint.heads
    (2, ('3.1', '4.2'))
    """
    check_model(model)
    addresses = _check_heads(model, heads, ablation)
    encoder = PromptEncoder(tokenizer_of(model))
    resolved = resolve_task(task, num_prompts, encoder, seed)
    pairs = add_partners(resolved.prompts, encoder)
    encoded = [encoder.encode(pair, f"prompts[{i}]") for i, pair in enumerate(pairs)]
    sets = [*((address,) for address in addresses), *combinations(addresses, 2)]
    clean, effects = _measure(model, encoded, resolved, sets, ablation, callback_of(progress))
    templates = [pair.template for pair in pairs]
    estimator = _RedundancyEstimator(TemplateBootstrapSampler(templates, seed), sets, effects)
    return RedundancyResult(
        resolved.name, ablation, len(pairs), len(set(templates)), float(clean.mean()),
        tuple(estimator.repair((address,)) for address in addresses),
        tuple(estimator.pair(a, b) for a, b in combinations(addresses, 2)),
    )  # fmt: skip


def _check_heads(model: ModelProtocol, heads: HeadPattern, ablation: str) -> tuple[Address, ...]:
    if ablation not in ("resample", "zero"):
        raise ArgumentError(f"ablation={ablation!r}: must be 'resample' or 'zero'.")
    addresses = select(heads, model.spec.head_addresses)
    if not 1 <= len(addresses) <= MAX_HEADS:
        raise ArgumentError(
            f"heads: must select 1 to {MAX_HEADS} heads, because all pairs are measured. Got {len(addresses)}. Select the "
            f"heads of a circuit, for example result.heads[:8]."
        )
    return addresses


def _measure(
    model: ModelProtocol,
    prompts: Sequence[EncodedPrompt],
    task: CircuitTask,
    sets: Sequence[tuple[Address, ...]],
    ablation: str,
    progress: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the metric of the model, (P,), and the effects of each set under each condition, (sets, conditions, P)."""
    batches = list(make_prompt_batches(prompts, BATCH_TOKENS, model.device, task.metric))
    clean = np.zeros(len(prompts))
    effects = np.zeros((len(sets), len(CONDITIONS), len(prompts)))
    done, total = 0, len(batches) * len(sets)
    with eval_mode(model):
        parts = DecoderParts(model)
        for batch in batches:
            runs = _AblationRunner(parts, batch, sorted({head for members in sets for head in members}), ablation)
            clean[list(batch.indices)] = runs.clean
            for i, members in enumerate(sets):
                effects[i][:, list(batch.indices)] = runs.clean - runs.metrics(members)
                done += 1
                if progress is not None:
                    progress(PROGRESS_LABEL, done, total)
    return clean, effects


class _AblationRunner:
    """Runs one batch with ablated heads, with later layers live or frozen."""

    def __init__(self, parts: DecoderParts, batch: PromptBatch, heads: Sequence[Address], ablation: str) -> None:
        self.parts, self.batch = parts, batch
        self.records = {layer: BlockRecord() for layer in parts.residual.layers}
        with ExitStack() as stack:
            for layer, record in self.records.items():
                parts.record_block(layer, record, stack)
            stack.callback(parts.residual.norm.module.register_forward_pre_hook(self._keep_final_stream).remove)
            hidden = parts.model(batch.ids, hidden=True)
        self.clean = self._scores(hidden)
        self.replacements = {
            head: torch.zeros_like(self._clean_z(head.layer)[:, 0]) for head in heads
        }  # (R, T, e) each
        if ablation == "resample":
            others = {layer: BlockRecord() for layer in {head.layer for head in heads}}
            with ExitStack() as stack:
                for layer, record in others.items():
                    parts.record_block(layer, record, stack)
                parts.model(batch.corrupted_ids, hidden=True)
            for head in heads:
                self.replacements[head] = others[head.layer].heads_call.z[:, parts.head_indices(head)[0]]

    def _keep_final_stream(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.final_stream: Tensor = args[0]

    def _clean_z(self, layer: int) -> Tensor:
        return self.records[layer].heads_call.z

    def _scores(self, hidden: Tensor) -> np.ndarray:
        return self.batch.scores(self.parts.model, hidden)[0].cpu().numpy()

    def metrics(self, heads: Sequence[Address]) -> np.ndarray:
        """Return the metric of each prompt with heads ablated, under each condition: (conditions, P)."""
        return np.stack([self._direct(heads), self._run(heads, is_frozen=True), self._run(heads, is_frozen=False)])

    def _ablated_z(self, heads: Sequence[Address]) -> dict[int, Tensor]:
        """Return z of the layers with ablated heads, (R, H, T, e). All other heads are clean."""
        changed: dict[int, Tensor] = {}
        for head in heads:
            z = changed.setdefault(head.layer, self._clean_z(head.layer).clone())
            z[:, self.parts.head_indices(head)[0]] = self.replacements[head].to(z)
        return changed

    def _direct(self, heads: Sequence[Address]) -> np.ndarray:
        stream = self.final_stream
        for layer, z in self._ablated_z(heads).items():
            record = self.records[layer]
            delta = self.parts.head_change_in_stream(
                layer, range(z.shape[1]), z - record.heads_call.z, record.attention_output
            )
            stream = stream + delta.to(stream)
        return self._scores(self.parts.residual.norm.module(stream))

    def _run(self, heads: Sequence[Address], *, is_frozen: bool) -> np.ndarray:
        """Run the model with ablated heads. `is_frozen`: all other heads keep their clean output."""
        by_layer: dict[int, list[Address]] = {}
        for head in heads:
            by_layer.setdefault(head.layer, []).append(head)
        first, fixed = min(by_layer), self._ablated_z(heads)
        with ExitStack() as stack:
            for layer, attention_layer in self.parts.layers.items():
                if is_frozen and layer >= first and attention_layer.spec.head_ids:
                    z = fixed.get(layer, self._clean_z(layer))
                    stack.enter_context(attention_layer.hook_point.replaced(partial(_return_value, value=z)))
                elif layer in by_layer:
                    edit = partial(self._replace_heads, heads=by_layer[layer])
                    stack.enter_context(attention_layer.hook_point.replaced(edit))
            return self._scores(self.parts.model(self.batch.ids, hidden=True))

    def _replace_heads(self, z: Tensor, heads: Sequence[Address]) -> Tensor:
        changed = z.clone()
        for head in heads:
            changed[:, self.parts.head_indices(head)[0]] = self.replacements[head].to(z)
        return changed


def _return_value(z: Tensor, value: Tensor) -> Tensor:
    return value.to(z)


class _RedundancyEstimator:
    """Computes estimates with intervals over templates from effects by prompt."""

    def __init__(
        self, sampler: TemplateBootstrapSampler, sets: Sequence[tuple[Address, ...]], effects: np.ndarray
    ) -> None:
        self.sampler = sampler
        self.effects = dict(zip(sets, effects, strict=True))  # (conditions, P) each

    def mean(self, values: np.ndarray) -> CircuitEstimate:
        """Return the mean over prompts, (P,)."""
        return self.sampler.estimate(lambda weights: weights @ values / weights.sum(1), len(values))

    def repair(self, heads: tuple[Address, ...]) -> HeadAblationRepair:
        """Return the effects of one set of heads."""
        direct, frozen, live = self.effects[heads]
        return HeadAblationRepair(
            tuple(map(str, heads)),
            *(self.mean(values) for values in (direct, frozen, live, frozen - live, direct - live)),
        )

    def pair(self, a: Address, b: Address) -> HeadPairEffects:
        """Return the effects of two heads."""
        joint = self.effects[a, b]
        interaction = joint - self.effects[a,] - self.effects[b,]  # (conditions, P)
        direct, live, total = interaction[0], interaction[2], joint[2]

        def share(weights: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore", divide="ignore"):
                denominator = weights @ total
                return np.where(np.abs(denominator) > 1e-12, weights @ live / denominator, np.nan)

        return HeadPairEffects(
            self.repair((a, b)), self.mean(live), self.mean(direct), self.sampler.estimate(share, len(total))
        )
