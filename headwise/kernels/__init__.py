"""Attention as pure functions on tensors: four kernels with one signature, masks, position encodings and biases."""

from headwise.kernels.batched import attend_with_weights, attention_weights, batched
from headwise.kernels.blockwise import blockwise
from headwise.kernels.dispatch import (
    BACKENDS,
    KernelChoice,
    attention,
    default_score_params,
    make_kernel_choice,
    make_score_params,
    run_kernel,
)
from headwise.kernels.fused import fused
from headwise.kernels.masks import CausalMask, Mask, causal, document_mask, padding_mask, per_head, window
from headwise.kernels.positions import RotaryTable, alibi_slopes, sinusoidal
from headwise.kernels.reference import reference
from headwise.kernels.resolve_device import resolve_device, resolve_dtype
from headwise.kernels.rounding_tolerance import rounding_bound
from headwise.kernels.score_bias import (
    POSITION_BIASES,
    AlibiBias,
    Bias,
    DenseBias,
    T5RelativeBias,
    query_minus_key_distances,
)
from headwise.kernels.score_params import (
    ScoreParams,
    ScoreRequest,
    add_bias_and_mask,
    raw_scores,
    repeat_kv,
    softmax_weights,
)

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
    "ScoreRequest",
    "T5RelativeBias",
    "add_bias_and_mask",
    "alibi_slopes",
    "attend_with_weights",
    "attention",
    "attention_weights",
    "batched",
    "blockwise",
    "causal",
    "default_score_params",
    "document_mask",
    "fused",
    "make_kernel_choice",
    "make_score_params",
    "padding_mask",
    "per_head",
    "query_minus_key_distances",
    "raw_scores",
    "reference",
    "repeat_kv",
    "resolve_device",
    "resolve_dtype",
    "rounding_bound",
    "run_kernel",
    "sinusoidal",
    "softmax_weights",
    "window",
]
