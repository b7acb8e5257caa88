"""Several look-ups at once: a task in which one row of attention must bring back what stood at several places.

At every place of a row of random symbols the model names the symbols that stood so many places before: one readout for
each, all from what one attention layer wrote. A head brings back one weighted sum of values, and a value is the sum of what
stands for its symbol and for its place. While weights depend on places alone, a linear readout of one head can find the
symbol of most weight and no other: moved by a lesser weight, the convex hulls of two symbols' sums still meet. With two
heads a place has two weights, a point in a plane, and places at the corners of a convex figure can all be read, if training
finds them. Weights that depend on symbols too are a nonlinearity, and may unpick a few symbols; so may an MLP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal

STEPS, BATCH_SIZE, TEST_ROWS = 500, 32, 512  # steps, rows in each, rows of the test
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class OffsetLookupTask:
    """The task: how many symbols there are, how long a row is, and how far back each look-up goes."""

    offsets: tuple[int, ...] = (1, 2, 3, 4)
    symbols: int = 16
    length: int = 16

    def __post_init__(self) -> None:
        if not self.offsets or not 0 < min(self.offsets) <= max(self.offsets) < self.length:
            raise HeadwiseError(f"offsets must lie between 1 and {self.length - 1}, got {list(self.offsets)}.")

    def sample(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random symbols, (rows, length)."""
        return torch.randint(self.symbols, (rows, self.length), generator=generator)

    def targets(self, ids: Tensor) -> Tensor:
        """What stood at each offset, from the first place that has them all: (B, T) → (B, T − furthest, k)."""
        max_offset = max(self.offsets)
        return torch.stack([ids[:, max_offset - offset : self.length - offset] for offset in self.offsets], -1)


class LookupModel(nn.Module):
    """Tables of symbols and places, one attention layer, and a readout for each look-up; `hidden` > 0: an MLP between."""

    def __init__(self, task: OffsetLookupTask, heads: int, width: int = 64, hidden: int = 0) -> None:
        super().__init__()
        self.task = task
        self.symbols, self.positions = nn.Embedding(task.symbols, width), nn.Embedding(task.length, width)
        self.attention = MultiHeadAttention(width=width, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) if hidden else None
        self.readout = nn.Linear(width, len(task.offsets) * task.symbols)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) → logits (B, T − furthest, k, symbols)"""
        x = self.symbols(ids) + self.positions.weight[: ids.shape[1]]  # (B, T, D)
        hidden = self.attention(x, mask=causal())[:, max(self.task.offsets) :]  # (B, T − furthest, D)
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
    """Train a reader and test it: the share of look-ups it gets right, and of places where it gets all of them right.

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
    return lookup_accuracies(model, task.sample(TEST_ROWS, generator))


@torch.no_grad()
def lookup_accuracies(model: LookupModel, ids: Tensor) -> tuple[float, float]:
    """The share of look-ups a reader gets right, and of places where it gets all of them right."""
    correct = model(ids).argmax(-1) == model.task.targets(ids)  # (B, T − furthest, k)
    return float(correct.float().mean()), float(correct.all(-1).float().mean())
