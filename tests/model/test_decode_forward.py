"""A decode step of plain blocks runs without module calls. It equals the modules and notices every change of the model."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.kernels import BACKENDS
from headwise.kernels.matmul_tuner import AUTOTUNED, MatmulTuner
from headwise.model.decode_forward import DecodeForward

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
ATTENTION = hw.AttentionSpec(width=20, heads=4, kv_heads=2, head_dim=6, rotary=hw.Rotary())
ATTENTIONS = {
    "grouped": ATTENTION,
    "interleaved rotation": replace(ATTENTION, rotary=hw.Rotary(layout="interleaved")),
    "partial rotation": replace(ATTENTION, rotary=hw.Rotary(dims=4)),
    "no positions": replace(ATTENTION, rotary=None),
    "alibi": replace(ATTENTION, rotary=None, alibi=True),
    "biases": replace(ATTENTION, bias=True, out_bias=True),
    "wide values": replace(ATTENTION, value_dim=10),
    "sink": replace(ATTENTION, softmax="sink"),
    "softcap": replace(ATTENTION, softcap=3.0),
    "window": replace(ATTENTION, window=3),
    "gates": replace(ATTENTION, gated=True),
    "normalized queries": replace(ATTENTION, qk_norm=hw.QKNorm()),
}
MODELS: dict[str, dict] = {
    "plain": {},
    "rms, swiglu": {"norm": "rms", "activation": "swiglu"},
    "rms plus one, geglu": {"norm": "rms_plus_one", "activation": "geglu", "mlp_bias": False},
    "parallel": {"norm_placement": "parallel"},
    "sandwich": {"norm_placement": "sandwich"},
    "pruned heads": {"kept_heads": {"0": (0, 2, 3), "1": ()}},
}


def make_model(attention: hw.AttentionSpec = ATTENTION, *, seed: int = 0, **fields: object) -> hw.Transformer:
    torch.manual_seed(seed)
    spec = hw.ModelSpec(vocab=11, context=16, layers=2, attention=attention, mlp_width=26, **fields)  # pyright: ignore
    model = hw.Transformer(spec).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model.matmul_tuner = MatmulTuner(AUTOTUNED)
    return model


def decode(model: hw.Transformer, ids: Tensor = IDS, **options: object) -> Tensor:
    """Return the logits of all tokens, computed one token at a time: (B, T, V)."""
    cache = model.cache()
    return torch.cat([model(token, cache=cache, **options) for token in ids.split(1, 1)], 1)  # pyright: ignore


@contextmanager
def module_calls(model: hw.Transformer) -> Iterator[list[object]]:
    """Record the calls of the MLPs as torch does it, which makes a step call all modules."""
    calls: list[object] = []
    hooks = [block.mlp.register_forward_hook(lambda *call: calls.append(call)) for block in model.blocks]  # pyright: ignore
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each step that ran without module calls."""
    rows, original = [], DecodeForward.run
    monkeypatch.setattr(
        DecodeForward, "run", lambda forward, x, context: rows.append(len(x)) or original(forward, x, context)
    )
    return rows


def assert_close(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)


@torch.no_grad()
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_decode_step_any_model_equals_modules_and_full_pass(attention: hw.AttentionSpec, fields: dict) -> None:
    model = make_model(attention, **fields)
    got = decode(model)
    with module_calls(model) as calls:
        assert_close(got, decode(model))
    assert len(calls) == 2 * IDS.shape[1]
    assert_close(got, model.double()(IDS).float())


@torch.no_grad()
@pytest.mark.parametrize("weights", [16, 8, 3, {"*": 8}, {"0.1": 4, "mlp": 8}, {"vocabulary": 8}], ids=str)
@pytest.mark.parametrize("activation_bits", [32, 8])
def test_decode_step_quantized_model_equals_modules(weights: int | dict, activation_bits: int, runs: list[int]) -> None:
    model = hw.quantize(make_model(norm="rms", activation="swiglu"), weights, activation_bits=activation_bits)
    for rows in (1, 2):
        got = decode(model, IDS[:rows])
        with module_calls(model):
            assert_close(got, decode(model, IDS[:rows]))
    assert runs == [1] * IDS.shape[1] + [2] * IDS.shape[1]


@torch.no_grad()
def test_decode_step_listeners_and_edits_without_module_calls(runs: list[int]) -> None:
    model = make_model()
    plain = decode(model)
    with hw.record(model):
        assert torch.equal(decode(model), plain)
    with model.heads["*.*"].scaled(1.0):
        assert torch.equal(decode(model), plain)
    with model.heads["1.2"].silenced():
        silenced = decode(model)
        assert_close(silenced, model(IDS))
    assert_close(decode(model, gates={"1.2": 0.0}), silenced)
    assert not torch.allclose(silenced, plain, atol=1e-3)
    assert len(runs) == 5 * IDS.shape[1]


@torch.no_grad()
def test_decode_step_padding_and_cache_policies_equal_full_pass(runs: list[int]) -> None:
    model, mask = make_model(), torch.ones_like(IDS, dtype=torch.bool)
    mask[1, :3] = False
    cache = model.cache()
    steps = [model(IDS[:, i : i + 1], attention_mask=mask[:, i : i + 1], cache=cache) for i in range(IDS.shape[1])]
    assert_close(torch.cat(steps, 1)[mask], model(IDS, attention_mask=mask)[mask])
    policies = model.spec.with_cache({"0.0": hw.CachePolicy(sink_tokens=1, window=2), "1.1": hw.CachePolicy(window=3)})
    streaming = hw.Transformer(policies).eval()
    streaming.load_state_dict(model.state_dict())
    assert_close(decode(streaming), streaming(IDS))
    assert len(runs) == 2 * IDS.shape[1]


CHANGES = {
    "in place": lambda model: model.blocks[0].mlp.down.weight.mul_(-2),
    "data": lambda model: setattr(model.blocks[0].mlp.up.weight, "data", 2 * model.blocks[0].mlp.up.weight),
    "parameter": lambda model: setattr(model.blocks[1].mlp.up, "weight", nn.Parameter(-model.blocks[1].mlp.up.weight)),
    "norm": lambda model: setattr(model.blocks[1], "norm_mlp", nn.RMSNorm(20)),
    "module": lambda model: setattr(model.blocks[1], "mlp", make_model(norm="rms", seed=1).blocks[0].mlp),
    "block": lambda model: model.blocks.__setitem__(0, make_model(norm="rms", seed=1).blocks[0]),
    "fewer blocks": lambda model: model.blocks.__delitem__(0),
    "state dict": lambda model: model.load_state_dict(
        {name: 0.5 * value for name, value in model.state_dict().items()}, assign=True
    ),
    "dtype and back": lambda model: model.bfloat16().float(),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_decode_step_after_change_uses_new_weights(change: object) -> None:
    model = make_model(norm="rms")
    before = decode(model)
    change(model)  # pyright: ignore[reportCallIssue]
    after = decode(model)
    assert_close(after, model(IDS))
    assert not torch.equal(after, before)


@torch.no_grad()
def test_decode_step_other_backend_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_model(), []
    want, original = decode(model), BACKENDS["reference"]
    monkeypatch.setitem(BACKENDS, "reference", lambda *inputs: calls.append(inputs) or original(*inputs))
    model.blocks[1].attention.backend = "reference"  # pyright: ignore
    assert_close(decode(model), want)
    assert len(calls) == IDS.shape[1]


@torch.no_grad()
def test_decode_step_quantized_weights_changed_in_place_uses_new_weights() -> None:
    model = hw.quantize(make_model(norm="rms"), 8)
    before = decode(model)
    model.blocks[0].mlp.down.codes8.neg_()  # pyright: ignore
    after = decode(model)
    with module_calls(model):
        assert_close(after, decode(model))
    assert not torch.allclose(after, before, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_decode_step_copy_of_model_has_own_weights(copied: object) -> None:
    model = make_model()
    before = decode(model)
    other = copied(model)  # pyright: ignore[reportCallIssue]
    other.blocks[0].mlp.down.weight.zero_()
    assert_close(decode(other), other(IDS))
    assert torch.equal(decode(model), before)


@torch.no_grad()
def test_decode_step_active_dropout_calls_modules(runs: list[int]) -> None:
    model = make_model(dropout=0.5)
    decode(model)
    steps = len(runs)
    model.train()
    torch.manual_seed(0)
    first = decode(model)
    torch.manual_seed(1)
    assert not torch.equal(decode(model), first)
    assert len(runs) == steps


def test_decode_step_with_gradients_calls_modules(runs: list[int]) -> None:
    model = make_model()
    model(IDS[:, :1], cache=model.cache()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.blocks.parameters())
    assert not runs
