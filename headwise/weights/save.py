"""Writer of our own format: spec.json, model.safetensors in the canonical split layout, plans and tokenizer. Atomic."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.distributed.model_shard import ShardedTransformer
from headwise.errors import HeadwiseError
from headwise.io.aligned_safetensors import write_tensors
from headwise.io.atomic_write import atomic_folder
from headwise.spec.migration import FORMAT, NATIVE_FORMAT

if TYPE_CHECKING:
    from headwise.model import Transformer

PLANS_FILE = "plans.json"  # plans by which the model was pruned


def save(model: "Transformer", folder: str | Path) -> Path:
    """Write a model to a folder. `load(folder)` restores it bit by bit. An earlier model in the folder is replaced."""
    if isinstance(model, ShardedTransformer):
        return _save_sharded_model(model, Path(folder))
    with atomic_folder(folder, ("spec.json",)) as temp_folder:
        write_model(model, temp_folder)
    return Path(folder)


def _save_sharded_model(model: ShardedTransformer, folder: Path) -> Path:
    """Write a sharded model. Rank 0 gathers all parts and writes; every process must call this function."""
    is_first, write_error = model.collectives.rank == 0, None
    state = {name: tensor for name, tensor in model.gathered_tensors() if is_first}
    try:
        if is_first:
            with atomic_folder(folder, ("spec.json",)) as temp_folder:
                write_model(model, temp_folder, state)
    except HeadwiseError as error:
        write_error = error
    failed = int(model.collectives.all_reduce_max(torch.tensor([int(write_error is not None)])))
    if failed:
        raise write_error or HeadwiseError(f"{folder}: rank 0 could not write the model. See the error of rank 0.")
    return folder


def write_model(model: "Transformer", folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write a model's files to an existing folder. `state` replaces the model's own tensors."""
    state = model.state_dict() if state is None else state
    if model.spec.tied:
        state.pop("output.vocabulary.weight", None)
    if model.spec.shared_layers:
        state = {name: tensor for name, tensor in state.items() if first_block_tensor_name(name) == name}
    storage = next((layer.qkv.storage for layer in model.attention_layers()), "qkv")
    write_tensors(state, folder / "model.safetensors", {"format": NATIVE_FORMAT, "storage": storage})
    write_metadata(model, folder)


def first_block_tensor_name(name: str) -> str:
    """Return the name under which a tensor of shared layers is stored: that of the first block.

    >>> first_block_tensor_name("blocks.11.mlp.up.weight"), first_block_tensor_name("embed.tokens.weight")
    ('blocks.0.mlp.up.weight', 'embed.tokens.weight')
    """
    return re.sub(r"^blocks\.\d+\.", "blocks.0.", name)


def write_metadata(model: "Transformer", folder: Path) -> None:
    """Write spec, plans and tokenizer."""
    spec = {"format": FORMAT, **model.spec.to_dict()}
    (folder / "spec.json").write_text(json.dumps(spec, indent=2), encoding="utf-8")
    if model.plans:
        plan_data = {"plans": [plan.to_dict() for plan in model.plans]}
        (folder / PLANS_FILE).write_text(json.dumps(plan_data, indent=2), encoding="utf-8")
    if model.tokenizer is not None:
        model.tokenizer.save(folder)
