"""Calls on the pretend device that the list of public functions does not cover."""

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.ui.live_session import LiveSession
from tests.contract.attached_models import TEXTS
from tests.contract.functions import FUNCTIONS, flatten_numbers
from tests.contract.layers import LAYERS, MODELS, WIDTH, make_layer, randomize
from tests.contract.public_calls import PUBLIC_CALLS
from tests.devices.pretend_device import pretend_device
from tests.devices.test_pretend_device import make_model

IDS = torch.tensor([[3, 5, 7, 9, 11], [4, 6, 8, 10, 12]])


@pytest.mark.parametrize("float64", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("basis", ["given", "balanced", "random"])
def test_quantize_on_device_equals_cpu(basis: Any, float64: bool) -> None:
    expected = hw.quantize(make_model("decoder", "cpu"), 8, basis=basis)(IDS)
    with pretend_device(float64=float64):
        result = hw.quantize(make_model("decoder", "pretend"), 8, basis=basis)(IDS.to("pretend")).cpu()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_generate_sampled_same_seed_gives_same_tokens(name: str) -> None:
    with pretend_device(float64=False):
        model = make_model(name, "pretend")
        prompt = IDS[:1].to("pretend")
        tokens = [model.generate(prompt, max_new_tokens=6, temperature=1.0, seed=seed) for seed in (4, 4, 5)]
        lists = [row.tolist() if isinstance(row, torch.Tensor) else row for row in tokens]
    assert lists[0] == lists[1]
    assert lists[0] != lists[2]


@pytest.mark.parametrize("name", ["decoder", "llama", "bert"])
def test_forward_ids_on_other_device_raises(name: str) -> None:
    with pretend_device():
        model = make_model(name, "pretend")
        with pytest.raises(HeadwiseError, match="the tensor is on cpu, the model on pretend:0"):
            model(IDS)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_variant_on_device_equals_cpu(name: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        layer = make_layer(LAYERS[name]).float().to(device)
        x = torch.linspace(-1, 1, 2 * 5 * WIDTH).sin().reshape(2, 5, WIDTH).to(device).requires_grad_()
        source = torch.linspace(-1, 1, 2 * 7 * 13).cos().reshape(2, 7, 13).to(device)
        out = layer(x, source) if LAYERS[name].kv_width != WIDTH else layer(x, mask=hw.causal())
        out.square().sum().backward()
        gradients = [x.grad, *(weight.grad for weight in layer.parameters())]
        return [tensor.detach().cpu() for tensor in (out, *gradients) if tensor is not None]

    expected = run("cpu")
    with pretend_device(float64=False):
        torch.testing.assert_close(run("pretend"), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_model_variant_on_device_equals_cpu(name: str) -> None:
    """Logits with padding, with a silenced head, and decoded with caches."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = hw.Transformer(MODELS[name]).eval()
        randomize(model)
        model.to(device)
        ids, inputs = IDS.to(device), {"source": IDS.to(device)} if model.spec.kind == "encoder-decoder" else {}
        mask = torch.tensor([[False, False, True, True, True], [True] * 5]).to(device)
        with torch.no_grad():
            results = [model(ids, attention_mask=mask, **inputs)[mask]]
            head = next(address for address in model.heads.addresses if address.stack != "cross")
            with model.heads[head].silenced():
                results.append(model(ids, **inputs))
            if model.spec.kind == "decoder":
                cache = model.cache()
                results += [model(ids[:, t : t + 1], cache=cache) for t in range(ids.shape[1])]
        return [result.cpu() for result in results]

    expected = run("cpu")
    with pretend_device(float64=False):
        torch.testing.assert_close(run("pretend"), expected, rtol=1e-3, atol=1e-3)


def test_save_on_device_reopens_same_weights(tmp_path: Any) -> None:
    with pretend_device(float64=False):
        model = make_model("decoder", "pretend")
        model.save(tmp_path / "model")
        expected = model(IDS.to("pretend")).cpu()
    torch.testing.assert_close(hw.load(tmp_path / "model").eval()(IDS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_blockwise_backward_on_device_equals_cpu(dropout: float) -> None:
    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        layer = hw.MultiHeadAttention(width=16, heads=4, dropout=dropout, backend="blockwise").to(device)
        x = torch.linspace(-1, 1, 2 * 6 * 16).reshape(2, 6, 16).to(device).requires_grad_()
        torch.manual_seed(1)
        layer(x).square().sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    with pretend_device(float64=False):
        result = gradient("pretend")
    torch.testing.assert_close(result, gradient("cpu"), rtol=1e-4, atol=1e-5)


POLICIES = {
    "streaming": hw.CachePolicy(sink_tokens=1, window=3),
    "8 bits": hw.CachePolicy(bits=8),
    "4 bits, streaming": hw.CachePolicy(bits=4, sink_tokens=1, window=3),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_per_head_cache_on_device_equals_cpu(policy: str) -> None:
    def generated(device: str) -> torch.Tensor:
        model = make_model("decoder", device)
        cache = model.cache(hw.plan_pruning(model, cache={"*.0": POLICIES[policy]}))
        return model.generate(IDS.to(device), max_new_tokens=6, cache=cache).cpu()

    expected = generated("cpu")
    with pretend_device(float64=False):
        assert torch.equal(generated("pretend"), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_model_on_device_equals_cpu_after_loading(bits: Any, tmp_path: Any) -> None:
    with pretend_device(float64=False):
        hw.quantize(make_model("decoder", "pretend"), bits).save(tmp_path / "small")
        result = hw.load(tmp_path / "small").eval().to("pretend")(IDS.to("pretend")).cpu()
    torch.testing.assert_close(result, hw.load(tmp_path / "small").eval()(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("float64", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("relative_to_mean", [False, True])
@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_explain_on_device_equals_cpu(name: str, relative_to_mean: bool, float64: bool) -> None:
    def explained(device: str) -> torch.Tensor:
        attribution = hw.explain(
            make_model(name, device), IDS[0].to(device), "1.1", query=4, key=2, relative_to_mean=relative_to_mean
        )
        assert attribution.is_complete
        return attribution.pair_scores.cpu()

    expected = explained("cpu")
    with pretend_device(float64=float64):
        torch.testing.assert_close(explained("pretend"), expected, rtol=1e-4, atol=1e-5)


def test_save_pruned_attached_model_on_device_reopens_same_logits(tmp_path: Any) -> None:
    with pretend_device(float64=False):
        small = hw.prune(make_model("llama", "pretend"), heads="0.1", fold_mean=False).eval()
        small.save(tmp_path / "small")
        expected = small(IDS.to("pretend")).cpu()
        small.detach()
        del small
        gc.collect()  # a handle that is dropped restores its model, which needs the device
    torch.testing.assert_close(hw.load(tmp_path / "small").eval()(IDS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_training_step_on_device_equals_cpu(name: str) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        model = make_model(name, device)
        model(IDS.to(device)).log_softmax(-1)[..., 3].sum().backward()
        return [weight.grad.cpu() for weight in model.parameters() if weight.grad is not None]

    expected = gradients("cpu")
    with pretend_device(float64=False):
        result = gradients("pretend")
    assert len(result) == len(expected) > 0
    for gradient, want in zip(result, expected, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-4)


def test_profile_of_images_on_device_equals_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}

    def metrics(device: str) -> dict[str, Any]:
        torch.manual_seed(0)
        config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=2, **sizes)
        model = hw.attach(transformers.ViTForImageClassification(config).eval().to(device))
        pictures = torch.linspace(0, 1, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16).sin()
        profile = hw.profile(model, list(pictures), causal=False)
        return {name: profile.metric(name) for name in profile.accumulator.fields}

    expected = metrics("cpu")
    with pretend_device(float64=False):
        result = metrics("pretend")
    for name, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(result[name]), torch.tensor(values), rtol=1e-3, atol=1e-4, equal_nan=True
        )


def test_live_session_on_device_equals_cpu() -> None:
    def run(device: str) -> list[float]:
        model = make_model("decoder", device)
        session = LiveSession(model)
        data: list[Any] = [
            session.predict(TEXTS[0], ["1.1"]), session.sentence_data(TEXTS[0]), session.explain(TEXTS[0], "1.1", 4, 2, True)
        ]  # fmt: skip
        return flatten_numbers(data)

    expected = run("cpu")
    assert expected
    with pretend_device(float64=False):
        np.testing.assert_allclose(run("pretend"), expected, rtol=2e-3, atol=2e-4)


def test_shift_on_pretend_device_equals_cpu() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = hw.Transformer(MODELS["decoder, rotary"]).eval().to(device)
        steering = hw.Steering({"1.2": torch.ones(6)}, strength=2.0).for_model(model)
        with steering.applied(model), torch.no_grad():
            hooked = model(torch.tensor([[3, 5, 7]], device=device))
        folded = hw.fold_steering(model, steering)(torch.tensor([[3, 5, 7]], device=device)).detach()
        return [hooked.cpu(), folded.cpu()]

    expected = run("cpu")
    with pretend_device(float64=False):
        torch.testing.assert_close(run("pretend"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("float64", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_gradient_importance_with_recomputed_blocks_equals_cpu(
    name: str, float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are recomputed in the backward pass, which runs in a thread of autograd."""
    expected = hw.importance(make_model(name, "cpu"), TEXTS, ranking="gradient").mean
    monkeypatch.setattr("headwise.analysis.ablation.gradient_memory.MIN_GRAPH_BYTES", 0)
    monkeypatch.setattr("headwise.analysis.ablation.gradient_memory.GRAPH_FRACTION", 1e-9)
    with pretend_device(float64=float64):
        result = hw.importance(make_model(name, "pretend"), TEXTS, ranking="gradient").mean
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_training_step_with_checkpointing_and_dropout_equals_cpu() -> None:
    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        spec = replace(MODELS["decoder, rotary"], dropout=0.3)
        model = hw.Transformer(spec).to(device).train()
        model.checkpointing = True
        torch.manual_seed(1)
        model(IDS.to(device)).log_softmax(-1)[..., 3].sum().backward()
        return torch.cat([weight.grad.flatten().cpu() for weight in model.parameters() if weight.grad is not None])

    expected = gradient("cpu")
    with pretend_device(float64=False):
        torch.testing.assert_close(gradient("pretend"), expected, rtol=1e-4, atol=1e-5)


def test_recorded_torch_attention_with_dropout_keeps_random_numbers() -> None:
    """The listener sees z of the forward pass, with the same dropout, and later random numbers are unchanged."""

    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        block = torch.nn.TransformerEncoderLayer(12, 2, 16, dropout=0.3, batch_first=True).to(device).train()
        x = torch.linspace(-1, 1, 2 * 5 * 12).reshape(2, 5, 12).to(device)
        attached = hw.attach(block)
        torch.manual_seed(1)
        expected, next_numbers = block(x), torch.rand(3, device=device)
        torch.manual_seed(1)
        with hw.record(attached) as recording:
            assert torch.equal(block(x), expected)
        assert torch.equal(torch.rand(3, device=device), next_numbers)
        z = recording["0.1"].z.detach().cpu()
        attached.detach()
        return z

    expected = run("cpu")
    with pretend_device(float64=False):
        torch.testing.assert_close(run("pretend"), expected, rtol=1e-4, atol=1e-5)


SEEDED: dict[str, Any] = {
    "generate": lambda model: model.generate(IDS[:1].to("pretend"), max_new_tokens=3, temperature=1.0, seed=4),
    "untrained": lambda model: model.untrained(3),
    "train": lambda model: PUBLIC_CALLS["train"](model, "decoder"),
    "learn_gates": lambda model: FUNCTIONS["learn_gates"](model, "decoder"),
    "prune": lambda model: hw.prune(model, heads="0.1", fold_mean=False),
}


@pytest.mark.parametrize("name", ["decoder", "llama"])
@pytest.mark.parametrize("call", SEEDED)
def test_seeded_call_keeps_random_numbers_of_device_and_host(name: str, call: str) -> None:
    def draw() -> list[float]:
        return [*torch.rand(2).tolist(), *torch.rand(2, device="pretend").tolist()]

    with pretend_device(float64=False):
        model = make_model(name, "pretend")
        torch.manual_seed(2)
        expected = draw()
        torch.manual_seed(2)
        result = SEEDED[call](model)
        assert draw() == expected
        del result
        gc.collect()
