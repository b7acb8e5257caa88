"""Path patching of attached models: equal to native models, and to identities that hold for any decoder."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from tests.attached.models import BY_NAME, VOCAB, T
from tests.distributed.models import relative_difference

PATHS = [
    ("0.1", "2.3.k"),
    ("0.kv0", "2.2.q"),
    ("mlp.0", "2.3.v"),
    ("1.2", "mlp.1"),
    ("1.1", "mlp.2"),
    ("1.0", "logits"),
]


def token_ids(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, T), generator=torch.Generator().manual_seed(seed))


IDS, OTHER = token_ids(1), token_ids(2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2"])
@torch.no_grad()
def test_patched_path_attached_equals_native(name: str) -> None:
    attached = hw.attach(BY_NAME[name].build().double())
    native = hw.to_native(attached)
    clean, own_clean = native(IDS), attached(IDS)
    for path in PATHS:
        with hw.patched(native, path=path, other=OTHER):
            expected = native(IDS) - clean
        with hw.patched(attached, path=path, other=OTHER):
            change = attached(IDS) - own_clean
            own = attached.model(input_ids=IDS, use_cache=False).logits - own_clean
        assert relative_difference(change, expected) < 1e-4, path  # transformers rotates in float32
        assert relative_difference(own, expected) < 1e-4, path
        assert expected.abs().max() > 1e-4, path


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "gemma3", "gpt_oss", "gpt_neox", "falcon"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "opt", "gpt_neo", "bloom")),
    ],
)
@torch.no_grad()
def test_patched_path_from_embedding_to_first_layer_equals_patched_head(name: str) -> None:
    """A head of the first layer reads only the embedding, through whatever lies between."""
    attached = hw.attach(BY_NAME[name].build())
    with hw.patched(attached, path=("embedding", "0.1"), other=OTHER):
        by_path = attached(IDS)
    with hw.patched(attached, "0.1", OTHER):
        assert relative_difference(by_path, attached(IDS)) < 2e-5
    with hw.patched(attached, path=("0.1", "2.2.k"), other=IDS):
        assert relative_difference(attached(IDS), attached(IDS)) == 0
        same = attached(IDS)
    assert relative_difference(same, attached(IDS)) < 2e-5
    with hw.patched(attached, path=("0.1", "2.2.k"), other=OTHER):
        assert relative_difference(attached(IDS), same) > 1e-6


@torch.no_grad()
def test_patched_path_sender_with_post_norm_equals_reference() -> None:
    """The change of one head passes through the norm after attention, with the other heads clean."""
    model = BY_NAME["gemma3"].build().double()
    attached, recorded = hw.attach(model), {}
    inner, (first, *_) = model.model, model.model.layers
    hooks = [
        first.self_attn.o_proj.register_forward_pre_hook(lambda module, args: recorded.update(z=args[0])),
        inner.norm.register_forward_pre_hook(lambda module, args: recorded.update(stream=args[0])),
    ]
    attached(OTHER)
    other = dict(recorded)
    attached(IDS)
    for hook in hooks:
        hook.remove()
    z = recorded["z"].clone()
    z[..., 4:8] = other["z"][..., 4:8]  # head 1 of size 4
    post_norm, o_proj = first.post_attention_layernorm, first.self_attn.o_proj
    delta = post_norm(o_proj(z)) - post_norm(o_proj(recorded["z"]))
    expected = model.lm_head(inner.norm(recorded["stream"] + delta))
    with hw.patched(attached, path=("0.1", "logits"), other=OTHER):
        assert relative_difference(attached(IDS), expected) < 1e-12


def test_patched_path_unsupported_calls_raise() -> None:
    def call(name: str, **options: Any) -> None:
        attached = hw.attach(BY_NAME[name].build())
        with hw.patched(attached, path=("0.1", "2.3.k"), other=OTHER):
            attached.model(input_ids=IDS, **options)

    with pytest.raises(HeadwiseError, match=r"without a KV cache.*use_cache=False"):
        call("llama")
    with pytest.raises(HeadwiseError, match="needs a decoder whose residual stream is a sum"):
        call("bert")
    with pytest.raises(HeadwiseError, match="not the attention of their q, k and v"):
        call("gptj", use_cache=False)  # scores are divided after the product, so their parameters are not known
