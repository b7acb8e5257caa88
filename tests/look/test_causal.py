"""The last rung: who is causal, and who only looks so beside heads that do nothing."""

import math

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.look.profile.causal import Costs, effects, word_questions
from headwise.look.profile.make import profile
from headwise.look.profile.result import Profile
from headwise.look.record.reading import Reading
from headwise.look.worth.outputs import mean_activations
from headwise.model import Transformer
from headwise.text.documents import Document
from tests.look.built import BEFORE, OUT, Built, V, blank, decoder, documents


def costs(*heads: float, texts: int = 20, answers: float = 4.0, clean: float = 0.0) -> Costs:
    """Texts of some answers each, in which every head costs so many nats an answer."""
    return Costs(np.tile(answers * np.array(heads), (texts, 1)), np.full(texts, answers), clean)


def test_the_numbers() -> None:
    found = costs(0.5, 0.1, 0.2, 0.3, 0.4).of(0)
    assert found.cost == pytest.approx(0.5)
    assert found.more == pytest.approx(0.5 - 0.25)
    assert (found.low, found.high) == pytest.approx((0.25, 0.25))
    assert found.bar == pytest.approx(0.325), "three quarters of the way through .1, .2, .3, .4"
    assert found.causal


def test_a_head_that_costs_next_to_nothing_is_not_causal_beside_idle_ones() -> None:
    found = costs(0.004, 0, 0, 0, 0, 0).of(0)
    assert found.low > 0, "it is above the others without a doubt"
    assert found.bar == 0.01
    assert not found.causal


def test_the_least_that_counts_grows_with_the_surprise_of_the_whole_model() -> None:
    assert costs(0.05, 0, 0, 0, clean=4.0).of(0).causal
    found = costs(0.05, 0, 0, 0, clean=6.0).of(0)
    assert found.bar == pytest.approx(0.06)
    assert not found.causal


def test_idle_heads_do_not_make_one_of_several_causal() -> None:
    """Above the average of a layer in which five of eight others do nothing, but below the three that do most."""
    found = costs(0.5, 1, 1, 1, 0, 0, 0, 0, 0).of(0)
    assert found.more == pytest.approx(0.5 - 3 / 8)
    assert found.low > 0
    assert not found.causal
    assert costs(0.5, 1, 0, 0, 0, 0, 0, 0, 0).of(0).causal, "second of nine"


def test_a_head_that_others_equal_is_not_causal() -> None:
    for heads in ((1.0, 1.0, 1.0), (0.3, 1.0), (-0.5, -1.0, -1.0)):
        assert not costs(*heads).of(0).causal


def test_a_loss_that_one_text_alone_shows_is_not_causal() -> None:
    """It is missing from (11/12)¹² of all draws, which is 35 %, so the interval begins at 0."""
    lost = np.zeros((12, 4))
    lost[3, 0] = 12.0
    found = Costs(lost, np.ones(12), 0.0).of(0)
    assert (found.cost, found.low) == (1.0, 0.0)
    assert not found.causal


def test_a_head_alone_in_its_layer() -> None:
    found = costs(0.5, clean=2.0).of(0)
    assert (found.more, found.cost, found.bar) == pytest.approx((0.5, 0.5, 0.02))
    assert found.causal
    assert not costs(0.5, texts=1).of(0).causal, "one text gives no interval"


def test_nothing_was_asked() -> None:
    found = Costs(np.zeros((8, 3)), np.zeros(8), 0.0).of(1)
    assert math.isnan(found.low)
    assert not found.causal


def almost_idle(size: float) -> Transformer:
    """One layer: a previous-token head that makes the token before a little less likely, and five that write nothing."""
    model = blank(heads=6, layers=1)
    (layer,) = model.attention_layers()
    Built(layer, 0).places(1).writes(OUT, -size)
    return model


def test_a_layer_of_idle_heads() -> None:
    """The head saves (1 − e⁻ˢ)/V nats an answer at most, s the logit it takes away: always so, and next to nothing."""
    head = profile(almost_idle(0.1), documents(40))["0.0"].supports[0]
    assert head.role == "previous token"
    assert head.effect is not None
    assert head.effect_interval is not None
    assert head.effect_interval[0] > 0, "an interval above 0 is not enough"
    assert 0 < head.effect < 1.2 / V
    assert head.bar == pytest.approx(0.01 * math.log(V), rel=0.02), "a model that knows nothing: ln V an answer"
    assert head.rung == "effective"


def test_what_is_asked_of_documents_is_what_whole_texts_say() -> None:
    """Each closer is asked for, given all before it; to stop reading there changes nothing."""
    model, some = decoder(), documents(8)
    units = list(Reading.of(model, some))
    questions = word_questions(units, "bracket", "later word")
    asked = {unit: int(count) for one in questions for unit, count in zip(one.units, one.counts, strict=True)}
    assert asked == {number: len(document.relations) for number, document in enumerate(some)}
    assert sum(int(one.real.sum()) for one in questions) < sum(len(document.words) for document in some)
    heads = [head.address for head in profile(model, some[:2], causal=False)][:3]
    means = mean_activations(model, [document.text for document in some])
    made = effects(model, heads, questions, means)

    def surprise(document: Document) -> float:
        ids = torch.tensor([model.tokenizer.encode(document.text)])  # pyright: ignore[reportOptionalMemberAccess]
        logs = model(ids)[0].log_softmax(-1)
        return -sum(float(logs[closer - 1, ids[0, closer]]) for _, closer, _ in document.relations)

    with torch.no_grad():
        clean = np.array([surprise(document) for document in some])
        assert made.clean == pytest.approx(clean.sum() / sum(asked.values()), abs=1e-5)
        for place, head in enumerate(heads):
            with hw.ablated(model, str(head), "mean", means=means):
                lost = [surprise(document) for document in some] - clean
            assert made.sums[: len(some), place] == pytest.approx(lost, abs=1e-4)


@pytest.fixture(scope="module")
def real() -> Profile:
    return profile(decoder(), documents(40))


def test_heads_that_copying_needs(real: Profile) -> None:
    """Both links of the chain; the duplicate-token head is asked the same, and nothing hangs on it."""
    for address in ("0.0", "1.0"):
        head = real[address].supports[0]
        assert head.rung == "causal"
        assert head.cost is not None
        assert head.bar is not None
        assert head.cost > 1 > head.bar
    idle = real["0.2"].supports[0]
    assert idle.rung == "effective"
    assert idle.cost is not None
    assert idle.cost < 0.2, "what it writes makes the stream longer, and that is all"


def test_two_heads_that_do_the_same_work() -> None:
    """Half each: both are needed, and both are told; without a second one the work would all be one's."""
    model = decoder()
    _, two = model.attention_layers()
    Built(two, 0).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 1.0)
    Built(two, 4).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 1.0)
    made = profile(model, documents(40))
    for address in ("1.0", "1.4"):
        assert (made[address].role, made[address].rung) == ("induction", "causal")
