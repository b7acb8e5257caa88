"""Small random checkpoints made by transformers, and the differences of our logits and attention maps from theirs."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.kernels import attention_weights

VOCAB, CONTEXT, LAYERS, HIDDEN = 61, 48, 3, 52
LENGTHS = (1, 2, 7, 31)
LOGITS_LIMIT, MAPS_LIMIT = 1e-4, 1e-5


@dataclass(frozen=True)
class Case:
    """One checkpoint: a class of transformers and the non-default settings of its configuration."""

    name: str
    model: str
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # options of the class
    output: str = "logits"
    pad_id: int | None = None  # the model counts positions from this id, instead of from the attention mask
    slow: bool = False  # a variant of a family of which another case runs always

    def save(self, folder: Path) -> Path:
        """Create the model, set random weights and save it."""
        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = kind(kind.config_class(**self.config), **self.options)
        randomize(model)
        model.save_pretrained(folder)
        return folder

    def oracle(self, folder: Path) -> Any:
        """Load the folder with transformers, with an attention implementation that returns attention maps."""
        kind = getattr(transformers, self.model)
        return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **self.options).eval()


@dataclass(frozen=True)
class Result:
    """Differences of a case, and their limits."""

    case: str
    tokens: int
    padding_side: str  # "", "right" or "left"
    logits: float
    maps: float
    logits_limit: float = LOGITS_LIMIT
    maps_limit: float = MAPS_LIMIT

    @property
    def ok(self) -> bool:
        return self.logits <= self.logits_limit and self.maps <= self.maps_limit  # False for NaN


def gpt2(name: str, **config: Any) -> Case:
    sizes = {"n_embd": 24, "n_head": 6, "n_layer": LAYERS, "n_positions": CONTEXT, "vocab_size": VOCAB}
    return Case(name, "GPT2LMHeadModel", sizes | {"bos_token_id": 0, "eos_token_id": 0} | config)


def gpt_neo(name: str, **config: Any) -> Case:
    sizes = {"hidden_size": 24, "num_heads": 6, "num_layers": LAYERS, "max_position_embeddings": CONTEXT}
    kinds = {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 5}
    special = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    return Case(name, "GPTNeoForCausalLM", sizes | kinds | special | config)


def bert(name: str, model: str, output: str, options: dict[str, Any] | None = None, **config: Any) -> Case:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    sizes |= {"max_position_embeddings": CONTEXT, "intermediate_size": HIDDEN, "type_vocab_size": 3}
    return Case(name, model, sizes | config, options or {}, output)


def albert(name: str, model: str, output: str, options: dict[str, Any] | None = None, **config: Any) -> Case:
    return bert(name, model, output, options, **{"embedding_size": 14, "hidden_act": "gelu"} | config)


def roberta(name: str, model: str, output: str, *, slow: bool = True, **config: Any) -> Case:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    sizes |= {"max_position_embeddings": CONTEXT, "intermediate_size": HIDDEN, "type_vocab_size": 1, "pad_token_id": 1}
    options = {"add_pooling_layer": config.pop("pooler")} if "pooler" in config else {}
    sizes |= config
    return Case(name, model, sizes, options, output, sizes["pad_token_id"], slow)


def distilbert(name: str, model: str, output: str, *, slow: bool = True, **config: Any) -> Case:
    sizes = {"dim": 24, "n_heads": 6, "n_layers": LAYERS, "vocab_size": VOCAB, "hidden_dim": HIDDEN}
    return Case(name, model, sizes | {"max_position_embeddings": CONTEXT} | config, output=output, slow=slow)


def modernbert(name: str, model: str, output: str = "logits", *, slow: bool = True, **config: Any) -> Case:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    sizes |= {"max_position_embeddings": CONTEXT, "intermediate_size": HIDDEN, "local_attention": 6, "pad_token_id": 0}
    special = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    return Case(name, model, sizes | special | config, output=output, slow=slow)


def llama(
    name: str, model: str = "LlamaForCausalLM", output: str = "logits", *, slow: bool = False, **config: Any
) -> Case:
    sizes = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": LAYERS}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "intermediate_size": HIDDEN}
    return Case(name, model, sizes | {"bos_token_id": 0, "eos_token_id": 0} | config, output=output, slow=slow)


NESTED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def longrope(channels: int) -> dict[str, Any]:
    """Return LongRoPE settings for heads of this many channels, with an original context of 16 tokens."""
    pairs = channels // 2
    settings = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(pairs)]}
    return {
        "rope_parameters": settings | {"long_factor": [2.0 + i for i in range(pairs)]},
        "original_max_position_embeddings": 16,
    }


def deepseek(
    name: str, model: str = "DeepseekV2ForCausalLM", output: str = "logits", *, slow: bool = True, **config: Any
) -> Case:
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    sizes |= {"first_k_dense_replace": LAYERS, "intermediate_size": HIDDEN, "max_position_embeddings": CONTEXT}
    sizes |= {"kv_lora_rank": 10, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return Case(name, model, sizes | {"bos_token_id": 0, "eos_token_id": 0} | config, output=output, slow=slow)


def scaled_rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **extra}}


YARN_MSCALE = {  # cosines and sines are scaled by 0.98, and scores by 1.25
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0,
    "mscale": 0.7, "mscale_all_dim": 0.85,
}  # fmt: skip

CASES = (
    gpt2("gpt2, tied"),
    gpt2("gpt2, untied", tie_word_embeddings=False),
    gpt2("gpt2, n_inner, relu", n_inner=37, activation_function="relu"),
    gpt2("gpt2, gelu, eps", activation_function="gelu", layer_norm_epsilon=1e-2),
    gpt2("gpt2, scores not scaled", scale_attn_weights=False),
    gpt_neo("gpt-neo, global and local"),
    gpt_neo("gpt-neo, untied, n_inner", tie_word_embeddings=False, intermediate_size=37, window_size=2),
    gpt_neo("gpt-neo, all local", attention_types=[[["local"], LAYERS]], window_size=1),
    gpt_neo("gpt-neo, all global", attention_types=[[["global"], LAYERS]]),
    bert("bert, pooler", "BertModel", "last_hidden_state"),
    bert("bert, no pooler", "BertModel", "last_hidden_state", {"add_pooling_layer": False}, hidden_act="relu"),
    bert("bert, masked tokens", "BertForMaskedLM", "logits"),
    bert("bert, masked tokens, untied", "BertForMaskedLM", "logits", tie_word_embeddings=False, layer_norm_eps=1e-3),
    bert("bert, pretraining", "BertForPreTraining", "prediction_logits", hidden_act="gelu_new"),
    albert("albert, pooler", "AlbertModel", "last_hidden_state"),
    albert("albert, no pooler", "AlbertModel", "last_hidden_state", {"add_pooling_layer": False}, hidden_act="relu"),
    albert("albert, masked tokens", "AlbertForMaskedLM", "logits", hidden_act="gelu_new"),
    albert("albert, masked tokens, untied", "AlbertForMaskedLM", "logits", tie_word_embeddings=False),
    albert("albert, embeddings as wide as the model", "AlbertForMaskedLM", "logits", embedding_size=24),
    albert("albert, pretraining", "AlbertForPreTraining", "prediction_logits", layer_norm_eps=1e-3),
    roberta("roberta, masked tokens", "RobertaForMaskedLM", "logits", slow=False, hidden_act="relu"),
    roberta("roberta, masked tokens, untied", "RobertaForMaskedLM", "logits", tie_word_embeddings=False),
    roberta("roberta, pooler, padding id 5", "RobertaModel", "last_hidden_state", pad_token_id=5, type_vocab_size=3),
    roberta("roberta, no pooler, eps", "RobertaModel", "last_hidden_state", pooler=False, layer_norm_eps=1e-3),
    roberta("roberta, padding id 0, gelu_new", "RobertaForMaskedLM", "logits", pad_token_id=0, hidden_act="gelu_new"),
    roberta("xlm-roberta, masked tokens", "XLMRobertaForMaskedLM", "logits"),
    roberta("xlm-roberta, pooler", "XLMRobertaModel", "last_hidden_state", slow=False),
    distilbert("distilbert, masked tokens", "DistilBertForMaskedLM", "logits", slow=False),
    distilbert("distilbert, untied, relu", "DistilBertForMaskedLM", "logits", tie_word_embeddings=False, activation="relu"),
    distilbert("distilbert, no output", "DistilBertModel", "last_hidden_state", activation="gelu_new"),
    distilbert("distilbert, sinusoidal table", "DistilBertForMaskedLM", "logits", sinusoidal_pos_embds=True),
    modernbert("modernbert", "ModernBertForMaskedLM", slow=False),
    modernbert("modernbert, all biases, untied", "ModernBertForMaskedLM", norm_bias=True, attention_bias=True, mlp_bias=True,
               classifier_bias=True, tie_word_embeddings=False, hidden_activation="gelu_new", norm_eps=1e-3),
    modernbert("modernbert, thetas, layers", "ModernBertForMaskedLM", layer_types=LAYER_TYPES, rope_parameters=NESTED,
               classifier_activation="relu"),
    modernbert("modernbert, no output", "ModernBertModel", "last_hidden_state", global_attn_every_n_layers=2,
               global_rope_theta=500.0, local_rope_theta=77.0),
    llama("llama, 9 heads on 3", hidden_size=54, num_attention_heads=9, rms_norm_eps=1e-2),
    llama("llama, one key head, tied", num_key_value_heads=1, tie_word_embeddings=True),
    llama("llama, head_dim of its own", head_dim=10, num_key_value_heads=6),
    llama("llama, biases", attention_bias=True),
    llama("llama, MLP biases, theta", mlp_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    llama("llama, linear rope", **scaled_rope("linear")),
    llama(
        "llama, llama3 rope",
        **scaled_rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24),
    ),
    llama("mistral, window", "MistralForCausalLM", sliding_window=5),
    llama("mistral, no window", "MistralForCausalLM", sliding_window=None),
    llama("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    llama(
        "qwen2, windows from layer 1", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    llama(
        "qwen2, windows on all", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=3, max_window_layers=0
    ),
    deepseek("deepseek-v2, direct queries", slow=False),
    deepseek("deepseek-v2, query rank, biases", q_lora_rank=7, attention_bias=True, mlp_bias=True),
    deepseek("deepseek-v2, wide values, eps", v_head_dim=13, rms_norm_eps=1e-2, kv_lora_rank=4),
    deepseek("deepseek-v2, linear rope, tied", tie_word_embeddings=True, **scaled_rope("linear")),
    deepseek("deepseek-v2, yarn", slow=False, rope_parameters=YARN_MSCALE),
    deepseek("deepseek-v2, yarn, equal mscale, query rank", q_lora_rank=7, rope_parameters=YARN_MSCALE | {
        "mscale": 0.7, "mscale_all_dim": 0.7}),
    deepseek("deepseek-v2, yarn without mscale", rope_scaling={
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
    deepseek("deepseek-v2, linear rope, mscale", **scaled_rope("linear", mscale_all_dim=1.5)),
    deepseek("deepseek-v2, no output head", "DeepseekV2Model", "last_hidden_state"),
    llama("llama, yarn", slow=True, **scaled_rope("yarn", original_max_position_embeddings=16, beta_fast=4.0)),
    llama("llama, dynamic rope", slow=True, max_position_embeddings=16, **scaled_rope("dynamic")),
    llama("qwen3", "Qwen3ForCausalLM", head_dim=10),
    llama(
        "qwen3, windows, biases, tied", "Qwen3ForCausalLM", slow=True, head_dim=8, attention_bias=True,
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1, **scaled_rope("yarn"),
    ),
    llama("smollm3", "SmolLM3ForCausalLM", no_rope_layer_interval=2, pad_token_id=0),
    llama(
        "smollm3, windows, biases, listed layers", "SmolLM3ForCausalLM", slow=True, no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=5, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, pad_token_id=0,
        **scaled_rope("linear"),
    ),
    llama("phi3, longrope", "Phi3ForCausalLM", pad_token_id=0, **longrope(6)),
    llama("phi3, window, part of the channels", "Phi3ForCausalLM", slow=True, pad_token_id=0, sliding_window=5,
          hidden_size=48,
          rope_parameters={"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
          tie_word_embeddings=True),
    llama("ministral3", "Ministral3ForCausalLM", head_dim=10, rope_parameters={
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3}),
    llama("olmo2", "Olmo2ForCausalLM", pad_token_id=0),
    llama("olmo2, biases, tied", "Olmo2ForCausalLM", slow=True, pad_token_id=0, attention_bias=True,
          tie_word_embeddings=True, **scaled_rope("linear")),
    llama("olmo3", "Olmo3ForCausalLM", slow=True, pad_token_id=0, sliding_window=5, layer_types=LAYER_TYPES),
    llama("olmo3, rotary of each kind", "Olmo3ForCausalLM", slow=True, pad_token_id=0, sliding_window=5,
          rope_parameters=NESTED),
    llama("gemma2", "Gemma2ForCausalLM", head_dim=10, sliding_window=5, query_pre_attn_scalar=7),
    llama("gemma2, no caps, biases, untied", "Gemma2ForCausalLM", slow=True, head_dim=6, attn_logit_softcapping=None,
          final_logit_softcapping=None, attention_bias=True, tie_word_embeddings=False, layer_types=LAYER_TYPES,
          sliding_window=3, hidden_activation="gelu"),
    llama("gemma3", "Gemma3ForCausalLM", head_dim=10, sliding_window=5, layer_types=LAYER_TYPES, rope_parameters=NESTED),
    llama("gemma3, cap, biases, untied", "Gemma3ForCausalLM", slow=True, head_dim=6, sliding_window=4,
          query_pre_attn_scalar=9,
          final_logit_softcapping=5.0, attention_bias=True, tie_word_embeddings=False),
    llama("gemma3, no output head", "Gemma3TextModel", "last_hidden_state", slow=True, head_dim=10, sliding_window=5),
    llama("llama, no output head", "LlamaModel", "last_hidden_state"),
    llama("mistral, no output head", "MistralModel", "last_hidden_state", sliding_window=5),
    llama("qwen2, no output head", "Qwen2Model", "last_hidden_state", tie_word_embeddings=True),
)  # fmt: skip


def mark_slow(case: Case) -> Any:
    """Return a case as a parameter of a test. Variants of a family run in the slow tests only."""
    return pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ())


def randomize(model: torch.nn.Module) -> None:
    """Set random values in every parameter, including norms and biases, and sharp attention, so that errors are visible."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise + ("bias" not in name))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def measure_case(case: Case, folder: Path) -> Iterator[Result]:
    """Save a case, load it twice, and compare each length without padding and with padding on either side."""
    case.save(folder)
    native, reference = hw.load(folder), case.oracle(folder)
    assert isinstance(native, hw.Transformer)
    generator = torch.Generator().manual_seed(2)
    for length in LENGTHS:
        ids = torch.randint(VOCAB, (3, length), generator=generator)
        kinds = native.spec.token_types
        types = torch.randint(kinds, ids.shape, generator=generator) if kinds else None
        if case.pad_id is not None:
            ids[ids == case.pad_id] = case.pad_id + 1
        for side, attention_mask in padding_variants(length):
            padded = ids
            if case.pad_id is not None and attention_mask is not None:
                padded = ids.masked_fill(~attention_mask, case.pad_id)
            logits, weights = differences(native, reference, padded, attention_mask, types, case.output, case.pad_id)
            yield Result(case.name, length, side, logits, weights)


def padding_variants(length: int) -> Iterator[tuple[str, Tensor | None]]:
    """Return attention masks without padding, with right padding and with left padding, for a batch of three texts."""
    yield "", None
    if length > 2:
        lengths = torch.tensor([length, length // 3, length - 2])[:, None]
        yield "right", torch.arange(length)[None] < lengths
        yield "left", torch.arange(length)[None] >= length - lengths


def differences(
    native: hw.Transformer,
    reference: Any,
    ids: Tensor,
    attention_mask: Tensor | None,
    types: Tensor | None,
    output: str,
    pad_id: int | None = None,
) -> tuple[float, float]:
    """Return the largest |Δ| of outputs and of maps over real tokens."""
    kwargs: dict[str, Tensor] = {} if types is None else {"token_type_ids": types}
    if attention_mask is not None:  # by default transformers counts padding in positions
        kwargs["attention_mask"] = attention_mask.long()
    if attention_mask is not None and pad_id is None:
        kwargs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = reference(ids, output_attentions=True, **kwargs)
        got, native_maps = run_with_maps(native, ids, attention_mask=attention_mask, token_types=types)
    real_tokens = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask
    outputs = float((got - getattr(want, output))[real_tokens].abs().max())
    assert len(native_maps) == len(want.attentions) == native.spec.layers
    gaps = [(a - b).transpose(1, 2)[real_tokens].abs().max() for a, b in zip(native_maps, want.attentions, strict=True)]
    return outputs, float(torch.stack(gaps).max())


def run_with_maps(model: hw.Transformer, ids: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the output of a model and the attention maps of every layer, (B, H, T, S) each."""
    layer_maps: list[Tensor] = []
    with ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(
                hook_point.listen(lambda call: layer_maps.append(attention_weights(call.q, call.k, call.params)))
            )
        out = model(ids, **options)
    return out, layer_maps
