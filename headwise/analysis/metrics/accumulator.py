"""Sums and counts, by measure, head and bucket of units. They add up: over batches, over shards, over processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from headwise.analysis.recording.text_hash_split import BUCKETS, buckets_in_half
from headwise.errors import HeadwiseError, suggest_names


@dataclass
class Accumulator:
    """For every group of measures two arrays, (buckets, heads, measures): sums, and how many rows they were summed over.

    >>> import torch
    >>> accumulator = Accumulator(heads=2)
    >>> accumulator.add(("entropy",), slice(0, 2), [0, 1], torch.tensor([[[1.], [2.]], [[3.], [4.]]]), torch.ones(2, 1, 1))
    >>> accumulator.mean("entropy")
    array([2., 3.])
    """

    heads: int
    fields: dict[str, tuple[str, int]] = field(default_factory=dict)  # a measure: its group and its place there
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, names: Sequence[str], heads: slice, bucket_ids: Iterable[int], sums: Tensor, counts: Tensor) -> None:
        """Add what a batch gave: sums (B, h, measures), counts that broadcast to them; a bucket per row of the batch."""
        group = names[0]
        self.register_metrics(names)
        buckets = np.fromiter(bucket_ids, dtype=np.int64) % BUCKETS
        values, rows = sums.double().cpu().numpy(), counts.double().cpu().numpy()
        rows = np.broadcast_to(rows, values.shape)
        for example, bucket in enumerate(buckets):
            self.sums[group][bucket, heads] += values[example]
            self.counts[group][bucket, heads] += rows[example]

    def register_metrics(self, names: Sequence[str]) -> None:
        """Make room for a group of measures, so that it is there though nothing may come."""
        group = names[0]
        if group not in self.sums:
            shape = (BUCKETS, self.heads, len(names))
            self.sums[group], self.counts[group] = np.zeros(shape), np.zeros(shape)
            self.fields |= {name: (group, column) for column, name in enumerate(names)}

    def bucket_sums_and_counts(self, name: str, half: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sums and counts of a measure, (buckets, heads), of all buckets or of those in one half."""
        if name not in self.fields:
            raise HeadwiseError(f"{name!r} was not measured; {suggest_names(name, self.fields)}")
        group, column = self.fields[name]
        sums, counts = self.sums[group][..., column], self.counts[group][..., column]
        selected = slice(None) if half is None else buckets_in_half(counts, half)
        return sums[selected], counts[selected]

    def mean(self, name: str, half: int | None = None) -> np.ndarray:
        """The mean over all rows, (heads,), or over those of one half; NaN where there are none."""
        sums, counts = self.bucket_sums_and_counts(name, half)
        rows = counts.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rows > 0, sums.sum(0) / rows, np.nan)  # what rounding left in an empty sum is nothing

    def merge(self, other: "Accumulator") -> "Accumulator":
        """Both together, as if one pass had seen everything."""
        if self.heads != other.heads:
            raise HeadwiseError(f"accumulators of {self.heads} and of {other.heads} heads cannot be merged.")
        merged = Accumulator(self.heads, {**self.fields, **other.fields})
        conflict = any(merged.fields[name] != slot for name, slot in self.fields.items())
        if conflict or len(set(merged.fields.values())) < len(merged.fields):
            raise HeadwiseError(
                "accumulators of different metrics cannot be merged; measure both with the same metrics."
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
