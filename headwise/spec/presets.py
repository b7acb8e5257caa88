"""Configurations of well-known models. `preset(name)` returns the spec of one of them."""

from headwise.errors import ArgumentError, suggest_names
from headwise.spec.attention import AttentionSpec, Rotary
from headwise.spec.model import ModelSpec

# Fields shared by a model family. The rows of PRESETS add the sizes.
GPT2 = {"vocab": 50257, "context": 1024, "activation": "gelu_tanh"}
GPT2_HEADS = {"bias": True, "out_bias": True}
BERT = {
    "vocab": 30522, "context": 512, "kind": "encoder", "norm_placement": "post", "norm_eps": 1e-12, "embed_norm": True,
    "token_types": 2, "pooler": True, "output": "none",
}  # fmt: skip
LLAMA = {"norm": "rms", "activation": "swiglu", "mlp_bias": False, "positions": "none", "tied": False}

# name: (fields of ModelSpec, fields of AttentionSpec, source of the numbers)
PRESETS: dict[str, tuple[dict, dict, str]] = {
    "nano": (
        {"vocab": 256, "context": 256, "layers": 6},
        {"width": 384, "heads": 6},
        "a small decoder over bytes, the size of nanoGPT's Shakespeare run",
    ),
    "synthetic": (
        {"vocab": 280, "context": 128, "layers": 4, "norm": "rms", "positions": "none", "mlp_bias": False},
        {"width": 128, "heads": 8, "rotary": Rotary()},
        "a small decoder for the synthetic language, the default of headwise train",
    ),
    "transformer-base": (
        {"vocab": 37000, "context": 512, "layers": 6, "kind": "encoder-decoder", "norm_placement": "post",
         "activation": "relu", "positions": "sinusoidal", "embed_scale": 512**0.5, "dropout": 0.1},
        {"width": 512, "heads": 8},
        "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762",
    ),
    "bert-base": (
        {**BERT, "layers": 12},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "Devlin et al. 2018, https://arxiv.org/abs/1810.04805",
    ),
    "minilm-l6": (
        {**BERT, "layers": 6},
        {"width": 384, "heads": 12, **GPT2_HEADS},
        "all-MiniLM-L6-v2; Wang et al. 2020, https://arxiv.org/abs/2002.10957",
    ),
    "gpt2": (
        {**GPT2, "layers": 12},
        {"width": 768, "heads": 12, **GPT2_HEADS},
        "Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    ),
    "gpt2-medium": ({**GPT2, "layers": 24}, {"width": 1024, "heads": 16, **GPT2_HEADS}, "as gpt2"),
    "gpt2-large": ({**GPT2, "layers": 36}, {"width": 1280, "heads": 20, **GPT2_HEADS}, "as gpt2"),
    "gpt2-xl": ({**GPT2, "layers": 48}, {"width": 1600, "heads": 25, **GPT2_HEADS}, "as gpt2"),
    "gpt-neo-125m": (
        {**GPT2, "context": 2048, "layers": 12, "windows": (None, 256)},
        {"width": 768, "heads": 12, "out_bias": True, "scale": 1.0},
        "EleutherAI 2021, https://doi.org/10.5281/zenodo.5297715",
    ),
    "gpt3-175b": (
        {**GPT2, "context": 2048, "layers": 96},
        {"width": 12288, "heads": 96, **GPT2_HEADS},
        "Brown et al. 2020, https://arxiv.org/abs/2005.14165 (its sparse layers taken as dense)",
    ),
    "llama2-7b": (
        {**LLAMA, "vocab": 32000, "context": 4096, "layers": 32, "mlp_width": 11008},
        {"width": 4096, "heads": 32, "rotary": Rotary()},
        "Touvron et al. 2023, https://arxiv.org/abs/2307.09288",
    ),
    "llama2-70b": (
        {**LLAMA, "vocab": 32000, "context": 4096, "layers": 80, "mlp_width": 28672},
        {"width": 8192, "heads": 64, "kv_heads": 8, "rotary": Rotary()},
        "as llama2-7b",
    ),
    "smollm2-135m": (
        {**LLAMA, "vocab": 49152, "context": 8192, "layers": 30, "mlp_width": 1536, "tied": True},
        {"width": 576, "heads": 9, "kv_heads": 3, "rotary": Rotary(theta=100000.0)},
        "Ben Allal et al. 2025, https://arxiv.org/abs/2502.02737",
    ),
}  # fmt: skip


def presets() -> tuple[str, ...]:
    """Return the names of all presets.

    Returns:
        The names, in the order of `headwise presets`.

    >>> "gpt2" in presets()
    True
    """
    return tuple(PRESETS)


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
    model_fields, attention_fields, _ = PRESETS[name]
    return ModelSpec(attention=AttentionSpec(**attention_fields), **model_fields)
