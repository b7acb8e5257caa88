"""`to_native`: convert a live attached model into Headwise's own class.

The configuration gives the spec, and the name map of the model family gives all tensors outside of attention. Tensors of
heads come from the attached layers, so pruned heads, folded means and changed weights are converted as they are now.
"""

from collections.abc import Iterator
from contextvars import Context
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.attached.per_head_packed_weights import PACKED
from headwise.attached.quantize_in_place import quantization_of
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, Transformer, check_model, eval_mode
from headwise.model.quantize_state_dict import quantize_state_dict
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec
from headwise.weights.families import FAMILIES, ModelFamilySpec
from headwise.weights.keymap import expand_mappings

if TYPE_CHECKING:
    from headwise.attached.layer import AttachedLayer

CHECK_TOKENS = 24  # tokens of the text on which both models are compared
INSTEAD = (
    "Use the attached model itself: it can be pruned, quantized, trained and saved (attached.save(folder)) without "
    "conversion"
)


@torch.no_grad()
def to_native(model: ModelProtocol, *, check: bool = True) -> Transformer:
    """Convert an attached model into a model of Headwise's own class, with the same outputs up to rounding.

    The native model has the weights that the attached model has now, in the same dtype and on the same device, and shares no
    memory with it. Pruned heads, folded means, quantized weights, plans and the tokenizer are converted, too.

    Args:
        model: Attached model of a family that Headwise implements: Llama, Mistral, Qwen2, Qwen3, SmolLM3,
            Phi-3, Ministral 3, OLMo 2 and 3, Gemma 2 and 3, GPT-2, GPT-Neo, BERT, RoBERTa,
            XLM-R, DistilBERT, T5. A native model is returned unchanged.
        check: Run both models on a few tokens, and raise an error if their outputs differ by more than rounding.

    Returns:
        The native model.

    Raises:
        UnsupportedModelError: Headwise does not implement the model family, or not with these settings.

    >>> import transformers
    >>> from headwise.attached import attach
    >>> sizes = dict(n_embd=16, n_layer=2, n_head=4, vocab_size=31, bos_token_id=0, eos_token_id=0)
    >>> attached = attach(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval())
    >>> native = to_native(attached.prune("0.1,1.*"))
    >>> type(native).__name__, [str(head) for head in native.spec.head_addresses]
    ('Transformer', ['0.0', '0.2', '0.3'])
    """
    check_model(model)
    if model.is_native:
        return model  # pyright: ignore[reportReturnType]
    attached: Any = model.copy_offloaded_to_memory()
    family = _family_of(attached)
    layers = {layer.hook_point.address: layer for layer in attached.attention_layers()}
    state = dict(attached.model.state_dict())
    try:
        spec = _convert_spec(attached, family, layers, set(state))
        tensors = {**_other_tensors(attached, family, spec, state), **_attention_tensors_by_name(spec, layers)}
        tensors = {
            name: value.to(attached.device) for name, value in tensors.items()
        }  # layers may be on several devices
    except HeadwiseError as error:
        raise _not_convertible(attached, str(error).split(". ")[0]) from None
    try:
        native = _build(spec, tensors, family)
    except RuntimeError:  # names or shapes differ
        raise _not_convertible(attached, f"its weights do not fit Headwise's {family.name}") from None
    native.tokenizer, native.family, native.plans = attached.tokenizer, family.name, attached.plans
    native.train(attached.training)
    if check and native.device.type != "meta":
        _check_outputs(attached, native)
    return native


def is_convertible(attached: Any) -> bool:
    """Return whether an attached model can be converted, according to its configuration and the names of its weights."""
    try:
        family, state = _family_of(attached), dict(attached.model.state_dict())
        layers = {layer.hook_point.address: layer for layer in attached.attention_layers()}
        _other_tensors(attached, family, _convert_spec(attached, family, layers, set(state)), state)
    except HeadwiseError:
        return False
    return True


def _family_of(attached: Any) -> ModelFamilySpec:
    for family in FAMILIES:
        if attached.family in family.model_types:
            return family
    if attached.family is None:
        raise UnsupportedModelError(
            f"model: {type(attached.model).__name__} cannot be converted into Headwise's own class, because it is a torch "
            f"module of no known family. Save the module itself: torch.save(attached.model.state_dict(), file)."
        )
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModelError(
        f"model: {type(attached.model).__name__} cannot be converted into Headwise's own class, because its family "
        f"{attached.family!r} is not one of {supported}. {INSTEAD}."
    )


def _not_convertible(attached: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model: this {type(attached.model).__name__} cannot be converted into Headwise's own class: {reason.rstrip('.')}. "
        f"{INSTEAD}."
    )


def _convert_spec(
    attached: Any, family: ModelFamilySpec, layers: dict[LayerAddress, "AttachedLayer"], names: set[str]
) -> ModelSpec:
    """Return the spec: that of the configuration, with the heads, biases and weight bits that the model has now."""
    config = attached.model.config.to_dict() | {"architectures": [type(attached.model).__name__]}
    spec = family.adjust(family.spec_from_config(config), names, config)
    attention = spec.attention
    if any(_kv_differs_within_group(layer, attention) for layer in layers.values()):
        attention = replace(attention, kv_heads=attention.heads)
    if any(layer.b_O is not None for layer in layers.values()):
        attention = replace(attention, out_bias=True)
    kept_heads = {str(address): layer.spec.head_ids for address, layer in layers.items()}
    norm = attention.qk_norm
    if norm is not None and norm.over == "width" and any(len(heads) < attention.heads for heads in kept_heads.values()):
        raise UnsupportedModelError(
            "it is pruned, and its queries and keys are normalized over all heads. Convert the full model, then prune it"
        )
    spec = replace(spec, attention=attention, kept_heads=kept_heads, tied=spec.tied and _is_tied(attached.model))
    rules, activation_bits = quantization_of(attached.model)
    return replace(spec, weight_rules=rules, activation_bits=activation_bits)


def _is_tied(model: Any) -> bool:
    """Return whether the output has the weights of the token embedding."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return output is None or output.weight is embedding.weight or torch.equal(output.weight, embedding.weight)


def _kv_differs_within_group(layer: "AttachedLayer", attention: AttentionSpec) -> bool:
    """Return whether heads of one KV group have keys or values of their own that differ, as after training."""
    if not layer.info.kv_expanded or not layer.spec.head_ids:
        return False
    firsts = _first_heads(layer.spec, attention)
    shared = [firsts[_group_of(head, attention)] for head in layer.spec.head_ids]
    for projection in "kv":
        for rows in (layer.qkv.weight_by_head(projection), layer.qkv.bias_by_head(projection)):
            if rows is not None and not torch.equal(rows, rows[shared]):
                return True
    return False


def _group_of(head: int, attention: AttentionSpec) -> int:
    """Return the original KV head of a head."""
    return head * attention.kv_heads // attention.heads


def _first_heads(spec: AttentionSpec, attention: AttentionSpec) -> dict[int, int]:
    """Return the index of the first remaining head of each KV group."""
    firsts: dict[int, int] = {}
    for index, head in enumerate(spec.head_ids):
        firsts.setdefault(_group_of(head, attention), index)
    return firsts


def _other_tensors(
    attached: Any, family: ModelFamilySpec, spec: ModelSpec, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors outside of attention by native name. Raise an error for tensors that the native model lacks."""
    all_mapped = list(expand_mappings(spec, family.mappings))
    external_names = {mapped.external_name for mapped in all_mapped}
    prefix = max(family.prefixes, key=lambda prefix: sum(prefix + name in state for name in external_names))
    attention_paths = tuple(f"{layer.info.name}." for layer in attached.attention_layers())
    names = {id(module): name for name, module in attached.model.named_modules()}
    outputs = tuple(f"{names[id(layer.info.output_module)]}." for layer in attached.attention_layers())
    tensors, used = {}, set()
    for mapped in all_mapped:
        is_position_bias = mapped.native_name.endswith(".position_bias")
        is_norm = mapped.native_name.endswith(("q_norm.weight", "k_norm.weight"))
        if (".attention." in mapped.native_name or ".cross." in mapped.native_name) and not (
            is_position_bias or is_norm
        ):
            continue
        name = mapped.external_name.removeprefix("/")
        name = name if mapped.external_name.startswith("/") else prefix + name
        tensor = mapped.mapping.convert(mapped.mapping.select_part(_dense(attached, name, state)))
        if is_norm and spec.attention.qk_norm is not None and spec.attention.qk_norm.weights == "per_head":
            tensor = tensor.unflatten(0, (-1, spec.attention.head_dim))
        if is_position_bias:  # one table for all layers, with a row for each head that any layer has
            tensor = tensor[list(spec.attention_at(_address_of(mapped.native_name, spec)).head_ids)]
        tensors[mapped.native_name] = tensor
        used.add(name)
    extra = [name for name in state if name not in used and not name.startswith((*attention_paths, *outputs))]
    extra = [name for name in extra if not name.endswith(family.ignored_suffixes) and not _is_stored_code(name)]
    if extra:
        raise UnsupportedModelError(
            f"it has weights that Headwise's {family.name} does not have ({', '.join(extra[:3])})."
        )
    return tensors


def _dense(attached: Any, name: str, state: dict[str, Tensor]) -> Tensor:
    """Return a weight, dequantized if it is stored quantized."""
    path, _, parameter = name.rpartition(".")
    value = state.get(name)
    if value is None:
        try:
            value = getattr(attached.model.get_submodule(path), parameter, None)
        except AttributeError:
            value = None
    if value is None:
        raise UnsupportedModelError(f"it has no weight {name} (adapters must be merged first)")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise UnsupportedModelError(f"its weight {name} is quantized by another library")
    return value


def _is_stored_code(name: str) -> bool:
    return f".{PACKED}." in name


def _attention_tensors_by_name(spec: ModelSpec, layers: dict[LayerAddress, "AttachedLayer"]) -> dict[str, Tensor]:
    """Return the tensors of all attention layers by native name, in the split layout with a head axis."""
    tensors: dict[str, Tensor] = {}
    for address, layer in layers.items():
        own, prefix = spec.attention_at(address), _native_prefix(address)
        tensors |= {prefix + name: value for name, value in _layer_tensors(own, layer)}
    return tensors


def _native_prefix(address: LayerAddress) -> str:
    blocks, part = (
        "encoder_blocks" if address.stack == "enc" else "blocks",
        "cross" if address.stack == "cross" else "attention",
    )
    return f"{blocks}.{address.layer}.{part}."


def _address_of(native_name: str, spec: ModelSpec) -> LayerAddress:
    """Return the address of the attention layer that a parameter belongs to."""
    return next(address for address in spec.layer_addresses if native_name.startswith(_native_prefix(address)))


def _layer_tensors(spec: AttentionSpec, layer: "AttachedLayer") -> Iterator[tuple[str, Tensor]]:
    reference = layer.output_projection.weight
    sizes = {
        "q": (len(spec.head_ids), spec.head_dim),
        "k": (len(spec.kv_head_ids), spec.head_dim),
        "v": (len(spec.kv_head_ids), spec.value_dim),
    }
    for projection, size in sizes.items():
        index = _kv_heads_to_copy(spec, layer) if projection in "kv" else None
        bias = layer.qkv.bias_by_head(projection) if spec.head_ids else None
        weight = layer.qkv.weight_by_head(projection) if spec.head_ids else reference.new_zeros(*size, spec.width)
        yield f"qkv.{projection}.weight", weight if index is None else weight[index]
        if spec.bias:
            bias = reference.new_zeros(size) if bias is None else bias
            yield f"qkv.{projection}.bias", bias if index is None else bias[index]
        elif bias is not None:
            raise UnsupportedModelError(f"{layer.info.name} has a bias on {projection}, unlike the configuration.")
    if spec.head_ids:
        yield "output_projection.weight", layer.output_projection.head_output_weights.permute(2, 0, 1)  # (D, H, e)
    else:
        yield "output_projection.weight", reference.new_zeros(spec.width, 0, spec.value_dim)
    if spec.out_bias:
        yield "output_projection.bias", reference.new_zeros(spec.width) if layer.b_O is None else layer.b_O


def _kv_heads_to_copy(spec: AttentionSpec, layer: "AttachedLayer") -> list[int] | None:
    """Return which keys and values of an attached layer the native layer takes. None means all of them."""
    if not spec.head_ids or layer.info.kv_expanded == (spec.kv_heads == spec.heads):
        return None
    if layer.info.kv_expanded:  # one of the equal copies per KV head
        return list(_first_heads(layer.spec, spec).values())
    return list(layer.spec.kv_of_head)  # one copy per head


def _build(spec: ModelSpec, tensors: dict[str, Tensor], family: ModelFamilySpec) -> Transformer:
    dtype, shared = tensors["embed.tokens.weight"].dtype, spec.tied and spec.output != "none"
    state = {
        name: value.detach().to(dtype).clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    if spec.weight_rules:
        state = quantize_state_dict(spec, state)
    if shared and "embed.tokens.weight" in state:  # a quantized vocabulary has no weight of its own
        state["output.vocabulary.weight"] = state["embed.tokens.weight"]
    native = Transformer(spec, storage="qkv" if family.storage == "qkv" else "q,k,v", device="meta")
    native.load_state_dict(state, assign=True)
    if spec.weight_rules:
        native.to(dtype)
    for layer in native.attention_layers():
        layer.qkv.fuse_qkv()
    return native


def _check_outputs(attached: Any, native: Transformer) -> None:
    """Raise an error if both models differ on a few tokens. Open edits and listeners do not apply."""
    generator = torch.Generator().manual_seed(0)
    length = min(CHECK_TOKENS, native.spec.context)
    ids = torch.randint(native.spec.vocab, (2, length), generator=generator, device="cpu").to(native.device)
    if native.spec.position_offset:  # transformers counts positions from the padding id, which no real token has
        ids[ids == native.spec.position_offset - 1] = native.spec.position_offset % native.spec.vocab
    with eval_mode(attached), eval_mode(native):
        inputs = {"source": ids} if native.spec.kind == "encoder-decoder" else {}
        expected, actual = Context().run(
            lambda: (to_float64(attached(ids, **inputs)), to_float64(native(ids, **inputs)))
        )
    # transformers computes norms and rotary tables in float32, also in a float64 model
    epsilon = max(torch.finfo(native.embed.reference_tensor.dtype).eps, torch.finfo(torch.float32).eps)
    if not (actual - expected).norm() <= epsilon**0.5 * expected.norm():  # NaN is an error, too
        raise _not_convertible(attached, "the outputs of the converted model differ by more than rounding")
