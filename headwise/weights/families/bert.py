"""BERT: an encoder with post-norm and token types, and optionally a pooler and a masked-LM head."""

from dataclasses import replace
from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    common_unsupported,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    required_setting,
    setting_or_default,
    translate_setting,
    unrepresentable_feature_flags,
)
from headwise.weights.families.gguf_gpt2_bert import BERT_MAPPINGS
from headwise.weights.keymap import TensorMapping

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. Pooler and masked-LM head are set by `adjust_to_tensors`."""
    positions = setting_or_default(config, "position_embedding_type", default="absolute")
    reject_unsupported(
        common_unsupported(config)
        | {
            f"{positions} positions (position_embedding_type)": positions != "absolute",
            "BERT as a decoder (is_decoder)": bool_setting(config, "is_decoder", default=False),
        }
    )
    return ModelSpec(
        vocab=required_setting(config, "vocab_size"),
        context=positive_int_setting(config, "max_position_embeddings", default=512),
        layers=required_setting(config, "num_hidden_layers"),
        attention=AttentionSpec(
            required_setting(config, "hidden_size"),
            positive_int_setting(config, "num_attention_heads", default=12),
            bias=True,
            out_bias=True,
        ),
        mlp_width=required_setting(config, "intermediate_size"),
        kind="encoder",
        norm_placement="post",
        norm_eps=setting_or_default(config, "layer_norm_eps", default=1e-12),
        activation=translate_setting(
            setting_or_default(config, "hidden_act", default="gelu"), ACTIVATIONS, "activation"
        ),
        embed_norm=True,
        token_types=positive_int_setting(config, "type_vocab_size", default=2),
        output="none",
        tied=bool_setting(config, "tie_word_embeddings", default=True),
    )


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    attention = spec.attention
    reject_unrepresentable(
        {
            **unrepresentable_feature_flags(spec),
            "a model that is not an encoder": spec.kind != "encoder" or spec.output == "lm",
            "rotary positions": attention.rotary is not None or spec.positions != "learned",
            "grouped-query attention": attention.kv_heads != attention.heads,
            "head_dim other than width / heads": attention.head_dim * attention.heads != attention.width,
            "pre-norm or RMS norms": spec.norm_placement != "post" or spec.norm != "layer" or not spec.embed_norm,
            "windows": bool(spec.windows) or attention.window is not None,
            "layers without biases": not (attention.bias and attention.out_bias and spec.mlp_bias),
            "a custom attention scale": attention.scale is not None,
            "a gated MLP": spec.has_gated_mlp,
            "a model without token types": spec.token_types == 0,
        },
        "BERT",
    )
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM" if spec.output == "mlm" else "BertModel"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": attention.heads,
        "intermediate_size": spec.mlp_width,
        "hidden_act": {"gelu_tanh": "gelu_new"}.get(spec.activation, spec.activation),
        "layer_norm_eps": spec.norm_eps,
        "type_vocab_size": spec.token_types,
        "tie_word_embeddings": spec.tied,
        "attention_probs_dropout_prob": attention.dropout,
        "hidden_dropout_prob": spec.dropout,
    }


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Set pooler and masked-LM head, which only the tensor names reveal."""
    has_mlm_head = "cls.predictions.transform.dense.weight" in names
    pooler = any(name.endswith("pooler.dense.weight") for name in names)
    return replace(spec, pooler=pooler, output="mlm" if has_mlm_head else "none")


def _has_mlm_head(spec: ModelSpec) -> bool:
    return spec.output == "mlm"


_LAYER_PREFIX = "encoder.layer.{i}."
_NATIVE_PREFIX = "blocks.{i}."
_LAYER_NAMES = {
    "attention.self.query.{p}": "attention.qkv.q_{p}",
    "attention.self.key.{p}": "attention.qkv.k_{p}",
    "attention.self.value.{p}": "attention.qkv.v_{p}",
    "attention.output.dense.{p}": "attention.output_projection.{p}",
    "attention.output.LayerNorm.{p}": "norm_attention.{p}",
    "intermediate.dense.{p}": "mlp.up.{p}",
    "output.dense.{p}": "mlp.down.{p}",
    "output.LayerNorm.{p}": "norm_mlp.{p}",
}
MAPPINGS = (
    TensorMapping("embeddings.word_embeddings.weight", "embed.tokens.weight"),
    TensorMapping("embeddings.position_embeddings.weight", "embed.positions.weight"),
    TensorMapping("embeddings.token_type_embeddings.weight", "embed.types.weight"),
    TensorMapping("embeddings.LayerNorm.weight", "embed.norm.weight"),
    TensorMapping("embeddings.LayerNorm.bias", "embed.norm.bias"),
    *(
        TensorMapping(
            _LAYER_PREFIX + external_name.replace("{p}", part), _NATIVE_PREFIX + native_name.replace("{p}", part)
        )
        for external_name, native_name in _LAYER_NAMES.items()
        for part in ("weight", "bias")
    ),
    TensorMapping("pooler.dense.weight", "pooler.dense.weight", when=lambda spec: spec.pooler),
    TensorMapping("pooler.dense.bias", "pooler.dense.bias", when=lambda spec: spec.pooler),
    TensorMapping("/cls.predictions.transform.dense.weight", "output.transform.weight", when=_has_mlm_head),
    TensorMapping("/cls.predictions.transform.dense.bias", "output.transform.bias", when=_has_mlm_head),
    TensorMapping("/cls.predictions.transform.LayerNorm.weight", "output.norm.weight", when=_has_mlm_head),
    TensorMapping("/cls.predictions.transform.LayerNorm.bias", "output.norm.bias", when=_has_mlm_head),
    TensorMapping(
        "/cls.predictions.bias", "output.vocabulary.bias", when=lambda spec: _has_mlm_head(spec) and spec.tied
    ),
    TensorMapping(
        "/cls.predictions.decoder.bias",
        "output.vocabulary.bias",
        when=lambda spec: _has_mlm_head(spec) and not spec.tied,
    ),
    TensorMapping(
        "/cls.predictions.decoder.weight",
        "output.vocabulary.weight",
        when=lambda spec: _has_mlm_head(spec) and not spec.tied,
    ),
)

FAMILY = ModelFamilySpec(
    name="bert",
    model_types=("bert",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    other_mappings={"gguf": BERT_MAPPINGS},
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("bert.", ""),
    export_prefix=lambda spec: "bert." if spec.output == "mlm" else "",
    ignored_suffixes=(
        "position_ids",
        *("cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
    ),
)
