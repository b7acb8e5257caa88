"""Farther back than the window: heads built by hand score what their closed forms say."""

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.metrics.long_offsets import KEEPS, LENGTH, TEXTS, FarPlaces, long_texts, mass_beyond
from headwise.analysis.roles.prompt_roles import PROMPTED, could_stream, with_choices
from headwise.analysis.roles.roles import judge, make_cases
from headwise.model import Transformer
from headwise.spec import AttentionSpec, Keeps, ModelSpec, Rotary
from headwise.text.build_tokenizers import bpe_tokenizer, word_tokenizer
from tests.analysis.constructed_word_models import Worded, back, to_place
from tests.analysis.test_false_alarms import GAINS, pieces, untrained

WORDS = [f"w{i}" for i in range(20)]
PLACE, OFFSET = 9, 45
T = np.arange(LENGTH)


def texts() -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, 14)) for _ in range(60)]


def measured(built: Worded) -> tuple[Tally, FarPlaces]:
    tally, measure = Tally(built.heads), FarPlaces(texts())
    with torch.no_grad():
        assert measure.run(built.model, tally) == ""
    return tally, measure


@pytest.mark.parametrize("beta", [3.0, 6.0, 90.0])
def test_heads_that_look_far(beta: float) -> None:
    """e^β / (e^β + i) in a row that sees i others; one in all visible is the baseline."""
    built = Worded(WORDS, heads=5, places=LENGTH)
    eye, e = torch.eye(built.V), np.exp(beta)
    built.head("0.0", places=back(OFFSET, beta, LENGTH), write=eye)
    built.head("0.1", places=to_place(PLACE, beta, LENGTH), write=eye)
    built.head("0.2", places=to_place(0, beta, LENGTH), write=eye)
    built.head("0.3", write=eye)
    built.head("0.4", places=back(1, beta, LENGTH), write=eye)
    tally, measure = measured(built)
    far, fixed, beyond = (tally.mean(name) for name in ("far offset", "fixed place", "beyond"))
    assert measure.chosen["far offset"][0] == OFFSET
    assert measure.chosen["fixed place"][1] == PLACE
    rows = T[OFFSET + 1 :]  # whose target is not the first token
    assert far[0] == pytest.approx(np.mean(e / (e + rows)), rel=1e-5)
    assert tally.mean("far offset valued")[0] == pytest.approx(far[0], rel=1e-5)
    assert tally.mean("far offset null")[0] == pytest.approx(np.mean(1 / (rows + 1)), rel=1e-6)
    rows = T[PLACE + WINDOW :]
    assert fixed[1] == pytest.approx(np.mean(e / (e + rows)), rel=1e-5)
    assert tally.mean("fixed place null")[1] == pytest.approx(np.mean(1 / (rows + 1)), rel=1e-6)
    for name in ("far offset", "fixed place"):
        assert tally.mean(name)[3] == pytest.approx(tally.mean(f"{name} null")[3], rel=1e-5), "alike everywhere"
        assert tally.mean(name)[2] <= tally.mean(name)[3], "a sink"
    rows = T[KEEPS.tokens(LENGTH) :]
    forgotten = rows + 1 - KEEPS.tokens(LENGTH)
    assert beyond[3] == pytest.approx(np.mean(forgotten / (rows + 1)), rel=1e-5)
    little = pytest.approx(np.mean(forgotten / (e + rows)), rel=1e-5, abs=1e-30)
    assert (beyond[2], beyond[4]) == (little, little)
    found, _ = judge(make_cases(tally, None, roles=PROMPTED), tally.heads)
    told = [{one.role: one.rung for one in some if one.stands} for some in found]
    enough = beta > 5
    assert told == [
        {"far offset": "effective"} if enough else {},
        {"fixed place": "effective"} if enough else {},
        {},
        {},
        {},
    ]
    if enough:
        assert with_choices(found, {"chosen": measure.chosen})[0][0].detail == str(OFFSET)
    streams = could_stream(tally)
    assert streams is not None
    assert streams.tolist() == [False, False, beta > 50, False, beta > 50], "at a β of 6 there is .08 beyond"


def test_an_encoder_looks_ahead_and_keeps_no_cache() -> None:
    built = Worded(WORDS, heads=2, places=LENGTH, kind="encoder")
    built.head("0.0", places=90 * torch.eye(LENGTH).roll(40, 1).triu(), write=torch.eye(built.V))
    built.head("0.1", places=to_place(100, places=LENGTH), write=torch.eye(built.V))
    tally, measure = measured(built)
    assert measure.chosen["far offset"][0] == -40
    assert measure.chosen["fixed place"][1] == 100
    assert tally.mean("far offset")[0] == tally.mean("fixed place")[1] == pytest.approx(1, abs=1e-6)
    assert np.isnan(tally.mean("beyond")).all()
    assert could_stream(tally) is None


def test_a_window_of_their_own_hides_it() -> None:
    """Layers of one model may see differently far: only those that see a whole text are asked."""
    attention = AttentionSpec(width=12, heads=2, rotary=Rotary(), window=16)
    model = Transformer(ModelSpec(vocab=24, context=LENGTH, layers=1, attention=attention, positions="none"))
    model.tokenizer = word_tokenizer(WORDS)
    tally = Tally(2)
    with torch.no_grad():
        assert FarPlaces(texts()).run(model, tally) == ""
    assert all(np.isnan(tally.mean(name)).all() for name in ("far offset", "fixed place", "beyond"))
    assert judge(make_cases(tally, None, roles=PROMPTED), 2)[0] == [[], []]


def test_what_is_read() -> None:
    built = Worded(WORDS, heads=1, places=LENGTH)
    made = long_texts(built.model, texts())
    assert (len(made), {len(ids) for ids in made}) == (TEXTS, {LENGTH})
    assert made != long_texts(built.model, texts(), seed=1)
    assert long_texts(Worded(WORDS, heads=1, places=LENGTH - 1).model, texts()) == []
    assert long_texts(built.model, ["w1 w2"]) == []
    assert "no room, or no text" in FarPlaces(["w1 w2"]).run(built.model, Tally(1))


def test_what_is_forgotten() -> None:
    """From the fifth token on up to the fourth last, counted by hand."""
    shares = torch.arange(1.0, 11.0).expand(2, 10)  # (rows, S)
    assert mass_beyond(shares, [9, 6], Keeps(first=2, last=4)).tolist() == [3 + 4 + 5 + 6, 3]


def alarms(seeds: range, gain: float, kind: str, size: tuple[int, int, int]) -> list[str]:
    given, found = texts(), []
    tokenizer = pieces() if kind == "pieces" else bpe_tokenizer(given * 4, size=300)
    for seed in seeds:
        model = untrained(seed, gain, tokenizer, *size)
        tally = Tally(len(model.spec.addresses))
        with torch.no_grad():
            assert FarPlaces(None if kind == "pieces" else given).run(model, tally, seed) == ""
        supports, _ = judge(make_cases(tally, None, roles=PROMPTED), tally.heads)
        found += [f"{one.role}, {one.rung}" for some in supports for one in some if one.stands]
    return found


def test_sharp_heads_that_learned_nothing_have_no_role() -> None:
    assert alarms(range(400, 401), 4.0, "pieces", (3, 6, 48)) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [(3, 6, 48), (2, 16, 64)])
@pytest.mark.parametrize("kind", ["pieces", "bytes"])
@pytest.mark.parametrize("gain", GAINS)
def test_heads_that_learned_nothing(gain: float, kind: str, size: tuple[int, int, int]) -> None:
    found = alarms(range(400, 412), gain, kind, size)
    print(f"gain {gain:g}, {kind}, {size}: {found}")
    assert found == []
