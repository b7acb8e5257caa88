"""One declarative map per family, run both ways.

A line says what one of their tensors is here: its name there, its name here, and how to turn one into the other. `{i}` is
the layer. Names here are those of our parameters, so that a mapped file's tensors can be used as they lie.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.io.readers import Reader
from headwise.spec import ModelSpec

When = Callable[[ModelSpec], bool]


@dataclass(frozen=True)
class Line:
    """theirs → ours. `transposed`: they keep (in, out) where we keep (out, in)."""

    theirs: str
    ours: str
    transposed: bool = False
    when: When = lambda spec: True
    rotated: bool = False  # rows of q or k, whose order depends on the rotary layout

    def turn(self, tensor: Tensor) -> Tensor:
        """Their tensor for ours, or ours for theirs: a view either way."""
        return tensor.mT if self.transposed else tensor


@dataclass(frozen=True)
class Found:
    """One tensor of a model: where it is there, where it goes here."""

    theirs: str
    ours: str
    line: Line


def lines_for(spec: ModelSpec, lines: Iterable[Line]) -> Iterator[Found]:
    """The map written out for a model: every layer, nothing the model does not have."""
    for line in lines:
        if line.when(spec):
            for i in range(spec.layers) if "{i}" in line.ours else (0,):
                yield Found(line.theirs.format(i=i), line.ours.format(i=i), line)


def find_prefix(reader: Reader, known: Iterable[str], prefixes: Iterable[str]) -> str:
    """Which of a family's usual prefixes this file's names carry: the one under which most of them are known."""
    known = set(known)
    return max(prefixes, key=lambda prefix: sum(prefix + name in reader.shapes for name in known))


def check_names(
    reader: Reader,
    wanted: dict[str, tuple[int, ...]],
    source: object,
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuse a file that lacks tensors, has others, or has them in another shape; the error lists them."""
    missing = [name for name in wanted if name not in reader.shapes]
    extra = [name for name in reader.shapes if name not in wanted and not ignored(name)]
    shapes = [
        f"{name} is {list(reader.shapes[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in reader.shapes and reader.shapes[name] != shape
    ]
    told = [
        f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for what, names in (("missing", missing), ("not expected", extra), ("misshapen", shapes))
        if names
    ]
    if told:
        raise HeadwiseError(f"{source} does not hold the model its configuration describes. {'; '.join(told)}.")
