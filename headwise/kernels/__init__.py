"""Pure functions on tensors. Four kernels with one signature, masks, positions, biases."""

from headwise.kernels.batched import batched, maps
from headwise.kernels.bias import POSITION_BIASES, Alibi, Bias, Buckets, Given, distances
from headwise.kernels.blockwise import blockwise
from headwise.kernels.dispatch import BACKENDS, Choice, attention, choose, make_terms, plain_terms, run
from headwise.kernels.fused import fused
from headwise.kernels.masks import Causal, Mask, causal, document_mask, padding_mask, per_head, window
from headwise.kernels.positions import Angles, alibi_slopes, sinusoidal
from headwise.kernels.reference import reference
from headwise.kernels.score_params import Terms

__all__ = [
    "BACKENDS",
    "POSITION_BIASES",
    "Alibi",
    "Angles",
    "Bias",
    "Buckets",
    "Causal",
    "Choice",
    "Given",
    "Mask",
    "Terms",
    "alibi_slopes",
    "attention",
    "batched",
    "blockwise",
    "causal",
    "choose",
    "distances",
    "document_mask",
    "fused",
    "make_terms",
    "maps",
    "padding_mask",
    "per_head",
    "plain_terms",
    "reference",
    "run",
    "sinusoidal",
    "window",
]
