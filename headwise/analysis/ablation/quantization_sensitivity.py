"""Quantization sensitivity of heads: the loss increase when one head alone is quantized.

The KL divergence KL(unmodified ‖ quantized) of the next-token distribution is measured together with the loss increase.
It equals the loss increase on texts sampled from the model itself, is never negative and depends less on the choice of
texts, so bits are allocated by it.

One forward pass over the unmodified blocks caches the residual stream. At each layer the weights of a head are quantized
in place, the remaining layers are run, and the weights are restored bitwise. Heads that share a KV head are quantized
together with it. Each result is appended to a file as soon as it is measured, so an interrupted run can resume.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.ablated_rerun import FullRerun, PartialRerun
from headwise.analysis.ablation.eval_targets import TargetBatch, check_metric, evaluable_samples, make_target_batch
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.analysis.ablation.temporary_quantization import (
    WEIGHT_PARTS,
    QuantizationTarget,
    check_parts,
    check_writable,
    quantization_targets,
    resolve_heads,
    temporarily_quantized_part,
)
from headwise.analysis.metrics.statistics import bootstrap_interval
from headwise.analysis.recording.batching import make_batches, reachable_hook_points
from headwise.errors import ArgumentError, FileFormatError, HeadwiseError, UnsupportedModelError, suggest_names
from headwise.heads.balanced_basis import LayerHeadMatrices, change_basis
from headwise.heads.head import AttentionLayerProtocol, HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.io.atomic_write import write_atomic
from headwise.io.resolve_path import read_text
from headwise.model import ModelProtocol, Transformer, eval_mode
from headwise.model.weights_digest import weights_digest
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec.weight_bits import GROUP_SIZE, Basis, check_basis, check_group_size

BATCH_TOKENS = 2048  # tokens per forward pass


@dataclass(frozen=True)
class QuantizationCost:
    """Cost of quantizing one part of one KV head, with its 95% confidence interval over texts.

    Attributes:
        kv_head: Address of the KV head.
        heads: Addresses of the query heads that use it, separated by spaces.
        part: "qk", "vo", "keys" or "values".
        bits: Bits per value.
        loss_increase: Loss increase in nats per token.
        low: Lower bound of `loss_increase`.
        high: Upper bound of `loss_increase`.
        kl_divergence: KL divergence from the unmodified model in nats per token. Equal to `loss_increase` for a model
            without an output layer.
    """

    kv_head: str
    heads: str
    part: str
    bits: int
    loss_increase: float
    low: float
    high: float
    kl_divergence: float


@dataclass(frozen=True, eq=False)
class SensitivityResult:
    """Quantization cost of each part of each head, with sums per text for confidence intervals.

    Iterating yields one `QuantizationCost` per target; `result["5.1", "qk", 4]` returns one of them.

    Attributes:
        metadata: Settings of the run, digests of model and texts, metric and clean loss.
        targets: Measured combinations of KV head, part and bits.
        loss_sums: Summed loss increase, (targets, texts).
        kl_sums: Summed KL divergence from the unmodified model, (targets, texts).
        counts: Number of target tokens of each text, (texts,).
    """

    metadata: dict[str, Any]
    targets: tuple[QuantizationTarget, ...]
    loss_sums: np.ndarray
    kl_sums: np.ndarray
    counts: np.ndarray

    @property
    def metric(self) -> str:
        """Unit of the costs: nats per token, or 1 − cosine for a model without an output layer."""
        return self.metadata["metric"]

    @property
    def clean_loss(self) -> float | None:
        """Loss of the unmodified model in nats per token. None if the model has no output layer."""
        return self.metadata["clean_loss"]

    @property
    def loss_increase(self) -> np.ndarray:
        """Mean loss increase of each target, (targets,)."""
        return self.loss_sums.sum(1) / self.counts.sum()

    @property
    def kl_divergence(self) -> np.ndarray:
        """Mean KL divergence of each target, (targets,)."""
        return self.kl_sums.sum(1) / self.counts.sum()

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95% confidence interval of the loss increase from a bootstrap over texts: low and high, (targets,) each."""
        return bootstrap_interval(self.loss_sums.T, np.broadcast_to(self.counts[:, None], self.loss_sums.T.shape))

    def __repr__(self) -> str:
        from headwise.ui.result_text import quantization_sensitivity_table

        return quantization_sensitivity_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import quantization_sensitivity_table

        return quantization_sensitivity_table(self).as_html()

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[QuantizationCost]:
        for target, *values in zip(self.targets, self.loss_increase, *self.interval, self.kl_divergence, strict=True):
            yield QuantizationCost(
                target.kv_head, " ".join(target.heads), target.part, target.bits, *map(float, values)
            )

    def __getitem__(self, query: tuple[str, str, int]) -> QuantizationCost:
        """Return the cost of one part of one KV head at a number of bits: `costs["5.1", "qk", 4]`."""
        for cost in self:
            if (cost.kv_head, cost.part, cost.bits) == query:
                return cost
        kv_head, part, bits = query
        measured = [f"{target.kv_head}:{target.part} at {target.bits}" for target in self.targets]
        raise ArgumentError(
            f"query: part {part!r} of KV head {kv_head!r} was not measured at {bits} bits; "
            f"{suggest_names(f'{kv_head}:{part}', measured)}"
        )

    def table_rows(self) -> list[list[str | int | float]]:
        """Return table rows, highest cost first. Columns are the fields of `QuantizationCost`."""
        return [list(asdict(cost).values()) for cost in sorted(self, key=lambda cost: -cost.loss_increase)]

    def to_dict(self) -> dict[str, Any]:
        """Return metadata and costs as plain data for JSON, without the sums per text."""
        costs = [asdict(cost) for cost in self]
        for cost in costs:
            cost |= {name: None if np.isnan(cost[name]) else cost[name] for name in ("low", "high")}
        return self.metadata | {"costs": costs}

    @staticmethod
    def load(path: str | Path) -> "SensitivityResult":
        """Load the results that `sensitivity(…, out=path)` has written so far."""
        metadata, measured = _read_results(Path(path))
        if metadata is None:
            raise FileFormatError(
                f"{path}: missing, empty or not a sensitivity file. Create it with hw.sensitivity(model, corpus, out=path)."
            )
        return _make_result(metadata, tuple(measured), measured)


@shows_progress
@torch.no_grad()
def sensitivity(
    model: ModelProtocol,
    corpus: Any = None,
    *,
    bits: Sequence[int] = (4,),
    parts: Sequence[str] = WEIGHT_PARTS,
    heads: HeadPattern = "*",
    group_size: int = GROUP_SIZE,
    basis: Basis | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    out: str | Path | None = None,
    progress: ProgressOption = None,
) -> SensitivityResult:
    """Measure the loss increase when one head alone is quantized.

    The weights are restored bitwise. Heads that share a KV head are quantized together with it.

    Args:
        model: The model to measure.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the default corpus of the model.
        bits: Numbers of bits to measure.
        parts: Parts to measure: "qk" (W_Q and W_K), "vo" (W_V and W_O), "keys" and "values" (of the KV cache).
        heads: Head pattern. "*" selects all heads. A KV head is measured if any of its query heads is selected.
        group_size: Number of weights that share a quantization scale.
        basis: Basis in which weights are quantized: "given", "balanced" or "random". None is "balanced" for headwise models
            and "given" for attached models, whose position encoding is unknown.
        max_length: Plain text is split into chunks of this many tokens. None is 256, or the model's context if shorter.
        batch_tokens: Maximum number of tokens per batch.
        out: File to which each result is appended. Repeat the call with the same file to resume an interrupted run.
        progress: Called with a label, the number of targets done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Cost of each part of each KV head at each number of bits.

    Raises:
        ArgumentError: If parts, bits, group size or basis are invalid.
        FileFormatError: If `out` has the results of another model, corpus or setting.
        UnsupportedModelError: If the weights of a layer cannot be quantized in place.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> costs = sensitivity(model, ["To be or not to be", "that is the question"], bits=(8, 2))
    >>> len(costs), costs.targets[0]
    (16, QuantizationTarget(kv_head='0.0', heads=('0.0',), part='qk', bits=8))
    """
    progress = callback_of(progress)
    check_metric(model, "loss")
    parts, bits = tuple(parts), tuple(bits)
    check_parts(parts, bits)
    check_group_size(group_size)
    basis = basis or default_quantization_basis(model)
    check_basis(basis)
    if basis != "given" and not isinstance(model, Transformer):
        raise UnsupportedModelError(
            f"basis={basis!r}: not supported for attached models, because their position encoding is unknown. "
            f"Use basis='given'."
        )
    selected = resolve_heads(
        heads, tuple(a for hook_point in reachable_hook_points(model, heads) for a in hook_point.head_addresses)
    )
    layers = [layer for layer in model.attention_layers() if layer.spec.head_ids]
    targets_by_layer = {
        layer.hook_point.address: quantization_targets(layer, selected, parts, bits) for layer in layers
    }
    for layer in layers:
        if targets_by_layer[layer.hook_point.address] and set(parts) & set(WEIGHT_PARTS):
            check_writable(layer)
    with eval_mode(model):
        samples = list(evaluable_samples(model, eval_corpus(model, corpus, max_length)))
        batches = [
            make_target_batch(model, batch) for batch in make_batches(samples, batch_tokens, device=model.device)
        ]
        rerunner = make_rerunner(model, batches)
        metadata = {
            "model": weights_digest(model), "texts": _fingerprint(batches), "group_size": group_size, "basis": basis,
            "metric": "1 − cosine" if batches[0].targets is None else "nats per token",
            "clean_loss": rerunner.mean_clean_loss(),
            "counts": torch.cat([item.targets_per_text for item in batches]).tolist(),
        }  # fmt: skip
        all_targets = tuple(target for item in targets_by_layer.values() for target in item)
        measured = {} if out is None else _resume(Path(out), metadata)
        done = sum(target in measured for target in all_targets)
        for layer in layers:
            pending = [target for target in targets_by_layer[layer.hook_point.address] if target not in measured]
            if pending:
                base = (
                    change_basis(LayerHeadMatrices.from_layer(layer), layer.spec, basis)
                    if set(parts) & set(WEIGHT_PARTS)
                    else None
                )
                clean_calls = (
                    rerunner.clean_calls(layer) if any(target.part not in WEIGHT_PARTS for target in pending) else None
                )
                rerunner.advance_to(layer)
                for target in pending:
                    measured[target] = rerunner.measure_change(
                        partial(_part_temporarily_quantized, layer, target, base, group_size, clean_calls)
                    )
                    _append_result(out, target, measured[target])
                    done += 1
                    if progress is not None:
                        progress("quantization sensitivity", done, len(all_targets))
    return _make_result(metadata, all_targets, measured)


def _part_temporarily_quantized(
    layer: AttentionLayerProtocol,
    target: QuantizationTarget,
    base: LayerHeadMatrices | None,
    group_size: int,
    clean_calls: list[AttentionCall] | None,
    batch: int,
) -> AbstractContextManager[None]:
    return temporarily_quantized_part(
        layer,
        target,
        base or LayerHeadMatrices.from_layer(layer),
        group_size,
        None if clean_calls is None else clean_calls[batch],
    )


def default_quantization_basis(model: ModelProtocol) -> Basis:
    """Return the basis in which weights are quantized by default."""
    return "balanced" if isinstance(model, Transformer) else "given"


def make_rerunner(model: ModelProtocol, batches: list[TargetBatch]) -> FullRerun:
    """Rerun block by block for single-stack headwise models, and with full forward passes for all others."""
    if isinstance(model, Transformer) and model.spec.kind != "encoder-decoder":
        return PartialRerun(model, batches)
    return FullRerun(model, batches)


MeasuredLosses = dict[QuantizationTarget, list[list[float]]]


def _make_result(
    metadata: dict[str, Any], targets: tuple[QuantizationTarget, ...], measured: MeasuredLosses
) -> SensitivityResult:
    counts = np.array(metadata["counts"], dtype=np.float64)
    losses = np.array([measured[target] for target in targets], dtype=np.float64).reshape(len(targets), 2, len(counts))
    return SensitivityResult(metadata, targets, losses[:, 0], losses[:, 1], counts)


def _fingerprint(batches: list[TargetBatch]) -> str:
    hasher = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.ids, batch.targets, batch.source):
            hasher.update(b"-" if tensor is None else str(tensor.tolist()).encode())
    return hasher.hexdigest()[:16]


# File format: one line with the metadata, then one line per result.


def _read_results(path: Path) -> tuple[dict[str, Any] | None, MeasuredLosses]:
    """Read metadata and results. A line truncated by a crash, and the lines after it, are ignored."""
    lines = []
    for line in read_text(path).splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not lines:
        return None, {}
    metadata, measured = lines[0], {}
    try:
        num_texts = len(metadata["counts"])
        for record in lines[1:]:
            target = QuantizationTarget(record["kv_head"], tuple(record["heads"]), record["part"], record["bits"])
            measured[target] = [[float(value) for value in row] for row in record["lost"]]
            if [len(row) for row in measured[target]] != [num_texts, num_texts]:
                raise ValueError
    except (KeyError, TypeError, ValueError):
        raise FileFormatError(f"{path}: not a sensitivity file, or damaged. Choose another file for out=.") from None
    return metadata, measured


def _resume(path: Path, metadata: dict[str, Any]) -> MeasuredLosses:
    """Return the results already in the file, and rewrite it without a truncated last line."""
    stored, measured = _read_results(path)
    keys = ("model", "texts", "group_size", "basis", "metric", "counts")
    if stored is not None and any(stored.get(name) != metadata[name] for name in keys):
        changed = [name for name in keys if stored.get(name) != metadata[name]]
        raise FileFormatError(
            f"{path}: has the results of another run. Different: {', '.join(changed)}. "
            f"Choose another file for out=, or delete this one."
        )
    lines = [metadata if stored is None else stored]
    lines += [asdict(target) | {"lost": lost} for target, lost in measured.items()]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return measured


def _append_result(path: str | Path | None, target: QuantizationTarget, lost: list[list[float]]) -> None:
    """Append one result and flush it to disk."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(target) | {"lost": lost}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise HeadwiseError(
            f"{path}: cannot be written ({error}). The results already in it are intact. "
            f"Free space or fix the permissions, then repeat the call to resume."
        ) from error
