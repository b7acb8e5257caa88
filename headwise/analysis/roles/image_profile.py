"""Profile over images: the stages of a text profile, for models with pixel input."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headwise.analysis.metrics import image_patches
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import TextSample, make_batches
from headwise.analysis.recording.read_images import image_input_of, image_sample, read_images
from headwise.analysis.roles.profile_result import Profile, ProfileSums, build_profile
from headwise.analysis.roles.profile_sums import CollectOptions, metric_specs_by_name
from headwise.analysis.roles.roles import DEFAULT_ROLES, Role, assess, check_roles, score
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.randomize_attention_weights import control_model

# Roles of heads of image models. Baselines of rows and columns are those of a head without preferred direction at the same
# distances.
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
    model: ModelProtocol,
    images: Any,
    metrics: Sequence[Metric | TaskMetric],
    roles: Sequence[Role],
    options: CollectOptions,
) -> Profile:
    """Profile every head over images: a folder, a list of paths, Pillow images or tensors, or a tensor (N, C, H, W)."""
    if images is None:
        raise ArgumentError(
            "corpus: this model has image input and needs images. Pass a folder of images, or a list of paths, Pillow images "
            "or tensors."
        )
    if options.control not in (None, "random-init", "random-attention"):
        raise ArgumentError(
            f"control={options.control!r}: not available for images, which have no tokens to shuffle. "
            f"Use random-init or random-attention."
        )
    given_metrics = [metric for metric in metrics if not isinstance(metric, TaskMetric)]
    if len(given_metrics) < len(metrics):
        raise ArgumentError("metrics: task metrics use texts, but this model has image input. Remove the task metrics.")
    model = control_model(model, options.control, options.seed)
    all_metrics = [*image_patches.image_metrics(image_input_of(model).token_patch_grid), *given_metrics]
    metric_specs = metric_specs_by_name(all_metrics)
    all_roles = (*(role for role in IMAGE_ROLES if role.metric_spec.name in metric_specs), *roles)
    check_roles(all_roles, metric_specs.values())
    with eval_mode(model), torch.no_grad():
        sums = collect_images(model, images, all_metrics, options)
    scores = score(sums.accumulator, None, (*DEFAULT_ROLES, *all_roles))
    evidence, family_size = assess(scores, len(sums.addresses), sums.metadata)
    return build_profile(sums, evidence, family_size, all_roles)


def collect_images(
    model: ModelProtocol, images: Any, metrics: Sequence[Metric], options: CollectOptions
) -> ProfileSums:
    """Run the model over the images once and sum the metrics at every hook point."""
    grid, hook_points, spec = image_input_of(model).token_patch_grid, model.gathered_hook_points(), model.spec
    addresses = tuple(address for hook_point in hook_points for address in hook_point.head_addresses)
    accumulator, top_contexts, count = Accumulator(len(addresses)), TopContexts(len(addresses)), 0

    def image_samples() -> Iterator[TextSample]:
        nonlocal count
        for image in read_images(model, images):
            options.progress("pictures", count, None)
            yield image_sample(count, image)
            count += 1

    runner = MetricRunner(accumulator, metrics, options.row_stride, observers=[top_contexts])
    runner.run(model, make_batches(image_samples(), options.batch_tokens, device=model.device))
    options.progress("pictures", count, count)
    metadata = {
        "texts": count, "tokens": count * len(grid), "documents": 0, "relations": "", "control": options.control,
        "seed": options.seed, "layers": [str(hook_point.address) for hook_point in hook_points],
        "row_stride": options.row_stride, "corpus": "the pictures given", "relations_corpus": "",
        "image_grid": [grid.rows, grid.columns],
        "model": f"reader of pictures, {spec.layers} layers with {spec.attention.heads} heads, width {spec.width}, "
        f"{grid.rows} by {grid.columns} patches",
    }  # fmt: skip
    return ProfileSums(
        addresses, accumulator, None, top_contexts.contexts(), ExampleStore(len(addresses)), metadata,
        metric_specs_by_name(metrics),
    )  # fmt: skip
