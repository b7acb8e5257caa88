"""Small random checkpoints made by transformers, and how far our logits and maps are from theirs on them."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.kernels import maps

VOCAB, CONTEXT, LAYERS, HIDDEN = 61, 48, 3, 52
LENGTHS = (1, 2, 7, 31)
LOGITS_LIMIT, MAPS_LIMIT = 1e-4, 1e-5


@dataclass(frozen=True)
class Case:
    """One checkpoint: which class of transformers, and what in its configuration is not the default."""

    name: str
    model: str
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # of the class
    output: str = "logits"

    def save(self, folder: Path) -> Path:
        """Make it, give it random weights, write it."""
        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = kind(kind.config_class(**self.config), **self.options)
        randomise(model)
        model.save_pretrained(folder)
        return folder

    def oracle(self, folder: Path) -> Any:
        """What transformers reads from the folder, with the attention that shows its maps."""
        kind = getattr(transformers, self.model)
        return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **self.options).eval()


@dataclass(frozen=True)
class Result:
    """How far a case is off, and how far it may be."""

    case: str
    tokens: int
    padding: str  # "", right, left
    logits: float
    maps: float
    logits_limit: float = LOGITS_LIMIT
    maps_limit: float = MAPS_LIMIT

    @property
    def ok(self) -> bool:
        return self.logits <= self.logits_limit and self.maps <= self.maps_limit  # NaN is not


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


def llama(name: str, model: str = "LlamaForCausalLM", output: str = "logits", **config: Any) -> Case:
    sizes = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": LAYERS}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "intermediate_size": HIDDEN}
    return Case(name, model, sizes | {"bos_token_id": 0, "eos_token_id": 0} | config, output=output)


def scaled_rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **more}}


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
    llama("llama, no output head", "LlamaModel", "last_hidden_state"),
    llama("mistral, no output head", "MistralModel", "last_hidden_state", sliding_window=5),
    llama("qwen2, no output head", "Qwen2Model", "last_hidden_state", tie_word_embeddings=True),
)  # fmt: skip


def randomise(model: torch.nn.Module) -> None:
    """Numbers in every parameter such that no detail hides: norms and biases too, and heads that pick and choose."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise + ("bias" not in name))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def measure(case: Case, folder: Path) -> Iterator[Result]:
    """Save a case, load it twice, and compare every length without padding and with it on either side."""
    case.save(folder)
    ours, theirs = hw.load(folder), case.oracle(folder)
    assert isinstance(ours, hw.Transformer)
    draws = torch.Generator().manual_seed(2)
    for length in LENGTHS:
        ids = torch.randint(VOCAB, (3, length), generator=draws)
        types = torch.randint(3, ids.shape, generator=draws) if ours.spec.token_types else None
        for told, real in paddings(length):
            logits, weights = differences(ours, theirs, ids, real, types, case.output)
            yield Result(case.name, length, told, logits, weights)


def paddings(length: int) -> Iterator[tuple[str, Tensor | None]]:
    """None, on the right, on the left: a batch of three, of which the second is cut most."""
    yield "", None
    if length > 2:
        lengths = torch.tensor([length, length // 3, length - 2])[:, None]
        yield "right", torch.arange(length)[None] < lengths
        yield "left", torch.arange(length)[None] >= length - lengths


def differences(
    ours: hw.Transformer, theirs: Any, ids: Tensor, real: Tensor | None, types: Tensor | None, output: str
) -> tuple[float, float]:
    """The largest |Δ| of outputs and of maps, over real tokens."""
    told: dict[str, Tensor] = {} if types is None else {"token_type_ids": types}
    if real is not None:  # their default positions count padding as well
        told |= {"attention_mask": real.long(), "position_ids": (real.long().cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        want = theirs(ids, output_attentions=True, **told)
        got, mine = listened(ours, ids, padding=real, token_types=types)
    everything = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    outputs = float((got - getattr(want, output))[everything].abs().max())
    assert len(mine) == len(want.attentions) == ours.spec.layers
    gaps = [(a - b).transpose(1, 2)[everything].abs().max() for a, b in zip(mine, want.attentions, strict=True)]
    return outputs, float(torch.stack(gaps).max())


def listened(model: hw.Transformer, ids: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """A model's output, and every layer's maps rebuilt from what its site showed: (B, H, T, S) each."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        for site in model.sites():
            stack.enter_context(site.listen(lambda call: seen.append(maps(call.q, call.k, call.terms))))
        out = model(ids, **options)
    return out, seen
