"""GGUF for stock llama.cpp: whole models as `llama`, cut ones as `deci`, heads and key heads counted by layer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.deploy.gguf_tokenizer import tokenizer_fields
from headwise.deploy.layers import filled_layers
from headwise.errors import HeadwiseError, close_names
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.text import Tokenizer

TYPES = ("f32", "f16", "q8_0", "q4_0")
BLOCK = 32  # weights of a row that share a scale


@dataclass(frozen=True)
class Written:
    """What was written, and what was done about what the target cannot hold."""

    path: Path
    architecture: str
    notes: tuple[str, ...]


def write_gguf(model: Transformer, path: Path, dtype: str = "f32", tokenizer: bool = True) -> Written:
    """Write one file; refused, with the reason, where llama.cpp would compute something else."""
    if dtype not in TYPES:
        raise HeadwiseError(f"weights are written as {', '.join(TYPES)}, got {dtype!r}; {close_names(dtype, TYPES)}")
    _check(model.spec)
    try:
        import gguf
    except ImportError:
        raise HeadwiseError("GGUF files are written by the gguf package; pip install 'headwise[deploy]'.") from None
    spec = model.spec
    cut = bool(spec.kept) or any(layer.b_O is not None for layer in model.attention_layers())
    name = "deci" if cut else "llama"
    layers, behind = filled_layers(model)
    writer = gguf.GGUFWriter(path, name)
    zeros = sum(layer.zeros for layer in layers)
    _write_sizes(writer, spec, name, layers)
    if tokenizer and model.tokenizer is not None:
        if not isinstance(model.tokenizer, Tokenizer):
            raise HeadwiseError(
                f"{type(model.tokenizer).__name__} is no tokenizer GGUF could hold; use tokenizer=False."
            )
        _write_tokenizer(writer, tokenizer_fields(model.tokenizer, spec.vocab))
    else:
        writer.add_tokenizer_model("none")
    store = _Store(writer, gguf, dtype)
    store.add("token_embd.weight", model.embed.tokens.weight, table=True)
    blocks: list[Any] = list(model.blocks)
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        blk = f"blk.{i}."
        if layer.heads:
            store.add(f"{blk}attn_norm.weight", block.norm_attention.weight, plain=True)
            for letter, rows in (("q", layer.q), ("k", layer.k)):
                assert rows is not None
                store.add(f"{blk}attn_{letter}.weight", _turned(rows, spec))
            assert layer.v is not None
            assert layer.o is not None
            store.add(f"{blk}attn_v.weight", layer.v)
            store.add(f"{blk}attn_output.weight", layer.o)
            for letter, bias in layer.biases.items():
                turned = _turned(bias, spec) if letter in "qk" else bias
                store.add(f"{blk}attn_{'output' if letter == 'o' else letter}.bias", turned, plain=True)
        mlp = block.mlp
        store.add(f"{blk}ffn_norm.weight", block.norm_mlp.weight, plain=True)
        for part, weight in (("gate", mlp.gate.weight), ("up", mlp.up.weight), ("down", mlp.down.weight)):
            store.add(f"{blk}ffn_{part}.weight", weight)
        if i in behind:
            store.add(f"{blk}ffn_down.bias", behind[i], plain=True)
    assert model.norm is not None
    assert model.output is not None
    norm: Any = model.norm
    store.add("output_norm.weight", norm.weight, plain=True)
    if not spec.tied:
        store.add("output.weight", model.output.vocabulary.weight, table=True)
    if (factors := _factors(spec)) is not None:
        store.add("rope_freqs.weight", factors, plain=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    empty = [i for i, layer in enumerate(layers) if not layer.heads]
    notes = [f"{zeros} heads of zeros make groups even"] if zeros else []
    notes += [f"layers {', '.join(map(str, empty))} have no attention"] if empty else []
    notes += [f"what {len(behind)} emptied layers wrote is in the bias of the MLP before"] if behind else []
    notes += [f"{store.kept} tensors whose rows are no multiple of {BLOCK} are at 16 bits"] if store.kept else []
    notes += [] if tokenizer and model.tokenizer is not None else ["no tokenizer: feed it ids"]
    return Written(path, name, tuple(notes))


class _Store:
    """Tensors on their way into the file, each as its type says."""

    def __init__(self, writer: Any, package: Any, dtype: str) -> None:
        self.writer, self.package, self.dtype, self.kept = writer, package, dtype, 0

    def add(self, name: str, tensor: Tensor, plain: bool = False, table: bool = False) -> None:
        """`plain` ones stay in float32: norms and biases; a `table` of tokens is never coarser than 8 bits."""
        data = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
        dtype = "f32" if plain else "q8_0" if table and self.dtype == "q4_0" else self.dtype
        if dtype.startswith("q") and data.shape[-1] % BLOCK:
            self.kept += 1
            dtype = "f16"
        if dtype == "f32":
            self.writer.add_tensor(name, data)
        elif dtype == "f16":
            self.writer.add_tensor(name, data.astype(np.float16))
        else:
            kind = self.package.GGMLQuantizationType[dtype.upper()]
            self.writer.add_tensor(name, self.package.quants.quantize(data, kind), raw_dtype=kind)


def _write_sizes(writer: Any, spec: ModelSpec, name: str, layers: list[Any]) -> None:
    attention = spec.attention
    rotary = attention.rotary
    assert rotary is not None
    by_layer = name == "deci"
    writer.add_name("headwise")
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length([spec.hidden] * spec.layers if by_layer else spec.hidden)
    writer.add_head_count([layer.heads for layer in layers] if by_layer else attention.heads)
    writer.add_head_count_kv([layer.kv_heads for layer in layers] if by_layer else attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.value_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(rotary.theta)
    writer.add_vocab_size(spec.vocab)
    if rotary.scaling is not None and rotary.scaling.kind == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary.scaling.factor)


def _write_tokenizer(writer: Any, fields: dict[str, Any]) -> None:
    simple = {"model": writer.add_tokenizer_model, "pre": writer.add_tokenizer_pre, "tokens": writer.add_token_list}
    simple |= {"token_type": writer.add_token_types, "merges": writer.add_token_merges}
    simple |= {"add_bos_token": writer.add_add_bos_token, "add_eos_token": writer.add_add_eos_token}
    simple |= {"token_type_count": writer.add_token_type_count}
    for name, value in fields.items():
        simple[name](value) if name in simple else writer.add_uint32(f"tokenizer.ggml.{name}", value)


def _turned(rows: Tensor, spec: ModelSpec) -> Tensor:
    """Rows of q or k in the order in which llama.cpp turns them: channels that turn together stand together."""
    rotary = spec.attention.rotary
    assert rotary is not None
    if rotary.layout == "interleaved":
        return rows
    return rows.unflatten(0, (-1, 2, spec.attention.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _factors(spec: ModelSpec) -> Tensor | None:
    """Llama 3's stretching, a factor for each frequency."""
    rotary = spec.attention.rotary
    assert rotary is not None
    scaling = rotary.scaling
    if scaling is None or scaling.kind != "llama3":
        return None
    pairs = torch.arange(spec.attention.head_dim // 2, dtype=torch.double)
    turns = scaling.original_context * rotary.theta ** (-pairs / len(pairs)) / (2 * torch.pi)
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return 1 / ((1 - blend) / scaling.factor + blend)


def _check(spec: ModelSpec) -> None:
    """What llama.cpp's Llama computes, and nothing else."""
    if spec.weights:
        raise HeadwiseError(
            "GGUF has no weights at bits by head; write the numbers: hw.export(hw.dequantise(model), …, to='gguf')."
        )
    attention = spec.attention
    rotary = attention.rotary
    wrong = {
        f"it is of kind {spec.kind}": spec.kind != "decoder",
        f"its blocks are {spec.form}-norm": spec.form != "pre",
        f"its norm is {spec.norm}": spec.norm != "rms",
        f"its activation is {spec.activation}": spec.activation != "swiglu",
        f"its positions are {spec.positions}": spec.positions != "none" or rotary is None,
        "its MLPs have biases": bool(spec.mlp_bias),
        "only part of a head's channels turn": rotary is not None and rotary.dims not in (None, attention.head_dim),
        "it looks back only so far": any(
            window is not None and window < spec.context for window in (attention.window, *spec.windows)
        ),
        "its softmax has a sink or a cap": attention.softmax != "plain" or attention.softcap is not None,
        "its heads have gates": attention.gated,
        "its heads read slices": attention.input != "full",
        "its embedding is scaled or normed": spec.embed_scale != 1.0 or spec.embed_norm,
        "its scores are scaled otherwise": attention.scale not in (None, attention.head_dim**-0.5),
        "values have another size than keys": attention.value_dim != attention.head_dim,
        "it has no output over the vocabulary": spec.output != "lm",
        "heads keep caches of their own": bool(spec.cache),
    }
    for why, is_so in wrong.items():
        if is_so:
            raise HeadwiseError(
                f"llama.cpp's Llama cannot compute this model: {why}. Use to='onnx', or model.save(folder)."
            )
