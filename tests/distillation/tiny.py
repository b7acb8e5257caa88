"""Small students and teachers with random weights, sharp enough to differ."""

from typing import Any

import torch

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import byte_tokenizer

VOCAB = 257


def make_model(
    seed: int = 0, *, layers: int = 2, heads: int = 4, width: int = 16, kind: str = "decoder", **attention_fields
) -> Transformer:
    torch.manual_seed(seed)
    rotary = Rotary() if attention_fields.pop("rotary", False) else None
    attention = AttentionSpec(width=width, heads=heads, rotary=rotary, **attention_fields)
    output = "mlm" if kind == "encoder" else "lm"
    fields: dict[str, Any] = {"kind": kind, "output": output, "positions": "none" if rotary else "learned"}
    spec = ModelSpec(vocab=VOCAB, context=64, layers=layers, attention=attention, **fields)
    model = Transformer(spec)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.ndim > 1 else None
    model.tokenizer = byte_tokenizer()
    return model.eval()


def make_batch(B: int = 2, T: int = 11, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (B, T + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[-1, -3:] = -100
    return ids[:, :-1], targets
