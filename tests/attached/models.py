# ruff: noqa: C408 (sizes read better as keywords)
"""Small random transformers models of many architectures, with inputs for each."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

VOCAB, T = 61, 13
COMMON_SIZES = dict(
    hidden_size=24, num_hidden_layers=3, intermediate_size=40, vocab_size=VOCAB, max_position_embeddings=64
)
PLAIN = COMMON_SIZES | dict(num_attention_heads=4)
GROUPED = COMMON_SIZES | dict(
    num_attention_heads=6, num_key_value_heads=2, head_dim=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
)
ENCODER_DECODER = dict(
    d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40,
    decoder_ffn_dim=40, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One architecture."""

    name: str
    model: str
    config: str
    sizes: dict[str, Any]
    kind: str = "decoder"
    prunable: bool = False
    slow: bool = False  # similar to another case, run only in the slow tests

    def build(self, **overrides: Any) -> Any:
        """Return a model in eval mode with random weights that are large enough to affect outputs."""
        torch.manual_seed(7)
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.sizes, **overrides)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.requires_grad:  # not sinusoids, which are computed instead of saved
                    weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name.lower() and weight.ndim == 1))
        return model

    def inputs(self, side: str = "none") -> dict[str, Tensor]:
        """Return keyword arguments for a call: two texts, one of them padded on one side."""
        torch.manual_seed(3)
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16)}
        ids = torch.randint(3, VOCAB, (2, T))
        if self.kind == "speech":
            return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
        mask = torch.ones_like(ids)
        if side != "none":
            mask[1, slice(0, 4) if side == "left" else slice(T - 4, T)] = 0
        inputs = {"input_ids": ids.masked_fill(mask == 0, self.sizes.get("pad_token_id") or 0), "attention_mask": mask}
        if self.kind == "two":
            inputs["decoder_input_ids"] = torch.randint(3, VOCAB, (2, T - 2))
        return inputs


CASES = [
    Case("gpt2", "GPT2LMHeadModel", "GPT2Config",
         dict(n_embd=24, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=64, bos_token_id=1, eos_token_id=2),
         prunable=True),
    Case("bert", "BertForMaskedLM", "BertConfig", PLAIN, "encoder", prunable=True),
    Case("roberta", "RobertaForMaskedLM", "RobertaConfig", PLAIN | dict(pad_token_id=0), "encoder", prunable=True),
    Case("distilbert", "DistilBertForMaskedLM", "DistilBertConfig",
         dict(dim=24, n_layers=3, n_heads=4, hidden_dim=40, vocab_size=VOCAB, max_position_embeddings=64), "encoder",
         prunable=True),
    Case("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED, prunable=True),
    Case("mistral", "MistralForCausalLM", "MistralConfig", GROUPED | dict(sliding_window=5), prunable=True),
    Case("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED, prunable=True),
    Case("qwen3", "Qwen3ForCausalLM", "Qwen3Config", GROUPED, prunable=True),
    Case("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | dict(sliding_window=5), prunable=True),
    Case("phi3", "Phi3ForCausalLM", "Phi3Config", {**GROUPED, "hidden_size": 24}, prunable=True),
    Case("opt", "OPTForCausalLM", "OPTConfig",
         dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, ffn_dim=40, vocab_size=VOCAB,
              max_position_embeddings=64, word_embed_proj_dim=24, pad_token_id=0), prunable=True),
    Case("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN | dict(bos_token_id=1, eos_token_id=2), prunable=True),
    Case("t5", "T5ForConditionalGeneration", "T5Config",
         dict(d_model=24, d_kv=5, num_heads=4, num_layers=3, d_ff=40, vocab_size=VOCAB,
              decoder_start_token_id=0), "two"),
    Case("bart", "BartForConditionalGeneration", "BartConfig", ENCODER_DECODER | dict(max_position_embeddings=64), "two",
         prunable=True),
    Case("marian", "MarianMTModel", "MarianConfig", ENCODER_DECODER | dict(max_position_embeddings=64), "two", prunable=True),
    Case("whisper", "WhisperForConditionalGeneration", "WhisperConfig",
         ENCODER_DECODER | dict(max_source_positions=20, max_target_positions=64, num_mel_bins=8), "speech"),
    Case("vit", "ViTModel", "ViTConfig",
         dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, image_size=16, patch_size=4),
         "image"),
    Case("modernbert", "ModernBertForMaskedLM", "ModernBertConfig",
         PLAIN | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=6),
         "encoder", prunable=True),
    Case("qwen2_windows", "Qwen2ForCausalLM", "Qwen2Config",
         GROUPED | dict(sliding_window=5, use_sliding_window=True, max_window_layers=1), prunable=True),
    Case("electra", "ElectraForMaskedLM", "ElectraConfig", PLAIN | dict(embedding_size=10), "encoder", prunable=True),
    # Models on transformers' eager functions: learned sinks, soft-capped scores.
    Case("gpt_oss", "GptOssForCausalLM", "GptOssConfig",
         GROUPED | dict(num_local_experts=2, num_experts_per_tok=1, sliding_window=5, experts_implementation="eager")),
    Case("gemma2", "Gemma2ForCausalLM", "Gemma2Config",
         GROUPED | dict(sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=4), prunable=True, slow=True),
    # Models that are not on the attention interface.
    Case("falcon", "FalconForCausalLM", "FalconConfig",
         dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2,
              pad_token_id=0)),
    Case("bloom", "BloomForCausalLM", "BloomConfig",
         dict(hidden_size=24, n_layer=3, n_head=4, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)),
    Case("gptj", "GPTJForCausalLM", "GPTJConfig",
         dict(n_embd=24, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=64, rotary_dim=4, bos_token_id=1, eos_token_id=2),
         prunable=True, slow=True),
    Case("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig",
         dict(hidden_size=24, num_layers=3, num_heads=4, attention_types=[[["global", "local", "global"], 1]], window_size=5,
              vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=1, eos_token_id=2), prunable=True, slow=True),
    Case("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config",
         PLAIN | dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, pad_token_id=0,
                      type_vocab_size=0), "encoder"),
    Case("mpnet", "MPNetForMaskedLM", "MPNetConfig", PLAIN | dict(pad_token_id=1), "encoder", slow=True),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
SIDES = ("none", "left", "right")
each_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ()) for case in CASES]
)


def output_tensors(output: Any) -> list[Tensor]:
    """Return all tensors of an output in order, without caches."""
    return [value for value in output.to_tuple() if isinstance(value, Tensor)]


def main_output(output: Any) -> Tensor:
    """Return the logits or the last hidden states."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def real_positions(inputs: dict[str, Any]) -> Tensor:
    """Return the positions that are not padding."""
    if "decoder_input_ids" in inputs:
        return torch.ones_like(inputs["decoder_input_ids"]) > 0
    return inputs["attention_mask"] > 0
