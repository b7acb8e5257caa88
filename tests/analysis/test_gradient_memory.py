"""Memory of gradients with respect to heads: limited batches, recomputed blocks, and equal numbers."""

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation import gradient_memory
from headwise.analysis.ablation.gradient_memory import GradientMemoryPlan, frozen_weights
from headwise.compression.l0_gates import learn_gates
from headwise.text.build_tokenizers import byte_tokenizer

TEXTS = [
    "to be or not to be that is the question",
    "whether tis nobler in the mind",
    "to suffer",
    "the slings and arrows",
]


@pytest.fixture(autouse=True)
def no_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the limit to tiny models too."""
    monkeypatch.setattr("headwise.analysis.ablation.gradient_memory.MIN_GRAPH_BYTES", 0)


def make_native() -> hw.Transformer:
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=24, heads=6, head_dim=4, kv_heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=64, layers=3, attention=attention))
    model.tokenizer = byte_tokenizer()
    return model.eval()


def make_attached(model_class: str = "Llama") -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if model_class == "T5":
        sizes = {"d_model": 24, "d_kv": 4, "num_heads": 6, "num_layers": 2, "d_ff": 40, "vocab_size": 257}
        sizes |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        return hw.attach(
            transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval(), byte_tokenizer()
        )
    config = getattr(transformers, f"{model_class}Config")(**sizes)
    return hw.attach(getattr(transformers, f"{model_class}ForCausalLM")(config).eval(), byte_tokenizer())


MODELS = {
    "native": make_native,
    "llama": make_attached,
    "pruned": lambda: make_attached().prune("0.1,1.*"),
    "half": lambda: _in_bfloat16(make_attached()),
}


def _in_bfloat16(attached: Any) -> Any:
    attached.model.to(torch.bfloat16)
    return attached


def limit_to(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    plan = GradientMemoryPlan(max_tokens)
    monkeypatch.setattr(GradientMemoryPlan, "measure", classmethod(lambda cls, *args: plan))


@pytest.mark.parametrize("ranking", ["gradient", "attribution"])
@pytest.mark.parametrize("name", MODELS)
def test_importance_recomputed_blocks_equal_stored(name: str, ranking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token fits: every text is a batch of its own, and its blocks run again in the backward pass."""
    model = MODELS[name]()
    limit_to(monkeypatch, 10**6)
    stored = hw.importance(model, TEXTS, ranking=ranking, check_heads=0)
    limit_to(monkeypatch, 1)
    recomputed = hw.importance(model, TEXTS, ranking=ranking, check_heads=0)
    tolerance = 0.05 if name == "half" else 1e-4
    np.testing.assert_allclose(recomputed.mean, stored.mean, rtol=0, atol=tolerance * np.abs(stored.mean).max())
    assert all(weight.requires_grad for weight in model.parameters())


def test_importance_gradient_equals_finite_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to(monkeypatch, 1)
    model = make_native().double()
    row = hw.importance(model, TEXTS[:1], ranking="gradient")["1.2"]
    ids = torch.tensor([byte_tokenizer().encode(TEXTS[0])])
    step = 1 / 64  # a gate is a float32 number

    def loss(gate: float) -> float:
        with torch.no_grad():
            logits = model(ids, gates={"1.2": gate})
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))

    assert row.importance == pytest.approx(abs(loss(1 + step) - loss(1 - step)) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("name", ["native", "llama"])
def test_learn_gates_in_parts_equal_one_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    limit_to(monkeypatch, 10**6)
    at_once = learn_gates(model, TEXTS, keep=0.5, steps=3, batch=4)
    limit_to(monkeypatch, 1)
    in_parts = learn_gates(model, TEXTS, keep=0.5, steps=3, batch=4)
    np.testing.assert_allclose(list(in_parts.values()), list(at_once.values()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["native", "llama"])
def test_recompute_blocks_stores_inputs_of_blocks_only(name: str) -> None:
    """Stored bytes per token: with recomputed blocks at most a third, and the plan follows from the measurement."""
    model, ids = MODELS[name](), torch.randint(200, (1, 48))
    stored: dict[bool, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    for recompute in (False, True):
        storages: dict[int, int] = {}

        def count(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        gates = {"0.0": torch.ones((), requires_grad=True)}
        with frozen_weights(model), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            if recompute:
                with model.recompute_blocks():
                    output = model(ids, gates=gates, hidden=True)
            else:
                output = model(ids, gates=gates, hidden=True)
        assert output.requires_grad
        stored[recompute] = sum(storages.values())
    assert stored[True] < stored[False] / 3
    with frozen_weights(model):
        plan = GradientMemoryPlan.measure(model, ids)
    budget = gradient_memory.GRAPH_FRACTION * sum(weight.nbytes for weight in model.parameters())
    assert plan.max_tokens == pytest.approx(budget / (stored[False] / 48), rel=0.3)


def test_recompute_blocks_restores_forward_after_error() -> None:
    attached = make_attached()
    before = [dict(module.__dict__) for module in attached.model.modules()]
    with pytest.raises(KeyError), attached.recompute_blocks():
        raise KeyError
    assert [dict(module.__dict__) for module in attached.model.modules()] == before
