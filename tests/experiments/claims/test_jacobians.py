import pytest
import torch

from headwise.experiments.claims.jacobians import CLAIM, CONVOLUTION, measure, on
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab
from headwise.experiments.gradient_paths import compare, convolution, heads_of
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus

HEADS, SHARED = "heads", "heads, shared keys"


def rows(left, alone, shared):
    moved = {HEADS: alone, SHARED: shared, CONVOLUTION: 0.0}
    return [row for kind, by in moved.items() for row in (("left over", kind, left), ("moved by others", kind, by))]


CASES = {"true by construction": rows(1e-16, 1e-15, 0.4), "does not hold": rows(0.1, 0.0, 0.4)}


def test_shared_keys_are_told():
    figures = Figures()
    for row in CASES["true by construction"]:
        figures.add(*row)
    assert CLAIM.judge(figures).on.endswith(
        "where they share keys, paths meet (0.4 of a gradient), by construction too"
    )
    figures.add("moved by others", HEADS, 0.1)
    assert CLAIM.judge(figures).word == "does not hold"


def make_model(**fields):
    torch.manual_seed(0)
    spec = ModelSpec(
        vocab=29, context=16, layers=1, kind="encoder", attention=AttentionSpec(width=12, heads=3, **fields)
    )
    return Transformer(spec).double()


def test_the_jacobian_of_an_even_look():
    """With W_Q = 0 every head looks everywhere alike: ∂out_t/∂x_s = Σ W_V W_O / T, whatever x is."""
    model = make_model()
    layer = next(model.attention_layers())
    with torch.no_grad():
        layer.read.weight("q").zero_()
    x, out, parts = heads_of(model, layer, torch.randint(29, (1, 5))).run()
    for made, heads in (
        (out, list(layer.heads)),
        *((part, [head]) for part, head in zip(parts, layer.heads, strict=True)),
    ):
        for t, channel in ((0, 0), (3, 7)):
            (slope,) = torch.autograd.grad(made[0, t, channel], x, retain_graph=True)  # (1, T, D)
            want = torch.stack([head.OV.dense() for head in heads]).sum(0)[:, channel] / 5
            torch.testing.assert_close(slope[0], want.expand(5, 12))


def test_a_part_that_is_missing_is_found():
    model = make_model()
    whole = heads_of(model, next(model.attention_layers()), torch.randint(29, (1, 5)))

    def without_the_last():
        x, out, parts = whole.run()
        return x, out, parts[:-1]

    broken = type(whole)(without_the_last, whole.weights, whole.own, whole.channels)
    assert compare(whole)["left over"] < 1e-12
    assert compare(broken)["left over"] > 0.1


def test_shared_keys_are_where_paths_meet():
    made = compare(heads_of(model := make_model(kv_heads=1), next(model.attention_layers()), torch.randint(29, (1, 5))))
    assert made["left over"] < 1e-12
    assert made["moved by others"] > 0.1


def test_a_convolution_reads_its_own_channels():
    made = compare(convolution(12, 3, 5))
    assert made["channels read"] == pytest.approx(1 / 3)
    assert made["moved by others"] == 0
    assert made["moved through a loss"] > 0.01


def test_biases_belong_to_their_heads():
    model = make_model(bias=True, out_bias=True)
    layer = next(model.attention_layers())
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    made = compare(heads_of(model, layer, torch.randint(29, (1, 5))))
    assert made["moved by others"] < 1e-12


def test_nothing_is_left_changed():
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compare(heads_of(model, next(model.attention_layers()), torch.randint(29, (1, 5))))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_measures_and_judges(tmp_path):
    lab = Lab(Store(tmp_path), (0, 1))
    found = measure(lab)
    assert found["channels read", "heads"].mean == 1
    assert found["channels read", "heads, sliced input"].mean == pytest.approx(1 / 4)
    assert CLAIM.judge(found).word == "true by construction"
    assert found.to_rows() == measure(lab).to_rows()


def test_on_a_model():
    model, text = make_model().float(), "heads look at each other"
    model.tokenizer = make_tokenizer("character", Corpus.of([text]))
    assert CLAIM.judge(on(model, text)).word == "true by construction"
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("shared", "word"), [(4, "true by construction"), (2, "does not hold")])
def test_on_an_attached_model(shared, word):
    transformers = pytest.importorskip("transformers")
    from headwise.attached import attach

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": shared}
    config = transformers.LlamaConfig(**sizes, intermediate_size=20, vocab_size=29, max_position_embeddings=16)
    text = "heads look at each other"
    with attach(transformers.LlamaForCausalLM(config), make_tokenizer("character", Corpus.of([text]))) as model:
        assert CLAIM.judge(on(model, text)).word == word
