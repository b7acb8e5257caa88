"""Attached torch modules with other attention than nn.MultiheadAttention, and every function on calls of torch modules."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import mean_activations, record_call
from headwise.errors import HeadwiseError
from tests.attached.torch_modules import (
    Detr,
    EinsumAttention,
    FixedWidthAttention,
    FusedAttention,
    Siblings,
    ViT,
    randomize,
)

VITS: dict[str, dict[str, Any]] = {"sdpa": {}, "matmuls": {"fused": False}, "normed": {"qk_norm": True}}


def _pixels(seed: int = 0, count: int = 2) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def _padding() -> Tensor:
    return torch.tensor([[False] * 9, [False] * 7 + [True] * 2])


@pytest.mark.parametrize("options", VITS)
def test_vit_is_bitwise_and_heads_sum_to_the_output(options: str) -> None:
    model: Any = randomize(ViT(**VITS[options]))
    pixels = _pixels()
    with torch.no_grad():
        before = model(pixels)
        attached = hw.attach(model, example=pixels)
        with hw.record(attached) as recording:
            assert torch.equal(model(pixels), before)
        x = torch.cat((model.cls_token.expand(2, -1, -1), model.patch_embed(pixels).flatten(2).transpose(1, 2)), 1)
        attention = model.blocks[0].attn(model.blocks[0].norm1(x))
    summed = sum(recording[f"0.{head}"].output for head in range(5)) + model.blocks[0].attn.proj.bias
    assert torch.allclose(summed, attention, atol=1e-5)
    assert attached.layer_paths == {"0": "blocks.0.attn", "1": "blocks.1.attn"}
    head: Any = attached.heads["1.3"]
    assert torch.equal(head.W_K, model.blocks[1].attn.qkv.weight[32:36].mT)
    attached.detach()
    assert torch.equal(model(pixels), before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("options", VITS)
@pytest.mark.parametrize("has_example", [False, True])
def test_vit_silencing_equals_zeroed_output_weights(options: str, has_example: bool) -> None:
    model, pixels = randomize(ViT(**VITS[options])).double(), _pixels().double()
    zeroed: Any = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.blocks[1].attn.proj.weight[:, 4:8] = 0
        expected = zeroed(pixels)
        attached = hw.attach(model, example=pixels if has_example else None)
        with attached.heads["1.1"].silenced():
            assert torch.allclose(model(pixels), expected, atol=1e-12, rtol=0)


def test_vit_prunes_where_its_forward_follows_the_number_of_heads() -> None:
    pixels = _pixels()
    attached = hw.attach(randomize(ViT()), example=pixels)
    small = hw.prune(attached, heads="0.1,1.0-2", fold_mean=False)
    with torch.no_grad(), attached.heads["0.1,1.0-2"].silenced():
        assert torch.allclose(small(pixels), attached(pixels), atol=1e-5)
    assert small.model.blocks[1].attn.qkv.weight.shape == (24, 20)
    model = randomize(ViT(FixedWidthAttention))
    fixed = hw.attach(model, example=pixels)
    before = model(pixels)
    with pytest.raises(HeadwiseError, match=r"cannot be pruned.*cannot be called any more"):
        fixed.prune("0.1", in_place=True)
    assert torch.equal(model(pixels), before)
    with pytest.raises(HeadwiseError, match="not all of its heads"):
        hw.prune(attached, heads=r"0.*", fold_mean=False)
    with pytest.raises(HeadwiseError, match=r"hw\.attach\(model, example="):
        hw.prune(hw.attach(randomize(ViT())), heads="0.1", fold_mean=False)


def test_attention_that_cannot_be_traced_raises_while_looked_at_only() -> None:
    model, pixels = randomize(ViT(EinsumAttention)), _pixels()
    before = model(pixels)
    attached = hw.attach(model)
    assert torch.equal(model(pixels), before)
    with pytest.raises(HeadwiseError, match="neither"), attached.heads["0.1"].silenced():
        model(pixels)
    with pytest.raises(HeadwiseError, match="neither"), hw.record(attached):
        model(pixels)
    assert torch.equal(model(pixels), before)
    attached.detach()
    with pytest.raises(HeadwiseError):
        hw.attach(model, example=pixels)
    assert torch.equal(model(pixels), before)


def test_value_that_is_not_the_product_of_the_weights_raises() -> None:
    class MixedAttention(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            B, N, _ = x.shape
            q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            weights = (q @ k.transpose(-2, -1)).softmax(-1)
            return self.proj((weights.roll(1, 1) @ v).transpose(1, 2).reshape(B, N, -1))

    model = randomize(ViT(MixedAttention))
    attached = hw.attach(model)
    with pytest.raises(HeadwiseError, match=r"neither|could not be reproduced"), hw.record(attached):
        model(_pixels())


def test_detr_has_an_encoder_two_decoder_attentions_and_exact_heads() -> None:
    model, call = randomize(Detr()), (_pixels(), _padding())
    with torch.no_grad():
        before = model(*call)
        attached = hw.attach(model)
        with hw.record(attached) as recording:
            assert torch.equal(model(*call), before)
        with attached.heads["cross.1.2"].silenced():
            silenced = model(*call)
        zeroed: Any = copy.deepcopy(model)
        zeroed.decoder[1].multihead_attn.out_proj.weight[:, 12:18] = 0
        assert torch.allclose(silenced, zeroed(*call), atol=1e-5)
    assert {address.stack for address in attached.heads.addresses} == {"enc", "dec", "cross"}
    maps = recording["cross.0.1"].map()  # (B, 6, 9)
    assert maps.shape == (2, 6, 9)
    assert float(maps[1, :, 7:].abs().max()) == 0
    small = hw.prune(attached, heads="enc.0.1,dec.0.*,cross.1.2", fold_mean=False)
    with torch.no_grad(), attached.heads["enc.0.1,dec.0.*,cross.1.2"].silenced():
        assert torch.allclose(small(*call), model(*call), atol=1e-5)


def test_sibling_encoders_get_numbered_stacks() -> None:
    model, x = randomize(Siblings(3)), torch.randn(2, 5, 12)
    attached = hw.attach(model)
    assert list(dict.fromkeys(address.stack for address in attached.heads.addresses)) == ["enc", "enc2", "enc3"]
    with hw.record(attached, "enc2.1.*") as recording, torch.no_grad():
        model(x)
    assert recording["enc2.1.1"].map().shape == (2, 5, 5)
    assert [address.stack for address in attached.heads.select("enc3.*").addresses] == ["enc3"] * 4
    with pytest.raises(HeadwiseError, match=r"hw\.attach\(model\.reader_"):
        hw.attach(Siblings(10))


def _loss(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(call["pixels"]), call["label"])


def _calls(count: int = 6) -> list[dict[str, Tensor]]:
    return [{"pixels": _pixels(seed), "label": torch.tensor([seed % 7, 3])} for seed in range(count)]


def test_importance_on_calls_equals_silencing_and_gate_gradients() -> None:
    model = randomize(ViT())
    attached, calls = hw.attach(model, forward=_loss, example=_calls(1)[0]), _calls(3)
    result = hw.importance(attached, calls)
    with torch.no_grad():
        clean = sum(float(_loss(model, call)) for call in calls) / 3
        with attached.heads["1.2"].silenced():
            lost = sum(float(_loss(model, call)) for call in calls) / 3
    assert result["1.2"].importance == pytest.approx(lost - clean, abs=1e-6)
    assert (result.ablation, result.texts) == ("zero", 3)
    gradient = hw.importance(attached, calls, ranking="gradient", heads="0.*")
    step = 1e-3
    with torch.no_grad(), attached.heads["0.3"].scaled(1 + step):
        above = _loss(model, calls[0])
    with torch.no_grad(), attached.heads["0.3"].scaled(1 - step):
        below = _loss(model, calls[0])
    first = hw.importance(attached, calls[:1], ranking="gradient", heads="0.*")
    assert first["0.3"].importance == pytest.approx(abs(float(above - below)) / 2 / step, rel=0.05, abs=1e-4)
    assert len(gradient) == 5


def test_ablation_patching_and_ranked_pruning_on_calls() -> None:
    model = randomize(ViT())
    attached: Any = hw.attach(model, forward=_loss, example=_calls(1)[0])
    calls = _calls(4)
    means = mean_activations(attached, calls)
    runs = [record_call(attached, call, "1.2") for call in calls]
    z = torch.cat([next(iter(run.z.values())) for run in runs])  # (8, 1, T, e)
    assert torch.allclose(means["1.2"], z.double().mean((0, 1, 2)))
    with torch.no_grad():
        with hw.ablated(attached, "1.2", corpus=calls):
            mean_loss = _loss(model, calls[0])
        with hw.patched(attached, "*", calls[1]):
            patched = _loss(model, calls[0])
        with attached.heads["*"].silenced():
            silent = _loss(model, calls[0])
    assert float(mean_loss) != float(silent) != float(patched)
    with torch.no_grad(), hw.patched(attached, "*", calls[0]):
        assert torch.allclose(_loss(model, calls[0]), attached.run_call(calls[0]), atol=1e-6)
    small = hw.prune(attached, keep=0.6, corpus=calls)
    assert len(small.heads) == 6
    pruned = set(attached.heads.addresses) - set(small.heads.addresses)
    with torch.no_grad(), hw.ablated(attached, tuple(pruned), means=means):
        expected = [attached.run_call(call) for call in calls]
    with torch.no_grad():
        assert torch.allclose(torch.stack([small.run_call(call) for call in calls]), torch.stack(expected), atol=1e-5)
    ranked = hw.prune(attached, keep=0.8, corpus=calls, ranking="gradient", fold_mean=False)
    assert len(ranked.heads) == 8


class Shifted(nn.Module):
    """One layer in which head 0 attends to the token before, and head 1 to itself. Inputs are one-hot positions."""

    def __init__(self, tokens: int, **options: Any) -> None:
        super().__init__()
        layer = nn.MultiheadAttention(2 * tokens, 2, batch_first=True, bias=False, **options)
        self.layers = nn.ModuleList([layer])
        eye, zero = torch.eye(tokens), torch.zeros(tokens, tokens)
        back = torch.eye(tokens).roll(1, 1)  # row i: position i − 1 … as keys
        with torch.no_grad():
            query = torch.cat((torch.cat((200 * back, zero), 1), torch.cat((200 * eye, zero), 1)))
            key = torch.cat((torch.cat((eye, zero), 1), torch.cat((eye, zero), 1)))
            layer.in_proj_weight.copy_(torch.cat((query, key, torch.eye(2 * tokens))))
            layer.out_proj.weight.copy_(torch.eye(2 * tokens))
            for extra in (layer.bias_k, layer.bias_v):
                if extra is not None:
                    extra.zero_()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layers[0](x, x, x, key_padding_mask=padding, need_weights=False)[0]


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_profile_on_calls_finds_the_built_heads_and_ignores_padding(extra: dict[str, bool]) -> None:
    tokens = 12
    x = torch.cat((torch.eye(tokens), torch.zeros(tokens, tokens)), 1).expand(8, -1, -1).clone()
    x[..., tokens:] = torch.randn(8, tokens, tokens, generator=torch.Generator().manual_seed(0)) * 0.01
    padding = torch.zeros(8, tokens, dtype=torch.bool)
    padding[4:, 9:] = True
    attached = hw.attach(Shifted(tokens, **extra).eval())
    profile = hw.profile(attached, [{"x": x, "padding": padding}, {"x": x[:2] * 1.01}])
    # Row 0 attends to token 11. With extra keys it counts, because there is a key in front of it. In the four padded texts
    # token 11 is hidden, so 9 tokens and 2 extra keys share the largest score.
    rows = np.array([12] * 4 + [9] * 4 + [12] * 2)
    previous, current = profile.metric("argmax 1"), profile.metric("argmax 0")
    assert previous[0] == pytest.approx(((rows - 1).sum() + 4 / 11) / rows.sum() if extra else 1.0, abs=1e-3)
    assert current[1] == pytest.approx(1.0, abs=1e-3)
    assert profile.metadata["texts"] == 10
    assert profile.metadata["tokens"] == rows.sum() + (len(extra) * 10 if extra else 0)


def test_profile_covers_detr_with_cross_attention_of_other_lengths() -> None:
    model = randomize(Detr())
    attached = hw.attach(model)
    profile = hw.profile(attached, [(_pixels(seed), _padding()) for seed in range(3)])
    assert len(list(profile)) == len(attached.heads) == 24
    entropy = dict(zip(map(str, profile.addresses), profile.metric("entropy"), strict=True))
    expected = []
    with torch.no_grad(), hw.record(attached, "cross.0.1") as recording:
        for seed in range(3):
            model(_pixels(seed), _padding())
            weights = recording["cross.0.1"].call(-1).map()
            expected.append(-(weights * weights.clamp(min=1e-30).log()).sum(-1).mean())
    assert entropy["cross.0.1"] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("function", "fragment"),
    [
        (lambda attached: attached.generate("a"), "generate: not available"),
        (lambda attached: attached.save("x"), "torch.save"),
        (lambda attached: hw.to_native(attached), r"torch module.*torch\.save"),
        (lambda attached: hw.export(attached, "x.gguf", to="gguf"), r"torch module.*torch\.save"),
        (lambda attached: attached.residual_stream(), "not available"),
        (lambda attached: hw.profile(attached, ["a text"], control="shuffled"), "control"),
        (lambda attached: hw.profile(attached, "a text"), "list of calls"),
        (lambda attached: hw.importance(attached, []), "an empty list"),
        (lambda attached: hw.attention_maps(attached, "a text"), r"no tokenizer.*inside hw\.record\(attached\)"),
        (lambda attached: attached.prune("0.0", cache={"*": 8}), r"own models"),
    ],
)
def test_functions_of_language_models_say_what_is_missing(function: Any, fragment: str) -> None:
    attached = hw.attach(randomize(ViT()))
    with pytest.raises(HeadwiseError, match=fragment):
        function(attached)


def test_ranked_pruning_without_a_loss_advises_forward_which_works() -> None:
    model, calls = randomize(ViT()), [_pixels(seed) for seed in range(2)]
    attached = hw.attach(model, example=calls[0])
    with pytest.raises(HeadwiseError, match=r"no loss.*hw\.attach\(module, forward=…\)"):
        hw.prune(attached, keep=0.75, corpus=calls)
    assert hw.importance(attached, calls, loss=lambda output: output.square().mean()).texts == 2
    attached.detach()

    def loss(module: nn.Module, call: Tensor) -> Tensor:
        return module(call).square().mean()

    attached = hw.attach(model, forward=loss, example=calls[0])
    assert len(hw.prune(attached, keep=0.75, corpus=calls).heads) == round(0.75 * len(attached.heads))


def test_attach_rejects_what_has_no_attention_and_arguments_that_do_not_fit() -> None:
    with pytest.raises(HeadwiseError, match="no attention was found"):
        hw.attach(nn.Linear(2, 2))
    with pytest.raises(HeadwiseError, match="tokenizer"):
        hw.attach(randomize(ViT()), object())
    with pytest.raises(HeadwiseError, match=r"must be a transformers model or a torch module"):
        hw.attach("model")
    with pytest.raises(HeadwiseError, match="Make a model first"):
        hw.attach(ViT)
    model = randomize(ViT())
    attached = hw.attach(model)
    with pytest.raises(HeadwiseError, match="already attached"):
        hw.attach(model, example=_pixels())
    assert attached.is_attached


def test_table_of_a_torch_module_lists_its_heads() -> None:
    text = repr(hw.attach(randomize(Detr())))
    assert "Attached model: Detr, 24 heads in 6 layers" in text
    assert "cross.1" in text
