"""Gates that learn to close: the loss itself finds the heads to keep, all of them weighed together.

A hard-concrete gate (https://arxiv.org/abs/1712.01312) is a random number that is often exactly 0 or exactly 1, and yet has a
slope in log α, which says where it mostly lies. Each head gets one (https://arxiv.org/abs/1905.09418), drawn anew for every
text, and the expected share of open gates is led down to what shall be kept.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.ablation.eval_targets import TargetBatch, ask, askable_units, check_askable
from headwise.analysis.recording.batching import Unit, make_batch
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError
from headwise.kernels.gradients import gradients_enabled
from headwise.model import AnyModel, quiet
from headwise.model.loss import IGNORE
from headwise.progress import Progress
from headwise.spec import Address, SiteAddress
from headwise.training.batches import Windows
from headwise.training.optimizer import make_optimizer, trainable
from headwise.training.recipe import Recipe

BETA, GAMMA, ZETA = 0.33, -0.1, 1.1  # how soft a gate is, and how far it is stretched below 0 and above 1
START = 2.0  # log α at first: nearly every gate is open
LED = 0.5  # the share of the steps in which the share of open gates goes down; then it stays
LONGEST = 128  # tokens of a text, where nobody has said it
BESIDE = Recipe(rate=1e-4, weight_decay=0.0)  # how weights learn beside the gates


def learn_gates(
    model: AnyModel,
    on: Any,
    *,
    keep: float,
    steps: int = 200,
    rate: float = 0.1,
    batch: int = 8,
    context: int | None = None,
    weights: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[Address, float]:
    """How probably each head's gate is open when the share `keep` of all is: near 1 for heads worth keeping.

    What is made small is what `importance` measures: the loss `on` these texts, or how far the mean state of a model without
    output has moved. A step reads `batch` texts, long ones cut at `context` tokens (None: 128, or what the model can read).
    The model stays as it is, unless `weights` is True: then its weights learn beside the gates, in place.
    """
    _check(model, keep, steps, rate, batch)
    units = _units(model, on, context, steps * batch)
    order = Windows(np.arange(len(units) + 1), context=1, seed=seed)  # the order of training; a window is one text
    with gradients_enabled(model), prepared(model, weights), torch.random.fork_rng():
        torch.manual_seed(seed)
        gates = LearnedGates({site.address: len(site.head_ids) for site in model.all_sites()}).to(model.device)
        clean = copy.deepcopy(model).eval() if weights and model.output is None else model
        optimizers = [torch.optim.Adam(gates.parameters(), lr=rate)]
        optimizers += [make_optimizer(dict(trainable(model)), BESIDE)] if weights else []  # pyright: ignore[reportArgumentType]
        first = gates.open_share().item()
        for step in range(steps):
            rows = order.rows(step * batch, batch)[:, 0]  # (B,)
            asked = ask(model, make_batch([units[row] for row in rows], device=model.device))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = _loss(model, clean, asked, gates.sample(batch))
            if not loss.isfinite():
                raise HeadwiseError(f"the loss is {loss.item()} at step {step + 1}; are all weights finite numbers?")
            loss.backward()
            along(gates)
            if weights:
                nn.utils.clip_grad_norm_(model.parameters(), BESIDE.clip)
            for optimizer in optimizers:
                optimizer.step()
            gates.set_open_share(first + (keep - first) * min(1.0, (step + 1) / max(1.0, LED * steps)))
            if progress is not None:
                progress("gates", step + 1, steps)
    return dict(zip(model.spec.addresses, gates.open_chance().tolist(), strict=True))


class LearnedGates(nn.Module):
    """A hard-concrete gate for each of N heads; what is learned is `log_alpha` (N,), layer after layer.

    >>> gates = LearnedGates({SiteAddress("", 0): 4, SiteAddress("", 1): 2}, start=0.0)
    >>> {str(site): tuple(gate.shape) for site, gate in gates.sample(3).items()}
    {'0': (3, 4), '1': (3, 2)}
    >>> round(gates.open_share().item(), 3), gates.evaluation()[SiteAddress("", 1)].tolist()
    (0.688, [0.5, 0.5])
    """

    def __init__(self, heads: Mapping[SiteAddress, int], start: float = START) -> None:
        super().__init__()
        self.heads = dict(heads)
        self.log_alpha = nn.Parameter(torch.full((sum(self.heads.values()),), start))

    def sample(self, B: int) -> dict[SiteAddress, Tensor]:
        """Gates for B texts, drawn anew: (B, H) for each layer, with a slope in log α."""
        u = torch.rand(B, len(self.log_alpha), device=self.log_alpha.device)  # (B, N)
        noise = u.logit(eps=torch.finfo(u.dtype).eps)  # log u − log(1 − u)
        return self._by_layer(torch.sigmoid((noise + self.log_alpha) / BETA))

    def evaluation(self) -> dict[SiteAddress, Tensor]:
        """Gates without chance: (H,) for each layer; 0 where log α is below −2.398, 1 where it is above 2.398."""
        return self._by_layer(torch.sigmoid(self.log_alpha))

    def open_chance(self) -> Tensor:
        """How probable it is that a drawn gate is not 0: (N,)."""
        return torch.sigmoid(self.log_alpha - BETA * math.log(-GAMMA / ZETA))

    def open_share(self) -> Tensor:
        """The share of all gates expected to be open."""
        return self.open_chance().mean()

    @torch.no_grad()
    def set_open_share(self, share: float) -> None:
        """Move all log α by the same amount, so that this share of gates is expected to be open."""
        low, high = -100.0, 100.0
        start = self.log_alpha.clone()
        for _ in range(50):  # the share rises with the amount, so halving finds it
            middle = (low + high) / 2
            self.log_alpha.copy_(start + middle)
            low, high = (middle, high) if self.open_share().item() < share else (low, middle)

    def _by_layer(self, gates: Tensor) -> dict[SiteAddress, Tensor]:
        """Stretch what lies between 0 and 1, cut it off there, and share it out: (…, N) → (…, H) each."""
        cut = (gates * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
        return dict(zip(self.heads, cut.split(list(self.heads.values()), -1), strict=True))


def _check(model: AnyModel, keep: float, steps: int, rate: float, batch: int) -> None:
    check_askable(model, "loss")
    if not model.spec.addresses:
        raise HeadwiseError("this model has no heads left, so there is nothing to gate.")
    if not 0 <= keep <= 1:
        raise HeadwiseError(f"keep is the share of heads that shall stay, from 0 to 1; got {keep}.")
    if steps < 1 or batch < 1 or not 0 < rate < math.inf:
        raise HeadwiseError(f"steps and batch must be at least 1, the rate above 0; got {steps}, {batch} and {rate}.")


def _units(model: AnyModel, on: Any, context: int | None, most: int) -> list[Unit]:
    """The texts that will be read, no more of a large corpus than that."""
    longest = min(LONGEST, model.spec.context) if context is None else context
    if isinstance(on, Reading):
        longest = min(longest, on.frame.longest)
    return list(islice(askable_units(model, Reading.of(model, on, longest, answers=True)), most))


@contextmanager
def prepared(model: AnyModel, weights: bool) -> Iterator[None]:
    """While open, weights that do not learn ask for no gradient; afterwards flags, gradients and modes are as before."""
    before = {value: (value.requires_grad, value.grad) for value in model.parameters()}
    with quiet(model):
        try:
            model.train(weights)
            for value in before:
                value.grad = None
                value.requires_grad_(weights and value.requires_grad)
            yield
        finally:
            for value, (learns, gradient) in before.items():
                value.requires_grad_(learns)
                value.grad = gradient


def _loss(model: AnyModel, clean: AnyModel, batch: TargetBatch, gates: dict[SiteAddress, Tensor]) -> Tensor:
    """The mean loss of a token with these gates; without an output, how far each text's mean state moved, on average."""
    hidden = batch.pick(batch.run(model, gates))  # (B, R, D)
    if batch.targets is None:
        with torch.no_grad():
            wanted = batch.answers(clean, batch.run(clean))  # (B, D)
        return batch.lost(batch.answers(model, hidden), wanted).mean()
    targets = batch.targets if batch.rows is None else batch.targets.gather(1, batch.rows)  # (B, R)
    count = int((targets != IGNORE).sum())
    assert model.output is not None
    return model.output.cross_entropy(hidden.flatten(0, 1), targets.flatten(), total=max(1, count))


def along(gates: LearnedGates) -> None:
    """Add the price of an open gate, λ · Σ P(open), to the slope of the loss: λ such that the sum leads neither up nor down.

    So λ need not be guessed: it is the Lagrange multiplier of the constraint that so many gates are open, as the slopes of
    this step give it. Heads worth more than that open, the others close.
    """
    slope = gates.log_alpha.grad  # (N,)
    assert slope is not None
    chance = gates.open_chance().detach()
    tilt = chance * (1 - chance)  # ∂ Σ P(open) / ∂ log α, (N,)
    price = -(slope @ tilt) / (tilt @ tilt).clamp(min=1e-12)
    slope += price * tilt
