"""Specs: errors, pruned layers, conversion to and from JSON, presets with their published sizes."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec, Rotary, RotaryScaling, preset, presets
from tests.contract.variants import FIXED_SETTINGS

HEADS = AttentionSpec(width=12, heads=4)
LAYER: dict[str, Any] = {"width": 12, "heads": 4}
MODEL: dict[str, Any] = {"vocab": 11, "context": 7, "layers": 2, "attention": HEADS}


# One attention layer: derived sizes and errors.


def test_attention_spec_defaults_follow_from_sizes() -> None:
    spec = AttentionSpec(width=12, heads=4)
    assert (spec.head_dim, spec.value_dim, spec.kv_heads, spec.kv_width) == (3, 3, 4, 12)
    assert AttentionSpec(width=12, heads=4, head_dim=5).value_dim == 5
    assert AttentionSpec(width=12, heads=4, head_dim=3, value_dim=3, kv_heads=4, kv_width=12) == spec


def test_attention_spec_is_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        HEADS.width = 13  # pyright: ignore[reportAttributeAccessIssue]
    assert len({HEADS, replace(HEADS), AttentionSpec(width=12, heads=4)}) == 1, "equal specs hash alike"


LAYER_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 0}, "width=0: must be at least 1"),
    "heads": ({"heads": -1}, "heads=-1: must be an integer of at least 0"),
    "indivisible": (
        {"heads": 5},
        r"width=12: not divisible by heads=5\. Set head_dim explicitly, for example head_dim=2",
    ),
    "head_dim": ({"head_dim": -2}, "head_dim=-2: must be an integer"),
    "value_dim": ({"value_dim": -1}, "value_dim=-1: must be an integer"),
    "kv_heads": ({"kv_heads": 3}, "heads=4: not divisible by kv_heads=3"),
    "more kv_heads": ({"kv_heads": 8}, "heads=4: not divisible by kv_heads=8"),
    "negative kv_heads": ({"kv_heads": -2}, "kv_heads=-2: must be an integer"),
    "kept above": ({"kept_heads": (0, 4)}, r"kept_heads=\[0, 4\]: .* between 0 and 3"),
    "kept below": ({"kept_heads": (-1, 2)}, r"kept_heads=\[-1, 2\]: .* between 0 and 3"),
    "softmax": ({"softmax": "hard"}, "softmax='hard': unknown"),
    "softcap": ({"softcap": 0.0}, "softcap=0.0: must be above 0"),
    "window": ({"window": 0}, "window=0: must be an integer of at least 1"),
    "dropout": ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
    "head_dropout": ({"head_dropout": -0.1}, "head_dropout=-0.1: must be at least 0 and below 1"),
    "schedule": ({"head_dropout_schedule": "w"}, "head_dropout_schedule='w': unknown"),
    "odd rotary": ({"rotary": Rotary()}, "cannot rotate 3 of 3 channels"),
    "wide rotary": ({"head_dim": 4, "rotary": Rotary(dims=6)}, "cannot rotate 6 of 4 channels"),
    "head_input": ({"head_input": "half"}, "head_input='half': unknown"),
    "slice": (
        {"head_input": "slice", "width": 10, "head_dim": 2},
        "width=10 and kv_width=10 must be divisible by heads=4",
    ),
    "slice source": ({"head_input": "slice", "kv_width": 7}, "width=12 and kv_width=7 must be divisible by heads=4"),
    "slice of none": ({"head_input": "slice", "heads": 0}, "must be divisible by heads=0"),
    "slice shared": ({"head_input": "slice", "kv_heads": 2}, "Got kv_heads=2 and heads=4"),
}


@pytest.mark.parametrize(("fields", "message"), LAYER_ERRORS.values(), ids=LAYER_ERRORS)
def test_attention_spec_invalid_field_raises(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        AttentionSpec(**LAYER | fields)


def test_rotary_invalid_settings_raise() -> None:
    with pytest.raises(HeadwiseError, match="layout='whole': unknown"):
        Rotary(layout="whole")  # pyright: ignore[reportArgumentType]
    for dims in (0, 3, -2):
        with pytest.raises(HeadwiseError, match=f"dims={dims}: must be an even number"):
            Rotary(dims=dims)
    with pytest.raises(HeadwiseError, match="kind='ntk': unknown"):
        RotaryScaling("ntk", 2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="factor=0: must be above 0"):
        RotaryScaling("linear", 0)


# Pruned layers.


def test_attention_spec_keep_preserves_head_numbers() -> None:
    spec = HEADS.keep_heads((3, 0, 3))
    assert spec.kept_heads == spec.head_ids == (0, 3), "sorted, each once"
    assert spec.heads == 4, "the number it was born with"
    assert spec.head_dim == 3, "and so are its sizes"
    assert HEADS.keep_heads((0, 1, 2, 3)) == HEADS, "all heads kept is not pruned at all"
    assert HEADS.keep_heads(()).head_ids == ()


GROUPS = {
    # heads 0-2 use KV head 0, heads 3-5 KV head 1, heads 6-8 KV head 2
    "whole": (None, (0, 1, 2), (0, 0, 0, 1, 1, 1, 2, 2, 2)),
    "uneven": ((0, 3, 4, 6, 7, 8), (0, 1, 2), (0, 1, 1, 2, 2, 2)),
    "a group gone": ((1, 2, 7), (0, 2), (0, 0, 1)),
    "the first groups gone": ((8,), (2,), (0,)),
    "all gone": ((), (), ()),
}


@pytest.mark.parametrize(("kept_heads", "kv_ids", "kv_of_head"), GROUPS.values(), ids=GROUPS)
def test_attention_spec_unread_kv_head_is_dropped(
    kept_heads: tuple[int, ...] | None, kv_ids: tuple[int, ...], kv_of_head: tuple[int, ...]
) -> None:
    spec = AttentionSpec(width=18, heads=9, kv_heads=3, kept_heads=kept_heads)
    assert spec.kv_head_ids == kv_ids
    assert spec.kv_of_head == kv_of_head


# Models.

MODEL_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "vocab": ({"vocab": 0}, "vocab=0: must be at least 1"),
    "context": ({"context": -1}, "context=-1: must be an integer"),
    "layers": ({"layers": -1}, "layers=-1: must be an integer"),
    "kind": ({"kind": "both"}, "kind='both': unknown. Use one of decoder, encoder, encoder-decoder"),
    "norm_placement": ({"norm_placement": "between"}, "norm_placement='between': unknown"),
    "norm": ({"norm": "batch"}, "norm='batch': unknown"),
    "activation": ({"activation": "silu"}, "activation='silu': unknown"),
    "positions": ({"positions": "rotary"}, "positions='rotary': unknown"),
    "output": ({"output": "class"}, "output='class': unknown"),
    "pruned attention": (
        {"attention": HEADS.keep_heads((0,))},
        "attention.kept_heads: applies to one layer",
    ),
    "encoder_layers": ({"encoder_layers": 3}, "encoder_layers=3: only an encoder-decoder"),
    "decoder pooler": ({"pooler": True}, "kind='decoder': does not support a pooler"),
    "decoder mlm": ({"output": "mlm"}, "kind='decoder': does not support a pooler"),
    "both with types": (
        {"kind": "encoder-decoder", "token_types": 2},
        "kind='encoder-decoder': does not support a pooler",
    ),
    "kv_width": ({"attention": replace(HEADS, kv_width=5)}, "kv_width=5: must equal width=12"),
    "kept nowhere": (
        {"kept_heads": {"2": (0,)}},
        r"not have layer '2'\. It has 2 layers",
    ),
    "kept above": ({"kept_heads": {"1": (0, 4)}}, r"kept_heads=\[0, 4\]: .* between 0 and 3"),
    "windows": ({"windows": (None, 0)}, "window=0: must be an integer of at least 1"),
}


@pytest.mark.parametrize(("fields", "message"), MODEL_ERRORS.values(), ids=MODEL_ERRORS)
def test_model_spec_invalid_field_raises(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        ModelSpec(**MODEL | fields)


def test_model_spec_without_twice_keeps_names() -> None:
    spec = ModelSpec(**MODEL)
    pruned = spec.without("0.1").without("0.3,1.*")
    assert [str(address) for address in pruned.head_addresses] == ["0.0", "0.2"]
    assert pruned.kept_heads == (("0", (0, 2)), ("1", ()))
    assert pruned == spec.without("0.1,0.3,1.*") == replace(spec, kept_heads={"1": [], "0": [2, 0]})
    assert spec.without(()) == spec
    with pytest.raises(HeadwiseError, match=r"'0\.1': the model has no such head\. Layer 0 has heads 0,2"):
        pruned.without("0.1")


def test_model_spec_windows_alternate_and_skip_cross_attention() -> None:
    attention = replace(HEADS, head_dim=4, rotary=Rotary(), alibi=True)
    spec = ModelSpec(**MODEL | {"layers": 3, "attention": attention, "windows": (None, 5), "kind": "encoder-decoder"})
    assert [spec.attention_at(LayerAddress("dec", layer)).window for layer in range(3)] == [None, 5, None]
    assert [str(layer_address) for layer_address in spec.layer_addresses][:5] == [
        "enc.0",
        "enc.1",
        "enc.2",
        "dec.0",
        "cross.0",
    ]
    cross = spec.attention_at(LayerAddress("cross", 1))
    assert (cross.window, cross.rotary, cross.alibi) == (None, None, False)
    with pytest.raises(HeadwiseError, match=r"layer dec\.3: .*Use one of enc\.0, enc\.1"):
        spec.attention_at(LayerAddress("dec", 3))


def test_model_spec_resized_changes_both_stacks() -> None:
    even = ModelSpec(**MODEL, kind="encoder-decoder")
    for layers in (1, 3, 0):
        spec = even.resized(layers=layers)
        assert (spec.layers, spec.encoder_layers) == (layers, layers)
        assert len(spec.head_addresses) == 4 * 3 * layers  # heads of enc, dec and cross
    uneven = replace(even, encoder_layers=5)
    assert (uneven.resized(layers=3).layers, uneven.resized(layers=3).encoder_layers) == (3, 5)
    for spec in (even, uneven):
        wider = spec.resized(width=24, heads=6, context=9)
        assert (wider.layers, wider.encoder_layers) == (spec.layers, spec.encoder_layers)
        assert (wider.width, wider.attention.heads, wider.context, wider.mlp_width) == (24, 6, 9, 96)
    assert preset("transformer-base").resized(layers=2).encoder_layers == 2
    assert ModelSpec(**MODEL).resized(layers=3).encoder_layers == 0
    assert Transformer(even.resized(layers=3)).hook_points()[-1].address == LayerAddress("cross", 2)


# Conversion to and from JSON.


@st.composite
def attention_specs(draw: st.DrawFn) -> AttentionSpec:
    heads, kv_heads = draw(st.sampled_from(((1, 1), (4, 4), (6, 3), (6, 1))))
    layouts, scalings = st.sampled_from(("half", "interleaved")), st.none() | st.just(RotaryScaling("linear", 2.0))
    rotaries = st.builds(Rotary, st.sampled_from((1e4, 500.0)), layouts, st.sampled_from((None, 2)), scalings)
    return AttentionSpec(
        width=12,
        heads=heads,
        head_dim=draw(st.sampled_from((4, 6))),
        value_dim=draw(st.sampled_from((0, 5))),
        kv_heads=kv_heads,
        bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        scale=draw(st.none() | st.just(0.5)),
        rotary=draw(st.none() | rotaries),
        alibi=draw(st.booleans()),
        softcap=draw(st.none() | st.just(30.0)),
        softmax=draw(st.sampled_from(("plain", "off_by_one", "sink"))),
        gated=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.1))),
        head_dropout=draw(st.sampled_from((0.0, 0.25))),
    )


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    kind = draw(st.sampled_from(("decoder", "encoder", "encoder-decoder")))
    spec = ModelSpec(
        vocab=11,
        context=7,
        layers=draw(st.integers(0, 3)),
        attention=draw(attention_specs()),
        mlp_width=draw(st.sampled_from((0, 17))),
        kind=kind,
        encoder_layers=draw(st.sampled_from((0, 1))) if kind == "encoder-decoder" else 0,
        norm_placement=draw(st.sampled_from(("pre", "post", "parallel"))),
        norm=draw(st.sampled_from(("layer", "rms"))),
        activation=draw(st.sampled_from(("gelu", "swiglu"))),
        mlp_bias=draw(st.booleans()),
        positions=draw(st.sampled_from(("learned", "sinusoidal", "none"))),
        windows=draw(st.sampled_from(((), (None, 3), (2,)))),
        embed_norm=draw(st.booleans()),
        token_types=0 if kind == "encoder-decoder" else draw(st.sampled_from((0, 2))),
        pooler=kind == "encoder" and draw(st.booleans()),
        output=draw(st.sampled_from(("lm", "mlm", "none"))) if kind == "encoder" else "lm",
        tied=draw(st.booleans()),
    )
    return spec.without(draw(st.sets(st.sampled_from(spec.head_addresses)))) if spec.head_addresses else spec


@FIXED_SETTINGS
@given(spec=model_specs())
def test_model_spec_json_round_trips(spec: ModelSpec) -> None:
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", presets())
def test_preset_json_round_trips(name: str) -> None:
    assert ModelSpec.from_json(preset(name).to_json()) == preset(name)


def test_model_spec_json_omits_defaults() -> None:
    data = json.loads(ModelSpec(**MODEL).without("1.2").to_json())
    assert data["kept_heads"] == {"1": [0, 1, 3]}
    assert not {"norm_placement", "dropout", "windows"} & set(data)
    assert not {"rotary", "kept_heads", "bias"} & set(data["attention"])


PLAIN = {"vocab": 11, "context": 7, "layers": 2, "attention": {"width": 12, "heads": 4}}
JSON_ERRORS = {
    "unknown": (PLAIN | {"layer": 3}, "ModelSpec: unknown field 'layer'; did you mean layers"),
    "unknown inside": (
        PLAIN | {"attention": {"width": 12, "heads": 4, "kvheads": 2}},
        r"ModelSpec.attention: unknown field 'kvheads'; did you mean kv_heads",
    ),
    "missing": ({"vocab": 11}, "ModelSpec: the required field 'context' is missing"),
    "a list": ([], r"ModelSpec: must be a JSON object\. Got list"),
    "attention a number": (PLAIN | {"attention": 3}, r"ModelSpec.attention: must be a JSON object\. Got int"),
    "text for a number": (PLAIN | {"vocab": "11"}, "ModelSpec.vocab='11': must be int"),
    "fraction for a whole": (PLAIN | {"vocab": 11.5}, "ModelSpec.vocab=11.5: must be int"),
    "truth for a number": (PLAIN | {"layers": True}, "ModelSpec.layers=True: must be int"),
    "number for truth": (PLAIN | {"tied": 1}, "ModelSpec.tied=1: must be bool"),
    "null": (PLAIN | {"vocab": None}, "ModelSpec.vocab=None: must be int"),
    "number for a word": (PLAIN | {"norm_placement": 3}, "ModelSpec.norm_placement=3: must be 'pre' or 'post'"),
    "word unknown": (PLAIN | {"norm_placement": "between"}, "norm_placement='between': unknown"),
    "windows": (PLAIN | {"windows": [None, "3"]}, "ModelSpec.windows='3': must be int or None"),
    "kept numbers": (PLAIN | {"kept_heads": {"0": ["1"]}}, "ModelSpec.kept_heads.0='1': must be int"),
    "kept no list": (PLAIN | {"kept_heads": {"0": 1}}, "ModelSpec.kept_heads.0=1: must be tuple"),
    "kept a number": (PLAIN | {"kept_heads": 3}, "ModelSpec.kept_heads=3: must be"),
}


@pytest.mark.parametrize(("data", "message"), JSON_ERRORS.values(), ids=JSON_ERRORS)
def test_model_spec_json_wrong_type_error_names_field(data: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        ModelSpec.from_json(json.dumps(data))


def test_model_spec_invalid_json_raises() -> None:
    with pytest.raises(HeadwiseError, match="not valid JSON"):
        ModelSpec.from_json("{vocab: 11}")


# Parameter counts: from the spec, from a model on the meta device, and as published.

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "gpt-neo-125m": 125_198_592,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "smollm2-135m": 134_515_008,
    "roberta-base": 124_645_632,
    "distilbert-base": 66_362_880,
    "albert-base": 11_683_584,
    "t5-small": 60_506_624 + 10 * 8 * 32,  # one table of position biases per layer instead of one per stack
    "mistral-7b": 7_241_732_096,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "phi3-mini": 3_821_079_552,
    "qwen2-0.5b": 494_032_768,
    "gemma2-2b": 2_614_341_888,
    "olmo2-7b": 7_298_617_344,
    "modernbert-base": 149_014_272,
    "gemma3-1b": 999_885_952,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm3-3b": 3_075_098_624,
}


def parameters_of(spec: ModelSpec) -> int:
    return sum(parameter.numel() for parameter in Transformer(spec, device="meta").parameters())


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_preset_parameters_equal_published(name: str, count: int) -> None:
    assert preset(name).num_parameters == count


@pytest.mark.parametrize("name", presets())
def test_preset_parameters_equal_model(name: str) -> None:
    assert parameters_of(preset(name)) == preset(name).num_parameters


@FIXED_SETTINGS
@given(spec=model_specs())
def test_model_spec_any_parameters_equal_model(spec: ModelSpec) -> None:
    assert parameters_of(spec) == spec.num_parameters


def test_attention_spec_slice_input_counts_parameters() -> None:
    spec = AttentionSpec(width=12, heads=4, head_input="slice", bias=True)
    assert spec.num_parameters == 3 * (4 * 3 * 3 + 12) + 12 * 12


def test_preset_unknown_name_suggests_close_names() -> None:
    with pytest.raises(HeadwiseError, match="preset 'gpt-2': unknown; did you mean gpt2"):
        preset("gpt-2")
    with pytest.raises(HeadwiseError, match="preset 'zzz': unknown; known: albert-base, bert-base"):
        preset("zzz")


def test_spec_huge_sizes_raise() -> None:
    with pytest.raises(HeadwiseError, match="layers=2147483648: must be at most 4096"):
        ModelSpec(vocab=7, context=5, layers=2**31, attention=AttentionSpec(width=8, heads=2))
    with pytest.raises(HeadwiseError, match="heads=4294967296: must be at most 65536"):
        AttentionSpec(width=8, heads=2**32, head_dim=2)
