# ruff: noqa: C408 (sizes read better as keywords)
"""One small model of every kind, ours and attached, with what each is asked: the whole contract suite runs over these.

In double precision, with weights large enough that every head matters, and with dropout, so that a mode left on would show.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.text.make import add_mask, word_tokenizer

WORDS = (
    *(
        "the",
        "cat",
        "dog",
        "saw",
        "a",
        "man",
        "who",
        "ran",
        "and",
        "sat",
        "then",
        "fell",
        "over",
        "it",
        "was",
        "red",
        ".",
    ),
)
TOKENIZER = add_mask(word_tokenizer(WORDS))
VOCAB, END = len(TOKENIZER), int(TOKENIZER.special["eos"] or 0)
TEXTS = [
    "the cat saw a dog .",
    "a man who ran fell over the red dog and then sat .",
    "it was the dog who saw the man .",
    "then the cat ran and fell .",
]

OURS: dict[str, Any] = dict(vocab=VOCAB, context=48, layers=2, hidden=20, dropout=0.3)
ATTENTION = hw.AttentionSpec(width=12, heads=3, bias=True, out_bias=True, dropout=0.3)
BODY: dict[str, Any] = dict(
    hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=VOCAB,
    max_position_embeddings=48, attention_dropout=0.3, pad_token_id=END, bos_token_id=END, eos_token_id=END,
)  # fmt: skip
GROUPED = BODY | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
THEIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(
        n_embd=12, n_layer=2, n_head=3, n_inner=20, vocab_size=VOCAB, n_positions=48, bos_token_id=END, eos_token_id=END)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | dict(sliding_window=4)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", BODY),
    "bert": ("BertForMaskedLM", "BertConfig", {k: v for k, v in BODY.items() if k != "attention_dropout"}),
    "bart": ("BartForConditionalGeneration", "BartConfig", dict(
        d_model=12, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=20, decoder_ffn_dim=20, vocab_size=VOCAB, max_position_embeddings=48, attention_dropout=0.3,
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=END, forced_eos_token_id=None)),
}  # fmt: skip
NATIVE = {
    "decoder": hw.ModelSpec(**OURS, attention=ATTENTION),
    "encoder": hw.ModelSpec(**OURS, attention=ATTENTION, kind="encoder", form="post", output="mlm"),
    "encoder-decoder": hw.ModelSpec(**OURS, attention=ATTENTION, kind="encoder-decoder"),
}
NAMES = (*NATIVE, *THEIRS)
DECODERS = ("decoder", "gpt2", "llama", "mistral", "gpt_neox")
ENCODERS = ("encoder", "bert")
PAIRED = ("encoder-decoder", "bart")
WRITERS = (*DECODERS, *PAIRED)

each = pytest.mark.parametrize("name", NAMES)


@cache
def kept(name: str) -> Any:
    """The model of a name, built once: whoever looks leaves it as it was, which is half of the contract."""
    return fresh(name)


def fresh(name: str) -> Any:
    """A model that may be spoilt."""
    torch.manual_seed(3)
    if name in NATIVE:
        inner: Any = hw.Transformer(NATIVE[name])
    else:
        transformers: Any = pytest.importorskip("transformers")
        kind, config, sizes = THEIRS[name]
        inner = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        if inner.can_generate():
            inner.generation_config.pad_token_id = END
    with torch.no_grad():
        for part, weight in inner.named_parameters():
            weight.copy_(0.4 * torch.randn_like(weight) + ("norm" in part.lower() and part.endswith("weight")))
    inner.double().eval()
    if name in NATIVE:
        inner.tokenizer = TOKENIZER
        return inner
    return hw.attach(inner, TOKENIZER)


def batch(name: str, side: str = "none") -> dict[str, Tensor]:
    """Two texts as token ids, the shorter one padded on a side ("none": as long as the shorter one, both)."""
    rows = [TOKENIZER.encode(text) for text in TEXTS[:2]]
    ids, padding = padded(rows, side)
    given = {"ids": ids} if padding is None else {"ids": ids, "padding": padding}
    if name in PAIRED:
        source, real = padded(rows[::-1], side)
        given |= {"source": source} if real is None else {"source": source, "source_padding": real}
    return given


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor | None]:
    if side == "none":
        least = min(map(len, rows))
        return torch.tensor([row[:least] for row in rows]), None
    most = max(map(len, rows))
    ids, real = torch.full((len(rows), most), END), torch.zeros(len(rows), most, dtype=torch.bool)
    for number, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(most - len(row), most)
        ids[number, where], real[number, where] = torch.tensor(row), True
    return ids, real


@torch.no_grad()
def logits(model: Any, given: dict[str, Tensor], **more: Any) -> Tensor:
    """What it says at real tokens, one text after the other: (tokens, V)."""
    made = model(**given, **more)
    real = given.get("padding")
    return made.flatten(0, 1) if real is None else made[real]


@contextmanager
def edited(model: Any, address: Any, amount: float) -> Iterator[Any]:
    """A copy whose W_O is scaled at one head: the other way to silence it."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.heads[address].W_O.mul_(amount)
    yield twin


def some_heads(model: Any) -> list[Any]:
    """Of every stack the first layer's last head, and the last layer's first."""
    by_stack: dict[str, list[Any]] = {}
    for address in model.heads.addresses:
        by_stack.setdefault(address.stack, []).append(address)
    return [
        pick
        for there in by_stack.values()
        for pick in (
            max(a for a in there if a.layer == 0), min(a for a in there if a.layer == there[-1].layer)
        )
    ]  # fmt: skip


@contextmanager
def training(model: Any) -> Iterator[None]:
    """A model in training mode, but for one part; on leaving it must be so still."""
    modes = {part: part.training for part in model.modules()}
    model.train()
    next(part for part in model.modules() if not list(part.children())).training = False
    now = {part: part.training for part in model.modules()}
    try:
        yield
        assert {part: part.training for part in model.modules()} == now, "every part is in its mode again"
    finally:
        for part, mode in modes.items():
            part.training = mode
