"""Sums and counts of scores by head and bucket of samples. They can be added over batches, shards and processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from headwise.analysis.recording.text_hash_split import BUCKETS, buckets_in_half
from headwise.errors import ArgumentError, suggest_names
from headwise.kernels.rounding_tolerance import to_float64


@dataclass
class Accumulator:
    """Sums and row counts of scores. A mean is a sum divided by its count.

    The scores of one metric form a group, which has the name of its first score.

    Attributes:
        heads: Number of heads.
        fields: Group and column of each score, by name.
        sums: Sums over rows by group, (buckets, heads, scores).
        counts: Number of rows by group, (buckets, heads, scores).

    >>> import torch
    >>> accumulator = Accumulator(heads=2)
    >>> accumulator.add(("entropy",), slice(0, 2), [0, 1], torch.tensor([[[1.], [2.]], [[3.], [4.]]]), torch.ones(2, 1, 1))
    >>> accumulator.mean("entropy")
    array([2., 3.])
    """

    heads: int
    fields: dict[str, tuple[str, int]] = field(default_factory=dict)
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, names: Sequence[str], heads: slice, bucket_ids: Iterable[int], sums: Tensor, counts: Tensor) -> None:
        """Add the sums of a batch.

        Args:
            names: Names of the scores.
            heads: Heads that the sums belong to.
            bucket_ids: Bucket of each sample of the batch.
            sums: Sums over rows, (B, h, scores).
            counts: Number of rows, in a shape that broadcasts to `sums`.
        """
        group = names[0]
        self.register_metrics(names)
        buckets = np.fromiter(bucket_ids, dtype=np.int64) % BUCKETS
        values, rows = to_float64(sums).cpu().numpy(), to_float64(counts).cpu().numpy()
        rows = np.broadcast_to(rows, values.shape)
        for example, bucket in enumerate(buckets):
            self.sums[group][bucket, heads] += values[example]
            self.counts[group][bucket, heads] += rows[example]

    def register_metrics(self, names: Sequence[str]) -> None:
        """Create the arrays of a group of scores, so that the scores exist even if nothing is added."""
        group = names[0]
        if group not in self.sums:
            shape = (BUCKETS, self.heads, len(names))
            self.sums[group], self.counts[group] = np.zeros(shape), np.zeros(shape)
            self.fields |= {name: (group, column) for column, name in enumerate(names)}

    def bucket_sums_and_counts(self, name: str, half: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums and counts of a score, (buckets, heads), for all buckets or for one half of them."""
        if name not in self.fields:
            raise ArgumentError(f"metric {name!r} was not measured; {suggest_names(name, self.fields)}")
        group, column = self.fields[name]
        sums, counts = self.sums[group][..., column], self.counts[group][..., column]
        selected = slice(None) if half is None else buckets_in_half(counts, half)
        return sums[selected], counts[selected]

    def mean(self, name: str, half: int | None = None) -> np.ndarray:
        """Return the mean over all rows or over one half, (heads,). NaN if a head has no rows."""
        sums, counts = self.bucket_sums_and_counts(name, half)
        rows = counts.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rows > 0, sums.sum(0) / rows, np.nan)  # ignore rounding errors in sums without rows

    def merge(self, other: "Accumulator") -> "Accumulator":
        """Return the sum of two accumulators, as if one pass had read both corpora."""
        if self.heads != other.heads:
            raise ArgumentError(
                f"accumulators with {self.heads} and {other.heads} heads cannot be merged. Merge profiles of one model only."
            )
        merged = Accumulator(self.heads, {**self.fields, **other.fields})
        conflict = any(merged.fields[name] != slot for name, slot in self.fields.items())
        if conflict or len(set(merged.fields.values())) < len(merged.fields):
            raise ArgumentError(
                "accumulators of different metrics cannot be merged. Compute both profiles with the same metrics."
            )
        for kind in ("sums", "counts"):
            own_arrays, other_arrays, merged_arrays = (
                getattr(accumulator, kind) for accumulator in (self, other, merged)
            )
            for group in {**own_arrays, **other_arrays}:
                merged_arrays[group] = (
                    sum(arrays[group] for arrays in (own_arrays, other_arrays) if group in arrays) + 0.0
                )
        return merged
