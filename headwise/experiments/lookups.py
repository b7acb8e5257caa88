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

STEPS, BATCH, TESTED = 500, 32, 512  # steps, rows in each, rows of the test
RATE = 1e-2


@dataclass(frozen=True)
class LookUps:
    """The task: how many symbols there are, how long a row is, and how far back each look-up goes."""

    offsets: tuple[int, ...] = (1, 2, 3, 4)
    symbols: int = 16
    length: int = 16

    def __post_init__(self) -> None:
        if not self.offsets or not 0 < min(self.offsets) <= max(self.offsets) < self.length:
            raise HeadwiseError(f"offsets must lie between 1 and {self.length - 1}, got {list(self.offsets)}.")

    def draw(self, rows: int, dice: torch.Generator) -> Tensor:
        """Random symbols, (rows, length)."""
        return torch.randint(self.symbols, (rows, self.length), generator=dice)

    def answers(self, ids: Tensor) -> Tensor:
        """What stood at each offset, from the first place that has them all: (B, T) → (B, T − furthest, k)."""
        furthest = max(self.offsets)
        return torch.stack([ids[:, furthest - back : self.length - back] for back in self.offsets], -1)


class LookupModel(nn.Module):
    """Tables of symbols and places, one attention layer, and a readout for each look-up; `hidden` > 0: an MLP between."""

    def __init__(self, task: LookUps, heads: int, width: int = 64, hidden: int = 0) -> None:
        super().__init__()
        self.task = task
        self.symbols, self.places = nn.Embedding(task.symbols, width), nn.Embedding(task.length, width)
        self.attention = MultiHeadAttention(width=width, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) if hidden else None
        self.readout = nn.Linear(width, len(task.offsets) * task.symbols)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) → logits (B, T − furthest, k, symbols)"""
        x = self.symbols(ids) + self.places.weight[: ids.shape[1]]  # (B, T, D)
        found = self.attention(x, mask=causal())[:, max(self.task.offsets) :]  # (B, T − furthest, D)
        if self.mlp is not None:
            found = found + self.mlp(found)
        return self.readout(found).unflatten(-1, (len(self.task.offsets), -1))


def learn_lookups(
    heads: int, task: LookUps | None = None, *, width: int = 64, hidden: int = 0, steps: int = STEPS, seed: int = 0
) -> tuple[float, float]:
    """Train a reader and test it: the share of look-ups it gets right, and of places where it gets all of them right.

    >>> share, every = learn_lookups(2, LookUps((1,), symbols=3, length=4), width=8, steps=5)
    >>> share == every
    True
    """
    task = task or LookUps()
    dice = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        reader = LookupModel(task, heads, width, hidden)
    optimizer = torch.optim.AdamW(reader.parameters(), RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        ids = task.draw(BATCH, dice)
        loss = nn.functional.cross_entropy(reader(ids).flatten(0, 2), task.answers(ids).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return marks(reader, task.draw(TESTED, dice))


@torch.no_grad()
def marks(reader: LookupModel, ids: Tensor) -> tuple[float, float]:
    """The share of look-ups a reader gets right, and of places where it gets all of them right."""
    right = reader(ids).argmax(-1) == reader.task.answers(ids)  # (B, T − furthest, k)
    return float(right.float().mean()), float(right.all(-1).float().mean())
