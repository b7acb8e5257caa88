"""Pruning of an encoder-decoder on pairs: ranking, folding, evaluation and recovery, against a loop over pairs."""

import math
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus, mean_activations
from headwise.compression import PruneRequest
from headwise.compression.l0_gates import learn_gates
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.plan_report import report
from headwise.compression.pruning_curve import pruning_curve
from headwise.compression.recovery_finetune import recover
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, Plan
from headwise.text.build_tokenizers import character_tokenizer
from headwise.text.corpus import Corpus
from headwise.training import Recipe, train
from tests.analysis.models import TEXTS
from tests.analysis.models import character_model as reading_texts
from tests.analysis.pair_models import (
    PAIRS,
    SPECS,
    ablation_costs,
    head_outputs,
    mean_loss,
    output_offset,
    pair_model,
    token_losses,
)
from tests.contract.layers import MODELS, prune_by_slicing
from tests.training.test_pairs import reversals
from tests.training.tiny import same_weights

TOLERANCE = 1e-10  # the models compute in double precision
SOME_HEADS = "enc.0.2,enc.1.*,dec.0.0,cross.1.1,cross.1.3"
BLIND_LOSS = (4 * math.log(8) + math.log(5)) / 5  # loss of reversed words without the source: 1.985 nats per token


def mean_output(model: Transformer, head: Address) -> Tensor:
    """Return the mean z of a head, (e,): over sources in the encoder, over texts elsewhere."""
    return torch.cat(head_outputs(model, head, full_text=True)).mean(0)


def mean_output_replacement(model: Transformer) -> Any:
    """Return a replacement for `ablation_costs`: the mean z of a head in every row of every pair."""
    return lambda head: [mean_output(model, head).expand(len(row), -1) for row in head_outputs(model, head)]


def loss_without(model: Transformer, heads: str, folded: bool = True) -> float:
    """Return the mean loss of a model pruned by hand, with mean outputs of the heads added after each layer."""
    small = prune_by_slicing(model, heads)
    small.tokenizer = model.tokenizer
    layers = {layer.hook_point.address: layer for layer in small.attention_layers()}
    pruned_heads = set(model.spec.head_addresses) - set(small.spec.head_addresses)
    with torch.no_grad(), ExitStack() as stack:
        for head in pruned_heads if folded else ():
            W_O: Tensor = model.heads[str(head)].W_O  # pyright: ignore
            stack.enter_context(output_offset(layers[head.layer_address], mean_output(model, head) @ W_O))
        return mean_loss(small)


# Evaluation.


@pytest.mark.parametrize("name", SPECS)
def test_paired_evaluation_covers_every_pair(name: str) -> None:
    model = pair_model(SPECS[name])
    trial = PairedEvaluator.of(model, PAIRS)
    indices = [index for batch in trial.batches for index in batch.sample_ids]
    with torch.no_grad():
        expected = [float(nll.sum()) for nll in token_losses(model)]
        lengths = [len(nll) for nll in token_losses(model)]
    assert sorted(indices) == list(range(len(PAIRS)))
    np.testing.assert_allclose(trial.full_losses_per_text, [expected[index] for index in indices], atol=TOLERANCE)
    assert trial.counts.tolist() == [lengths[index] for index in indices]
    assert trial.mean_loss(trial.full_losses_per_text).mean == pytest.approx(mean_loss(model), abs=TOLERANCE)
    assert trial.metric == "nats per token"
    other = pair_model(SPECS[name], seed=1)
    assert trial.mean_loss(trial.losses_per_text(other)).mean == pytest.approx(mean_loss(other), abs=TOLERANCE)


def test_halves_never_split_a_pair(tmp_path: Path) -> None:
    model = pair_model(SPECS["plain"])
    assert [sample.corpus_item for sample in eval_corpus(model, PAIRS).first(3)] == PAIRS[:3]
    assert [sample.corpus_item for sample in eval_corpus(model, PAIRS, 4).first(99)] == PAIRS, "pairs are never split"
    first_half, second_half = (
        [(s.source_text, s.text) for s in half] for half in eval_corpus(model, PAIRS).first(5).halves()
    )
    assert abs(len(first_half) - len(second_half)) <= 1
    assert sorted([*first_half, *second_half]) == sorted(PAIRS[:5])
    assert list(Corpus.of(eval_corpus(model, Corpus.pairs(["a"], ["mat"])).first(5)).items()) == [("a", "mat")]


# Plans.


@pytest.mark.parametrize("name", ["plain", "rotary, windows", "learned, post"])
def test_plan_fold_mean_uses_mean_of_each_stack(name: str, tmp_path: Path) -> None:
    model = pair_model(SPECS[name])
    heads = SOME_HEADS if name != "rotary, windows" else "enc.0.*,dec.1.2,cross.0.0,cross.1.3"
    plan = hw.plan_pruning(model, PruneRequest(heads=heads, corpus=PAIRS))
    plan.save(tmp_path / "plan.json")
    for candidate in (plan, Plan.load(tmp_path / "plan.json")):
        assert mean_loss(hw.apply(candidate, model)) == pytest.approx(loss_without(model, heads), abs=TOLERANCE)
    bare = hw.apply(hw.plan_pruning(model, PruneRequest(heads=heads, fold_mean=False)), model)
    assert mean_loss(bare) == pytest.approx(loss_without(model, heads, folded=False), abs=TOLERANCE)
    assert abs(mean_loss(bare) - mean_loss(hw.apply(plan, model))) > 1e-4, "folding changes the loss"


@pytest.mark.parametrize("fold_mean", [True, False])
def test_plan_prunes_least_important_heads(fold_mean: bool) -> None:
    model = pair_model(SPECS["plain"])
    expected = ablation_costs(model, mean_output_replacement(model) if fold_mean else None)
    plan = hw.plan_pruning(model, PruneRequest(keep=0.5, corpus=PAIRS, fold_mean=fold_mean))
    np.testing.assert_allclose(list(plan.head_scores.values()), expected, atol=TOLERANCE)
    least = np.argsort(expected)[: len(expected) // 2]
    assert set(plan.pruned_addresses) == {model.spec.head_addresses[i] for i in least}
    assert plan.corpus.startswith("a list of 5 pairs (")
    small = hw.prune(model, keep=0.5, corpus=PAIRS, fold_mean=fold_mean)
    assert same_weights(small, hw.apply(plan, model))
    assert mean_loss(small) == pytest.approx(loss_without(model, ",".join(plan.pruned_heads), fold_mean), abs=TOLERANCE)


def test_plan_rounds_rerank_remaining_heads() -> None:
    model = pair_model(SPECS["plain"])
    first = np.argsort(ablation_costs(model, mean_output_replacement(model)))[:6]
    pruned_heads = [model.spec.head_addresses[i] for i in first]
    intermediate = hw.apply(hw.plan_pruning(model, PruneRequest(heads=pruned_heads, corpus=PAIRS)), model)
    remaining_importance = ablation_costs(
        intermediate,
        lambda head: [mean_output(model, head).expand(len(row), -1) for row in head_outputs(intermediate, head)],
    )
    pruned_heads += [intermediate.spec.head_addresses[i] for i in np.argsort(remaining_importance)[:6]]
    assert set(hw.plan_pruning(model, PruneRequest(keep=0.5, corpus=PAIRS, rounds=2)).pruned_addresses) == set(
        pruned_heads
    )


@pytest.mark.parametrize("ranking", ["gradient", "gates", "random"])
def test_plan_every_ranking_accepts_pairs(ranking: str) -> None:
    model = pair_model(SPECS["plain"])
    plan = hw.plan_pruning(model, PruneRequest(keep=0.75, ranking=ranking, corpus=PAIRS, gate_steps=4))
    assert len(hw.apply(plan, model).spec.head_addresses) == 18
    if ranking == "gradient":
        assert list(plan.head_scores.values()) == hw.importance(model, PAIRS, ranking="gradient").mean.tolist()


# Reports.


def test_report_evaluates_both_models_on_same_pairs() -> None:
    model = pair_model(SPECS["plain"])
    small = hw.prune(model, heads=SOME_HEADS, corpus=PAIRS)
    result = report(model, small, PAIRS, means=mean_activations(model, PAIRS), seeds=2, repeats=1)
    before, after = mean_loss(model), mean_loss(small)
    assert (result.loss_before.mean, result.loss_after.mean) == pytest.approx((before, after), abs=TOLERANCE)
    assert result.loss_increase.mean == pytest.approx(after - before, abs=TOLERANCE)
    assert result.texts == len(PAIRS)
    assert (result.before.heads, result.after.heads) == (24, 16)
    assert min(result.time.before, result.time.after) > 0
    random_models = [hw.prune(model, keep=16 / 24, ranking="random", seed=seed, corpus=PAIRS) for seed in range(2)]
    assert result.random == pytest.approx([mean_loss(random_model) for random_model in random_models], abs=TOLERANCE)
    assert result.increase_over_random is not None
    assert result.increase_over_random.mean == pytest.approx(after - np.mean(result.random), abs=TOLERANCE)


def test_curve_prunes_at_every_fraction() -> None:
    model = pair_model(SPECS["plain"])
    result = pruning_curve(model, PAIRS[:3], PAIRS[3:], keep_fractions=(0.75, 0.5), seeds=1)
    assert result.full_loss.mean == pytest.approx(mean_loss(model, PAIRS[3:]), abs=TOLERANCE)
    for ranking in ("ablation", "gradient", "random"):
        for point in result.points_by_ranking(ranking):
            small = hw.prune(model, keep=point.kept_fraction, ranking=ranking, corpus=PAIRS[:3])
            assert point.heads == len(small.spec.head_addresses) == round(24 * point.kept_fraction)
            assert point.loss.mean == pytest.approx(mean_loss(small, PAIRS[3:]), abs=TOLERANCE)


# Gates.


def test_learn_gates_zero_heads_end_with_equal_gates() -> None:
    """Zero heads have no effect on the loss, so only the sparsity term moves their gates, in every stack."""
    model, dead = pair_model(SPECS["plain"]), ("enc.0.1", "dec.1.2", "cross.0.3", "cross.1.0")
    with torch.no_grad():
        for head in dead:
            model.heads[head].W_O.zero_()  # pyright: ignore
    before = deepcopy(model)
    open_probabilities = learn_gates(model, PAIRS, keep=0.5, steps=12, batch=4)
    assert tuple(open_probabilities) == model.spec.head_addresses
    assert np.mean(list(open_probabilities.values())) == pytest.approx(0.5, abs=0.02)
    named = {str(head): probability for head, probability in open_probabilities.items()}
    assert len({named.pop(head) for head in dead}) == 1
    assert len(set(named.values())) == 20, "all other gates have different gradients"
    assert same_weights(model, before)
    assert learn_gates(model, PAIRS, keep=0.5, steps=12, batch=4) == open_probabilities


# A trained model that reverses words of two to six letters out of eight.


@pytest.fixture(scope="module")
def reversal_model() -> Transformer:
    attention = AttentionSpec(width=32, heads=4)
    spec = ModelSpec(vocab=1, context=12, layers=1, attention=attention, kind="encoder-decoder")
    recipe = Recipe(steps=300, batch_size=32, learning_rate=1e-2, warmup=20, evaluate_every=300)
    result = train(spec, reversals(2000, 0), recipe, tokenizer=character_tokenizer("abcdefgh"), progress=False)
    assert result.valid_loss is not None
    assert result.valid_loss < BLIND_LOSS / 10
    return result.model


HELD_OUT = reversals(200, 1)


def test_prune_all_cross_heads_loses_the_source(reversal_model: Transformer) -> None:
    small = hw.prune(reversal_model, heads="cross.0.*", corpus=HELD_OUT)
    assert mean_loss(small, HELD_OUT) > BLIND_LOSS - 0.1
    recovered = recover(deepcopy(small), reversals(500, 2), steps=60, learning_rate=3e-3, progress=False).model
    assert BLIND_LOSS - 0.1 < mean_loss(recovered, HELD_OUT) < BLIND_LOSS + 0.2, "it learns frequencies, not the source"


def test_recover_on_pairs_reduces_loss(reversal_model: Transformer) -> None:
    small = hw.prune(reversal_model, keep=0.5, corpus=reversals(100, 3))
    before = mean_loss(small, HELD_OUT)
    assert before > 3 * mean_loss(reversal_model, HELD_OUT), "pruning increases the loss, so recovery can lower it"
    recovered = recover(small, reversals(1000, 2), steps=80, learning_rate=3e-3, progress=False)
    assert recovered.model is small
    assert len(small.spec.head_addresses) == 6
    assert mean_loss(small, HELD_OUT) < before / 2


def test_learn_gates_correlate_with_ablation_loss(reversal_model: Transformer) -> None:
    pairs = HELD_OUT[:40]
    with torch.no_grad():
        losses = [
            float(torch.cat(token_losses(reversal_model, pairs, gates={str(head): 0.0})).mean())
            for head in reversal_model.spec.head_addresses
        ]
    open_probabilities = learn_gates(reversal_model, reversals(300, 5), keep=0.5, steps=100, batch=16)
    assert float(spearmanr(losses, list(open_probabilities.values())).statistic) > 0.7  # pyright: ignore


def test_prune_ranking_beats_random(reversal_model: Transformer) -> None:
    selection, evaluation = eval_corpus(reversal_model, reversals(120, 4)).first(99).halves()
    small = hw.prune(reversal_model, keep=0.75, corpus=selection)
    # There are 220 possible random prunings. They differ more from each other than texts do.
    result = report(
        reversal_model, small, evaluation, means=mean_activations(reversal_model, selection), seeds=100, repeats=1
    )
    assert result.increase_over_random is not None
    assert result.increase_over_random.high < 0


# Errors.


def test_prune_pairs_invalid_corpus_raises() -> None:
    encoder_decoder, decoder = pair_model(SPECS["plain"]), reading_texts(MODELS["decoder"])
    small = hw.prune(encoder_decoder, heads="cross.0.0", fold_mean=False)
    for model, corpus, message in ((encoder_decoder, TEXTS, "needs pairs"), (decoder, PAIRS, "texts alone")):
        for function in (
            lambda m, corpus: hw.plan_pruning(m, PruneRequest(keep=0.5, corpus=corpus)),
            lambda m, corpus: hw.plan_pruning(m, PruneRequest(keep=0.5, corpus=corpus, fold_mean=False)),
            lambda m, corpus: hw.plan_pruning(
                m, PruneRequest(keep=0.5, corpus=corpus, fold_mean=False, ranking="gates", gate_steps=1)
            ),
            lambda m, corpus: hw.plan_pruning(
                m, PruneRequest(heads="cross.0.0" if m is encoder_decoder else "0.0", corpus=corpus)
            ),
            PairedEvaluator.of,
            pruning_curve,
            lambda m, corpus: learn_gates(m, corpus, keep=0.5, steps=1),
            lambda m, corpus: recover(deepcopy(m).float(), corpus, steps=1, progress=False),
        ):
            with pytest.raises(HeadwiseError, match=message):
                function(model, corpus)
        with pytest.raises(HeadwiseError, match=message):
            eval_corpus(model, corpus).first(3)
    with pytest.raises(HeadwiseError, match="needs pairs"):
        report(encoder_decoder, small, TEXTS)
    for options in ({"keep": 0.5}, {"heads": "cross.0.0"}, {"keep": 0.5, "fold_mean": False}):
        with pytest.raises(HeadwiseError, match="needs pairs of a source and a text"):
            hw.plan_pruning(encoder_decoder, PruneRequest(**options))  # pyright: ignore
    assert (
        len(hw.plan_pruning(encoder_decoder, PruneRequest(keep=0.5, ranking="random", fold_mean=False)).pruned_heads)
        == 12
    )
