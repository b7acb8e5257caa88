"""Training losses. The default is the cross-entropy of the target tokens."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.distributed.process_group import ProcessGroup
from headwise.errors import UnsupportedModelError
from headwise.model import ModelProtocol, Transformer
from headwise.training.batch_samplers import TrainBatch
from headwise.training.optimizer import trainable_parameters


class ModelWithLoss(nn.Module):
    """Base class of losses. It wraps a model and computes one loss, or several losses by name, which are summed.

    Each named loss is logged. Parameters of the loss are trained with the model and saved in checkpoints as `loss.…`. Set
    `requires_grad=False` on parameters that must not be trained, such as those of a teacher. Only the model is put into
    training mode.

    Attributes:
        name: Short description of the loss. A resumed run must have a loss of the same name.
        model: The model to train.
    """

    name = ""

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
        """Return the loss of the rows of a `TrainBatch`, given as separate tensors."""
        return self.compute_loss(TrainBatch(ids, targets, attention_mask, source, source_attention_mask), total)

    def compute_loss(self, batch: TrainBatch, total: int | None) -> Tensor | dict[str, Tensor]:
        """Return the mean loss over the targets, or the sum divided by `total`, so that micro-batches add up to the mean."""
        raise NotImplementedError

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return all trainable parameters by name, tied ones once: those of the model, then those of the loss."""
        assert isinstance(self.model, nn.Module)
        model_parameters = set(self.model.parameters())
        loss_parameters = {
            f"loss.{name}": value for name, value in trainable_parameters(self) if value not in model_parameters
        }
        return {**dict(trainable_parameters(self.model)), **loss_parameters}


MakeLoss = Callable[[Transformer], ModelWithLoss]


class LanguageLoss(ModelWithLoss):
    """Mean cross-entropy of the targets in nats, from ids and targets (B, T)."""

    def __init__(self, model: ModelProtocol) -> None:
        super().__init__(model)
        if model.output is None:
            raise UnsupportedModelError(
                'model: it has no output layer over the vocabulary. Set output="lm" or output="mlm" in its spec.'
            )

    def compute_loss(self, batch: TrainBatch, total: int | None) -> Tensor:
        """(B, T), (B, T) → ()"""
        hidden = self.model(batch.ids, hidden=True, **batch.model_kwargs).flatten(0, 1)  # (B·T, D)
        assert self.model.output is not None
        return self.model.output.cross_entropy(hidden, batch.targets.flatten(), total)


class LossAccumulator:
    """Accumulates the loss of one step over its micro-batches, in total and by name."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group
        self.total, self.terms = torch.zeros((), device=process_group.device, dtype=torch.float32), dict[str, Tensor]()

    def add_and_scale(self, loss: Tensor | dict[str, Tensor]) -> Tensor:
        """Add the loss of a micro-batch. Return the scalar for the backward pass."""
        size = self.process_group.size  # gradients are averaged over processes
        if isinstance(loss, dict):
            for name, value in loss.items():
                self.terms[name] = self.terms.get(name, 0) + value.detach() * size
            loss = torch.stack(list(loss.values())).sum()
        self.total += (loss * size).detach()
        return loss * size

    def all_reduce_mean(self) -> tuple[float, dict[str, float]]:
        """Return the loss and its terms, averaged over all processes."""
        total, *terms = self.process_group.all_reduce_values(float(self.total), *map(float, self.terms.values()))
        size = self.process_group.size
        return total / size, {name: value / size for name, value in zip(self.terms, terms, strict=True)}
