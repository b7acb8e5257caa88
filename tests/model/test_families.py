"""Against transformers: GPT-2 and Llama with small random weights, copied over by hand, give the same logits."""

from typing import Any

import pytest
import torch

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.contract.layers import fill, token_ids

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, KV_HEADS, LAYERS, HIDDEN, VOCAB, CONTEXT = 24, 6, 3, 2, 37, 41, 29
REAL = torch.tensor([[True] * 11, [False] * 4 + [True] * 7])  # padded on the left


def logits_agree(ours: Transformer, theirs: Any) -> None:
    ids = token_ids(2, 11, VOCAB)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)
        places = (REAL.long().cumsum(1) - 1).clamp(min=0)
        want = theirs(ids, attention_mask=REAL.long(), position_ids=places).logits
        torch.testing.assert_close(ours(ids, padding=REAL)[REAL], want[REAL], rtol=0, atol=1e-4)
        want = theirs.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert torch.equal(ours.generate(ids[:1], 8), want)


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=HIDDEN,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    fill(theirs)
    attention = AttentionSpec(width=WIDTH, heads=HEADS, bias=True, out_bias=True)
    ours = Transformer(ModelSpec(VOCAB, CONTEXT, LAYERS, attention, HIDDEN, activation="gelu_tanh")).eval()

    said, d = theirs.state_dict(), WIDTH // HEADS
    state = {
        "embed.tokens.weight": said["transformer.wte.weight"],
        "output.vocabulary.weight": said["transformer.wte.weight"],
        "embed.positions.weight": said["transformer.wpe.weight"],
        "norm.weight": said["transformer.ln_f.weight"],
        "norm.bias": said["transformer.ln_f.bias"],
    }
    for i in range(LAYERS):
        old, new = f"transformer.h.{i}.", f"blocks.{i}."
        weights, biases = said[old + "attn.c_attn.weight"].chunk(3, 1), said[old + "attn.c_attn.bias"].chunk(3)
        for letter, weight, bias in zip("qkv", weights, biases, strict=True):  # theirs are (in, out)
            state[f"{new}attention.read.{letter}.weight"] = weight.T.unflatten(0, (HEADS, d))
            state[f"{new}attention.read.{letter}.bias"] = bias.unflatten(0, (HEADS, d))
        state[new + "attention.write.weight"] = said[old + "attn.c_proj.weight"].T.unflatten(1, (HEADS, d))
        state[new + "attention.write.bias"] = said[old + "attn.c_proj.bias"]
        for mine, its in (("up", "c_fc"), ("down", "c_proj")):
            state[f"{new}mlp.{mine}.weight"] = said[f"{old}mlp.{its}.weight"].T
            state[f"{new}mlp.{mine}.bias"] = said[f"{old}mlp.{its}.bias"]
        for mine, its in (("norm_attention", "ln_1"), ("norm_mlp", "ln_2")):
            for kind in ("weight", "bias"):
                state[f"{new}{mine}.{kind}"] = said[f"{old}{its}.{kind}"]
    ours.load_state_dict(state)
    logits_agree(ours, theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_llama(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    fill(theirs)
    attention = AttentionSpec(width=WIDTH, heads=HEADS, kv_heads=KV_HEADS, rotary=Rotary())
    spec = ModelSpec(
        VOCAB, CONTEXT, LAYERS, attention, HIDDEN,
        norm="rms", activation="swiglu", mlp_bias=False, positions="none", tied=tied,
    )  # fmt: skip
    ours = Transformer(spec).eval()

    said, d = theirs.state_dict(), WIDTH // HEADS
    state = {
        "embed.tokens.weight": said["model.embed_tokens.weight"],
        "output.vocabulary.weight": said["lm_head.weight"],
        "norm.weight": said["model.norm.weight"],
    }
    for i in range(LAYERS):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weight = said[f"{old}self_attn.{letter}_proj.weight"]
            state[f"{new}attention.read.{letter}.weight"] = weight.unflatten(0, (heads, d))
        state[new + "attention.write.weight"] = said[old + "self_attn.o_proj.weight"].unflatten(1, (HEADS, d))
        for name in ("gate", "up", "down"):
            state[f"{new}mlp.{name}.weight"] = said[f"{old}mlp.{name}_proj.weight"]
        state[new + "norm_attention.weight"] = said[old + "input_layernorm.weight"]
        state[new + "norm_mlp.weight"] = said[old + "post_attention_layernorm.weight"]
    ours.load_state_dict(state)
    logits_agree(ours, theirs)
