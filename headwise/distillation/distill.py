"""`distill`: training with another loss. What a teacher knows becomes what a student learns from."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from headwise.distillation.distill_config import DistillConfig, DistillLosses
from headwise.distillation.distillation_loss import DistillationLoss
from headwise.distillation.head_pairs import (
    HeadPair,
    pair_heads_by_attention,
    pair_heads_by_order,
    parse_pairs,
    sample_texts,
)
from headwise.distillation.teacher_logits_cache import TeacherLogitsCache
from headwise.errors import HeadwiseError, suggest_names
from headwise.model import ModelProtocol, Transformer
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.training.loop import TrainCallback, TrainResult, run_request
from headwise.training.recipe import Recipe
from headwise.training.train_loss import MakeLoss
from headwise.training.train_request import TrainRequest

DEFAULT_TOP_K = 64  # logits of each token that are kept, where any are


def distill(
    student: ModelSpec | Transformer,
    teacher: ModelProtocol,
    corpus: Any = None,
    recipe: Recipe | None = None,
    *,
    losses: DistillLosses = "logits",
    out: str | Path | None = None,
    valid: Any = None,
    logits_folder: str | Path | None = None,
    top_k: int = DEFAULT_TOP_K,
    device: str | torch.device | None = None,
    callback: TrainCallback | None = None,
    callback_every: int = 100,
    progress: Progress | bool = True,
    **config_fields: Any,
) -> TrainResult:
    """Train a student, a spec or a model, to do what a teacher does: `hw.train` with another loss, and all it gives.

    `losses` is `logits`, `hidden`, `maps` or `qkv`, several of them, or a dictionary of weights; whatever else is given is
    a field of `headwise.distillation.DistillConfig`: temperature, alpha, ce_weight, head_pairs, layers, relation_layers,
    relation_heads. The teacher is any model with the same tokenizer; it stays as it is, in eval mode and in its own
    precision. `logits_folder` is a folder for its `top_k` largest logits of each token: a second run over the same rows
    does not ask it again.

    >>> from headwise.spec import AttentionSpec
    >>> from headwise.training import train
    >>> spec = ModelSpec(vocab=257, context=16, layers=2, attention=AttentionSpec(width=16, heads=2))
    >>> text, recipe = "to be or not to be " * 50, Recipe(steps=4, batch_size=4, warmup=1)
    >>> teacher = train(spec, text, recipe, progress=False).model
    >>> small = spec.resized(layers=1)
    >>> result = distill(small, teacher, text, recipe, losses=("logits", "maps"), progress=False)
    >>> result.step, len(result.model.spec.head_addresses)
    (4, 2)
    """
    config = DistillConfig(losses, **_check_config_fields(config_fields))
    tokenizer = shared_tokenizer(student, teacher)
    request = TrainRequest(student, corpus, recipe, out=out, valid=valid, tokenizer=tokenizer)
    if request.resolved_recipe.compile and config.loss_weights.keys() != {"logits"}:
        raise HeadwiseError("compile goes with losses='logits' alone; other losses look inside the model.")
    distill_request = replace(
        request,
        loss=distill_loss_factory(teacher, config, request.train_corpus, logits_folder=logits_folder, top_k=top_k),
    )
    return run_request(
        distill_request, device=device, callback=callback, callback_every=callback_every, progress=progress
    )


def distill_loss_factory(
    teacher: ModelProtocol,
    config: DistillConfig,
    corpus: Any,
    *,
    logits_folder: str | Path | None = None,
    top_k: int = DEFAULT_TOP_K,
) -> MakeLoss:
    """What `hw.train(…, loss=…)` takes: a student of this teacher."""
    if logits_folder is not None and config.loss_weights.keys() != {"logits"}:
        raise HeadwiseError("logits_folder keeps the teacher's logits; use losses='logits' alone, or leave it out.")
    if top_k < 1:
        raise HeadwiseError(f"at least one logit of each token is kept, got top_k={top_k}.")
    fingerprint = weights_digest(teacher)

    def make(student: Transformer) -> DistillationLoss:
        check_compatible_kinds(student.spec, teacher.spec)
        pairs = _head_pairs(student, teacher, config, corpus) if "maps" in config.loss_weights else []
        logits_cache = (
            None
            if logits_folder is None
            else TeacherLogitsCache(Path(logits_folder), top_k, config.temperature, fingerprint)
        )
        metadata = {
            **config.to_dict(),
            "head_pairs": [[str(student_head), str(teacher_head)] for student_head, teacher_head in pairs],
            "teacher": fingerprint,
        }
        metadata["top_k"] = None if logits_folder is None else top_k
        return DistillationLoss(student, teacher, config, pairs, logits_cache, json.dumps(metadata, sort_keys=True))

    return make


def shared_tokenizer(student: ModelSpec | ModelProtocol, teacher: ModelProtocol) -> Tokenizer:
    """The tokenizer both have, the same ids for the same tokens; refused, with the reason, where they differ."""
    if teacher.output is None or (not isinstance(student, ModelSpec) and student.output is None):
        raise HeadwiseError(
            "a student and its teacher both need an output over the vocabulary, to be asked for tokens."
        )
    teacher_tokenizer = teacher.tokenizer
    if not isinstance(teacher_tokenizer, Tokenizer):
        raise HeadwiseError("the teacher has no tokenizer; attach it with one: hw.attach(model, tokenizer).")
    if isinstance(student, ModelSpec):
        check_compatible_kinds(student, teacher.spec)
        return teacher_tokenizer
    student_tokenizer = student.tokenizer
    if not isinstance(student_tokenizer, Tokenizer):
        raise HeadwiseError("the student has no tokenizer; load it with one, or give its spec.")
    check_compatible_kinds(student.spec, teacher.spec)
    student_vocab, teacher_vocab = student_tokenizer.backend.get_vocab(), teacher_tokenizer.backend.get_vocab()
    differing = next(
        (token for token in (*student_vocab, *teacher_vocab) if student_vocab.get(token) != teacher_vocab.get(token)),
        None,
    )
    if differing is not None:
        student_id, teacher_id = student_vocab.get(differing, "none"), teacher_vocab.get(differing, "none")
        raise HeadwiseError(
            f"student and teacher have different tokenizers: {differing!r} is token {student_id} of the student and "
            f"{teacher_id} of the teacher. Distill from a teacher with the same one."
        )
    for text in ("The heads' attention, twice: 12 + 30!", "to  be\nor not"):
        if student_tokenizer.encode(text) != teacher_tokenizer.encode(text):
            raise HeadwiseError(
                f"student and teacher have the same vocabulary but read {text!r} differently; use one tokenizer for both."
            )
    return student_tokenizer


def check_compatible_kinds(student: ModelSpec, teacher: ModelSpec) -> None:
    """An encoder does not teach a decoder."""
    if student.kind != teacher.kind:
        raise HeadwiseError(
            f"the student is of kind {student.kind}, the teacher of kind {teacher.kind}; use the same kind."
        )


def _check_config_fields(config_fields: dict[str, Any]) -> dict[str, Any]:
    field_names = [field.name for field in fields(DistillConfig) if field.name != "losses"]
    for name in config_fields:
        if name not in field_names:
            raise HeadwiseError(f"DistillConfig has no field {name!r}; {suggest_names(name, field_names)}")
    return config_fields


def _head_pairs(student: ModelProtocol, teacher: ModelProtocol, config: DistillConfig, corpus: Any) -> list[HeadPair]:
    if not isinstance(config.head_pairs, str):
        return parse_pairs(student, teacher, config.head_pairs)
    if config.head_pairs == "order":
        return pair_heads_by_order(student, teacher)
    encode = teacher.tokenizer.encode
    return pair_heads_by_attention(student, teacher, [ids for text in sample_texts(corpus) if (ids := encode(text))])
