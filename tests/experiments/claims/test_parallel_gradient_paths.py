import pytest
import torch

from headwise.experiments.claim_tests.parallel_gradient_paths import CLAIM, CONVOLUTION, measure, measure_model
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.gradient_independence import (
    convolution_branches,
    head_branches,
    measure_gradient_independence,
)
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus

HEADS, SHARED = "heads", "heads, shared keys"


def rows(residual, unshared, shared):
    values_by_kind = {HEADS: unshared, SHARED: shared, CONVOLUTION: 0.0}
    return [
        row
        for kind, value in values_by_kind.items()
        for row in (("left over", kind, residual), ("moved by others", kind, value))
    ]


CASES = {"true by construction": rows(1e-16, 1e-15, 0.4), "does not hold": rows(0.1, 0.0, 0.4)}


def test_jacobians_shared_keys_are_reported():
    statistics = StatisticTable()
    for row in CASES["true by construction"]:
        statistics.add(*row)
    assert CLAIM.judge(statistics).detail.endswith(
        "if they share keys, paths are coupled (0.4 of a gradient), by construction too"
    )
    statistics.add("moved by others", HEADS, 0.1)
    assert CLAIM.judge(statistics).word == "does not hold"


def make_model(**fields):
    torch.manual_seed(0)
    spec = ModelSpec(
        vocab=29, context=16, layers=1, kind="encoder", attention=AttentionSpec(width=12, heads=3, **fields)
    )
    return Transformer(spec).double()


def test_heads_of_uniform_attention_jacobian_equals_closed_form():
    """With W_Q = 0 every head attends uniformly: ∂out_t/∂x_s = Σ W_V W_O / T, whatever x is."""
    model = make_model()
    layer = next(model.attention_layers())
    with torch.no_grad():
        layer.qkv.weight_by_head("q").zero_()
    x, out, parts = head_branches(model, layer, torch.randint(29, (1, 5))).run()
    for output, heads in (
        (out, list(layer.heads)),
        *((part, [head]) for part, head in zip(parts, layer.heads, strict=True)),
    ):
        for t, channel in ((0, 0), (3, 7)):
            (grad,) = torch.autograd.grad(output[0, t, channel], x, retain_graph=True)  # (1, T, D)
            expected = torch.stack([head.OV.dense() for head in heads]).sum(0)[:, channel] / 5
            torch.testing.assert_close(grad[0], expected.expand(5, 12))


def test_compare_missing_part_leaves_residual():
    model = make_model()
    complete = head_branches(model, next(model.attention_layers()), torch.randint(29, (1, 5)))

    def without_the_last():
        x, out, parts = complete.run()
        return x, out, parts[:-1]

    incomplete = type(complete)(without_the_last, complete.weights, complete.branch_weights, complete.channel_dim)
    assert measure_gradient_independence(complete)["left over"] < 1e-12
    assert measure_gradient_independence(incomplete)["left over"] > 0.1


def test_compare_shared_keys_couple_heads():
    result = measure_gradient_independence(
        head_branches(model := make_model(kv_heads=1), next(model.attention_layers()), torch.randint(29, (1, 5)))
    )
    assert result["left over"] < 1e-12
    assert result["moved by others"] > 0.1


def test_compare_convolution_reads_own_channels():
    result = measure_gradient_independence(convolution_branches(12, 3, 5))
    assert result["channels read"] == pytest.approx(1 / 3)
    assert result["moved by others"] == 0
    assert result["moved through a loss"] > 0.01


def test_compare_biases_belong_to_heads():
    model = make_model(bias=True, out_bias=True)
    layer = next(model.attention_layers())
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    result = measure_gradient_independence(head_branches(model, layer, torch.randint(29, (1, 5))))
    assert result["moved by others"] < 1e-12


def test_compare_leaves_model_unchanged():
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure_gradient_independence(head_branches(model, next(model.attention_layers()), torch.randint(29, (1, 5))))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_jacobians_experiment_gives_verdict(tmp_path):
    experiment = TrainedModelProvider(ExperimentStore(tmp_path), (0, 1))
    statistics = measure(experiment)
    assert statistics["channels read", "heads"].mean == 1
    assert statistics["channels read", "heads, sliced input"].mean == pytest.approx(1 / 4)
    assert CLAIM.judge(statistics).word == "true by construction"
    assert statistics.to_rows() == measure(experiment).to_rows()


def test_jacobians_given_model_gives_verdict():
    model, text = make_model().float(), "heads look at each other"
    model.tokenizer = make_tokenizer("character", Corpus.of([text]))
    assert CLAIM.judge(measure_model(model, text)).word == "true by construction"
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("shared", "word"), [(4, "true by construction"), (2, "does not hold")])
def test_jacobians_attached_model_gives_verdict(shared, word):
    transformers = pytest.importorskip("transformers")
    from headwise.attached import attach

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": shared}
    config = transformers.LlamaConfig(**sizes, intermediate_size=20, vocab_size=29, max_position_embeddings=16)
    text = "heads look at each other"
    with attach(transformers.LlamaForCausalLM(config), make_tokenizer("character", Corpus.of([text]))) as model:
        assert CLAIM.judge(measure_model(model, text)).word == word
