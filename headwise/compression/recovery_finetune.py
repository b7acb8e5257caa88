"""A short fine-tune after heads were cut: what is left learns to do without them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from headwise.analysis.recording.batching import tokenizer_of
from headwise.distillation.activations import main_stack_name
from headwise.distillation.distill import distill_loss_factory, shared_tokenizer
from headwise.distillation.distill_config import DistillConfig, DistillLosses
from headwise.errors import HeadwiseError, suggest_names
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.training.loop import TrainResult, train
from headwise.training.recipe import Recipe
from headwise.training.train_loss import LanguageLoss

DEFAULT_MAX_LENGTH = 256  # tokens of a row, where nobody has said it


def recover(
    model: ModelProtocol,
    corpus: Any,
    *,
    steps: int = 200,
    out: str | Path | None = None,
    valid: Any = None,
    teacher: ModelProtocol | None = None,
    losses: DistillLosses | DistillConfig | None = None,
    progress: Progress | bool = True,
    **recipe_fields: Any,
) -> TrainResult:
    """Train a model a little further, in place, gently: it is nearly where it should be.

    `corpus`, `out`, `valid` and `progress` are those of `train`. With a `teacher`, the whole model, it learns from that:
    `losses` is what `hw.distill` takes as `losses`, or a DistillConfig; none is its logits. Maps are learned from the head
    of the same name, relations in the last layer that still has heads. Whatever else is given is a field of `Recipe`;
    unless said otherwise the rate is 3e-4 after a short warm-up, nothing decays, and rows have at most 256 tokens.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> model = train(spec, "to be or not to be " * 50, Recipe(steps=2, batch_size=4), progress=False).model
    >>> recovered = recover(model, "to be or not to be " * 50, steps=3, batch_size=4, progress=False)
    >>> recovered.step, recovered.model is model
    (3, True)
    """
    recipe_names = {field.name for field in fields(Recipe)} - {"steps"}
    for name in recipe_fields.keys() - recipe_names:
        raise HeadwiseError(f"a recipe has no {name!r}; {suggest_names(name, recipe_names)}")
    tokenizer_of(model)  # healing with another tokenizer would be harm
    defaults: dict[str, Any] = {
        "learning_rate": 3e-4,
        "batch_size": 16,
        "context": min(model.spec.context, DEFAULT_MAX_LENGTH),
        "warmup": min(20, steps // 10),
        "weight_decay": 0.0,
        "evaluate_every": max(1, steps // 4),
    }
    recipe = Recipe(steps=steps, **(defaults | recipe_fields))
    if teacher is None:
        if losses is not None:
            raise HeadwiseError("losses says what to learn from a teacher; give teacher=…, the model before the cut.")
        loss = LanguageLoss
    else:
        shared_tokenizer(model, teacher)
        loss = distill_loss_factory(
            teacher, losses if isinstance(losses, DistillConfig) else _recovery_config(model, teacher, losses), corpus
        )
    return train(model, corpus, recipe, out=out, valid=valid, loss=loss, progress=progress)  # pyright: ignore[reportArgumentType]


def _recovery_config(model: ModelProtocol, teacher: ModelProtocol, losses: DistillLosses | None) -> DistillConfig:
    """What is learned of the model before the cut: what is left of each layer has the names it had."""
    teacher_heads = set(teacher.spec.head_addresses)
    remaining = [head for head in model.spec.head_addresses if head in teacher_heads]
    pairs = [(str(head), str(head)) for head in remaining]
    last_layer = max((head.layer for head in remaining if head.stack == main_stack_name(model)), default=-1)
    return DistillConfig(losses or "logits", head_pairs=pairs or "best", relation_layers=(last_layer, last_layer))
