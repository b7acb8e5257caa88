"""A profile over pictures: every head of a model that reads pixels, by the same ladder as over texts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headwise.analysis.metrics import image_patches
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.metric import Measure
from headwise.analysis.metrics.role_examples import Cases
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.tasks import TaskMeasure
from headwise.analysis.metrics.top_contexts import Evidence
from headwise.analysis.recording.batching import Unit, make_batches
from headwise.analysis.recording.image import picture_unit, pictures_of, read_pictures
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import Role, check_roles
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, quiet
from headwise.model.random_attention import control_model
from headwise.progress import Progress

# What a head may be said to do with a picture. Rows and columns are told above a head that looks as far in all directions
# alike.
ROLES = (
    Role("local", image_patches.LOCAL.score, 0.3, None, f"within {image_patches.NEAR}"),
    Role("row", image_patches.ROW.score, 0.2),
    Role("column", image_patches.COLUMN.score, 0.2),
    Role("global", image_patches.FAR.score, 0.3, None, "beyond half"),
    Role("class token", image_patches.CLASS.score, 0.3),
    Role("register", image_patches.REGISTER.score, 0.3),
    Role("sink", image_patches.ONE.score, 0.3, None, "one patch"),
)


def profile_pictures(
    model: AnyModel, pictures: Any, *, measures: Sequence[Measure] = (), roles: Sequence[Role] = (), tokens: int = 2048,
    every: int = 1, control: str | None = None, seed: int = 0, progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """What every head does over pictures: a folder, a list of paths, Pillow images or tensors, or a tensor (N, C, H, W)."""
    if pictures is None:
        raise HeadwiseError("this model reads pictures, and none come along; give a folder of them, or a list.")
    if control not in (None, "random-init", "random-attention"):
        raise HeadwiseError(
            f"control={control!r}: pictures have no tokens to shuffle. Use random-init or random-attention."
        )
    if any(isinstance(one, TaskMeasure) for one in measures):
        raise HeadwiseError("tasks read texts of their own; this model reads pictures.")
    model = control_model(model, control, seed)
    grid, sites = pictures_of(model).grid, model.all_sites()
    addresses = tuple(address for site in sites for address in site.addresses)
    taken = [*image_patches.picture_measures(grid), *measures]
    told = {number.name: number for measure in taken for number in measure.numbers}
    if len(told) < sum(len(measure.numbers) for measure in taken):
        raise HeadwiseError("two measures have numbers of one name; give yours another name.")
    asked = (*(role for role in ROLES if role.measure.name in told), *roles)
    check_roles(asked, told.values())
    tally, evidence, count = Tally(len(addresses)), Evidence(len(addresses)), 0

    def units() -> Iterator[Unit]:
        nonlocal count
        for picture in read_pictures(model, pictures):
            if progress is not None:
                progress("pictures", count, None)
            yield picture_unit(count, picture)
            count += 1

    with quiet(model), torch.no_grad():
        Runner(tally, [evidence, *taken], every).read(model, make_batches(units(), tokens, device=model.device))
    if progress is not None:
        progress("pictures", count, count)
    spec = model.spec
    about = {
        "texts": count, "tokens": count * len(grid), "documents": 0, "relations": "", "control": control, "seed": seed,
        "layers": [str(site.address) for site in sites], "detail": "full", "every": every, "read": "the pictures given",
        "asked": "", "pictures": [grid.rows, grid.columns],
        "model": f"reader of pictures, {spec.layers} layers with {spec.attention.heads} heads, width {spec.width}, "
        f"{grid.rows} by {grid.columns} patches",
    }  # fmt: skip
    cases = Cases(len(addresses))
    return Profile.of(addresses, tally, None, evidence.contexts(), cases, about, told, asked)
