"""Pure functions on tensors. Four kernels with one signature, masks, positions, biases."""

from headwise.kernels.batched import attention_weights, batched
from headwise.kernels.blockwise import blockwise
from headwise.kernels.dispatch import (
    BACKENDS,
    KernelChoice,
    attention,
    choose_kernel,
    default_score_params,
    make_score_params,
    run_kernel,
)
from headwise.kernels.fused import fused
from headwise.kernels.masks import CausalMask, Mask, causal, document_mask, padding_mask, per_head, window
from headwise.kernels.positions import RotaryTable, alibi_slopes, sinusoidal
from headwise.kernels.reference import reference
from headwise.kernels.score_bias import POSITION_BIASES, AlibiBias, Bias, DenseBias, T5RelativeBias, distances
from headwise.kernels.score_params import ScoreParams

__all__ = [
    "BACKENDS",
    "POSITION_BIASES",
    "AlibiBias",
    "Bias",
    "CausalMask",
    "DenseBias",
    "KernelChoice",
    "Mask",
    "RotaryTable",
    "ScoreParams",
    "T5RelativeBias",
    "alibi_slopes",
    "attention",
    "attention_weights",
    "batched",
    "blockwise",
    "causal",
    "choose_kernel",
    "default_score_params",
    "distances",
    "document_mask",
    "fused",
    "make_score_params",
    "padding_mask",
    "per_head",
    "reference",
    "run_kernel",
    "sinusoidal",
    "window",
]
