"""What a model is, told without reading its weights."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headwise.attached.infer_spec import describe
from headwise.attached.save_load import skeleton
from headwise.io.resolve_path import find, inside
from headwise.spec import ModelSpec
from headwise.spec.presets import ROWS, preset
from headwise.text import Tokenizer
from headwise.weights.load import is_theirs, open_checkpoint


@dataclass(frozen=True)
class Info:
    """The facts of a model."""

    source: str
    family: str
    kind: str
    layers: int
    heads: int  # all there are, over all layers
    heads_by_layer: str
    kv_heads: int
    head_dim: int
    width: int
    hidden: int
    vocab: int
    context: int
    parameters: int
    float32_megabytes: float
    stored_megabytes: float  # the same where weights are packed: at their bits, scales among them
    weight_bits: str  # which parts are at few bits
    kv_cache_kilobytes_per_token: float  # in float32, where every key head keeps it
    caches: str  # which key heads keep less
    tokenizer: str


def info(source: str | Path) -> Info:
    """Read what a model is: anything `load` takes, or the name of a preset.

    >>> info("gpt2").parameters
    124439808
    """
    if str(source) in ROWS and not Path(source).exists():
        return _info(str(source), preset(str(source)), "preset", "none: a preset has no weights")
    if is_theirs(path := find(source)):
        return _info_of_theirs(str(source), path)
    checkpoint = open_checkpoint(path)
    family = "headwise" if checkpoint.family is None else checkpoint.family.name
    tokens = "none" if checkpoint.tokenizer is None else f"{len(checkpoint.tokenizer()):,} tokens"
    return _info(str(source), checkpoint.spec, family, tokens)


def spec_of(source: str | Path) -> ModelSpec:
    """The spec of anything `load` takes, or of a preset, without its weights.

    >>> spec_of("llama2-70b").layers
    80
    """
    if str(source) in ROWS and not Path(source).exists():
        return preset(str(source))
    path = find(source)
    return describe(*skeleton(path)) if is_theirs(path) else open_checkpoint(path).spec


def _info_of_theirs(source: str, folder: Path) -> Info:
    """What transformers would build from a folder, without its weights."""
    model, layers = skeleton(folder)
    tokens = f"{len(Tokenizer.load(folder)):,} tokens" if any(map(Path.is_file, _tokenizers(folder))) else "none"
    facts = _info(source, describe(model, layers), f"{model.config.model_type}, through transformers", tokens)
    count = sum(value.numel() for value in model.parameters())
    return replace(facts, parameters=count, float32_megabytes=count * 4 / 1e6, stored_megabytes=count * 4 / 1e6)


def _tokenizers(folder: Path) -> list[Path]:
    return [inside(folder, name) for name in ("tokenizer.json", "vocab.txt")]


def _info(source: str, spec: ModelSpec, family: str, tokenizer: str) -> Info:
    layers = [spec.attention_at(site) for site in spec.sites]
    counts = sorted({len(layer.head_ids) for layer in layers})
    sizes = spec.attention
    cached = [layer for site, layer in zip(spec.sites, layers, strict=True) if site.stack in ("", "dec")]
    numbers = sum(len(layer.kv_ids) * (layer.head_dim + layer.value_dim) for layer in cached)
    return Info(
        source=source,
        family=family,
        kind=spec.kind,
        layers=spec.layers + spec.encoder_layers,
        heads=sum(len(layer.head_ids) for layer in layers),
        heads_by_layer=f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "none",
        kv_heads=sum(len(layer.kv_ids) for layer in layers),
        head_dim=sizes.head_dim,
        width=spec.width,
        hidden=spec.hidden,
        vocab=spec.vocab,
        context=spec.context,
        parameters=spec.parameters,
        float32_megabytes=spec.parameters * 4 / 1e6,
        stored_megabytes=spec.weight_bytes() / 1e6,
        weight_bits=_bits(spec),
        kv_cache_kilobytes_per_token=0.0 if spec.kind == "encoder" else numbers * 4 / 1e3,
        caches=_caches(spec),
        tokenizer=tokenizer,
    )


def _bits(spec: ModelSpec) -> str:
    """heads 8 4, mlp 8: the bits of each part, the most first."""
    told: dict[str, set[int]] = {}
    for rule in spec.weights:
        told.setdefault("heads" if rule.heads else rule.part, set()).add(rule.bits)
    parts = [f"{part} {' '.join(map(str, sorted(bits, reverse=True)))}" for part, bits in sorted(told.items())]
    return ", ".join(parts) or "float32"


def _caches(spec: ModelSpec) -> str:
    """streaming 4 + 128: 45 of 90 key heads."""
    if spec.kind == "encoder":
        return "none"
    told = [f"{rule.keeps}: {len(rule.heads)} of {len(spec.key_heads)} key heads" for rule in spec.cache]
    return "; ".join(told) or "everything"


def as_rows(facts: Info) -> list[list[Any]]:
    """The facts as rows of a table."""
    return [[name.replace("_", " "), value] for name, value in asdict(facts).items()]
