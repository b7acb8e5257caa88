"""RoBERTa and XLM-R: BERT whose position table begins after the padding id, with another masked-LM head.

The first token has the position `pad_token_id + 1`, so the first rows of the table are never used for real tokens
(https://arxiv.org/abs/1907.11692, https://arxiv.org/abs/1911.02116).
"""

from dataclasses import replace
from typing import Any

from headwise.errors import FileFormatError
from headwise.spec import ModelSpec
from headwise.weights.families import bert
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    positive_int_setting,
    reject_unrepresentable,
    setting_or_default,
)
from headwise.weights.keymap import TensorMapping


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. Pooler and masked-LM head are set by `adjust_to_tensors`."""
    pad = setting_or_default(config, "pad_token_id", default=1)
    if type(pad) is not int or pad < 0:
        raise FileFormatError(
            f"pad_token_id must be an integer of at least 0, because positions follow it. Got {pad!r}."
        )
    rows = positive_int_setting(config, "max_position_embeddings", default=512)
    if rows <= pad + 1:
        raise FileFormatError(
            f"max_position_embeddings={rows}: no position is left for a token, because positions start at pad_token_id + 1 = "
            f"{pad + 1}."
        )
    return replace(bert.spec_from_config(config), context=rows - pad - 1, position_offset=pad + 1)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    activation = spec.output_activation or spec.activation
    reject_unrepresentable(
        {
            "a position table without a row of the padding id": spec.position_offset == 0,
            f"a masked-LM head with {activation}": spec.output == "mlm" and activation != "gelu",
        },
        "RoBERTa",
    )
    config = bert.config_from_spec(replace(spec, position_offset=0, output_activation=""))
    return config | {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM" if spec.output == "mlm" else "RobertaModel"],
        "max_position_embeddings": spec.position_rows,
        "pad_token_id": spec.position_offset - 1,
    }


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Set pooler and masked-LM head, which only the tensor names reveal."""
    pooler = any(name.endswith("pooler.dense.weight") for name in names)
    if "lm_head.dense.weight" not in names:
        return replace(spec, pooler=pooler)
    return replace(
        spec, pooler=pooler, output="mlm", output_activation="gelu"
    )  # for every hidden_act, as in transformers


def _has_mlm_head(spec: ModelSpec) -> bool:
    return spec.output == "mlm"


_HEAD_NAMES = {"dense": "transform", "layer_norm": "norm"}
MAPPINGS = (
    *(mapping for mapping in bert.MAPPINGS if not mapping.external_name.startswith("/")),
    *(
        TensorMapping(f"/lm_head.{external_name}.{part}", f"output.{native_name}.{part}", when=_has_mlm_head)
        for external_name, native_name in _HEAD_NAMES.items()
        for part in ("weight", "bias")
    ),
    TensorMapping("/lm_head.bias", "output.vocabulary.bias", when=lambda spec: _has_mlm_head(spec) and spec.tied),
    *(
        TensorMapping(
            f"/lm_head.decoder.{part}",
            f"output.vocabulary.{part}",
            when=lambda spec: _has_mlm_head(spec) and not spec.tied,
        )
        for part in ("weight", "bias")
    ),
)

FAMILY = ModelFamilySpec(
    name="roberta",
    model_types=("roberta", "xlm-roberta"),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("roberta.", ""),
    export_prefix=lambda spec: "roberta." if spec.output == "mlm" else "",
    ignored_suffixes=("position_ids", "lm_head.decoder.weight", "lm_head.decoder.bias", "lm_head.bias"),
    architectures=("RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM"),
)
