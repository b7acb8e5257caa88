"""Headwise: multi-head attention with the head as a first-class object.

Public names are imported on first use, so that `import headwise` is fast.
"""

from typing import TYPE_CHECKING, Any

from headwise.lazy_import import make_lazy_getattr

__version__ = "0.2.0"

_NAMES_BY_MODULE = {
    "errors": ("HeadwiseError",),
    "spec": (
        "Address",
        "AttentionSpec",
        "CachePolicy",
        "Latent",
        "ModelSpec",
        "Plan",
        "QKNorm",
        "QueryScaling",
        "Rotary",
        "RotaryScaling",
        "preset",
        "presets",
    ),
    "kernels": ("Mask", "attention", "causal", "document_mask", "padding_mask", "per_head", "window"),
    "heads": ("Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch"),
    "model": ("Transformer",),
    "text": ("Corpus", "Tokenizer", "embed"),
    "distributed": ("layout", "shard"),
    "io.plan_file": ("load_plan", "save_plan"),  # not public: methods of Plan call them
    "attached": ("attach", "cached", "per_head_cache"),
    "weights": ("load", "to_native"),
    "exporters": ("export",),
    "training": ("Recipe", "train"),
    "distillation": ("distill",),
    "analysis.recording.tokenized_corpus": ("TokenizedCorpus",),
    "analysis.recording.recording": ("record",),
    "analysis.recording.attention_maps": ("attention_maps",),
    "analysis.attribution.scan": ("Scan", "scan"),
    "analysis.roles.profile": ("profile",),
    "analysis.roles.profile_result": ("Profile",),
    "analysis.roles.roles": ("Role",),
    "analysis.metrics.metric": ("AttentionToPosition", "AttentionToTokens"),
    "ui.head_summary": ("describe",),
    "analysis.ablation.ablate": ("ablated", "patched"),
    "analysis.ablation.importance": ("importance",),
    "analysis.ablation.quantization_sensitivity": ("sensitivity",),
    "analysis.attribution.score_attribution": ("explain",),
    "analysis.similarity.compare_heads": ("compare_heads",),
    "analysis.similarity.match_heads": ("match_heads",),
    "analysis.finding.head_search": ("find_heads",),
    "analysis.roles.head_history": ("HeadHistory",),
    "analysis.evaluation.harness_model": ("HarnessModel",),
    "analysis.evaluation.evaluate": ("evaluate",),
    "analysis.circuits.circuit_task": ("CircuitTask",),
    "analysis.circuits.find_circuit": ("find_circuit",),
    "analysis.circuits.redundancy": ("redundancy",),
    "analysis.steering.find_steering": ("find_steering",),
    "analysis.steering.steering": ("Steering",),
    "compression.fold_steering": ("fold_steering",),
    "compression.plan": ("apply", "plan_pruning", "plan_streaming", "prune"),
    "compression.prune_study": ("prune_study",),
    "compression.quantize": ("dequantize", "quantize", "quantized"),
    "compression.allocate_bits": ("allocate_bits",),
    "experiments.device_selftest": ("selftest",),
}

__all__ = [  # noqa: RUF022 (in the order of the packages)
    "HeadwiseError",
    "Address", "AttentionSpec", "CachePolicy", "Latent", "ModelSpec", "Plan", "QKNorm", "QueryScaling", "Rotary",
    "RotaryScaling", "preset", "presets",
    "Mask", "attention", "causal", "document_mask", "padding_mask", "per_head", "window",
    "Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch",
    "Transformer",
    "Corpus", "Tokenizer", "embed",
    "shard", "layout",
    "attach", "per_head_cache", "cached", "load", "to_native", "export",
    "Recipe", "train", "distill",
    "TokenizedCorpus", "record", "attention_maps", "scan", "Scan", "profile", "Profile", "Role",
    "AttentionToTokens", "AttentionToPosition",
    "describe", "ablated", "patched", "importance", "sensitivity", "explain", "compare_heads", "match_heads", "HeadHistory",
    "find_heads",
    "HarnessModel", "evaluate",
    "Steering", "find_steering",
    "CircuitTask", "find_circuit", "redundancy",
    "plan_pruning", "plan_streaming", "apply", "prune", "prune_study", "quantize", "quantized", "dequantize", "allocate_bits",
    "fold_steering",
    "selftest",
]  # fmt: skip

if TYPE_CHECKING:
    from headwise.analysis.ablation.ablate import ablated, patched
    from headwise.analysis.ablation.importance import importance
    from headwise.analysis.ablation.quantization_sensitivity import sensitivity
    from headwise.analysis.attribution.scan import Scan, scan
    from headwise.analysis.attribution.score_attribution import explain
    from headwise.analysis.circuits.circuit_task import CircuitTask
    from headwise.analysis.circuits.find_circuit import find_circuit
    from headwise.analysis.circuits.redundancy import redundancy
    from headwise.analysis.evaluation.evaluate import evaluate
    from headwise.analysis.evaluation.harness_model import HarnessModel
    from headwise.analysis.finding.head_search import find_heads
    from headwise.analysis.metrics.metric import AttentionToPosition, AttentionToTokens
    from headwise.analysis.recording.attention_maps import attention_maps
    from headwise.analysis.recording.recording import record
    from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.roles import Role
    from headwise.analysis.similarity.compare_heads import compare_heads
    from headwise.analysis.similarity.match_heads import match_heads
    from headwise.analysis.steering.find_steering import find_steering
    from headwise.analysis.steering.steering import Steering
    from headwise.attached import attach, cached, per_head_cache
    from headwise.compression.allocate_bits import allocate_bits
    from headwise.compression.fold_steering import fold_steering
    from headwise.compression.plan import apply, plan_pruning, plan_streaming, prune
    from headwise.compression.prune_study import prune_study
    from headwise.compression.quantize import dequantize, quantize, quantized
    from headwise.distillation import distill
    from headwise.distributed import layout, shard
    from headwise.errors import HeadwiseError
    from headwise.experiments.device_selftest import selftest
    from headwise.exporters import export
    from headwise.heads import Head, Heads, MultiHeadAttention, from_torch, to_torch
    from headwise.kernels import Mask, attention, causal, document_mask, padding_mask, per_head, window
    from headwise.model import Transformer
    from headwise.spec import (
        Address,
        AttentionSpec,
        CachePolicy,
        Latent,
        ModelSpec,
        Plan,
        QKNorm,
        QueryScaling,
        Rotary,
        RotaryScaling,
        preset,
        presets,
    )
    from headwise.text import Corpus, Tokenizer, embed
    from headwise.training import Recipe, train
    from headwise.ui.head_summary import describe
    from headwise.weights import load, to_native


_import_name = make_lazy_getattr(__name__, _NAMES_BY_MODULE)


def __getattr__(name: str) -> Any:
    value = globals()[name] = _import_name(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
