"""Addresses and silencing in layers of blocks, blocks with several attention modules, and standalone decoders."""

from typing import Any

import pytest
import torch
import transformers

import headwise as hw
from headwise.attached.prune_in_place import flatten_tensors

T: Any = transformers  # configurations accept more arguments than their signatures say

DECODER = {
    "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 32, "encoder_ffn_dim": 32, "vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.tensor([[5, 7, 11, 13, 17, 19], [6, 8, 12, 14, 18, 20]])


def _states() -> torch.Tensor:
    return torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1)).double()


def swin() -> tuple[Any, dict[str, Any]]:
    config = T.SwinConfig(embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2, image_size=16, patch_size=2)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double()
    return T.SwinModel(config), {"pixel_values": pixels}


def dia() -> tuple[Any, dict[str, Any]]:
    side = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 32}
    encoder = side | {"num_key_value_heads": 4, "vocab_size": 50}
    decoder = side | {"num_key_value_heads": 2, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
                      "cross_head_dim": 8, "cross_hidden_size": 32, "vocab_size": 60, "num_channels": 3}  # fmt: skip
    config = T.DiaConfig(
        encoder_config=encoder, decoder_config=decoder, delay_pattern=[0, 1, 2], pad_token_id=57, eos_token_id=56,
        bos_token_id=58,
    )  # fmt: skip
    sound = torch.randint(0, 40, (2, 5, 3), generator=torch.Generator().manual_seed(1))
    return T.DiaForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": sound}


def longcat() -> tuple[Any, dict[str, Any]]:
    config = T.LongcatFlashConfig(
        hidden_size=32, num_layers=2, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, ffn_hidden_size=32,
        expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=2, moe_topk=2, vocab_size=60,
    )  # fmt: skip
    return T.LongcatFlashForCausalLM(config), {"input_ids": IDS}


def bart() -> tuple[Any, dict[str, Any]]:
    return T.BartForCausalLM(T.BartConfig(**DECODER)), {"input_ids": IDS, "encoder_hidden_states": _states()}


def whisper() -> tuple[Any, dict[str, Any]]:
    return T.WhisperForCausalLM(T.WhisperConfig(**DECODER)), {"input_ids": IDS, "encoder_outputs": (_states(),)}


def musicgen() -> tuple[Any, dict[str, Any]]:
    kind = T.models.musicgen.configuration_musicgen.MusicgenDecoderConfig
    config = kind(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32, num_codebooks=2,
                  pad_token_id=59, bos_token_id=58)  # fmt: skip
    return T.MusicgenForCausalLM(config), {"input_ids": IDS.repeat(2, 1), "encoder_hidden_states": _states()}


DECODER_ALONE = ["0", "1", "cross.0", "cross.1"]
EXPECTED = {
    swin: ["0", "1", "2", "3"], dia: ["enc.0", "enc.1", "dec.0", "cross.0", "dec.1", "cross.1"],
    longcat: ["0", "1", "2", "3"],
    bart: DECODER_ALONE, whisper: DECODER_ALONE, musicgen: DECODER_ALONE,
}  # fmt: skip


@pytest.mark.parametrize("build", EXPECTED, ids=lambda build: build.__name__)
def test_attach_each_attention_gets_address(build) -> None:
    torch.manual_seed(0)
    model, call = build()
    model = model.double().eval()

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            return flatten_tensors(dict(model(**call)))

    def max_difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))

    before = outputs()
    with hw.attach(model) as attached:
        assert [str(hook_point.address) for hook_point in attached.hook_points()] == EXPECTED[build]
        assert len(attached.spec.head_addresses) == len(attached.heads)
        assert all(map(torch.equal, outputs(), before))
        for layer in attached.attention_layers():
            with attached.heads[str(layer.hook_point.head_addresses[1])].silenced():
                silent = outputs()
            e: int = layer.spec.value_dim
            projection: Any = layer.info.output_module
            saved = projection.weight.detach().clone()
            with torch.no_grad():
                projection.weight[:, e : 2 * e] = 0
                zeroed = outputs()
                projection.weight.copy_(saved)
            assert max_difference(silent, zeroed) < 1e-9
            assert max_difference(silent, before) > 0
    assert all(map(torch.equal, outputs(), before))


def test_attach_decoder_alone_prunes_cross_heads() -> None:
    """The test call passes encoder states, so that cross-attention heads are tested, too."""
    torch.manual_seed(0)
    model, call = bart()
    model = model.double().eval()
    with hw.attach(model) as attached, torch.no_grad():
        with hw.record(attached, "cross.1.2", tensors=("z", "output")) as recording:
            model(**call)
        head: Any = attached.heads["cross.1.2"]
        assert (recording["cross.1.2"].z @ head.W_O - recording["cross.1.2"].output).abs().max() < 1e-9
        assert head.W_Q.shape == head.W_V.shape
        pruned = "cross.0.1,cross.1.*,0.2"
        with attached.heads[pruned].silenced():
            silent = model(**call).logits
        assert (attached.prune(pruned).model(**call).logits - silent).abs().max() < 1e-9
