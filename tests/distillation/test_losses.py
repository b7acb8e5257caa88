"""Each loss against a closed form or a plain implementation, and 0 for equal models."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.analysis.recording.recording import record
from headwise.distillation import DistillConfig, attention_kl, logit_loss
from headwise.distillation.distill import distill_loss_factory
from headwise.distillation.distill_losses import relation_head_count, split_relation_heads
from headwise.distillation.distillation_loss import DistillationLoss
from headwise.distillation.teacher_logits_cache import top_k_log_probs
from headwise.distributed import run_in_subprocess
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.model import Transformer
from tests.distillation.tiny import VOCAB, make_model
from tests.distillation.tiny import make_batch as some_rows

TEXTS = ["to be or not to be", "that is the question", "whether it is nobler"]


def make_distillation(student: Transformer, teacher: Transformer, **options) -> DistillationLoss:
    loss = distill_loss_factory(teacher, DistillConfig(**options), TEXTS)(student)
    assert isinstance(loss, DistillationLoss)
    return loss


@pytest.mark.parametrize("losses", ["logits", "hidden", "maps", "qkv", ("logits", "hidden", "maps", "qkv")])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_distill_loss_identical_student_is_zero(losses, kind: str) -> None:
    teacher = make_model(kind=kind)
    student = copy.deepcopy(teacher)
    student.tokenizer = teacher.tokenizer
    loss = make_distillation(student, teacher, losses=losses, alpha=1.0, ce_weight=0.0, head_pairs="order")
    ids, targets = some_rows()
    values = loss(ids, targets)
    assert set(values) == ({losses} if isinstance(losses, str) else set(losses))
    total = torch.stack(list(values.values())).sum()
    assert float(total.detach()) == pytest.approx(0, abs=1e-6)
    total.backward()
    assert max(float(p.grad.abs().max()) for p in student.parameters() if p.grad is not None) < 1e-5


def test_logits_loss_equals_kl_definition() -> None:
    student, teacher = make_model(1), make_model(2, layers=3)
    ids, targets = some_rows()
    losses = make_distillation(student, teacher, temperature=3.0, alpha=0.7)(ids, targets)
    is_target = targets != -100
    zs, zt = student(ids)[is_target].double(), teacher(ids)[is_target].double()
    p = (zt / 3).softmax(-1)
    kl = (p * (p.log() - (zs / 3).log_softmax(-1))).sum(-1).mean()
    assert float(losses["logits"].detach()) == pytest.approx(0.7 * 9 * float(kl.detach()), rel=1e-5)
    nll = F.cross_entropy(zs, targets[is_target])
    assert float(losses["text"].detach()) == pytest.approx(0.3 * float(nll.detach()), rel=1e-5)


def test_kl_high_temperature_gradient_is_logit_difference() -> None:
    """The gradient of T² KL of logits z for T → ∞ is (z_s − z_t) / V, both centered (https://arxiv.org/abs/1503.02531)."""
    V, T = 8, 300.0
    model = Transformer(
        hw.ModelSpec(vocab=V, context=4, layers=1, attention=hw.AttentionSpec(width=V, heads=1), tied=False)
    )
    assert model.output is not None
    with torch.no_grad():
        model.output.vocabulary.weight.copy_(torch.eye(V))
    generator = torch.Generator().manual_seed(0)
    student_logits, teacher_logits = torch.randn(2, 5, V, generator=generator)
    student_logits.requires_grad_()
    kl, _ = logit_loss.kl_and_nll(model, model, (student_logits, teacher_logits), torch.zeros(5, dtype=torch.long), T)
    (grad,) = torch.autograd.grad(kl * T * T, student_logits)
    centered = [z - z.mean(-1, keepdim=True) for z in (student_logits.detach(), teacher_logits)]
    torch.testing.assert_close(grad, (centered[0] - centered[1]) / V, rtol=0.02, atol=2e-3)


def losses_and_grads(
    loss: DistillationLoss, ids: Tensor, targets: Tensor
) -> tuple[dict[str, float], dict[str, Tensor]]:
    loss.zero_grad()
    losses = loss(ids, targets)
    torch.stack(list(losses.values())).sum().backward()
    grads = {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}
    return {name: float(value.detach()) for name, value in losses.items()}, grads


@pytest.mark.parametrize("loss_name", ["logits", "maps", "qkv"])
def test_distill_loss_small_blocks_equal_full(loss_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = make_model(1, rotary=True, kv_heads=2), make_model(2, layers=3, heads=2)
    ids, targets = some_rows(T=23)
    loss = make_distillation(student, teacher, losses=loss_name)
    full, grads = losses_and_grads(loss, ids, targets)
    monkeypatch.setattr(logit_loss, "MAX_LOGITS", 3 * VOCAB)  # three tokens
    monkeypatch.setattr(attention_kl, "BLOCK_ROWS", 5)
    blockwise, blockwise_grads = losses_and_grads(loss, ids, targets)
    assert blockwise == pytest.approx(full, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(blockwise_grads[name], grad, rtol=1e-4, atol=1e-6)


def test_maps_loss_equals_row_kl_definition() -> None:
    student, teacher = make_model(1, layers=1, rotary=True, kv_heads=2), make_model(2, heads=2)
    pairs = [("0.0", "1.1"), ("0.3", "0.0"), ("0.2", "1.0")]
    ids, targets = some_rows()
    losses = make_distillation(student, teacher, losses="maps", head_pairs=pairs)(ids, targets)
    recordings = []
    for model in (student, teacher):
        with record(model) as recording:
            model(ids)
        recordings.append(recording)
    expected, is_target = [], targets != -100
    for student_head, teacher_head in pairs:
        q, p = recordings[0][student_head].map().double(), recordings[1][teacher_head].map().double()  # (B, T, S)
        kl = (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)  # (B, T)
        expected.append(kl[is_target].mean())
    assert float(losses["maps"].detach()) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)


def test_row_kl_gradient_masked_rows_equals_autograd() -> None:
    """A different mask, a fully masked row, and a row that does not count."""
    generator = torch.Generator().manual_seed(0)
    student_scores, teacher_scores = torch.randn(2, 2, 3, 5, 7, generator=generator, dtype=torch.double)
    student_scores[0, :, :2, 4:] = teacher_scores[1, 1, 2, :3] = -math.inf
    student_scores[1, 0, 3] = teacher_scores[1, 2, 0] = -math.inf
    real_tokens = torch.ones(2, 5, dtype=torch.bool)
    real_tokens[0, 4] = False
    student_scores.requires_grad_()
    loss = attention_kl._RowKL.apply(student_scores, teacher_scores, real_tokens)
    expected = torch.zeros((), dtype=torch.double)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)).tolist():
        visible = student_scores[b, h, t] > -math.inf
        p = teacher_scores[b, h, t, visible]
        if real_tokens[b, t] and len(p) and p.max() > -math.inf:
            p, q = p.softmax(0), student_scores[b, h, t, visible].softmax(0)
            expected = expected + (torch.xlogy(p, p) - torch.xlogy(p, q)).sum() / 3
    torch.testing.assert_close(loss, expected)
    grads = [torch.autograd.grad(value, student_scores, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(grads[0], grads[1])


def test_distill_loss_backward_saves_no_attention_map() -> None:
    """Tensors saved for the backward pass are smaller than one attention map of one head."""
    T = 1024
    spec = hw.ModelSpec(vocab=VOCAB, context=T, layers=1, attention=hw.AttentionSpec(width=8, heads=2))
    torch.manual_seed(0)
    student, teacher = Transformer(spec), Transformer(spec)
    student.tokenizer = teacher.tokenizer = make_model().tokenizer
    largest = [0]

    def pack(saved: Tensor) -> Tensor:
        largest[0] = max(largest[0], saved.numel())
        return saved

    ids, targets = some_rows(1, T)
    loss = make_distillation(student, teacher, losses=("maps", "qkv"), head_pairs="order", ce_weight=0.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        losses = loss(ids, targets)
    torch.stack(list(losses.values())).sum().backward()
    assert 0 < largest[0] < T * T / 4


def peak_memory_of_logits_loss(N: int, V: int) -> float:
    """Return the peak memory of distillation by logits, in MB."""
    spec = hw.ModelSpec(vocab=V, context=4, layers=1, attention=hw.AttentionSpec(width=16, heads=2))
    student, teacher = Transformer(spec), Transformer(spec)
    hidden = torch.randn(N, 16, requires_grad=True), torch.randn(N, 16)
    targets = torch.randint(V, (N,))

    def work() -> None:
        kl, nll = logit_loss.kl_and_nll(student, teacher, hidden, targets, 2.0)
        (kl + nll).backward()

    return peak_memory(work)


@pytest.mark.slow
def test_logits_loss_memory_below_one_logits_tensor() -> None:
    """Student and teacher logits have 600 MB each, and so do their gradients. Peak memory stays below one of them."""
    assert run_in_subprocess(peak_memory_of_logits_loss, 3000, 50_000) < 600


def test_qkv_loss_equals_plain_relation_kl() -> None:
    student, teacher = make_model(1, heads=3, width=12), make_model(2, layers=3, heads=2)
    ids, targets = some_rows()
    losses = make_distillation(student, teacher, losses="qkv", relation_heads=2, relation_layers=(0, 1))(ids, targets)
    tensors_by_model = []
    for model, layer in ((student, 0), (teacher, 1)):
        with record(model) as recording:
            model(ids)
        heads = [recording[f"{layer}.{h}"] for h in range(model.spec.attention.heads)]
        tensors_by_model.append(
            {projection: torch.cat([getattr(head, projection) for head in heads], -1).double() for projection in "qkv"}
        )
    total, T, is_target = 0.0, ids.shape[1], targets != -100
    future = torch.ones(T, T).triu(1).bool()
    for projection in "qkv":
        logs = []
        for tensors in tensors_by_model:
            x = torch.stack(tensors[projection].chunk(2, -1), 1)  # (B, 2, T, width / 2)
            scores = x @ x.mT / math.sqrt(x.shape[-1])
            logs.append(scores.masked_fill(future, -1e30).log_softmax(-1))
        kl = (logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean(1)  # (B, T)
        total += float(kl[is_target].mean()) / 3
    assert float(losses["qkv"].detach()) == pytest.approx(total, rel=1e-4)


def test_resplit_channels_follow_concatenated_heads() -> None:
    x = torch.arange(24.0).reshape(1, 3, 2, 4)  # (B, H, T, d)
    flat = torch.cat([x[:, h] for h in range(3)], -1)  # (B, T, 12)
    assert torch.equal(split_relation_heads(x, 2), torch.stack([flat[..., :6], flat[..., 6:]], 1))
    with pytest.raises(hw.HeadwiseError, match="divisor of 12"):
        relation_head_count("k", (24, 36), 5)


def test_hidden_loss_equals_normalized_mse() -> None:
    student, teacher = make_model(1, width=8, heads=2), make_model(2, layers=4)
    loss = make_distillation(student, teacher, losses="hidden", layers=[(1, 3)])
    ids, targets = some_rows()
    states = []
    for model, layer in ((student, 1), (teacher, 3)):
        outputs: list[Tensor] = []
        hook = model.blocks[layer].register_forward_hook(
            lambda module, inputs, output, outputs=outputs: outputs.append(output)
        )
        model(ids)
        hook.remove()
        states.append(outputs[0][targets != -100])
    assert loss.hidden_loss is not None
    projected = states[0] @ loss.hidden_loss.projections[0].weight.T
    normed = [(x - x.mean(-1, keepdim=True)) for x in (projected, states[1])]
    normed = [x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() for x in normed]
    expected = (normed[0] - normed[1]).square().mean()
    assert float(loss(ids, targets)["hidden"].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert any(name.startswith("loss.hidden_loss.projections") for name in loss.trainable_parameters())
    assert not any("teacher" in name for name in loss.state_dict())


def test_topk_kl_full_vocabulary_equals_exact_kl() -> None:
    student, teacher = make_model(1), make_model(2)
    ids, targets = some_rows()
    is_target = targets != -100
    hidden = [model(ids, hidden=True)[is_target] for model in (student, teacher)]
    exact, text = logit_loss.kl_and_nll(student, teacher, (hidden[0], hidden[1]), targets[is_target], 2.0)
    assert teacher.output is not None
    teacher_logits = teacher.output(hidden[1])
    for k in (VOCAB, VOCAB - 1, 4 * VOCAB):  # with one token left over, the other-token bucket is exact
        topk_losses = logit_loss.kl_from_topk(
            student, hidden[0], targets[is_target], top_k_log_probs(teacher_logits, k, 2.0), 2.0
        )
        assert float(topk_losses[0].detach()) == pytest.approx(float(exact.detach()), rel=1e-4)
        assert float(topk_losses[1].detach()) == pytest.approx(float(text.detach()), rel=1e-6)
    truncated = logit_loss.kl_from_topk(
        student, hidden[0], targets[is_target], top_k_log_probs(teacher_logits, 3, 2.0), 2.0
    )
    assert 0 < float(truncated[0].detach()) < float(exact.detach()), (
        "merging outcomes cannot increase the KL divergence"
    )
    truncated[0].backward()


def test_logits_loss_autocast_is_exact() -> None:
    """For given hidden states, bfloat16 autocast changes neither the KL divergence nor its gradients."""
    student, teacher = make_model(1), make_model(2)
    ids, targets = some_rows()
    is_target = targets != -100
    hidden = [model(ids, hidden=True)[is_target].detach() for model in (student, teacher)]
    plain = logit_loss.kl_and_nll(student, teacher, (hidden[0], hidden[1]), targets[is_target], 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = logit_loss.kl_and_nll(student, teacher, (hidden[0], hidden[1]), targets[is_target], 2.0)
        loss = make_distillation(student, teacher, losses=("logits", "maps"), head_pairs="order")(ids, targets)
    assert torch.equal(torch.stack(plain), torch.stack(cast))
    exact = make_distillation(student, teacher, losses=("logits", "maps"), head_pairs="order")(ids, targets)
    torch.stack(list(loss.values())).sum().backward()
    for name, value in exact.items():
        assert float(loss[name].detach()) == pytest.approx(float(value.detach()), rel=0.05), name


def test_distill_loss_microbatches_sum_to_full_batch() -> None:
    student, teacher = make_model(1), make_model(2)
    ids, targets = some_rows(4)
    loss = make_distillation(student, teacher, losses=("logits", "maps", "hidden", "qkv"), head_pairs="order")
    num_targets = int((targets != -100).sum())
    microbatches = [loss(ids[i : i + 1], targets[i : i + 1], total=num_targets) for i in range(4)]
    full = loss(ids, targets)
    for name, value in full.items():
        assert sum(float(losses[name].detach()) for losses in microbatches) == pytest.approx(
            float(value.detach()), rel=1e-4
        ), name
