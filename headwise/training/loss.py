"""What is made small: by default the surprise at the tokens asked for."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.distributed.process_group import Team
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, Transformer
from headwise.training.batches import TokenRows
from headwise.training.optimizer import trainable


class Loss(nn.Module):
    """A model with what it learns from. `lost` gives one number, or several by name: their sum is made small, each of them is
    in the metrics.

    Parameters of its own learn with the model's and are saved in checkpoints, as `loss.…`; what is to stay as it is, a
    teacher, has `requires_grad` off. Only the model goes into training mode.
    """

    name = ""  # what decides this loss, in a line: a run that is taken up again must have the same

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        *,
        total: int | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of some rows: those of `TokenRows`, one by one."""
        return self.lost(TokenRows(ids, targets, padding, source, source_padding), total)

    def lost(self, rows: TokenRows, total: int | None) -> Tensor | dict[str, Tensor]:
        """The mean over the targets that are asked for; with `total` the sum divided by that: parts of a step then add up to
        its mean."""
        raise NotImplementedError

    def learning(self) -> dict[str, nn.Parameter]:
        """All that learns, by name, tied ones once: the model's parameters, then the loss's own."""
        assert isinstance(self.model, nn.Module)
        known = set(self.model.parameters())
        own = {f"loss.{name}": value for name, value in trainable(self) if value not in known}
        return {**dict(trainable(self.model)), **own}


MakeLoss = Callable[[Transformer], Loss]


class LanguageLoss(Loss):
    """ids and targets (B, T) → the mean cross-entropy, in nats, of the targets that are asked for."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__(model)
        if model.output is None:
            raise HeadwiseError(
                'this model has no output over the vocabulary to train; give its spec output="lm" or "mlm".'
            )

    def lost(self, rows: TokenRows, total: int | None) -> Tensor:
        """(B, T), (B, T) → ()"""
        hidden = self.model(rows.ids, hidden=True, **rows.context).flatten(0, 1)  # (B·T, D)
        assert self.model.output is not None
        return self.model.output.cross_entropy(hidden, rows.targets.flatten(), total)


class Losses:
    """The loss of one step, added up over its parts; by name too, where there are several."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.whole, self.parts = torch.zeros((), device=team.device), dict[str, Tensor]()

    def add(self, made: Tensor | dict[str, Tensor]) -> Tensor:
        """What one part of the step gave; the one number its gradients are taken of."""
        size = self.team.size  # the team takes the mean
        if isinstance(made, dict):
            for name, value in made.items():
                self.parts[name] = self.parts.get(name, 0) + value.detach() * size
            made = torch.stack(list(made.values())).sum()
        self.whole += (made * size).detach()
        return made * size

    def mean(self) -> tuple[float, dict[str, float]]:
        """Of the whole team."""
        whole, *parts = self.team.total(float(self.whole), *map(float, self.parts.values()))
        size = self.team.size
        return whole / size, {name: value / size for name, value in zip(self.parts, parts, strict=True)}
