"""What somebody else's model is, as a `ModelSpec`: as far as those who look at it ask."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from headwise.attached.families import family_of
from headwise.attached.forward import counted_by
from headwise.attached.layer import Layer
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec, SiteAddress

TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")  # of positions
CONTEXTS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
HIDDEN = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "decoder_ffn_dim")
GATED_MLP = ("gate_proj", "gate_up_proj", "wi_0")
LANGUAGE_FIRST = ("mbart", "m2m_100", "nllb-moe", "plbart")
LONG = 1 << 20  # tokens, where a model does not say how many it can read


def describe(model: Any, layers: Sequence[Layer]) -> ModelSpec:
    """Kind, layers, heads and sizes. Heads that layers do not have, but others do, count as cut."""
    stacks = {layer.site.address.stack for layer in layers}
    plain = stacks in ({""}, {"enc", "dec", "cross"}, {"enc", "dec"})
    last = (
        layers[0] if plain else next((layer for layer in layers if layer.site.address.stack in ("", "text")), layers[0])
    )
    kind = "encoder-decoder" if plain and "enc" in stacks else "decoder" if is_causal(last) else "encoder"
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    count = {
        stack: 1 + max(layer.site.address.layer for layer in layers if layer.site.address.stack == stack)
        for stack in stacks
    }
    told = getattr(config, "num_hidden_layers", None)
    if "" in count and isinstance(told, int):  # layers without attention may follow
        count[""] = max(count[""], told)
    largest = max((layer.spec for layer in layers), key=lambda spec: spec.heads)
    known = family_of(layers[0].found)
    outputs = {"decoder": "lm", "encoder": "mlm", "encoder-decoder": "lm"}
    return ModelSpec(
        vocab=max(1, int(getattr(config, "vocab_size", None) or 1)),
        context=_context(model, config),
        layers=count.get("", count.get("dec", count.get("text", max(count.values())))),
        encoder_layers=count.get("enc", 0) if plain else 0,
        attention=AttentionSpec(
            width=largest.width, heads=largest.heads, head_dim=largest.head_dim, value_dim=largest.value_dim,
            kv_heads=largest.kv_heads, rotary=largest.rotary,
        ),
        hidden=next((int(size) for name in HIDDEN if isinstance(size := getattr(config, name, None), int)), 0),
        activation="swiglu" if any(name.rpartition(".")[2] in GATED_MLP for name, _ in model.named_modules()) else "gelu",
        form="post" if known is not None and known.norm is None else "pre",
        kind=kind,
        windows=_windows(layers, count),
        positions="learned" if has_learned_positions(model) else "none",
        output=outputs[kind] if has_output(model) else "none",  # pyright: ignore
        kept=_kept(layers, kind, count),
        stacks=() if plain else tuple((stack, count[stack]) for stack in dict.fromkeys(a.site.address.stack for a in layers)),
    )  # fmt: skip


def _context(model: nn.Module, config: Any) -> int:
    """How many tokens the model can read."""
    size = next((int(size) for name in CONTEXTS if (size := getattr(config, name, None))), LONG)
    by = counted_by(model)
    return size if by is None else size - by - 1


def has_output(model: Any) -> bool:
    """Whether the model gives logits over its vocabulary."""
    return model.get_output_embeddings() is not None


def has_learned_positions(model: nn.Module) -> bool:
    """Whether positions are rows of a table, which ends somewhere: learned, or sines written down once (GPT-J)."""
    learned = [name for name, part in model.named_modules() if isinstance(part, nn.Embedding)]
    fixed = [name for name, part in model.named_buffers() if part.dim() == 2]
    return any(name.rpartition(".")[2] in TABLES for name in (*learned, *fixed))


def is_causal(layer: Layer) -> bool:
    """Whether a layer looks back only; SDPA takes that for granted where a module does not say."""
    if layer.looks_ahead is not None:
        return not layer.looks_ahead
    return bool(getattr(layer.module, "is_causal", True))


def _windows(layers: Sequence[Layer], count: dict[str, int]) -> tuple[int | None, ...]:
    """How far each layer sees, if any sees less than all; told of models with one stack."""
    if set(count) != {""}:
        return ()
    there = {layer.site.address.layer: layer.site.window for layer in layers if layer.site.address.stack == ""}
    return tuple(there.get(layer) for layer in range(count[""])) if any(there.values()) else ()


def _kept(layers: Sequence[Layer], kind: str, count: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The heads each layer has; layers without attention have none."""
    stacks = ("enc", "dec", "cross") if kind == "encoder-decoder" else tuple(count)
    every = [
        SiteAddress(stack, layer)
        for stack in stacks
        for layer in range(count.get("dec" if stack == "cross" and kind == "encoder-decoder" else stack, 0))
    ]
    there = {layer.site.address: layer.spec.head_ids for layer in layers}
    return {str(site): there.get(site, ()) for site in every}


def start_of(model: Any) -> int:
    """The token before what an encoder-decoder writes, as its configuration has it."""
    if getattr(model.config, "model_type", None) in LANGUAGE_FIRST:
        raise HeadwiseError(
            f"{type(model).__name__} is told languages by codes in front, which texts alone do not have; ask it by your own "
            f"calls, inside hw.ablated(theirs, …)."
        )
    for told in (model.config, getattr(model, "generation_config", None)):
        found = getattr(told, "decoder_start_token_id", None)
        if found is not None:
            return found
    raise HeadwiseError(
        f"the configuration of this {type(model).__name__} does not say which token writing starts from; set "
        f"model.config.decoder_start_token_id."
    )
