"""Infer the `ModelSpec` of an attached model, with the fields that analysis and pruning need."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headwise.attached.known_input_norms import norm_placement_of
from headwise.attached.layer import AttachedLayer
from headwise.attached.quantize_in_place import quantization_of
from headwise.attached.transformers_forward import position_padding_idx
from headwise.errors import UnsupportedModelError
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec
from headwise.spec.weight_bits import filter_rules

POSITION_TABLE_NAMES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
MLP_WIDTH_FIELDS = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "decoder_ffn_dim")
GATED_MLP_NAMES = ("gate_proj", "gate_up_proj", "wi_0")
LANGUAGE_CODE_MODEL_TYPES = ("mbart", "m2m_100", "nllb-moe", "plbart")
DEFAULT_CONTEXT = 1 << 20  # tokens; used if the configuration gives no limit


def infer_spec(model: Any, layers: Sequence[AttachedLayer]) -> ModelSpec:
    """Infer kind, layers, heads and sizes. If layers differ in their number of heads, missing heads count as pruned."""
    stacks = {layer.hook_point.address.stack for layer in layers}
    is_standard = stacks in ({""}, {"enc", "dec", "cross"}, {"enc", "dec"})
    main_layer = (
        layers[0]
        if is_standard
        else next((layer for layer in layers if layer.hook_point.address.stack in ("", "text")), layers[0])
    )
    kind = "encoder-decoder" if is_standard and "enc" in stacks else "decoder" if is_causal(main_layer) else "encoder"
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    layers_by_stack = {
        stack: 1 + max(layer.hook_point.address.layer for layer in layers if layer.hook_point.address.stack == stack)
        for stack in stacks
    }
    config_layers = getattr(config, "num_hidden_layers", None)
    if "" in layers_by_stack and isinstance(config_layers, int):  # layers without attention may follow
        layers_by_stack[""] = max(layers_by_stack[""], config_layers)
    largest = max((layer.spec for layer in layers), key=lambda spec: spec.heads)
    family = norm_placement_of(layers[0].info)
    is_gated = any(name.rpartition(".")[2] in GATED_MLP_NAMES for name, _ in model.named_modules())
    ordered_stacks = dict.fromkeys(layer.hook_point.address.stack for layer in layers)
    main_stack = next((stack for stack in ("", "dec", "text") if stack in layers_by_stack), None)
    outputs = {"decoder": "lm", "encoder": "mlm", "encoder-decoder": "lm"}
    spec = ModelSpec(
        vocab=max(1, int(getattr(config, "vocab_size", None) or 1)),
        context=_context(model, config),
        layers=max(layers_by_stack.values()) if main_stack is None else layers_by_stack[main_stack],
        encoder_layers=layers_by_stack.get("enc", 0) if is_standard else 0,
        attention=AttentionSpec(
            width=largest.width, heads=largest.heads, head_dim=largest.head_dim, value_dim=largest.value_dim,
            kv_heads=largest.kv_heads if is_standard else _kv_heads_of_larger_tower(main_layer.spec, largest),
            rotary=largest.rotary,
        ),
        mlp_width=next((int(size) for name in MLP_WIDTH_FIELDS if isinstance(size := getattr(config, name, None), int)), 0),
        activation="swiglu" if is_gated else "gelu",
        norm_placement="post" if family is not None and family.input_norm is None else "pre",
        kind=kind,
        windows=_windows(layers, layers_by_stack),
        positions="learned" if has_position_table(model) else "none",
        output=outputs[kind] if has_lm_head(model) else "none",  # pyright: ignore
        kept_heads=kept_heads_by_layer(layers, kind, layers_by_stack),
        stacks=() if is_standard else tuple((stack, layers_by_stack[stack]) for stack in ordered_stacks),
    )  # fmt: skip
    return _with_weight_rules(spec, model)


def _kv_heads_of_larger_tower(main: AttentionSpec, largest: AttentionSpec) -> int:
    """Return the number of KV heads with which cached layers keep theirs, if another tower has more heads."""
    heads_per_kv_head = main.heads // main.kv_heads
    return largest.heads // heads_per_kv_head if largest.heads % heads_per_kv_head == 0 else largest.kv_heads


def _with_weight_rules(spec: ModelSpec, model: Any) -> ModelSpec:
    """Add the weight rules of a quantized model. Rules of KV heads that were expanded to heads are left out."""
    rules, activation_bits = quantization_of(model)
    if not rules:
        return spec
    layers = [(layer_address, spec.attention_at(layer_address)) for layer_address in spec.layer_addresses]
    kv_heads = {
        str(layer_address.head_address(number)) for layer_address, layer in layers for number in layer.kv_head_ids
    }
    rules = filter_rules(rules, set(map(str, spec.head_addresses)), kv_heads)
    return replace(spec, weight_rules=rules, activation_bits=activation_bits)


def _context(model: nn.Module, config: Any) -> int:
    """Return the maximum number of tokens."""
    size = next((int(size) for name in CONTEXT_FIELDS if (size := getattr(config, name, None))), DEFAULT_CONTEXT)
    padding_idx = position_padding_idx(model)
    return size if padding_idx is None else size - padding_idx - 1


def has_lm_head(model: Any) -> bool:
    """Return whether the model computes logits over its vocabulary."""
    return model.get_output_embeddings() is not None


def has_position_table(model: nn.Module) -> bool:
    """Return whether positions come from a table of limited size, either learned or fixed sinusoids (GPT-J)."""
    learned = [name for name, part in model.named_modules() if isinstance(part, nn.Embedding)]
    fixed = [name for name, part in model.named_buffers() if part.dim() == 2]
    return any(name.rpartition(".")[2] in POSITION_TABLE_NAMES for name in (*learned, *fixed))


def is_causal(layer: AttachedLayer) -> bool:
    """Return whether a layer is causal. SDPA assumes it if the module does not specify it."""
    if layer.attends_ahead is not None:
        return not layer.attends_ahead
    return bool(getattr(layer.module, "is_causal", True))


def _windows(layers: Sequence[AttachedLayer], layers_by_stack: dict[str, int]) -> tuple[int | None, ...]:
    """Return the window of each layer if any layer has one, for models with a single stack."""
    if set(layers_by_stack) != {""}:
        return ()
    windows_by_layer = {
        layer.hook_point.address.layer: layer.hook_point.window
        for layer in layers
        if layer.hook_point.address.stack == ""
    }
    return (
        tuple(windows_by_layer.get(layer) for layer in range(layers_by_stack[""]))
        if any(windows_by_layer.values())
        else ()
    )


def kept_heads_by_layer(
    layers: Sequence[AttachedLayer], kind: str, layers_by_stack: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the heads of each layer. Layers without attention have no heads."""
    stacks = ("enc", "dec", "cross") if kind == "encoder-decoder" else tuple(layers_by_stack)
    layer_addresses = [
        LayerAddress(stack, layer)
        for stack in stacks
        for layer in range(layers_by_stack.get("dec" if stack == "cross" and kind == "encoder-decoder" else stack, 0))
    ]
    heads_by_layer = {layer.hook_point.address: layer.spec.head_ids for layer in layers}
    return {str(layer_address): heads_by_layer.get(layer_address, ()) for layer_address in layer_addresses}


def decoder_start_token(model: Any) -> int:
    """Return the token id with which an encoder-decoder starts to generate, from its configuration."""
    if getattr(model.config, "model_type", None) in LANGUAGE_CODE_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{type(model).__name__} requires language codes in front of its texts, which plain texts do not have. Call the "
            f"model yourself inside hw.ablated(attached, …)."
        )
    for config in (model.config, getattr(model, "generation_config", None)):
        token_id = getattr(config, "decoder_start_token_id", None)
        if token_id is not None:
            return token_id
    raise UnsupportedModelError(
        f"{type(model).__name__}: its configuration has no decoder_start_token_id. Set "
        f"model.config.decoder_start_token_id."
    )
