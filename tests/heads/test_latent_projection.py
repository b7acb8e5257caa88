"""Multi-head latent attention: closed form in float64, views of heads, pruning, caches, errors of unsupported features."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.distributed.model_partition import partition_model
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.spec import AttentionSpec, Latent, ModelSpec, Rotary

D, H, NOPE, ROPE, E, RANK, Q_RANK, T = 20, 3, 4, 2, 5, 7, 6, 11
SPEC = AttentionSpec(
    D, H, head_dim=NOPE + ROPE, value_dim=E, bias=True, out_bias=True, latent=Latent(RANK, ROPE, Q_RANK, norm_eps=1e-3),
    rotary=Rotary(theta=50.0, layout="interleaved", dims=ROPE),
)  # fmt: skip
DIRECT = replace(SPEC, bias=False, latent=Latent(RANK, ROPE))
SPECS = {"query rank": SPEC, "direct queries": DIRECT}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def make_layer(spec: AttentionSpec) -> MultiHeadAttention:
    torch.manual_seed(0)
    layer = MultiHeadAttention(spec).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def inputs() -> Tensor:
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.double)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate adjacent pairs of channels as complex numbers: (B, T, channels)."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    frequencies = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.double) / x.shape[-1])
    angles = torch.arange(x.shape[1], dtype=torch.double)[:, None] * frequencies
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def closed_form(layer: MultiHeadAttention, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return maps, z and the output of causal latent attention, head by head, from the state dict."""
    spec, state = layer.spec, layer.state_dict()
    latent = spec.latent
    assert latent is not None
    zero = torch.zeros((), dtype=torch.double)
    down = x @ state["qkv.kv_down.weight"].mT + state.get("qkv.kv_down.bias", zero)
    c = rms_norm(down[..., :RANK], state["qkv.kv_norm.weight"], latent.norm_eps)
    shared = rotate(down[..., RANK:], 50.0)
    queries_from = x
    if latent.query_rank:
        queries_from = x @ state["qkv.q_down.weight"].mT + state.get("qkv.q_down.bias", zero)
        queries_from = rms_norm(queries_from, state["qkv.q_norm.weight"], latent.norm_eps)
    maps, z, out = [], [], torch.zeros_like(x) + state["output_projection.bias"]
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    for head in range(len(spec.head_ids)):
        q = queries_from @ state["qkv.q.weight"][head].mT
        q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:], 50.0)), -1)
        up = state["qkv.kv.weight"][head]
        k, v = torch.cat((c @ up[:NOPE].mT, shared), -1), c @ up[NOPE:].mT
        scores = (q @ k.mT / math.sqrt(NOPE + ROPE)).masked_fill(later, -torch.inf)
        maps.append(scores.softmax(-1))
        z.append(maps[-1] @ v)
        out = out + z[-1] @ state["output_projection.weight"][:, head].mT
    return maps, z, out


@each_spec
@pytest.mark.parametrize("backend", ["auto", "fused", "batched", "blockwise", "reference"])
@torch.no_grad()
def test_latent_layer_equals_closed_form(spec: AttentionSpec, backend: str) -> None:
    layer, x = make_layer(spec), inputs()
    layer.backend = backend
    maps, z, out = closed_form(layer, x)
    # rotary angles are computed in float32
    torch.testing.assert_close(layer.compute_z(x, mask=hw.causal()), torch.stack(z, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.attention_weights(x, mask=hw.causal()), torch.stack(maps, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(layer(x, mask=hw.causal()), out, rtol=0, atol=1e-4)


@each_spec
@torch.no_grad()
def test_latent_head_weights_are_products_of_down_and_up_projections(spec: AttentionSpec) -> None:
    layer, state = make_layer(spec), make_layer(spec).state_dict()
    head = layer.heads[1]
    gain = state["qkv.kv_norm.weight"]
    down, up = state["qkv.kv_down.weight"], state["qkv.kv.weight"][1]
    want_k = torch.cat((up[:NOPE] * gain @ down[:RANK], down[RANK:]))
    torch.testing.assert_close(head.W_K, want_k.mT)
    torch.testing.assert_close(head.W_V, (up[NOPE:] * gain @ down[:RANK]).mT)
    q = state["qkv.q.weight"][1]
    q = q if spec is DIRECT else q * state["qkv.q_norm.weight"] @ state["qkv.q_down.weight"]
    torch.testing.assert_close(head.W_Q, q.mT)
    assert head.W_O.shape == (E, D)
    assert head.OV.dense().shape == head.QK.dense().shape == (D, D)
    if spec is SPEC:
        bias = state["qkv.kv_down.bias"]
        torch.testing.assert_close(head.b_K, torch.cat((up[:NOPE] * gain @ bias[:RANK], bias[RANK:])))
        torch.testing.assert_close(
            head.b_Q, state["qkv.q.weight"][1] * state["qkv.q_norm.weight"] @ state["qkv.q_down.bias"]
        )
    else:
        assert head.b_Q is head.b_K is None


def make_model(spec: AttentionSpec = SPEC) -> Any:
    torch.manual_seed(0)
    model = hw.Transformer(ModelSpec(vocab=31, context=40, layers=2, attention=spec, positions="none", tied=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


@each_spec
@torch.no_grad()
def test_latent_pruning_equals_silencing_and_frees_rows_of_the_up_projections(spec: AttentionSpec) -> None:
    model, ids = make_model(spec), torch.arange(22).reshape(2, 11)
    small = model.prune("0.1,1.0-1")
    with model.heads["0.1,1.0-1"].silenced():
        torch.testing.assert_close(small(ids), model(ids), rtol=0, atol=1e-9)
    per_head = (NOPE + ROPE) * (Q_RANK if spec is SPEC else D) + (NOPE + E) * RANK + E * D
    assert model.spec.num_parameters - small.spec.num_parameters == 3 * per_head
    for version in (model, small):
        assert version.spec.num_parameters == sum(parameter.numel() for parameter in version.parameters())
    assert small.blocks[1].attention.qkv.kv_down_weight.shape == (RANK + ROPE, D)
    emptied = model.prune("0.*")
    assert [str(head) for head in emptied.spec.head_addresses] == ["1.0", "1.1", "1.2"]
    assert emptied(ids).isfinite().all()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_latent_cache_holds_keys_and_values_of_every_head(kind: str) -> None:
    model, ids = make_model(), torch.arange(22).reshape(2, 11)
    for version in (model, model.prune("0.1")):
        cache = version.cache(kind, **({"size": 11} if kind == "static" else {}))
        steps = [version(part, cache=cache) for part in ids.split((4, 1, 6), 1)]
        torch.testing.assert_close(torch.cat(steps, 1), version(ids), rtol=0, atol=1e-5)
        heads = [len(layer.spec.head_ids) for layer in version.attention_layers()]
        if kind == "static":
            want = [2 * 11 * count * (NOPE + ROPE + E) * 8 for count in heads]
            assert [layer.nbytes for layer in cache.layers.values()] == want


def test_latent_gradients_reach_every_parameter_and_training_reduces_the_loss() -> None:
    model = make_model().float().train()
    ids = torch.randint(31, (4, 12), generator=torch.Generator().manual_seed(0))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.blocks.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_latent_saved_model_is_bitwise_equal(tmp_path: Any) -> None:
    model, ids = make_model().prune("1.2"), torch.arange(22).reshape(2, 11)
    model.save(tmp_path / "m")
    again: Any = hw.load(tmp_path / "m")
    assert again.spec == model.spec
    assert torch.equal(again(ids), model(ids))


def test_latent_unsupported_features_raise_clear_errors(tmp_path: Any) -> None:
    model = make_model().float()
    calls = {
        "quantization is not supported for a model with latent": lambda: hw.quantize(model, 8),
        "cannot be quantized per head": lambda: hw.sensitivity(model, ["0 1 2"]),
        "attention.latent is": lambda: hw.export(model, tmp_path / "m.gguf", to="gguf"),
        "heads share latents": lambda: partition_model(model.spec, 2),
        "cannot represent latent": lambda: hw.export(model, tmp_path / "llama", family="llama"),
    }
    from headwise.text.build_tokenizers import byte_tokenizer

    model.tokenizer = byte_tokenizer()
    for message, call in calls.items():
        with pytest.raises(HeadwiseError, match=message):
            call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 1}, "kv_heads=1"),
        ({"head_dim": 2}, "no channel for the latent"),
        ({"rotary": Rotary()}, "other channels than rotary_dims"),
        ({"head_input": "slice", "width": 21}, "head_input='slice'"),
    ],
)
def test_latent_spec_conflicts_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        replace(DIRECT, kv_width=changes.get("width", D), **changes)
