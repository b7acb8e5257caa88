"""`quantise`: the same model with its weights at few bits, by head and part; `dequantise` makes them numbers again."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.heads.balanced_basis import Basis, Matrices, check_basis, in_basis
from headwise.heads.quantized_weights import Packed
from headwise.model import Transformer, check_model
from headwise.model.prune import built
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL, GROUP, Bits


@torch.no_grad()
def quantise(
    model: Transformer, weights: Bits, *, group: int = GROUP, activations: int = FULL, basis: Basis = "given"
) -> Transformer:
    """A new model whose weights are stored at 16, 8, 4, 3 or 2 bits; the given one stays as it is.

    One number is for heads, MLPs and vocabulary; `{"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8, "vocabulary": 8}` goes by head
    and part, the later of two that name the same counts, and what is not named stays as it is. Rounding is symmetric, in
    groups of `group` numbers along the input, inside a head. `activations=8` also rounds what these weights are multiplied
    by, row by row. `basis="balanced"` first brings heads into their balanced basis (`headwise.heads.balanced_basis`), "random" into
    one that is drawn by chance, to see what the basis matters.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = quantise(model, {"*": 4, "5.1": 8, "mlp": 8})
    >>> small.spec.weight_bytes() < model.spec.weight_bytes() / 3
    True
    >>> small.heads["5.1"].W_Q.shape
    torch.Size([384, 64])
    """
    check_model(model)
    model.check_own("weights are packed by head in headwise's own models")
    check_basis(basis)
    spec = model.spec.quantised(weights, group=group, activations=activations)
    return packed_as(model, spec, basis)


def packed_as(model: Transformer, spec: ModelSpec, basis: Basis = "given") -> Transformer:
    """The model as a spec of its own, with weights at few bits, says."""
    state = dict(model.state_dict())  # split, with a head axis
    if basis != "given":
        _change_basis(model, spec, state, basis)
    for name, part in Transformer(spec, device="meta").named_modules():
        if isinstance(part, Packed):
            weight = state.pop(f"{name.removesuffix('.packed')}.weight")
            state |= {f"{name}.{held}": tensor for held, tensor in part.pack(_units(name, weight)).items()}
    return built(spec, state, model)


@torch.no_grad()
def dequantise(model: Transformer) -> Transformer:
    """The same numbers as floats again, to train, to export, to cut and quantise anew; the given model stays as it is.

    >>> from headwise.spec import preset
    >>> small = quantise(Transformer(preset("nano")), 4)
    >>> torch.equal(dequantise(small).heads["5.1"].W_O, small.heads["5.1"].W_O)
    True
    """
    check_model(model)
    model.check_own("weights are packed by head in headwise's own models")
    state = dict(model.state_dict())
    for name, part in model.named_modules():
        if isinstance(part, Packed):
            for held, _ in part.named_buffers():
                state.pop(f"{name}.{held}")
            numbers = part.unpacked()  # (units, rows, inputs)
            whole = name.removesuffix(".packed")
            if whole != name:
                numbers = numbers.transpose(0, 1)  # W_O, (D, H, e)
            state[f"{whole}.weight"] = numbers if ".read." in name or whole != name else numbers[0]
    return built(replace(model.spec, weights=(), activations=FULL), state, model)


def _units(name: str, weight: Tensor) -> Tensor:
    """A weight as the matrices it is rounded as, (units, rows, inputs): its heads, or itself."""
    if name.endswith(".packed"):
        return weight.transpose(0, 1)  # W_O, (D, H, e): rounded along each head's own channels
    return weight if ".read." in name else weight[None]


def _change_basis(model: Transformer, spec: ModelSpec, state: dict[str, Tensor], basis: Basis) -> None:
    """Put heads of layers with weights at few bits into another basis."""
    names = {id(part): name for name, part in model.named_modules()}
    for layer in model.attention_layers():
        if spec.attention_at(layer.site.address).weights is None:
            continue
        made, prefix = in_basis(Matrices.of(layer), layer.spec, basis), names[id(layer)]
        for letter in "qkv":
            state[f"{prefix}.read.{letter}.weight"] = getattr(made, letter)
            bias = getattr(made, f"b_{letter}")
            if bias is not None:
                state[f"{prefix}.read.{letter}.bias"] = bias
        state[f"{prefix}.write.weight"] = made.o.permute(2, 0, 1)


@dataclass(frozen=True)
class Stored:
    """What some part of a model takes: numbers, bytes as they lie in memory and on disk, and bits a number."""

    part: str
    numbers: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits a number, scales among them."""
        return 8 * self.bytes / self.numbers if self.numbers else 0.0


def stored(model: Transformer) -> list[Stored]:
    """What a model's weights take, counted as they lie there: heads, MLPs, vocabulary, the rest, and all together.

    >>> from headwise.spec import preset
    >>> [(one.part, one.numbers, round(one.bits, 2)) for one in stored(quantise(Transformer(preset("nano")), 4))][:2]
    [('heads', 3538944, 5.0), ('MLPs', 7089408, 5.04)]
    """
    counts = {"heads": [0, 0], "MLPs": [0, 0], "vocabulary": [0, 0], "the rest": [0, 0]}
    for name, module in model.named_modules():
        kind = _kind(name)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if name == "output.vocabulary" and model.spec.tied:
            own = [value for value in own if value.ndim == 1]  # its weight is the embedding
        if isinstance(module, Packed):
            numbers = len(module.bits) * module.rows * module.inputs
            numbers += sum(value.numel() for value in module.parameters(recurse=False))
        else:
            numbers = sum(value.numel() for value in own)
        counts[kind][0] += numbers
        counts[kind][1] += sum(value.nbytes for value in own)
    made = [Stored(part, *both) for part, both in counts.items()]
    return [*made, Stored("all", sum(one.numbers for one in made), sum(one.bytes for one in made))]


def _kind(name: str) -> str:
    if any(part in name for part in (".attention.", ".cross.")) or name.endswith((".attention", ".cross")):
        return "heads"
    if ".mlp." in name:
        return "MLPs"
    return "vocabulary" if name in ("embed.tokens", "output.vocabulary") else "the rest"
