"""Specs: what is refused and how, pruned layers, JSON both ways, presets with their published sizes."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling, SiteAddress, preset, presets
from tests.contract.variants import FIXED

HEADS = AttentionSpec(width=12, heads=4)
LAYER: dict[str, Any] = {"width": 12, "heads": 4}
MODEL: dict[str, Any] = {"vocab": 11, "context": 7, "layers": 2, "attention": HEADS}


# One attention layer: what follows from the sizes, and what is refused.


def test_sizes_left_out_follow_from_the_others() -> None:
    spec = AttentionSpec(width=12, heads=4)
    assert (spec.head_dim, spec.value_dim, spec.kv_heads, spec.kv_width) == (3, 3, 4, 12)
    assert AttentionSpec(width=12, heads=4, head_dim=5).value_dim == 5
    assert AttentionSpec(width=12, heads=4, head_dim=3, value_dim=3, kv_heads=4, kv_width=12) == spec


def test_a_spec_is_frozen_data() -> None:
    with pytest.raises(FrozenInstanceError):
        HEADS.width = 13  # pyright: ignore[reportAttributeAccessIssue]
    assert len({HEADS, replace(HEADS), AttentionSpec(width=12, heads=4)}) == 1, "equal specs hash alike"


REFUSED_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 0}, "width must be at least 1, got 0"),
    "heads": ({"heads": -1}, "heads must be a whole number, 0 or more; got -1"),
    "indivisible": ({"heads": 5}, "width 12 is not divisible by heads 5; give head_dim explicitly, e.g. head_dim=2"),
    "head_dim": ({"head_dim": -2}, "head_dim must be a whole number, 0 or more; got -2"),
    "value_dim": ({"value_dim": -1}, "value_dim must be a whole number, 0 or more; got -1"),
    "kv_heads": ({"kv_heads": 3}, "heads 4 cannot be shared out over kv_heads 3; kv_heads must divide heads"),
    "more kv_heads": ({"kv_heads": 8}, "heads 4 cannot be shared out over kv_heads 8"),
    "negative kv_heads": ({"kv_heads": -2}, "kv_heads must be a whole number, 0 or more; got -2"),
    "kept beyond": ({"kept": (0, 4)}, r"kept heads must lie in 0-3, got \[0, 4\]"),
    "kept below": ({"kept": (-1, 2)}, r"kept heads must lie in 0-3, got \[-1, 2\]"),
    "softmax": ({"softmax": "hard"}, "softmax 'hard' is unknown; use plain, off_by_one or sink"),
    "softcap": ({"softcap": 0.0}, "softcap must be above 0, got 0.0; leave it out for none"),
    "window": ({"window": 0}, "window must be a whole number of at least 1, got 0; leave it out for none"),
    "dropout": ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    "head_dropout": ({"head_dropout": -0.1}, "head_dropout must be at least 0 and below 1, got -0.1"),
    "schedule": ({"head_dropout_schedule": "w"}, "head dropout schedule 'w' is unknown; use constant, ramp or v"),
    "odd rotary": ({"rotary": Rotary()}, "turn channels in pairs, so 3 channels of head_dim 3 will not do"),
    "wide rotary": ({"head_dim": 4, "rotary": Rotary(dims=6)}, "so 6 channels of head_dim 4 will not do"),
    "input": ({"input": "half"}, "input 'half' is unknown; use full or slice"),
    "slice": ({"input": "slice", "width": 10, "head_dim": 2}, "width 10 and kv_width 10 must be divisible by heads 4"),
    "slice source": ({"input": "slice", "kv_width": 7}, "width 12 and kv_width 7 must be divisible by heads 4"),
    "slice of none": ({"input": "slice", "heads": 0}, "must be divisible by heads 0"),
    "slice shared": ({"input": "slice", "kv_heads": 2}, "needs kv_heads equal to heads, got 2 and 4"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED_LAYERS.values(), ids=REFUSED_LAYERS)
def test_a_layer_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        AttentionSpec(**LAYER | fields)


def test_rotary_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(HeadwiseError, match="rotary layout 'whole' is unknown; use half or interleaved"):
        Rotary(layout="whole")  # pyright: ignore[reportArgumentType]
    for dims in (0, 3, -2):
        with pytest.raises(HeadwiseError, match=f"rotary dims must be an even number of at least 2, got {dims}"):
            Rotary(dims=dims)
    with pytest.raises(HeadwiseError, match="rotary scaling 'yarn' is unknown; use linear or llama3"):
        RotaryScaling("yarn", 2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="rotary scaling factor must be above 0, got 0"):
        RotaryScaling("linear", 0)


# A pruned layer is just a spec.


def test_heads_keep_their_numbers_when_a_neighbour_is_cut() -> None:
    spec = HEADS.keep((3, 0, 3))
    assert spec.kept == spec.head_ids == (0, 3), "sorted, each once"
    assert spec.heads == 4, "the number it was born with"
    assert spec.head_dim == 3, "and so are its sizes"
    assert HEADS.keep((0, 1, 2, 3)) == HEADS, "all heads kept is not pruned at all"
    assert HEADS.keep(()).head_ids == ()


GROUPS = {
    # heads 0-2 read key/value head 0, heads 3-5 head 1, heads 6-8 head 2
    "whole": (None, (0, 1, 2), (0, 0, 0, 1, 1, 1, 2, 2, 2)),
    "uneven": ((0, 3, 4, 6, 7, 8), (0, 1, 2), (0, 1, 1, 2, 2, 2)),
    "a group gone": ((1, 2, 7), (0, 2), (0, 0, 1)),
    "the first groups gone": ((8,), (2,), (0,)),
    "all gone": ((), (), ()),
}


@pytest.mark.parametrize(("kept", "kv_ids", "kv_of_head"), GROUPS.values(), ids=GROUPS)
def test_a_key_head_that_nobody_reads_goes_with_its_group(
    kept: tuple[int, ...] | None, kv_ids: tuple[int, ...], kv_of_head: tuple[int, ...]
) -> None:
    spec = AttentionSpec(width=18, heads=9, kv_heads=3, kept=kept)
    assert spec.kv_ids == kv_ids
    assert spec.kv_of_head == kv_of_head


# A whole model.

REFUSED_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "vocab": ({"vocab": 0}, "vocab must be at least 1, got 0"),
    "context": ({"context": -1}, "context must be a whole number, 0 or more; got -1"),
    "layers": ({"layers": -1}, "layers must be a whole number, 0 or more; got -1"),
    "kind": ({"kind": "both"}, "kind 'both' is unknown; use decoder, encoder, encoder-decoder"),
    "form": ({"form": "sandwich"}, "form 'sandwich' is unknown; use pre, post, parallel"),
    "norm": ({"norm": "batch"}, "norm 'batch' is unknown; use layer, rms"),
    "activation": ({"activation": "silu"}, "activation 'silu' is unknown; use gelu, gelu_tanh, relu, swiglu"),
    "positions": ({"positions": "rotary"}, "positions 'rotary' is unknown; use learned, sinusoidal, none"),
    "output": ({"output": "class"}, "output 'class' is unknown; use lm, mlm, none"),
    "pruned attention": ({"attention": HEADS.keep((0,))}, "attention.kept applies to one layer; in a model give kept="),
    "encoder_layers": ({"encoder_layers": 3}, "encoder_layers=3 is for an encoder-decoder; use layers"),
    "decoder pooler": ({"pooler": True}, "a pooler and the mlm output belong to encoders"),
    "decoder mlm": ({"output": "mlm"}, "a pooler and the mlm output belong to encoders"),
    "both with types": (
        {"kind": "encoder-decoder", "token_types": 2},
        "an encoder-decoder has output lm or none, no pooler",
    ),
    "kv_width": ({"attention": replace(HEADS, kv_width=5)}, "in a model kv_width must equal width 12, got 5"),
    "kept nowhere": ({"kept": {"2": (0,)}}, "kept names layer '2', which this model does not have; 2 layers"),
    "kept beyond": ({"kept": {"1": (0, 4)}}, r"kept heads must lie in 0-3, got \[0, 4\]"),
    "windows": ({"windows": (None, 0)}, "window must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED_MODELS.values(), ids=REFUSED_MODELS)
def test_a_model_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        ModelSpec(**MODEL | fields)


def test_heads_are_cut_one_after_the_other_and_keep_their_names() -> None:
    spec = ModelSpec(**MODEL)
    less = spec.without("0.1").without("0.3,1.*")
    assert [str(address) for address in less.addresses] == ["0.0", "0.2"]
    assert less.kept == (("0", (0, 2)), ("1", ()))
    assert less == spec.without("0.1,0.3,1.*") == replace(spec, kept={"1": [], "0": [2, 0]})
    assert spec.without(()) == spec
    with pytest.raises(HeadwiseError, match=r"'0\.1' names no head here; layer 0 has heads 0,2"):
        less.without("0.1")


def test_layers_take_turns_with_windows_and_cross_attention_has_no_distance() -> None:
    attention = replace(HEADS, head_dim=4, rotary=Rotary(), alibi=True)
    spec = ModelSpec(**MODEL | {"layers": 3, "attention": attention, "windows": (None, 5), "kind": "encoder-decoder"})
    assert [spec.attention_at(SiteAddress("dec", layer)).window for layer in range(3)] == [None, 5, None]
    assert [str(site) for site in spec.sites][:5] == ["enc.0", "enc.1", "enc.2", "dec.0", "cross.0"]
    across = spec.attention_at(SiteAddress("cross", 1))
    assert (across.window, across.rotary, across.alibi) == (None, None, False)
    with pytest.raises(HeadwiseError, match=r"there is no layer dec\.3 here; the model has enc\.0, enc\.1"):
        spec.attention_at(SiteAddress("dec", 3))


def test_both_stacks_of_an_encoder_decoder_are_resized() -> None:
    even = ModelSpec(**MODEL, kind="encoder-decoder")
    for layers in (1, 3, 0):
        spec = even.resized(layers=layers)
        assert (spec.layers, spec.encoder_layers) == (layers, layers)
        assert len(spec.addresses) == 4 * 3 * layers  # heads of enc, dec and cross
    uneven = replace(even, encoder_layers=5)
    assert (uneven.resized(layers=3).layers, uneven.resized(layers=3).encoder_layers) == (3, 5)
    for spec in (even, uneven):
        wider = spec.resized(width=24, heads=6, context=9)
        assert (wider.layers, wider.encoder_layers) == (spec.layers, spec.encoder_layers)
        assert (wider.width, wider.attention.heads, wider.context, wider.hidden) == (24, 6, 9, 96)
    assert preset("transformer-base").resized(layers=2).encoder_layers == 2
    assert ModelSpec(**MODEL).resized(layers=3).encoder_layers == 0
    assert Transformer(even.resized(layers=3)).sites()[-1].address == SiteAddress("cross", 2)


# JSON both ways.


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
        hidden=draw(st.sampled_from((0, 17))),
        kind=kind,
        encoder_layers=draw(st.sampled_from((0, 1))) if kind == "encoder-decoder" else 0,
        form=draw(st.sampled_from(("pre", "post", "parallel"))),
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
    return spec.without(draw(st.sets(st.sampled_from(spec.addresses)))) if spec.addresses else spec


@FIXED
@given(spec=model_specs())
def test_json_brings_a_spec_back(spec: ModelSpec) -> None:
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", presets())
def test_json_brings_a_preset_back(name: str) -> None:
    assert ModelSpec.from_json(preset(name).to_json()) == preset(name)


def test_json_says_only_what_is_not_default() -> None:
    told = json.loads(ModelSpec(**MODEL).without("1.2").to_json())
    assert told["kept"] == {"1": [0, 1, 3]}
    assert not {"form", "dropout", "windows"} & set(told)
    assert not {"rotary", "kept", "bias"} & set(told["attention"])


PLAIN = {"vocab": 11, "context": 7, "layers": 2, "attention": {"width": 12, "heads": 4}}
BAD_JSON = {
    "unknown": (PLAIN | {"layer": 3}, "ModelSpec has no field 'layer'; did you mean layers"),
    "unknown inside": (
        PLAIN | {"attention": {"width": 12, "heads": 4, "kvheads": 2}},
        r"ModelSpec.attention has no field 'kvheads'; did you mean kv_heads",
    ),
    "missing": ({"vocab": 11}, "ModelSpec lacks the field 'context'; add it"),
    "a list": ([], "ModelSpec must be a JSON object, got list"),
    "attention a number": (PLAIN | {"attention": 3}, "ModelSpec.attention must be a JSON object, got int"),
    "text for a number": (PLAIN | {"vocab": "11"}, "ModelSpec.vocab must be int, got '11'"),
    "fraction for a whole": (PLAIN | {"vocab": 11.5}, "ModelSpec.vocab must be int, got 11.5"),
    "truth for a number": (PLAIN | {"layers": True}, "ModelSpec.layers must be int, got True"),
    "number for truth": (PLAIN | {"tied": 1}, "ModelSpec.tied must be bool, got 1"),
    "null": (PLAIN | {"vocab": None}, "ModelSpec.vocab must be int, got None"),
    "number for a word": (PLAIN | {"form": 3}, "ModelSpec.form must be"),
    "word unknown": (PLAIN | {"form": "sandwich"}, "form 'sandwich' is unknown"),
    "windows": (PLAIN | {"windows": [None, "3"]}, "ModelSpec.windows must be int or NoneType, got '3'"),
    "kept numbers": (PLAIN | {"kept": {"0": ["1"]}}, "ModelSpec.kept.0 must be int, got '1'"),
    "kept no list": (PLAIN | {"kept": {"0": 1}}, "ModelSpec.kept.0 must be tuple, got 1"),
    "kept a number": (PLAIN | {"kept": 3}, "ModelSpec.kept must be"),
}


@pytest.mark.parametrize(("data", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_json_that_does_not_fit_is_refused_by_the_name_of_the_field(data: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        ModelSpec.from_json(json.dumps(data))


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="the spec is not valid JSON"):
        ModelSpec.from_json("{vocab: 11}")


# Sizes: counted from the spec, counted on a model without memory, and published.

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
}


def parameters_of(spec: ModelSpec) -> int:
    return sum(parameter.numel() for parameter in Transformer(spec, device="meta").parameters())


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_preset_has_its_published_number_of_parameters(name: str, count: int) -> None:
    assert preset(name).parameters == count


@pytest.mark.parametrize("name", presets())
def test_a_preset_counts_what_a_model_holds(name: str) -> None:
    assert parameters_of(preset(name)) == preset(name).parameters


@FIXED
@given(spec=model_specs())
def test_any_spec_pruned_or_not_counts_what_a_model_holds(spec: ModelSpec) -> None:
    assert parameters_of(spec) == spec.parameters


def test_slices_are_counted_as_slices() -> None:
    spec = AttentionSpec(width=12, heads=4, input="slice", bias=True)
    assert spec.parameters == 3 * (4 * 3 * 3 + 12) + 12 * 12


def test_an_unknown_preset_offers_close_names() -> None:
    with pytest.raises(HeadwiseError, match=r"there is no preset 'gpt-2'; did you mean gpt2"):
        preset("gpt-2")
    with pytest.raises(HeadwiseError, match="there is no preset 'zzz'; known: bert-base, gpt-neo-125m"):
        preset("zzz")


def test_sizes_that_no_model_has_are_refused_at_once() -> None:
    with pytest.raises(HeadwiseError, match="layers is 2147483648, and at most 4096 are counted; is the file damaged"):
        ModelSpec(vocab=7, context=5, layers=2**31, attention=AttentionSpec(width=8, heads=2))
    with pytest.raises(HeadwiseError, match="heads is 4294967296, and at most 65536"):
        AttentionSpec(width=8, heads=2**32, head_dim=2)
