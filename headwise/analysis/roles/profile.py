"""A profile: every head of a model, measured over a corpus in one streaming pass, in four stages.

`collect` sums metrics over the corpus, `score` computes scores and baselines of every role, `assess` tests them, and
`causal_test` ablates the heads that passed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.recording.model_calls import reads_calls
from headwise.analysis.roles.call_profile import profile_calls
from headwise.analysis.roles.causal_test import causal_test, supports_causal_test
from headwise.analysis.roles.image_profile import profile_images
from headwise.analysis.roles.profile_cost_estimate import fit_batch_tokens, print_estimate_of_large_model
from headwise.analysis.roles.profile_result import Profile, build_profile
from headwise.analysis.roles.profile_sums import (
    CollectOptions,
    collect,
    ignore_progress,
    select_layers,
    select_metrics,
)
from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES, prompt_metrics
from headwise.analysis.roles.roles import DEFAULT_ROLES, Role, assess, check_roles, score
from headwise.distributed.process_group import open_process_group
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.randomize_attention_weights import control_model
from headwise.progress import ProgressOption, callback_of, shows_progress

CONTROLS = ("random-init", "random-attention", "shuffled")


@shows_progress
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
    only_layers: str | None = None,
    memory_limit: str | int | None = None,
    progress: ProgressOption = None,
) -> Profile:
    """Measure every head of a model over a corpus, and test its roles.

    Encoder-decoder models receive each text as source and as target. Only relations to earlier words are measured, because
    both stacks can attend to them. Cross-attention has no distances, relations or repeated tokens.

    Models with pixel input are profiled on images; their tokens are patches (`headwise.analysis.roles.image_profile`).

    Args:
        model: A headwise model or an attached model.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the embedded probe set, or the synthetic language for
            models trained on it. For models with pixel input: a folder, or a list of paths, Pillow images or tensors. For
            torch modules: a list of calls (`hw.attach`).
        metrics: Additional metrics, measured with the default ones (docs/analysis/custom.md).
        roles: Additional roles, tested with the default ones.
        relations: Documents with gold arcs, if not those of the corpus. False measures no relations.
        causal: Test roles causally, by ablation.
        control: Profile a control: a model with random weights (`random-init`), this model with random attention weights
            (`random-attention`), or texts with shuffled tokens (`shuffled`).
        prompts: Also test the roles that need prompts (`headwise.analysis.roles.prompt_role_definitions`).
        max_length: Plain text is split into chunks of this many tokens.
        batch_tokens: Maximum number of tokens per batch.
        row_stride: For very long texts: one of every `row_stride` blocks of 64 query rows is measured.
        seed: Seed of repeated tokens, shuffling, tasks and causal tests.
        only_layers: Layers to measure, such as `"0-7"` or `"cross.*"`. The sums of a profile grow with the number of heads,
            so large models can be profiled by one group of layers after the other, also in separate processes:
            `first.merge(second)` joins profiles of different layers over one corpus. None measures all layers.
        memory_limit: Expected peak memory, weights included, such as `"8 GB"`. Batches become smaller to fit, and an error
            says so before the work starts if they cannot. `headwise.analysis.estimate_profile` estimates time and memory;
            for models with 2 GB of weights or more, the estimate is printed first if progress is shown.
        progress: Called with a label, the number of items done and the total, which may be None.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The profile. `profile["5.1"]` is the profile of one head.

    Raises:
        ArgumentError: If arguments are invalid or cannot be combined.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=64, layers=1, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> result = profile(model, ["To be or not to be"], relations=False, causal=False)
    >>> [str(head.address) for head in result]
    ['0.0', '0.1']
    """
    progress = callback_of(progress)
    measured_layers = select_layers(model, only_layers, metrics, prompts=prompts)
    batch_tokens = fit_batch_tokens(model, batch_tokens, memory_limit, measured_layers)
    print_estimate_of_large_model(
        model, corpus, progress, relations=relations, max_length=max_length, batch_tokens=batch_tokens,
        row_stride=row_stride, only_layers=only_layers,
    )  # fmt: skip
    options = CollectOptions(
        relations=relations, control=control, max_length=max_length, batch_tokens=batch_tokens, row_stride=row_stride,
        keep_texts=causal and supports_causal_test(model), seed=seed, layers=measured_layers,
        progress=progress or ignore_progress,
    )  # fmt: skip
    if reads_calls(model):
        if prompts:
            raise ArgumentError("prompts=True: not supported for a corpus of calls. Use prompts=False.")
        return profile_calls(model, corpus, metrics, roles, options)
    if model.image_input is not None:
        if relations or max_length is not None or prompts:
            raise ArgumentError(
                "relations, max_length, prompts: not supported for models with image input. Remove these arguments."
            )
        return profile_images(model, corpus, metrics, roles, options)
    if control is not None and control not in CONTROLS:
        raise ArgumentError(f"control={control!r}: unknown control. Use {', '.join(CONTROLS)}, or None.")
    model = control_model(model, control, seed)
    if prompts:
        if control == "shuffled" or model.is_sharded:
            reason = "control='shuffled'" if control == "shuffled" else "a model sharded over processes"
            raise ArgumentError(f"prompts=True: not supported with {reason}. Use prompts=False.")
        metrics, roles = (*prompt_metrics(), *metrics), (*PROMPT_ROLES, *roles)
    with (
        eval_mode(model),
        torch.no_grad(),
        open_process_group(model.device, single_process=model.is_sharded) as process_group,
    ):
        selection = select_metrics(model, metrics, seed)
        check_roles(roles, selection.metric_specs.values())
        sums, samples = collect(model, corpus, selection, options, process_group)
        scores = score(sums.accumulator, sums.relation_metric, (*DEFAULT_ROLES, *roles))
        evidence, family_size = assess(scores, len(sums.addresses), sums.metadata)
        if options.keep_texts:
            documents, texts = samples.relation_documents.samples.values(), samples.first_samples
            evidence = causal_test(model, sums.addresses, evidence, documents, texts, seed + 1, options.progress)
    return build_profile(sums, evidence, family_size, roles)
