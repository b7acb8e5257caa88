"""What heads of an encoder-decoder are worth on pairs, and what they give on average, against a plain loop over pairs."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.ablate import ablated, mean_activations
from headwise.analysis.ablation.eval_targets import ask, askable_units
from headwise.analysis.ablation.importance import importance
from headwise.analysis.recording.batching import make_batch, make_batches
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError
from headwise.spec import Address
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.models import TEXTS
from tests.analysis.models import reading as reading_texts
from tests.analysis.pair_models import (
    PAIRS,
    PIECES,
    SPECS,
    encoded,
    given,
    losses_without,
    mean_loss,
    reading,
    surprises,
    words,
    worths,
)
from tests.contract.layers import MODELS, assert_equal
from tests.training.tiny import same_weights

CLOSE = 1e-10  # the models compute in double precision
SINGLE = 1e-8  # slopes of a text, below 1 here, are handed over in single precision

each_spec = pytest.mark.parametrize("name", SPECS)


def test_the_loop_finds_something() -> None:
    """A head of every stack matters, and so does the source: else the comparisons below would compare noughts."""
    model = reading(SPECS["plain"])
    lost = dict(zip(map(str, model.spec.addresses), worths(model), strict=True))
    for stack in ("enc", "dec", "cross"):
        assert max(abs(worth) for head, worth in lost.items() if head.startswith(stack)) > 1e-3
    turned = [(source, text) for (_, text), (source, _) in zip(PAIRS, PAIRS[1:] + PAIRS[:1], strict=True)]
    assert abs(mean_loss(model, turned) - mean_loss(model)) > 1e-3


# What is read.


@pytest.mark.parametrize("pieces", [False, True])
def test_units_are_pairs_as_they_are_encoded_by_hand(pieces: bool) -> None:
    model = reading(SPECS["plain"], words() if pieces else None)
    units = list(Reading.of(model, PAIRS, answers=True))
    for number, (unit, (source, text)) in enumerate(zip(units, encoded(model), strict=True)):
        assert unit.number == number
        assert list(unit.source) == source[0].tolist()
        assert list(unit.ids) == text[0].tolist()
        assert unit.size == max(source.shape[1], text.shape[1])
        aligned = unit.alignment
        assert aligned.text == PAIRS[number][1]
        assert aligned.words == tuple(PAIRS[number][1].split())
        covered = [aligned.text[a:b] for a, b in aligned.spans]
        front = 2 if pieces else 1  # the token to start from, and [CLS]
        assert covered[:front] + covered[-1:] == [""] * (front + 1)
        assert covered[front:-1] == (PAIRS[number][1].split() if pieces else list(PAIRS[number][1]))


def test_both_sides_of_a_batch_are_padded_on_the_right() -> None:
    model = reading(SPECS["plain"])
    units = list(Reading.of(model, PAIRS, answers=True))
    batch = make_batch(units)
    for ids, real, want in (
        (batch.ids, batch.real, [unit.ids for unit in units]),
        (batch.source, batch.source_real, [unit.source for unit in units]),
    ):
        assert ids is not None
        assert real is not None
        assert ids.shape == real.shape == (5, max(map(len, want)))
        assert [row[there].tolist() for row, there in zip(ids, real, strict=True)] == [list(row) for row in want]
        assert [there[: len(row)].all().item() for there, row in zip(real, want, strict=True)] == [True] * 5
    assert batch.source_padding is batch.source_real
    assert make_batch(units[:1]).source_padding is None
    seen = [unit.number for some in make_batches(units, 40) for unit in some.units]
    assert sorted(seen) == list(range(5))
    for some in make_batches(units, 40):
        assert some.source is not None
        assert len(some.units) == 1 or max(some.ids.numel(), some.source.numel()) <= 40


@each_spec
@torch.no_grad()
def test_a_padded_batch_answers_as_each_pair_alone(name: str) -> None:
    model = reading(SPECS[name])
    asked = ask(model, make_batch(list(askable_units(model, Reading.of(model, PAIRS, answers=True)))))
    got = asked.answers(model, asked.pick(asked.run(model)))
    assert_equal(got, torch.stack([one.sum() for one in surprises(model)]))
    assert asked.counts.tolist() == [len(one) for one in surprises(model)]
    last = ask(model, make_batch(list(askable_units(model, Reading.of(model, PAIRS, answers=True)))), "last")
    assert_equal(last.answers(model, last.pick(last.run(model))), torch.stack([one[-1] for one in surprises(model)]))


# What heads give on average: those of the encoder over sources, the others over texts.


@pytest.mark.parametrize(
    ("name", "tokens"), [*(("plain", tokens) for tokens in (1, 2048)), *((name, 64) for name in SPECS)]
)
def test_means_are_over_the_tokens_a_stack_reads(name: str, tokens: int) -> None:
    model = reading(SPECS[name])
    means = mean_activations(model, PAIRS, tokens=tokens)
    places = mean_activations(model, PAIRS, "position", tokens=tokens)
    for head in model.spec.addresses:
        rows = given(model, head, whole=True)
        side = 0 if head.stack == "enc" else 1
        assert [len(row) for row in rows] == [pair[side].shape[1] for pair in encoded(model)]
        assert_equal(means[head], torch.cat(rows).mean(0))
        longest = max(map(len, rows))
        want = [torch.stack([row[place] for row in rows if place < len(row)]).mean(0) for place in range(longest)]
        assert_equal(places[head], torch.stack(want))


# What heads are worth.


@each_spec
def test_zero_is_the_model_without_the_head(name: str) -> None:
    model = reading(SPECS[name])
    found = importance(model, PAIRS, how="zero")
    assert found.addresses == model.spec.addresses
    assert found.texts == len(PAIRS)
    assert found.clean == pytest.approx(mean_loss(model), abs=CLOSE)
    np.testing.assert_allclose(found.mean, worths(model), atol=CLOSE)


@each_spec
def test_mean_is_the_model_with_what_the_head_gives_on_average(name: str) -> None:
    model = reading(SPECS[name])

    def average(head: Address) -> list[Tensor]:
        rows = given(model, head)
        return [torch.cat(rows).mean(0).expand(len(row), -1) for row in rows]

    np.testing.assert_allclose(importance(model, PAIRS).mean, worths(model, average), atol=CLOSE)


def test_means_by_position_stand_where_their_tokens_stand() -> None:
    model = reading(SPECS["plain"])
    means = mean_activations(model, PAIRS, "position")

    def average(head: Address) -> list[Tensor]:
        rows = given(model, head, whole=True)
        at = [torch.stack([row[i] for row in rows if i < len(row)]).mean(0) for i in range(max(map(len, rows)))]
        return [torch.stack(at[: len(row)]) for row in given(model, head)]

    np.testing.assert_allclose(importance(model, PAIRS, means=means).mean, worths(model, average), atol=CLOSE)


@each_spec
def test_resample_borrows_from_the_next_pair(name: str) -> None:
    model = reading(SPECS[name])

    def borrowed(head: Address) -> list[Tensor]:
        rows = given(model, head)
        others = rows[1:] + rows[:1]
        return [other[torch.arange(len(row)) % len(other)] for row, other in zip(rows, others, strict=True)]

    np.testing.assert_allclose(importance(model, PAIRS, how="resample").mean, worths(model, borrowed), atol=CLOSE)


def test_the_last_token_alone() -> None:
    model = reading(SPECS["plain"])
    found = importance(model, PAIRS, how="zero", metric="last")
    np.testing.assert_allclose(found.mean, worths(model, last=True), atol=CLOSE)
    with torch.no_grad():
        assert found.clean == pytest.approx(float(torch.stack([one[-1] for one in surprises(model)]).mean()), abs=CLOSE)


@each_spec
def test_slopes_are_those_of_a_gate_on_the_head(name: str) -> None:
    model = reading(SPECS[name])
    sums, each = [], []
    for head in model.spec.addresses:
        gate = torch.ones(1, dtype=torch.float64, requires_grad=True)
        losses = surprises(model, gates={str(head): gate})
        own = [float(torch.autograd.grad(loss.sum(), gate, retain_graph=True)[0]) for loss in losses]
        sums.append(-sum(own) / sum(map(len, losses)))  # replaced by nothing: the gate closes
        each.append(np.mean([abs(slope) / len(loss) for slope, loss in zip(own, losses, strict=True)]))
    np.testing.assert_allclose(importance(model, PAIRS, by="gradient").mean, each, atol=SINGLE)
    found = importance(model, PAIRS, by="attribution", how="zero", check=4)
    np.testing.assert_allclose(found.mean, sums, atol=SINGLE)
    assert found.check is not None
    exact = importance(model, PAIRS, how="zero")
    assert found.check.exact == pytest.approx([exact[head].worth for head in found.check.heads], abs=CLOSE)


def test_slopes_towards_the_mean() -> None:
    """Against a central difference: a head a little on its way to its mean, and as much on the other side."""
    model, step = reading(SPECS["plain"]), 1e-4

    def moved(head: Address, by: float) -> float:
        rows = given(model, head)
        middle = torch.cat(rows).mean(0)
        return float(torch.cat(losses_without(model, head, [row + by * (middle - row) for row in rows])).mean())

    want = [(moved(head, step) - moved(head, -step)) / (2 * step) for head in model.spec.addresses]
    np.testing.assert_allclose(importance(model, PAIRS, by="attribution", check=0).mean, want, atol=1e-6)


@pytest.mark.parametrize("pieces", [False, True])
def test_other_tokenizers_put_other_tokens_around(pieces: bool) -> None:
    tokenizer = words() if pieces else word_tokenizer(PIECES[5:])
    model = reading(SPECS["plain"], tokenizer)
    found = importance(model, PAIRS, how="zero")
    assert found.clean == pytest.approx(mean_loss(model), abs=CLOSE)
    np.testing.assert_allclose(found.mean, worths(model), atol=CLOSE)


def test_the_numbers_do_not_depend_on_how_the_work_is_cut() -> None:
    model = reading(SPECS["rotary, windows"])
    for by, how in (("ablation", "mean"), ("ablation", "resample"), ("gradient", "zero"), ("attribution", "mean")):
        whole = importance(model, PAIRS, by=by, how=how, check=0)  # pyright: ignore
        for tokens in (1, 90, 200):
            cut = importance(model, PAIRS, by=by, how=how, tokens=tokens, check=0)  # pyright: ignore
            np.testing.assert_allclose(cut.mean, whole.mean, atol=CLOSE)
    means = mean_activations(model, PAIRS)
    parts = [importance(model, some, means=means) for some in (PAIRS[:2], PAIRS[2:])]
    merged = parts[0].merge(parts[1])
    np.testing.assert_allclose(merged.mean, importance(model, PAIRS, means=means).mean, atol=CLOSE)


def test_only_some_heads() -> None:
    model = reading(SPECS["plain"])
    some, every = importance(model, PAIRS, heads="cross.1.*,enc.0.2"), importance(model, PAIRS)
    assert list(map(str, some.addresses)) == ["enc.0.2", "cross.1.0", "cross.1.1", "cross.1.2", "cross.1.3"]
    for worth in some:
        assert worth.worth == pytest.approx(every[worth.head].worth, abs=CLOSE)


def test_pairs_from_files_are_the_same_pairs(tmp_path: Any) -> None:
    files = [tmp_path / name for name in ("sources.txt", "texts.txt")]
    for file, side in zip(files, zip(*PAIRS, strict=True), strict=True):
        file.write_text("".join(f"{text}\n" for text in side))
    model = reading(SPECS["plain"])
    np.testing.assert_array_equal(importance(model, Corpus.pairs(*files)).mean, importance(model, PAIRS).mean)


def test_the_model_stays_as_it_is() -> None:
    model = reading(SPECS["plain"]).train()
    before = deepcopy(model)
    for by in ("ablation", "gradient", "attribution"):
        importance(model, PAIRS, by=by)  # pyright: ignore
    assert model.training
    assert same_weights(model, before)
    assert all(value.grad is None and value.requires_grad for value in model.parameters())


def test_ablation_around_ones_own_call_agrees() -> None:
    model = reading(SPECS["plain"])
    batch = make_batch(list(askable_units(model, Reading.of(model, PAIRS, answers=True))))
    asked, means = ask(model, batch), mean_activations(model, PAIRS, "position")
    sides = {"padding": batch.real[:, :-1], "source_padding": batch.source_real}
    found = importance(model, PAIRS, means=means)
    with torch.no_grad():
        for head in ("enc.1.0", "dec.0.3", "cross.0.1"):
            with ablated(model, head, "mean", means=means, **sides):
                lost = asked.answers(model, asked.pick(asked.run(model))).sum() / asked.counts.sum()
            assert found[head].worth == pytest.approx(float(lost) - found.clean, abs=CLOSE)


# What is refused.


def test_what_cannot_be_asked_is_refused() -> None:
    both, decoder = reading(SPECS["plain"]), reading_texts(MODELS["decoder"])
    learned = reading(SPECS["learned, post"])
    long = "the cat sat " * 6
    for model, corpus, options, message in (
        (both, TEXTS, {}, "needs pairs"),
        (both, "the cat", {}, "needs pairs"),
        (both, None, {}, "needs pairs"),
        (decoder, PAIRS, {}, "give this decoder texts alone"),
        (learned, [*PAIRS, ("at", long)], {}, f"pair 6 has {len(long) + 2} tokens, more than the 64 positions"),
        (learned, [(long, "at")], {}, f"pair 1 has {len(long) + 1} tokens, more than the 64 positions"),
        (both, PAIRS[:1], {"how": "resample"}, "there is only one"),
        (both, PAIRS, {"heads": "1.1"}, "does not say which stack"),
        (both, [("at", " ")], {}, "pair 1 lacks a text"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            importance(model, corpus, **options)  # pyright: ignore
    for model, corpus, message in ((both, TEXTS, "needs pairs"), (decoder, PAIRS, "texts alone")):
        with pytest.raises(HeadwiseError, match=message):
            mean_activations(model, corpus)
    for model, message in ((both, "pairs are for what is asked"), (decoder, "texts alone")):
        with pytest.raises(HeadwiseError, match=message):
            hw.profile(model, PAIRS)
