"""Summary of a model, read without its weights."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headwise.attached.infer_spec import infer_spec
from headwise.attached.save_load_transformers_folder import build_on_meta
from headwise.io.resolve_path import resolve_model_path, safe_child
from headwise.spec import ModelSpec
from headwise.spec.presets import PRESETS, preset
from headwise.text import Tokenizer
from headwise.weights.load import needs_transformers, open_checkpoint


@dataclass(frozen=True)
class ModelInfo:
    """Summary of a model.

    Attributes:
        source: Name or path as given.
        family: Model family, `headwise` for our own format, or `preset`.
        kind: decoder, encoder or encoder-decoder.
        layers: Number of layers, encoder layers included.
        heads: Number of heads in all layers.
        heads_by_layer: Number of heads per layer, or its range.
        kv_heads: Number of KV heads in all layers.
        head_dim: Size of a head.
        width: Size of the residual stream.
        mlp_width: Hidden size of the MLP.
        vocab: Vocabulary size.
        context: Maximum number of tokens.
        parameters: Number of parameters.
        float32_megabytes: Size of all weights in float32.
        stored_megabytes: Size of the weights as stored, with quantization and its scales.
        weight_bits: Bits of the quantized parts.
        kv_cache_kilobytes_per_token: Size of the KV cache per token in float32, with a full cache for all KV heads.
        cache_policies: KV heads with a smaller cache.
        tokenizer: Number of tokens, or `none`.
    """

    source: str
    family: str
    kind: str
    layers: int
    heads: int
    heads_by_layer: str
    kv_heads: int
    head_dim: int
    width: int
    mlp_width: int
    vocab: int
    context: int
    parameters: int
    float32_megabytes: float
    stored_megabytes: float
    weight_bits: str
    kv_cache_kilobytes_per_token: float
    cache_policies: str
    tokenizer: str


def info(source: str | Path) -> ModelInfo:
    """Summarize a model without reading its weights.

    Args:
        source: Any source that `load` takes, or the name of a preset.

    >>> info("gpt2").parameters
    124439808
    """
    if str(source) in PRESETS and not Path(source).exists():
        return _spec_info(str(source), preset(str(source)), "preset", "none: a preset has no weights")
    if needs_transformers(path := resolve_model_path(source)):
        return _attached_info(str(source), path)
    checkpoint = open_checkpoint(path)
    family = "headwise" if checkpoint.family is None else checkpoint.family.name
    tokenizer_summary = "none" if checkpoint.tokenizer is None else f"{len(checkpoint.tokenizer()):,} tokens"
    return _spec_info(str(source), checkpoint.spec, family, tokenizer_summary)


def spec_of(source: str | Path) -> ModelSpec:
    """Return the spec of a preset, or of any source that `load` takes, without reading weights.

    >>> spec_of("llama2-70b").layers
    80
    """
    if str(source) in PRESETS and not Path(source).exists():
        return preset(str(source))
    path = resolve_model_path(source)
    return infer_spec(*build_on_meta(path)) if needs_transformers(path) else open_checkpoint(path).spec


def _attached_info(source: str, folder: Path) -> ModelInfo:
    """Summarize the model that transformers builds from a folder, without its weights."""
    model, layers = build_on_meta(folder)
    tokenizer_summary = (
        f"{len(Tokenizer.load(folder)):,} tokens" if any(map(Path.is_file, _tokenizer_files(folder))) else "none"
    )
    facts = _spec_info(
        source, infer_spec(model, layers), f"{model.config.model_type}, through transformers", tokenizer_summary
    )
    num_parameters = sum(value.numel() for value in model.parameters())
    return replace(
        facts,
        parameters=num_parameters,
        float32_megabytes=num_parameters * 4 / 1e6,
        stored_megabytes=num_parameters * 4 / 1e6,
    )


def _tokenizer_files(folder: Path) -> list[Path]:
    return [safe_child(folder, name) for name in ("tokenizer.json", "vocab.txt")]


def _spec_info(source: str, spec: ModelSpec, family: str, tokenizer: str) -> ModelInfo:
    layers = [spec.attention_at(layer_address) for layer_address in spec.layer_addresses]
    counts = sorted({len(layer.head_ids) for layer in layers})
    sizes = spec.attention
    cached = [
        layer
        for layer_address, layer in zip(spec.layer_addresses, layers, strict=True)
        if layer_address.stack in ("", "dec")
    ]
    values_per_token = sum(len(layer.kv_head_ids) * (layer.head_dim + layer.value_dim) for layer in cached)
    return ModelInfo(
        source=source,
        family=family,
        kind=spec.kind,
        layers=spec.layers + spec.encoder_layers,
        heads=sum(len(layer.head_ids) for layer in layers),
        heads_by_layer=f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "none",
        kv_heads=sum(len(layer.kv_head_ids) for layer in layers),
        head_dim=sizes.head_dim,
        width=spec.width,
        mlp_width=spec.mlp_width,
        vocab=spec.vocab,
        context=spec.context,
        parameters=spec.num_parameters,
        float32_megabytes=spec.num_parameters * 4 / 1e6,
        stored_megabytes=spec.weight_bytes() / 1e6,
        weight_bits=_describe_bits(spec),
        kv_cache_kilobytes_per_token=0.0 if spec.kind == "encoder" else values_per_token * 4 / 1e3,
        cache_policies=_describe_caches(spec),
        tokenizer=tokenizer,
    )


def _describe_bits(spec: ModelSpec) -> str:
    """Return the bits of each quantized part in descending order, such as `heads 8 4, mlp 8`."""
    bits_by_part: dict[str, set[int]] = {}
    for rule in spec.weight_rules:
        bits_by_part.setdefault("heads" if rule.heads else rule.part, set()).add(rule.bits)
    parts = [f"{part} {' '.join(map(str, sorted(bits, reverse=True)))}" for part, bits in sorted(bits_by_part.items())]
    return ", ".join(parts) or "float32"


def _describe_caches(spec: ModelSpec) -> str:
    """Return the cache policies, such as `streaming 4 + 128: 45 of 90 KV heads`."""
    if spec.kind == "encoder":
        return "none"
    descriptions = [
        f"{rule.policy}: {len(rule.heads)} of {len(spec.cached_kv_head_addresses)} KV heads" for rule in spec.cache
    ]
    return "; ".join(descriptions) or "everything"


def info_rows(facts: ModelInfo) -> list[list[Any]]:
    """Return the summary as rows of a table."""
    return [[name.replace("_", " "), value] for name, value in asdict(facts).items()]
