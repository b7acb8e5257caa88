"""What a student learns from its teacher's logits, and from the text, without ever holding all logits at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.distillation.teacher_logits_cache import Kept
from headwise.model import AnyModel
from headwise.model.loss import WHOLE

Sums = tuple[Tensor, Tensor]  # of the divergence, and of the cross-entropy


def kl_and_surprise(
    student: AnyModel, teacher: AnyModel, hidden: tuple[Tensor, Tensor], targets: Tensor, temperature: float
) -> Sums:
    """States (N, D) of both and targets (N,) → the sums over tokens of KL(teacher ‖ student) at a temperature, and of the
    cross-entropy. In chunks of tokens, whose logits are made again in the backward pass: all of them never exist at once."""
    vocab = min(student.spec.vocab, teacher.spec.vocab)  # one of them may be padded

    def chunk(ours: Tensor, theirs: Tensor, wanted: Tensor) -> Sums:
        logits = logits_of(student, ours)  # (n, V)
        with torch.no_grad():
            taught = logits_of(teacher, theirs)[:, :vocab].div(temperature).log_softmax(-1)
        learned = logits[:, :vocab].div(temperature).log_softmax(-1)
        apart = F.kl_div(learned, taught, reduction="sum", log_target=True)
        return apart, F.cross_entropy(logits, wanted, reduction="sum")

    return in_chunks(chunk, WHOLE // vocab, *hidden, targets)


def logits_of(model: AnyModel, states: Tensor) -> Tensor:
    """(n, D) → (n, V), in float32. What is learned is a difference of logits, so they have the precision of the weights, as
    cross-entropy has, also where autocast makes the rest quicker."""
    assert model.output is not None
    if not torch.is_autocast_enabled(states.device.type):
        return model.output(states).float()
    own = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    with torch.autocast(states.device.type, enabled=False):
        return model.output(states.to(own)).float()


def in_chunks(chunk: Callable[..., Sums], size: int, *tensors: Tensor) -> Sums:
    """A function of tokens, some at a time."""
    parts = list(zip(*(one.split(max(1, size)) for one in tensors), strict=True))
    if len(parts) == 1:
        return chunk(*parts[0])
    sums = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    one, other = zip(*sums, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.stack(one).sum(), torch.stack(other).sum()


def kl_of_kept(student: AnyModel, hidden: Tensor, targets: Tensor, taught: Kept, temperature: float) -> Sums:
    """States (n, D) and targets (n,) → the sums of KL(teacher ‖ student), the rest of the vocabulary taken as one, and of the
    cross-entropy."""

    def chunk(states: Tensor, wanted: Tensor, logs: Tensor, ids: Tensor, rest: Tensor) -> Sums:
        logits = logits_of(student, states)  # (n, V)
        learned = logits.div(temperature).log_softmax(-1)
        apart = (logs.exp() * (logs - learned.gather(-1, ids))).sum()
        others = learned.scatter(-1, ids, -torch.inf).logsumexp(-1)  # (n,)
        some = rest > -torch.inf
        apart = apart + (rest[some].exp() * (rest[some] - others[some])).sum()
        return apart, F.cross_entropy(logits, wanted, reduction="sum")

    return in_chunks(chunk, WHOLE // student.spec.vocab, hidden, targets, *taught)
