"""Llama in other layouts than Hugging Face's: Meta's files and GGUF."""

import math
from collections.abc import Mapping
from dataclasses import replace

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.io.weight_readers import WeightReader
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling
from headwise.weights.families.family import (
    Config,
    bool_setting,
    positive_int_or_none,
    positive_int_setting,
    required_setting,
    setting_or_default,
)
from headwise.weights.families.gguf_decoders import read_gguf_scaling

META_NAMES = {
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
GGUF_NAMES = {
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


def spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file to a spec. Rows of q and k are interleaved, except in Qwen2."""
    name = fields["general.architecture"]
    arch_fields = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    heads, width = (
        required_setting(arch_fields, "attention.head_count"),
        required_setting(arch_fields, "embedding_length"),
    )
    head_dim = arch_fields.get("attention.key_length") or width // heads
    scaling = read_gguf_scaling(name, arch_fields, reader)
    for key, neutral in _neutral_gguf_settings(head_dim).items():
        if arch_fields.get(key) not in (None, *neutral):
            raise UnsupportedModelError(
                f"{name}.{key} is {arch_fields[key]!r}, which Headwise does not support. It must be {neutral[0]!r} or "
                f"absent."
            )
    spec = ModelSpec(
        vocab=arch_fields.get("vocab_size") or len(required_setting(fields, "tokenizer.ggml.tokens")),
        context=required_setting(arch_fields, "context_length"),
        layers=required_setting(arch_fields, "block_count"),
        attention=AttentionSpec(
            width,
            heads,
            head_dim=head_dim,
            kv_heads=arch_fields.get("attention.head_count_kv") or heads,
            bias=name == "qwen2",
            rotary=Rotary(
                theta=arch_fields.get("rope.freq_base", 10000.0),
                layout="half" if name == "qwen2" else "interleaved",
                scaling=scaling,
            ),
            window=arch_fields.get("attention.sliding_window"),
        ),
        mlp_width=required_setting(arch_fields, "feed_forward_length"),
        norm="rms",
        norm_eps=required_setting(arch_fields, "attention.layer_norm_rms_epsilon"),
        activation="swiglu",
        mlp_bias=False,
        positions="none",
        tied="output.weight" not in reader.shapes,
    )
    if "rope_freqs.weight" in reader.shapes:
        return _llama3_scaling(spec, reader.get("rope_freqs.weight").tolist())
    return spec


def _neutral_gguf_settings(head_dim: int) -> dict[str, tuple[float, ...]]:
    """Return GGUF settings that Headwise does not implement, with the values that have no effect."""
    return {
        "rope.dimension_count": (head_dim,),
        "attention.value_length": (head_dim,),
        "attention.scale": (0.0, head_dim**-0.5),
        "attention.causal": (True,),
        "expert_count": (0,),
        "logit_scale": (1.0, 0.0),
        "residual_scale": (1.0, 0.0),
        "embedding_scale": (1.0, 0.0),
    }


def _llama3_scaling(spec: ModelSpec, factors: list[float]) -> ModelSpec:
    """Find the Llama 3 scaling that matches the file. GGUF stores it as one factor per frequency."""
    rotary = spec.attention.rotary
    assert rotary is not None
    for factor in (8.0, 32.0):  # Llama 3.1, Llama 3.2
        low, high, context = 1.0, 4.0, 8192
        expected = []
        for i in range(len(factors)):
            rotations = context * rotary.theta ** (-i / len(factors)) / (2 * math.pi)
            blend = min(1.0, max(0.0, (rotations - low) / (high - low)))
            expected.append(1 / ((1 - blend) / factor + blend))
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(factors, expected, strict=True)):
            scaled = replace(rotary, scaling=RotaryScaling("llama3", factor, low, high, context))
            return replace(spec, attention=replace(spec.attention, rotary=scaled))
    raise UnsupportedModelError(
        "rope_freqs.weight: the rotary scaling is not that of Llama 3.1 or 3.2. Use the model in Hugging Face's format."
    )


# Rotary scaling factors of models with use_scaled_rope, by dim and n_layers, because params.json does not contain them.
# From config.json on the hub: 8 for Llama 3.1 and 3.3, 32 for Llama 3.2 1B and 3B.
META_FACTORS = {(2048, 16): 32.0, (3072, 28): 32.0, (4096, 32): 8.0, (8192, 80): 8.0, (16384, 126): 8.0}
META_KEYS = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "norm_eps", "rope_theta"),
    *("use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor", "sliding_window", "max_seq_len"),
    *("multiple_of", "ffn_dim_multiplier", "max_batch_size", "model_type"),  # sizes are read from the tensors
}


def spec_from_meta(params: Config, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """Convert Meta's or Mistral's params.json to a spec. Rows of q and k are interleaved. Tensors give some sizes."""
    unsupported = sorted(name for name, value in params.items() if name not in META_KEYS and value not in (None, False))
    if unsupported:
        raise UnsupportedModelError(
            f"params.json sets {', '.join(unsupported)}, which Headwise does not support. Use the model in Hugging Face's "
            f"format."
        )
    width, heads = required_setting(params, "dim"), required_setting(params, "n_heads")
    scaling = _meta_scaling(params) if bool_setting(params, "use_scaled_rope", default=False) else None
    vocab = required_setting(shapes, "tok_embeddings.weight")[0]
    return ModelSpec(
        vocab=vocab,
        context=positive_int_setting(
            params, "max_seq_len", default=131072 if scaling else 8192 if vocab == 128256 else 4096
        ),
        layers=required_setting(params, "n_layers"),
        attention=AttentionSpec(
            width,
            heads,
            head_dim=positive_int_or_none(params, "head_dim") or 0,
            kv_heads=positive_int_or_none(params, "n_kv_heads") or heads,
            rotary=Rotary(theta=_meta_theta(params), layout="interleaved", scaling=scaling),
            window=positive_int_or_none(params, "sliding_window"),
        ),
        mlp_width=required_setting(shapes, "layers.0.feed_forward.w1.weight")[0],
        norm="rms",
        norm_eps=setting_or_default(params, "norm_eps", default=1e-5),
        activation="swiglu",
        mlp_bias=False,
        positions="none",
        tied="output.weight" not in shapes,
    )


def _meta_theta(params: Config) -> float:
    """Return rope_theta: 10000 if absent in Llama 1 and 2. Mistral's files may omit it too, with another meaning."""
    if "hidden_dim" in params and params.get("rope_theta") is None and params.get("sliding_window") is None:
        raise FileFormatError(
            "params.json is Mistral's and does not contain rope_theta, whose value depends on the model's version. Add "
            "rope_theta to params.json."
        )
    return setting_or_default(params, "rope_theta", default=10000.0)


def _meta_scaling(params: Config) -> RotaryScaling:
    size = (required_setting(params, "dim"), required_setting(params, "n_layers"))
    factor = setting_or_default(params, "rope_scaling_factor", default=META_FACTORS.get(size), allow_null=True)
    if factor is None:
        known_sizes = ", ".join(f"{width} × {layers}" for width, layers in META_FACTORS)
        raise FileFormatError(
            f"params.json sets use_scaled_rope without a factor, and the factor cannot be inferred from the size of the "
            f"model. Got width {size[0]} and {size[1]} layers. Known sizes of Llama 3.1, 3.2 and 3.3 (width × layers): "
            f"{known_sizes}. Add rope_scaling_factor, for example 8 for Llama 3.1 or 32 for Llama 3.2."
        )
    high = setting_or_default(params, "rope_high_freq_factor", default=None, allow_null=True)
    return RotaryScaling("llama3", factor, high_freq_factor=4.0 if high is None else high)
