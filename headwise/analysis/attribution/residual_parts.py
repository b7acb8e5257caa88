"""Split the residual stream before a layer into the outputs of the embedding, heads, MLPs and biases."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import CapturedComponents, capture_layer_inputs, capture_residual
from headwise.analysis.recording.recording import ModelRecording, record
from headwise.errors import UnsupportedModelError
from headwise.kernels.rounding_tolerance import rounding_bound, to_float64
from headwise.model import LinearizedNorm, ModelProtocol, ResidualStream, eval_mode
from headwise.spec import Address

EMBEDDING, BIASES = "embedding", "biases"
CLOSE = 1e-4  # relative, for values computed in float32 or float64


def num_roundings_before_layer(layer: int) -> int:
    """Number of roundings before a layer's heads: 3 per earlier layer (attention, its addition, that of the MLP), 3 in the
    norm."""
    return 3 * layer + 3


@dataclass(frozen=True, eq=False)
class ResidualParts:
    """One recorded pass over one text (1, T) up to a layer, from which the parts at any position can be computed.

    Attributes:
        model: The model.
        residual: Structure of its residual stream.
        recording: Recorded q, k, v and z of the heads.
        capture: Recorded outputs of embedding, MLPs and attention.
        layers: Attention layers up to and including the layer.
        read: Input of the layer's heads as computed by the model, (T, D).
    """

    model: ModelProtocol
    residual: ResidualStream
    recording: ModelRecording
    capture: CapturedComponents
    layers: tuple[Any, ...]
    read: Tensor

    @staticmethod
    def of(model: ModelProtocol, ids: Tensor, layer: int) -> "ResidualParts":
        """Run the model once and record its parts."""
        with eval_mode(model), torch.no_grad():
            residual = model.residual_stream()
            layers = tuple(
                attention_layer
                for attention_layer in model.attention_layers()
                if attention_layer.hook_point.address.layer <= layer
            )
            heads = [address for attention_layer in layers for address in attention_layer.hook_point.head_addresses]
            with (
                record(model, heads, tensors=("q", "k", "v", "z", "map")) as recording,
                capture_residual(model, residual, slice(None)) as capture,
                capture_layer_inputs(layers[-1]) as inputs,
            ):
                model(ids)
        read = inputs[0].reshape(ids.shape[1], -1)  # some models drop the batch axis on the way
        return ResidualParts(model, residual, recording, capture, layers, read)

    def parts(self, layer: int, positions: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each part of the residual stream before a layer, (n, D) each, in float64."""
        capture = self.capture
        yield EMBEDDING, to_float64(capture.embedding[positions])
        biases = to_float64(torch.zeros_like(capture.embedding[positions]))
        for attention_layer in self.layers:
            layer_index = attention_layer.hook_point.address.layer
            if layer_index >= layer:
                break
            post_norm = self.residual.layers[layer_index].post_norm
            # (n, 1)
            scale = None if post_norm is None else post_norm.scale(capture.attention_outputs[layer_index][positions])

            def after_post_norm(
                output: Tensor, post_norm: LinearizedNorm | None = post_norm, scale: Tensor | None = scale
            ) -> Tensor:
                return output if post_norm is None or scale is None else post_norm.center_and_apply_gain(output) * scale

            W_O = to_float64(attention_layer.hook_point.W_O_for_listeners)  # (H, e, D)
            for i, address in enumerate(attention_layer.hook_point.head_addresses):
                yield (
                    str(address),
                    after_post_norm(to_float64(capture.z[attention_layer.hook_point][i, positions]) @ W_O[i]),
                )
            if attention_layer.b_O is not None:
                biases = biases + after_post_norm(to_float64(attention_layer.b_O).to(biases.device).expand_as(biases))
            if post_norm is not None and post_norm.bias is not None:
                biases = biases + to_float64(post_norm.bias).to(biases.device)
            yield f"mlp.{layer_index}", to_float64(capture.mlps[layer_index][positions])
        for layer_index, mlp in capture.mlps.items():  # layers without attention
            if layer_index < layer and all(
                attention_layer.hook_point.address.layer != layer_index for attention_layer in self.layers
            ):
                yield f"mlp.{layer_index}", to_float64(mlp[positions])
        yield BIASES, biases

    def layer_input_parts(self, layer: int, positions: list[int]) -> tuple[list[str], Tensor]:
        """Return the parts of a layer's input after its norm, with frozen scale: names and values (parts, n, D).

        The bias of the norm is added to the biases.
        """
        named = list(self.parts(layer, positions))
        names, parts = [name for name, _ in named], torch.stack([part for _, part in named])  # (P, n, D)
        norm = self.input_norm(layer)
        if norm is not None:
            parts = norm.center_and_apply_gain(parts) * norm.scale(parts.sum(0))
            if norm.bias is not None:
                parts[names.index(BIASES)] += to_float64(norm.bias).to(parts.device)
        return names, parts

    def check_parts_sum(self, layer: int) -> None:
        """Raise if the parts do not add up to the layer's input within the rounding error of its dtype."""
        parts = self.layer_input_parts(layer, list(range(len(self.read))))[1].sum(0)  # (T, D)
        tolerance = max(CLOSE, rounding_bound(self.read.dtype, num_roundings_before_layer(layer)))
        read = to_float64(self.read)
        if (parts - read).norm() > tolerance * read.norm():
            raise UnsupportedModelError(
                f"layer {layer}: scores cannot be attributed, because the outputs of embedding, heads, MLPs and biases do "
                f"not add up to the input of the layer. The model has another path into the residual stream."
            )

    def input_norm(self, layer: int) -> LinearizedNorm | None:
        """Return the norm before a layer. None if the layer has no norm."""
        residual_layer = self.residual.layers[layer]
        if residual_layer.unsupported_reason:
            raise UnsupportedModelError(
                f"layer {layer}: the input of its heads cannot be split into parts: {residual_layer.unsupported_reason}"
            )
        if residual_layer.norm is None:
            return None
        linear_norm = LinearizedNorm.infer(residual_layer.norm, self.model.spec.width)
        if linear_norm is None:
            raise UnsupportedModelError(
                f"layer {layer}: its input cannot be split into parts, because its norm is not a LayerNorm or RMSNorm. "
                f"Got {type(residual_layer.norm).__name__}."
            )
        return linear_norm

    def layer_of(self, head: Address) -> Any:
        """Return the attention layer of a head."""
        return next(
            attention_layer
            for attention_layer in self.layers
            if attention_layer.hook_point.address == head.layer_address
        )
