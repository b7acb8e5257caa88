"""Tensor name maps between model families and Headwise, one declarative table per family, used for import and export.

Each row has the external name, the native name, and how to convert one tensor to the other. `{i}` is the layer number.
Native names are our parameter names, so tensors of a memory-mapped file can be used without a copy.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from headwise.errors import FileFormatError
from headwise.io.weight_readers import WeightReader
from headwise.spec import ModelSpec

SpecCondition = Callable[[ModelSpec], bool]


@dataclass(frozen=True)
class TensorMapping:
    """One row of a name map.

    Attributes:
        external_name: Name in the family's files. A leading `/` means that the family's prefix does not apply.
        native_name: Name of our parameter.
        transposed: Whether the family stores (in, out) instead of (out, in).
        when: Whether a model with this spec has the tensor.
        is_rotary: Whether the rows are those of q or k, whose order depends on the rotary layout.
        part: Index and number of equal parts of the external tensor along its first axis, one of which is this tensor.
        first_layer: First layer that has the tensor.
        stored_offset: Constant that the file adds to our values.
    """

    external_name: str
    native_name: str
    transposed: bool = False
    when: SpecCondition = lambda spec: True
    is_rotary: bool = False
    part: tuple[int, int] = (0, 1)
    stored_offset: float = 0.0
    first_layer: int = 0

    def convert(self, tensor: Tensor) -> Tensor:
        """Convert the part of an external tensor to a native one, or the reverse. Returns a view."""
        return tensor.mT if self.transposed else tensor

    def select_part(self, tensor: Tensor) -> Tensor:
        """Return the part of an external tensor that this row maps, without the offset. Returns a view if there is none."""
        index, count = self.part
        tensor = tensor if count == 1 else tensor.chunk(count)[index]
        return tensor - self.stored_offset if self.stored_offset else tensor


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of a model, with its external and native name."""

    external_name: str
    native_name: str
    mapping: TensorMapping


def expand_mappings(spec: ModelSpec, mappings: Iterable[TensorMapping]) -> Iterator[MappedTensor]:
    """Yield the tensors of a model: one per layer, without those that the model does not have.

    An external name without {i} and a native name with {i} map one tensor to all layers (T5's position bias).
    """
    for mapping in mappings:
        if mapping.when(spec):
            layers = spec.encoder_layers if mapping.native_name.startswith("encoder_blocks.") else spec.layers
            for i in range(mapping.first_layer, layers) if "{i}" in mapping.native_name else (0,):
                yield MappedTensor(mapping.external_name.format(i=i), mapping.native_name.format(i=i), mapping)


def find_prefix(reader: WeightReader, external_names: Iterable[str], prefixes: Iterable[str]) -> str:
    """Return the prefix with which most of a family's tensor names occur in the file."""
    external_names = set(external_names)
    return max(prefixes, key=lambda prefix: sum(prefix + name in reader.shapes for name in external_names))


def check_names_and_shapes(
    reader: WeightReader,
    expected_shapes: dict[str, tuple[int, ...]],
    source: object,
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise an error if tensors are missing, unexpected or of another shape. The error lists them."""
    missing = [name for name in expected_shapes if name not in reader.shapes]
    extra = [name for name in reader.shapes if name not in expected_shapes and not is_ignored(name)]
    wrong_shapes = [
        f"{name} is {list(reader.shapes[name])}, expected {list(shape)}"
        for name, shape in expected_shapes.items()
        if name in reader.shapes and reader.shapes[name] != shape
    ]
    problems = [
        f"{problem}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for problem, names in (("missing", missing), ("unexpected", extra), ("wrong shape", wrong_shapes))
        if names
    ]
    if problems:
        raise FileFormatError(
            f"{source}: the weights do not match the model's configuration. {'; '.join(problems)}. Download or save "
            f"the model again."
        )
