"""Attached models whose layers accelerate has placed on several devices, and commands with --device."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.contract.attached_models import TEXTS, TOKENIZER, build_model
from tests.devices.pretend_device import pretend_device
from tests.devices.test_pretend_device import make_model
from tests.runner import run_command

IDS = torch.tensor([[3, 5, 7, 9, 11]])


def dispatch(model: Any) -> Any:
    """Place the second layer on the CPU and all else on the pretend device, with the hooks that accelerate adds."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    parts = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")
    placement = {f"model.{part}": "cpu" if part == "layers.1" else "pretend" for part in parts} | {"lm_head": "pretend"}
    for name, device in placement.items():
        part = model.get_submodule(name).to(device)
        add_hook_to_module(part, AlignDevicesHook(execution_device=torch.device(device)))
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


def test_command_on_device_equals_cpu(tmp_path: Path) -> None:
    make_model("decoder", "cpu").save(tmp_path / "model")
    arguments = ("maps", tmp_path / "model", TEXTS[0], "--heads", "1.1", "--json")
    expected = run_command(*arguments).output
    with pretend_device():
        result = run_command(*arguments, "--device", "pretend")
    assert len(result.output) == pytest.approx(len(expected), rel=0.05)
    assert "not available" in run_command(*arguments, "--device", "cuda:77").error_line
