"""Ablate every head in turn, at a fraction of the cost of one full forward pass per head.

The residual stream before a layer, and z of the layer, do not depend on the ablated head. One forward pass over the
unmodified model stops at each layer, runs the remaining layers on a batch of copies (one copy per ablated head), and
continues (`model/resumable_forward`). In a single-stack headwise model with few targets, the last block computes only the
rows of the targets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import ReplacementFunction
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.ablation.gradient_memory import GradientMemoryPlan, frozen_weights, summed_cross_entropy
from headwise.analysis.ablation.recorded_head_outputs import selected_hook_points
from headwise.errors import UnsupportedModelError
from headwise.heads.hook_point import Edit, HookPoint
from headwise.kernels.enable_grad import enable_gradients
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol
from headwise.spec import Address, ModelSpec

# hook point and selected heads → replacement function
ReplacementFactory = Callable[[HookPoint, tuple[Address, ...]], ReplacementFunction]
BATCH_TOKENS = 2048  # tokens per forward pass, copies included


@torch.no_grad()
def ablation_sweep(
    model: ModelProtocol,
    batch: TargetBatch,
    heads: Sequence[Address],
    make_replacement: ReplacementFactory,
    batch_tokens: int = BATCH_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the loss increase of each head and text, (heads, B), and the scores of the unmodified model.

    Args:
        model: The model to ablate.
        batch: Texts and targets.
        heads: Addresses of the heads, ablated one at a time.
        make_replacement: Returns the replacement function of selected heads at a hook point.
        batch_tokens: Maximum number of tokens per forward pass, copies included.
    """
    selected_by_layer = {hook_point.address: selected for hook_point, selected in selected_hook_points(model, heads)}
    forward = model.resumable_forward(
        batch.ids,
        selected_by_layer,
        batch.select_target_rows,
        attention_mask=batch.attention_mask,
        source=batch.source,
        source_attention_mask=batch.source_real_tokens,
    )
    # A model that is not resumable reruns the full forward pass for each head.
    max_copies = 1 if model.why_not_resumable() else batch_tokens // max(1, batch.num_tokens)
    scores: dict[Address, Tensor] = {}
    for checkpoint in forward:
        selected, z = selected_by_layer[checkpoint.hook_point.address], checkpoint.z  # (B, H, T, e)
        replacements = (
            make_replacement(checkpoint.hook_point, selected)(z).to(z).expand(len(z), len(selected), *z.shape[2:])
        )
        for head_slice in _even_splits(len(selected), max_copies):
            changed = z.repeat(len(head_slice), 1, 1, 1, 1)  # (n, B, H, T, e)
            for copy, head_index in enumerate(head_slice):
                changed[copy, :, checkpoint.hook_point.head_index(selected[head_index])] = replacements[:, head_index]
            results = batch.score_hidden_states(model, checkpoint.resume(changed.flatten(0, 1)))
            scores |= zip((selected[i] for i in head_slice), results.unflatten(0, (len(head_slice), -1)), strict=True)
    clean = batch.score_hidden_states(model, forward.last_hidden_state)
    lost = [batch.loss_increase(scores[head], clean) for head in heads]
    return torch.stack(lost) if lost else clean.new_zeros(0, len(batch.ids)), clean


def ablation_gradients(
    model: ModelProtocol,
    batch: TargetBatch,
    heads: Sequence[Address],
    make_replacement: ReplacementFactory,
    memory: GradientMemoryPlan | None = None,
) -> Tensor:
    """Return the derivative of each text's summed loss with respect to the ablation of each head, (heads, B).

    z becomes z + ε (replacement − z), with a separate ε for every head and text. Texts do not interact, so the derivative
    in ε belongs to one text. One backward pass; `autograd.grad` leaves the `.grad` of the parameters unchanged.

    Args:
        model: The model.
        batch: Texts and targets.
        heads: Addresses of the heads.
        make_replacement: Returns the replacement function of selected heads at a hook point.
        memory: Limit of the memory of activations. None measures it.
    """
    if batch.targets is None:
        raise UnsupportedModelError(
            "ranking: gradients are not supported for a model without an output layer, because its cosine distance "
            "has gradient 0 at the unmodified model. Use ranking='ablation'."
        )
    leaves: dict[Address, Tensor] = {}
    with enable_gradients(model), frozen_weights(model), ExitStack() as stack:
        memory = memory or GradientMemoryPlan.measure(model, batch.ids, batch.source)
        stack.enter_context(memory.recompute_blocks_if_large(model, batch.num_tokens))
        for hook_point, selected in selected_hook_points(model, heads):
            # (B,) each
            amounts = [
                torch.zeros(len(batch.ids), device=batch.ids.device, requires_grad=True, dtype=torch.float32)
                for _ in selected
            ]
            leaves |= zip(selected, amounts, strict=True)
            stack.enter_context(
                hook_point.replaced(
                    _interpolation_edit(hook_point, selected, amounts, make_replacement(hook_point, selected))
                )
            )
        hidden = batch.select_target_rows(batch.final_hidden_states(model)).flatten(0, 1)  # (B·R, D)
        targets = batch.targets if batch.target_positions is None else batch.targets.gather(1, batch.target_positions)
        total = summed_cross_entropy(model, hidden, targets.flatten())
        gradients = torch.autograd.grad(total, [leaves[head] for head in heads]) if heads else ()
    return (
        torch.stack([to_float64(gradient) for gradient in gradients])
        if gradients
        else torch.zeros(0, len(batch.ids), device="cpu", dtype=torch.float32)
    )


def _interpolation_edit(
    hook_point: HookPoint, selected: tuple[Address, ...], amounts: list[Tensor], replacement_fn: ReplacementFunction
) -> Edit:
    index = [hook_point.head_index(address) for address in selected]

    def edit(z: Tensor) -> Tensor:
        current = z.detach()
        difference = replacement_fn(current).to(z) - current[:, index]  # (B, n, T, e)
        shift = torch.zeros_like(current)
        shift[:, index] = torch.stack(amounts, 1).to(z)[..., None, None] * difference
        return z + shift

    return edit


def _even_splits(count: int, max_size: int) -> Iterator[range]:
    """Split `count` heads into the smallest number of even ranges of at most `max_size`."""
    num_splits = -(-count // max(1, max_size))
    for split in range(num_splits):
        yield range(split * count // num_splits, (split + 1) * count // num_splits)


@dataclass(frozen=True)
class AblationSweepFlops:
    """Floating-point operations to ablate every head on one text.

    Attributes:
        sweep_flops: Operations of the sweep.
        naive_flops: Operations of one full forward pass per head.
    """

    sweep_flops: int
    naive_flops: int

    @property
    def ratio(self) -> float:
        """`sweep_flops` divided by `naive_flops`."""
        return self.sweep_flops / self.naive_flops


def sweep_cost(spec: ModelSpec, length: int, target_rows: int | None = None) -> AblationSweepFlops:
    """Count the floating-point operations to ablate every head on one text.

    Counts matrix products only, 2 operations per multiplication, for every pair of tokens. Both counts project only the
    target rows onto the vocabulary.

    Args:
        spec: The model.
        length: Number of tokens.
        target_rows: Number of tokens with a target. None means all.

    >>> from headwise.spec import preset
    >>> gpt2 = preset("gpt2")
    >>> round(sweep_cost(gpt2, 256).ratio, 2), round(sweep_cost(gpt2, 256, target_rows=1).ratio, 2)
    (0.67, 0.47)
    """
    target_rows = length if target_rows is None else target_rows
    cost = pass_cost(spec, length)
    full_pass = cost.total_flops(target_rows)
    sweep_total = full_pass  # the pass over the unmodified model
    for layer, layer_address in enumerate(spec.layer_addresses):
        # MLPs over all rows: this layer and later ones, except the last
        full_mlps = len(spec.layer_addresses) - 1 - layer
        remaining = (
            cost.output_flops[layer] + sum(cost.attention_flops[layer + 1 :]) + full_mlps * length * cost.mlp_flops
        )
        sweep_total += len(spec.attention_at(layer_address).head_ids) * (
            remaining + target_rows * (cost.mlp_flops + cost.logits_flops)
        )
    return AblationSweepFlops(sweep_total, full_pass * len(spec.head_addresses))


@dataclass(frozen=True)
class ForwardPassFlops:
    """Floating-point operations of a forward pass over one text: matrix products only, 2 operations per multiplication.

    Attributes:
        attention_flops: Per attention layer: projections, scores, weighted sum of values and W_O.
        output_flops: Per attention layer: W_O only.
        mlp_flops: One MLP, one row.
        logits_flops: Projection of one row onto the vocabulary.
        mlp_rows: Rows that pass through an MLP, summed over blocks.
    """

    attention_flops: tuple[int, ...]
    output_flops: tuple[int, ...]
    mlp_flops: int
    logits_flops: int
    mlp_rows: int

    def total_flops(self, target_rows: int) -> int:
        """Operations of the pass if `target_rows` rows are projected onto the vocabulary."""
        return sum(self.attention_flops) + self.mlp_rows * self.mlp_flops + target_rows * self.logits_flops


def pass_cost(spec: ModelSpec, length: int, *, causal: bool = False) -> ForwardPassFlops:
    """Count the floating-point operations of a forward pass over `length` tokens.

    Args:
        spec: The model.
        length: Number of tokens.
        causal: Skip the token pairs hidden by a decoder's causal mask.

    The cost per weight is one multiplication; attention adds one pair of tokens here:

    >>> from headwise.spec import preset
    >>> pass_cost(preset("gpt2"), 1).total_flops(target_rows=1) // 2 - 2 * 12 * 768
    123532032
    """
    D, output_flops, attention_flops = spec.width, [], []
    for layer_address in spec.layer_addresses:
        a = spec.attention_at(layer_address)
        heads, channels = len(a.head_ids), a.head_dim + a.value_dim
        is_causal = causal and layer_address.stack in ("", "dec") and spec.kind != "encoder"
        pairs = length * (length + 1) // 2 if is_causal else length * length
        output_flops.append(2 * length * heads * a.value_dim * D)
        attention_flops.append(2 * length * a.num_input_weights + 2 * pairs * heads * channels + output_flops[-1])
    mlp_flops = 2 * D * spec.mlp_width * (3 if spec.has_gated_mlp else 2)
    logits_flops = 2 * D * spec.vocab * (spec.output != "none") + 2 * D * D * (spec.output == "mlm")
    return ForwardPassFlops(
        tuple(attention_flops),
        tuple(output_flops),
        mlp_flops,
        logits_flops,
        length * (spec.layers + spec.encoder_layers),
    )
