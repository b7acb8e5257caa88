"""Copies from the device to the host: a few per batch and layer of a profile, one per token of generation."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.host_copy_queue import HostCopyQueue
from tests.contract.attached_models import TEXTS
from tests.contract.functions import GOLD
from tests.devices.pretend_device import DeviceState, pretend_device
from tests.devices.test_pretend_device import make_model

MAX_PER_CALL, FORWARD = 4, "attached/transformers_forward.py"
PROFILES = {
    "texts": {"relations": False},
    "relations": {"relations": GOLD},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder", "texts"),
        ("decoder", "relations"),
        ("llama", "texts"),
        pytest.param("llama", "relations", marks=pytest.mark.slow),
    ],
)
def test_profile_copies_at_most_four_times_per_batch_and_layer(name: str, kind: str) -> None:
    with pretend_device(float64=False) as device, ExitStack() as stack:
        model, calls = make_model(name, "pretend"), []
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(calls.append))
        device.reset_counts()
        hw.profile(model, TEXTS, causal=False, **PROFILES[kind])
        # transformers reads the attention mask once per forward pass, however many layers follow; there are two here
        own = device.transfers - sum(count for site, count in device.sites.items() if site.startswith(FORWARD))
    assert calls
    assert own <= MAX_PER_CALL * len(calls), device.sites


def copies_of_generation(device: DeviceState, model: Any, tokens: int, **options: Any) -> int:
    device.reset_counts()
    ids = model.generate(torch.tensor([[3, 4, 5]]).to("pretend"), max_new_tokens=tokens, **options)
    assert ids.shape[1] == 3 + tokens
    return device.transfers


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("decoder", None),
        ("decoder", hw.CachePolicy(sink_tokens=1, window=4)),
        ("decoder", hw.CachePolicy(bits=8)),
        ("llama", None),
    ],
    ids=str,
)
def test_generate_copies_once_per_token(name: str, policy: hw.CachePolicy | None) -> None:
    with pretend_device(float64=False) as device:
        model, options = make_model(name, "pretend"), {}
        counts = []
        for tokens in (4, 10):
            if policy is not None:
                options = {"cache": model.cache(hw.plan_pruning(model, cache={"*.0": policy}))}
            counts.append(copies_of_generation(device, model, tokens, **options))
    assert counts[1] - counts[0] <= 6


def test_host_copy_queue_many_tensors_uses_one_copy_per_dtype() -> None:
    with pretend_device() as device:
        queue, results = HostCopyQueue(), {}
        values = [torch.arange(6.0).reshape(2, 3), torch.tensor([[7, 8]]), torch.tensor(9.0), torch.zeros(0, 2)]
        for index, value in enumerate(values):
            queue.copy_then_call([value.to("pretend")], lambda copied, i=index: results.update({i: copied}))
        assert not results
        device.reset_counts()
        queue.flush()
        assert device.transfers == 2
    for index, value in enumerate(values):
        assert torch.equal(results[index], value), index
        assert results[index].device.type == "cpu"
