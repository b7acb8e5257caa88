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
from headwise.text.build_tokenizers import add_mask, word_tokenizer

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
    # Learned sinks and capped scores, on the eager functions of their own files.
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", GROUPED | dict(
        sliding_window=4, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | dict(
        sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=5.0)),
    # Off the interface: what their modules call is watched.
    "falcon": ("FalconForCausalLM", "FalconConfig", dict(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, ffn_hidden_size=20, vocab_size=VOCAB, alibi=False,
        new_decoder_architecture=False, multi_query=False, bias=True, attention_dropout=0.3, hidden_dropout=0.3,
        max_position_embeddings=48, bos_token_id=END, eos_token_id=END, pad_token_id=END)),
    "bloom": ("BloomForCausalLM", "BloomConfig", dict(
        hidden_size=12, n_layer=2, n_head=3, vocab_size=VOCAB, attention_dropout=0.3, hidden_dropout=0.3,
        bos_token_id=END, eos_token_id=END, pad_token_id=END)),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", dict(
        n_embd=12, n_layer=2, n_head=3, n_inner=20, rotary_dim=4, vocab_size=VOCAB, n_positions=48, attn_pdrop=0.3,
        bos_token_id=END, eos_token_id=END, tie_word_embeddings=False)),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", dict(
        hidden_size=12, num_layers=2, num_heads=3, intermediate_size=20, vocab_size=VOCAB, max_position_embeddings=48,
        attention_types=[[["global", "local"], 1]], window_size=4, attention_dropout=0.3, bos_token_id=END,
        eos_token_id=END)),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", dict(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=VOCAB,
        max_position_embeddings=48, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
        pad_token_id=END, type_vocab_size=0)),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", dict(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=VOCAB,
        max_position_embeddings=48, pad_token_id=END, bos_token_id=END, eos_token_id=END)),
}  # fmt: skip
NATIVE = {
    "decoder": hw.ModelSpec(**OURS, attention=ATTENTION),
    "encoder": hw.ModelSpec(**OURS, attention=ATTENTION, kind="encoder", form="post", output="mlm"),
    "encoder-decoder": hw.ModelSpec(**OURS, attention=ATTENTION, kind="encoder-decoder"),
}
NAMES = (*NATIVE, *THEIRS)
# Their softmax is in single precision, where the smallest double is -inf: a row of padding that sees nothing is NaN in plain
# transformers too, and with it what follows. So they run in single precision.
DTYPES = {"gemma2": torch.float32, "bloom": torch.float32}
ROUNDING = (*DTYPES, "gptj", "gpt_neo")  # the last two multiply queries and keys in single precision
CLOSE = 1e-9
DECODERS = (
    "decoder",
    "gpt2",
    "llama",
    "mistral",
    "gpt_neox",
    "gpt_oss",
    "gemma2",
    "falcon",
    "bloom",
    "gptj",
    "gpt_neo",
)
ENCODERS = ("encoder", "bert", "deberta", "mpnet")
PAIRED = ("encoder-decoder", "bart")
WRITERS = (*DECODERS, *PAIRED)
# Which norm stands before heads is known of these (docs/attach.md); of others it is not told.
NORMED = ("decoder", "encoder-decoder", "gpt2", "llama", "mistral", "gpt_neox", "gpt_oss", "gptj")
POST = ("encoder", "bert", "bart")  # no norm before heads, and known to have none
UNCUT = {"bloom": "cannot be called without them"}  # masks made for all heads, in which each has its slope
UNWIRED = {"gemma2": "they may be capped"}

each = pytest.mark.parametrize("name", NAMES)


@cache
def kept(name: str) -> Any:
    """The model of a name, built once: whoever looks leaves it as it was, which is half of the contract."""
    return fresh(name)


@cache
def close(name: str) -> float:
    """How far apart two ways to the same logits may be.

    1e-9; for a model that rounds to single precision on its way, ten times what plain transformers itself is off by where a
    text is padded and where it is not, which may be no more than 1e-5 of the largest logit.
    """
    if name not in ROUNDING:
        return CLOSE
    inner, given = plain(name), batch(name, "right")
    with torch.no_grad():
        together = inner(given["ids"], attention_mask=given["padding"].long()).logits[given["padding"]]
        alone = [inner(ids[None, real]).logits[0] for ids, real in zip(given["ids"], given["padding"], strict=True)]
    off, largest = float((together - torch.cat(alone)).abs().max()), float(together.abs().max())
    assert CLOSE < 10 * off <= 1e-5 * largest, f"{name} is off by {off}, its largest logit is {largest}"
    return 10 * off


def fresh(name: str) -> Any:
    """A model that may be spoilt."""
    inner = plain(name)
    if name in NATIVE:
        inner.tokenizer = TOKENIZER
        return inner
    return hw.attach(inner, TOKENIZER)


def plain(name: str) -> Any:
    """A model as it is built, not attached."""
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
    return inner.to(DTYPES.get(name, torch.float64)).eval()


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
