"""Quantization cost of several heads together, compared with the cost of each head alone.

The interaction of two heads is loss(a, b) − loss(a) − loss(b) + loss; it is 0 for independent heads. As in `sensitivity`,
weights are quantized in place, in their balanced basis, and restored bitwise. Heads that share a KV head are quantized
together.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.eval_targets import check_metric, evaluable_samples, make_target_batch
from headwise.analysis.ablation.quantization_sensitivity import BATCH_TOKENS, default_quantization_basis, make_rerunner
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.analysis.ablation.temporary_quantization import (
    WEIGHT_PARTS,
    QuantizationTarget,
    check_parts,
    check_writable,
    quantization_targets,
    temporarily_quantized_part,
)
from headwise.analysis.recording.batching import make_batches
from headwise.errors import ArgumentError, suggest_names
from headwise.heads.balanced_basis import LayerHeadMatrices, change_basis
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec.weight_bits import GROUP_SIZE

HeadSet = tuple[str, ...]  # KV heads whose weights are quantized together


@dataclass(frozen=True, eq=False)
class JointQuantizationCosts:
    """Quantization cost of sets of heads, per text.

    Attributes:
        sets: Sets of KV heads.
        loss_sums: Summed loss increase, (sets, texts).
        kl_sums: Summed KL divergence from the unmodified model, (sets, texts).
        counts: Number of target tokens of each text, (texts,).
    """

    sets: tuple[HeadSet, ...]
    loss_sums: np.ndarray
    kl_sums: np.ndarray
    counts: np.ndarray

    def loss_increase_per_text(self, *kv_heads: str) -> np.ndarray:
        """Return the summed loss increase of each text for a set of KV heads, (texts,)."""
        return self.loss_sums[self.sets.index(kv_heads)]

    def pair_interaction(self, first: str, second: str) -> np.ndarray:
        """Return loss(first, second) − loss(first) − loss(second) + loss, summed over each text: (texts,)."""
        return (
            self.loss_increase_per_text(first, second)
            - self.loss_increase_per_text(first)
            - self.loss_increase_per_text(second)
        )


@shows_progress
@torch.no_grad()
def joint_quantization_costs(
    model: ModelProtocol,
    corpus: Any,
    sets: Sequence[Sequence[str]],
    bits: int,
    *,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: ProgressOption = None,
) -> JointQuantizationCosts:
    """Measure the loss increase when all weights of several KV heads are quantized together.

    Args:
        model: The model to measure. Its weights are restored bitwise.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the default corpus of the model.
        sets: Sets of KV heads, by address. Pair interactions need both single heads and the pair.
        bits: Bits per weight.
        max_length: Plain text is split into chunks of this many tokens.
        batch_tokens: Maximum number of tokens per batch.
        progress: Called with a label, the number of sets done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Loss increase and KL divergence of each set and text.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> costs = joint_quantization_costs(model, ["To be or not to be"], [("0.1",), ("1.0",), ("0.1", "1.0")], bits=2)
    >>> costs.pair_interaction("0.1", "1.0").shape
    (1,)
    """
    progress = callback_of(progress)
    check_metric(model, "loss")
    check_parts(WEIGHT_PARTS, (bits,))
    layers = [layer for layer in model.attention_layers() if layer.spec.head_ids]
    targets_of: dict[str, list[QuantizationTarget]] = {}  # KV head → its weight pairs
    layer_of: dict[str, int] = {}  # KV head → index of its layer
    for index, layer in enumerate(layers):
        for entry in quantization_targets(layer, model.spec.head_addresses, WEIGHT_PARTS, (bits,)):
            targets_of.setdefault(entry.kv_head, []).append(entry)
            layer_of[entry.kv_head] = index
    requested = tuple(tuple(head_set) for head_set in sets)
    for key in dict.fromkeys(key for head_set in requested for key in head_set):
        if key not in targets_of:
            raise ArgumentError(f"sets: unknown KV head {key!r}; {suggest_names(key, targets_of)}")
        check_writable(layers[layer_of[key]])
    if not all(requested):
        raise ArgumentError(
            f"sets: contains an empty set at index {requested.index(())}. Name at least one KV head in each set."
        )
    used = {layer_of[key] for head_set in requested for key in head_set}
    base = {
        index: change_basis(
            LayerHeadMatrices.from_layer(layers[index]), layers[index].spec, default_quantization_basis(model)
        )
        for index in used
    }

    @contextmanager
    def quantized_set(head_set: HeadSet, batch: int) -> Iterator[None]:
        with ExitStack() as stack:
            for key in head_set:
                for entry in targets_of[key]:
                    layer = layers[layer_of[key]]
                    stack.enter_context(temporarily_quantized_part(layer, entry, base[layer_of[key]], GROUP_SIZE, None))
            yield

    results: dict[HeadSet, list[list[float]]] = {}
    with eval_mode(model):
        samples = list(evaluable_samples(model, eval_corpus(model, corpus, max_length)))
        batches = [
            make_target_batch(model, batch) for batch in make_batches(samples, batch_tokens, device=model.device)
        ]
        rerunner = make_rerunner(model, batches)

        # in the order of layers, because the rerunner only moves forward
        ordered_sets = sorted(set(requested), key=lambda head_set: min(layer_of[key] for key in head_set))
        for done, head_set in enumerate(ordered_sets, 1):
            rerunner.advance_to(layers[min(layer_of[key] for key in head_set)])
            results[head_set] = rerunner.measure_change(partial(quantized_set, head_set))
            if progress is not None:
                progress("joint quantization cost", done, len(ordered_sets))
    counts = to_float64(torch.cat([entry.targets_per_text for entry in batches])).numpy()
    losses = np.array([results[head_set] for head_set in requested]).reshape(len(requested), 2, len(counts))
    return JointQuantizationCosts(requested, losses[:, 0], losses[:, 1], counts)
