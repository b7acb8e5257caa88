"""`hw.distill` as users call it: losses fall, runs resume, and cached teacher logits are reused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.distillation import DistillConfig, teacher_logits_cache
from headwise.distillation.activations import ActivationExtractor
from headwise.distillation.distill import distill_loss_factory
from headwise.distillation.head_pairs import pair_heads_by_attention, pair_heads_by_order, parse_pairs
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.build_tokenizers import character_tokenizer
from headwise.training import Recipe
from headwise.training.default_synthetic_run import DEFAULT_RECIPE
from tests.distillation.tiny import make_batch, make_model

TEXT = "to be or not to be that is the question " * 40
RECIPE = Recipe(
    steps=8,
    batch_size=4,
    context=16,
    warmup=1,
    learning_rate=3e-3,
    evaluate_every=8,
    save_every=4,
    log_every=1,
    holdout=0.1,
)
SMALL = make_model().spec.resized(layers=1)


def flat_weights(model: Transformer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("losses", ["logits", "hidden", "maps", "qkv", {"logits": 1.0, "maps": 0.5}])
def test_distill_each_loss_decreases(losses) -> None:
    # A random teacher contradicts the text, so only teacher losses are used.
    options: dict[str, Any] = {"losses": losses, "alpha": 1.0, "ce_weight": 0.0, "progress": False}
    result = hw.distill(SMALL, make_model(), TEXT, replace(RECIPE, steps=30, learning_rate=1e-2), **options)
    names = [losses] if isinstance(losses, str) else list(losses)
    for name in names:
        values = [row[f"loss {name}"] for row in result.history if f"loss {name}" in row]
        assert np.mean(values[-5:]) < np.mean(values[:5]), name
    assert result.model.spec.layers == 1
    assert result.stop_reason == "finished"


def test_distill_interrupted_run_resumes_bitwise(tmp_path: Path) -> None:
    options: dict[str, Any] = {"losses": ("logits", "hidden", "maps", "qkv"), "progress": False}
    spec = make_model().spec.resized(layers=1, width=8, heads=2)
    uninterrupted = hw.distill(spec, make_model(), TEXT, RECIPE, out=tmp_path / "whole", **options)

    class BrokenError(Exception):
        pass

    def stop(model: object, step: int) -> None:
        if step == 6:
            raise BrokenError

    with pytest.raises(BrokenError):
        hw.distill(
            spec, make_model(), TEXT, RECIPE, out=tmp_path / "broken", callback=stop, callback_every=2, **options
        )
    resumed = hw.distill(spec, make_model(), TEXT, RECIPE, out=tmp_path / "broken", **options)
    assert torch.equal(flat_weights(resumed.model), flat_weights(uninterrupted.model))
    with pytest.raises(hw.HeadwiseError, match=r"another run.* \(loss was .*teacher '"):
        hw.distill(spec, make_model(5), TEXT, RECIPE, out=tmp_path / "broken", **options)
    with pytest.raises(hw.HeadwiseError, match=r"another run.* \(loss was alpha 0.9, now 0.5\)"):
        hw.distill(spec, make_model(), TEXT, RECIPE, out=tmp_path / "broken", alpha=0.5, **options)


def test_distill_cached_logits_skip_teacher_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = make_model()
    options: dict[str, Any] = {"logits_folder": tmp_path / "kept", "top_k": 9, "progress": False}
    first = hw.distill(SMALL, teacher, TEXT, RECIPE, **options)
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == RECIPE.steps

    def reject_teacher(self: ActivationExtractor, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not teacher, "the teacher ran again"
        return original_call(self, *args, **kwargs)

    original_call = ActivationExtractor.__call__
    monkeypatch.setattr(ActivationExtractor, "__call__", reject_teacher)
    second = hw.distill(SMALL, teacher, TEXT, RECIPE, **options)
    assert torch.equal(flat_weights(first.model), flat_weights(second.model))
    metadata_file = tmp_path / "kept" / teacher_logits_cache.METADATA_FILE
    with pytest.raises(hw.HeadwiseError, match="another teacher, top_k or temperature"):
        hw.distill(SMALL, teacher, TEXT, RECIPE, logits_folder=tmp_path / "kept", top_k=5, progress=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").write_text("dear diary")
    with pytest.raises(hw.HeadwiseError, match="has no teacher logits"):
        hw.distill(SMALL, teacher, TEXT, RECIPE, logits_folder=tmp_path / "other", progress=False)
    metadata = json.loads(metadata_file.read_text())
    assert metadata.pop("format") == teacher_logits_cache.FORMAT
    metadata_file.write_text(json.dumps(metadata))
    with pytest.raises(hw.HeadwiseError, match=r"logits of format 1.*headwise distill … --logits-folder"):
        hw.distill(SMALL, teacher, TEXT, RECIPE, **options)


@pytest.fixture(scope="module")
def hf_model():
    """Return a small transformers GPT-2 with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 257, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.5)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("loss", ["logits", "hidden", "maps", "qkv"])
def test_distill_attached_teacher_loss_decreases(loss: str, hf_model) -> None:
    before = {name: value.clone() for name, value in hf_model.state_dict().items()}
    with hw.attach(hf_model, make_model().tokenizer) as teacher:
        result = hw.distill(
            SMALL,
            teacher,
            TEXT,
            replace(RECIPE, steps=25, learning_rate=1e-2),
            losses=loss,
            ce_weight=0.0,
            progress=False,
        )
    assert isinstance(result.model, Transformer)
    values = [row[f"loss {loss}"] for row in result.history if f"loss {loss}" in row]
    assert np.mean(values[-5:]) < np.mean(values[:5])
    assert all(torch.equal(value, before[name]) for name, value in hf_model.state_dict().items())


def test_distill_attached_and_native_teacher_losses_equal(hf_model, tmp_path: Path) -> None:
    hf_model.save_pretrained(tmp_path)
    native = hw.load(tmp_path)
    native.tokenizer = make_model().tokenizer
    ids, targets = make_batch()
    results = []
    with hw.attach(hf_model, make_model().tokenizer) as attached:
        for teacher in (attached, native):
            student = make_model(1, layers=1, heads=2)
            config = DistillConfig(("logits", "hidden", "maps", "qkv"), head_pairs="order")
            loss = distill_loss_factory(teacher, config, TEXT)(student)
            losses = loss(ids, targets)
            torch.stack(list(losses.values())).sum().backward()
            grads = {name: value.grad for name, value in student.named_parameters() if value.grad is not None}
            results.append({name: value.detach() for name, value in losses.items()} | grads)
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_ordered_pairs_fewer_student_heads_spread_evenly() -> None:
    student, teacher = make_model(layers=2, heads=2), make_model(layers=4, heads=4)
    pairs = [
        (str(student_head), str(teacher_head)) for student_head, teacher_head in pair_heads_by_order(student, teacher)
    ]
    assert pairs == [("0.0", "1.1"), ("0.1", "1.3"), ("1.0", "3.1"), ("1.1", "3.3")]


def test_best_pairs_permuted_heads_are_found() -> None:
    teacher = make_model(3, layers=1, heads=4)
    student = make_model(3, layers=1, heads=4)
    order = [2, 0, 3, 1]
    with torch.no_grad():
        for index, head in enumerate(order):
            for matrix in ("W_Q", "W_K", "W_V", "W_O"):
                weight = getattr(teacher.heads[Address("", 0, head)], matrix)
                getattr(student.heads[Address("", 0, index)], matrix).copy_(weight)
    texts = [list(range(40, 60)), list(range(97, 120)), [5, 9, 5, 200, 7, 7, 1]]
    assert [str(teacher_head) for _, teacher_head in pair_heads_by_attention(student, teacher, texts)] == [
        f"0.{head}" for head in order
    ]
    small = make_model(3, layers=1, heads=2)
    pairs = pair_heads_by_attention(teacher, small, texts)
    assert {str(teacher_head) for _, teacher_head in pairs} == {"0.0", "0.1"}
    assert len(pairs) == 4


def distill_small(**options: Any) -> object:
    return hw.distill(SMALL, make_model(), TEXT, RECIPE, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distill_small(losses="logit"), "Got 'logit'"),
        (lambda: distill_small(losses=()), "at least one loss"),
        (lambda: distill_small(losses={"maps": 0}), "weight of maps must be"),
        (lambda: distill_small(temperatur=2), "temperatur: not a field"),
        (lambda: distill_small(temperature=0), "temperature: must be a finite number above 0"),
        (lambda: distill_small(alpha=1.5), "from 0 to 1"),
        (lambda: hw.distill(SMALL, make_model(kind="encoder"), TEXT, RECIPE), "a teacher of kind encoder"),
        (lambda: distill_small(losses="hidden", layers=[(0, 7)]), "the teacher 0 to 1"),
        (lambda: distill_small(losses="qkv", relation_layers=(0, 9)), "no heads in layer 9"),
        (lambda: distill_small(losses="qkv", relation_heads=7), "Got 7"),
        (lambda: distill_small(losses="maps", head_pairs="near"), "unknown pairing"),
        (lambda: distill_small(losses="maps", head_pairs=[("0.0", "9.0")]), "no head 9.0; it has 0.0 to 1.3"),
        (lambda: distill_small(losses="maps", logits_folder="somewhere"), "losses='logits' alone"),
        (lambda: hw.distill(SMALL, make_model(), TEXT, replace(RECIPE, compile=True), losses="maps"), "compile: "),
        (lambda: parse_pairs(make_model(), make_model(), [("0.0",)]), "a student head and a teacher head"),  # pyright: ignore[reportArgumentType]
    ],
)  # fmt: skip
def test_distill_invalid_arguments_raise(call, message: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=message):
        call()


def test_distill_without_corpus_equals_training() -> None:
    """Uses a part of the synthetic language with its own recipe."""
    recipe = replace(DEFAULT_RECIPE, steps=3, batch_size=2, warmup=1)
    teacher = hw.train(hw.preset("synthetic").resized(layers=1, width=16, heads=2), recipe=recipe, progress=False).model
    distilled = hw.distill(teacher.spec, teacher, recipe=recipe, ce_weight=1.0, alpha=0.0, progress=False)
    assert torch.equal(flat_weights(distilled.model), flat_weights(teacher)), (
        "cross-entropy alone with the same recipe gives the same model"
    )


def test_distill_model_without_output_raises_and_writes_nothing(tmp_path: Path) -> None:
    headless = Transformer(replace(make_model().spec, output="none"))
    headless.tokenizer = make_model().tokenizer
    for student, teacher in ((SMALL, headless), (headless, make_model())):
        with pytest.raises(hw.HeadwiseError, match="both need a language modeling head"):
            hw.distill(student, teacher, TEXT, RECIPE, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_distill_bfloat16_teacher_close_to_float32() -> None:
    losses, recipe = ("logits", "hidden", "maps", "qkv"), replace(RECIPE, steps=1)
    exact, bfloat16 = (
        hw.distill(SMALL, make_model().to(dtype), TEXT, recipe, losses=losses, progress=False).history[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert bfloat16 != exact
    for name in (f"loss {name}" for name in losses):
        assert bfloat16[name] == pytest.approx(exact[name], rel=0.05), name


def test_distill_different_tokenizers_raise() -> None:
    student = make_model()
    student.tokenizer = character_tokenizer("abc")
    with pytest.raises(hw.HeadwiseError, match=r"different tokenizers. Token .* has id"):
        hw.distill(student, make_model(), TEXT, RECIPE)
    student.tokenizer = None
    with pytest.raises(hw.HeadwiseError, match="student: it has no tokenizer"):
        hw.distill(student, make_model(), TEXT, RECIPE)
    untokenized = make_model()
    untokenized.tokenizer = None
    with pytest.raises(hw.HeadwiseError, match="teacher: it has no tokenizer"):
        hw.distill(SMALL, untokenized, TEXT, RECIPE)
