"""GGUF files of GPT-2 and BERT: settings and tensor names. Both have learned positions, layer norms and biases.

Converters store RoBERTa, XLM-R and DistilBERT as `bert`, too, without the rows of the position table before the first token.
A file does not contain a pooler or a masked-LM output.
"""

from collections.abc import Mapping
from typing import Any

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.io.weight_readers import WeightReader
from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import Config, required_setting
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


def gpt2_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of GPT-2 to a spec."""
    return ModelSpec(
        **_common_fields(fields, is_causal=True), activation="gelu_tanh", tied="output.weight" not in reader.shapes
    )


def bert_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of BERT to a spec. GELU is exact: llama.cpp approximates it."""
    if "token_types.weight" not in reader.shapes:
        raise FileFormatError(
            "token_types.weight: a GGUF file of bert needs this tensor. Convert the model again, or use its folder."
        )
    return ModelSpec(
        **_common_fields(fields, is_causal=False), activation="gelu", kind="encoder", norm_placement="post",
        embed_norm=True, token_types=reader.shapes["token_types.weight"][0], output="none",
    )  # fmt: skip


def _common_fields(fields: Config, *, is_causal: bool) -> dict[str, Any]:
    """Return the fields of the spec that both architectures read from the metadata."""
    name = fields["general.architecture"]
    settings = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    neutral = {"attention.causal": (None, is_causal), "expert_count": (None, 0)}
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
            width, heads, kv_heads=settings.get("attention.head_count_kv") or heads, bias=True, out_bias=True
        ),
        "mlp_width": required_setting(settings, "feed_forward_length"),
        "norm_eps": required_setting(settings, "attention.layer_norm_epsilon"),
    }
