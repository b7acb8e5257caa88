"""DistilBERT: BERT without token types and pooler, with its own names (https://arxiv.org/abs/1910.01108)."""

from dataclasses import replace
from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families import bert
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    common_unsupported,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    setting_or_default,
    translate_setting,
)
from headwise.weights.keymap import TensorMapping

NORM_EPS = 1e-12  # fixed in transformers


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. The masked-LM head is set by `adjust_to_tensors`."""
    reject_unsupported(common_unsupported(config))
    return ModelSpec(
        vocab=positive_int_setting(config, "vocab_size", default=30522),
        context=positive_int_setting(config, "max_position_embeddings", default=512),
        layers=positive_int_setting(config, "n_layers", "num_hidden_layers", default=6),
        attention=AttentionSpec(
            positive_int_setting(config, "dim", "hidden_size", default=768),
            positive_int_setting(config, "n_heads", "num_attention_heads", default=12),
            bias=True,
            out_bias=True,
        ),
        mlp_width=positive_int_setting(config, "hidden_dim", default=3072),
        kind="encoder",
        norm_placement="post",
        norm_eps=NORM_EPS,
        activation=translate_setting(
            setting_or_default(config, "activation", default="gelu"), bert.ACTIVATIONS, "activation"
        ),
        embed_norm=True,
        output="none",
        tied=bool_setting(config, "tie_word_embeddings", default=True),
    )


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    reject_unrepresentable(
        {
            "token types": spec.token_types > 0,
            "a pooler": spec.pooler,
            f"norms with eps {spec.norm_eps}": spec.norm_eps != NORM_EPS,
        },
        "DistilBERT",
    )
    config = bert.config_from_spec(replace(spec, token_types=1))
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertForMaskedLM" if spec.output == "mlm" else "DistilBertModel"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "dim": spec.width,
        "n_layers": spec.layers,
        "n_heads": spec.attention.heads,
        "hidden_dim": spec.mlp_width,
        "activation": config["hidden_act"],
        "tie_word_embeddings": spec.tied,
        "attention_dropout": spec.attention.dropout,
        "dropout": spec.dropout,
    }


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Set the masked-LM head, which only the tensor names reveal."""
    return replace(spec, output="mlm" if "vocab_transform.weight" in names else "none")


def _has_mlm_head(spec: ModelSpec) -> bool:
    return spec.output == "mlm"


_NAMES = {
    "attention.q_lin.{p}": "attention.qkv.q_{p}",
    "attention.k_lin.{p}": "attention.qkv.k_{p}",
    "attention.v_lin.{p}": "attention.qkv.v_{p}",
    "attention.out_lin.{p}": "attention.output_projection.{p}",
    "sa_layer_norm.{p}": "norm_attention.{p}",
    "ffn.lin1.{p}": "mlp.up.{p}",
    "ffn.lin2.{p}": "mlp.down.{p}",
    "output_layer_norm.{p}": "norm_mlp.{p}",
}
_HEAD_NAMES = {"vocab_transform": "transform", "vocab_layer_norm": "norm"}
MAPPINGS = (
    TensorMapping("embeddings.word_embeddings.weight", "embed.tokens.weight"),
    TensorMapping("embeddings.position_embeddings.weight", "embed.positions.weight"),
    TensorMapping("embeddings.LayerNorm.weight", "embed.norm.weight"),
    TensorMapping("embeddings.LayerNorm.bias", "embed.norm.bias"),
    *(
        TensorMapping(
            f"transformer.layer.{{i}}.{external_name.replace('{p}', part)}",
            f"blocks.{{i}}.{native_name.replace('{p}', part)}",
        )
        for external_name, native_name in _NAMES.items()
        for part in ("weight", "bias")
    ),
    *(
        TensorMapping(f"/{external_name}.{part}", f"output.{native_name}.{part}", when=_has_mlm_head)
        for external_name, native_name in _HEAD_NAMES.items()
        for part in ("weight", "bias")
    ),
    TensorMapping("/vocab_projector.bias", "output.vocabulary.bias", when=_has_mlm_head),
    TensorMapping(
        "/vocab_projector.weight", "output.vocabulary.weight", when=lambda spec: _has_mlm_head(spec) and not spec.tied
    ),
)

FAMILY = ModelFamilySpec(
    name="distilbert",
    model_types=("distilbert",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("distilbert.", ""),
    export_prefix=lambda spec: "distilbert." if spec.output == "mlm" else "",
    ignored_suffixes=("position_ids", "vocab_projector.weight"),
    architectures=("DistilBertModel", "DistilBertForMaskedLM"),
)
