# ruff: noqa: C408 (sizes read better as keywords)
"""Heads cut out of other people's models: what is left computes what silence did, in memory, in a folder, and whole again."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.attached.layer import matrix
from tests.attached.models import BY_NAME, CASES, Case, first, real, transformers

MORE = (
    "phi3",
    "opt",
    "gpt_neox",
    "modernbert",
    "qwen2_windows",
    "electra",
)  # cut as others are; the quick tests leave them out


def marked(cases: list[Case]) -> list[Any]:
    """Cases, those that are like others marked as slow."""
    return [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in MORE else ()) for case in cases]


CUT = [case for case in CASES if case.cut]
each_cut = pytest.mark.parametrize("case", marked(CUT))
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
# One head; a whole layer, the first, whose keys a cache counts by; a key/value group and an uneven rest.
WHICH = {"one": "1.2", "layer": "0.*", "many": "0.1,1.0-2,2.3"}
TWO = {"one": "cross.1.2", "layer": "dec.0.*,cross.1.*", "many": "enc.0.1,enc.1.*,dec.1.0-2,cross.2.3"}


def heads_of(case: Case, which: str) -> str:
    """Some heads of a model, by the kind of cut."""
    return (TWO if case.kind == "two" else WHICH)[which]


def silenced(model: Any, theirs: Any, which: str, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad(), theirs.heads.select(which).silenced():
        return first(model(**given))


@each_cut
@pytest.mark.parametrize("which", WHICH)
def test_silence_is_cut(case: Case, which: str) -> None:
    model, given, which = case.build().double(), case.inputs("right"), heads_of(case, which)
    theirs = hw.attach(model)
    want = silenced(model, theirs, which, given)
    before = sum(value.numel() for value in model.parameters())
    gone = len(theirs.heads.select(which))
    total = len(theirs.heads)
    theirs.cut(which)
    with torch.no_grad():
        got = first(model(**given))
        with hw.record(theirs) as recording:
            assert torch.equal(first(model(**given)), got)
    assert (got - want)[real(given)].abs().max() <= 1e-9
    assert len(theirs.heads) == total - gone == len(recording) == len(theirs.spec.addresses)
    assert sum(value.numel() for value in model.parameters()) < before


@each_cut
def test_parameters_fall_by_what_the_heads_held(case: Case) -> None:
    model = case.build()
    theirs = hw.attach(model)
    before = sum(value.numel() for value in model.parameters())
    head = "cross.2.1" if case.kind == "two" else "2.1"
    (one,) = theirs.heads.select(head)
    spec, held = one.layer.spec, one.W_Q.numel() + one.W_O.numel() + (0 if one.b_Q is None else one.b_Q.numel())
    if spec.kv_heads == spec.heads:
        held += one.W_K.numel() + one.W_V.numel() + (0 if one.b_K is None else 2 * one.b_K.numel())
    theirs.cut(head)
    assert before - sum(value.numel() for value in model.parameters()) == held


@each_cut
@pytest.mark.parametrize("which", WHICH)
def test_saved_and_loaded_again(case: Case, which: str, tmp_path: Path) -> None:
    model, given = case.build(), case.inputs("right")
    theirs = hw.attach(model).cut(heads_of(case, which))
    with torch.no_grad():
        want = first(model(**given))
    theirs.save_pretrained(tmp_path / "small")
    assert "headwise" not in (tmp_path / "small" / "config.json").read_text()
    again = hw.load(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(first(again.model(**given)), want)  # pyright: ignore
    assert again.heads.addresses == theirs.heads.addresses
    theirs.save_pretrained(tmp_path / "whole", whole=True)
    plain = type(model).from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        got = first(plain(**given))
    assert (got - want)[real(given)].abs().max() <= 1e-4
    assert sum(v.numel() for v in plain.parameters()) == sum(v.numel() for v in case.build().parameters())


@each_cut
def test_pruning_makes_another_model_and_leaves_this_one(case: Case) -> None:
    model, given = case.build(), case.inputs("right")
    theirs = hw.attach(model)
    with torch.no_grad():
        before = first(model(**given))
    which = "enc.1.1,cross.2.0" if case.kind == "two" else "1.1,2.0"
    want = silenced(model, theirs, which, given)
    small = hw.prune(theirs, heads=which, fold=False)
    with torch.no_grad():
        assert torch.equal(first(model(**given)), before)
        assert (first(small.model(**given)) - want)[real(given)].abs().max() <= 1e-4
    assert len(theirs.heads) - len(small.heads) == 2


@pytest.mark.parametrize("case", marked([case for case in CUT if case.kind != "encoder"]))
@pytest.mark.parametrize(
    ("which", "cache"),
    [
        pytest.param(which, cache, marks=() if cache == "dynamic" or which == "layer" else pytest.mark.slow)
        for which in WHICH
        for cache in ("dynamic", "static", "none")
    ],
)  # a whole layer, the first, whose keys a cache counts by, with every cache; the others with the usual one
def test_a_cut_model_generates_as_the_silenced_one_does(case: Case, which: str, cache: str) -> None:
    model, given, which = case.build(), case.inputs("left"), heads_of(case, which)
    theirs = hw.attach(model)
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    how |= {"use_cache": cache != "none"} | ({"cache_implementation": "static"} if cache == "static" else {})
    with theirs.heads.select(which).silenced():
        want = model.generate(**given, **how)
    theirs.cut(which)
    assert torch.equal(model.generate(**given, **how), want)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_different_sizes(name: str) -> None:
    """Of two groups of three, one loses a head: keys stay two while attached, and are shared out when it is detached."""
    case = BY_NAME[name]
    model, given = case.build().double(), case.inputs("right")
    theirs = hw.attach(model)
    want = silenced(model, theirs, "1.4", given)
    theirs.cut("1.4")
    layer = theirs.attention_layers()[1]
    assert layer.spec.kv_of_head == (0, 0, 0, 1, 1)
    joined = layer.found.reads is not None and len(layer.found.reads[1]) == 1
    keys, other = (
        (0, 5 * 4) if joined else (1, 0)
    )  # where keys are, and how many rows there are of queries; twice with values
    assert matrix(layer.found.reader(keys)).shape[0] == other + 2 * 4 * (1 + joined)
    theirs.detach()
    assert matrix(layer.found.reader(keys)).shape[0] == other + 5 * 4 * (1 + joined)
    with torch.no_grad():
        assert (first(model(**given)) - want)[real(given)].abs().max() <= 1e-9  # plain transformers now
        again = hw.attach(model)
        assert [str(a) for a in again.heads.addresses if a.layer == 1] == ["1.0", "1.1", "1.2", "1.3", "1.5"]
        assert (first(model(**given)) - want)[real(given)].abs().max() <= 1e-9
        further = silenced(model, again, "1.5", given)
        again.cut("1.5")
        assert (first(model(**given)) - further)[real(given)].abs().max() <= 1e-9


@each_cut
def test_what_is_folded_stands_in_the_bias(case: Case, tmp_path: Path) -> None:
    from headwise.analysis.ablation.ablate import ablated, mean_of, record_z
    from headwise.compression.prune_heads import cut, fold

    model, given = case.build().double(), case.inputs()
    theirs = hw.attach(model)
    two: dict[str, Any] = {"source": given["input_ids"]} if case.kind == "two" else {}
    which = "enc.0.1,cross.1.*" if two else "0.1,1.*"
    means = mean_of([record_z(theirs, given["decoder_input_ids" if two else "input_ids"], **two)])
    with torch.no_grad(), ablated(theirs, which, "mean", means=means):
        want = first(model(**given))
    small = cut(theirs, which, fold(theirs, which, means))
    with torch.no_grad():
        assert (first(small.model(**given)) - want).abs().max() <= 1e-9
    small.save_pretrained(tmp_path / "small")
    again: Any = hw.load(tmp_path / "small", dtype=None)
    with torch.no_grad():
        assert (first(again.model(**given)) - want).abs().max() <= 1e-9


SMALL = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=6, vocab_size=61, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
T5 = "makes the position bias of all layers"


@pytest.mark.parametrize(
    ("name", "sizes", "which", "why"),
    [
        ("Doge", SMALL, "0.0", "cannot be called without them"),  # masks that values of all heads make
        ("BitNet", SMALL, "0.0", "z is not seen to enter W_O"),
        ("T5", BY_NAME["t5"].sizes, "enc.0.*", T5),
        ("T5", BY_NAME["t5"].sizes, "dec.0.*,cross.1.0", T5),
    ],
)
def test_what_cannot_be_cut_is_refused_and_stays_as_it_is(
    name: str, sizes: dict[str, Any], which: str, why: str
) -> None:
    case = BY_NAME["t5" if name == "T5" else "llama"]
    kind = "T5ForConditionalGeneration" if name == "T5" else f"{name}ForCausalLM"
    torch.manual_seed(1)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes)).eval()
    given = case.inputs("right")
    theirs = hw.attach(model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = first(model(**given))
        with pytest.raises(hw.HeadwiseError, match=rf"{why}.*silenced\(\)"):
            theirs.cut(which)
        assert torch.equal(first(model(**given)), before)
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        with hw.record(theirs, what=("z",)) as recording:
            assert torch.equal(first(model(**given)), before)
        assert all(one.calls for one in recording)
        assert torch.equal(first(theirs.detach()(**given)), before)


def test_a_shared_bias_is_cut_and_handed_on(tmp_path: Path) -> None:
    """T5's first layer makes the bias of all: each sees its heads' part, whichever were cut, and again when more go."""
    case = BY_NAME["t5"]
    model, given = case.build().double(), case.inputs("right")
    theirs = hw.attach(model)
    which, more = "enc.0.1,enc.1.*,dec.0.0-2,cross.0.3,cross.2.0", "enc.0.3,dec.2.1,cross.0.0"
    want, further = silenced(model, theirs, which, given), silenced(model, theirs, f"{which},{more}", given)
    theirs.cut(which)
    with torch.no_grad():
        assert (first(model(**given)) - want).abs().max() <= 1e-9
        theirs.cut(more)
        assert (first(model(**given)) - further).abs().max() <= 1e-9
        theirs.save_pretrained(tmp_path / "small")
        theirs.save_pretrained(tmp_path / "whole", whole=True)
        again: Any = hw.load(tmp_path / "small", dtype=None)
        assert torch.equal(first(again.model(**given)), first(model(**given)))
        plain = type(model).from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
        assert (first(plain(**given)) - further).abs().max() <= 1e-9
        assert (first(theirs.detach()(**given)) - further).abs().max() <= 1e-9


def test_a_norm_over_all_heads_goes_on_to_see_those_that_were_cut(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.4)
    theirs, given = hw.attach(model), BY_NAME["llama"].inputs("right")
    want, further = silenced(model, theirs, "0.1,1.0-1", given), silenced(model, theirs, "0.1,0.3,1.0-1", given)
    for which, goal in (("0.1,1.0-1", want), ("0.3", further)):
        theirs.cut(which)
        with torch.no_grad():
            assert (first(model(**given)) - goal)[real(given)].abs().max() <= 1e-9
    head: Any = theirs.heads["0.0"]
    assert head.W_O.shape == (6, 24)
    assert head.W_V.shape == (24, 6)
    with pytest.raises(hw.HeadwiseError, match="norm over all heads"):
        _ = head.W_Q
    theirs.save_pretrained(tmp_path / "small")
    theirs.save_pretrained(tmp_path / "whole", whole=True)
    again: Any = hw.load(tmp_path / "small", dtype=None)
    with torch.no_grad():
        assert torch.equal(first(again.model(**given)), first(model(**given)))
        plain = type(model).from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
        assert (first(plain(**given)) - further)[real(given)].abs().max() <= 1e-9
        assert (first(theirs.detach()(**given)) - further)[real(given)].abs().max() <= 1e-9


def test_misuse_of_cutting() -> None:
    theirs = hw.attach(BY_NAME["llama"].build())
    with pytest.raises(hw.HeadwiseError, match="all 18 heads"):
        theirs.cut("*")
    with pytest.raises(hw.HeadwiseError, match="end that before cutting"), theirs.heads["1.1"].silenced():
        theirs.cut("1.2")
    with pytest.raises(hw.HeadwiseError, match="names no head here"):
        theirs.cut("7.1")


def test_plain_transformers_refuses_the_smaller_folder(tmp_path: Path) -> None:
    model = BY_NAME["llama"].build()
    hw.attach(model).cut("1.2").save_pretrained(tmp_path / "small")
    with pytest.raises(RuntimeError, match=r"size|shape|mismatch"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
