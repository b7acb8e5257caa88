"""`hw.distil` as a person calls it: it learns, goes on where it stopped, asks its teacher once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.distillation import Lesson, teacher_logits_cache
from headwise.distillation.activations import Watcher
from headwise.distillation.distill import lesson_of
from headwise.distillation.head_pairs import best_pairs, given_pairs, ordered_pairs
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.build_tokenizers import character_tokenizer
from headwise.training import Recipe
from headwise.training.default_recipe import LITTLE
from tests.distillation.tiny import make, rows

TEXT = "to be or not to be that is the question " * 40
RECIPE = Recipe(
    steps=8, batch=4, context=16, warmup=1, rate=3e-3, evaluate_every=8, save_every=4, log_every=1, holdout=0.1
)
SMALL = make().spec.resized(layers=1)


def weights(model: Transformer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("by", ["logits", "hidden", "maps", "qkv", {"logits": 1.0, "maps": 0.5}])
def test_every_loss_falls(by) -> None:
    how: dict[str, Any] = {
        "by": by,
        "alpha": 1.0,
        "text": 0.0,
        "progress": False,
    }  # a random teacher and the text disagree
    made = hw.distil(SMALL, make(), TEXT, replace(RECIPE, steps=30, rate=1e-2), **how)
    names = [by] if isinstance(by, str) else list(by)
    for name in names:
        told = [row[f"loss {name}"] for row in made.history if f"loss {name}" in row]
        assert np.mean(told[-5:]) < np.mean(told[:5]), name
    assert made.model.spec.layers == 1
    assert made.stopped == "finished"


def test_a_broken_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    how: dict[str, Any] = {"by": ("logits", "hidden", "maps", "qkv"), "progress": False}
    spec = make().spec.resized(layers=1, width=8, heads=2)
    whole = hw.distil(spec, make(), TEXT, RECIPE, out=tmp_path / "whole", **how)

    class BrokenError(Exception):
        pass

    def stop(model: object, step: int) -> None:
        if step == 6:
            raise BrokenError

    with pytest.raises(BrokenError):
        hw.distil(spec, make(), TEXT, RECIPE, out=tmp_path / "broken", call=stop, every=2, **how)
    again = hw.distil(spec, make(), TEXT, RECIPE, out=tmp_path / "broken", **how)
    assert torch.equal(weights(again.model), weights(whole.model))
    with pytest.raises(hw.HeadwiseError, match=r"holds another run \(loss was .*teacher '"):
        hw.distil(spec, make(5), TEXT, RECIPE, out=tmp_path / "broken", **how)
    with pytest.raises(hw.HeadwiseError, match=r"holds another run \(loss was alpha 0.9, now 0.5\); choose"):
        hw.distil(spec, make(), TEXT, RECIPE, out=tmp_path / "broken", alpha=0.5, **how)


def test_what_is_kept_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = make()
    how: dict[str, Any] = {"keep": tmp_path / "kept", "top": 9, "progress": False}
    first = hw.distil(SMALL, teacher, TEXT, RECIPE, **how)
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == RECIPE.steps

    def refuse(self: Watcher, *given: Any, **named: Any) -> Any:
        assert self.model is not teacher, "the teacher was asked"
        return call(self, *given, **named)

    call = Watcher.__call__
    monkeypatch.setattr(Watcher, "__call__", refuse)
    again = hw.distil(SMALL, teacher, TEXT, RECIPE, **how)
    assert torch.equal(weights(first.model), weights(again.model))
    with pytest.raises(hw.HeadwiseError, match="another teacher, k or temperature"):
        hw.distil(SMALL, teacher, TEXT, RECIPE, keep=tmp_path / "kept", top=5, progress=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").write_text("dear diary")
    with pytest.raises(hw.HeadwiseError, match="holds something else"):
        hw.distil(SMALL, teacher, TEXT, RECIPE, keep=tmp_path / "other", progress=False)
    assert teacher_logits_cache.NOTE in {path.name for path in (tmp_path / "kept").iterdir()}


@pytest.fixture(scope="module")
def theirs():
    """A small GPT-2 of transformers', with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 257, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.5)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("by", ["logits", "hidden", "maps", "qkv"])
def test_an_attached_teacher(by: str, theirs) -> None:
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    with hw.attach(theirs, make().tokenizer) as teacher:
        made = hw.distil(SMALL, teacher, TEXT, replace(RECIPE, steps=25, rate=1e-2), by=by, text=0.0, progress=False)
    assert isinstance(made.model, Transformer)
    told = [row[f"loss {by}"] for row in made.history if f"loss {by}" in row]
    assert np.mean(told[-5:]) < np.mean(told[:5])
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())


def test_an_attached_teacher_says_what_it_says_as_a_model_of_ours(theirs, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    own = hw.load(tmp_path)
    own.tokenizer = make().tokenizer
    ids, targets = rows()
    made = []
    with hw.attach(theirs, make().tokenizer) as attached:
        for teacher in (attached, own):
            student = make(1, layers=1, heads=2)
            lesson = Lesson(("logits", "hidden", "maps", "qkv"), pairs="order")
            loss = lesson_of(teacher, lesson, TEXT)(student)
            lost = loss(ids, targets)
            torch.stack(list(lost.values())).sum().backward()
            slopes = {name: value.grad for name, value in student.named_parameters() if value.grad is not None}
            made.append({name: value.detach() for name, value in lost.items()} | slopes)
    assert made[0].keys() == made[1].keys()
    for name, value in made[0].items():
        torch.testing.assert_close(value, made[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_heads_in_order() -> None:
    student, teacher = make(layers=2, heads=2), make(layers=4, heads=4)
    pairs = [(str(one), str(other)) for one, other in ordered_pairs(student, teacher)]
    assert pairs == [("0.0", "1.1"), ("0.1", "1.3"), ("1.0", "3.1"), ("1.1", "3.3")]


def test_the_best_pairs_find_a_teacher_whose_heads_changed_places() -> None:
    teacher = make(3, layers=1, heads=4)
    student = make(3, layers=1, heads=4)
    order = [2, 0, 3, 1]
    with torch.no_grad():
        for place, head in enumerate(order):
            for letter in ("W_Q", "W_K", "W_V", "W_O"):
                wanted = getattr(teacher.heads[Address("", 0, head)], letter)
                getattr(student.heads[Address("", 0, place)], letter).copy_(wanted)
    texts = [list(range(40, 60)), list(range(97, 120)), [5, 9, 5, 200, 7, 7, 1]]
    assert [str(other) for _, other in best_pairs(student, teacher, texts)] == [f"0.{head}" for head in order]
    few = make(3, layers=1, heads=2)
    more = best_pairs(teacher, few, texts)
    assert {str(other) for _, other in more} == {"0.0", "0.1"}
    assert len(more) == 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="logit"), "no loss 'logit' to distil by"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by=()), "by names one or several"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by={"maps": 0}), "weight of maps must be"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, temperatur=2), "a lesson has no 'temperatur'"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, temperature=0), "temperature must be above 0"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, alpha=1.5), "between 0 and 1"),
        (lambda: hw.distil(SMALL, make(kind="encoder"), TEXT, RECIPE), "the teacher of kind encoder"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="hidden", layers=[(0, 7)]), "the teacher 0 to 1"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="qkv", relation_layers=(0, 9)), "no heads in layer 9"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="qkv", relation_heads=7), "7 relation heads cannot share"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="maps", pairs="near"), '"order", "best" or a list'),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="maps", pairs=[("0.0", "9.0")]), "no head 9.0; it has 0.0 to 1.3"),
        (lambda: hw.distil(SMALL, make(), TEXT, RECIPE, by="maps", keep="somewhere"), "by 'logits' alone"),
        (lambda: hw.distil(SMALL, make(), TEXT, replace(RECIPE, compile=True), by="maps"), "compile goes with"),
        (lambda: given_pairs(make(), make(), [("0.0",)]), "a pair is two heads"),  # pyright: ignore[reportArgumentType]
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, said: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=said):
        call()


def test_no_corpus_is_what_it_is_in_training() -> None:
    """The little language, read by its own recipe; a part of it here."""
    how = replace(LITTLE, steps=3, batch=2, warmup=1)
    teacher = hw.train(hw.preset("little").resized(layers=1, width=16, heads=2), recipe=how, progress=False).model
    alike = hw.distil(teacher.spec, teacher, recipe=how, text=1.0, alpha=0.0, progress=False)
    assert torch.equal(weights(alike.model), weights(teacher)), "text alone, by the same recipe: the same model"


def test_who_cannot_be_asked_for_tokens_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    silent = Transformer(replace(make().spec, output="none"))
    silent.tokenizer = make().tokenizer
    for student, teacher in ((SMALL, silent), (silent, make())):
        with pytest.raises(hw.HeadwiseError, match="both need an output"):
            hw.distil(student, teacher, TEXT, RECIPE, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_teacher_in_bfloat16() -> None:
    by, one = ("logits", "hidden", "maps", "qkv"), replace(RECIPE, steps=1)
    exact, rounded = (
        hw.distil(SMALL, make().to(kind), TEXT, one, by=by, progress=False).history[0]
        for kind in (torch.float32, torch.bfloat16)
    )
    assert rounded != exact
    for name in (f"loss {name}" for name in by):
        assert rounded[name] == pytest.approx(exact[name], rel=0.05), name


def test_another_tokenizer_is_refused() -> None:
    student = make()
    student.tokenizer = character_tokenizer("abc")
    with pytest.raises(hw.HeadwiseError, match=r"different tokenizers: .* is token"):
        hw.distil(student, make(), TEXT, RECIPE)
    student.tokenizer = None
    with pytest.raises(hw.HeadwiseError, match="the student has no tokenizer"):
        hw.distil(student, make(), TEXT, RECIPE)
    silent = make()
    silent.tokenizer = None
    with pytest.raises(hw.HeadwiseError, match="the teacher has no tokenizer"):
        hw.distil(SMALL, silent, TEXT, RECIPE)
