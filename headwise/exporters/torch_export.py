"""Export to a single file for `torch.export.load`, which does not require Headwise and computes the same outputs."""

import io
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.exporters.engine_parity import greedy_decode
from headwise.exporters.llama_cpp_runner import EngineToken
from headwise.exporters.traceable_modules import EncoderModule, bypass_empty_layers, check_exportable
from headwise.model import Transformer

SPEC_FILE = "headwise.json"  # entry of the archive that contains our spec


class LogitsModule(nn.Module):
    """Decoder as a function: ids (B, T) → logits (B, T, V)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits of all tokens, without a cache."""
        return self.model(ids)


def write_pt2(model: Any, path: Path) -> tuple[str, ...]:
    """Write a file to be used as `torch.export.load(path).module()(ids)`, or `(ids, attention_mask)` for an encoder."""
    check_exportable(model)
    max_tokens = model.spec.context if model.spec.positions == "learned" else 1 << 20
    dynamic_dims = {
        0: torch.export.Dim("batch", min=1, max=1 << 16),
        1: torch.export.Dim("tokens", min=1, max=max_tokens),
    }
    ids = torch.zeros(2, 3, dtype=torch.long, device=model.device)
    is_encoder = model.spec.kind == "encoder"
    inputs = (ids, torch.ones_like(ids, dtype=torch.bool)) if is_encoder else (ids,)
    shapes = {"ids": dynamic_dims, "attention_mask": dynamic_dims} if is_encoder else {"ids": dynamic_dims}
    with bypass_empty_layers(model):
        program = torch.export.export(
            EncoderModule(model) if is_encoder else LogitsModule(model), inputs, dynamic_shapes=shapes, strict=False
        )
        buffer = io.BytesIO()  # torch's own file writer aborts the process if the disk is full
        torch.export.save(program, buffer, extra_files={SPEC_FILE: model.spec.to_json()})
    path.write_bytes(buffer.getbuffer())
    return ("takes ids and attention_mask, True at real tokens" if is_encoder else "takes ids",)


def written_by_headwise(path: Path) -> bool:
    """Return whether Headwise wrote a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(f"/{SPEC_FILE}") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


@torch.no_grad()
def generate(
    path: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, banned: Collection[int]
) -> list[list[EngineToken]]:
    """Continue prompts greedily. The export has no cache, so each step computes the full text."""
    module = torch.export.load(path).module()

    def generate_one(prompt: Sequence[int]) -> list[EngineToken]:
        token_ids: list[int] = []

        def next_logits(ids: list[int]) -> Any:
            token_ids.extend(ids)
            return module(torch.tensor([token_ids]))[0, -1]

        return greedy_decode(prompt, max_new_tokens, next_logits, banned)

    return [generate_one(prompt) for prompt in prompts]


@torch.no_grad()
def hidden_states(path: Path, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Return the hidden state of each token of an encoder."""
    module, rows = torch.export.load(path).module(), [torch.tensor([list(ids)]) for ids in prompts]
    return [module(ids, torch.ones_like(ids, dtype=torch.bool))[0] for ids in rows]
