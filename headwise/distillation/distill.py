"""`distil`: training with another loss. What a teacher knows becomes what a student learns from."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from headwise.distillation.distill_config import By, Lesson
from headwise.distillation.head_pairs import Pair, best_pairs, given_pairs, ordered_pairs, samples
from headwise.distillation.loss import Distillation
from headwise.distillation.teacher_logits_cache import KeptLogits
from headwise.errors import HeadwiseError, close_names
from headwise.model import AnyModel, Transformer
from headwise.progress import Progress
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.training.loop import Call, Trained, start
from headwise.training.loss import MakeLoss
from headwise.training.recipe import Recipe
from headwise.training.request import TrainRequest
from headwise.training.setup import weights_digest

TOP = 64  # logits of each token that are kept, where any are


def distil(
    student: ModelSpec | Transformer,
    teacher: AnyModel,
    corpus: Any = None,
    recipe: Recipe | None = None,
    *,
    by: By = "logits",
    out: str | Path | None = None,
    valid: Any = None,
    keep: str | Path | None = None,
    top: int = TOP,
    device: str | torch.device | None = None,
    call: Call | None = None,
    every: int = 100,
    progress: Progress | bool = True,
    **lesson: Any,
) -> Trained:
    """Train a student, a spec or a model, to do what a teacher does: `hw.train` with another loss, and all it gives.

    `by` is `logits`, `hidden`, `maps` or `qkv`, several of them, or a dictionary of weights; whatever else is given is a
    field of `headwise.distillation.Lesson`: temperature, alpha, text, pairs, layers, relation_layers, relation_heads. The teacher
    is any model with the same tokenizer; it stays as it is, in eval mode and in its own precision. `keep` is a folder for
    its `top` largest logits of each token: a second run over the same rows does not ask it again.

    >>> from headwise.spec import AttentionSpec
    >>> from headwise.training import train
    >>> spec = ModelSpec(vocab=257, context=16, layers=2, attention=AttentionSpec(width=16, heads=2))
    >>> text, recipe = "to be or not to be " * 50, Recipe(steps=4, batch=4, warmup=1)
    >>> teacher = train(spec, text, recipe, progress=False).model
    >>> small = spec.resized(layers=1)
    >>> made = distil(small, teacher, text, recipe, by=("logits", "maps"), progress=False)
    >>> made.step, len(made.model.spec.addresses)
    (4, 2)
    """
    learn = Lesson(by, **_known(lesson))
    tokenizer = same_tokenizer(student, teacher)
    request = TrainRequest(student, corpus, recipe, out=out, valid=valid, tokenizer=tokenizer)
    if request.how.compile and learn.weights.keys() != {"logits"}:
        raise HeadwiseError("compile goes with by='logits' alone; other losses look inside the model.")
    taught = replace(request, loss=lesson_of(teacher, learn, request.texts, keep=keep, top=top))
    return start(taught, device=device, call=call, every=every, progress=progress)


def lesson_of(
    teacher: AnyModel, lesson: Lesson, corpus: Any, *, keep: str | Path | None = None, top: int = TOP
) -> MakeLoss:
    """What `hw.train(…, loss=…)` takes: a student of this teacher."""
    if keep is not None and lesson.weights.keys() != {"logits"}:
        raise HeadwiseError("what is kept on disk is the teacher's logits; learn by 'logits' alone, or leave keep out.")
    if top < 1:
        raise HeadwiseError(f"at least one logit of each token is kept, got top={top}.")
    fingerprint = weights_digest(teacher)

    def make(student: Transformer) -> Distillation:
        check_kinds(student.spec, teacher.spec)
        pairs = _pairs(student, teacher, lesson, corpus) if "maps" in lesson.weights else []
        kept = None if keep is None else KeptLogits(Path(keep), top, lesson.temperature, fingerprint)
        told = {**lesson.to_dict(), "pairs": [[str(one), str(other)] for one, other in pairs], "teacher": fingerprint}
        told["top"] = None if keep is None else top
        return Distillation(student, teacher, lesson, pairs, kept, json.dumps(told, sort_keys=True))

    return make


def same_tokenizer(student: ModelSpec | AnyModel, teacher: AnyModel) -> Tokenizer:
    """The tokenizer both have, the same ids for the same tokens; refused, with the reason, where they differ."""
    if teacher.output is None or (not isinstance(student, ModelSpec) and student.output is None):
        raise HeadwiseError(
            "a student and its teacher both need an output over the vocabulary, to be asked for tokens."
        )
    theirs = teacher.tokenizer
    if not isinstance(theirs, Tokenizer):
        raise HeadwiseError("the teacher has no tokenizer; attach it with one: hw.attach(model, tokenizer).")
    if isinstance(student, ModelSpec):
        check_kinds(student, teacher.spec)
        return theirs
    ours = student.tokenizer
    if not isinstance(ours, Tokenizer):
        raise HeadwiseError("the student has no tokenizer; load it with one, or give its spec.")
    check_kinds(student.spec, teacher.spec)
    one, other = ours.backend.get_vocab(), theirs.backend.get_vocab()
    differing = next((token for token in (*one, *other) if one.get(token) != other.get(token)), None)
    if differing is not None:
        raise HeadwiseError(
            f"student and teacher have different tokenizers: {differing!r} is token {one.get(differing, 'none')} of the "
            f"student and {other.get(differing, 'none')} of the teacher. Distil from a teacher with the same one."
        )
    for text in ("The heads' attention, twice: 12 + 30!", "to  be\nor not"):
        if ours.encode(text) != theirs.encode(text):
            raise HeadwiseError(
                f"student and teacher have the same vocabulary but read {text!r} differently; use one tokenizer for both."
            )
    return ours


def check_kinds(student: ModelSpec, teacher: ModelSpec) -> None:
    """An encoder does not teach a decoder."""
    if student.kind != teacher.kind:
        raise HeadwiseError(
            f"the student is of kind {student.kind}, the teacher of kind {teacher.kind}; use the same kind."
        )


def _known(lesson: dict[str, Any]) -> dict[str, Any]:
    known = [field.name for field in fields(Lesson) if field.name != "by"]
    for name in lesson:
        if name not in known:
            raise HeadwiseError(f"a lesson has no {name!r}; {close_names(name, known)}")
    return lesson


def _pairs(student: AnyModel, teacher: AnyModel, lesson: Lesson, corpus: Any) -> list[Pair]:
    if not isinstance(lesson.pairs, str):
        return given_pairs(student, teacher, lesson.pairs)
    if lesson.pairs == "order":
        return ordered_pairs(student, teacher)
    encode = teacher.tokenizer.encode
    return best_pairs(student, teacher, [ids for text in samples(corpus) if (ids := encode(text))])
