"""A profile over pictures: every head of a model that reads pixels, by the same ladder as over texts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headwise.analysis.metrics import image_patches
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.role_examples import ExampleStore
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import TextSample, make_batches
from headwise.analysis.recording.input_image import image_input_of, image_sample, read_images
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import Role, check_roles
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.randomize_attention_weights import control_model
from headwise.progress import Progress

# What a head may be said to do with a picture. Rows and columns are told above a head that looks as far in all directions
# alike.
IMAGE_ROLES = (
    Role("local", image_patches.LOCAL_PATCHES.score_spec, 0.3, None, f"within {image_patches.LOCAL_RADIUS}"),
    Role("row", image_patches.SAME_ROW.score_spec, 0.2),
    Role("column", image_patches.SAME_COLUMN.score_spec, 0.2),
    Role("global", image_patches.FAR_PATCHES.score_spec, 0.3, None, "beyond half"),
    Role("class token", image_patches.CLASS_TOKEN.score_spec, 0.3),
    Role("register", image_patches.REGISTERS.score_spec, 0.3),
    Role("sink", image_patches.SINGLE_PATCH.score_spec, 0.3, None, "one patch"),
)


def profile_images(
    model: ModelProtocol, images: Any, *, metrics: Sequence[Metric] = (), roles: Sequence[Role] = (),
    batch_tokens: int = 2048, row_stride: int = 1, control: str | None = None, seed: int = 0,
    progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """What every head does over pictures: a folder, a list of paths, Pillow images or tensors, or a tensor (N, C, H, W)."""
    if images is None:
        raise HeadwiseError("this model reads pictures, and none come along; give a folder of them, or a list.")
    if control not in (None, "random-init", "random-attention"):
        raise HeadwiseError(
            f"control={control!r}: pictures have no tokens to shuffle. Use random-init or random-attention."
        )
    if any(isinstance(candidate, TaskMetric) for candidate in metrics):
        raise HeadwiseError("tasks read texts of their own; this model reads pictures.")
    model = control_model(model, control, seed)
    grid, hook_points = image_input_of(model).patch_grid, model.gathered_hook_points()
    addresses = tuple(address for hook_point in hook_points for address in hook_point.head_addresses)
    all_metrics = [*image_patches.image_metrics(grid), *metrics]
    metric_specs = {metric_spec.name: metric_spec for metric in all_metrics for metric_spec in metric.metric_specs}
    if len(metric_specs) < sum(len(metric.metric_specs) for metric in all_metrics):
        raise HeadwiseError("two metrics have numbers of one name; give yours another name.")
    all_roles = (*(role for role in IMAGE_ROLES if role.metric_spec.name in metric_specs), *roles)
    check_roles(all_roles, metric_specs.values())
    accumulator, top_contexts, count = Accumulator(len(addresses)), TopContexts(len(addresses)), 0

    def image_samples() -> Iterator[TextSample]:
        nonlocal count
        for image in read_images(model, images):
            if progress is not None:
                progress("pictures", count, None)
            yield image_sample(count, image)
            count += 1

    with eval_mode(model), torch.no_grad():
        MetricRunner(accumulator, [top_contexts, *all_metrics], row_stride).run(
            model, make_batches(image_samples(), batch_tokens, device=model.device)
        )
    if progress is not None:
        progress("pictures", count, count)
    spec = model.spec
    metadata = {
        "texts": count, "tokens": count * len(grid), "documents": 0, "relations": "", "control": control, "seed": seed,
        "layers": [str(hook_point.address) for hook_point in hook_points], "detail": "full", "row_stride": row_stride,
        "corpus": "the pictures given", "relations_corpus": "", "image_grid": [grid.rows, grid.columns],
        "model": f"reader of pictures, {spec.layers} layers with {spec.attention.heads} heads, width {spec.width}, "
        f"{grid.rows} by {grid.columns} patches",
    }  # fmt: skip
    examples = ExampleStore(len(addresses))
    return Profile.of(
        addresses, accumulator, None, top_contexts.contexts(), examples, metadata, metric_specs, all_roles
    )
