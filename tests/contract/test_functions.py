"""Every function of analysis and compression on native models and fourteen attached architectures.

Results are the same in training and evaluation mode, modes are restored, padding on either side changes nothing, and heads
behave the same with and without a cache. Functions that read a corpus make their own batches, padded on the right; here they
are also made to pad on the left. The full grid of modes and sides is part of the slow tests.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import mean_activations, record_z
from headwise.analysis.recording import batching
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.training.batch_samplers import make_train_batch, pad_with_minus_one
from tests.contract.attached_models import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    NAMES,
    NATIVE,
    NO_RESIDUAL_STREAM,
    NOT_PRUNABLE,
    batch,
    cached_model,
    sample_heads,
    tolerance,
    training_mode,
)
from tests.contract.functions import FUNCTIONS, corpus, flatten_numbers

OTHERS = tuple(name for name in NAMES if name not in NATIVE)
# Models that a function does not support, with the fragment of the error.
ERROR_MESSAGES: dict[str, dict[str, str]] = {
    "match_heads": dict.fromkeys(ENCODER_DECODERS, "heads of an encoder-decoder cannot be"),
    "coreference": dict.fromkeys(ENCODER_DECODERS, "source=source_ids"),
    "HeadHistory": dict.fromkeys(ENCODER_DECODERS, "HeadHistory does not support"),
    "logit_attribution": dict.fromkeys((*ENCODERS, "bart"), "logit attribution")
    | {"encoder-decoder": "logit attribution"}
    | NO_RESIDUAL_STREAM,
    "token_effects": dict.fromkeys((*ENCODERS, *ENCODER_DECODERS), "promoted tokens can")
    | NO_RESIDUAL_STREAM
    | {"bloom": "bare embeddings are not what is read"},  # a norm follows its embeddings
    "prune": NOT_PRUNABLE,
    "report": NOT_PRUNABLE,
    "curve": dict.fromkeys(NOT_PRUNABLE, "cannot be pruned"),
    "prune_study": dict.fromkeys(NOT_PRUNABLE, "cannot be pruned"),
    "plan_streaming": dict.fromkeys((*ENCODERS, *ENCODER_DECODERS), "only in decoders"),
}
SLOW = ("importance, resample", "prune_study", "report")
# All functions on one model of each kind, and one analysis and one pruning function on models attached in other ways.
FULLY_TESTED = (*NATIVE, "gpt2", "llama", "mistral", "gpt_neox", "bert", "bart")
FEW_FUNCTIONS = ("attention_maps", "prune")
# Functions whose batches have no padding: they read weights only, one text at a time, texts truncated to one length, or the
# caller's batch, which is tested below with padding on both sides. Recovery trains on right-padded rows.
UNPADDED = (
    *(
        "ov_eigenvalue_scores",
        "quantize",
        "attention_maps",
        "scan",
        "match_heads",
        "logit_attribution",
        "token_effects",
        "value_weighted_map",
    ),
    *("coreference", "plan_streaming", "variability", "record_z", "patched", "recover"),
)
# BART counts positions from the first column, so it does not support left padding.
LEFT = [name for name in NAMES if name != "bart"]


@cache
def eval_result(name: str, verb: str) -> list[float]:
    """Return the result of a function in evaluation mode with right padding."""
    return flatten_numbers(FUNCTIONS[verb](cached_model(name), name))


def force_left_padding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pad on the left in all batches. Return the number of padding tokens of each batch."""
    original, padded = batching._pad_ids, list[int]()

    def padded_left(rows: Sequence[tuple[int, ...]], side: str = "right") -> Any:
        ids, real = original(rows, "left")
        padded.append(int((~real).sum()))
        return ids, real

    monkeypatch.setattr(batching, "_pad_ids", padded_left)
    return padded


def check_function(name: str, verb: str, trains: bool, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached_model(name)
    if name in ERROR_MESSAGES.get(verb, {}):
        with (
            training_mode(model) if trains else nullcontext(),
            pytest.raises(hw.HeadwiseError, match=ERROR_MESSAGES[verb][name]),
        ):
            FUNCTIONS[verb](model, name)
        return
    want = eval_result(name, verb)
    padded = force_left_padding(monkeypatch) if left else []
    with training_mode(model) if trains else nullcontext():
        torch.manual_seed(5)  # functions draw random numbers from their own seed
        got = flatten_numbers(FUNCTIONS[verb](model, name))
    assert len(want)
    assert any(padded) == (left and verb not in UNPADDED), "what is padded on the left is really so"
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=max(1e-7, tolerance(name)))


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        (name, verb)
        for name in NAMES
        for verb in (FUNCTIONS if name in FULLY_TESTED else FEW_FUNCTIONS)
        if verb not in SLOW
    ],
)
def test_functions_any_mode_and_padding_give_same_result(name: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_function(name, verb, True, name in LEFT, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verb", "trains", "left"),
    [
        (name, verb, trains, left)
        for name in NAMES
        for verb in FUNCTIONS
        for trains, left in ((True, False), (False, True), (True, True))
        if not left or (name in LEFT)
    ],
)
def test_functions_full_grid_give_same_result(
    name: str, verb: str, trains: bool, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_function(name, verb, trains, left, monkeypatch)


def test_make_rows_uneven_texts_pads_right() -> None:
    stacked = pad_with_minus_one([np.array([4, 5]), np.array([6, 7, 8])])
    assert make_train_batch(stacked, None, None, 0).targets.tolist() == [[5, IGNORE_INDEX], [7, 8]]


def test_importance_left_padded_bart_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    force_left_padding(monkeypatch)
    with pytest.raises(hw.HeadwiseError, match="Pad on the right"):
        hw.importance(cached_model("bart"), corpus("bart"))


def single_row(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """Return one text of a padded batch without its padding."""
    single = {"ids": inputs["ids"][row : row + 1, inputs["attention_mask"][row]]}
    if "source" in inputs:
        single["source"] = inputs["source"][row : row + 1, inputs["source_attention_mask"][row]]
    return single


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_record_padded_text_equals_unpadded(name: str, side: str) -> None:
    """z, attention maps, and logits with an ablated head, in a forward pass of the caller."""
    model, head = cached_model(name), sample_heads(cached_model(name))[-1]
    inputs: dict[str, Any] = {**batch(name, side)}
    real = {
        "source" if key == "source_attention_mask" else "ids": inputs[key]
        for key in ("attention_mask", "source_attention_mask")
        if key in inputs
    }
    if (name, side) == ("bart", "left"):
        with pytest.raises(hw.HeadwiseError, match="Pad on the right"):
            record_z(model, **inputs)
        return
    queries = real["source"] if head.stack == "enc" else real["ids"]
    keys = real["source"] if head.stack in ("enc", "cross") else real["ids"]
    run, means = record_z(model, **inputs), mean_activations(model, corpus(name))
    rows = {key: value for key, value in inputs.items() if "attention_mask" in key}
    with (
        hw.record(model, head) as recording,
        hw.ablated(model, str(head), "mean", means=means, **rows),
        torch.no_grad(),
    ):
        logits = model(**inputs)
    for row in range(2):
        unpadded = single_row(inputs, row)
        want = record_z(model, **unpadded)
        for layer_address, z in run.z.items():
            token_mask = real["source"] if layer_address.stack == "enc" else real["ids"]
            assert (z[row][:, token_mask[row]] - want.z[layer_address][0]).abs().max() <= tolerance(name)
        with hw.record(model, head) as single, hw.ablated(model, str(head), "mean", means=means), torch.no_grad():
            unpadded_logits = model(**unpadded)
        recorded_map = recording[head].map()[row][queries[row]][:, keys[row]]
        assert (recorded_map - single[head].map()[0]).abs().max() <= tolerance(name)
        assert (logits[row, inputs["attention_mask"][row]] - unpadded_logits[0]).abs().max() <= tolerance(name)


# With and without a cache.


@pytest.mark.parametrize("name", DECODERS)
def test_record_generation_rows_equal_full_pass(name: str) -> None:
    """Each step of a generation equals the last row of a full pass over the text so far."""
    model, ids, head = cached_model(name), batch(name)["ids"][:1], sample_heads(cached_model(name))[0]
    with hw.record(model, head) as steps, training_mode(model):
        written = torch.stack(list(model.stream(ids, 4)), 1)
    with hw.record(model, head) as full, torch.no_grad():
        model(torch.cat((ids, written), 1))
    for step in range(1, 4):
        position = ids.shape[1] + step - 1
        recorded_step = steps[head].call(step)
        assert (recorded_step.z[:, -1] - full[head].z[:, position]).abs().max() <= tolerance(name)
        row, want = recorded_step.map()[0, -1], full[head].map()[0, position]
        assert (row - want[position + 1 - len(row) : position + 1]).abs().max() <= tolerance(name)


@pytest.mark.parametrize("method", ["zero", "mean", "silenced", "cut"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_cache_respects_removed_heads(name: str, method: str) -> None:
    model, ids, head = cached_model(name), batch(name)["ids"][:1], str(sample_heads(cached_model(name))[0])
    if method == "cut" and name in NOT_PRUNABLE:
        with pytest.raises(hw.HeadwiseError, match=NOT_PRUNABLE[name]):
            hw.prune(model, heads=head, corpus=corpus(name))
        return
    changed = hw.prune(model, heads=head, corpus=corpus(name)) if method == "cut" else model
    contexts = {
        "silenced": model.heads[head].silenced, "cut": nullcontext, "zero": partial(hw.ablated, model, head, "zero"),
        "mean": partial(hw.ablated, model, head, "mean", corpus=corpus(name)),
    }  # fmt: skip
    with contexts[method]():
        want = ids
        for _ in range(6):
            with torch.no_grad():
                want = torch.cat((want, changed(want)[:, -1:].argmax(-1)), 1)
        with training_mode(changed):
            got = torch.stack(list(changed.stream(ids, 6)), 1)
    assert torch.equal(got, want[:, ids.shape[1] :])
