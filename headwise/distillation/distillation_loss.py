"""The training loss of a distillation: one forward pass of student and teacher, and the losses of a DistillConfig."""

from typing import Any

import torch
from torch import Tensor

from headwise.distillation.activations import ActivationExtractor, Activations
from headwise.distillation.distill_config import DistillConfig
from headwise.distillation.distill_losses import AttentionMapLoss, HiddenStateLoss, RelationLoss
from headwise.distillation.head_pairs import HeadPair
from headwise.distillation.logit_loss import kl_and_nll, kl_from_topk, logits_of
from headwise.distillation.teacher_logits_cache import TeacherLogitsCache
from headwise.errors import UnsupportedModelError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.training.batch_samplers import TrainBatch
from headwise.training.model_with_loss import ModelWithLoss


class DistillationLoss(ModelWithLoss):
    """Weighted losses of a DistillConfig for ids and targets (B, T). All are means over the tokens that count."""

    def __init__(
        self,
        model: ModelProtocol,
        teacher: ModelProtocol,
        config: DistillConfig,
        pairs: list[HeadPair],
        logits_cache: TeacherLogitsCache | None,
        name: str,
    ) -> None:
        super().__init__(model)
        if model.output is None or teacher.output is None:
            raise UnsupportedModelError(
                "student, teacher: both need a language modeling head, and one of them lacks it. "
                "Use models that predict tokens."
            )
        self._teacher = [teacher]  # in a list, so that its weights are not parameters of this module
        self.config, self.logits_cache, self.name = config, logits_cache, name
        self._teacher_activations: Activations | None = None  # cached for the current batch
        loss_weights = config.loss_weights
        self.hidden_loss = HiddenStateLoss(model, teacher, config.layers) if "hidden" in loss_weights else None
        self.map_loss = AttentionMapLoss(pairs) if "maps" in loss_weights else None
        self.relation_loss = (
            RelationLoss(model, teacher, config.relation_layers, config.relation_heads)
            if "qkv" in loss_weights
            else None
        )
        self.captures = [
            ActivationExtractor(side_model, *self._required_layers(side))
            for side, side_model in enumerate((model, teacher))
        ]

    def _required_layers(self, side: int) -> tuple[list[int], list[Any]]:
        """Return the layers and hook points of the student (0) or the teacher (1) that the losses need."""
        layers = [pair[side] for pair in self.hidden_loss.layers] if self.hidden_loss is not None else []
        layer_addresses = (
            [pair[side].layer_address for pair in self.map_loss.pairs] if self.map_loss is not None else []
        )
        return layers, [
            *layer_addresses,
            *([self.relation_loss.layer_addresses[side]] if self.relation_loss is not None else []),
        ]

    @property
    def teacher(self) -> ModelProtocol:
        """The teacher. It is not trained."""
        return self._teacher[0]

    def compute_loss(self, batch: TrainBatch, total: int | None) -> dict[str, Tensor]:
        """Return the weighted losses by name."""
        target_mask = batch.targets != IGNORE_INDEX  # (B, T)
        count = target_mask.sum().clamp(min=1)
        fraction = torch.ones((), device=target_mask.device) if total is None else target_mask.sum() / total
        self._teacher_activations = None
        student_activations = self.captures[0](batch.ids, **batch.model_kwargs)
        losses = self._output_losses(student_activations, batch, target_mask, fraction / count)
        if self.hidden_loss is not None or self.map_loss is not None or self.relation_loss is not None:
            teacher_activations, token_masks, weights = (
                self._run_teacher(batch),
                self._token_masks(batch, target_mask),
                self.config.loss_weights,
            )
            if self.hidden_loss is not None:
                losses["hidden"] = (
                    weights["hidden"]
                    * fraction
                    * self.hidden_loss(student_activations, teacher_activations, token_masks[""])
                )
            if self.map_loss is not None:
                losses["maps"] = (
                    weights["maps"] * fraction * self.map_loss(student_activations, teacher_activations, token_masks)
                )
            if self.relation_loss is not None:
                losses["qkv"] = (
                    weights["qkv"]
                    * fraction
                    * self.relation_loss(student_activations, teacher_activations, token_masks)
                )
        self._teacher_activations = None
        return losses

    def _output_losses(
        self, student_activations: Activations, rows: TrainBatch, target_mask: Tensor, fraction: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of the output: KL divergence from the teacher logits, and cross-entropy of the text."""
        config, losses = self.config, {}
        assert student_activations.last_hidden_state is not None
        hidden, target_ids = (
            student_activations.last_hidden_state[target_mask],
            rows.targets[target_mask],
        )  # (n, D), (n,)
        T, alpha = config.temperature, config.alpha
        if "logits" in config.loss_weights:
            if self.logits_cache is not None:
                cache_key = (
                    rows.ids,
                    target_mask,
                    *(value for value in rows.model_kwargs.values() if value is not None),
                )
                teacher_logits = self.logits_cache.get_or_compute(
                    cache_key, lambda: self._teacher_logits(rows, target_mask)
                )
                kl, nll = kl_from_topk(self.model, hidden, target_ids, teacher_logits, T)
            else:
                teacher_states = self._run_teacher(rows).last_hidden_state
                assert teacher_states is not None
                kl, nll = kl_and_nll(self.model, self.teacher, (hidden, teacher_states[target_mask]), target_ids, T)
            losses["logits"] = config.loss_weights["logits"] * alpha * T * T * kl * fraction
        elif config.effective_ce_weight:
            assert self.model.output is not None
            nll = self.model.output.cross_entropy(hidden, target_ids, 1)
        else:
            return losses
        if config.effective_ce_weight:
            losses["text"] = config.effective_ce_weight * nll * fraction
        return losses

    def _run_teacher(self, rows: TrainBatch) -> Activations:
        """Return the activations of the teacher. It runs once per batch."""
        if self._teacher_activations is None:
            with torch.no_grad(), eval_mode(self.teacher):
                self._teacher_activations = self.captures[1](rows.ids, **rows.model_kwargs)
        return self._teacher_activations

    def _teacher_logits(self, rows: TrainBatch, target_mask: Tensor) -> Tensor:
        """Return the teacher logits at the target tokens, (n, V)."""
        teacher_states = self._run_teacher(rows).last_hidden_state
        assert teacher_states is not None
        with torch.no_grad():
            return logits_of(self.teacher, teacher_states[target_mask])

    def _token_masks(self, rows: TrainBatch, target_mask: Tensor) -> dict[str, Tensor]:
        """Return masks of the tokens that count in hidden states and attention rows, (B, T), by stack.

        In a decoder these are the tokens with a target.
        """
        mask = target_mask if self.model.spec.kind != "encoder" else _token_mask(rows.ids, rows.attention_mask)
        masks = {"": mask, "dec": mask, "cross": mask}
        return masks if rows.source is None else {**masks, "enc": _token_mask(rows.source, rows.source_attention_mask)}


def _token_mask(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return True at real tokens, (B, T)."""
    return torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
