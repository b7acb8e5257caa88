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
    from headwise.attach import attach
    from headwise.change.allocate import allocate
    from headwise.change.plan import Plan
    from headwise.change.prune import prune
    from headwise.change.quantise import dequantise, quantise
    from headwise.change.request import PruneRequest
    from headwise.change.study import PruneStudy, prune_study
    from headwise.deploy import export
    from headwise.errors import HeadwiseError
    from headwise.heads import Head, Heads, MultiHeadAttention, from_torch, to_torch
    from headwise.kernels import Mask, attention, causal, document_mask, padding_mask, per_head, window
    from headwise.lab.experiments.head_sweep import head_sweep
    from headwise.lab.run import claims
    from headwise.look.compare.compare import compare
    from headwise.look.compare.match import match
    from headwise.look.measure.measure import WeightAt, WeightOn
    from headwise.look.profile.history import HeadHistory
    from headwise.look.profile.make import profile
    from headwise.look.profile.result import Profile
    from headwise.look.profile.roles import Role
    from headwise.look.profile.shards import profile_shards
    from headwise.look.record.attend import attend
    from headwise.look.record.reading import Reading
    from headwise.look.record.recording import record
    from headwise.look.why.why import why
    from headwise.look.worth.ablate import ablated, patched
    from headwise.look.worth.importance import importance
    from headwise.look.worth.sensitivity import sensitivity
    from headwise.model import Transformer
    from headwise.spec import Address, AttentionSpec, Keeps, ModelSpec, Rotary, RotaryScaling, layout, preset, presets
    from headwise.teach import distil
    from headwise.team.spread import shard
    from headwise.text import Corpus, Tokenizer, embed
    from headwise.train import Recipe, TrainRequest, train
    from headwise.weights import load


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    value = getattr(import_module(f"headwise.{_ROOM_OF[name]}"), name)
    globals()[name] = value  # next time without the detour
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])
