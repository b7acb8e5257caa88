"""KL divergence from teacher logits and cross-entropy of the text, in chunks, so that all logits never exist at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.distillation.teacher_logits_cache import TopLogits
from headwise.model import ModelProtocol
from headwise.model.chunked_cross_entropy import MAX_LOGITS

LossSums = tuple[Tensor, Tensor]  # summed KL divergence, summed cross-entropy


def kl_and_nll(
    student: ModelProtocol, teacher: ModelProtocol, hidden: tuple[Tensor, Tensor], targets: Tensor, temperature: float
) -> LossSums:
    """Return the sums over tokens of KL(teacher ‖ student) at a temperature and of the cross-entropy.

    Inputs are hidden states (N, D) of both models and targets (N,). Logits are computed in chunks of tokens and recomputed in
    the backward pass.
    """
    vocab = min(student.spec.vocab, teacher.spec.vocab)  # one of them may have padding rows

    def chunk(student_states: Tensor, teacher_states: Tensor, target_ids: Tensor) -> LossSums:
        logits = logits_of(student, student_states)  # (n, V)
        with torch.no_grad():
            teacher_log_probs = logits_of(teacher, teacher_states)[:, :vocab].div(temperature).log_softmax(-1)
        student_log_probs = logits[:, :vocab].div(temperature).log_softmax(-1)
        kl = F.kl_div(student_log_probs, teacher_log_probs, reduction="sum", log_target=True)
        return kl, F.cross_entropy(logits, target_ids, reduction="sum")

    return sum_over_chunks(chunk, MAX_LOGITS // vocab, *hidden, targets)


def logits_of(model: ModelProtocol, states: Tensor) -> Tensor:
    """Return logits in float32: (n, D) → (n, V).

    The loss depends on differences of logits, so they are computed in the precision of the weights, even under autocast.
    """
    assert model.output is not None
    if not torch.is_autocast_enabled(states.device.type):
        return model.output(states).float()
    weight_dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    with torch.autocast(states.device.type, enabled=False):
        return model.output(states.to(weight_dtype)).float()


def sum_over_chunks(chunk: Callable[..., LossSums], chunk_size: int, *tensors: Tensor) -> LossSums:
    """Sum a loss over chunks of tokens."""
    parts = list(zip(*(values.split(max(1, chunk_size)) for values in tensors), strict=True))
    if len(parts) == 1:
        return chunk(*parts[0])
    sums = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    values, nlls = zip(*sums, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.stack(values).sum(), torch.stack(nlls).sum()


def kl_from_topk(
    student: ModelProtocol, hidden: Tensor, targets: Tensor, teacher_logits: TopLogits, temperature: float
) -> LossSums:
    """Return the sums of KL(teacher ‖ student) and of the cross-entropy, from the largest teacher logits.

    Inputs are hidden states (n, D) and targets (n,). All tokens outside the top k count as one outcome.
    """

    def chunk(states: Tensor, target_ids: Tensor, log_probs: Tensor, ids: Tensor, rest_log_prob: Tensor) -> LossSums:
        logits = logits_of(student, states)  # (n, V)
        student_log_probs = logits.div(temperature).log_softmax(-1)
        kl = (log_probs.exp() * (log_probs - student_log_probs.gather(-1, ids))).sum()
        other_log_prob = student_log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)  # (n,)
        has_rest = rest_log_prob > -torch.inf
        kl = kl + (rest_log_prob[has_rest].exp() * (rest_log_prob[has_rest] - other_log_prob[has_rest])).sum()
        return kl, F.cross_entropy(logits, target_ids, reduction="sum")

    return sum_over_chunks(chunk, MAX_LOGITS // student.spec.vocab, hidden, targets, *teacher_logits)
