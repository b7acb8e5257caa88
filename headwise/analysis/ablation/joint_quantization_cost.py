"""What heads cost at few bits together, beside what each of them costs alone.

A pair is coupled as far as loss(a, b) − loss(a) − loss(b) + loss is not 0. As in `sensitivity`, weights are rounded in place,
in their balanced basis, and put back bitwise; heads that share keys are one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.eval_targets import check_metric, evaluable_samples, make_target_batch
from headwise.analysis.ablation.head_outputs import eval_corpus
from headwise.analysis.ablation.sensitivity import BATCH_TOKENS, default_weight_basis, make_rerunner
from headwise.analysis.ablation.temporary_quantization import (
    WEIGHT_PARTS,
    QuantizationTarget,
    check_parts,
    check_writable,
    quantization_targets,
    quantized_part,
)
from headwise.analysis.recording.batching import make_batches
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.balanced_basis import LayerHeadMatrices, change_basis
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec.weight_bits import GROUP_SIZE

HeadSet = tuple[str, ...]  # key heads whose weights are at few bits at once


@dataclass(frozen=True, eq=False)
class JointQuantizationCosts:
    """What sets of heads cost, text by text."""

    sets: tuple[HeadSet, ...]
    loss_sums: np.ndarray  # (sets, texts): what each text loses
    kl_sums: np.ndarray  # (sets, texts): how far the model has drifted on it
    counts: np.ndarray  # (texts,): tokens it was asked for

    def loss_increase_per_text(self, *kv_heads: str) -> np.ndarray:
        """What a set of key heads costs each text, (texts,)."""
        return self.loss_sums[self.sets.index(kv_heads)]

    def pair_interaction(self, first: str, second: str) -> np.ndarray:
        """loss(one, other) − loss(one) − loss(other) + loss, summed over each text: (texts,)."""
        return (
            self.loss_increase_per_text(first, second)
            - self.loss_increase_per_text(first)
            - self.loss_increase_per_text(second)
        )


@torch.no_grad()
def joint_quantization_costs(
    model: ModelProtocol,
    corpus: Any,
    sets: Sequence[Sequence[str]],
    bits: int,
    *,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> JointQuantizationCosts:
    """What the loss gains when all weights of some key heads, named by addresses, are stored at few bits at once.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> costs = joint_quantization_costs(model, ["To be or not to be"], [("0.1",), ("1.0",), ("0.1", "1.0")], bits=2)
    >>> costs.pair_interaction("0.1", "1.0").shape
    (1,)
    """
    check_metric(model, "loss")
    check_parts(WEIGHT_PARTS, (bits,))
    layers = [layer for layer in model.attention_layers() if layer.spec.head_ids]
    targets_of: dict[str, list[QuantizationTarget]] = {}  # of each key head
    layer_of: dict[str, int] = {}  # and its layer
    for index, layer in enumerate(layers):
        for entry in quantization_targets(layer, model.spec.head_addresses, WEIGHT_PARTS, (bits,)):
            targets_of.setdefault(entry.kv_head, []).append(entry)
            layer_of[entry.kv_head] = index
    requested = tuple(tuple(head_set) for head_set in sets)
    for key in dict.fromkeys(key for head_set in requested for key in head_set):
        if key not in targets_of:
            raise HeadwiseError(f"there is no key head {key}; {suggest_names(key, targets_of)}")
        check_writable(layers[layer_of[key]])
    if not all(requested):
        raise HeadwiseError("a set of heads is empty; name at least one key head in each.")
    used = {layer_of[key] for head_set in requested for key in head_set}
    base = {
        index: change_basis(
            LayerHeadMatrices.from_layer(layers[index]), layers[index].spec, default_weight_basis(model)
        )
        for index in used
    }

    @contextmanager
    def quantized_set(head_set: HeadSet, batch: int) -> Iterator[None]:
        with ExitStack() as stack:
            for key in head_set:
                for entry in targets_of[key]:
                    layer = layers[layer_of[key]]
                    stack.enter_context(quantized_part(layer, entry, base[layer_of[key]], GROUP_SIZE, None))
            yield

    results: dict[HeadSet, list[list[float]]] = {}
    with eval_mode(model):
        samples = list(evaluable_samples(model, eval_corpus(model, corpus, max_length)))
        batches = [
            make_target_batch(model, batch) for batch in make_batches(samples, batch_tokens, device=model.device)
        ]
        rerunner = make_rerunner(model, batches)

        # as the walk goes
        ordered_sets = sorted(set(requested), key=lambda head_set: min(layer_of[key] for key in head_set))
        for done, head_set in enumerate(ordered_sets, 1):
            rerunner.advance_to(layers[min(layer_of[key] for key in head_set)])
            results[head_set] = rerunner.measure_change(partial(quantized_set, head_set))
            if progress is not None:
                progress("heads at few bits together", done, len(ordered_sets))
    counts = torch.cat([entry.targets_per_text for entry in batches]).double().numpy()
    losses = np.array([results[head_set] for head_set in requested]).reshape(len(requested), 2, len(counts))
    return JointQuantizationCosts(requested, losses[:, 0], losses[:, 1], counts)
