"""Recovery fine-tuning: a short training run that lets the remaining heads compensate for pruned ones."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from headwise.analysis.recording.batching import tokenizer_of
from headwise.distillation.activations import main_stack_name
from headwise.distillation.distill import distill_loss_factory, shared_tokenizer
from headwise.distillation.distill_config import DistillConfig, DistillLosses
from headwise.errors import ArgumentError, suggest_names
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.training.loop import TrainResult, train
from headwise.training.model_with_loss import LanguageLoss
from headwise.training.recipe import Recipe

DEFAULT_MAX_LENGTH = 256  # tokens per training row


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
    """Fine-tune a pruned model in place, with a small learning rate.

    Args:
        model: The pruned model. It is changed in place.
        corpus: Training texts, as in `train`.
        steps: Training steps.
        out: Run folder for checkpoints, as in `train`. None writes nothing.
        valid: Held-out texts, as in `train`.
        teacher: The full model before pruning. The pruned model is distilled from it if it is given.
        losses: Losses of `hw.distill`, or a DistillConfig. Only with a teacher. None: logits. Attention maps are matched
            between heads of the same address, and relations in the last layer that still has heads.
        progress: True shows a progress display. A function is called with a label, the work done and the total.
        **recipe_fields: Fields of `Recipe`. Defaults here: learning rate 3e-4 after a short warmup, no weight decay,
            batches of 16 rows with at most 256 tokens.

    Returns:
        The training result. Its `model` is the given model.

    Raises:
        ArgumentError: If a recipe field is unknown, or `losses` is given without a teacher.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> model = train(spec, "to be or not to be " * 50, Recipe(steps=2, batch_size=4), progress=False).model
    >>> recovered = recover(model, "to be or not to be " * 50, steps=3, batch_size=4, progress=False)
    >>> recovered.step, recovered.model is model
    (3, True)
    """
    recipe_names = {field.name for field in fields(Recipe)} - {"steps"}
    for name in recipe_fields.keys() - recipe_names:
        raise ArgumentError(f"{name}: not a field of Recipe; {suggest_names(name, recipe_names)}")
    tokenizer_of(model)  # raises: training with another tokenizer would damage the model
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
            raise ArgumentError(
                f"losses: distillation losses need a teacher. Got losses={losses!r}. "
                "Pass the model before pruning: teacher=…."
            )
        loss = LanguageLoss
    else:
        shared_tokenizer(model, teacher)
        loss = distill_loss_factory(
            teacher, losses if isinstance(losses, DistillConfig) else _recovery_config(model, teacher, losses), corpus
        )
    return train(model, corpus, recipe, out=out, valid=valid, loss=loss, progress=progress)  # pyright: ignore[reportArgumentType]


def _recovery_config(model: ModelProtocol, teacher: ModelProtocol, losses: DistillLosses | None) -> DistillConfig:
    """Return a distillation config that pairs each remaining head with the teacher head of the same address."""
    teacher_heads = set(teacher.spec.head_addresses)
    remaining = [head for head in model.spec.head_addresses if head in teacher_heads]
    pairs = [(str(head), str(head)) for head in remaining]
    last_layer = max((head.layer for head in remaining if head.stack == main_stack_name(model)), default=-1)
    return DistillConfig(losses or "logits", head_pairs=pairs or "best", relation_layers=(last_layer, last_layer))
