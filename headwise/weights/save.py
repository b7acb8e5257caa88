"""Our own format: spec.json, model.safetensors in the canonical split layout, plans, the tokenizer. Written whole
or not at all.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.files.aligned import write_tensors
from headwise.files.whole import whole_folder

if TYPE_CHECKING:
    from headwise.model import Transformer

PLANS = "plans.json"  # by which heads were cut


def save(model: "Transformer", folder: str | Path) -> Path:
    """Write a model, pruned or not; `load(folder)` brings it back bit by bit. A model that was there is replaced."""
    with whole_folder(folder, ("spec.json",)) as new:
        write_model(model, new)
    return Path(folder)


def write_model(model: "Transformer", folder: Path) -> None:
    """Write a model's files into a folder that is there."""
    state = model.state_dict()
    if model.spec.tied:
        state.pop("output.vocabulary.weight", None)
    storage = next((layer.read.storage for layer in model.attention_layers()), "qkv")
    write_tensors(state, folder / "model.safetensors", {"format": "headwise-1", "storage": storage})
    write_about(model, folder)


def write_about(model: "Transformer", folder: Path) -> None:
    """All that is known of a model besides its weights."""
    (folder / "spec.json").write_text(model.spec.to_json(), encoding="utf-8")
    if model.plans:
        told = {"plans": [json.loads(plan.to_json()) for plan in model.plans]}
        (folder / PLANS).write_text(json.dumps(told, indent=2), encoding="utf-8")
    if model.tokenizer is not None:
        model.tokenizer.save(folder)
