"""Path patching written out for native decoders: one head at a time, from the weights, with dense attention."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels import RotaryTable
from headwise.model import Transformer

Inputs = Mapping[str, Tensor]  # residual streams that q, k and v of a head read, (B, T, D) each


def norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Apply a LayerNorm or RMSNorm, from its definition."""
    weight, bias = module.weight, getattr(module, "bias", None)
    x = x - x.mean(-1, keepdim=True) if isinstance(module, torch.nn.LayerNorm) else x
    x = x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * weight  # pyright: ignore
    return x if bias is None else x + bias  # pyright: ignore


def head_z(model: Transformer, layer: int, head: int, stream: Inputs) -> Tensor:
    """Return z of one head that reads these streams, (B, T, e)."""
    block = model.blocks[layer]
    view = model.heads[f"{layer}.{head}"]
    projected = {}
    for name in "qkv":
        weight, bias = getattr(view, f"W_{name.upper()}"), getattr(view, f"b_{name.upper()}")
        projected[name] = norm(block.norm_attention, stream[name]) @ weight + (0 if bias is None else bias)  # pyright: ignore
    q, k, v = projected["q"], projected["k"], projected["v"]
    spec = model.spec.attention
    if spec.rotary is not None:
        table = RotaryTable.at(torch.arange(q.shape[1])[None], spec.rotary, q.shape[-1], q.dtype)
        q, k = table.rotate(q[:, None])[:, 0], table.rotate(k[:, None])[:, 0]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def output_weights(model: Transformer, layer: int, head: int) -> Tensor:
    """Return W_O of one head, (e, D)."""
    return [*model.attention_layers()][layer].hook_point.W_O[head]


def mlp_output(model: Transformer, layer: int, stream: Tensor) -> Tensor:
    """Return the output of an MLP that reads this stream, (B, T, D). In a parallel block the stream is that of the heads."""
    block = model.blocks[layer]
    x = norm(block.norm_attention if block.norm_mlp is None else block.norm_mlp, stream)  # pyright: ignore
    mlp = block.mlp
    up = x @ mlp.up.weight.mT + (0 if mlp.up.bias is None else mlp.up.bias)  # pyright: ignore
    if mlp.gate is None:  # pyright: ignore
        active = F.gelu(up)
    else:
        active = F.silu(x @ mlp.gate.weight.mT + (0 if mlp.gate.bias is None else mlp.gate.bias)) * up  # pyright: ignore
    return active @ mlp.down.weight.mT + (0 if mlp.down.bias is None else mlp.down.bias)  # pyright: ignore


class ReferenceRun:
    """Forward pass of a native decoder, as lists: streams before heads and MLPs, z of each head, outputs of MLPs."""

    def __init__(
        self,
        model: Transformer,
        ids: Tensor,
        *,
        z: Mapping[tuple[int, int], Tensor] = {},
        mlps: Mapping[int, Tensor] = {},
        final_change: Tensor | float = 0.0,
    ) -> None:
        x = model.begin_forward(ids)[0]
        self.embedding = x
        self.streams, self.mid_streams, self.mlps = list[Tensor](), list[Tensor](), list[Tensor]()
        self.z: dict[tuple[int, int], Tensor] = {}
        for layer, attention_layer in enumerate(model.attention_layers()):
            self.streams.append(x)
            attention = attention_layer.b_O
            attention = torch.zeros_like(x) if attention is None else attention.expand_as(x)
            for head in range(model.spec.attention.heads):
                own = head_z(model, layer, head, dict.fromkeys("qkv", x))
                self.z[layer, head] = z.get((layer, head), own)
                attention = attention + self.z[layer, head] @ output_weights(model, layer, head)
            mid = x if model.spec.norm_placement == "parallel" else x + attention
            self.mid_streams.append(mid)
            self.mlps.append(mlps.get(layer, mlp_output(model, layer, mid)))
            x = x + attention + self.mlps[-1]
        assert model.norm is not None and model.output is not None  # noqa: PT018
        self.logits = model.output(norm(model.norm, x + final_change))
