"""Knowledge distillation: `hw.train` with losses between a student and a teacher."""

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
from headwise.errors import ArgumentError, UnsupportedModelError, suggest_names
from headwise.model import ModelProtocol, Transformer
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.training.loop import TrainCallback, TrainResult, run_request
from headwise.training.model_with_loss import MakeLoss
from headwise.training.recipe import Recipe
from headwise.training.train_request import TrainRequest

DEFAULT_TOP_K = 64  # teacher logits stored per token in logits_folder


def distill(
    student: ModelSpec | ModelProtocol,
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
    """Train a student on the outputs of a teacher.

    Args:
        student: A spec, or a native or attached model to train further.
        teacher: Any model with the same tokenizer. It is not changed, and runs in eval mode and its own precision.
        corpus: A text, a list of texts, a path or a Corpus. None: the synthetic language.
        recipe: Numbers of the training run. None: the default recipe.
        losses: One or several of "logits", "hidden", "maps" and "qkv", or a dict of weights.
        out: Run folder for checkpoints, metrics and the model. None writes nothing.
        valid: Held-out texts. None: the part of the corpus that the recipe holds out.
        logits_folder: Folder that caches the largest teacher logits. A second run over the same rows does not run the
            teacher again. Only with losses="logits".
        top_k: Number of logits per token in `logits_folder`.
        device: Device for training, as in `hw.train`.
        callback: Called with the model every `callback_every` steps, as in `hw.train`.
        callback_every: Steps between callbacks.
        progress: True shows a progress display. A function is called with a label, the work done and the total.
        **config_fields: Fields of `headwise.distillation.DistillConfig`: temperature, alpha, ce_weight, head_pairs, layers,
            relation_layers, relation_heads.

    Returns:
        The result of the training run, as `hw.train` returns it.

    Raises:
        ArgumentError: If a loss or a config field is unknown or not valid.
        UnsupportedModelError: If student and teacher have different tokenizers or kinds, or no language modeling head.

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
        raise ArgumentError(
            "compile: it is supported only with losses='logits', because other losses use hooks inside the model. "
            f"Got losses={losses!r}. Set compile=False in the recipe."
        )
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
    """Return a factory of distillation losses for `hw.train(…, loss=…)`."""
    if logits_folder is not None and config.loss_weights.keys() != {"logits"}:
        raise ArgumentError(
            "logits_folder: it caches only teacher logits, and other losses need the teacher. "
            f"Got losses={config.losses!r}. Use losses='logits' alone, or leave out logits_folder."
        )
    if top_k < 1:
        raise ArgumentError(
            f"top_k: at least one logit per token must be stored. Got {top_k}. Use top_k={DEFAULT_TOP_K}."
        )
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
    """Return the tokenizer of the student. Raise if it differs from that of the teacher."""
    if teacher.output is None or (not isinstance(student, ModelSpec) and student.output is None):
        raise UnsupportedModelError(
            "student, teacher: both need a language modeling head, and one of them lacks it. "
            "Use models that predict tokens."
        )
    teacher_tokenizer = teacher.tokenizer
    if not isinstance(teacher_tokenizer, Tokenizer):
        raise UnsupportedModelError(
            "teacher: it has no tokenizer. Attach it with its tokenizer: hw.attach(model, tokenizer)."
        )
    if isinstance(student, ModelSpec):
        check_compatible_kinds(student, teacher.spec)
        return teacher_tokenizer
    student_tokenizer = student.tokenizer
    if not isinstance(student_tokenizer, Tokenizer):
        raise UnsupportedModelError("student: it has no tokenizer. Load it with a tokenizer, or pass its spec.")
    check_compatible_kinds(student.spec, teacher.spec)
    student_vocab, teacher_vocab = student_tokenizer.backend.get_vocab(), teacher_tokenizer.backend.get_vocab()
    differing = next(
        (token for token in (*student_vocab, *teacher_vocab) if student_vocab.get(token) != teacher_vocab.get(token)),
        None,
    )
    if differing is not None:
        student_id, teacher_id = student_vocab.get(differing, "none"), teacher_vocab.get(differing, "none")
        raise UnsupportedModelError(
            f"student, teacher: they have different tokenizers. Token {differing!r} has id {student_id} in the student and "
            f"{teacher_id} in the teacher. Use a teacher with the same tokenizer."
        )
    for text in ("The heads' attention, twice: 12 + 30!", "to  be\nor not"):
        if student_tokenizer.encode(text) != teacher_tokenizer.encode(text):
            raise UnsupportedModelError(
                f"student, teacher: their tokenizers have the same vocabulary but encode {text!r} differently. "
                "Use one tokenizer for both."
            )
    return student_tokenizer


def check_compatible_kinds(student: ModelSpec, teacher: ModelSpec) -> None:
    """Raise if student and teacher differ in kind (decoder, encoder, encoder-decoder)."""
    if student.kind != teacher.kind:
        raise UnsupportedModelError(
            f"student, teacher: both must be of the same kind. Got a student of kind {student.kind} and a teacher of kind "
            f"{teacher.kind}. Use a teacher of kind {student.kind}."
        )


def _check_config_fields(config_fields: dict[str, Any]) -> dict[str, Any]:
    field_names = [field.name for field in fields(DistillConfig) if field.name != "losses"]
    for name in config_fields:
        if name not in field_names:
            raise ArgumentError(f"{name}: not a field of DistillConfig; {suggest_names(name, field_names)}")
    return config_fields


def _head_pairs(student: ModelProtocol, teacher: ModelProtocol, config: DistillConfig, corpus: Any) -> list[HeadPair]:
    if not isinstance(config.head_pairs, str):
        return parse_pairs(student, teacher, config.head_pairs)
    if config.head_pairs == "order":
        return pair_heads_by_order(student, teacher)
    encode = teacher.tokenizer.encode
    return pair_heads_by_attention(student, teacher, [ids for text in sample_texts(corpus) if (ids := encode(text))])
