"""Which heads go: against a plain loop over all of them, and with heads known to be useless; and all that is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.ablation.ablate import ablated, mean_activations
from headwise.compression.l0_gates import learn_gates
from headwise.compression.plan import Plan
from headwise.compression.prune import prune
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.corpus import Corpus
from tests.analysis.models import TEXTS, encoded, reading, surprise
from tests.contract.layers import MODELS, make_model
from tests.training.tiny import same_weights


def loss(model: Transformer) -> float:
    return float(sum(surprise(model, ids) for ids in encoded(model)))


def greedy(model: Transformer, cuts: list[int], how: str) -> list[Address]:
    """The heads that go, so many in each round, by trying every one of those left on top of those gone."""
    means, gone = mean_activations(model, TEXTS), []
    for count in cuts:
        left = [head for head in model.spec.addresses if head not in gone]
        worth = {}
        for head in left:
            with ablated(model, [*gone, head], how, means=means):  # pyright: ignore
                worth[head] = loss(model)
        gone += sorted(left, key=lambda head: worth[head])[:count]
    return gone


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary"])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(("rounds", "cuts"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
@torch.no_grad()
def test_ablation_in_rounds_is_a_plain_greedy_loop(name: str, fold: bool, rounds: int, cuts: list[int]) -> None:
    model = reading(MODELS[name])
    plan = Plan.make(model, keep=3 / 8, fold=fold, on=TEXTS, rounds=rounds)
    assert set(plan.addresses) == set(greedy(model, cuts, "mean" if fold else "zero"))
    assert list(plan.addresses) == sorted(plan.addresses)


@pytest.mark.parametrize("by", ["ablation", "gradient"])
@pytest.mark.parametrize("fold", [True, False])
@torch.no_grad()
def test_heads_that_write_nothing_are_worth_nothing(by: str, fold: bool) -> None:
    model, dead = reading(MODELS["decoder"]), ("0.2", "1.0", "1.3")
    for head in dead:
        model.heads[head].W_O.zero_()  # pyright: ignore
    plan = Plan.make(model, keep=5 / 8, by=by, fold=fold, on=TEXTS)
    assert plan.by == by
    assert [str(h) for h, score in zip(model.spec.addresses, plan.scores, strict=True) if abs(score) < 1e-12] == list(
        dead
    )
    assert by == "ablation" or plan.cut == dead, "others may do harm, but no slope is less steep"
    assert loss(prune(model, heads=",".join(dead), fold=fold, on=TEXTS)) == pytest.approx(loss(model), abs=1e-9)


@torch.no_grad()
def test_a_constant_head_costs_nothing_when_folded() -> None:
    model = reading(MODELS["decoder"])
    model.heads["1.1"].W_V.zero_()  # it always gives b_V  # pyright: ignore
    assert loss(prune(model, heads="1.1", on=TEXTS)) == pytest.approx(loss(model), abs=1e-9)
    assert abs(loss(prune(model, heads="1.1", fold=False)) - loss(model)) > 1e-3
    scores = {fold: Plan.make(model, keep=0.5, fold=fold, on=TEXTS).scores[5] for fold in (True, False)}
    assert abs(scores[True]) < 1e-12 < 1e-4 < abs(scores[False])


@pytest.mark.parametrize(("keep", "left"), [(1, 8), (0.99, 8), (0.5, 4), (0.3, 2), (0.01, 1)])
def test_a_share_of_the_heads_there_are_now(keep: float, left: int) -> None:
    model = make_model(MODELS["decoder"])
    assert len(prune(model, keep=keep, by="random", fold=False).spec.addresses) == left
    small = prune(model, keep=0.5, by="random", fold=False)
    assert len(prune(small, keep=0.5, by="random", fold=False).spec.addresses) == 2


def test_random_cutting_follows_its_seed() -> None:
    model = reading(MODELS["decoder"])
    plans = [Plan.make(model, keep=0.5, by="random", fold=False, seed=seed).cut for seed in (0, 0, 1, 2)]
    assert plans[0] == plans[1]
    assert len(set(plans)) > 1
    more = Plan.make(model, keep=0.25, by="random", fold=False).cut
    assert set(plans[0]) < set(more), "with one seed, who goes early goes late as well"
    counts = np.zeros(8)
    for seed in range(400):  # no head is favoured: 400 fair draws of one half give each 200 ± 10
        gone = Plan.make(model, keep=0.5, by="random", fold=False, seed=seed).addresses
        counts[[model.spec.addresses.index(head) for head in gone]] += 1
    assert np.abs(counts - 200).max() < 45


def test_learned_gates_decide() -> None:
    model = reading(MODELS["decoder"])
    plan = Plan.make(model, keep=0.5, by="gates", on=TEXTS, steps=20, seed=3)
    chances = learn_gates(model, Corpus.of(TEXTS), keep=0.5, steps=20, seed=3)
    assert plan.scores == tuple(chances.values())
    assert max(chances[head] for head in plan.addresses) <= min(
        chances[head] for head in model.spec.addresses if head not in plan.addresses
    )


def test_a_model_without_an_output_is_ranked_by_its_states() -> None:
    model = reading(MODELS["encoder"], output="none")
    assert len(prune(model, keep=0.5, on=TEXTS).spec.addresses) == 4
    with pytest.raises(HeadwiseError, match="use by='ablation'"):
        prune(model, keep=0.5, by="gradient", on=TEXTS)


# The source stays as it is, whatever happens.


@pytest.mark.parametrize("by", ["ablation", "gradient", "gates"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_breaking_off_leaves_the_source_untouched(by: str, rounds: int) -> None:
    model, untouched = reading(MODELS["decoder"]).train(), reading(MODELS["decoder"])

    def stop(at: int) -> Callable[[str, int, int | None], None]:
        def progress(what: str, done: int, of: int | None) -> None:
            heard.append(what)
            if len(heard) == at:
                raise KeyboardInterrupt

        return progress

    heard: list[str] = []
    prune(model, keep=0.5, by=by, on=TEXTS, rounds=rounds, steps=5, progress=stop(0))
    for at in {1, len(heard)}:
        heard = []
        with pytest.raises(KeyboardInterrupt):
            prune(model, keep=0.5, by=by, on=TEXTS, rounds=rounds, steps=5, progress=stop(at))
        assert same_weights(model, untouched)
        assert not any(site.is_open for site in model.sites())
        assert model.training
        assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_what_cannot_be_done() -> None:
    model = reading(MODELS["decoder"])
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "in one way"),
        ({"keep": 0.5, "heads": "0.1"}, "in one way"),
        *(
            ({"keep": keep, "on": TEXTS}, "above 0 and at most 1")
            for keep in (0, -0.5, 1.5, float("nan"), "half", True)
        ),
        ({"heads": "*", "on": TEXTS}, "would cut all 8 heads"),
        ({"heads": "5.1", "on": TEXTS}, "names no head"),
        ({"heads": "0.1"}, "needs a text: give on=…, or fold=False"),
        ({"keep": 0.5}, "needs a text"),
        ({"keep": 0.5, "fold": False}, "ranking by ablation asks the model, so it needs a text: give on=…"),
        ({"keep": 0.5, "by": "random"}, "needs a text"),
        ({"keep": 0.5, "by": "luck", "on": TEXTS}, "cannot be ranked by 'luck'"),
        ({"keep": 0.5, "rounds": 0, "on": TEXTS}, "rounds must be"),
        ({"keep": 0.5, "on": ""}, "is empty"),
        ({"keep": 0.5, "on": []}, "is empty"),
        ({"heads": "0.1", "on": ""}, "is empty"),
        ({"keep": 0.5, "on": "a"}, "two tokens"),
    ]
    for arguments, message in bad:
        with pytest.raises(HeadwiseError, match=message):
            prune(model, **arguments)
    with pytest.raises(HeadwiseError, match="got Linear"):
        prune(torch.nn.Linear(2, 2), keep=0.5)  # pyright: ignore
    across = reading(MODELS["encoder-decoder"])
    with pytest.raises(HeadwiseError, match="needs pairs"):
        prune(across, keep=0.5, on=TEXTS)
    assert len(prune(across, heads="cross.1.*", fold=False).spec.addresses) == 20
    assert len(prune(across, keep=0.5, by="random", fold=False).spec.addresses) == 12
    without = reading(MODELS["decoder"])
    without.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        prune(without, keep=0.5, on=TEXTS)
