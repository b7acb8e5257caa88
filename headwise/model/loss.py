"""The surprise at the tokens asked for, without ever holding all their logits at once."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.utils.checkpoint import checkpoint

from headwise.model.contract import AnyModel
from headwise.model.transformer import Transformer

IGNORE = -100  # a target that is not asked for
WHOLE = 1 << 24  # logits up to so many (64 MB) are computed in one go, more of them in chunks


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
