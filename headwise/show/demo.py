"""The demo: a small decoder with random weights reads a sentence, and every one of its heads is looked at and silenced."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import PerHead, Seen
from headwise.kernels import causal, maps
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary

SENTENCE = "The teacher gave the students their homework."


@dataclass(frozen=True)
class HeadRow:
    """What the demo shows of one head, seen from the last byte of the sentence."""

    head: str
    looks_at: str  # the byte it attends to most, with its place
    weight: float  # how much
    entropy: float  # how widely it looks, in nats, mean over queries
    write: float  # the length of what it writes, mean over tokens
    effect: float  # how far next-byte probabilities move when it is silenced (total variation, last position)


@dataclass(frozen=True)
class Demo:
    """The model's size, the sentence, the kernel that ran, the heads."""

    parameters: int
    sentence: str
    kernel: str
    because: str
    looking_changed_nothing: bool
    heads: list[HeadRow]


def small_decoder() -> ModelSpec:
    """Four layers of four heads over bytes, in the way of Llama."""
    return ModelSpec(
        vocab=256, context=256, layers=4, attention=AttentionSpec(width=128, heads=4, rotary=Rotary()),
        norm="rms", activation="swiglu", hidden=384, mlp_bias=False, positions="none",
    )  # fmt: skip


def demo(sentence: str = SENTENCE, seed: int = 0) -> Demo:
    """Build, run, look, silence. The weights are random: this shows the instrument, not a trained model's skill."""
    spec, data = small_decoder(), sentence.encode()
    if not 0 < len(data) <= spec.context:
        raise HeadwiseError(f"the sentence has {len(data)} bytes; the demo's model reads 1 to {spec.context}.")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(spec).eval()
    ids = torch.tensor([list(data)])  # (1, T)
    calls: list[Seen] = []
    with torch.inference_mode(), ExitStack() as listening:
        plain = model(ids)  # (1, T, 256)
        for site in model.sites():
            listening.enter_context(site.listen(calls.append))
        watched = model(ids)
        listening.close()
        rows = [row for call in calls for row in _rows(model, ids, call, plain)]
    kernel = next(model.attention_layers()).why(len(data), mask=causal())
    return Demo(spec.parameters, sentence, kernel.backend, kernel.because, torch.equal(plain, watched), rows)


def _rows(model: Transformer, ids: Tensor, call: Seen, plain: Tensor) -> Iterator[HeadRow]:
    """One row per head of one layer."""
    attended = maps(call.q, call.k, call.terms)[0]  # (H, T, T)
    entropies = torch.special.entr(attended).sum(-1).mean(-1)  # (H,)
    lengths = PerHead(call.z, call.site.W_O, None).norms()[0].mean(-1)  # (H,)
    expected = plain[0, -1].softmax(-1)  # (256,)
    for i, address in enumerate(call.site.addresses):
        weight, place = attended[i, -1].max(-1)
        silent = model(ids, gates={str(address): 0.0})[0, -1].softmax(-1)
        yield HeadRow(
            head=str(address),
            looks_at=f"{bytes([int(ids[0, place])])!r} at {int(place)}"[1:],
            weight=weight.item(),
            entropy=entropies[i].item(),
            write=lengths[i].item(),
            effect=0.5 * (silent - expected).abs().sum().item(),
        )
