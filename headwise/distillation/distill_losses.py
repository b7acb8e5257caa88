"""Losses between one forward pass of the student and one of the teacher. Each is 0 if both agree."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.distillation.activations import Activations, main_stack_name
from headwise.distillation.attention_kl import attention_kl
from headwise.errors import ArgumentError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.score_params import ScoreParams, add_bias_and_mask, raw_scores, repeat_kv
from headwise.model import ModelProtocol
from headwise.spec import Address, LayerAddress

# Defaults from the paper of RelationLoss: relation heads, and channels of each.
MAX_RELATION_HEADS, MIN_RELATION_CHANNELS = 48, 16


class HiddenStateLoss(nn.Module):
    """Mean squared error of hidden states after layer norm. A learned projection maps the student if widths differ."""

    def __init__(
        self, student: ModelProtocol, teacher: ModelProtocol, layers: Sequence[tuple[int, int]] | None
    ) -> None:
        super().__init__()
        student_layers, teacher_layers = student.spec.layers, teacher.spec.layers
        self.layers = tuple(layers) if layers is not None else even_layer_pairs(student_layers, teacher_layers)
        for student_layer, teacher_layer in self.layers:
            if not (0 <= student_layer < student_layers and 0 <= teacher_layer < teacher_layers):
                raise ArgumentError(
                    f"layers: no such layer. Got the pair ({student_layer}, {teacher_layer}). The student has layers 0 to "
                    f"{student_layers - 1}, the teacher 0 to {teacher_layers - 1}."
                )
        widths = student.spec.width, teacher.spec.width
        same_width = widths[0] == widths[1]
        self.projections = nn.ModuleList(
            nn.Identity() if same_width else nn.Linear(*widths, bias=False) for _ in self.layers
        )

    def forward(
        self, student_activations: Activations, teacher_activations: Activations, real_tokens: Tensor
    ) -> Tensor:
        """Return the mean squared difference over real tokens, channels and pairs of layers."""
        total = torch.zeros((), device=real_tokens.device)
        for (student_layer, teacher_layer), projection in zip(self.layers, self.projections, strict=True):
            student_state = projection(student_activations.hidden_states[student_layer])[real_tokens].float()  # (n, D)
            teacher_state = teacher_activations.hidden_states[teacher_layer][real_tokens].float()
            total = total + F.mse_loss(_layer_norm(student_state), _layer_norm(teacher_state))
        return total / len(self.layers)


class AttentionMapLoss(nn.Module):
    """KL divergence of attention rows between paired heads, averaged over the pairs."""

    def __init__(self, pairs: Sequence[tuple[Address, Address]]) -> None:
        super().__init__()
        self.pairs = tuple(pairs)
        self.pairs_by_layer: dict[tuple[LayerAddress, LayerAddress], list[tuple[Address, Address]]] = {}
        for student_head, teacher_head in self.pairs:
            self.pairs_by_layer.setdefault((student_head.layer_address, teacher_head.layer_address), []).append(
                (student_head, teacher_head)
            )

    def forward(
        self, student_activations: Activations, teacher_activations: Activations, real_tokens: dict[str, Tensor]
    ) -> Tensor:
        """Return the loss. `real_tokens` are masks of the tokens that count, (B, T), by stack."""
        total = torch.zeros((), device=next(iter(real_tokens.values())).device)
        for (student_layer, teacher_layer), pairs in self.pairs_by_layer.items():
            student_call, teacher_call = (
                student_activations.calls[student_layer],
                teacher_activations.calls[teacher_layer],
            )
            row_mask = real_tokens[student_layer.stack]
            for indices in _batch_head_index_pairs(student_call, teacher_call, pairs):
                scores = [
                    _head_scores_fn(call, heads)
                    for call, heads in zip((student_call, teacher_call), zip(*indices, strict=True), strict=True)
                ]
                total = total + len(indices) * attention_kl(scores[0], scores[1], row_mask)
        return total / len(self.pairs)


class RelationLoss(nn.Module):
    """q–q, k–k and v–v relations of one layer, with channels regrouped into relation heads (https://arxiv.org/abs/2012.15828)."""

    def __init__(
        self, student: ModelProtocol, teacher: ModelProtocol, layers: tuple[int, int], heads: int | None
    ) -> None:
        super().__init__()
        self.layer_addresses = (
            _layer_address(student, layers[0], "student"),
            _layer_address(teacher, layers[1], "teacher"),
        )
        self.heads = heads
        specs = [
            model.spec.attention_at(layer_address)
            for model, layer_address in zip((student, teacher), self.layer_addresses, strict=True)
        ]
        for projection, widths in zip("qkv", zip(*map(_total_qkv_channels, specs), strict=True), strict=True):
            relation_head_count(projection, widths, heads)

    def forward(
        self, student_activations: Activations, teacher_activations: Activations, real_tokens: dict[str, Tensor]
    ) -> Tensor:
        """Return the mean KL divergence of relation rows, averaged over the three relations."""
        calls = student_activations.calls[self.layer_addresses[0]], teacher_activations.calls[self.layer_addresses[1]]
        total = torch.zeros((), device=calls[0].q.device)
        for projection in "qkv":
            tensors = [getattr(call, projection) for call in calls]  # (B, H, T, d)
            heads = relation_head_count(
                projection, tuple(tensor.shape[1] * tensor.shape[3] for tensor in tensors), self.heads
            )
            scores = [
                partial(_relation_scores, split_relation_heads(tensor, heads), call.params)
                for tensor, call in zip(tensors, calls, strict=True)
            ]
            total = total + attention_kl(scores[0], scores[1], real_tokens[self.layer_addresses[0].stack])
        return total / 3


def even_layer_pairs(student_layers: int, teacher_layers: int) -> tuple[tuple[int, int], ...]:
    """Pair every student layer with a teacher layer, evenly spaced, with the last layers paired.

    >>> even_layer_pairs(2, 6), even_layer_pairs(3, 3)
    (((0, 2), (1, 5)), ((0, 0), (1, 1), (2, 2)))
    """
    return tuple(
        (layer, max(0, round((layer + 1) * teacher_layers / student_layers) - 1)) for layer in range(student_layers)
    )


def relation_head_count(projection: str, widths: tuple[int, int], count: int | None) -> int:
    """Return the number of relation heads: `count`, or the largest number that divides both widths, up to the defaults.

    >>> relation_head_count("q", (320, 576), None), relation_head_count("q", (768, 768), None)
    (16, 48)
    >>> relation_head_count("q", (24, 36), 4)
    4
    """
    if count is not None:
        if widths[0] % count or widths[1] % count:
            raise ArgumentError(
                f"relation_heads: must divide the number of {projection} channels of both models (student {widths[0]}, "
                f"teacher {widths[1]}). Got {count}. Use a divisor of {gcd(*widths)}."
            )
        return count
    shared = gcd(*widths)
    max_heads = max(1, min(MAX_RELATION_HEADS, min(widths) // MIN_RELATION_CHANNELS))
    return next(count for count in range(max_heads, 0, -1) if shared % count == 0)


def split_relation_heads(x: Tensor, heads: int) -> Tensor:
    """Regroup the channels of all heads into relation heads: (B, H, T, d) → (B, R, T, H·d / R)"""
    return x.transpose(1, 2).flatten(2).unflatten(2, (heads, -1)).transpose(1, 2)


def _relation_scores(x: Tensor, params: ScoreParams, rows: range) -> Tensor:
    """Return scores of x with itself for some rows, with the mask of the layer: (B, R, T, c) → (B, R, rows, T)"""
    T = x.shape[2]
    scores = (x[:, :, rows.start : rows.stop] * x.shape[-1] ** -0.5) @ x.mT
    allowed = params.mask_block(rows, range(T), T, T, x.device)
    if allowed is None:
        return scores
    allowed = allowed if allowed.shape[1] == 1 else allowed.any(1, keepdim=True)  # relation heads have no mask per head
    return scores.masked_fill(~allowed, -torch.inf)


def _batch_head_index_pairs(
    student: AttentionCall, teacher: AttentionCall, pairs: list[tuple[Address, Address]]
) -> list[list[tuple[int, int]]]:
    """Return pairs of head indices: in one batch if all heads of a layer share a mask, otherwise one by one."""
    indices = [
        (student.hook_point.head_index(item), teacher.hook_point.head_index(teacher_head))
        for item, teacher_head in pairs
    ]
    shared_masks = all(
        item.params.bias is None and (item.params.mask is None or item.params.mask.leading_shape()[1] == 1)
        for item in (student, teacher)
    )
    return [indices] if shared_masks else [[index] for index in indices]


def _head_scores_fn(call: AttentionCall, heads: Sequence[int]) -> "partial[Tensor]":
    """Return a function from rows to scores of some heads, without the attention sink, which has no value vector."""
    params = replace(call.params, sink=None)
    if len(heads) == 1:
        head, kv_head = heads[0], params.kv_of_head[heads[0]]
        head_params = params.for_heads(range(head, head + 1), range(kv_head, kv_head + 1))
        return partial(_row_scores, call.q[:, head : head + 1], call.k[:, kv_head : kv_head + 1], head_params)
    indices = torch.tensor(heads, device=call.q.device)
    q, k = call.q.index_select(1, indices), repeat_kv(call.k, tuple(params.kv_of_head[head] for head in heads))
    return partial(_row_scores, q, k, replace(params, kv_of_head=tuple(range(len(heads)))))


def _row_scores(q: Tensor, k: Tensor, params: ScoreParams, rows: range) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    scores = raw_scores(q[:, :, rows.start : rows.stop], k, params)
    return add_bias_and_mask(scores, params, rows, range(S), T, S)


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _total_qkv_channels(spec) -> tuple[int, int, int]:
    """Return the number of channels of q, k and v."""
    K = len(spec.kv_head_ids)
    return len(spec.head_ids) * spec.head_dim, K * spec.head_dim, K * spec.value_dim


def _layer_address(model: ModelProtocol, layer: int, owner: str) -> LayerAddress:
    addresses = [
        hook_point.address
        for hook_point in model.gathered_hook_points()
        if hook_point.address.stack == main_stack_name(model) and hook_point.head_ids
    ]
    layer_index = layer if layer >= 0 else model.spec.layers + layer
    for address in addresses:
        if address.layer == layer_index:
            return address
    raise ArgumentError(
        f"relation_layers: the {owner} has no heads in layer {layer}. "
        f"Use one of its layers with heads: {', '.join(str(address.layer) for address in addresses)}."
    )
