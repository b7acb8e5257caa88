"""Options `--steering` and `--strength` of the commands that run or export a steered model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from headwise.analysis.steering.steering import Steering
    from headwise.model import ModelProtocol

M = TypeVar("M", bound="ModelProtocol")
SteeringOption = Annotated[
    list[Path] | None,
    typer.Option("--steering", help="Folder of a steering (headwise steer --out) of MODEL. Repeatable."),
]
StrengthOption = Annotated[
    float | None, typer.Option("--strength", help="Strength of every --steering. Default: that of its folder.")
]


def load_steerings(folders: Sequence[Path] | None, strength: float | None) -> "list[Steering]":
    """Load steerings, with another strength if one is given."""
    from headwise.analysis.steering.steering import Steering
    from headwise.errors import ArgumentError

    if strength is not None and not folders:
        raise ArgumentError("strength: needs a steering. Pass --steering FOLDER.")
    loaded = [Steering.load(folder) for folder in folders or ()]
    return loaded if strength is None else [steering.at_strength(strength) for steering in loaded]


@contextmanager
def steered(model: "ModelProtocol", folders: Sequence[Path] | None, strength: float | None) -> Iterator[None]:
    """Apply the steerings of these folders inside the context."""
    with ExitStack() as stack:
        for steering in load_steerings(folders, strength):
            stack.enter_context(steering.applied(model))
        yield


def fold_steerings(model: M, folders: Sequence[Path] | None, strength: float | None) -> M:
    """Return the model with the steerings of these folders in its weights."""
    from headwise.compression.fold_steering import fold_steering

    for steering in load_steerings(folders, strength):
        model = fold_steering(model, steering)
    return model
