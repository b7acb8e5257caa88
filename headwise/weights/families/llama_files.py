"""Llama outside Hugging Face's layout: Meta's own files, and GGUF."""

import math
from collections.abc import Mapping
from dataclasses import replace

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling
from headwise.weights.families.family import Config, need
from headwise.weights.readers import Reader

META = {
    "tokens": "tok_embeddings.weight",
    "norm_attention": "layers.{i}.attention_norm.weight",
    "q": "layers.{i}.attention.wq.weight",
    "k": "layers.{i}.attention.wk.weight",
    "v": "layers.{i}.attention.wv.weight",
    "o": "layers.{i}.attention.wo.weight",
    "norm_mlp": "layers.{i}.ffn_norm.weight",
    "gate": "layers.{i}.feed_forward.w1.weight",
    "up": "layers.{i}.feed_forward.w3.weight",
    "down": "layers.{i}.feed_forward.w2.weight",
    "norm": "norm.weight",
    "output": "output.weight",
}
GGUF = {
    "tokens": "token_embd.weight",
    "norm_attention": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "norm_mlp": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "norm": "output_norm.weight",
    "output": "output.weight",
}


def spec_from_gguf(fields: Config, reader: Reader) -> ModelSpec:
    """From a GGUF file's metadata. Its rows of q and k are in the interleaved order, except in Qwen2's."""
    name = fields["general.architecture"]
    at = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    heads, width = need(at, "attention.head_count"), need(at, "embedding_length")
    scaling = at.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise HeadwiseError(f"rotary scaling {scaling!r} in GGUF is not supported; known: none, linear.")
    factor = at.get("rope.scaling.factor", 1.0)
    spec = ModelSpec(
        vocab=at.get("vocab_size") or len(need(fields, "tokenizer.ggml.tokens")),
        context=need(at, "context_length"),
        layers=need(at, "block_count"),
        attention=AttentionSpec(
            width,
            heads,
            head_dim=at.get("attention.key_length") or 0,
            kv_heads=at.get("attention.head_count_kv") or heads,
            bias=name == "qwen2",
            rotary=Rotary(
                theta=at.get("rope.freq_base", 10000.0),
                layout="half" if name == "qwen2" else "interleaved",
                scaling=RotaryScaling("linear", factor) if scaling == "linear" else None,
            ),
            window=at.get("attention.sliding_window"),
        ),
        hidden=need(at, "feed_forward_length"),
        norm="rms",
        norm_eps=need(at, "attention.layer_norm_rms_epsilon"),
        activation="swiglu",
        mlp_bias=False,
        positions="none",
        tied=False,  # told by the tensors
    )
    if "rope_freqs.weight" in reader.shapes:
        return _llama3_scaling(spec, reader.get("rope_freqs.weight").tolist())
    return spec


def _llama3_scaling(spec: ModelSpec, factors: list[float]) -> ModelSpec:
    """GGUF keeps Llama 3's scaling as one factor per frequency; find the setting that gives these."""
    rotary = spec.attention.rotary
    assert rotary is not None
    for factor in (8.0, 32.0):  # Llama 3.1, Llama 3.2
        low, high, context = 1.0, 4.0, 8192
        expected = []
        for i in range(len(factors)):
            turns = context * rotary.theta ** (-i / len(factors)) / (2 * math.pi)
            blend = min(1.0, max(0.0, (turns - low) / (high - low)))
            expected.append(1 / ((1 - blend) / factor + blend))
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(factors, expected, strict=True)):
            scaled = replace(rotary, scaling=RotaryScaling("llama3", factor, low, high, context))
            return replace(spec, attention=replace(spec.attention, rotary=scaled))
    raise HeadwiseError("the GGUF file stretches rotary frequencies in a way that is not Llama 3.1's or 3.2's.")


def spec_from_meta(params: Config, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """From Meta's params.json, whose rows of q and k are in the interleaved order; some sizes are in the tensors only."""
    width, heads = need(params, "dim"), need(params, "n_heads")
    scaling = RotaryScaling("llama3", 8.0) if params.get("use_scaled_rope") else None
    return ModelSpec(
        vocab=need(shapes, "tok_embeddings.weight")[0],
        context=params.get("max_seq_len", 131072 if scaling else 4096),
        layers=need(params, "n_layers"),
        attention=AttentionSpec(
            width,
            heads,
            kv_heads=params.get("n_kv_heads") or heads,
            rotary=Rotary(theta=params.get("rope_theta", 10000.0), layout="interleaved", scaling=scaling),
        ),
        hidden=need(shapes, "layers.0.feed_forward.w1.weight")[0],
        norm="rms",
        norm_eps=params.get("norm_eps", 1e-5),
        activation="swiglu",
        mlp_bias=False,
        positions="none",
        tied=False,
    )
