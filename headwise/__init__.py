"""Headwise: multi-head attention with the head as a first-class object.

The front door. Names are loaded when they are first used, so that `import headwise` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOMS = {
    "errors": ("HeadwiseError",),
    "spec": ("Address", "AttentionSpec", "ModelSpec", "Rotary", "RotaryScaling", "preset", "presets"),
    "kernels": ("Mask", "allow", "attention", "causal", "document", "padding", "per_head", "window"),
    "heads": ("Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch"),
    "model": ("Transformer",),
    "text": ("Corpus", "Tokenizer", "embed"),
    "attach": ("attach",),
    "weights": ("export", "load"),
    "train": ("Recipe", "train"),
    "look.record": ("record",),
    "look.attend": ("attend",),
    "look.profile": ("profile",),
    "look.measure": ("WeightAt", "WeightOn"),
    "look.roles": ("Role",),
    "look.result": ("Profile",),
    "look.ablate": ("ablated", "patched"),
    "look.importance": ("importance",),
    "look.between": ("between",),
    "look.biography": ("Biography",),
    "change.prune": ("prune",),
    "change.plan": ("Plan",),
    "lab.sweep": ("sweep",),
    "lab.run": ("claims",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [  # noqa: RUF022 (in the order of the rooms)
    "HeadwiseError",
    "Address", "AttentionSpec", "ModelSpec", "Rotary", "RotaryScaling", "preset", "presets",
    "Mask", "allow", "attention", "causal", "document", "padding", "per_head", "window",
    "Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch",
    "Transformer",
    "Corpus", "Tokenizer", "embed",
    "attach",
    "export", "load",
    "Recipe", "train",
    "record", "attend", "profile", "WeightAt", "WeightOn", "Role", "Profile",
    "ablated", "patched", "importance", "between", "Biography",
    "prune", "Plan",
    "sweep", "claims",
]  # fmt: skip

if TYPE_CHECKING:
    from headwise.attach import attach
    from headwise.change.plan import Plan
    from headwise.change.prune import prune
    from headwise.errors import HeadwiseError
    from headwise.heads import Head, Heads, MultiHeadAttention, from_torch, to_torch
    from headwise.kernels import Mask, allow, attention, causal, document, padding, per_head, window
    from headwise.lab.run import claims
    from headwise.lab.sweep import sweep
    from headwise.look.ablate import ablated, patched
    from headwise.look.attend import attend
    from headwise.look.between import between
    from headwise.look.biography import Biography
    from headwise.look.importance import importance
    from headwise.look.measure import WeightAt, WeightOn
    from headwise.look.profile import profile
    from headwise.look.record import record
    from headwise.look.result import Profile
    from headwise.look.roles import Role
    from headwise.model import Transformer
    from headwise.spec import Address, AttentionSpec, ModelSpec, Rotary, RotaryScaling, preset, presets
    from headwise.text import Corpus, Tokenizer, embed
    from headwise.train import Recipe, train
    from headwise.weights import export, load


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    value = getattr(import_module(f"headwise.{_ROOM_OF[name]}"), name)
    globals()[name] = value  # next time without the detour
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])
