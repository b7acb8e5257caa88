"""Headwise: multi-head attention with the head as a first-class object.

The front door. Names are loaded when they are first used, so that `import headwise` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_ROOMS = {
    "errors": ("HeadwiseError",),
    "spec": (
        "Address",
        "AttentionSpec",
        "Keeps",
        "ModelSpec",
        "Rotary",
        "RotaryScaling",
        "layout",
        "preset",
        "presets",
    ),
    "kernels": ("Mask", "attention", "causal", "document_mask", "padding_mask", "per_head", "window"),
    "heads": ("Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch"),
    "model": ("Transformer",),
    "text": ("Corpus", "Tokenizer", "embed"),
    "team.spread": ("shard",),
    "attach": ("attach",),
    "weights": ("load",),
    "deploy": ("export",),
    "train": ("Recipe", "TrainRequest", "train"),
    "teach": ("distil",),
    "look.record.reading": ("Reading",),
    "look.record.recording": ("record",),
    "look.record.attend": ("attend",),
    "look.profile.make": ("profile",),
    "look.profile.shards": ("profile_shards",),
    "look.measure.measure": ("WeightAt", "WeightOn"),
    "look.profile.roles": ("Role",),
    "look.profile.result": ("Profile",),
    "look.worth.ablate": ("ablated", "patched"),
    "look.worth.importance": ("importance",),
    "look.worth.sensitivity": ("sensitivity",),
    "look.why.why": ("why",),
    "look.compare.compare": ("compare",),
    "look.compare.match": ("match",),
    "look.profile.history": ("HeadHistory",),
    "change.prune": ("prune",),
    "change.quantise": ("quantise", "dequantise"),
    "change.allocate": ("allocate",),
    "change.plan": ("Plan",),
    "change.request": ("PruneRequest",),
    "change.study": ("PruneStudy", "prune_study"),
    "lab.experiments.head_sweep": ("head_sweep",),
    "lab.run": ("claims",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [  # noqa: RUF022 (in the order of the rooms)
    "HeadwiseError",
    "Address", "AttentionSpec", "Keeps", "ModelSpec", "Rotary", "RotaryScaling", "layout", "preset", "presets",
    "Mask", "attention", "causal", "document_mask", "padding_mask", "per_head", "window",
    "Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch",
    "Transformer",
    "Corpus", "Tokenizer", "embed",
    "shard",
    "attach",
    "load",
    "export",
    "Recipe", "TrainRequest", "train", "distil",
    "Reading", "record", "attend", "profile", "profile_shards", "WeightAt", "WeightOn", "Role", "Profile",
    "ablated", "patched", "importance", "sensitivity", "why", "compare", "match", "HeadHistory",
    "prune", "quantise", "dequantise", "allocate", "Plan", "PruneRequest", "PruneStudy", "prune_study",
    "head_sweep", "claims",
]  # fmt: skip

if TYPE_CHECKING:
    from headwise.analysis.ablation.ablate import ablated, patched
    from headwise.analysis.ablation.importance import importance
    from headwise.analysis.ablation.sensitivity import sensitivity
    from headwise.analysis.attribution.score_attribution import why
    from headwise.analysis.metrics.metric import WeightAt, WeightOn
    from headwise.analysis.recording.attention_maps import attend
    from headwise.analysis.recording.recording import record
    from headwise.analysis.recording.tokenized_corpus import Reading
    from headwise.analysis.roles.history import HeadHistory
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.roles import Role
    from headwise.analysis.roles.shards import profile_shards
    from headwise.analysis.similarity.compare_heads import compare
    from headwise.analysis.similarity.match_heads import match
    from headwise.attached import attach
    from headwise.compression.allocate_bits import allocate
    from headwise.compression.plan import Plan
    from headwise.compression.prune import prune
    from headwise.compression.prune_request import PruneRequest
    from headwise.compression.prune_study import PruneStudy, prune_study
    from headwise.compression.quantize import dequantise, quantise
    from headwise.distillation import distil
    from headwise.distributed.head_parallel import shard
    from headwise.errors import HeadwiseError
    from headwise.experiments.head_sweep import head_sweep
    from headwise.experiments.run import claims
    from headwise.exporters import export
    from headwise.heads import Head, Heads, MultiHeadAttention, from_torch, to_torch
    from headwise.kernels import Mask, attention, causal, document_mask, padding_mask, per_head, window
    from headwise.model import Transformer
    from headwise.spec import Address, AttentionSpec, Keeps, ModelSpec, Rotary, RotaryScaling, layout, preset, presets
    from headwise.text import Corpus, Tokenizer, embed
    from headwise.training import Recipe, TrainRequest, train
    from headwise.weights import load


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    value = getattr(import_module(f"headwise.{_ROOM_OF[name]}"), name)
    globals()[name] = value  # next time without the detour
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])
