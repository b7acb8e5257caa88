"""GGUF files of the decoders that llama.cpp implements besides Llama: settings and tensor names.

Gemma's norms are stored with the 1 of their gain added. Phi-3 stores q, k and v in one tensor, and its up projections too.
Queries and keys of SmolLM3 and Ministral 3 are stored in the interleaved rotary layout, those of all others in halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.io.weight_readers import WeightReader
from headwise.spec import AttentionSpec, ModelSpec, QKNorm, QueryScaling, Rotary, RotaryScaling
from headwise.weights.families.decoder_config import decoder_mappings, varied_fields
from headwise.weights.families.family import Config, required_setting
from headwise.weights.keymap import TensorMapping

ROTARY_FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
NAMES = {
    "embed.tokens.weight": "token_embd.weight",
    "blocks.{i}.norm_attention.weight": "blk.{i}.attn_norm.weight",
    "blocks.{i}.attention.qkv.q_weight": "blk.{i}.attn_q.weight",
    "blocks.{i}.attention.qkv.k_weight": "blk.{i}.attn_k.weight",
    "blocks.{i}.attention.qkv.v_weight": "blk.{i}.attn_v.weight",
    "blocks.{i}.attention.output_projection.weight": "blk.{i}.attn_output.weight",
    "blocks.{i}.norm_mlp.weight": "blk.{i}.ffn_norm.weight",
    "blocks.{i}.mlp.gate.weight": "blk.{i}.ffn_gate.weight",
    "blocks.{i}.mlp.up.weight": "blk.{i}.ffn_up.weight",
    "blocks.{i}.mlp.down.weight": "blk.{i}.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "output.vocabulary.weight": "output.weight",
}
QK_NORMS = {
    "blocks.{i}.attention.q_norm.weight": "blk.{i}.attn_q_norm.weight",
    "blocks.{i}.attention.k_norm.weight": "blk.{i}.attn_k_norm.weight",
}
SANDWICH_NORMS = {
    "blocks.{i}.norm_attention_output.weight": "blk.{i}.post_attention_norm.weight",
    "blocks.{i}.norm_mlp_output.weight": "blk.{i}.post_ffw_norm.weight",
}
OUTPUT_NORMS = {
    "blocks.{i}.norm_attention.weight": "blk.{i}.post_attention_norm.weight",
    "blocks.{i}.norm_mlp.weight": "blk.{i}.post_ffw_norm.weight",
}


@dataclass(frozen=True)
class GgufDecoderLayout:
    """Layout of one of llama.cpp's decoder architectures.

    Attributes:
        model_type: `model_type` of the family in config.json.
        names: Tensor names by native name.
        norm_offset: Constant that the file adds to the weights of norms.
        layout: Rotary layout of q and k.
        window_period: Every layer but the last of this many has a window, unless the file lists the layers. 0: all are equal.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    norm_offset: float = 0.0
    layout: str = "half"
    window_period: int = 0


DECODER_FORMATS = {
    "qwen3": GgufDecoderLayout("qwen3", NAMES | QK_NORMS),
    "gemma2": GgufDecoderLayout("gemma2", NAMES | SANDWICH_NORMS, 1.0, window_period=2),
    "gemma3": GgufDecoderLayout("gemma3_text", NAMES | SANDWICH_NORMS | QK_NORMS, 1.0, window_period=6),
    "olmo2": GgufDecoderLayout("olmo2", NAMES | OUTPUT_NORMS | QK_NORMS, window_period=4),
    "phi3": GgufDecoderLayout("phi3"),
    "smollm3": GgufDecoderLayout("smollm3", layout="interleaved"),
    "mistral3": GgufDecoderLayout("ministral3", layout="interleaved"),
}


def gguf_mappings(architecture: str) -> tuple[TensorMapping, ...]:
    """Return the tensor name map of an architecture."""
    layout = DECODER_FORMATS[architecture]
    mappings = [
        replace(mapping, stored_offset=layout.norm_offset) if "norm" in mapping.native_name else mapping
        for mapping in decoder_mappings(layout.names)
    ]
    if architecture != "phi3":
        return tuple(mappings)
    split = (".qkv.", ".mlp.gate", ".mlp.up")
    return (
        *(mapping for mapping in mappings if not any(part in mapping.native_name for part in split)),
        TensorMapping("blk.{i}.attn_qkv.weight", "blocks.{i}.attention.qkv.qkv_weight"),
        TensorMapping("blk.{i}.ffn_up.weight", "blocks.{i}.mlp.gate.weight", part=(0, 2)),
        TensorMapping("blk.{i}.ffn_up.weight", "blocks.{i}.mlp.up.weight", part=(1, 2)),
    )


def engine_scale(architecture: str, layers: int, width: int, heads: int, head_dim: int) -> float:
    """Return llama.cpp's scale of the scores. It recognizes Gemma's 27B models by their number of layers."""
    is_27b = layers == {"gemma2": 46, "gemma3": 62}.get(architecture)
    return (width // heads if is_27b else head_dim) ** -0.5


def decoder_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file to a spec."""
    name = fields["general.architecture"]
    settings = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    heads, width = (required_setting(settings, key) for key in ("attention.head_count", "embedding_length"))
    layers = required_setting(settings, "block_count")
    head_dim = settings.get("attention.key_length") or width // heads
    _reject_other_values(name, settings, head_dim)
    windows, rotaries = _layer_windows_and_rotaries(name, settings, reader, head_dim)
    attention, model_fields = varied_fields(windows, rotaries)
    names, eps = reader.shapes, required_setting(settings, "attention.layer_norm_rms_epsilon")
    attention |= {"bias": "blk.0.attn_q.bias" in names, "out_bias": "blk.0.attn_output.bias" in names}
    model_fields |= {"mlp_bias": "blk.0.ffn_up.bias" in names, "norm": "rms", "activation": "swiglu"}
    if name in ("gemma2", "gemma3"):
        attention["scale"] = engine_scale(name, layers, width, heads, head_dim)
        caps = (50.0, 30.0) if name == "gemma2" else (None, None)
        attention["softcap"] = settings.get("attn_logit_softcapping", caps[0]) if name == "gemma2" else None
        model_fields |= {
            "norm": "rms_plus_one", "norm_placement": "sandwich", "activation": "geglu_tanh", "embed_scale": width**0.5,
            "logit_softcap": settings.get("final_logit_softcapping", caps[1]),
        }  # fmt: skip
    if name in ("qwen3", "gemma3"):
        attention["qk_norm"] = QKNorm("rms" if name == "qwen3" else "rms_plus_one", eps=eps)
    if name == "olmo2":
        attention["qk_norm"], model_fields["norm_placement"] = QKNorm(over="width", eps=eps), "output"
    if name == "mistral3":
        context = settings.get("rope.scaling.original_context_length") or required_setting(settings, "context_length")
        attention["query_scaling"] = QueryScaling(settings.get("attention.temperature_scale", 0.0), context)
    return ModelSpec(
        vocab=settings.get("vocab_size") or len(required_setting(fields, "tokenizer.ggml.tokens")),
        context=required_setting(settings, "context_length"),
        layers=layers,
        attention=AttentionSpec(
            width,
            heads,
            head_dim=head_dim,
            kv_heads=settings.get("attention.head_count_kv") or heads,
            **attention,
        ),
        mlp_width=required_setting(settings, "feed_forward_length"),
        norm_eps=eps,
        positions="none",
        tied="output.weight" not in names,
        **model_fields,
    )


def _reject_other_values(name: str, settings: Config, head_dim: int) -> None:
    """Raise an error for a setting that the spec does not represent."""
    neutral: dict[str, tuple[Any, ...]] = {
        "attention.value_length": (head_dim,),
        "attention.scale": (0.0, head_dim**-0.5),
        "attention.causal": (True,),
        "expert_count": (0,),
    }
    neutral |= {} if name == "phi3" else {"rope.dimension_count": (head_dim,)}
    for key, values in neutral.items():
        if settings.get(key) not in (None, *values):
            raise UnsupportedModelError(
                f"{name}.{key} is {settings[key]!r}, which Headwise does not support. It must be {values[0]!r} or absent."
            )
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(settings.get(key), list):
            raise UnsupportedModelError(
                f"{name}.{key} differs between layers, which Headwise does not support in {name}."
            )


def _layer_windows_and_rotaries(
    name: str, settings: Config, reader: WeightReader, head_dim: int
) -> tuple[list[int | None], list[Rotary | None]]:
    """Return the window and the rotary embedding of each layer."""
    layers, layout = required_setting(settings, "block_count"), DECODER_FORMATS[name]
    dims = settings.get("rope.dimension_count", head_dim)
    rotary = Rotary(
        settings.get("rope.freq_base", 10000.0),
        layout="interleaved" if layout.layout == "interleaved" else "half",
        dims=None if dims == head_dim else dims,
        scaling=read_gguf_scaling(name, settings, reader),
    )
    if name == "smollm3":
        return [None] * layers, [None if (layer + 1) % 4 == 0 else rotary for layer in range(layers)]
    window = settings.get("attention.sliding_window") or (4096 if name == "gemma2" else None)
    has_window = _layers_with_window(settings, layers, layout.window_period)
    local = rotary
    if name in ("gemma3", "olmo2"):  # layers with a window have rotary positions of their own, without scaling
        default = 10000.0 if name == "gemma3" else rotary.theta
        local = Rotary(settings.get("rope.freq_base_swa", default))
    if window is None:
        return [None] * layers, [rotary] * layers
    return [window if is_local else None for is_local in has_window], [
        local if is_local else rotary for is_local in has_window
    ]


def _layers_with_window(settings: Config, layers: int, period: int) -> Sequence[bool]:
    pattern = settings.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise FileFormatError(f"sliding_window_pattern must list {layers} layers. Got {len(pattern)}.")
        return [bool(value) for value in pattern[:layers]]
    return [not pattern or (layer + 1) % pattern != 0 for layer in range(layers)]


def read_gguf_scaling(name: str, settings: Config, reader: WeightReader) -> RotaryScaling | None:
    """Return the rotary scaling of a GGUF file, without that of Llama 3, which is a tensor."""
    kind, factor = settings.get("rope.scaling.type", "none"), settings.get("rope.scaling.factor", 1.0)
    original = settings.get("rope.scaling.original_context_length") or required_setting(settings, "context_length")
    attention_factor = settings.get("rope.scaling.attn_factor", 1.0)
    if "rope_factors_long.weight" in reader.shapes:
        short, long = (reader.get(f"rope_factors_{length}.weight").tolist() for length in ("short", "long"))
        context = required_setting(settings, "context_length")
        return RotaryScaling(
            "longrope", context / original, original_context=original, attention_factor=attention_factor,
            short_factors=tuple(short), long_factors=tuple(long),
        )  # fmt: skip
    has_llama3_factors = "rope_freqs.weight" in reader.shapes and name in DECODER_FORMATS
    if kind not in ("none", "linear", "yarn") or has_llama3_factors:
        kind = "llama3" if has_llama3_factors else kind
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} is not supported in a GGUF file of {name}. Supported: none, "
            "linear, yarn, and LongRoPE in phi3."
        )
    if kind == "yarn":
        plain = RotaryScaling("yarn", factor).cos_sin_factor
        log_multiplier = settings.get("rope.scaling.yarn_log_multiplier", 0.0)
        if log_multiplier:
            attention_factor *= 1 / (1 + log_multiplier * (plain - 1))
        return RotaryScaling(
            "yarn", factor, original_context=original,
            beta_fast=settings.get("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=settings.get("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=None if attention_factor == 1.0 else round(attention_factor * plain, 6),
        )  # fmt: skip
    return RotaryScaling("linear", factor) if kind == "linear" else None
