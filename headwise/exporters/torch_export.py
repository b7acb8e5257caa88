"""One file for torch alone (`torch.export`): it loads where Headwise is not installed, and gives the same outputs."""

import io
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.exporters.export_modules import Encoder, check_traceable, traceable
from headwise.exporters.llama_cpp import EngineToken
from headwise.exporters.parity import write_greedily
from headwise.model import Transformer

MARK = "headwise.json"  # a file inside, with our spec


class Logits(nn.Module):
    """ids (B, T) → logits (B, T, V)"""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Any text, from its first token."""
        return self.model(ids)


def write_pt2(model: Any, path: Path) -> tuple[str, ...]:
    """`torch.export.load(path).module()(ids)`; of an encoder `(ids, padding)`."""
    check_traceable(model)
    most = model.spec.context if model.spec.positions == "learned" else 1 << 20
    both = {0: torch.export.Dim("batch", min=1, max=1 << 16), 1: torch.export.Dim("tokens", min=1, max=most)}
    ids = torch.zeros(2, 3, dtype=torch.long, device=model.device)
    encodes = model.spec.kind == "encoder"
    given = (ids, torch.ones_like(ids, dtype=torch.bool)) if encodes else (ids,)
    shapes = {"ids": both, "padding": both} if encodes else {"ids": both}
    with traceable(model):
        made = torch.export.export(
            Encoder(model) if encodes else Logits(model), given, dynamic_shapes=shapes, strict=False
        )
        whole = io.BytesIO()  # written to a disk that is full, torch's own writer ends the process
        torch.export.save(made, whole, extra_files={MARK: model.spec.to_json()})
    path.write_bytes(whole.getbuffer())
    return ("takes ids and padding, True at real tokens" if encodes else "takes ids",)


def is_ours(path: Path) -> bool:
    """Whether a file was written here."""
    try:
        with zipfile.ZipFile(path) as held:
            return any(name.endswith(f"/{MARK}") for name in held.namelist())
    except zipfile.BadZipFile:
        return False


@torch.no_grad()
def write_on(
    path: Path, prompts: Sequence[Sequence[int]], tokens: int, never: Collection[int]
) -> list[list[EngineToken]]:
    """What a decoder writes behind some prompts, always the likeliest token; without a cache, so the whole text each time."""
    made = torch.export.load(path).module()

    def answer(prompt: Sequence[int]) -> list[EngineToken]:
        text: list[int] = []

        def feed(ids: list[int]) -> Any:
            text.extend(ids)
            return made(torch.tensor([text]))[0, -1]

        return write_greedily(prompt, tokens, feed, never)

    return [answer(prompt) for prompt in prompts]


@torch.no_grad()
def states(path: Path, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """What an encoder makes of every token."""
    made, rows = torch.export.load(path).module(), [torch.tensor([list(ids)]) for ids in prompts]
    return [made(ids, torch.ones_like(ids, dtype=torch.bool))[0] for ids in rows]
