"""What is made small: by default the surprise at the tokens asked for, without ever holding all their logits at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions
from torch.utils.checkpoint import checkpoint

from headwise.errors import HeadwiseError
from headwise.model import AnyModel, Transformer
from headwise.train.batches import IGNORE
from headwise.train.optimise import trainable
from headwise.train.team import Team

WHOLE = 1 << 24  # logits up to so many (64 MB) are computed in one go, more of them in chunks


class Loss(nn.Module):
    """A model with what it learns from. `forward` takes what `LanguageLoss.forward` takes and gives one number, or several
    by name: their sum is made small, each of them is in the metrics.

    Parameters of its own learn with the model's and are saved in checkpoints, as `loss.…`; what is to stay as it is, a
    teacher, has `requires_grad` off. Only the model goes into training mode.
    """

    name = ""  # what decides this loss, in a line: a run that is taken up again must have the same

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

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

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        *,
        total: int | None = None,
    ) -> Tensor:
        """(B, T), (B, T) → (). With `total` the sum is divided by that: parts of a step then add up to its mean."""
        both = {} if source is None else {"source": source, "source_padding": source_padding}
        hidden = self.model(ids, padding=padding, hidden=True, **both).flatten(0, 1)  # (B·T, D)
        return cross_entropy(self.model, hidden, targets.flatten(), total)


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


def cross_entropy(model: AnyModel, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
    """Hidden states (N, D) and targets (N,) → the mean cross-entropy; in chunks where the vocabulary is large."""
    if not isinstance(model, Transformer):
        return _cross_entropy_elsewhere(model, hidden, targets, total)
    output = model.output
    assert output is not None
    if output.transform is not None:  # masked: few of many are asked for
        asked = targets != IGNORE
        hidden, targets = hidden[asked], targets[asked]  # (n, D), (n,)
    hidden = output.prepare(hidden)
    vocabulary = output.vocabulary
    chunks = None
    if len(targets) * model.spec.vocab > WHOLE:
        chunks = LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling())
        if torch.is_autocast_enabled(hidden.device.type):  # the chunked form is outside autocast's reach
            hidden = hidden.to(vocabulary.weight.dtype)
    summed = F.linear_cross_entropy(
        hidden,
        vocabulary.weight,
        targets,
        linear_bias=vocabulary.bias,
        ignore_index=IGNORE,
        reduction="mean" if total is None else "sum",
        options=chunks,
    )
    return summed if total is None else summed / total


def _cross_entropy_elsewhere(model: AnyModel, hidden: Tensor, targets: Tensor, total: int | None) -> Tensor:
    """The same where the head is not ours: logits of a chunk at a time, made again in the backward pass."""
    asked = targets != IGNORE
    hidden, targets = hidden[asked], targets[asked]  # (n, D), (n,)
    step = max(1, WHOLE // model.spec.vocab)

    def surprise(states: Tensor, wanted: Tensor) -> Tensor:
        assert model.output is not None
        return F.cross_entropy(model.output(states).float(), wanted, reduction="sum")

    parts = list(zip(hidden.split(step), targets.split(step), strict=True))
    if len(parts) > 1:
        summed = torch.stack([checkpoint(surprise, *part, use_reentrant=False) for part in parts]).sum()  # pyright: ignore
    else:
        summed = surprise(hidden, targets)
    return summed / (len(targets) if total is None else total)
