"""Synthetic task with several lookups per position: predict the symbols at several fixed offsets.

At every position of a row of random symbols, the model predicts the symbols at given distances back. There is one linear
readout per offset, all from the output of one attention layer. A head returns one weighted sum of values, and a value is the
sum of a symbol embedding and a position embedding. If the weights depend on positions only, a linear readout of one head can
recover only the symbol with the largest weight: for a smaller weight, the convex hulls of the sums of two symbols still
intersect. With two heads a position has two weights, a point in a plane, and all positions at the vertices of a convex
polygon can be read, if training finds them. Weights that also depend on symbols are a nonlinearity and may separate a few
symbols. So may an MLP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal

STEPS, BATCH_SIZE, TEST_ROWS = 500, 32, 512  # training steps, rows per step, test rows
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class OffsetLookupTask:
    """The lookup task.

    Attributes:
        offsets: Distance of each lookup, in positions before the current one.
        symbols: Number of different symbols.
        length: Row length in positions.
    """

    offsets: tuple[int, ...] = (1, 2, 3, 4)
    symbols: int = 16
    length: int = 16

    def __post_init__(self) -> None:
        if not self.offsets or not 0 < min(self.offsets) <= max(self.offsets) < self.length:
            raise ArgumentError(
                f"offsets must be between 1 and {self.length - 1} (length - 1). Got {list(self.offsets)}."
            )

    def sample(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return random symbols, (rows, length)."""
        return torch.randint(self.symbols, (rows, self.length), generator=generator, device="cpu")

    def targets(self, ids: Tensor) -> Tensor:
        """Return the symbols at each offset, from the first position with all of them: (B, T) → (B, T − max offset, k)."""
        max_offset = max(self.offsets)
        return torch.stack([ids[:, max_offset - offset : self.length - offset] for offset in self.offsets], -1)


class LookupModel(nn.Module):
    """Symbol and position embeddings, one attention layer and one readout per lookup. `hidden` > 0 adds an MLP."""

    def __init__(self, task: OffsetLookupTask, heads: int, width: int = 64, hidden: int = 0) -> None:
        super().__init__()
        self.task = task
        self.symbols, self.positions = nn.Embedding(task.symbols, width), nn.Embedding(task.length, width)
        self.attention = MultiHeadAttention(width=width, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) if hidden else None
        self.readout = nn.Linear(width, len(task.offsets) * task.symbols)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T − max offset, k, symbols)."""
        x = self.symbols(ids) + self.positions.weight[: ids.shape[1]]  # (B, T, D)
        hidden = self.attention(x, mask=causal())[:, max(self.task.offsets) :]  # (B, T − max offset, D)
        if self.mlp is not None:
            hidden = hidden + self.mlp(hidden)
        return self.readout(hidden).unflatten(-1, (len(self.task.offsets), -1))


def train_and_evaluate_lookups(
    heads: int,
    task: OffsetLookupTask | None = None,
    *,
    width: int = 64,
    hidden: int = 0,
    steps: int = STEPS,
    seed: int = 0,
) -> tuple[float, float]:
    """Train a model and return its accuracy per lookup, and the fraction of positions with all lookups correct.

    >>> share, every = train_and_evaluate_lookups(2, OffsetLookupTask((1,), symbols=3, length=4), width=8, steps=5)
    >>> share == every
    True
    """
    task = task or OffsetLookupTask()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LookupModel(task, heads, width, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        ids = task.sample(BATCH_SIZE, generator)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 2), task.targets(ids).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return mean_and_joint_lookup_accuracy(model, task.sample(TEST_ROWS, generator))


@torch.no_grad()
def mean_and_joint_lookup_accuracy(model: LookupModel, ids: Tensor) -> tuple[float, float]:
    """Return the accuracy per lookup, and the fraction of positions with all lookups correct."""
    correct = model(ids).argmax(-1) == model.task.targets(ids)  # (B, T − max offset, k)
    return float(correct.float().mean()), float(correct.all(-1).float().mean())
