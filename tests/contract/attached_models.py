# ruff: noqa: C408 (sizes read better as keywords)
"""Small models of every kind, native and attached, with their inputs. The contract suite runs over these models.

Models are in float64, with weights large enough that every head matters, and with dropout, so that training mode is visible.
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
from headwise.text.build_tokenizers import add_mask_token, word_tokenizer

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
TOKENIZER = add_mask_token(word_tokenizer(WORDS))
VOCAB, END = len(TOKENIZER), int(TOKENIZER.special["eos"] or 0)
TEXTS = [
    "the cat saw a dog .",
    "a man who ran fell over the red dog and then sat .",
    "it was the dog who saw the man .",
    "then the cat ran and fell .",
]

NATIVE_SIZES: dict[str, Any] = dict(vocab=VOCAB, context=48, layers=2, mlp_width=20, dropout=0.3)
ATTENTION = hw.AttentionSpec(width=12, heads=3, bias=True, out_bias=True, dropout=0.3)
COMMON_SIZES: dict[str, Any] = dict(
    hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=VOCAB,
    max_position_embeddings=48, attention_dropout=0.3, pad_token_id=END, bos_token_id=END, eos_token_id=END,
)  # fmt: skip
GROUPED = COMMON_SIZES | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
HF_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(
        n_embd=12, n_layer=2, n_head=3, n_inner=20, vocab_size=VOCAB, n_positions=48, bos_token_id=END, eos_token_id=END)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | dict(sliding_window=4)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON_SIZES),
    "bert": ("BertForMaskedLM", "BertConfig", {k: v for k, v in COMMON_SIZES.items() if k != "attention_dropout"}),
    "bart": ("BartForConditionalGeneration", "BartConfig", dict(
        d_model=12, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=20, decoder_ffn_dim=20, vocab_size=VOCAB, max_position_embeddings=48, attention_dropout=0.3,
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=END, forced_eos_token_id=None)),
    # Learned sinks and softcaps, with the eager attention functions of their own files.
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", GROUPED | dict(
        sliding_window=4, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | dict(
        sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=5.0)),
    # Not on the attention interface of transformers: the calls of their modules are traced.
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
    "decoder": hw.ModelSpec(**NATIVE_SIZES, attention=ATTENTION),
    "encoder": hw.ModelSpec(**NATIVE_SIZES, attention=ATTENTION, kind="encoder", norm_placement="post", output="mlm"),
    "encoder-decoder": hw.ModelSpec(**NATIVE_SIZES, attention=ATTENTION, kind="encoder-decoder"),
}
NAMES = (*NATIVE, *HF_MODELS)
# Their softmax is in single precision, in which the smallest double is -inf: a row of padding without visible keys is NaN in
# plain transformers too, and so are later layers. So these models run in single precision.
DTYPES = {"gemma2": torch.float32, "bloom": torch.float32}
SINGLE_PRECISION = (*DTYPES, "gptj", "gpt_neo")  # the last two compute scores in single precision
TOLERANCE = 1e-9
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
ENCODER_DECODERS = ("encoder-decoder", "bart")
GENERATORS = (*DECODERS, *ENCODER_DECODERS)
# The input norms of these models are known (docs/attached.md); those of other models are not.
PRE_NORM = ("decoder", "encoder-decoder", "gpt2", "llama", "mistral", "gpt_neox", "gpt_oss", "gptj")
POST_NORM = ("encoder", "bert", "bart")  # post-norm models, which have no input norms
NOT_PRUNABLE = {"bloom": "cannot be pruned"}  # its masks are built for all heads, each with its slope
NO_RESIDUAL_STREAM = {"gemma2": "they may be capped"}

each_model = pytest.mark.parametrize("name", NAMES)


@cache
def cached_model(name: str) -> Any:
    """Return the model of a name, built once. Tests must leave it unchanged, which is part of the contract."""
    return new_model(name)


@cache
def tolerance(name: str) -> float:
    """Return the tolerance of logits that are computed in two ways.

    It is 1e-9. For a model that computes partly in single precision, it is ten times the difference between padded and
    unpadded texts in plain transformers, which must be at most 1e-5 of the largest logit.
    """
    if name not in SINGLE_PRECISION:
        return TOLERANCE
    inner, inputs = build_model(name), batch(name, "right")
    with torch.no_grad():
        batched = inner(inputs["ids"], attention_mask=inputs["attention_mask"].long()).logits[inputs["attention_mask"]]
        separate = [
            inner(ids[None, real]).logits[0] for ids, real in zip(inputs["ids"], inputs["attention_mask"], strict=True)
        ]
    error, largest = float((batched - torch.cat(separate)).abs().max()), float(batched.abs().max())
    assert TOLERANCE < 10 * error <= 1e-5 * largest, f"{name} is off by {error}, its largest logit is {largest}"
    return 10 * error


def new_model(name: str) -> Any:
    """Return a new model that a test may change."""
    inner = build_model(name)
    if name in NATIVE:
        inner.tokenizer = TOKENIZER
        return inner
    return hw.attach(inner, TOKENIZER)


def build_model(name: str) -> Any:
    """Return the model before it is attached."""
    torch.manual_seed(3)
    if name in NATIVE:
        inner: Any = hw.Transformer(NATIVE[name])
    else:
        transformers: Any = pytest.importorskip("transformers")
        kind, config, sizes = HF_MODELS[name]
        inner = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        if inner.can_generate():
            inner.generation_config.pad_token_id = END
    with torch.no_grad():
        for part, weight in inner.named_parameters():
            weight.copy_(0.4 * torch.randn_like(weight) + ("norm" in part.lower() and part.endswith("weight")))
    return inner.to(DTYPES.get(name, torch.float64)).eval()


def batch(name: str, side: str = "none") -> dict[str, Tensor]:
    """Return token ids of two texts, the shorter one padded on a side, or both truncated to the shorter one for "none"."""
    rows = [TOKENIZER.encode(text) for text in TEXTS[:2]]
    ids, attention_mask = pad_rows(rows, side)
    inputs = {"ids": ids} if attention_mask is None else {"ids": ids, "attention_mask": attention_mask}
    if name in ENCODER_DECODERS:
        source, source_mask = pad_rows(rows[::-1], side)
        inputs |= (
            {"source": source} if source_mask is None else {"source": source, "source_attention_mask": source_mask}
        )
    return inputs


def pad_rows(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor | None]:
    if side == "none":
        min_length = min(map(len, rows))
        return torch.tensor([row[:min_length] for row in rows]), None
    max_length = max(map(len, rows))
    ids, real = torch.full((len(rows), max_length), END), torch.zeros(len(rows), max_length, dtype=torch.bool)
    for index, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(max_length - len(row), max_length)
        ids[index, where], real[index, where] = torch.tensor(row), True
    return ids, real


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Tensor], **extra: Any) -> Tensor:
    """Return the logits at real tokens of all texts, (tokens, V)."""
    output = model(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, **extra)
    real = inputs.get("attention_mask")
    return output.flatten(0, 1) if real is None else output[real.to(model.device)]


@contextmanager
def scaled_copy(model: Any, address: Any, amount: float) -> Iterator[Any]:
    """Return a copy with W_O of one head scaled, which is another way to silence the head."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.heads[address].W_O.mul_(amount)
    yield twin


def sample_heads(model: Any) -> list[Any]:
    """Return the last head of the first layer and the first head of the last layer of every stack."""
    by_stack: dict[str, list[Any]] = {}
    for address in model.heads.addresses:
        by_stack.setdefault(address.stack, []).append(address)
    return [
        pick
        for addresses in by_stack.values()
        for pick in (
            max(a for a in addresses if a.layer == 0), min(a for a in addresses if a.layer == addresses[-1].layer)
        )
    ]  # fmt: skip


@contextmanager
def training_mode(model: Any) -> Iterator[None]:
    """Set training mode except for one module, and check on exit that the modes are unchanged."""
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
