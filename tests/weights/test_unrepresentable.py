"""A config.json means the model that it was written for: parts that a family cannot represent raise an error."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.spec import ModelSpec, Rotary, RotaryScaling
from headwise.weights.families import FAMILIES, family_of
from tests.weights.test_attached_equals_native import MODELS, VOCAB

DYNAMIC = Rotary(scaling=RotaryScaling("dynamic", 2.0, original_context=8))
CHANGES: list[tuple[str, Any]] = [
    ("attention.qk_norm", hw.QKNorm(after_rotary=True)),
    ("attention.qk_norm", hw.QKNorm("layer", bias=True)),
    ("attention.output_gate", "head"),
    ("attention.output_gate", "channel"),
    ("attention.query_scaling", hw.QueryScaling(0.1, 8)),
    ("attention.softcap", 3.0),
    ("attention.softmax", "sink"),
    ("attention.gated", True),
    ("attention.scale", 0.3),
    ("attention.window", 3),
    ("attention.alibi", True),
    ("attention.rotary", DYNAMIC),
    ("attention.rotary", Rotary(7.0)),
    ("rotaries", (Rotary(7.0), None)),
    ("windows", (3, None)),
    ("norm_placement", "sandwich"),
    ("norm_placement", "output"),
    ("norm", "rms_plus_one"),
    ("logit_softcap", 2.0),
    ("embed_scale", 2.0),
    ("logit_scale", 0.5),
    ("positions", "sinusoidal"),
    ("activation", "reglu"),
    ("mlp_bias", True),
]


def changed(spec: ModelSpec, field: str, value: Any) -> ModelSpec:
    if field.startswith("attention."):
        return replace(spec, attention=replace(spec.attention, **{field.removeprefix("attention."): value}))
    return replace(spec, **{field: value})


@pytest.mark.parametrize("model_type", MODELS)
def test_config_of_changed_spec_reads_back_equal_or_raises(model_type: str) -> None:
    row, family = MODELS[model_type], family_of(model_type)
    kind = getattr(transformers, row.model)
    config = kind.config_class(**{"vocab_size": VOCAB} | row.config).to_dict() | {"architectures": [row.model]}
    spec, refused = family.spec_from_config(config), 0
    for field, value in CHANGES:
        try:
            different = changed(spec, field, value)
            written = family.config_from_spec(different)
        except HeadwiseError:  # the spec is invalid, or the family cannot represent it
            refused += 1
            continue
        again = family_of(written["model_type"]).spec_from_config(written)
        assert layers_of(again) == layers_of(different), f"{field}={value!r} is lost"
        if not field.startswith("attention.") and field not in ("windows", "rotaries"):
            assert getattr(again, field) == getattr(different, field), f"{field}={value!r} is lost"
    assert refused >= 12
    assert family in FAMILIES


def layers_of(spec: ModelSpec) -> list[Any]:
    return [replace(spec.attention_at(address), dropout=0.0) for address in spec.layer_addresses]
