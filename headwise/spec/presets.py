"""Configurations of well-known models. `preset(name)` returns the spec of one of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import ArgumentError, suggest_names
from headwise.spec.attention import AttentionSpec, QKNorm, QueryScaling, Rotary, RotaryScaling
from headwise.spec.model import ModelSpec


@dataclass(frozen=True)
class PresetConfig:
    """A published configuration.

    Attributes:
        year: Year of publication.
        model: Fields of `ModelSpec`.
        attention: Fields of `AttentionSpec`.
        source: Publication of the numbers.
    """

    year: int
    model: dict[str, Any]
    attention: dict[str, Any]
    source: str

    @property
    def spec(self) -> ModelSpec:
        """The spec."""
        return ModelSpec(attention=AttentionSpec(**self.attention), **self.model)


# Fields shared by a model family. The rows of PRESETS add the sizes.
GPT2 = {"vocab": 50257, "context": 1024, "activation": "gelu_tanh"}
GPT2_HEADS = {"bias": True, "out_bias": True}
BERT = {
    "vocab": 30522, "context": 512, "kind": "encoder", "norm_placement": "post", "norm_eps": 1e-12, "embed_norm": True,
    "token_types": 2, "pooler": True, "output": "none",
}  # fmt: skip
LLAMA = {"norm": "rms", "activation": "swiglu", "mlp_bias": False, "positions": "none", "tied": False}
T5 = {
    "kind": "encoder-decoder", "norm": "rms", "norm_eps": 1e-6, "mlp_bias": False, "positions": "none", "context": 512,
    "causal_t5_buckets": True, "decoder_start_id": 0,
}  # fmt: skip
GEMMA = {
    **LLAMA, "norm": "rms_plus_one", "norm_eps": 1e-6, "norm_placement": "sandwich", "activation": "geglu_tanh",
    "tied": True,
}  # fmt: skip
LLAMA3_ROTARY = Rotary(500000.0)
MINISTRAL3_ROTARY = Rotary(1e6, scaling=RotaryScaling("yarn", 16.0, original_context=16384, attention_factor=1.0))

PRESETS: dict[str, PresetConfig] = {
    "nano": PresetConfig(
        2022,
        {"vocab": 256, "context": 256, "layers": 6},
        {"width": 384, "heads": 6},
        "a small decoder over bytes, the size of nanoGPT's Shakespeare run",
    ),
    "synthetic": PresetConfig(
        2026,
        {"vocab": 280, "context": 128, "layers": 4, "norm": "rms", "positions": "none", "mlp_bias": False},
        {"width": 128, "heads": 8, "rotary": Rotary()},
        "a small decoder for the synthetic language, the default of headwise train",
    ),
    "transformer-base": PresetConfig(
        2017,
        {"vocab": 37000, "context": 512, "layers": 6, "kind": "encoder-decoder", "norm_placement": "post",
         "activation": "relu", "positions": "sinusoidal", "embed_scale": 512**0.5, "dropout": 0.1},
        {"width": 512, "heads": 8},
        "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762",
    ),
    "bert-base": PresetConfig(
        2018,
        {**BERT, "layers": 12},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "Devlin et al. 2018, https://arxiv.org/abs/1810.04805",
    ),
    "minilm-l6": PresetConfig(
        2020,
        {**BERT, "layers": 6},
        {"width": 384, "heads": 12, **GPT2_HEADS},
        "all-MiniLM-L6-v2; Wang et al. 2020, https://arxiv.org/abs/2002.10957",
    ),
    "roberta-base": PresetConfig(
        2019,
        {**BERT, "vocab": 50265, "norm_eps": 1e-5, "token_types": 1, "position_offset": 2, "layers": 12},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "Liu et al. 2019, https://arxiv.org/abs/1907.11692",
    ),
    "distilbert-base": PresetConfig(
        2019,
        {**BERT, "token_types": 0, "pooler": False, "layers": 6},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "Sanh et al. 2019, https://arxiv.org/abs/1910.01108",
    ),
    "albert-base": PresetConfig(
        2019,
        {**BERT, "vocab": 30000, "embed_width": 128, "shared_layers": True, "activation": "gelu_tanh", "layers": 12},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "version 2; Lan et al. 2019, https://arxiv.org/abs/1909.11942",
    ),
    "gpt2": PresetConfig(
        2019,
        {**GPT2, "layers": 12},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    ),
    "gpt2-medium": PresetConfig(2019, {**GPT2, "layers": 24}, {"width": 1024, "heads": 16, **GPT2_HEADS}, "as gpt2"),
    "gpt2-large": PresetConfig(2019, {**GPT2, "layers": 36}, {"width": 1280, "heads": 20, **GPT2_HEADS}, "as gpt2"),
    "gpt2-xl": PresetConfig(2019, {**GPT2, "layers": 48}, {"width": 1600, "heads": 25, **GPT2_HEADS}, "as gpt2"),
    "t5-small": PresetConfig(
        2019,
        {**T5, "vocab": 32128, "layers": 6, "mlp_width": 2048, "activation": "relu", "logit_scale": 512**-0.5},
        {"width": 512, "heads": 8, "scale": 1.0, "t5_buckets": 32},
        "Raffel et al. 2019, https://arxiv.org/abs/1910.10683",
    ),
    "mt5-small": PresetConfig(
        2020,
        {**T5, "vocab": 250112, "layers": 8, "mlp_width": 1024, "activation": "geglu_tanh", "tied": False},
        {"width": 512, "heads": 6, "head_dim": 64, "scale": 1.0, "t5_buckets": 32},
        "Xue et al. 2020, https://arxiv.org/abs/2010.11934",
    ),
    "gpt-neo-125m": PresetConfig(
        2021,
        {**GPT2, "context": 2048, "layers": 12, "windows": (None, 256)},
        {"width": 768, "heads": 12, "out_bias": True, "scale": 1.0},
        "EleutherAI 2021, https://doi.org/10.5281/zenodo.5297715",
    ),
    "gpt3-175b": PresetConfig(
        2020,
        {**GPT2, "context": 2048, "layers": 96},
        {"width": 12288, "heads": 96, **GPT2_HEADS},
        "Brown et al. 2020, https://arxiv.org/abs/2005.14165 (its sparse layers taken as dense)",
    ),
    "llama2-7b": PresetConfig(
        2023,
        {**LLAMA, "vocab": 32000, "context": 4096, "layers": 32, "mlp_width": 11008},
        {"width": 4096, "heads": 32, "rotary": Rotary()},
        "Touvron et al. 2023, https://arxiv.org/abs/2307.09288",
    ),
    "llama2-70b": PresetConfig(
        2023,
        {**LLAMA, "vocab": 32000, "context": 4096, "layers": 80, "mlp_width": 28672},
        {"width": 8192, "heads": 64, "kv_heads": 8, "rotary": Rotary()},
        "as llama2-7b",
    ),
    "mistral-7b": PresetConfig(
        2023,
        {**LLAMA, "vocab": 32000, "context": 32768, "layers": 32, "mlp_width": 14336},
        {"width": 4096, "heads": 32, "kv_heads": 8, "rotary": Rotary(), "window": 4096},
        "version 0.1; Jiang et al. 2023, https://arxiv.org/abs/2310.06825",
    ),
    "llama3-8b": PresetConfig(
        2024,
        {**LLAMA, "vocab": 128256, "context": 8192, "layers": 32, "mlp_width": 14336},
        {"width": 4096, "heads": 32, "kv_heads": 8, "rotary": LLAMA3_ROTARY},
        "Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783",
    ),
    "llama3.2-1b": PresetConfig(
        2024,
        {**LLAMA, "vocab": 128256, "context": 131072, "layers": 16, "mlp_width": 8192, "tied": True},
        {"width": 2048, "heads": 32, "kv_heads": 8, "rotary": Rotary(500000.0, scaling=RotaryScaling("llama3", 32.0))},
        "as llama3-8b",
    ),
    "phi3-mini": PresetConfig(
        2024,
        {**LLAMA, "vocab": 32064, "context": 4096, "layers": 32, "mlp_width": 8192},
        {"width": 3072, "heads": 32, "rotary": Rotary(), "window": 2047},
        "4k; Abdin et al. 2024, https://arxiv.org/abs/2404.14219",
    ),
    "qwen2-0.5b": PresetConfig(
        2024,
        {**LLAMA, "norm_eps": 1e-6, "vocab": 151936, "context": 131072, "layers": 24, "mlp_width": 4864, "tied": True},
        {"width": 896, "heads": 14, "kv_heads": 2, "bias": True, "rotary": Rotary(1e6)},
        "Yang et al. 2024, https://arxiv.org/abs/2407.10671",
    ),
    "gemma2-2b": PresetConfig(
        2024,
        {**GEMMA, "vocab": 256000, "context": 8192, "layers": 26, "mlp_width": 9216, "windows": (4096, None),
         "embed_scale": 2304**0.5, "logit_softcap": 30.0},
        {"width": 2304, "heads": 8, "kv_heads": 4, "head_dim": 256, "rotary": Rotary(), "softcap": 50.0},
        "Gemma Team 2024, https://arxiv.org/abs/2408.00118",
    ),
    "olmo2-7b": PresetConfig(
        2024,
        {**LLAMA, "norm_eps": 1e-6, "norm_placement": "output", "vocab": 100352, "context": 4096, "layers": 32,
         "mlp_width": 11008},
        {"width": 4096, "heads": 32, "rotary": LLAMA3_ROTARY, "qk_norm": QKNorm(over="width")},
        "OLMo Team 2024, https://arxiv.org/abs/2501.00656",
    ),
    "modernbert-base": PresetConfig(
        2024,
        {"kind": "encoder", "norm": "layer_no_bias", "activation": "geglu", "mlp_bias": False, "positions": "none",
         "embed_norm": True, "first_norm": False, "output": "none", "vocab": 50368, "context": 8192, "layers": 22,
         "mlp_width": 1152, "windows": (None, 65, 65), "rotaries": (Rotary(160000.0), Rotary(), Rotary()),
         "output_activation": "gelu", "transform_bias": False},
        {"width": 768, "heads": 12, "rotary": Rotary(160000.0)},
        "Warner et al. 2024, https://arxiv.org/abs/2412.13663",
    ),
    "smollm2-135m": PresetConfig(
        2025,
        {**LLAMA, "vocab": 49152, "context": 8192, "layers": 30, "mlp_width": 1536, "tied": True},
        {"width": 576, "heads": 9, "kv_heads": 3, "rotary": Rotary(theta=100000.0)},
        "Ben Allal et al. 2025, https://arxiv.org/abs/2502.02737",
    ),
    "gemma3-1b": PresetConfig(
        2025,
        {**GEMMA, "vocab": 262144, "context": 32768, "layers": 26, "mlp_width": 6912, "embed_scale": 1152**0.5,
         "windows": (*[512] * 5, None), "rotaries": (*[Rotary()] * 5, Rotary(1e6))},
        {"width": 1152, "heads": 4, "kv_heads": 1, "head_dim": 256, "rotary": Rotary(),
         "qk_norm": QKNorm("rms_plus_one")},
        "Gemma Team 2025, https://arxiv.org/abs/2503.19786",
    ),
    "qwen3-0.6b": PresetConfig(
        2025,
        {**LLAMA, "norm_eps": 1e-6, "vocab": 151936, "context": 40960, "layers": 28, "mlp_width": 3072, "tied": True},
        {"width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "rotary": Rotary(1e6), "qk_norm": QKNorm()},
        "Yang et al. 2025, https://arxiv.org/abs/2505.09388",
    ),
    "qwen3-8b": PresetConfig(
        2025,
        {**LLAMA, "norm_eps": 1e-6, "vocab": 151936, "context": 40960, "layers": 36, "mlp_width": 12288},
        {"width": 4096, "heads": 32, "kv_heads": 8, "rotary": Rotary(1e6), "qk_norm": QKNorm()},
        "as qwen3-0.6b",
    ),
    "smollm3-3b": PresetConfig(
        2025,
        {**LLAMA, "norm_eps": 1e-6, "vocab": 128256, "context": 65536, "layers": 36, "mlp_width": 11008, "tied": True,
         "rotaries": (*[Rotary(5e6)] * 3, None)},
        {"width": 2048, "heads": 16, "kv_heads": 4, "rotary": Rotary(5e6)},
        "Hugging Face 2025, https://huggingface.co/blog/smollm3",
    ),
    "ministral3-8b": PresetConfig(
        2025,
        {**LLAMA, "vocab": 131072, "context": 262144, "layers": 34, "mlp_width": 14336},
        {"width": 4096, "heads": 32, "kv_heads": 8, "rotary": MINISTRAL3_ROTARY,
         "query_scaling": QueryScaling(0.1, 16384)},
        "the text model; Mistral AI 2025, https://mistral.ai/news/mistral-3",
    ),
}  # fmt: skip


def presets() -> tuple[str, ...]:
    """Return the names of all presets.

    Returns:
        The names by year, as in `headwise presets`.

    >>> "gpt2" in presets()
    True
    """
    return tuple(sorted(PRESETS, key=lambda name: PRESETS[name].year))


def preset(name: str) -> ModelSpec:
    """Return the spec of a well-known model.

    Args:
        name: Name of the preset, one of `presets()`.

    Returns:
        The spec. `hw.Transformer(spec)` builds a model with random weights from it.

    Raises:
        ArgumentError: The name is unknown.

    >>> spec = preset("llama2-70b")
    >>> spec.layers, spec.attention.heads, spec.attention.kv_heads, spec.num_parameters
    (80, 64, 8, 68976648192)
    """
    if name not in PRESETS:
        raise ArgumentError(f"preset {name!r}: unknown; {suggest_names(name, PRESETS)}")
    return PRESETS[name].spec


def describe_positions(spec: ModelSpec) -> str:
    """Return the position encoding and the windows of a model in a few words.

    >>> describe_positions(preset("smollm3-3b"))
    'rotary 5e+06 (27 layers), none (9 layers)'
    >>> describe_positions(preset("gemma2-2b"))
    'rotary 10000; window 4096 (13 layers), none (13 layers)'
    """
    attention = [spec.attention_at(address) for address in spec.layer_addresses if address.stack != "cross"]
    if spec.attention.t5_buckets:
        positions = f"{spec.attention.t5_buckets} T5 buckets"
    elif spec.attention.alibi:
        positions = "ALiBi"
    elif any(layer.rotary for layer in attention):
        positions = _count_by_layer([_rotary_text(layer.rotary) for layer in attention])
    else:
        positions = spec.positions
    if spec.attention.query_scaling:
        positions += "; scaled queries"
    windows = [layer.window for layer in attention]
    if not any(windows):
        return positions
    return f"{positions}; window {_count_by_layer(['none' if window is None else str(window) for window in windows])}"


def _rotary_text(rotary: Rotary | None) -> str:
    if rotary is None:
        return "none"
    scaling = "" if rotary.scaling is None else f" {rotary.scaling.kind} × {rotary.scaling.factor:g}"
    return f"rotary {rotary.theta:g}{scaling}"


def _count_by_layer(values: Sequence[str]) -> str:
    """Join distinct values with their numbers of layers, or return the only one."""
    counts = Counter(values)
    if len(counts) == 1:
        return values[0]
    return ", ".join(f"{value} ({count} layers)" for value, count in counts.items())


def describe_norms(spec: ModelSpec) -> str:
    """Return the norms of a model in a few words.

    >>> describe_norms(preset("qwen3-8b"))
    'RMSNorm, pre; q and k per head'
    """
    kind = {
        "layer": "LayerNorm",
        "layer_no_bias": "LayerNorm without bias",
        "rms": "RMSNorm",
        "rms_plus_one": "RMSNorm 1 + w",
    }[spec.norm]
    norm = spec.attention.qk_norm
    over = "" if norm is None else "; q and k per head" if norm.over == "head" else "; q and k over all heads"
    return f"{kind}, {spec.norm_placement}{over}"


def describe_gates_and_caps(spec: ModelSpec) -> str:
    """Return the gates, caps and softmax variant of the heads of a model in a few words.

    >>> describe_gates_and_caps(preset("gemma2-2b"))
    'scores capped at 50'
    """
    attention = spec.attention
    parts = [f"per token and {attention.output_gate}"] if attention.output_gate else []
    parts += ["one number per head"] if attention.gated else []
    parts += [f"{attention.softmax} softmax"] if attention.softmax != "plain" else []
    parts += [f"scores capped at {attention.softcap:g}"] if attention.softcap else []
    return ", ".join(parts) or "none"
