"""Our own format: spec.json, model.safetensors in the canonical split layout, plans, the tokenizer. Written whole
or not at all.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.io.aligned_safetensors import write_tensors
from headwise.io.atomic_write import whole_folder
from headwise.model.shard import Shard

if TYPE_CHECKING:
    from headwise.model import Transformer

PLANS = "plans.json"  # by which heads were cut


def save(model: "Transformer", folder: str | Path) -> Path:
    """Write a model, pruned or not; `load(folder)` brings it back bit by bit. A model that was there is replaced."""
    if isinstance(model, Shard):
        return _save_parts(model, Path(folder))
    with whole_folder(folder, ("spec.json",)) as new:
        write_model(model, new)
    return Path(folder)


def _save_parts(model: Shard, folder: Path) -> Path:
    """A model that is spread over processes: the first of them is sent all parts and writes; all must call this."""
    first, wrong = model.together.rank == 0, None
    state = {name: tensor for name, tensor in model.gathered() if first}
    try:
        if first:
            with whole_folder(folder, ("spec.json",)) as new:
                write_model(model, new, state)
    except HeadwiseError as error:
        wrong = error
    failed = int(model.together.largest(torch.tensor([int(wrong is not None)])))
    if failed:
        raise wrong or HeadwiseError(f"{folder} could not be written by the first process; it says why.")
    return folder


def write_model(model: "Transformer", folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write a model's files into a folder that is there; `state` are its tensors, if not those it has."""
    state = model.state_dict() if state is None else state
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
