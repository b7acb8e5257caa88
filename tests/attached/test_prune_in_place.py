# ruff: noqa: C408 (sizes read better as keywords)
"""Pruning of transformers models: outputs equal those with silenced heads, in memory, after saving, and in full shape."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.attached.layer import weight_matrix
from tests.attached.models import BY_NAME, CASES, Case, main_output, real_positions, transformers

# Pruned like other cases; run only in the slow tests.
SLOW_NAMES = ("phi3", "opt", "gpt_neox", "modernbert", "qwen2_windows", "electra")


def mark_slow(cases: list[Case]) -> list[Any]:
    """Mark cases that are similar to others as slow."""
    return [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in SLOW_NAMES else ()) for case in cases
    ]


PRUNABLE = [case for case in CASES if case.prunable]
each_prunable = pytest.mark.parametrize("case", mark_slow(PRUNABLE))
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
# One head; the full first layer, whose keys determine the cache length; a KV group, leaving groups of different sizes.
HEAD_SETS = {"one": "1.2", "layer": "0.*", "many": "0.1,1.0-2,2.3"}
ENCODER_DECODER_SETS = {"one": "cross.1.2", "layer": "dec.0.*,cross.1.*", "many": "enc.0.1,enc.1.*,dec.1.0-2,cross.2.3"}


def heads_of(case: Case, selection: str) -> str:
    """Return the heads to prune, by kind of pruning."""
    return (ENCODER_DECODER_SETS if case.kind == "two" else HEAD_SETS)[selection]


def silenced_output(model: Any, attached: Any, heads: str, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad(), attached.heads.select(heads).silenced():
        return main_output(model(**inputs))


@each_prunable
@pytest.mark.parametrize("selection", HEAD_SETS)
def test_prune_equals_silenced_heads(case: Case, selection: str) -> None:
    model, inputs, selection = case.build().double(), case.inputs("right"), heads_of(case, selection)
    attached = hw.attach(model)
    want = silenced_output(model, attached, selection, inputs)
    before = sum(value.numel() for value in model.parameters())
    num_pruned = len(attached.heads.select(selection))
    total = len(attached.heads)
    attached.prune(selection, in_place=True)
    with torch.no_grad():
        got = main_output(model(**inputs))
        with hw.record(attached) as recording:
            assert torch.equal(main_output(model(**inputs)), got)
    assert (got - want)[real_positions(inputs)].abs().max() <= 1e-9
    assert len(attached.heads) == total - num_pruned == len(recording) == len(attached.spec.head_addresses)
    assert sum(value.numel() for value in model.parameters()) < before


@each_prunable
def test_prune_removes_parameters_of_head(case: Case) -> None:
    model = case.build()
    attached = hw.attach(model)
    before = sum(value.numel() for value in model.parameters())
    head = "cross.2.1" if case.kind == "two" else "2.1"
    (head_view,) = attached.heads.select(head)
    spec, num_parameters = (
        head_view.layer.spec,
        head_view.W_Q.numel() + head_view.W_O.numel() + (0 if head_view.b_Q is None else head_view.b_Q.numel()),
    )
    if spec.kv_heads == spec.heads:
        num_parameters += (
            head_view.W_K.numel() + head_view.W_V.numel() + (0 if head_view.b_K is None else 2 * head_view.b_K.numel())
        )
    attached.prune(head, in_place=True)
    assert before - sum(value.numel() for value in model.parameters()) == num_parameters


@each_prunable
@pytest.mark.parametrize("selection", HEAD_SETS)
def test_save_pruned_model_loads_same_outputs(case: Case, selection: str, tmp_path: Path) -> None:
    model, inputs = case.build(), case.inputs("right")
    attached = hw.attach(model).prune(heads_of(case, selection), in_place=True)
    with torch.no_grad():
        want = main_output(model(**inputs))
    attached.save_pretrained(tmp_path / "small")
    assert "headwise" not in (tmp_path / "small" / "config.json").read_text()
    again = hw.load(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(main_output(again.model(**inputs)), want)  # pyright: ignore
    assert again.heads.addresses == attached.heads.addresses
    attached.save_pretrained(tmp_path / "whole", full_shape=True)
    plain = type(model).from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        got = main_output(plain(**inputs))
    assert (got - want)[real_positions(inputs)].abs().max() <= 1e-4
    assert sum(v.numel() for v in plain.parameters()) == sum(v.numel() for v in case.build().parameters())


@each_prunable
def test_prune_leaves_given_model_unchanged(case: Case) -> None:
    model, inputs = case.build(), case.inputs("right")
    attached = hw.attach(model)
    with torch.no_grad():
        before = main_output(model(**inputs))
    heads = "enc.1.1,cross.2.0" if case.kind == "two" else "1.1,2.0"
    want = silenced_output(model, attached, heads, inputs)
    small = hw.prune(attached, heads=heads, fold_mean=False)
    with torch.no_grad():
        assert torch.equal(main_output(model(**inputs)), before)
        assert (main_output(small.model(**inputs)) - want)[real_positions(inputs)].abs().max() <= 1e-4
    assert len(attached.heads) - len(small.heads) == 2


# The full first layer, whose keys determine the cache length, with every cache type; other cases with the default cache.
@pytest.mark.parametrize("case", mark_slow([case for case in PRUNABLE if case.kind != "encoder"]))
@pytest.mark.parametrize(
    ("selection", "cache"),
    [
        pytest.param(selection, cache, marks=() if cache == "dynamic" or selection == "layer" else pytest.mark.slow)
        for selection in HEAD_SETS
        for cache in ("dynamic", "static", "none")
    ],
)
def test_generate_pruned_equals_silenced(case: Case, selection: str, cache: str) -> None:
    model, inputs, selection = case.build(), case.inputs("left"), heads_of(case, selection)
    attached = hw.attach(model)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"use_cache": cache != "none"} | ({"cache_implementation": "static"} if cache == "static" else {})
    with attached.heads.select(selection).silenced():
        want = model.generate(**inputs, **options)
    attached.prune(selection, in_place=True)
    assert torch.equal(model.generate(**inputs, **options), want)


@pytest.mark.parametrize("name", GROUPED)
def test_prune_uneven_groups_detach_expands_keys(name: str) -> None:
    """One of two groups of three heads loses a head. Two KV heads remain until detaching gives each head its own."""
    case = BY_NAME[name]
    model, inputs = case.build().double(), case.inputs("right")
    attached = hw.attach(model)
    want = silenced_output(model, attached, "1.4", inputs)
    attached.prune("1.4", in_place=True)
    layer = attached.attention_layers()[1]
    assert layer.spec.kv_of_head == (0, 0, 0, 1, 1)
    joined = layer.info.qkv_modules is not None and len(layer.info.qkv_modules[1]) == 1
    # Number of key rows and query rows; twice with values.
    keys, other = (0, 5 * 4) if joined else (1, 0)
    assert weight_matrix(layer.info.qkv_module(keys)).shape[0] == other + 2 * 4 * (1 + joined)
    attached.detach()
    assert weight_matrix(layer.info.qkv_module(keys)).shape[0] == other + 5 * 4 * (1 + joined)
    with torch.no_grad():
        # Plain transformers, detached.
        assert (main_output(model(**inputs)) - want)[real_positions(inputs)].abs().max() <= 1e-9
        again = hw.attach(model)
        assert [str(a) for a in again.heads.addresses if a.layer == 1] == ["1.0", "1.1", "1.2", "1.3", "1.5"]
        assert (main_output(model(**inputs)) - want)[real_positions(inputs)].abs().max() <= 1e-9
        further = silenced_output(model, again, "1.5", inputs)
        again.prune("1.5", in_place=True)
        assert (main_output(model(**inputs)) - further)[real_positions(inputs)].abs().max() <= 1e-9


@each_prunable
def test_prune_fold_mean_equals_mean_ablation(case: Case, tmp_path: Path) -> None:
    from headwise.analysis.ablation.ablate import ablated, mean_of_outputs, record_z
    from headwise.compression.select_heads import compute_folded_biases

    model, inputs = case.build().double(), case.inputs()
    attached = hw.attach(model)
    source_inputs: dict[str, Any] = {"source": inputs["input_ids"]} if case.kind == "two" else {}
    heads = "enc.0.1,cross.1.*" if source_inputs else "0.1,1.*"
    means = mean_of_outputs(
        [record_z(attached, inputs["decoder_input_ids" if source_inputs else "input_ids"], **source_inputs)]
    )
    with torch.no_grad(), ablated(attached, heads, "mean", means=means):
        want = main_output(model(**inputs))
    small = attached.prune(heads, compute_folded_biases(attached, heads, means))
    with torch.no_grad():
        assert (main_output(small.model(**inputs)) - want).abs().max() <= 1e-9
    small.save_pretrained(tmp_path / "small")
    again: Any = hw.load(tmp_path / "small", dtype=None)
    with torch.no_grad():
        assert (main_output(again.model(**inputs)) - want).abs().max() <= 1e-9


SMALL = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=6, vocab_size=61, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
T5 = "computes the position bias of all layers"


@pytest.mark.parametrize(
    ("name", "sizes", "selection", "why"),
    [
        ("Doge", SMALL, "0.0", "the pruned model cannot be called"),  # the values of all heads determine the mask
        ("BitNet", SMALL, "0.0", "reaches W_O separately"),
        ("T5", BY_NAME["t5"].sizes, "enc.0.*", T5),
        ("T5", BY_NAME["t5"].sizes, "dec.0.*,cross.1.0", T5),
    ],
)
def test_prune_unsupported_model_raises_and_keeps_model(
    name: str, sizes: dict[str, Any], selection: str, why: str
) -> None:
    case = BY_NAME["t5" if name == "T5" else "llama"]
    kind = "T5ForConditionalGeneration" if name == "T5" else f"{name}ForCausalLM"
    torch.manual_seed(1)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes)).eval()
    inputs = case.inputs("right")
    attached = hw.attach(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = main_output(model(**inputs))
        with pytest.raises(hw.HeadwiseError, match=rf"{why}.*silenced\(\)"):
            attached.prune(selection, in_place=True)
        assert torch.equal(main_output(model(**inputs)), before)
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        with hw.record(attached, tensors=("z",)) as recording:
            assert torch.equal(main_output(model(**inputs)), before)
        assert all(recorded.calls for recorded in recording)
        assert torch.equal(main_output(attached.detach()(**inputs)), before)


def test_prune_shared_position_bias_equals_silenced(tmp_path: Path) -> None:
    """T5's first layer computes the bias of all layers. Each layer uses the slice of its heads, also after pruning again."""
    case = BY_NAME["t5"]
    model, inputs = case.build().double(), case.inputs("right")
    attached = hw.attach(model)
    heads, more_heads = "enc.0.1,enc.1.*,dec.0.0-2,cross.0.3,cross.2.0", "enc.0.3,dec.2.1,cross.0.0"
    want, further = (
        silenced_output(model, attached, heads, inputs),
        silenced_output(model, attached, f"{heads},{more_heads}", inputs),
    )
    attached.prune(heads, in_place=True)
    with torch.no_grad():
        assert (main_output(model(**inputs)) - want).abs().max() <= 1e-9
        attached.prune(more_heads, in_place=True)
        assert (main_output(model(**inputs)) - further).abs().max() <= 1e-9
        attached.save_pretrained(tmp_path / "small")
        attached.save_pretrained(tmp_path / "whole", full_shape=True)
        again: Any = hw.load(tmp_path / "small", dtype=None)
        assert torch.equal(main_output(again.model(**inputs)), main_output(model(**inputs)))
        plain = type(model).from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
        assert (main_output(plain(**inputs)) - further).abs().max() <= 1e-9
        assert (main_output(attached.detach()(**inputs)) - further).abs().max() <= 1e-9


def test_prune_norm_over_all_heads_equals_silenced(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.4)
    attached, inputs = hw.attach(model), BY_NAME["llama"].inputs("right")
    want, further = (
        silenced_output(model, attached, "0.1,1.0-1", inputs),
        silenced_output(model, attached, "0.1,0.3,1.0-1", inputs),
    )
    for heads, expected in (("0.1,1.0-1", want), ("0.3", further)):
        attached.prune(heads, in_place=True)
        with torch.no_grad():
            assert (main_output(model(**inputs)) - expected)[real_positions(inputs)].abs().max() <= 1e-9
    head: Any = attached.heads["0.0"]
    assert head.W_O.shape == (6, 24)
    assert head.W_V.shape == (24, 6)
    with pytest.raises(hw.HeadwiseError, match="norm over all heads"):
        _ = head.W_Q
    attached.save_pretrained(tmp_path / "small")
    attached.save_pretrained(tmp_path / "whole", full_shape=True)
    again: Any = hw.load(tmp_path / "small", dtype=None)
    with torch.no_grad():
        assert torch.equal(main_output(again.model(**inputs)), main_output(model(**inputs)))
        plain = type(model).from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
        assert (main_output(plain(**inputs)) - further)[real_positions(inputs)].abs().max() <= 1e-9
        assert (main_output(attached.detach()(**inputs)) - further)[real_positions(inputs)].abs().max() <= 1e-9


def test_prune_invalid_selection_raises() -> None:
    attached = hw.attach(BY_NAME["llama"].build())
    with pytest.raises(hw.HeadwiseError, match="all 18 heads"):
        attached.prune("*", in_place=True)
    with pytest.raises(hw.HeadwiseError, match="Close it before pruning"), attached.heads["1.1"].silenced():
        attached.prune("1.2", in_place=True)
    with pytest.raises(hw.HeadwiseError, match="no such head"):
        attached.prune("7.1", in_place=True)


def test_from_pretrained_pruned_folder_raises(tmp_path: Path) -> None:
    model = BY_NAME["llama"].build()
    hw.attach(model).prune("1.2", in_place=True).save_pretrained(tmp_path / "small")
    with pytest.raises(RuntimeError, match=r"size|shape|mismatch"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
