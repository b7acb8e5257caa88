"""Selection of heads to prune: against a plain loop over all heads, with heads known to be useless, and errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.ablation.ablate import ablated, mean_activations
from headwise.compression import PruneRequest
from headwise.compression.l0_gates import learn_gates
from headwise.compression.plan import plan_pruning, prune
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.corpus import Corpus
from tests.analysis.models import TEXTS, character_model, encode_texts, text_loss
from tests.contract.layers import MODELS, make_model
from tests.training.tiny import same_weights


def total_loss(model: Transformer) -> float:
    return float(sum(text_loss(model, ids) for ids in encode_texts(model)))


def greedy_prune(model: Transformer, prune_counts: list[int], replacement: str) -> list[Address]:
    """Return the heads to prune, `prune_counts[i]` in round i, by ablating every remaining head with the pruned ones."""
    means, pruned_heads = mean_activations(model, TEXTS), []
    for count in prune_counts:
        remaining = [head for head in model.spec.head_addresses if head not in pruned_heads]
        losses = {}
        for head in remaining:
            with ablated(model, [*pruned_heads, head], replacement, means=means):  # pyright: ignore
                losses[head] = total_loss(model)
        pruned_heads += sorted(remaining, key=lambda head: losses[head])[:count]
    return pruned_heads


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary"])
@pytest.mark.parametrize("fold_mean", [True, False])
@pytest.mark.parametrize(("rounds", "prune_counts"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
@torch.no_grad()
def test_plan_ablation_rounds_equals_greedy_loop(
    name: str, fold_mean: bool, rounds: int, prune_counts: list[int]
) -> None:
    model = character_model(MODELS[name])
    plan = plan_pruning(model, PruneRequest(keep=3 / 8, fold_mean=fold_mean, corpus=TEXTS, rounds=rounds))
    assert set(plan.pruned_addresses) == set(greedy_prune(model, prune_counts, "mean" if fold_mean else "zero"))
    assert list(plan.pruned_addresses) == sorted(plan.pruned_addresses)


@pytest.mark.parametrize("ranking", ["ablation", "gradient"])
@pytest.mark.parametrize("fold_mean", [True, False])
@torch.no_grad()
def test_plan_zero_output_heads_have_zero_importance(ranking: str, fold_mean: bool) -> None:
    model, dead = character_model(MODELS["decoder"]), ("0.2", "1.0", "1.3")
    for head in dead:
        model.heads[head].W_O.zero_()  # pyright: ignore
    plan = plan_pruning(model, PruneRequest(keep=5 / 8, ranking=ranking, fold_mean=fold_mean, corpus=TEXTS))
    assert plan.ranking == ranking
    assert [
        str(h) for h, score in zip(model.spec.head_addresses, plan.scores, strict=True) if abs(score) < 1e-12
    ] == list(dead)
    assert ranking == "ablation" or plan.pruned_heads == dead, (
        "other heads may have negative importance, but no zero gradient"
    )
    assert total_loss(prune(model, heads=",".join(dead), fold_mean=fold_mean, corpus=TEXTS)) == pytest.approx(
        total_loss(model), abs=1e-9
    )


@torch.no_grad()
def test_prune_constant_head_fold_mean_keeps_loss() -> None:
    model = character_model(MODELS["decoder"])
    model.heads["1.1"].W_V.zero_()  # its z is always b_V  # pyright: ignore
    assert total_loss(prune(model, heads="1.1", corpus=TEXTS)) == pytest.approx(total_loss(model), abs=1e-9)
    assert abs(total_loss(prune(model, heads="1.1", fold_mean=False)) - total_loss(model)) > 1e-3
    scores = {
        fold_mean: plan_pruning(model, PruneRequest(keep=0.5, fold_mean=fold_mean, corpus=TEXTS)).scores[5]
        for fold_mean in (True, False)
    }
    assert abs(scores[True]) < 1e-12 < 1e-4 < abs(scores[False])


@pytest.mark.parametrize(("keep", "num_heads"), [(1, 8), (0.99, 8), (0.5, 4), (0.3, 2), (0.01, 1)])
def test_prune_keep_is_fraction_of_current_heads(keep: float, num_heads: int) -> None:
    model = make_model(MODELS["decoder"])
    assert len(prune(model, keep=keep, ranking="random", fold_mean=False).spec.head_addresses) == num_heads
    small = prune(model, keep=0.5, ranking="random", fold_mean=False)
    assert len(prune(small, keep=0.5, ranking="random", fold_mean=False).spec.head_addresses) == 2


def test_plan_random_ranking_follows_seed() -> None:
    model = character_model(MODELS["decoder"])
    plans = [
        plan_pruning(model, PruneRequest(keep=0.5, ranking="random", fold_mean=False, seed=seed)).pruned_heads
        for seed in (0, 0, 1, 2)
    ]
    assert plans[0] == plans[1]
    assert len(set(plans)) > 1
    larger_plan = plan_pruning(model, PruneRequest(keep=0.25, ranking="random", fold_mean=False)).pruned_heads
    assert set(plans[0]) < set(larger_plan), "with one seed, a larger plan contains the smaller one"
    counts = np.zeros(8)
    for seed in range(400):  # 400 fair draws of one half prune each head 200 ± 10 times
        pruned_heads = plan_pruning(
            model, PruneRequest(keep=0.5, ranking="random", fold_mean=False, seed=seed)
        ).pruned_addresses
        counts[[model.spec.head_addresses.index(head) for head in pruned_heads]] += 1
    assert np.abs(counts - 200).max() < 45


def test_plan_gates_ranking_uses_learned_gates() -> None:
    model = character_model(MODELS["decoder"])
    plan = plan_pruning(model, PruneRequest(keep=0.5, ranking="gates", corpus=TEXTS, gate_steps=20, seed=3))
    open_probabilities = learn_gates(model, Corpus.of(TEXTS), keep=0.5, steps=20, seed=3)
    assert plan.scores == tuple(open_probabilities.values())
    assert max(open_probabilities[head] for head in plan.pruned_addresses) <= min(
        open_probabilities[head] for head in model.spec.head_addresses if head not in plan.pruned_addresses
    )


def test_prune_model_without_output_ranks_by_states() -> None:
    model = character_model(MODELS["encoder"], output="none")
    assert len(prune(model, keep=0.5, corpus=TEXTS).spec.head_addresses) == 4
    with pytest.raises(HeadwiseError, match="Use ranking='ablation'"):
        prune(model, keep=0.5, ranking="gradient", corpus=TEXTS)


# The given model is not changed.


@pytest.mark.parametrize("ranking", ["ablation", "gradient", "gates"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_prune_interrupted_leaves_model_unchanged(ranking: str, rounds: int) -> None:
    model, untouched = character_model(MODELS["decoder"]).train(), character_model(MODELS["decoder"])

    def interrupt_at(call_number: int) -> Callable[[str, int, int | None], None]:
        def progress(stage: str, done: int, total: int | None) -> None:
            stages.append(stage)
            if len(stages) == call_number:
                raise KeyboardInterrupt

        return progress

    stages: list[str] = []
    prune(model, keep=0.5, ranking=ranking, corpus=TEXTS, rounds=rounds, gate_steps=5, progress=interrupt_at(0))
    for call_number in {1, len(stages)}:
        stages = []
        with pytest.raises(KeyboardInterrupt):
            prune(
                model,
                keep=0.5,
                ranking=ranking,
                corpus=TEXTS,
                rounds=rounds,
                gate_steps=5,
                progress=interrupt_at(call_number),
            )
        assert same_weights(model, untouched)
        assert not any(hook_point.is_active for hook_point in model.hook_points())
        assert model.training
        assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_prune_invalid_arguments_raise() -> None:
    model = character_model(MODELS["decoder"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "which heads to prune"),
        ({"keep": 0.5, "heads": "0.1"}, "which heads to prune"),
        *(
            ({"keep": keep, "corpus": TEXTS}, "above 0 and at most 1")
            for keep in (0, -0.5, 1.5, float("nan"), "half", True)
        ),
        ({"heads": "*", "corpus": TEXTS}, "prune all 8 heads"),
        ({"heads": "5.1", "corpus": TEXTS}, "no such head"),
        ({"heads": "0.1"}, "folding the mean outputs of heads needs"),
        ({"keep": 0.5}, "needs texts"),
        ({"keep": 0.5, "fold_mean": False}, "ranking method 'ablation' needs texts"),
        ({"keep": 0.5, "ranking": "random"}, "needs texts"),
        ({"keep": 0.5, "ranking": "luck", "corpus": TEXTS}, "ranking: unknown method. Got 'luck'"),
        ({"keep": 0.5, "rounds": 0, "corpus": TEXTS}, "must be an integer of at least"),
        ({"keep": 0.5, "corpus": ""}, "is empty"),
        ({"keep": 0.5, "corpus": []}, "is empty"),
        ({"heads": "0.1", "corpus": ""}, "is empty"),
        ({"keep": 0.5, "corpus": "a"}, "at least 2 tokens"),
    ]
    for arguments, message in cases:
        with pytest.raises(HeadwiseError, match=message):
            prune(model, **arguments)
    with pytest.raises(HeadwiseError, match="Got Linear"):
        prune(torch.nn.Linear(2, 2), keep=0.5)  # pyright: ignore
    encoder_decoder = character_model(MODELS["encoder-decoder"])
    with pytest.raises(HeadwiseError, match="needs pairs"):
        prune(encoder_decoder, keep=0.5, corpus=TEXTS)
    assert len(prune(encoder_decoder, heads="cross.1.*", fold_mean=False).spec.head_addresses) == 20
    assert len(prune(encoder_decoder, keep=0.5, ranking="random", fold_mean=False).spec.head_addresses) == 12
    untokenized = character_model(MODELS["decoder"])
    untokenized.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        prune(untokenized, keep=0.5, corpus=TEXTS)
