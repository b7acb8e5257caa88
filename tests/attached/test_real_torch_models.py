"""Attached published torch models, with real weights: same bits, exact heads, silencing, pruning, profile, importance."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from tests.attached.real_torch_models import Anarcii, Sceptr

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def _anarcii_call(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source, target = (
        torch.randint(1, high, size, generator=generator) for high, size in ((25, (3, 40)), (136, (3, 30)))
    )
    source[1, 33:], target[2, 25:] = 0, 0
    return source, target


def _sceptr_call(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 23, (4, 26), generator=generator)
    padding = torch.zeros(4, 26, dtype=torch.bool)
    padding[1, 20:] = padding[3, 23:] = True
    return tokens, torch.arange(26).div(5, rounding_mode="floor").clamp(max=6).expand(4, -1), padding


MODELS: dict[str, tuple[type[nn.Module], Any, int]] = {
    "anarcii": (Anarcii, _anarcii_call, 2 * 4 + 2 * 2 * 4), "sceptr": (Sceptr, _sceptr_call, 3 * 8),
}  # fmt: skip


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_real_model_keeps_every_bit_and_its_heads_add_up(name: str, gradients: bool) -> None:
    build, make_call, heads = MODELS[name]
    model, call = build(), make_call()
    with torch.set_grad_enabled(gradients):
        before = model(*call)
        attached = hw.attach(model)
        assert torch.equal(model(*call), before)
        with hw.record(attached) as recording:
            assert torch.equal(model(*call), before)
        with attached.heads.scaled(1.0):
            assert torch.equal(model(*call), before)
    assert len(attached.heads) == heads
    for layer in attached.attention_layers():
        for address in layer.hook_point.head_addresses:
            head = recording[str(address)]
            real = ~call[2] if name == "sceptr" else slice(None)  # torch leaves out padding of nested tensors
            assert torch.allclose((head.map() @ head.v)[real], head.z[real], atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_real_model_silenced_zeroed_and_pruned_agree(name: str) -> None:
    build, make_call, _ = MODELS[name]
    model = build().double()
    call = make_call()
    attached = hw.attach(model)
    layers = attached.attention_layers()
    selected = [layers[0].hook_point.head_addresses[1], *layers[-1].hook_point.head_addresses[:2]]
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        for address in selected:
            layer = next(layer for layer in layers if layer.hook_point.address == address.layer_address)
            module: Any = zeroed.get_submodule(layer.info.name)
            size = layer.spec.head_dim
            module.out_proj.weight[:, address.head * size : (address.head + 1) * size] = 0
        expected = zeroed(*call)
        with attached.heads.select(selected).silenced():
            assert torch.allclose(model(*call), expected, atol=1e-9)
        small = hw.prune(attached, heads=selected, fold_mean=False)
        assert torch.allclose(small(*call), expected, atol=1e-9)


def test_real_model_profile_and_importance_on_calls() -> None:
    model = Sceptr()

    def loss(model: nn.Module, call: tuple[Tensor, ...]) -> Tensor:
        tokens = call[0]
        is_masked = torch.arange(tokens.shape[1]) % 5 == 2
        logits = model(tokens.masked_fill(is_masked, 1), *call[1:])  # 1 is the mask token
        return F.cross_entropy(logits[:, is_masked].flatten(0, 1), (tokens[:, is_masked] - 3).flatten())

    calls = [_sceptr_call(seed) for seed in range(4)]
    attached = hw.attach(model, forward=loss, example=calls[0])
    profile = hw.profile(attached, calls)
    assert profile.metadata["tokens"] == sum(int((~padding).sum()) for _, _, padding in calls)
    importance = hw.importance(attached, calls, heads="0.*")
    with torch.no_grad(), attached.heads["0.3"].silenced():
        lost = sum(float(loss(model, call)) for call in calls) / 4
    with torch.no_grad():
        clean = sum(float(loss(model, call)) for call in calls) / 4
    assert importance["0.3"].importance == pytest.approx(lost - clean, abs=1e-5)
