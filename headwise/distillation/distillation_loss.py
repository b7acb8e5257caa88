"""A student with its teacher: one pass of each, and the losses of a DistillConfig between them."""

from typing import Any

import torch
from torch import Tensor

from headwise.distillation.activations import ActivationCapture, Activations
from headwise.distillation.distill_config import DistillConfig
from headwise.distillation.distill_losses import AttentionMapLoss, HiddenStateLoss, RelationLoss
from headwise.distillation.head_pairs import HeadPair
from headwise.distillation.logit_loss import kl_and_nll, kl_from_topk, logits_of
from headwise.distillation.teacher_logits_cache import TeacherLogitsCache
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.loss import IGNORE_INDEX
from headwise.training.batch_samplers import TrainBatch
from headwise.training.train_loss import TrainLoss


class DistillationLoss(TrainLoss):
    """ids and targets (B, T) → every loss of the config, weighed; all are means over the tokens that count."""

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
            raise HeadwiseError(
                "a student and its teacher both need an output over the vocabulary, to be asked for tokens."
            )
        self._teacher = [teacher]  # in a list: its weights are not this module's, and never learn
        self.config, self.logits_cache, self.name = config, logits_cache, name
        self._teacher_activations: Activations | None = None  # the teacher's pass of this call
        loss_weights = config.loss_weights
        self.hidden_loss = HiddenStateLoss(model, teacher, config.layers) if "hidden" in loss_weights else None
        self.map_loss = AttentionMapLoss(pairs) if "maps" in loss_weights else None
        self.relation_loss = (
            RelationLoss(model, teacher, config.relation_layers, config.relation_heads)
            if "qkv" in loss_weights
            else None
        )
        self.captures = [
            ActivationCapture(side_model, *self._required_layers(side))
            for side, side_model in enumerate((model, teacher))
        ]

    def _required_layers(self, side: int) -> tuple[list[int], list[Any]]:
        """Layers and hook points of the student (0) or the teacher (1) that the losses look at."""
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
        """The model that is learned from; it stays as it is."""
        return self._teacher[0]

    def compute_loss(self, batch: TrainBatch, total: int | None) -> dict[str, Tensor]:
        """(B, T), (B, T) → the weighed losses, by name."""
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
        """The losses of what comes out: the teacher's logits and the text."""
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
        """The teacher's pass, once for a call."""
        if self._teacher_activations is None:
            with torch.no_grad(), eval_mode(self.teacher):
                self._teacher_activations = self.captures[1](rows.ids, **rows.model_kwargs)
        return self._teacher_activations

    def _teacher_logits(self, rows: TrainBatch, target_mask: Tensor) -> Tensor:
        """The teacher's logits at the tokens asked for, (n, V)."""
        teacher_states = self._run_teacher(rows).last_hidden_state
        assert teacher_states is not None
        with torch.no_grad():
            return logits_of(self.teacher, teacher_states[target_mask])

    def _token_masks(self, rows: TrainBatch, target_mask: Tensor) -> dict[str, Tensor]:
        """The tokens whose states and rows count, (B, T), by stack: of a decoder those that are followed by one."""
        mask = target_mask if self.model.spec.kind != "encoder" else _token_mask(rows.ids, rows.attention_mask)
        masks = {"": mask, "dec": mask, "cross": mask}
        return masks if rows.source is None else {**masks, "enc": _token_mask(rows.source, rows.source_attention_mask)}


def _token_mask(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Where there are tokens, (B, T)."""
    return torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
