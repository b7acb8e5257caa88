"""A short fine-tune after heads were cut: what is left learns to do without them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from headwise.analysis.recording.batching import tokenizer_of
from headwise.distillation.activations import main_stack
from headwise.distillation.distill import lesson_of, same_tokenizer
from headwise.distillation.distill_config import By, Lesson
from headwise.errors import HeadwiseError, close_names
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.training.loop import Trained, train
from headwise.training.loss import LanguageLoss
from headwise.training.recipe import Recipe

LONGEST = 256  # tokens of a row, where nobody has said it


def heal(
    model: AnyModel,
    corpus: Any,
    *,
    steps: int = 200,
    out: str | Path | None = None,
    valid: Any = None,
    teacher: AnyModel | None = None,
    learn: By | Lesson | None = None,
    progress: Progress | bool = True,
    **recipe: Any,
) -> Trained:
    """Train a model a little further, in place, gently: it is nearly where it should be.

    `corpus`, `out`, `valid` and `progress` are those of `train`. With a `teacher`, the whole model, it learns from that:
    `learn` is what `hw.distil` takes as `by`, or a Lesson; none is its logits. Maps are learned from the head of the same
    name, relations in the last layer that still has heads. Whatever else is given is a field of `Recipe`; unless said
    otherwise the rate is 3e-4 after a short warm-up, nothing decays, and rows have at most 256 tokens.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> model = train(spec, "to be or not to be " * 50, Recipe(steps=2, batch=4), progress=False).model
    >>> healed = heal(model, "to be or not to be " * 50, steps=3, batch=4, progress=False)
    >>> healed.step, healed.model is model
    (3, True)
    """
    known = {field.name for field in fields(Recipe)} - {"steps"}
    for name in recipe.keys() - known:
        raise HeadwiseError(f"a recipe has no {name!r}; {close_names(name, known)}")
    tokenizer_of(model)  # healing with another tokenizer would be harm
    gentle: dict[str, Any] = {
        "rate": 3e-4,
        "batch": 16,
        "context": min(model.spec.context, LONGEST),
        "warmup": min(20, steps // 10),
        "weight_decay": 0.0,
        "evaluate_every": max(1, steps // 4),
    }
    how = Recipe(steps=steps, **(gentle | recipe))
    if teacher is None:
        if learn is not None:
            raise HeadwiseError("learn says what to learn from a teacher; give teacher=…, the model before the cut.")
        loss = LanguageLoss
    else:
        same_tokenizer(model, teacher)
        loss = lesson_of(teacher, learn if isinstance(learn, Lesson) else _lesson(model, teacher, learn), corpus)
    return train(model, corpus, how, out=out, valid=valid, loss=loss, progress=progress)  # pyright: ignore[reportArgumentType]


def _lesson(model: AnyModel, teacher: AnyModel, learn: By | None) -> Lesson:
    """What is learned of the model before the cut: what is left of each layer has the names it had."""
    known = set(teacher.spec.addresses)
    left = [head for head in model.spec.addresses if head in known]
    pairs = [(str(head), str(head)) for head in left]
    last = max((head.layer for head in left if head.stack == main_stack(model)), default=-1)
    return Lesson(learn or "logits", pairs=pairs or "best", relation_layers=(last, last))
