"""Every verb of look/ and change/, over ours and fourteen architectures of others: in both modes it gives the same numbers,
and every part is in its mode again; padding on either side changes nothing; and what heads do with a cache they do without.

Verbs that read a corpus make their own batches, padded on the right; made to pad on the left, they give the same here.
The grid of modes and sides is whole in the slow tests.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.head_outputs import mean_activations, record_z
from headwise.analysis.recording import batching
from headwise.model.loss import IGNORE
from headwise.training.batches import make_rows, stack
from tests.contract.attached_models import (
    DECODERS,
    ENCODERS,
    NAMES,
    NATIVE,
    PAIRED,
    UNCUT,
    UNWIRED,
    batch,
    close,
    kept,
    some_heads,
    training,
)
from tests.contract.functions import VERBS, corpus, flat

OTHERS = tuple(name for name in NAMES if name not in NATIVE)
OWN_DECODERS = "chosen in headwise's own decoders"
# Who refuses what, and in which words.
REFUSED: dict[str, dict[str, str]] = {
    "match": dict.fromkeys(PAIRED, "heads are matched on single texts"),
    "coreference": dict.fromkeys(PAIRED, "needs what it reads"),
    "HeadHistory": dict.fromkeys(PAIRED, "reads one text at a time"),
    "logit_attribution": dict.fromkeys((*ENCODERS, "bart"), "logits (cannot be|are) shared out")
    | {"encoder-decoder": "logits are shared out in decoders"}
    | UNWIRED,
    "vocabulary": dict.fromkeys((*ENCODERS, *PAIRED), "promotes cannot be read off")
    | UNWIRED
    | {"bloom": "bare embeddings are not what is read"},  # a norm stands behind them
    "prune": UNCUT,
    "report": UNCUT,
    "curve": dict.fromkeys(UNCUT, "cannot be cut"),
    "prune_study": dict.fromkeys(UNCUT, "cannot be cut"),
    "quantise": dict.fromkeys(OTHERS, "packed by head in headwise's own models"),
    "Plan.streaming": dict.fromkeys(NAMES[1:], OWN_DECODERS),
}
SLOW = ("profile, light", "importance, resample", "prune_study", "report")
# Every verb on one model of each kind; on those that are reached another way, one that looks and one that cuts.
FIRST = (*NATIVE, "gpt2", "llama", "mistral", "gpt_neox", "bert", "bart")
SHORT = ("attend", "prune")
# Verbs whose own batches hold no padding: weights alone, one text at a time, texts cut to one length; the caller's own batch,
# which is tried below with padding on both sides; and healing, whose rows are those of training, padded on the right.
UNPADDED = (
    *("copying", "quantise", "attend", "match", "logit_attribution", "vocabulary", "value_weighted", "coreference"),
    *("Plan.streaming", "variability", "record_z", "patched", "heal"),
)
LEFT = [name for name in NAMES if name != "bart"]  # it counts positions from the first column, and refuses the left


@cache
def still(name: str, verb: str) -> list[float]:
    """What a verb gives in eval mode, padded on the right."""
    return flat(VERBS[verb](kept(name), name))


def pad_on_the_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever was asked for; how many tokens of padding each batch has."""
    given, padded = batching._stacked, list[int]()

    def stacked(rows: Sequence[tuple[int, ...]], side: str = "right") -> Any:
        ids, real = given(rows, "left")
        padded.append(int((~real).sum()))
        return ids, real

    monkeypatch.setattr(batching, "_stacked", stacked)
    return padded


def check(name: str, verb: str, trains: bool, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kept(name)
    if name in REFUSED.get(verb, {}):
        with training(model) if trains else nullcontext(), pytest.raises(hw.HeadwiseError, match=REFUSED[verb][name]):
            VERBS[verb](model, name)
        return
    want = still(name, verb)
    padded = pad_on_the_left(monkeypatch) if left else []
    with training(model) if trains else nullcontext():
        torch.manual_seed(5)  # what a verb draws, it draws from its own seed
        got = flat(VERBS[verb](model, name))
    assert len(want)
    assert any(padded) == (left and verb not in UNPADDED), "what is padded on the left is really so"
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=max(1e-7, close(name)))


@pytest.mark.parametrize(
    ("name", "verb"),
    [(name, verb) for name in NAMES for verb in (VERBS if name in FIRST else SHORT) if verb not in SLOW],
)
def test_in_any_mode_and_padded_on_any_side_it_gives_the_same(
    name: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, verb, True, name in LEFT, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verb", "trains", "left"),
    [
        (name, verb, trains, left)
        for name in NAMES
        for verb in VERBS
        for trains, left in ((True, False), (False, True), (True, True))
        if not left or (name in LEFT)
    ],
)
def test_the_whole_grid(name: str, verb: str, trains: bool, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, verb, trains, left, monkeypatch)


def test_rows_of_training_are_padded_on_the_right() -> None:
    made = stack([np.array([4, 5]), np.array([6, 7, 8])])
    assert make_rows(made, None, None, 0).targets.tolist() == [[5, IGNORE], [7, 8]]


def test_what_cannot_be_padded_on_the_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pad_on_the_left(monkeypatch)
    with pytest.raises(hw.HeadwiseError, match="put padding on the right"):
        hw.importance(kept("bart"), corpus("bart"))


def alone(given: dict[str, Any], row: int) -> dict[str, Any]:
    """One text of a padded batch, without its padding."""
    one = {"ids": given["ids"][row : row + 1, given["padding"][row]]}
    if "source" in given:
        one["source"] = given["source"][row : row + 1, given["source_padding"][row]]
    return one


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_seen_of_a_padded_text_is_what_is_seen_of_it_alone(name: str, side: str) -> None:
    """z, maps, and what is said while a head is ablated, by a pass of one's own."""
    model, head = kept(name), some_heads(kept(name))[-1]
    given: dict[str, Any] = {**batch(name, side)}
    real = {
        "source" if key == "source_padding" else "ids": given[key]
        for key in ("padding", "source_padding")
        if key in given
    }
    if (name, side) == ("bart", "left"):
        with pytest.raises(hw.HeadwiseError, match="put padding on the right"):
            record_z(model, **given)
        return
    queries = real["source"] if head.stack == "enc" else real["ids"]
    keys = real["source"] if head.stack in ("enc", "cross") else real["ids"]
    run, means = record_z(model, **given), mean_activations(model, corpus(name))
    rows = {key: value for key, value in given.items() if "padding" in key}
    with (
        hw.record(model, head) as recording,
        hw.ablated(model, str(head), "mean", means=means, **rows),
        torch.no_grad(),
    ):
        said = model(**given)
    for row in range(2):
        one = alone(given, row)
        want = record_z(model, **one)
        for site, z in run.z.items():
            there = real["source"] if site.stack == "enc" else real["ids"]
            assert (z[row][:, there[row]] - want.z[site][0]).abs().max() <= close(name)
        with hw.record(model, head) as single, hw.ablated(model, str(head), "mean", means=means), torch.no_grad():
            says = model(**one)
        found = recording[head].map()[row][queries[row]][:, keys[row]]
        assert (found - single[head].map()[0]).abs().max() <= close(name)
        assert (said[row, given["padding"][row]] - says[0]).abs().max() <= close(name)


# With a cache and without.


@pytest.mark.parametrize("name", DECODERS)
def test_a_recording_sees_the_same_rows_with_a_cache(name: str) -> None:
    """Each step of a generation is the last row of a whole pass over what was written so far."""
    model, ids, head = kept(name), batch(name)["ids"][:1], some_heads(kept(name))[0]
    with hw.record(model, head) as steps, training(model):
        written = torch.stack(list(model.stream(ids, 4)), 1)
    with hw.record(model, head) as whole, torch.no_grad():
        model(torch.cat((ids, written), 1))
    for step in range(1, 4):
        place = ids.shape[1] + step - 1
        one = steps[head].call(step)
        assert (one.z[:, -1] - whole[head].z[:, place]).abs().max() <= close(name)
        row, want = one.map()[0, -1], whole[head].map()[0, place]
        assert (row - want[place + 1 - len(row) : place + 1]).abs().max() <= close(name)


@pytest.mark.parametrize("how", ["zero", "mean", "silenced", "cut"])
@pytest.mark.parametrize("name", DECODERS)
def test_heads_taken_away_are_gone_with_a_cache_too(name: str, how: str) -> None:
    model, ids, head = kept(name), batch(name)["ids"][:1], str(some_heads(kept(name))[0])
    if how == "cut" and name in UNCUT:
        with pytest.raises(hw.HeadwiseError, match=UNCUT[name]):
            hw.prune(model, heads=head, on=corpus(name))
        return
    changed = hw.prune(model, heads=head, on=corpus(name)) if how == "cut" else model
    gone = {
        "silenced": model.heads[head].silenced, "cut": nullcontext, "zero": partial(hw.ablated, model, head, "zero"),
        "mean": partial(hw.ablated, model, head, "mean", on=corpus(name)),
    }  # fmt: skip
    with gone[how]():
        want = ids
        for _ in range(6):
            with torch.no_grad():
                want = torch.cat((want, changed(want)[:, -1:].argmax(-1)), 1)
        with training(changed):
            got = torch.stack(list(changed.stream(ids, 6)), 1)
    assert torch.equal(got, want[:, ids.shape[1] :])
