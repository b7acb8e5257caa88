"""What heads are worth: slopes against autograd, closed forms, dead heads and twins, and the result with its intervals."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.ablation.ablate import Means, ablated, mean_activations, mean_of, record_z, stand_in
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.ablation.importance import importance
from headwise.analysis.ablation.sweep import slopes, sweep
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.loss import IGNORE
from headwise.spec import AttentionSpec, ModelSpec, SiteAddress
from headwise.text.build_tokenizers import character_tokenizer
from tests.analysis.models import TEXTS, encoded, reading, surprise
from tests.contract.layers import MODELS, assert_equal

HEADLESS = replace(MODELS["encoder"], output="none", form="pre")


def test_the_numbers_do_not_depend_on_how_the_work_is_cut() -> None:
    model = reading(MODELS["decoder, rotary"])
    for by, how in (("ablation", "resample"), ("gradient", "mean"), ("attribution", "mean")):
        whole = importance(model, TEXTS, by=by, how=how, check=0)  # pyright: ignore
        for tokens in (1, 37, 90):
            cut = importance(model, TEXTS, by=by, how=how, tokens=tokens, check=0)  # pyright: ignore
            np.testing.assert_allclose(cut.mean, whole.mean, atol=1e-10)
    means = mean_activations(model, TEXTS)
    parts = [importance(model, some, means=means) for some in (TEXTS[:2], TEXTS[2:])]
    merged = parts[0].merge(parts[1])
    np.testing.assert_allclose(merged.mean, importance(model, TEXTS, means=means).mean, atol=1e-10)
    assert merged.texts == 4


def test_only_some_heads() -> None:
    model = reading(MODELS["decoder"])
    some, every = importance(model, TEXTS, heads="0.1,1.*"), importance(model, TEXTS)
    assert list(map(str, some.addresses)) == ["0.1", "1.0", "1.1", "1.2", "1.3"]
    for worth in some:
        assert worth.worth == pytest.approx(every[worth.head].worth, abs=1e-12)


# What the numbers mean.


def test_a_constant_and_a_dead_head_are_worth_nothing_and_twins_the_same() -> None:
    model = reading(MODELS["decoder"])
    with torch.no_grad():
        model.heads["0.1"].W_V.zero_()  # constant: b_V alone  # pyright: ignore
        model.heads["1.2"].W_O.zero_()  # dead  # pyright: ignore
        twin, of = model.heads["0.3"], model.heads["0.2"]
        for letter in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
            getattr(twin, letter).copy_(getattr(of, letter))
    by_how = {how: importance(model, TEXTS, how=how) for how in ("zero", "mean", "resample")}  # pyright: ignore
    for how, made in by_how.items():
        assert made["1.2"].worth == pytest.approx(0, abs=1e-12)
        assert made["0.3"].worth == pytest.approx(made["0.2"].worth, abs=1e-12)
        assert (abs(made["0.1"].worth) < 1e-12) == (how != "zero")
        assert abs(made["0.0"].worth) > 1e-4


def test_heads_that_cancel_each_other_are_worth_something_each_and_nothing_together() -> None:
    model = reading(MODELS["decoder"])
    with torch.no_grad():
        twin, of = model.heads["1.3"], model.heads["1.2"]
        for letter in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
            getattr(twin, letter).copy_(getattr(of, letter))
        twin.W_O.copy_(-of.W_O)  # pyright: ignore
    made = importance(model, TEXTS, how="zero")
    assert abs(made["1.2"].worth) > 1e-4
    ids = encoded(model)[0]
    before = model(ids)
    with ablated(model, "1.2,1.3", "zero"):
        assert_equal(model(ids), before)


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut"])
def test_gradients_are_those_of_one_text_at_a_time(name: str) -> None:
    model = reading(MODELS[name])
    made = importance(model, TEXTS, by="gradient")
    total = np.zeros(len(made))
    for ids in encoded(model):
        gates = {site.address: torch.ones(len(site.head_ids), requires_grad=True) for site in model.sites()}
        (surprise_with_gates(model, ids, gates) / (ids.shape[1] - 1)).backward()
        total += torch.cat([gate.grad.abs() for gate in gates.values() if gate.grad is not None]).numpy()
    np.testing.assert_allclose(made.mean, total / len(TEXTS), atol=1e-6)  # the gates are in single precision
    again = importance(model, TEXTS, by="gradient")
    np.testing.assert_array_equal(again.mean, made.mean)  # nothing was added up anywhere
    assert made["0.0"].worth > 1e-6


def surprise_with_gates(model: Transformer, ids: Tensor, gates: dict[SiteAddress, Tensor]) -> Tensor:
    return F.cross_entropy(model(ids, gates=gates)[0, :-1], ids[0, 1:], reduction="sum")


def test_the_model_is_left_as_it_was() -> None:
    model = reading(MODELS["decoder"], dropout=0.1).train()
    model.blocks[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for by in ("ablation", "gradient", "attribution"):
        importance(model, TEXTS, by=by)  # pyright: ignore
    assert model.training
    assert not model.blocks[0].training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(site.is_open for site in model.sites())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_silencing_around_it_counts() -> None:
    model, without = reading(MODELS["decoder"]), reading(MODELS["decoder"])
    with torch.no_grad():
        without.heads["0.1"].W_O.zero_()  # pyright: ignore
    with model.heads["0.1"].silenced():
        got = importance(model, TEXTS, how="zero")
    np.testing.assert_allclose(got.mean, importance(without, TEXTS, how="zero").mean, atol=1e-12)


# Closed forms, on models written by hand: the four dimensions are what a head says, the answer, the token, a big constant.

SAYS, ANSWER, TOKEN, BIG = range(4)
LARGE = 1e5  # so large that the norms divide by it alone


def by_hand(layers: int) -> Transformer:
    """All zeros but the embeddings of tokens 0 (+1) and 1 (−1) and an output whose logits are +answer and −answer."""
    attention = AttentionSpec(width=4, heads=1, head_dim=2, bias=True, out_bias=True, scale=1.0)
    spec = ModelSpec(2, 8, layers, attention, norm="rms", positions="none", tied=False, mlp_bias=False)
    model = Transformer(spec).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(LARGE / 2 if "norm" in name else 0.0)  # a norm leaves the stream as it is
        model.embed.tokens.weight[:, TOKEN] = torch.tensor([1.0, -1.0])
        model.embed.tokens.weight[:, BIG] = LARGE
        model.output.vocabulary.weight[:, ANSWER] = torch.tensor([1.0, -1.0])  # pyright: ignore
    return model


def test_alternating_gradients_of_one_are_worth_one() -> None:
    model = by_hand(layers=1)
    head = model.heads["0.0"]
    with torch.no_grad():
        head.b_V[0] = 1.0  # pyright: ignore
        head.W_O[0, ANSWER] = 1.0  # pyright: ignore
        head.layer.b_O[ANSWER] = -1.0  # the answer is 0, and its slope is −1 or +1 by the token asked for  # pyright: ignore
    model.tokenizer = character_tokenizer("ab")
    made = importance(model, ["aa", "ab"], by="gradient")
    assert made.mean == pytest.approx(1.0, abs=1e-6)
    signed = importance(model, ["aa", "ab"], by="attribution", how="zero")
    assert signed.mean == pytest.approx(0.0, abs=1e-9)  # what taking the absolute value per batch would have seen
    exact = np.log((1 + np.exp(2)) * (1 + np.exp(-2)) / 4) / 2  # softplus(±2) − ln 2, half of each
    assert importance(model, ["aa", "ab"], how="zero").mean == pytest.approx(exact, abs=1e-6)


def test_attribution_can_miss_everything() -> None:
    """Head 0.0 turns a later score gap over two keys from +10 to −10: p falls by .9999, its slope promises .0009."""
    model = by_hand(layers=2)
    first, second = model.heads["0.0"], model.heads["1.0"]
    with torch.no_grad():
        first.b_V[0] = 1.0  # pyright: ignore
        first.W_O[0, SAYS] = 1.0  # pyright: ignore
        second.W_Q[SAYS, 0], second.W_K[TOKEN, 0] = 1.0, 5.0  # scores ±5  # pyright: ignore
        second.W_V[TOKEN, 0], second.b_V[0] = 0.5, 0.5  # values 1 and 0  # pyright: ignore
        second.W_O[0, ANSWER] = 1.0  # pyright: ignore
    site = SiteAddress("", 0)
    means = Means(
        "global", {site: (0,)}, {site: torch.tensor([[[-1.0, 0.0]]]).double()}, {site: torch.ones(1).double()}
    )
    asked = TargetBatch(torch.tensor([[0, 1]]), torch.ones(1, 2).bool(), torch.tensor([[IGNORE, 0]]), None)
    heads = (first.address,)  # pyright: ignore

    def stands(site: Any, chosen: Any) -> Any:
        return stand_in(site, chosen, "mean", means)

    high, low = 1 / (1 + np.exp(-10.0)), 1 / (1 + np.exp(10.0))
    assert (low - high, -20 * high * low) == pytest.approx((-0.9999, -0.0009), abs=1e-4)
    exact = np.log1p(np.exp(-2 * low)) - np.log1p(np.exp(-2 * high))
    estimate = -2 / (1 + np.exp(2 * high)) * (-20 * high * low)  # ∂loss/∂p · ∂p/∂gap · the change of the gap
    assert float(sweep(model, asked, heads, stands)[0]) == pytest.approx(exact, abs=1e-6)
    assert float(slopes(model, asked, heads, stands)) == pytest.approx(estimate, abs=1e-6)
    model.tokenizer = character_tokenizer("ab")
    made = importance(model, ["aba"] * 3, by="attribution", metric="last", means=means, heads="0.0")
    assert made.check is not None
    assert made.check.worst == ("0.0", pytest.approx(estimate - exact, abs=1e-6))


def test_attribution_is_the_slope_and_is_checked() -> None:
    model = reading(MODELS["decoder, rotary"])
    means = mean_of(record_z(model, ids[:, :-1]) for ids in encoded(model))
    made = importance(model, TEXTS, by="attribution", check=5)
    exact = importance(model, TEXTS)
    tokens = sum(ids.shape[1] - 1 for ids in encoded(model))
    for head in model.heads:  # the slope, by a small step of the head towards its mean
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad(), head.layer.site.replaced(_step(head.index, means[head.address], step)):
                ends.append(sum(float(surprise(model, ids)) for ids in encoded(model)))
        assert made[head.address].worth == pytest.approx((ends[0] - ends[1]) / 2e-5 / tokens, abs=1e-6)
    assert made.check is not None
    assert len(made.check.heads) == 5
    for head, seen, real in zip(made.check.heads, made.check.estimate, made.check.exact, strict=True):
        assert (seen, real) == pytest.approx((made[head].worth, exact[head].worth), abs=1e-9)
    assert made.check.correlation == pytest.approx(np.corrcoef(made.check.estimate, made.check.exact)[0, 1])


def _step(index: int, mean: Tensor, step: float) -> Any:
    def edit(z: Tensor) -> Tensor:
        moved = z.clone()
        moved[:, index] += step * (mean - z[:, index])
        return moved

    return edit


# The result.


def test_intervals_and_what_stands_beside() -> None:
    model = reading(MODELS["decoder"])
    made = importance(model, TEXTS * 5)
    sums, _ = made.tally.per_bucket("worth")
    low, high = made.interval
    assert ((low <= made.mean) & (made.mean <= high)).all()
    for place, address in enumerate(made.addresses):
        peers = [i for i, other in enumerate(made.addresses) if other.layer == address.layer and i != place]
        assert made[address].above_layer == pytest.approx(made.mean[place] - made.mean[peers].mean(), abs=1e-12)
        assert made[address].above_low <= made[address].above_layer <= made[address].above_high
    assert made.ranked[0] == made.addresses[int(made.mean.argmax())]
    assert [row[0] for row in made.rows()] == list(map(str, made.ranked))
    told = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert told["heads"][3] == {**told["heads"][3], "head": "0.3", "worth": pytest.approx(made.mean[3])}
    assert (told["by"], told["how"], told["texts"], sums.shape) == ("ablation", "mean", 20, (256, 8))
    alone = importance(model, TEXTS, heads="1.1").to_dict()["heads"][0]
    assert alone["above_layer"] is None


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int | None]] = []
    importance(reading(MODELS["decoder"]), TEXTS, tokens=90, progress=lambda *now: told.append(now))
    assert told[-1] == ("what heads are worth", 4, 4)
    assert len(told) > 1


def test_what_is_wrong_is_said() -> None:
    decoder, encoder = reading(MODELS["decoder"]), reading(HEADLESS)
    for model, options, message in (
        (decoder, {"by": "magic"}, "there is no by='magic'"),
        (decoder, {"how": "magic"}, "there is no how='magic'"),
        (decoder, {"metric": "first"}, "the metric is"),
        (decoder, {"heads": "7.1"}, "names no head"),
        (decoder, {"tokens": 0}, "at least one token"),
        (decoder, {"how": "resample", "on": "the cat"}, "only one"),
        (decoder, {"on": "t"}, "two tokens"),
        (encoder, {"metric": "last"}, "needs a decoder"),
        (encoder, {"by": "gradient"}, "the slope is 0"),
        (reading(MODELS["encoder-decoder"]), {}, "needs pairs"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            importance(model, **({"on": TEXTS} | options))  # pyright: ignore
    with pytest.raises(HeadwiseError, match=r"head 0\.9 was not measured"):
        importance(decoder, TEXTS)["0.9"]
    with pytest.raises(HeadwiseError, match="measured alike"):
        importance(decoder, TEXTS).merge(importance(decoder, TEXTS, how="zero"))
