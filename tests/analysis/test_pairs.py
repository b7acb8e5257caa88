"""Importance and mean activations of an encoder-decoder on text pairs, compared with a plain loop over pairs."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.ablate import ablated, mean_activations
from headwise.analysis.ablation.eval_targets import evaluable_samples, make_target_batch
from headwise.analysis.ablation.importance import importance
from headwise.analysis.recording.batching import make_batch, make_batches
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import HeadwiseError
from headwise.spec import Address
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.models import TEXTS
from tests.analysis.models import character_model as reading_texts
from tests.analysis.pair_models import (
    PAIRS,
    SPECS,
    WORDPIECES,
    ablation_costs,
    encode_pairs,
    head_outputs,
    mean_loss,
    pair_model,
    token_losses,
    token_losses_without,
    wordpiece_tokenizer,
)
from tests.contract.layers import MODELS, assert_equal
from tests.training.tiny import same_weights

TOLERANCE = 1e-10  # the models compute in double precision
FLOAT32_TOLERANCE = 1e-8  # gradients of a text, below 1 here, are passed on in single precision

each_spec = pytest.mark.parametrize("name", SPECS)


def test_ablation_costs_reference_is_nonzero_in_every_stack() -> None:
    """A head of every stack matters, and so does the source. Otherwise the comparisons below would compare zeros."""
    model = pair_model(SPECS["plain"])
    lost = dict(zip(map(str, model.spec.head_addresses), ablation_costs(model), strict=True))
    for stack in ("enc", "dec", "cross"):
        assert max(abs(cost) for head, cost in lost.items() if head.startswith(stack)) > 1e-3
    rotated = [(source, text) for (_, text), (source, _) in zip(PAIRS, PAIRS[1:] + PAIRS[:1], strict=True)]
    assert abs(mean_loss(model, rotated) - mean_loss(model)) > 1e-3


# Inputs.


@pytest.mark.parametrize("pieces", [False, True])
def test_tokenized_corpus_pairs_equal_manual_encoding(pieces: bool) -> None:
    model = pair_model(SPECS["plain"], wordpiece_tokenizer() if pieces else None)
    samples = list(TokenizedCorpus.of(model, PAIRS, needs_targets=True))
    for index, (sample, (source, text)) in enumerate(zip(samples, encode_pairs(model), strict=True)):
        assert sample.index == index
        assert list(sample.source) == source[0].tolist()
        assert list(sample.ids) == text[0].tolist()
        assert sample.num_batch_tokens == max(source.shape[1], text.shape[1])
        aligned = sample.alignment
        assert aligned.text == PAIRS[index][1]
        assert aligned.words == tuple(PAIRS[index][1].split())
        covered = [aligned.text[a:b] for a, b in aligned.spans]
        front = 2 if pieces else 1  # the start token, and [CLS]
        assert covered[:front] + covered[-1:] == [""] * (front + 1)
        assert covered[front:-1] == (PAIRS[index][1].split() if pieces else list(PAIRS[index][1]))


def test_make_batch_pads_source_and_target_right() -> None:
    model = pair_model(SPECS["plain"])
    samples = list(TokenizedCorpus.of(model, PAIRS, needs_targets=True))
    batch = make_batch(samples)
    for ids, real_tokens, want in (
        (batch.ids, batch.real_tokens, [sample.ids for sample in samples]),
        (batch.source, batch.source_real_tokens, [sample.source for sample in samples]),
    ):
        assert ids is not None
        assert real_tokens is not None
        assert ids.shape == real_tokens.shape == (5, max(map(len, want)))
        assert [row[row_mask].tolist() for row, row_mask in zip(ids, real_tokens, strict=True)] == [
            list(row) for row in want
        ]
        assert [row_mask[: len(row)].all().item() for row_mask, row in zip(real_tokens, want, strict=True)] == [
            True
        ] * 5
    assert batch.source_attention_mask is batch.source_real_tokens
    assert make_batch(samples[:1]).source_attention_mask is None
    indices = [sample.index for small_batch in make_batches(samples, 40) for sample in small_batch.samples]
    assert sorted(indices) == list(range(5))
    for small_batch in make_batches(samples, 40):
        assert small_batch.source is not None
        assert len(small_batch.samples) == 1 or max(small_batch.ids.numel(), small_batch.source.numel()) <= 40


@each_spec
@torch.no_grad()
def test_target_batch_padded_losses_equal_single_pairs(name: str) -> None:
    model = pair_model(SPECS[name])
    batch = make_target_batch(
        model, make_batch(list(evaluable_samples(model, TokenizedCorpus.of(model, PAIRS, needs_targets=True))))
    )
    got = batch.score_hidden_states(model, batch.select_target_rows(batch.final_hidden_states(model)))
    assert_equal(got, torch.stack([losses.sum() for losses in token_losses(model)]))
    assert batch.targets_per_text.tolist() == [len(losses) for losses in token_losses(model)]
    last = make_target_batch(
        model, make_batch(list(evaluable_samples(model, TokenizedCorpus.of(model, PAIRS, needs_targets=True)))), "last"
    )
    assert_equal(
        last.score_hidden_states(model, last.select_target_rows(last.final_hidden_states(model))),
        torch.stack([losses[-1] for losses in token_losses(model)]),
    )


# Mean activations: of the encoder over sources, of the other stacks over texts.


@pytest.mark.parametrize(
    ("name", "tokens"), [*(("plain", tokens) for tokens in (1, 2048)), *((name, 64) for name in SPECS)]
)
def test_mean_activations_average_over_tokens_of_the_stack(name: str, tokens: int) -> None:
    model = pair_model(SPECS[name])
    means = mean_activations(model, PAIRS, batch_tokens=tokens)
    position_means = mean_activations(model, PAIRS, "position", batch_tokens=tokens)
    for head in model.spec.head_addresses:
        rows = head_outputs(model, head, full_text=True)
        side = 0 if head.stack == "enc" else 1
        assert [len(row) for row in rows] == [pair[side].shape[1] for pair in encode_pairs(model)]
        assert_equal(means[head], torch.cat(rows).mean(0))
        max_length = max(map(len, rows))
        want = [
            torch.stack([row[position] for row in rows if position < len(row)]).mean(0)
            for position in range(max_length)
        ]
        assert_equal(position_means[head], torch.stack(want))


# Importance.


@each_spec
def test_importance_zero_equals_removed_head(name: str) -> None:
    model = pair_model(SPECS[name])
    result = importance(model, PAIRS, ablation="zero")
    assert result.addresses == model.spec.head_addresses
    assert result.texts == len(PAIRS)
    assert result.clean_loss == pytest.approx(mean_loss(model), abs=TOLERANCE)
    np.testing.assert_allclose(result.mean, ablation_costs(model), atol=TOLERANCE)


@each_spec
def test_importance_mean_equals_mean_output(name: str) -> None:
    model = pair_model(SPECS[name])

    def average(head: Address) -> list[Tensor]:
        rows = head_outputs(model, head)
        return [torch.cat(rows).mean(0).expand(len(row), -1) for row in rows]

    np.testing.assert_allclose(importance(model, PAIRS).mean, ablation_costs(model, average), atol=TOLERANCE)


def test_importance_position_means_follow_tokens() -> None:
    model = pair_model(SPECS["plain"])
    means = mean_activations(model, PAIRS, "position")

    def average(head: Address) -> list[Tensor]:
        rows = head_outputs(model, head, full_text=True)
        at = [torch.stack([row[i] for row in rows if i < len(row)]).mean(0) for i in range(max(map(len, rows)))]
        return [torch.stack(at[: len(row)]) for row in head_outputs(model, head)]

    np.testing.assert_allclose(
        importance(model, PAIRS, means=means).mean, ablation_costs(model, average), atol=TOLERANCE
    )


@each_spec
def test_importance_resample_uses_next_pair(name: str) -> None:
    model = pair_model(SPECS[name])

    def borrowed(head: Address) -> list[Tensor]:
        rows = head_outputs(model, head)
        others = rows[1:] + rows[:1]
        return [other[torch.arange(len(row)) % len(other)] for row, other in zip(rows, others, strict=True)]

    np.testing.assert_allclose(
        importance(model, PAIRS, ablation="resample").mean, ablation_costs(model, borrowed), atol=TOLERANCE
    )


def test_importance_last_metric_uses_last_token_only() -> None:
    model = pair_model(SPECS["plain"])
    result = importance(model, PAIRS, ablation="zero", metric="last")
    np.testing.assert_allclose(result.mean, ablation_costs(model, last_only=True), atol=TOLERANCE)
    with torch.no_grad():
        assert result.clean_loss == pytest.approx(
            float(torch.stack([losses[-1] for losses in token_losses(model)]).mean()), abs=TOLERANCE
        )


@each_spec
def test_importance_gradient_equals_gate_gradient(name: str) -> None:
    model = pair_model(SPECS[name])
    sums, each = [], []
    for head in model.spec.head_addresses:
        gate = torch.ones(1, dtype=torch.float64, requires_grad=True)
        losses = token_losses(model, gates={str(head): gate})
        own = [float(torch.autograd.grad(loss.sum(), gate, retain_graph=True)[0]) for loss in losses]
        sums.append(-sum(own) / sum(map(len, losses)))  # zero ablation: the gate is closed
        each.append(np.mean([abs(slope) / len(loss) for slope, loss in zip(own, losses, strict=True)]))
    np.testing.assert_allclose(importance(model, PAIRS, ranking="gradient").mean, each, atol=FLOAT32_TOLERANCE)
    result = importance(model, PAIRS, ranking="attribution", ablation="zero", check_heads=4)
    np.testing.assert_allclose(result.mean, sums, atol=FLOAT32_TOLERANCE)
    assert result.check is not None
    exact = importance(model, PAIRS, ablation="zero")
    assert result.check.exact == pytest.approx([exact[head].importance for head in result.check.heads], abs=TOLERANCE)


def test_importance_attribution_equals_central_difference() -> None:
    """Compare with a central difference: the head moved slightly towards its mean, and away from it."""
    model, step = pair_model(SPECS["plain"]), 1e-4

    def moved(head: Address, shift: float) -> float:
        rows = head_outputs(model, head)
        middle = torch.cat(rows).mean(0)
        return float(
            torch.cat(token_losses_without(model, head, [row + shift * (middle - row) for row in rows])).mean()
        )

    want = [(moved(head, step) - moved(head, -step)) / (2 * step) for head in model.spec.head_addresses]
    np.testing.assert_allclose(importance(model, PAIRS, ranking="attribution", check_heads=0).mean, want, atol=1e-6)


@pytest.mark.parametrize("pieces", [False, True])
def test_importance_handles_tokenizer_special_tokens(pieces: bool) -> None:
    tokenizer = wordpiece_tokenizer() if pieces else word_tokenizer(WORDPIECES[5:])
    model = pair_model(SPECS["plain"], tokenizer)
    result = importance(model, PAIRS, ablation="zero")
    assert result.clean_loss == pytest.approx(mean_loss(model), abs=TOLERANCE)
    np.testing.assert_allclose(result.mean, ablation_costs(model), atol=TOLERANCE)


def test_importance_of_pairs_does_not_depend_on_batching() -> None:
    model = pair_model(SPECS["rotary, windows"])
    for ranking, method in (
        ("ablation", "mean"),
        ("ablation", "resample"),
        ("gradient", "zero"),
        ("attribution", "mean"),
    ):
        full = importance(model, PAIRS, ranking=ranking, ablation=method, check_heads=0)  # pyright: ignore
        for batch_tokens in (1, 90, 200):
            options: dict[str, Any] = {"ranking": ranking, "ablation": method, "batch_tokens": batch_tokens}
            batched = importance(model, PAIRS, **options, check_heads=0)
            np.testing.assert_allclose(batched.mean, full.mean, atol=TOLERANCE)
    means = mean_activations(model, PAIRS)
    parts = [importance(model, pairs, means=means) for pairs in (PAIRS[:2], PAIRS[2:])]
    merged = parts[0].merge(parts[1])
    np.testing.assert_allclose(merged.mean, importance(model, PAIRS, means=means).mean, atol=TOLERANCE)


def test_importance_of_pairs_subset_equals_full_run() -> None:
    model = pair_model(SPECS["plain"])
    subset, full = importance(model, PAIRS, heads="cross.1.*,enc.0.2"), importance(model, PAIRS)
    assert list(map(str, subset.addresses)) == ["enc.0.2", "cross.1.0", "cross.1.1", "cross.1.2", "cross.1.3"]
    for head_importance in subset:
        assert head_importance.importance == pytest.approx(full[head_importance.head].importance, abs=TOLERANCE)


def test_corpus_pairs_from_files_equal_pairs_in_memory(tmp_path: Any) -> None:
    files = [tmp_path / name for name in ("sources.txt", "texts.txt")]
    for file, side in zip(files, zip(*PAIRS, strict=True), strict=True):
        file.write_text("".join(f"{text}\n" for text in side))
    model = pair_model(SPECS["plain"])
    np.testing.assert_array_equal(importance(model, Corpus.pairs(*files)).mean, importance(model, PAIRS).mean)


def test_importance_of_pairs_leaves_model_unchanged() -> None:
    model = pair_model(SPECS["plain"]).train()
    before = deepcopy(model)
    for ranking in ("ablation", "gradient", "attribution"):
        importance(model, PAIRS, ranking=ranking)  # pyright: ignore
    assert model.training
    assert same_weights(model, before)
    assert all(value.grad is None and value.requires_grad for value in model.parameters())


def test_ablated_own_call_equals_importance() -> None:
    model = pair_model(SPECS["plain"])
    batch = make_batch(list(evaluable_samples(model, TokenizedCorpus.of(model, PAIRS, needs_targets=True))))
    target_batch, means = make_target_batch(model, batch), mean_activations(model, PAIRS, "position")
    sides = {"attention_mask": batch.real_tokens[:, :-1], "source_attention_mask": batch.source_real_tokens}
    result = importance(model, PAIRS, means=means)
    with torch.no_grad():
        for head in ("enc.1.0", "dec.0.3", "cross.0.1"):
            with ablated(model, head, "mean", means=means, **sides):
                lost = (
                    target_batch.score_hidden_states(
                        model, target_batch.select_target_rows(target_batch.final_hidden_states(model))
                    ).sum()
                    / target_batch.targets_per_text.sum()
                )
            assert result[head].importance == pytest.approx(float(lost) - result.clean_loss, abs=TOLERANCE)


# Errors.


def test_pairs_with_wrong_model_or_texts_raise() -> None:
    encoder_decoder, decoder = pair_model(SPECS["plain"]), reading_texts(MODELS["decoder"])
    learned = pair_model(SPECS["learned, post"])
    long = "the cat sat " * 6
    for model, corpus, options, message in (
        (encoder_decoder, TEXTS, {}, "needs pairs"),
        (encoder_decoder, "the cat", {}, "needs pairs"),
        (encoder_decoder, None, {}, "needs pairs"),
        (decoder, PAIRS, {}, "Give it texts alone"),
        (learned, [*PAIRS, ("at", long)], {}, f"pair 6 has {len(long) + 2} tokens.*64 positions"),
        (learned, [(long, "at")], {}, f"pair 1 has {len(long) + 1} tokens.*64 positions"),
        (encoder_decoder, PAIRS[:1], {"ablation": "resample"}, "resample ablation replaces z with that"),
        (encoder_decoder, PAIRS, {"heads": "1.1"}, "does not name a stack"),
        (encoder_decoder, [("at", " ")], {}, "pair 1 needs a source and a text"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            importance(model, corpus, **options)  # pyright: ignore
    for model, corpus, message in ((encoder_decoder, TEXTS, "needs pairs"), (decoder, PAIRS, "texts alone")):
        with pytest.raises(HeadwiseError, match=message):
            mean_activations(model, corpus)
    for model, message in ((encoder_decoder, "does not support text pairs"), (decoder, "texts alone")):
        with pytest.raises(HeadwiseError, match=message):
            hw.profile(model, PAIRS)
