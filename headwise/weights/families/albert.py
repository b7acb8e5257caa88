"""ALBERT: BERT with one block that all layers share, and embeddings narrower than the residual stream.

Every layer has its own hook point, so 12 layers with 8 heads have 96 addresses. The weights of head 5 are the same in all of
them: pruning 10.5 prunes 0.5 to 11.5 (https://arxiv.org/abs/1909.11942).
"""

from dataclasses import replace
from typing import Any

from headwise.spec import ModelSpec
from headwise.weights.families import bert
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    setting_or_default,
)
from headwise.weights.keymap import TensorMapping

# Defaults of transformers that differ from BERT's.
DEFAULTS = {"num_attention_heads": 64, "hidden_act": "gelu_new"}


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. Pooler and masked-LM head are set by `adjust_to_tensors`."""
    groups = setting_or_default(config, "num_hidden_groups", default=1)
    inner = setting_or_default(config, "inner_group_num", default=1)
    reject_unsupported(
        {
            f"{groups} groups of layers (num_hidden_groups)": groups != 1,
            f"{inner} blocks per layer (inner_group_num)": inner != 1,
        }
    )
    spec = bert.spec_from_config(DEFAULTS | dict(config))
    return replace(spec, embed_width=positive_int_setting(config, "embedding_size", default=128), shared_layers=True)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    reject_unrepresentable(
        {
            "layers with weights of their own": not spec.shared_layers,
            "embeddings without a projection": not spec.embed_width,
        },
        "ALBERT",
    )
    config = bert.config_from_spec(replace(spec, embed_width=0, shared_layers=False))
    return config | {
        "model_type": "albert",
        "architectures": ["AlbertForMaskedLM" if spec.output == "mlm" else "AlbertModel"],
        "embedding_size": spec.embed_width,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Set pooler and masked-LM head, which only the tensor names reveal."""
    has_mlm_head = "predictions.dense.weight" in names
    pooler = any(name.endswith("pooler.weight") for name in names)
    return replace(spec, pooler=pooler, output="mlm" if has_mlm_head else "none")


def _has_mlm_head(spec: ModelSpec) -> bool:
    return spec.output == "mlm"


_LAYER_PREFIX = "encoder.albert_layer_groups.0.albert_layers.0."
_LAYER_NAMES = {
    "attention.query": "attention.qkv.q",
    "attention.key": "attention.qkv.k",
    "attention.value": "attention.qkv.v",
    "attention.dense": "attention.output_projection",
    "attention.LayerNorm": "norm_attention",
    "ffn": "mlp.up",
    "ffn_output": "mlp.down",
    "full_layer_layer_norm": "norm_mlp",
}
_HEAD_NAMES = {"dense": "transform", "LayerNorm": "norm"}
MAPPINGS = (
    *(mapping for mapping in bert.MAPPINGS if mapping.external_name.startswith("embeddings.")),
    *(
        TensorMapping(f"encoder.embedding_hidden_mapping_in.{part}", f"embed.projection.{part}")
        for part in ("weight", "bias")
    ),
    *(
        TensorMapping(
            f"{_LAYER_PREFIX}{external_name}.{part}",
            f"blocks.{{i}}.{native_name}{'_' if '.qkv.' in native_name else '.'}{part}",
        )
        for external_name, native_name in _LAYER_NAMES.items()
        for part in ("weight", "bias")
    ),
    *(
        TensorMapping(f"pooler.{part}", f"pooler.dense.{part}", when=lambda spec: spec.pooler)
        for part in ("weight", "bias")
    ),
    *(
        TensorMapping(f"/predictions.{external_name}.{part}", f"output.{native_name}.{part}", when=_has_mlm_head)
        for external_name, native_name in _HEAD_NAMES.items()
        for part in ("weight", "bias")
    ),
    TensorMapping("/predictions.bias", "output.vocabulary.bias", when=lambda spec: _has_mlm_head(spec) and spec.tied),
    *(
        TensorMapping(
            f"/predictions.decoder.{part}", f"output.vocabulary.{part}",
            when=lambda spec: _has_mlm_head(spec) and not spec.tied,
        )
        for part in ("weight", "bias")
    ),
)  # fmt: skip

FAMILY = ModelFamilySpec(
    name="albert",
    model_types=("albert",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("albert.", ""),
    export_prefix=lambda spec: "albert." if spec.output == "mlm" else "",
    ignored_suffixes=(
        "position_ids",
        *("predictions.decoder.weight", "predictions.decoder.bias", "predictions.bias"),
        *("sop_classifier.classifier.weight", "sop_classifier.classifier.bias"),
    ),
)
