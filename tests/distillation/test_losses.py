"""Each loss against a closed form or a plain implementation, and at its one known value: 0 where both agree."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.analysis.recording.recording import record
from headwise.distillation import Lesson, attention_kl, logits
from headwise.distillation.distill import lesson_of
from headwise.distillation.distill_losses import relation_heads, resplit
from headwise.distillation.loss import Distillation
from headwise.distillation.teacher_logits_cache import top
from headwise.experiments.engine.memory import rise
from headwise.experiments.engine.pool import apart
from headwise.model import Transformer
from tests.distillation.tiny import VOCAB, make
from tests.distillation.tiny import rows as some_rows

TEXTS = ["to be or not to be", "that is the question", "whether it is nobler"]


def distillation(student: Transformer, teacher: Transformer, **lesson) -> Distillation:
    made = lesson_of(teacher, Lesson(**lesson), TEXTS)(student)
    assert isinstance(made, Distillation)
    return made


@pytest.mark.parametrize("by", ["logits", "hidden", "maps", "qkv", ("logits", "hidden", "maps", "qkv")])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_student_that_is_its_teacher_stays_put(by, kind: str) -> None:
    teacher = make(kind=kind)
    student = copy.deepcopy(teacher)
    student.tokenizer = teacher.tokenizer
    loss = distillation(student, teacher, by=by, alpha=1.0, text=0.0, pairs="order")
    ids, targets = some_rows()
    made = loss(ids, targets)
    assert set(made) == ({by} if isinstance(by, str) else set(by))
    total = torch.stack(list(made.values())).sum()
    assert float(total.detach()) == pytest.approx(0, abs=1e-6)
    total.backward()
    assert max(float(p.grad.abs().max()) for p in student.parameters() if p.grad is not None) < 1e-5


def test_the_divergence_is_that_of_the_definition() -> None:
    student, teacher = make(1), make(2, layers=3)
    ids, targets = some_rows()
    made = distillation(student, teacher, temperature=3.0, alpha=0.7)(ids, targets)
    asked = targets != -100
    zs, zt = student(ids)[asked].double(), teacher(ids)[asked].double()
    p = (zt / 3).softmax(-1)
    kl = (p * (p.log() - (zs / 3).log_softmax(-1))).sum(-1).mean()
    assert float(made["logits"].detach()) == pytest.approx(0.7 * 9 * float(kl.detach()), rel=1e-5)
    surprise = F.cross_entropy(zs, targets[asked])
    assert float(made["text"].detach()) == pytest.approx(0.3 * float(surprise.detach()), rel=1e-5)


def test_hot_gradients_are_differences_of_logits() -> None:
    """T² KL of logits z at T → ∞ has the slope (z_s − z_t) / V, both centred (https://arxiv.org/abs/1503.02531)."""
    V, T = 8, 300.0
    model = Transformer(
        hw.ModelSpec(vocab=V, context=4, layers=1, attention=hw.AttentionSpec(width=V, heads=1), tied=False)
    )
    assert model.output is not None
    with torch.no_grad():
        model.output.vocabulary.weight.copy_(torch.eye(V))
    dice = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 5, V, generator=dice)
    ours.requires_grad_()
    apart, _ = logits.kl_and_surprise(model, model, (ours, theirs), torch.zeros(5, dtype=torch.long), T)
    (slope,) = torch.autograd.grad(apart * T * T, ours)
    centred = [z - z.mean(-1, keepdim=True) for z in (ours.detach(), theirs)]
    torch.testing.assert_close(slope, (centred[0] - centred[1]) / V, rtol=0.02, atol=2e-3)


def gradients(loss: Distillation, ids: Tensor, targets: Tensor) -> tuple[dict[str, float], dict[str, Tensor]]:
    loss.zero_grad()
    made = loss(ids, targets)
    torch.stack(list(made.values())).sum().backward()
    slopes = {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}
    return {name: float(value.detach()) for name, value in made.items()}, slopes


@pytest.mark.parametrize("by", ["logits", "maps", "qkv"])
def test_in_parts_as_at_once(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = make(1, rotary=True, kv_heads=2), make(2, layers=3, heads=2)
    ids, targets = some_rows(T=23)
    loss = distillation(student, teacher, by=by)
    whole, slopes = gradients(loss, ids, targets)
    monkeypatch.setattr(logits, "WHOLE", 3 * VOCAB)  # three tokens
    monkeypatch.setattr(attention_kl, "ROWS", 5)
    parts, other = gradients(loss, ids, targets)
    assert parts == pytest.approx(whole, rel=1e-5)
    for name, slope in slopes.items():
        torch.testing.assert_close(other[name], slope, rtol=1e-4, atol=1e-6)


def test_maps_are_compared_row_by_row() -> None:
    student, teacher = make(1, layers=1, rotary=True, kv_heads=2), make(2, heads=2)
    pairs = [("0.0", "1.1"), ("0.3", "0.0"), ("0.2", "1.0")]
    ids, targets = some_rows()
    made = distillation(student, teacher, by="maps", pairs=pairs)(ids, targets)
    seen = []
    for model in (student, teacher):
        with record(model) as recording:
            model(ids)
        seen.append(recording)
    want, real = [], targets != -100
    for one, other in pairs:
        q, p = seen[0][one].map().double(), seen[1][other].map().double()  # (B, T, S)
        kl = (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)  # (B, T)
        want.append(kl[real].mean())
    assert float(made["maps"].detach()) == pytest.approx(float(torch.stack(want).mean()), rel=1e-4)


def test_the_slopes_of_rows_are_those_of_the_definition() -> None:
    """A mask that differs, a row that sees nothing, one that does not count."""
    dice = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 2, 3, 5, 7, generator=dice, dtype=torch.double)
    ours[0, :, :2, 4:] = theirs[1, 1, 2, :3] = -math.inf
    ours[1, 0, 3] = theirs[1, 2, 0] = -math.inf
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, 4] = False
    ours.requires_grad_()
    got = attention_kl._RowKL.apply(ours, theirs, real)
    want = torch.zeros((), dtype=torch.double)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)).tolist():
        seen = ours[b, h, t] > -math.inf
        p = theirs[b, h, t, seen]
        if real[b, t] and len(p) and p.max() > -math.inf:
            p, q = p.softmax(0), ours[b, h, t, seen].softmax(0)
            want = want + (torch.xlogy(p, p) - torch.xlogy(p, q)).sum() / 3
    torch.testing.assert_close(got, want)
    slopes = [torch.autograd.grad(one, ours, retain_graph=True)[0] for one in (got, want)]
    torch.testing.assert_close(slopes[0], slopes[1])


def test_no_map_is_held() -> None:
    """What is saved for the backward pass is smaller than one map of one head."""
    T = 1024
    spec = hw.ModelSpec(vocab=VOCAB, context=T, layers=1, attention=hw.AttentionSpec(width=8, heads=2))
    torch.manual_seed(0)
    student, teacher = Transformer(spec), Transformer(spec)
    student.tokenizer = teacher.tokenizer = make().tokenizer
    largest = [0]

    def pack(saved: Tensor) -> Tensor:
        largest[0] = max(largest[0], saved.numel())
        return saved

    ids, targets = some_rows(1, T)
    loss = distillation(student, teacher, by=("maps", "qkv"), pairs="order", text=0.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        made = loss(ids, targets)
    torch.stack(list(made.values())).sum().backward()
    assert 0 < largest[0] < T * T / 4


def rise_of_logits(N: int, V: int) -> float:
    """What distilling by logits holds at most, in MB."""
    spec = hw.ModelSpec(vocab=V, context=4, layers=1, attention=hw.AttentionSpec(width=16, heads=2))
    student, teacher = Transformer(spec), Transformer(spec)
    hidden = torch.randn(N, 16, requires_grad=True), torch.randn(N, 16)
    targets = torch.randint(V, (N,))

    def work() -> None:
        apart, surprise = logits.kl_and_surprise(student, teacher, hidden, targets, 2.0)
        (apart + surprise).backward()

    return rise(work)


@pytest.mark.slow
def test_no_two_sets_of_logits_are_held() -> None:
    """600 MB each, of the student and the teacher, and as much again for each slope: what is held stays below one of them."""
    assert apart(rise_of_logits, 3000, 50_000) < 600


def test_relations_equal_a_plain_implementation() -> None:
    student, teacher = make(1, heads=3, width=12), make(2, layers=3, heads=2)
    ids, targets = some_rows()
    made = distillation(student, teacher, by="qkv", relation_heads=2, relation_layers=(0, 1))(ids, targets)
    sides = []
    for model, layer in ((student, 0), (teacher, 1)):
        with record(model) as recording:
            model(ids)
        heads = [recording[f"{layer}.{h}"] for h in range(model.spec.attention.heads)]
        sides.append({letter: torch.cat([getattr(head, letter) for head in heads], -1).double() for letter in "qkv"})
    total, T, real = 0.0, ids.shape[1], targets != -100
    ahead = torch.ones(T, T).triu(1).bool()
    for letter in "qkv":
        logs = []
        for side in sides:
            x = torch.stack(side[letter].chunk(2, -1), 1)  # (B, 2, T, width / 2)
            scores = x @ x.mT / math.sqrt(x.shape[-1])
            logs.append(scores.masked_fill(ahead, -1e30).log_softmax(-1))
        kl = (logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean(1)  # (B, T)
        total += float(kl[real].mean()) / 3
    assert float(made["qkv"].detach()) == pytest.approx(total, rel=1e-4)


def test_how_relation_heads_are_cut() -> None:
    x = torch.arange(24.0).reshape(1, 3, 2, 4)  # (B, H, T, d)
    flat = torch.cat([x[:, h] for h in range(3)], -1)  # (B, T, 12)
    assert torch.equal(resplit(x, 2), torch.stack([flat[..., :6], flat[..., 6:]], 1))
    with pytest.raises(hw.HeadwiseError, match="must divide 12"):
        relation_heads("k", (24, 36), 5)


def test_states_are_compared_as_norms_read_them() -> None:
    student, teacher = make(1, width=8, heads=2), make(2, layers=4)
    loss = distillation(student, teacher, by="hidden", layers=[(1, 3)])
    ids, targets = some_rows()
    states = []
    for model, layer in ((student, 1), (teacher, 3)):
        kept: list[Tensor] = []
        hook = model.blocks[layer].register_forward_hook(lambda module, given, made, kept=kept: kept.append(made))
        model(ids)
        hook.remove()
        states.append(kept[0][targets != -100])
    assert loss.states is not None
    projected = states[0] @ loss.states.projections[0].weight.T
    normed = [(x - x.mean(-1, keepdim=True)) for x in (projected, states[1])]
    normed = [x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() for x in normed]
    want = (normed[0] - normed[1]).square().mean()
    assert float(loss(ids, targets)["hidden"].detach()) == pytest.approx(float(want.detach()), rel=1e-5)
    assert any(name.startswith("loss.states.projections") for name in loss.learning())
    assert not any("teacher" in name for name in loss.state_dict())


def test_all_of_the_vocabulary_kept_is_the_whole_divergence() -> None:
    student, teacher = make(1), make(2)
    ids, targets = some_rows()
    asked = targets != -100
    hidden = [model(ids, hidden=True)[asked] for model in (student, teacher)]
    exact, text = logits.kl_and_surprise(student, teacher, (hidden[0], hidden[1]), targets[asked], 2.0)
    assert teacher.output is not None
    taught = teacher.output(hidden[1])
    for k in (VOCAB, VOCAB - 1, 4 * VOCAB):  # one left is one bucket of its own
        kept = logits.kl_of_kept(student, hidden[0], targets[asked], top(taught, k, 2.0), 2.0)
        assert float(kept[0].detach()) == pytest.approx(float(exact.detach()), rel=1e-4)
        assert float(kept[1].detach()) == pytest.approx(float(text.detach()), rel=1e-6)
    few = logits.kl_of_kept(student, hidden[0], targets[asked], top(taught, 3, 2.0), 2.0)
    assert 0 < float(few[0].detach()) < float(exact.detach()), "lumping outcomes together cannot tell more apart"
    few[0].backward()


def test_logits_are_exact_under_autocast() -> None:
    """Where states are given, bfloat16 elsewhere changes neither the divergence nor its slopes."""
    student, teacher = make(1), make(2)
    ids, targets = some_rows()
    asked = targets != -100
    hidden = [model(ids, hidden=True)[asked].detach() for model in (student, teacher)]
    plain = logits.kl_and_surprise(student, teacher, (hidden[0], hidden[1]), targets[asked], 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = logits.kl_and_surprise(student, teacher, (hidden[0], hidden[1]), targets[asked], 2.0)
        loss = distillation(student, teacher, by=("logits", "maps"), pairs="order")(ids, targets)
    assert torch.equal(torch.stack(plain), torch.stack(cast))
    exact = distillation(student, teacher, by=("logits", "maps"), pairs="order")(ids, targets)
    torch.stack(list(loss.values())).sum().backward()
    for name, value in exact.items():
        assert float(loss[name].detach()) == pytest.approx(float(value.detach()), rel=0.05), name


def test_parts_of_a_step_add_up() -> None:
    student, teacher = make(1), make(2)
    ids, targets = some_rows(4)
    loss = distillation(student, teacher, by=("logits", "maps", "hidden", "qkv"), pairs="order")
    asked = int((targets != -100).sum())
    parts = [loss(ids[i : i + 1], targets[i : i + 1], total=asked) for i in range(4)]
    whole = loss(ids, targets)
    for name, value in whole.items():
        assert sum(float(part[name].detach()) for part in parts) == pytest.approx(float(value.detach()), rel=1e-4), name
