"""Take heads away one by one, at a fraction of what running the model anew for each would cost.

The stream up to a layer is the same for all of its heads, and so is their z. So one clean walk through the model stops at
each layer, runs all its heads as one batch, each copy with another head replaced, through what is left of the network, and
goes on (`model/resumable_forward`). In a single stack of ours, where few tokens are asked for, the last block finishes
their rows alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import ReplacementFunction
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.ablation.head_outputs import selected_hook_points
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Edit, HookPoint
from headwise.kernels.enable_grad import gradients_enabled
from headwise.model import ModelProtocol
from headwise.spec import Address, ModelSpec

# what stands in for some heads of a layer
ReplacementFactory = Callable[[HookPoint, tuple[Address, ...]], ReplacementFunction]
BATCH_TOKENS = 2048  # run at once, copies included


@torch.no_grad()
def ablation_sweep(
    model: ModelProtocol,
    batch: TargetBatch,
    heads: Sequence[Address],
    make_replacement: ReplacementFactory,
    batch_tokens: int = BATCH_TOKENS,
) -> tuple[Tensor, Tensor]:
    """What each text loses by each head, summed over its answers, (heads, B); and the untouched model's answers."""
    selected_by_layer = {hook_point.address: selected for hook_point, selected in selected_hook_points(model, heads)}
    forward = model.resumable_forward(
        batch.ids,
        selected_by_layer,
        batch.select_target_rows,
        attention_mask=batch.attention_mask,
        source=batch.source,
        source_attention_mask=batch.source_real_tokens,
    )
    tokens_per_copy = batch.ids.numel() + (0 if batch.source is None else batch.source.numel())
    # what must be run whole is run as it always was
    max_copies = 1 if model.why_not_resumable() else batch_tokens // max(1, tokens_per_copy)
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
    model: ModelProtocol, batch: TargetBatch, heads: Sequence[Address], make_replacement: ReplacementFactory
) -> Tensor:
    """How steeply each text's summed surprise rises as each head begins to be replaced: (heads, B), from one backward pass.

    z becomes z + ε (stand-in − z), with an ε of its own for every head and text. Texts do not touch each other, so the
    slope in ε is that text's own; and as it comes from `autograd.grad`, nothing is ever added up in a `.grad`.
    """
    if batch.targets is None:
        raise HeadwiseError(
            "without an output a model is compared with itself, and there the slope is 0; use ranking='ablation'."
        )
    leaves: dict[Address, Tensor] = {}
    with gradients_enabled(model), ExitStack() as stack:
        for hook_point, selected in selected_hook_points(model, heads):
            # (B,) each
            amounts = [torch.zeros(len(batch.ids), device=batch.ids.device, requires_grad=True) for _ in selected]
            leaves |= zip(selected, amounts, strict=True)
            stack.enter_context(
                hook_point.replaced(
                    _interpolation_edit(hook_point, selected, amounts, make_replacement(hook_point, selected))
                )
            )
        hidden = batch.select_target_rows(batch.final_hidden_states(model)).flatten(0, 1)  # (B·R, D)
        targets = batch.targets if batch.target_positions is None else batch.targets.gather(1, batch.target_positions)
        assert model.output is not None
        total = model.output.cross_entropy(hidden, targets.flatten(), total=1)
        gradients = torch.autograd.grad(total, [leaves[head] for head in heads]) if heads else ()
    return torch.stack([gradient.double() for gradient in gradients]) if gradients else torch.zeros(0, len(batch.ids))


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
    """`count` heads in as few even shares as `max_size` at a time allow."""
    num_splits = -(-count // max(1, max_size))
    for split in range(num_splits):
        yield range(split * count // num_splits, (split + 1) * count // num_splits)


@dataclass(frozen=True)
class AblationSweepCost:
    """Floating-point operations of one text: by the sweep, and by a forward pass of the whole model for every head."""

    sweep_flops: int
    naive_flops: int

    @property
    def ratio(self) -> float:
        """The sweep's share of the naive loop."""
        return self.sweep_flops / self.naive_flops


def sweep_cost(spec: ModelSpec, length: int, target_rows: int | None = None) -> AblationSweepCost:
    """What ablating every head costs on a text of so many tokens, `rows` of them asked about (None: all).

    Matrix products alone, 2 operations a multiplication, every pair of tokens counted; both sides project only the rows
    asked about onto the vocabulary.

    >>> from headwise.spec import preset
    >>> round(sweep_cost(preset("gpt2"), 256).ratio, 2), round(sweep_cost(preset("gpt2"), 256, target_rows=1).ratio, 2)
    (0.67, 0.47)
    """
    target_rows = length if target_rows is None else target_rows
    cost = pass_cost(spec, length)
    full_pass = cost.total_flops(target_rows)
    sweep_total = full_pass  # the walk itself
    for layer, layer_address in enumerate(spec.layer_addresses):
        # MLPs over all rows: this one and those behind it, but for the last
        full_mlps = len(spec.layer_addresses) - 1 - layer
        remaining = (
            cost.output_flops[layer] + sum(cost.attention_flops[layer + 1 :]) + full_mlps * length * cost.mlp_flops
        )
        sweep_total += len(spec.attention_at(layer_address).head_ids) * (
            remaining + target_rows * (cost.mlp_flops + cost.logits_flops)
        )
    return AblationSweepCost(sweep_total, full_pass * len(spec.head_addresses))


@dataclass(frozen=True)
class ForwardPassCost:
    """Floating-point operations of one text's forward pass: matrix products alone, 2 operations a multiplication."""

    attention_flops: tuple[int, ...]  # for each attention layer: projections, scores and what is gathered by them, W_O
    output_flops: tuple[int, ...]  # W_O alone
    mlp_flops: int  # for one row
    logits_flops: int  # for one row
    mlp_rows: int  # that pass through MLPs, of all blocks together

    def total_flops(self, target_rows: int) -> int:
        """The pass, with so many rows projected onto the vocabulary."""
        return sum(self.attention_flops) + self.mlp_rows * self.mlp_flops + target_rows * self.logits_flops


def pass_cost(spec: ModelSpec, length: int, causal: bool = False) -> ForwardPassCost:
    """What a forward pass over so many tokens costs; `causal` leaves out pairs of tokens that a decoder's mask hides.

    >>> from headwise.spec import preset
    >>> pass_cost(preset("gpt2"), 1).total_flops(target_rows=1) // 2 - 2 * 12 * 768  # one pair of tokens aside
    123532032
    """
    D, output_flops, attention_flops = spec.width, [], []
    for layer_address in spec.layer_addresses:
        a = spec.attention_at(layer_address)
        heads, channels = len(a.head_ids), a.head_dim + a.value_dim
        is_causal = causal and layer_address.stack in ("", "dec") and spec.kind != "encoder"
        pairs = length * (length + 1) // 2 if is_causal else length * length
        width = D // a.heads if a.head_input == "slice" else D
        qkv_flops = 2 * length * width * (heads * a.head_dim + len(a.kv_head_ids) * channels)
        output_flops.append(2 * length * heads * a.value_dim * D)
        attention_flops.append(qkv_flops + 2 * pairs * heads * channels + output_flops[-1])
    mlp_flops = 2 * D * spec.mlp_width * (3 if spec.activation == "swiglu" else 2)
    logits_flops = 2 * D * spec.vocab * (spec.output != "none") + 2 * D * D * (spec.output == "mlm")
    return ForwardPassCost(
        tuple(attention_flops),
        tuple(output_flops),
        mlp_flops,
        logits_flops,
        length * (spec.layers + spec.encoder_layers),
    )
