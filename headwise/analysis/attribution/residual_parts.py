"""The stream as the sum it is: what the embedding, every head, every MLP and the biases had added to it before a layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import Caught, caught_parts, layer_inputs
from headwise.analysis.recording.recording import Recording, record
from headwise.errors import HeadwiseError
from headwise.kernels.precision import rounding_bound
from headwise.model import AnyModel, Norm, Wiring, quiet
from headwise.spec import Address

EMBEDDING, BIASES = "embedding", "biases"
CLOSE = 1e-4  # relative; of numbers that the model computed in float32 or float64


def stream_roundings(layer: int) -> int:
    """Number of roundings before heads of a layer read: three per layer (attention, its addition, that of the MLP), and three
    in the norm."""
    return 3 * layer + 3


@dataclass(frozen=True, eq=False)
class Stream:
    """One pass over one text, (1, T), kept as far as a layer: enough to tell any position's stream apart into its parts."""

    model: AnyModel
    wiring: Wiring
    recording: Recording
    caught: Caught
    layers: tuple[Any, ...]  # the attention layers up to and with that layer
    read: Tensor  # (T, D): what heads of that layer read, as the model computed it

    @staticmethod
    def of(model: AnyModel, ids: Tensor, layer: int) -> "Stream":
        """Run the model once and keep what passed."""
        with quiet(model), torch.no_grad():
            wiring = model.wiring()
            layers = tuple(one for one in model.attention_layers() if one.site.address.layer <= layer)
            heads = [address for one in layers for address in one.site.addresses]
            with (
                record(model, heads, what=("q", "k", "v", "z", "map")) as recording,
                caught_parts(model, wiring, slice(None)) as caught,
                layer_inputs(layers[-1]) as inputs,
            ):
                model(ids)
        read = inputs[0].reshape(ids.shape[1], -1)  # some models drop the batch axis on the way
        return Stream(model, wiring, recording, caught, layers, read)

    def parts(self, layer: int, positions: list[int]) -> Iterator[tuple[str, Tensor]]:
        """What had been added to the stream before a layer, by name, at these positions: (n, D) each, in float64."""
        caught = self.caught
        yield EMBEDDING, caught.embedding[positions].double()
        biases = torch.zeros_like(caught.embedding[positions], dtype=torch.double)
        for one in self.layers:
            number = one.site.address.layer
            if number >= layer:
                break
            after = self.wiring.steps[number].after
            scale = None if after is None else after.scale(caught.wrote[number][positions])  # (n, 1)

            def added(wrote: Tensor, after: Norm | None = after, scale: Tensor | None = scale) -> Tensor:
                return wrote if after is None or scale is None else after.turn(wrote) * scale

            W_O = one.site.W_O.double()  # (H, e, D)
            for i, address in enumerate(one.site.addresses):
                yield str(address), added(caught.z[one.site][i, positions].double() @ W_O[i])
            if one.b_O is not None:
                biases = biases + added(one.b_O.double().expand_as(biases))
            if after is not None and after.bias is not None:
                biases = biases + after.bias.double()
            yield f"mlp.{number}", caught.mlps[number][positions].double()
        for number, mlp in caught.mlps.items():  # of layers whose attention is gone
            if number < layer and all(one.site.address.layer != number for one in self.layers):
                yield f"mlp.{number}", mlp[positions].double()
        yield BIASES, biases

    def as_read(self, layer: int, positions: list[int]) -> tuple[list[str], Tensor]:
        """The same as heads of that layer read them, the scale of its norm frozen: names, (parts, n, D).

        The norm's own bias is with the biases.
        """
        named = list(self.parts(layer, positions))
        names, parts = [name for name, _ in named], torch.stack([part for _, part in named])  # (P, n, D)
        norm = self.norm(layer)
        if norm is not None:
            parts = norm.turn(parts) * norm.scale(parts.sum(0))
            if norm.bias is not None:
                parts[names.index(BIASES)] += norm.bias.double()
        return names, parts

    def check_sum(self, layer: int) -> None:
        """Check that the parts add up to what the model's heads read, within the rounding of its dtype."""
        parts = self.as_read(layer, list(range(len(self.read))))[1].sum(0)  # (T, D)
        tolerance = max(CLOSE, rounding_bound(self.read.dtype, stream_roundings(layer)))
        if (parts - self.read).norm() > tolerance * self.read.norm():
            raise HeadwiseError(
                f"what was added to the stream before layer {layer} does not add up to what its heads read, so their scores "
                f"cannot be shared out."
            )

    def norm(self, layer: int) -> Norm | None:
        """The norm that heads of a layer read through; refused where it is not known."""
        step = self.wiring.steps[layer]
        if step.unread:
            raise HeadwiseError(f"what heads of layer {layer} read cannot be told apart: {step.unread}")
        if step.norm is None:
            return None
        found = Norm.tried(step.norm, self.model.spec.width)
        if found is None:
            raise HeadwiseError(
                f"layer {layer} reads through {type(step.norm).__name__}, which is no LayerNorm or RMSNorm, so what it reads "
                f"is no sum of parts."
            )
        return found

    def layer_of(self, head: Address) -> Any:
        """The attention layer a head is in."""
        return next(one for one in self.layers if one.site.address == head.site)
