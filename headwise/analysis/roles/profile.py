"""A profile: every head of a model, measured over a corpus in one streaming pass, in four stages.

`collect` sums metrics over the corpus, `score` computes scores and baselines of every role, `assess` tests them, and
`causal_test` ablates the heads that passed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.roles.causal_test import causal_test, supports_causal_test
from headwise.analysis.roles.collect import CollectOptions, collect, ignore_progress, select_metrics
from headwise.analysis.roles.image_profile import profile_images
from headwise.analysis.roles.profile_result import Profile, build_profile
from headwise.analysis.roles.prompt_roles import PROMPT_ROLES, prompt_metrics
from headwise.analysis.roles.roles import DEFAULT_ROLES, Role, assess, check_roles, score
from headwise.distributed.process_group import open_process_group
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.randomize_attention_weights import control_model
from headwise.progress import Progress

CONTROLS = ("random-init", "random-attention", "shuffled")


def profile(
    model: ModelProtocol,
    corpus: Any = None,
    *,
    metrics: Sequence[Metric | TaskMetric] = (),
    roles: Sequence[Role] = (),
    relations: Any = None,
    causal: bool = True,
    control: str | None = None,
    prompts: bool = False,
    max_length: int | None = None,
    batch_tokens: int = 2048,
    row_stride: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Measure every head of a model over a corpus, and test its roles.

    An encoder-decoder reads each text as its source and as its target. Its relations are those that lead back, which both
    stacks can see. Cross-attention has no distances, so none of those, no relations and no repeats are asked of it.

    A model that reads pixels looks at pictures: a folder of them, a list of paths, Pillow images or tensors. Its tokens are
    patches, and its metrics need no words (`headwise.analysis.roles.image_profile`).

    Args:
        model: A native or an attached model.
        corpus: A text, a list of texts, a path or a Corpus. None: the embedded probe set, or the synthetic language for its
            own models.
        metrics: Metrics of your own, measured with the default ones (docs/analysis.md).
        roles: Roles of your own, tested with the default ones.
        relations: Documents with gold arcs, if not the corpus's own. False: no relations.
        causal: Test causally, by ablation.
        control: Profile a control: a model with random weights (`random-init`), this model with random attention weights
            (`random-attention`), or texts with shuffled tokens (`shuffled`).
        prompts: Also test the roles that need prompts of their own (`headwise.analysis.roles.prompt_roles`).
        max_length: Maximum number of tokens per unit of plain text.
        batch_tokens: Number of tokens per batch.
        row_stride: For very long texts: one block of 64 rows in `row_stride` is measured.
        seed: Seed of repeated tokens, shuffling, tasks and causal tests.
        progress: Progress callback.

    Returns:
        The profile; `profile["5.1"]` is one head.
    """
    options = CollectOptions(
        relations=relations, control=control, max_length=max_length, batch_tokens=batch_tokens, row_stride=row_stride,
        keep_texts=causal and supports_causal_test(model), seed=seed, progress=progress or ignore_progress,
    )  # fmt: skip
    if model.image_input is not None:
        if relations or max_length is not None or prompts:
            raise HeadwiseError(
                "pictures have no relations, and are read whole; leave relations, max_length and prompts out."
            )
        return profile_images(model, corpus, metrics, roles, options)
    if control is not None and control not in CONTROLS:
        raise HeadwiseError(f"control={control!r}: not a control. Use {', '.join(CONTROLS)} or none.")
    model = control_model(model, control, seed)
    if prompts:
        if control == "shuffled" or model.is_sharded:
            raise HeadwiseError("prompts are read as they are, by a model that one process holds; leave them out here.")
        metrics, roles = (*prompt_metrics(), *metrics), (*PROMPT_ROLES, *roles)
    with (
        eval_mode(model),
        torch.no_grad(),
        open_process_group(model.device, single_process=model.is_sharded) as process_group,
    ):
        selection = select_metrics(model, metrics, options.detail, seed)
        check_roles(roles, selection.metric_specs.values())
        sums, samples = collect(model, corpus, selection, options, process_group)
        scores = score(sums.accumulator, sums.relation_metric, (*DEFAULT_ROLES, *roles))
        evidence, family_size = assess(scores, len(sums.addresses), sums.metadata)
        if options.keep_texts:
            documents, texts = samples.relation_documents.samples.values(), samples.first_samples
            evidence = causal_test(model, sums.addresses, evidence, documents, texts, seed + 1, options.progress)
    return build_profile(sums, evidence, family_size, roles)
