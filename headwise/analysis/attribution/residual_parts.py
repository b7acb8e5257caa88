"""The stream as the sum it is: what the embedding, every head, every MLP and the biases had added to it before a layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import CapturedComponents, capture_layer_inputs, capture_residual
from headwise.analysis.recording.recording import ModelRecording, record
from headwise.errors import HeadwiseError
from headwise.kernels.rounding_tolerance import rounding_bound
from headwise.model import LinearizedNorm, ModelProtocol, ResidualStream, eval_mode
from headwise.spec import Address

EMBEDDING, BIASES = "embedding", "biases"
CLOSE = 1e-4  # relative; of numbers that the model computed in float32 or float64


def num_roundings_before_layer(layer: int) -> int:
    """Number of roundings before heads of a layer read: three per layer (attention, its addition, that of the MLP), and three
    in the norm."""
    return 3 * layer + 3


@dataclass(frozen=True, eq=False)
class ResidualParts:
    """One pass over one text, (1, T), kept as far as a layer: enough to tell any position's stream apart into its parts."""

    model: ModelProtocol
    residual: ResidualStream
    recording: ModelRecording
    capture: CapturedComponents
    layers: tuple[Any, ...]  # the attention layers up to and with that layer
    read: Tensor  # (T, D): what heads of that layer read, as the model computed it

    @staticmethod
    def of(model: ModelProtocol, ids: Tensor, layer: int) -> "ResidualParts":
        """Run the model once and keep what passed."""
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
        """What had been added to the stream before a layer, by name, at these positions: (n, D) each, in float64."""
        capture = self.capture
        yield EMBEDDING, capture.embedding[positions].double()
        biases = torch.zeros_like(capture.embedding[positions], dtype=torch.double)
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

            W_O = attention_layer.hook_point.W_O.double()  # (H, e, D)
            for i, address in enumerate(attention_layer.hook_point.head_addresses):
                yield (
                    str(address),
                    after_post_norm(capture.z[attention_layer.hook_point][i, positions].double() @ W_O[i]),
                )
            if attention_layer.b_O is not None:
                biases = biases + after_post_norm(attention_layer.b_O.double().expand_as(biases))
            if post_norm is not None and post_norm.bias is not None:
                biases = biases + post_norm.bias.double()
            yield f"mlp.{layer_index}", capture.mlps[layer_index][positions].double()
        for layer_index, mlp in capture.mlps.items():  # of layers whose attention is gone
            if layer_index < layer and all(
                attention_layer.hook_point.address.layer != layer_index for attention_layer in self.layers
            ):
                yield f"mlp.{layer_index}", mlp[positions].double()
        yield BIASES, biases

    def layer_input_parts(self, layer: int, positions: list[int]) -> tuple[list[str], Tensor]:
        """The same as heads of that layer read them, the scale of its norm frozen: names, (parts, n, D).

        The norm's own bias is with the biases.
        """
        named = list(self.parts(layer, positions))
        names, parts = [name for name, _ in named], torch.stack([part for _, part in named])  # (P, n, D)
        norm = self.input_norm(layer)
        if norm is not None:
            parts = norm.center_and_apply_gain(parts) * norm.scale(parts.sum(0))
            if norm.bias is not None:
                parts[names.index(BIASES)] += norm.bias.double()
        return names, parts

    def check_parts_sum(self, layer: int) -> None:
        """Check that the parts add up to what the model's heads read, within the rounding of its dtype."""
        parts = self.layer_input_parts(layer, list(range(len(self.read))))[1].sum(0)  # (T, D)
        tolerance = max(CLOSE, rounding_bound(self.read.dtype, num_roundings_before_layer(layer)))
        if (parts - self.read).norm() > tolerance * self.read.norm():
            raise HeadwiseError(
                f"what was added to the stream before layer {layer} does not add up to what its heads read, so their scores "
                f"cannot be shared out."
            )

    def input_norm(self, layer: int) -> LinearizedNorm | None:
        """The norm that heads of a layer read through; refused where it is not known."""
        residual_layer = self.residual.layers[layer]
        if residual_layer.unsupported_reason:
            raise HeadwiseError(
                f"what heads of layer {layer} read cannot be told apart: {residual_layer.unsupported_reason}"
            )
        if residual_layer.norm is None:
            return None
        linear_norm = LinearizedNorm.infer(residual_layer.norm, self.model.spec.width)
        if linear_norm is None:
            raise HeadwiseError(
                f"layer {layer} reads through {type(residual_layer.norm).__name__}, which is no LayerNorm or RMSNorm, "
                f"so what it reads "
                f"is no sum of parts."
            )
        return linear_norm

    def layer_of(self, head: Address) -> Any:
        """The attention layer a head is in."""
        return next(
            attention_layer
            for attention_layer in self.layers
            if attention_layer.hook_point.address == head.layer_address
        )
