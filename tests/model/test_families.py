"""GPT-2 and Llama with small random weights, copied by hand, give the same logits as in transformers."""

from typing import Any

import pytest
import torch

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.contract.layers import randomize, token_ids

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, KV_HEADS, LAYERS, HIDDEN, VOCAB, CONTEXT = 24, 6, 3, 2, 37, 41, 29
REAL = torch.tensor([[True] * 11, [False] * 4 + [True] * 7])  # padded on the left


def assert_same_logits(native: Transformer, hf_model: Any) -> None:
    ids = token_ids(2, 11, VOCAB)
    with torch.no_grad():
        torch.testing.assert_close(native(ids), hf_model(ids).logits, rtol=0, atol=1e-4)
        positions = (REAL.long().cumsum(1) - 1).clamp(min=0)
        want = hf_model(ids, attention_mask=REAL.long(), position_ids=positions).logits
        torch.testing.assert_close(native(ids, attention_mask=REAL)[REAL], want[REAL], rtol=0, atol=1e-4)
        want = hf_model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert torch.equal(native.generate(ids[:1], 8), want)


def test_transformer_gpt2_weights_equal_transformers() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=HIDDEN,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf_model = transformers.GPT2LMHeadModel(config).eval()
    randomize(hf_model)
    attention = AttentionSpec(width=WIDTH, heads=HEADS, bias=True, out_bias=True)
    native = Transformer(ModelSpec(VOCAB, CONTEXT, LAYERS, attention, HIDDEN, activation="gelu_tanh")).eval()

    hf_state, d = hf_model.state_dict(), WIDTH // HEADS
    state = {
        "embed.tokens.weight": hf_state["transformer.wte.weight"],
        "output.vocabulary.weight": hf_state["transformer.wte.weight"],
        "embed.positions.weight": hf_state["transformer.wpe.weight"],
        "norm.weight": hf_state["transformer.ln_f.weight"],
        "norm.bias": hf_state["transformer.ln_f.bias"],
    }
    for i in range(LAYERS):
        old, new = f"transformer.h.{i}.", f"blocks.{i}."
        weights, biases = hf_state[old + "attn.c_attn.weight"].chunk(3, 1), hf_state[old + "attn.c_attn.bias"].chunk(3)
        for projection, weight, bias in zip(
            "qkv", weights, biases, strict=True
        ):  # weights of transformers are (in, out)
            state[f"{new}attention.qkv.{projection}.weight"] = weight.T.unflatten(0, (HEADS, d))
            state[f"{new}attention.qkv.{projection}.bias"] = bias.unflatten(0, (HEADS, d))
        state[new + "attention.output_projection.weight"] = hf_state[old + "attn.c_proj.weight"].T.unflatten(
            1, (HEADS, d)
        )
        state[new + "attention.output_projection.bias"] = hf_state[old + "attn.c_proj.bias"]
        for native_name, hf_name in (("up", "c_fc"), ("down", "c_proj")):
            state[f"{new}mlp.{native_name}.weight"] = hf_state[f"{old}mlp.{hf_name}.weight"].T
            state[f"{new}mlp.{native_name}.bias"] = hf_state[f"{old}mlp.{hf_name}.bias"]
        for native_name, hf_name in (("norm_attention", "ln_1"), ("norm_mlp", "ln_2")):
            for kind in ("weight", "bias"):
                state[f"{new}{native_name}.{kind}"] = hf_state[f"{old}{hf_name}.{kind}"]
    native.load_state_dict(state)
    assert_same_logits(native, hf_model)


@pytest.mark.parametrize("tied", [True, False])
def test_transformer_llama_weights_equal_transformers(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf_model = transformers.LlamaForCausalLM(config).eval()
    randomize(hf_model)
    attention = AttentionSpec(width=WIDTH, heads=HEADS, kv_heads=KV_HEADS, rotary=Rotary())
    spec = ModelSpec(
        VOCAB, CONTEXT, LAYERS, attention, HIDDEN,
        norm="rms", activation="swiglu", mlp_bias=False, positions="none", tied=tied,
    )  # fmt: skip
    native = Transformer(spec).eval()

    hf_state, d = hf_model.state_dict(), WIDTH // HEADS
    state = {
        "embed.tokens.weight": hf_state["model.embed_tokens.weight"],
        "output.vocabulary.weight": hf_state["lm_head.weight"],
        "norm.weight": hf_state["model.norm.weight"],
    }
    for i in range(LAYERS):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        for projection, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weight = hf_state[f"{old}self_attn.{projection}_proj.weight"]
            state[f"{new}attention.qkv.{projection}.weight"] = weight.unflatten(0, (heads, d))
        state[new + "attention.output_projection.weight"] = hf_state[old + "self_attn.o_proj.weight"].unflatten(
            1, (HEADS, d)
        )
        for name in ("gate", "up", "down"):
            state[f"{new}mlp.{name}.weight"] = hf_state[f"{old}mlp.{name}_proj.weight"]
        state[new + "norm_attention.weight"] = hf_state[old + "input_layernorm.weight"]
        state[new + "norm_mlp.weight"] = hf_state[old + "post_attention_layernorm.weight"]
    native.load_state_dict(state)
    assert_same_logits(native, hf_model)
