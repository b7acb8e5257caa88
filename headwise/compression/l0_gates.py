"""Rank heads with learned L0 gates: training on the loss selects all heads to keep jointly.

A hard-concrete gate (https://arxiv.org/abs/1712.01312) is a random number that is often exactly 0 or 1, but differentiable
in its location parameter log α. Each head has one gate (https://arxiv.org/abs/1905.09418), sampled for every text. During
training the expected fraction of open gates is lowered to the fraction of heads to keep.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.ablation.eval_targets import TargetBatch, check_metric, evaluable_samples, make_target_batch
from headwise.analysis.ablation.gradient_memory import GradientMemoryPlan, summed_cross_entropy
from headwise.analysis.recording.batching import TextSample, make_batch
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.heads.learned_gates import LearnedGates, add_sparsity_gradient
from headwise.kernels.enable_grad import enable_gradients
from headwise.model import ModelProtocol, eval_mode
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec import Address, LayerAddress
from headwise.training.batch_samplers import ShuffledWindowSampler
from headwise.training.optimizer import make_optimizer, trainable_parameters
from headwise.training.recipe import Recipe

ANNEAL_FRACTION = 0.5  # fraction of the steps in which the fraction of open gates is lowered
DEFAULT_MAX_LENGTH = 128  # tokens per text
WEIGHT_RECIPE = Recipe(learning_rate=1e-4, weight_decay=0.0)  # for weights that are trained together with the gates


@shows_progress
def learn_gates(
    model: ModelProtocol,
    corpus: Any,
    *,
    keep: float,
    steps: int = 200,
    rate: float = 0.1,
    batch: int = 8,
    context: int | None = None,
    train_weights: bool = False,
    seed: int = 0,
    progress: ProgressOption = None,
) -> dict[Address, float]:
    """Train gates and return the probability that the gate of each head is open.

    The training loss is the loss that `importance` measures: that of the texts, or the change of the mean hidden state if the
    model has no language modeling head.

    Args:
        model: The model. It is not changed unless `train_weights` is True.
        corpus: A text, a list of texts, a path or a Corpus.
        keep: Expected fraction of open gates at the end of training.
        steps: Training steps.
        rate: Learning rate of the gates.
        batch: Texts per step.
        context: Maximum number of tokens per text; longer texts are truncated. None: 128, or the context of the model.
        train_weights: Also train the weights of the model, in place.
        seed: Seed of gates and batches.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Probability of an open gate for each head: near 1 for heads to keep.
    """
    progress = callback_of(progress)
    _check(model, keep, steps, rate, batch)
    samples = _select_samples(model, corpus, context, steps * batch)
    # Shuffles the texts: each window is the index of one text.
    sampler = ShuffledWindowSampler(np.arange(len(samples) + 1), context=1, seed=seed)
    with enable_gradients(model), gate_training(model, train_weights=train_weights), torch.random.fork_rng():
        torch.manual_seed(seed)
        gates = LearnedGates(
            {hook_point.address: len(hook_point.head_ids) for hook_point in model.gathered_hook_points()}
        ).to(model.device)
        first = make_batch(samples[:1], device=model.device)
        memory = GradientMemoryPlan.measure(model, first.ids, first.source)
        reference_model = copy.deepcopy(model).eval() if train_weights and model.output is None else model
        optimizers = [torch.optim.Adam(gates.parameters(), lr=rate)]
        optimizers += [make_optimizer(dict(trainable_parameters(model)), WEIGHT_RECIPE)] if train_weights else []  # pyright: ignore[reportArgumentType]
        initial_fraction = gates.open_fraction().item()
        for step in range(steps):
            rows = sampler.training_rows(step * batch, batch)[:, 0]  # (B,)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = _accumulate_gradients(
                model, reference_model, [samples[row] for row in rows], gates.sample(batch), memory
            )
            if not math.isfinite(loss):
                raise HeadwiseError(
                    f"loss: it is not finite. Got {loss} at step {step + 1}. "
                    "Check the model weights for NaN and infinity."
                )
            add_sparsity_gradient(gates)
            if train_weights:
                nn.utils.clip_grad_norm_(model.parameters(), WEIGHT_RECIPE.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
            gates.set_open_fraction(
                initial_fraction + (keep - initial_fraction) * min(1.0, (step + 1) / max(1.0, ANNEAL_FRACTION * steps))
            )
            if progress is not None:
                progress("gates", step + 1, steps)
    return dict(zip(model.spec.head_addresses, gates.open_probability().tolist(), strict=True))


def _check(model: ModelProtocol, keep: float, steps: int, rate: float, batch: int) -> None:
    check_metric(model, "loss")
    if not model.spec.head_addresses:
        raise UnsupportedModelError("model: it has no heads, so there is nothing to gate. Use a model with heads.")
    if not 0 <= keep <= 1:
        raise ArgumentError(f"keep: the fraction of remaining heads must be from 0 to 1. Got {keep}. Use keep=0.5.")
    if steps < 1 or batch < 1 or not 0 < rate < math.inf:
        raise ArgumentError(
            "steps, batch, rate: steps and batch must be at least 1, and rate a finite number above 0. "
            f"Got steps={steps}, batch={batch}, rate={rate}. Use the defaults: steps=200, batch=8, rate=0.1."
        )


def _select_samples(model: ModelProtocol, corpus: Any, context: int | None, max_samples: int) -> list[TextSample]:
    """Return at most `max_samples` texts that can be evaluated, without tokenizing the remaining corpus."""
    max_length = min(DEFAULT_MAX_LENGTH, model.spec.context) if context is None else context
    if isinstance(corpus, TokenizedCorpus):
        max_length = min(max_length, corpus.chunking.max_length)
    return list(
        islice(evaluable_samples(model, TokenizedCorpus.of(model, corpus, max_length, needs_targets=True)), max_samples)
    )


@contextmanager
def gate_training(model: ModelProtocol, *, train_weights: bool) -> Iterator[None]:
    """Disable gradients of weights that are not trained inside the context. Restore flags, gradients and modes after it."""
    saved = {parameter: (parameter.requires_grad, parameter.grad) for parameter in model.parameters()}
    with eval_mode(model):
        try:
            model.train(train_weights)
            for parameter in saved:
                parameter.grad = None
                parameter.requires_grad_(train_weights and parameter.requires_grad)
            yield
        finally:
            for parameter, (requires_grad, gradient) in saved.items():
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient


def _accumulate_gradients(
    model: ModelProtocol,
    reference_model: ModelProtocol,
    samples: list[TextSample],
    gates: dict[LayerAddress, Tensor],
    memory: GradientMemoryPlan,
) -> float:
    """Add the gradients of one step to gates and trained weights, in as many parts as the memory needs. Return the loss."""
    max_length = max(sample.num_batch_tokens * (2 if sample.source else 1) for sample in samples)
    size = max(1, memory.max_tokens // max_length)
    batches = [
        make_target_batch(model, make_batch(samples[i : i + size], device=model.device))
        for i in range(0, len(samples), size)
    ]
    total = sum(1 if batch.targets is None else int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    leaves = {layer: gate.detach().requires_grad_() for layer, gate in gates.items()}
    loss_sum, start = 0.0, 0
    for batch in batches:
        rows = slice(start, start := start + len(batch.ids))
        batch_gates = {layer: leaf[rows] for layer, leaf in leaves.items()}
        fraction = len(batch.ids) / len(samples)
        with memory.recompute_blocks_if_large(model, batch.num_tokens):
            loss = _loss_with_gates(model, reference_model, batch, batch_gates, fraction, max(1, total))
            loss.backward()
        loss_sum += float(loss.detach())
    torch.autograd.backward(list(gates.values()), [leaf.grad for leaf in leaves.values()])
    return loss_sum


def _loss_with_gates(
    model: ModelProtocol,
    reference_model: ModelProtocol,
    batch: TargetBatch,
    gates: dict[LayerAddress, Tensor],
    fraction: float,
    total: int,
) -> Tensor:
    """Return the loss of a part of a step with these gates: per token, or the change of the mean hidden states.

    Args:
        model: The model.
        reference_model: The model before training.
        batch: Texts of the part.
        gates: Gates of the heads, (B, H) by layer.
        fraction: Number of texts of the part divided by all texts of the step.
        total: Number of targets of the step.
    """
    hidden = batch.select_target_rows(batch.final_hidden_states(model, gates))  # (B, R, D)
    if batch.targets is None:
        with torch.no_grad():
            reference = batch.score_hidden_states(reference_model, batch.final_hidden_states(reference_model))  # (B, D)
        return batch.loss_increase(batch.score_hidden_states(model, hidden), reference).mean() * fraction
    targets = (
        batch.targets if batch.target_positions is None else batch.targets.gather(1, batch.target_positions)
    )  # (B, R)
    return summed_cross_entropy(model, hidden.flatten(0, 1), targets.flatten()) / total
