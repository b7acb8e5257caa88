"""Attached models whose layers accelerate has placed on several devices, and commands with --device."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model.randomize_attention_weights import randomize_attention
from tests.contract.attached_models import TEXTS, TOKENIZER, build_model
from tests.contract.functions import FUNCTIONS
from tests.contract.public_calls import EXPENSIVE, PUBLIC_CALLS
from tests.devices.pretend_device import pretend_device
from tests.devices.test_pretend_device import assert_same, make_model, run
from tests.runner import run_command

IDS = torch.tensor([[3, 5, 7, 9, 11]])


# The modules on the CPU; all others are on the pretend device. Tied weights are on one device.
FIRST_LAYER = {"llama": ("model.layers.0",), "gpt2": ("transformer.h.0",)}
ON_CPU = {
    "llama": ("model.layers.1", "model.norm", "lm_head"),
    "gpt2": ("transformer.h.1", "transformer.ln_f"),
}


def dispatch(model: Any, name: str = "llama") -> Any:
    """Place the second layer on the CPU and the first one on the pretend device, with the hooks of accelerate."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    leaves = [part for part, module in model.named_modules() if not list(module.children())]
    placement = {part: "cpu" if part.startswith(ON_CPU[name]) else "pretend" for part in leaves}
    placement |= dict.fromkeys(ON_CPU[name], "cpu") | dict.fromkeys(FIRST_LAYER[name], "pretend")
    for part, device in placement.items():
        module = model.get_submodule(part).to(device)
        add_hook_to_module(module, AlignDevicesHook(execution_device=torch.device(device)))
    model.tie_weights()
    add_hook_to_module(model, AlignDevicesHook(execution_device=torch.device("pretend"), io_same_device=True))
    model.hf_device_map = placement
    return model


def silenced_logits(attached: Any, ids: Tensor) -> Tensor:
    with attached.heads["0.1,1.2"].silenced(), torch.no_grad():
        return attached(ids)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "forward": lambda attached, ids: attached(ids).detach(),
    "silenced": silenced_logits,
    "pruned": lambda attached, ids: attached.prune("0.1,1.2")(ids).detach(),
    "maps": lambda attached, ids: torch.as_tensor(hw.attention_maps(attached, TEXTS[0]).map("1.1")),
}


@pytest.mark.parametrize("call", CALLS)
def test_attached_model_on_two_devices_equals_cpu(call: str) -> None:
    model = build_model("llama").float().eval()
    model.tie_weights()
    expected = CALLS[call](hw.attach(copy.deepcopy(model), TOKENIZER), IDS)
    with pretend_device():
        attached = hw.attach(dispatch(model), TOKENIZER)
        result = CALLS[call](attached, IDS.to("pretend")).cpu()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def make_dispatched(name: str, *, on_two_devices: bool) -> Any:
    model = build_model(name).float().eval()
    model.tie_weights()
    return hw.attach(dispatch(model, name) if on_two_devices else model, TOKENIZER)


# Functions that take no model, load or train one of their own, or need all weights on one device.
NO_MODEL = {
    "attention", "Mask", "causal", "window", "document_mask", "padding_mask", "per_head", "MultiHeadAttention", "to_torch",
    "from_torch", "train", "recover", "load",
}  # fmt: skip
DISPATCHED_SAMPLE = {
    "profile", "importance, gradient", "importance, resample", "compare_heads", "explain", "scan", "record", "find_heads",
    "find_circuit", "to_native",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function"),
    [
        pytest.param(name, call, marks=() if call in DISPATCHED_SAMPLE and name == "llama" else pytest.mark.slow)
        for name in ON_CPU
        for call in (FUNCTIONS | PUBLIC_CALLS)
        if call not in NO_MODEL | EXPENSIVE
    ],
)
def test_function_on_model_on_two_devices_equals_cpu(name: str, function: str) -> None:
    call = (FUNCTIONS | PUBLIC_CALLS)[function]
    expected = run(call, make_dispatched(name, on_two_devices=False), name)
    with pretend_device():
        result = run(call, make_dispatched(name, on_two_devices=True), name)
    assert_same(result, expected)


def test_training_model_on_two_devices_raises() -> None:
    with pretend_device(), pytest.raises(HeadwiseError, match="on several devices"):
        FUNCTIONS["recover"](make_dispatched("llama", on_two_devices=True), "llama")


@pytest.mark.parametrize("name", ON_CPU)
def test_random_attention_of_model_on_two_devices_changes_all_layers(name: str) -> None:
    with pretend_device():
        attached = make_dispatched(name, on_two_devices=True)
        twin = randomize_attention(attached)
        for layer, other in zip(attached.attention_layers(), twin.attention_layers(), strict=True):
            assert not torch.equal(layer.hook_point.W_O.cpu(), other.hook_point.W_O.cpu())


def test_command_on_device_equals_cpu(tmp_path: Path) -> None:
    make_model("decoder", "cpu").save(tmp_path / "model")
    arguments = ("maps", tmp_path / "model", TEXTS[0], "--heads", "1.1", "--json")
    expected = run_command(*arguments).output
    with pretend_device():
        result = run_command(*arguments, "--device", "pretend")
    assert len(result.output) == pytest.approx(len(expected), rel=0.05)
    assert "not available" in run_command(*arguments, "--device", "cuda:77").error_line
