"""GGUF files of GPT-2, BERT and ModernBERT: settings and tensor names.

GPT-2 and BERT have learned positions, layer norms and biases. ModernBERT has rotary positions, windows and no biases.

Converters store RoBERTa, XLM-R and DistilBERT as `bert`, too, without the rows of the position table before the first token.
A file does not contain a pooler or a masked-LM output.
"""

from collections.abc import Mapping
from typing import Any

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.io.weight_readers import WeightReader
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.weights.families.decoder_config import varied_fields
from headwise.weights.families.family import Config, required_setting, translate_setting
from headwise.weights.keymap import TensorMapping

_SHARED_NAMES = {
    "blocks.{i}.attention.output_projection": "blk.{i}.attn_output",
    "blocks.{i}.mlp.up": "blk.{i}.ffn_up",
    "blocks.{i}.mlp.down": "blk.{i}.ffn_down",
}
_GPT2_NAMES = _SHARED_NAMES | {
    "blocks.{i}.norm_attention": "blk.{i}.attn_norm",
    "blocks.{i}.norm_mlp": "blk.{i}.ffn_norm",
    "norm": "output_norm",
}
_BERT_NAMES = _SHARED_NAMES | {
    "embed.norm": "token_embd_norm",
    "blocks.{i}.norm_attention": "blk.{i}.attn_output_norm",
    "blocks.{i}.norm_mlp": "blk.{i}.layer_output_norm",
}


def _with_biases(names: Mapping[str, str]) -> tuple[TensorMapping, ...]:
    return tuple(
        TensorMapping(f"{external}.{part}", f"{native}.{part}")
        for native, external in names.items()
        for part in ("weight", "bias")
    )


_EMBEDDINGS = (
    TensorMapping("token_embd.weight", "embed.tokens.weight"),
    TensorMapping("position_embd.weight", "embed.positions.weight"),
)
GPT2_MAPPINGS = (
    *_EMBEDDINGS,
    *_with_biases(_GPT2_NAMES),
    TensorMapping("blk.{i}.attn_qkv.weight", "blocks.{i}.attention.qkv.qkv_weight"),
    TensorMapping("blk.{i}.attn_qkv.bias", "blocks.{i}.attention.qkv.qkv_bias"),
    TensorMapping("output.weight", "output.vocabulary.weight", when=lambda spec: not spec.tied),
)
BERT_MAPPINGS = (
    *_EMBEDDINGS,
    TensorMapping("token_types.weight", "embed.types.weight"),
    *_with_biases(_BERT_NAMES),
    *(
        TensorMapping(f"blk.{{i}}.attn_{projection}.{part}", f"blocks.{{i}}.attention.qkv.{projection}_{part}")
        for projection in "qkv"
        for part in ("weight", "bias")
    ),
)
MODERN_BERT_NAMES = {
    "embed.tokens.weight": "token_embd.weight",
    "embed.norm.weight": "token_embd_norm.weight",
    "blocks.{i}.norm_attention.weight": "blk.{i}.attn_norm.weight",
    "blocks.{i}.attention.output_projection.weight": "blk.{i}.attn_output.weight",
    "blocks.{i}.norm_mlp.weight": "blk.{i}.ffn_norm.weight",
    "blocks.{i}.mlp.down.weight": "blk.{i}.ffn_down.weight",
    "norm.weight": "output_norm.weight",
}
MODERN_BERT_MAPPINGS = (
    *(
        TensorMapping(external, native, first_layer=int(native.endswith("norm_attention.weight")))
        for native, external in MODERN_BERT_NAMES.items()
    ),
    TensorMapping("blk.{i}.attn_qkv.weight", "blocks.{i}.attention.qkv.qkv_weight"),
    TensorMapping("blk.{i}.ffn_up.weight", "blocks.{i}.mlp.gate.weight", part=(0, 2)),
    TensorMapping("blk.{i}.ffn_up.weight", "blocks.{i}.mlp.up.weight", part=(1, 2)),
)
MODERN_BERT_PERIOD = 3  # layers 0, 3, 6 … have no window, unless the file says otherwise
GATED_ACTIVATIONS = {"gelu": "geglu", "geglu": "geglu", "silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu"}


def gpt2_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of GPT-2 to a spec."""
    return ModelSpec(
        **_common_fields(fields, is_causal=True, bias=True), activation="gelu_tanh",
        tied="output.weight" not in reader.shapes,
    )  # fmt: skip


def bert_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of BERT to a spec. GELU is exact: llama.cpp approximates it."""
    if "token_types.weight" not in reader.shapes:
        raise FileFormatError(
            "token_types.weight: a GGUF file of bert needs this tensor. Convert the model again, or use its folder."
        )
    return ModelSpec(
        **_common_fields(fields, is_causal=False, bias=True), activation="gelu", kind="encoder", norm_placement="post",
        embed_norm=True, token_types=reader.shapes["token_types.weight"][0], output="none",
    )  # fmt: skip


def modern_bert_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of ModernBERT to a spec. GELU is exact, as in recent releases of llama.cpp."""
    settings = _settings(fields)
    layers, size = required_setting(settings, "block_count"), settings.get("attention.sliding_window", 0)
    has_window = [bool(size) and is_local for is_local in _layers_with_window(settings, layers)]
    head_dim = required_setting(settings, "embedding_length") // required_setting(settings, "attention.head_count")
    dims = settings.get("rope.dimension_count", head_dim)
    theta = settings.get("rope.freq_base", 10000.0)
    local_theta = settings.get("rope.freq_base_swa", theta)
    attention, model_fields = varied_fields(
        [size // 2 + 1 if is_local else None for is_local in has_window],  # the file counts the keys on both sides
        [
            Rotary(local_theta if is_local else theta, dims=None if dims == head_dim else dims)
            for is_local in has_window
        ],
    )
    activation = translate_setting(settings.get("hidden_activation", "gelu"), GATED_ACTIVATIONS, "hidden_activation")
    return ModelSpec(
        **_common_fields(fields, is_causal=False, bias=False, **attention), kind="encoder", norm="layer_no_bias",
        activation=activation, mlp_bias=False, positions="none", embed_norm=True, first_norm=False, output="none",
        output_activation="gelu", transform_bias=False, **model_fields,
    )  # fmt: skip


def _layers_with_window(settings: Config, layers: int) -> list[bool]:
    """Return which layers have a window. The file lists them, or every layer but the first of a period has one."""
    pattern = settings.get("attention.sliding_window_pattern", MODERN_BERT_PERIOD)
    if not isinstance(pattern, list):
        return [not pattern or layer % pattern != 0 for layer in range(layers)]
    if len(pattern) < layers:
        raise FileFormatError(f"sliding_window_pattern must list {layers} layers. Got {len(pattern)}.")
    return [bool(value) for value in pattern[:layers]]


def _settings(fields: Config) -> dict[str, Any]:
    """Return the settings of the architecture, without its name."""
    name = fields["general.architecture"]
    return {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}


def _common_fields(fields: Config, *, is_causal: bool, bias: bool, **attention: Any) -> dict[str, Any]:
    """Return the fields of the spec that all three architectures read from the metadata."""
    name, settings = fields["general.architecture"], _settings(fields)
    neutral = {"attention.causal": (None, is_causal), "expert_count": (None, 0), "rope.scaling.type": (None, "none")}
    for key, values in neutral.items():
        if settings.get(key) not in values:
            raise UnsupportedModelError(
                f"{name}.{key} is {settings[key]!r}, which Headwise does not support. It must be {values[1]!r} or absent."
            )
    width, heads = required_setting(settings, "embedding_length"), required_setting(settings, "attention.head_count")
    return {
        "vocab": settings.get("vocab_size") or len(required_setting(fields, "tokenizer.ggml.tokens")),
        "context": required_setting(settings, "context_length"),
        "layers": required_setting(settings, "block_count"),
        "attention": AttentionSpec(
            width,
            heads,
            kv_heads=settings.get("attention.head_count_kv") or heads,
            bias=bias,
            out_bias=bias,
            **attention,
        ),
        "mlp_width": required_setting(settings, "feed_forward_length"),
        "norm_eps": required_setting(settings, "attention.layer_norm_epsilon"),
    }
