"""One declarative map per family, run both ways.

A line says what one of their tensors is here: its name there, its name here, and how to turn one into the other. `{i}` is
the layer. Names here are those of our parameters, so that a mapped file's tensors can be used as they lie.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.io.weight_readers import WeightReader
from headwise.spec import ModelSpec

SpecCondition = Callable[[ModelSpec], bool]


@dataclass(frozen=True)
class TensorMapping:
    """theirs → ours. `transposed`: they keep (in, out) where we keep (out, in)."""

    external_name: str
    native_name: str
    transposed: bool = False
    when: SpecCondition = lambda spec: True
    is_rotary: bool = False  # rows of q or k, whose order depends on the rotary layout

    def convert(self, tensor: Tensor) -> Tensor:
        """Their tensor for ours, or ours for theirs: a view either way."""
        return tensor.mT if self.transposed else tensor


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of a model: where it is there, where it goes here."""

    external_name: str
    native_name: str
    mapping: TensorMapping


def expand_mappings(spec: ModelSpec, mappings: Iterable[TensorMapping]) -> Iterator[MappedTensor]:
    """The map written out for a model: every layer, nothing the model does not have."""
    for mapping in mappings:
        if mapping.when(spec):
            for i in range(spec.layers) if "{i}" in mapping.native_name else (0,):
                yield MappedTensor(mapping.external_name.format(i=i), mapping.native_name.format(i=i), mapping)


def find_prefix(reader: WeightReader, external_names: Iterable[str], prefixes: Iterable[str]) -> str:
    """Which of a family's usual prefixes this file's names carry: the one under which most of them are known."""
    external_names = set(external_names)
    return max(prefixes, key=lambda prefix: sum(prefix + name in reader.shapes for name in external_names))


def check_names_and_shapes(
    reader: WeightReader,
    expected_shapes: dict[str, tuple[int, ...]],
    source: object,
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuse a file that lacks tensors, has others, or has them in another shape; the error lists them."""
    missing = [name for name in expected_shapes if name not in reader.shapes]
    extra = [name for name in reader.shapes if name not in expected_shapes and not is_ignored(name)]
    wrong_shapes = [
        f"{name} is {list(reader.shapes[name])}, expected {list(shape)}"
        for name, shape in expected_shapes.items()
        if name in reader.shapes and reader.shapes[name] != shape
    ]
    problems = [
        f"{problem}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for problem, names in (("missing", missing), ("not expected", extra), ("misshapen", wrong_shapes))
        if names
    ]
    if problems:
        raise HeadwiseError(f"{source} does not hold the model its configuration describes. {'; '.join(problems)}.")
