import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claim import WORDS
from headwise.experiments.claims.checkpointing import CLAIM, Trade, measure, on, trade
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus


def rows(*found):
    return [
        row
        for layers, memory, time in found
        for row in (
            ("memory ratio", layers, [memory - 0.01, memory, memory + 0.01, memory, memory]),
            ("time ratio", layers, Figure.turns([time * (1 + turn / 100) for turn in range(-4, 5)])),
        )
    ]


CASES = {
    "holds": rows((2, 0.7, 1.2), (8, 0.2, 1.3)),
    "depends": rows((2, 0.9, 1.2), (8, 0.2, 1.3)),
    "does not hold": rows((2, 0.9, 1.2), (8, 0.2, 1.0)),
}


def test_memory_at_the_bar_stays_open():
    # One measurement of .79 passed a bar of .8; five between .77 and .81 do not.
    figures = Figures()
    for name, at, values in rows((2, 0.7, 1.3), (8, 0.2, 1.3)):
        figures.add(name, at, values)
    figures.add("memory ratio", 2, [0.79, 0.77, 0.81, 0.8, 0.78])
    assert CLAIM.judge(Figures().add("memory ratio", 2, 0.79).add("time ratio", 2, 1.3)).word == "holds"
    assert str(CLAIM.decide(figures)[1]) == "depends: on the measurement: at 2 layers it stays open"


def test_ratios_of_memory_are_of_one_measurement_each():
    made = Trade(Figure.over([100.0, 200.0]), Figure.over([50.0, 120.0]), Figure.turns([1.3]))
    assert made.memory.values == (0.5, 0.6)


def make_model(layers=4, context=64, **more):
    return Transformer(
        ModelSpec(vocab=31, context=context, layers=layers, attention=AttentionSpec(width=32, heads=4), **more)
    )


@pytest.mark.slow
def test_a_deep_model_keeps_less():
    model = make_model(layers=12)
    ids = torch.randint(31, (32, 64))
    made = trade(model, ids, turns=3, measured=1)
    # Kept: every block's inside. Computed again: the stream between blocks (32·64·32 numbers, 1/4 MB each), one inside.
    assert made.memory.below(0.5)
    assert made.kept.mean > 12 * 32 * 64 * 32 * 4 * 10 / 2**20  # ten tensors of the stream's size a block, at least
    assert not model.checkpointing
    assert all(weight.grad is None for weight in model.parameters())


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(HeadwiseError, match="no output"):
        trade(make_model(output="none"), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(HeadwiseError, match="texts alone"):
        trade(make_model(kind="encoder-decoder"), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.slow
def test_it_measures_and_judges(tmp_path):
    lab = Lab(Store(tmp_path), size=LabSize(width=16, heads=4, context=64, batch=8))
    found = measure(lab, (1, 4), turns=3, measured=2)
    assert list(found.at("time ratio")) == [1, 4]
    assert all(len(figure.values) == 2 for figure in found.at("memory ratio").values())
    assert CLAIM.judge(found)


@pytest.mark.slow
def test_on_a_model():
    model = make_model(context=32)
    text = "the cat sat on the mat and the dog ran " * 30
    model.tokenizer = make_tokenizer("character", Corpus.of([text]))
    found = on(model, text, turns=9, measured=3)
    assert list(found.at("memory ratio")) == [4]
    assert len(found["memory ratio", 4].values) == 3
    assert CLAIM.decide(found)[1].word in WORDS


@pytest.mark.slow
def test_on_an_attached_model():
    transformers = pytest.importorskip("transformers")
    from headwise.attached import attach

    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
    with attach(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))) as model:
        made = trade(model, torch.randint(31, (16, 64)), turns=3, measured=1)
        assert made.memory.below(0.8)
        assert not model.checkpointing
