"""What few bits cost, head by head: the loss gained when one head alone is stored at b bits.

Beside the loss stands the drift, KL(untouched ‖ rounded) of what is said of the next token: the loss that would be gained if
texts were the model's own. It is never below 0 and far less a matter of which texts were read, so bits are shared out by it.

One clean walk through the blocks keeps the stream; at each layer a head's weights are rounded in place, the rest of the
network is run, and the weights are put back bitwise. Where heads share keys, the key head and all who read it are one: what
is shared can only be stored once. Each answer is kept in a file as soon as it is known, so a run that stops goes on.
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
from headwise.analysis.ablation.head_outputs import eval_corpus
from headwise.analysis.ablation.temporary_quantization import (
    WEIGHT_PARTS,
    QuantizationTarget,
    check_parts,
    check_writable,
    quantization_targets,
    quantized_part,
    resolve_heads,
)
from headwise.analysis.metrics.statistics import bootstrap_interval
from headwise.analysis.recording.batching import make_batches, reachable_hook_points
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.balanced_basis import LayerHeadMatrices, change_basis
from headwise.heads.head import AttentionLayerProtocol, HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.io.atomic_write import write_atomic
from headwise.io.resolve_path import read_text
from headwise.model import ModelProtocol, Transformer, eval_mode
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress
from headwise.spec.weight_bits import GROUP_SIZE, Basis, check_basis, check_group_size

BATCH_TOKENS = 2048  # run at once


@dataclass(frozen=True)
class QuantizationCost:
    """What storing one part at so many bits costs, with its 95 % interval over texts."""

    kv_head: str
    heads: str
    part: str
    bits: int
    loss_increase: float  # loss
    low: float
    high: float
    kl_divergence: float  # KL from the untouched model, nats a token; without an output the same as the loss


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What each part of each head costs at few bits; sums by text are kept, so that intervals can be drawn."""

    metadata: dict[str, Any]  # what was asked, of which model, on which texts
    targets: tuple[QuantizationTarget, ...]
    loss_sums: np.ndarray  # (questions, texts): what each text loses
    kl_sums: np.ndarray  # (questions, texts): how far the model has drifted on it
    counts: np.ndarray  # (texts,): tokens it was asked for

    @property
    def metric(self) -> str:
        """What is measured."""
        return self.metadata["metric"]

    @property
    def clean_loss(self) -> float | None:
        """The untouched model's loss; none where a model has no output."""
        return self.metadata["clean_loss"]

    @property
    def loss_increase(self) -> np.ndarray:
        """What each question costs, (questions,)."""
        return self.loss_sums.sum(1) / self.counts.sum()

    @property
    def kl_divergence(self) -> np.ndarray:
        """How far the model drifts by each, (questions,)."""
        return self.kl_sums.sum(1) / self.counts.sum()

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95 % of the bootstrap over texts: low and high, (questions,)."""
        return bootstrap_interval(self.loss_sums.T, np.broadcast_to(self.counts[:, None], self.loss_sums.T.shape))

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[QuantizationCost]:
        for target, *values in zip(self.targets, self.loss_increase, *self.interval, self.kl_divergence, strict=True):
            yield QuantizationCost(
                target.kv_head, " ".join(target.heads), target.part, target.bits, *map(float, values)
            )

    def __getitem__(self, query: tuple[str, str, int]) -> QuantizationCost:
        """What one part of one key head costs at so many bits: costs["5.1", "qk", 4]."""
        for cost in self:
            if (cost.kv_head, cost.part, cost.bits) == query:
                return cost
        kv_head, part, bits = query
        measured = [f"{target.kv_head}:{target.part} at {target.bits}" for target in self.targets]
        raise HeadwiseError(
            f"{kv_head}:{part} at {bits} bits was not measured; {suggest_names(f'{kv_head}:{part}', measured)}"
        )

    def table_rows(self) -> list[list[str | int | float]]:
        """A table, the costliest first; its columns are the fields of `QuantizationCost`."""
        return [list(asdict(cost).values()) for cost in sorted(self, key=lambda cost: -cost.loss_increase)]

    def to_dict(self) -> dict[str, Any]:
        """Everything but sums, as plain data."""
        costs = [asdict(cost) for cost in self]
        for cost in costs:
            cost |= {name: None if np.isnan(cost[name]) else cost[name] for name in ("low", "high")}
        return self.metadata | {"costs": costs}

    @staticmethod
    def load(path: str | Path) -> "Sensitivity":
        """Read what `sensitivity(…, out=path)` has written so far."""
        metadata, measured = _read_results(Path(path))
        if metadata is None:
            raise HeadwiseError(f"{path} holds no sensitivities; hw.sensitivity(model, corpus, out=path) writes them.")
        return _make_result(metadata, tuple(measured), measured)


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
    progress: Progress | None = None,
) -> Sensitivity:
    """What the loss gains when one head alone is stored at few bits; the model stays as it is, bitwise.

    `parts` are qk (W_Q and W_K), vo (W_V and W_O), keys and values (those cached). Weights are rounded in their balanced
    basis (`basis`: given, balanced, random; for somebody else's model given, for its positions are not ours to know).
    `corpus` are texts, `max_length` cuts plain text into units of so many tokens, `batch_tokens` is how many are run at
    once. `out` is a file in which every answer is kept as soon as it is known: the same call goes on where it stopped.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> costs = sensitivity(model, ["To be or not to be", "that is the question"], bits=(8, 2))
    >>> len(costs), costs.targets[0]
    (16, QuantizationTarget(kv_head='0.0', heads=('0.0',), part='qk', bits=8))
    """
    check_metric(model, "loss")
    parts, bits = tuple(parts), tuple(bits)
    check_parts(parts, bits)
    check_group_size(group_size)
    basis = basis or default_weight_basis(model)
    check_basis(basis)
    if basis != "given" and not isinstance(model, Transformer):
        raise HeadwiseError(
            "a basis is changed in headwise's own models, whose positions are known; use basis='given'."
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
            "metric": "1 − cosine" if batches[0].targets is None else "nats a token",
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
                        partial(_quantized_change, layer, target, base, group_size, clean_calls)
                    )
                    _append_result(out, target, measured[target])
                    done += 1
                    if progress is not None:
                        progress("what few bits cost", done, len(all_targets))
    return _make_result(metadata, all_targets, measured)


def _quantized_change(
    layer: AttentionLayerProtocol,
    target: QuantizationTarget,
    base: LayerHeadMatrices | None,
    group_size: int,
    clean_calls: list[AttentionCall] | None,
    batch: int,
) -> AbstractContextManager[None]:
    return quantized_part(
        layer,
        target,
        base or LayerHeadMatrices.from_layer(layer),
        group_size,
        None if clean_calls is None else clean_calls[batch],
    )


def default_weight_basis(model: ModelProtocol) -> Basis:
    """The basis heads are rounded in unless another is asked for."""
    return "balanced" if isinstance(model, Transformer) else "given"


def make_rerunner(model: ModelProtocol, batches: list[TargetBatch]) -> FullRerun:
    """Block by block where a model is ours and of one stack, by whole passes elsewhere."""
    if isinstance(model, Transformer) and model.spec.kind != "encoder-decoder":
        return PartialRerun(model, batches)
    return FullRerun(model, batches)


MeasuredLosses = dict[QuantizationTarget, list[list[float]]]


def _make_result(
    metadata: dict[str, Any], targets: tuple[QuantizationTarget, ...], measured: MeasuredLosses
) -> Sensitivity:
    counts = np.array(metadata["counts"], dtype=np.float64)
    losses = np.array([measured[target] for target in targets], dtype=np.float64).reshape(len(targets), 2, len(counts))
    return Sensitivity(metadata, targets, losses[:, 0], losses[:, 1], counts)


def _fingerprint(batches: list[TargetBatch]) -> str:
    hasher = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.ids, batch.targets, batch.source):
            hasher.update(b"-" if tensor is None else str(tensor.tolist()).encode())
    return hasher.hexdigest()[:16]


# The file: a line that says what is asked, then a line for each answer.


def _read_results(path: Path) -> tuple[dict[str, Any] | None, MeasuredLosses]:
    """What a file holds; a line that was cut off when the process died is left out."""
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
        raise HeadwiseError(f"{path} holds something else than sensitivities; choose another file.") from None
    return metadata, measured


def _resume(path: Path, metadata: dict[str, Any]) -> MeasuredLosses:
    """What is known already; a new file begins with what is asked."""
    stored, measured = _read_results(path)
    keys = ("model", "texts", "group_size", "basis", "metric", "counts")
    if stored is not None and any(stored.get(name) != metadata[name] for name in keys):
        changed = [name for name in keys if stored.get(name) != metadata[name]]
        raise HeadwiseError(f"{path} holds sensitivities of another run ({', '.join(changed)}); choose another file.")
    lines = [metadata if stored is None else stored]
    lines += [asdict(target) | {"lost": lost} for target, lost in measured.items()]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())  # without a line that was cut off
    return measured


def _append_result(path: str | Path | None, target: QuantizationTarget, lost: list[list[float]]) -> None:
    """One more line, on the disk at once."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(target) | {"lost": lost}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); answers that are in it are kept.") from error
