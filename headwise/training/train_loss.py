"""What is made small: by default the surprise at the tokens asked for."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.distributed.process_group import ProcessGroup
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, Transformer
from headwise.training.batch_samplers import TrainBatch
from headwise.training.optimizer import trainable_parameters


class TrainLoss(nn.Module):
    """A model with what it learns from. `compute_loss` gives one number, or several by name: their sum is made small, each of
    them is in the metrics.

    Parameters of its own learn with the model's and are saved in checkpoints, as `loss.…`; what is to stay as it is, a
    teacher, has `requires_grad` off. Only the model goes into training mode.
    """

    name = ""  # what decides this loss, in a line: a run that is taken up again must have the same

    def __init__(self, model: ModelProtocol) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_attention_mask: Tensor | None = None,
        *,
        total: int | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of some rows: those of `TrainBatch`, one by one."""
        return self.compute_loss(TrainBatch(ids, targets, attention_mask, source, source_attention_mask), total)

    def compute_loss(self, batch: TrainBatch, total: int | None) -> Tensor | dict[str, Tensor]:
        """The mean over the targets that are asked for; with `total` the sum divided by that: parts of a step then add up to
        its mean."""
        raise NotImplementedError

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """All that learns, by name, tied ones once: the model's parameters, then the loss's own."""
        assert isinstance(self.model, nn.Module)
        model_parameters = set(self.model.parameters())
        loss_parameters = {
            f"loss.{name}": value for name, value in trainable_parameters(self) if value not in model_parameters
        }
        return {**dict(trainable_parameters(self.model)), **loss_parameters}


MakeLoss = Callable[[Transformer], TrainLoss]


class LanguageLoss(TrainLoss):
    """ids and targets (B, T) → the mean cross-entropy, in nats, of the targets that are asked for."""

    def __init__(self, model: ModelProtocol) -> None:
        super().__init__(model)
        if model.output is None:
            raise HeadwiseError(
                'this model has no output over the vocabulary to train; give its spec output="lm" or "mlm".'
            )

    def compute_loss(self, batch: TrainBatch, total: int | None) -> Tensor:
        """(B, T), (B, T) → ()"""
        hidden = self.model(batch.ids, hidden=True, **batch.model_kwargs).flatten(0, 1)  # (B·T, D)
        assert self.model.output is not None
        return self.model.output.cross_entropy(hidden, batch.targets.flatten(), total)


class LossAccumulator:
    """The loss of one step, added up over its parts; by name too, where there are several."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group
        self.total, self.terms = torch.zeros((), device=process_group.device), dict[str, Tensor]()

    def add_and_scale(self, loss: Tensor | dict[str, Tensor]) -> Tensor:
        """What one part of the step gave; the one number its gradients are taken of."""
        size = self.process_group.size  # the team takes the mean
        if isinstance(loss, dict):
            for name, value in loss.items():
                self.terms[name] = self.terms.get(name, 0) + value.detach() * size
            loss = torch.stack(list(loss.values())).sum()
        self.total += (loss * size).detach()
        return loss * size

    def all_reduce_mean(self) -> tuple[float, dict[str, float]]:
        """Of the whole team."""
        total, *terms = self.process_group.all_reduce_values(float(self.total), *map(float, self.terms.values()))
        size = self.process_group.size
        return total / size, {name: value / size for name, value in zip(self.terms, terms, strict=True)}
