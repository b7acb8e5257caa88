"""Write Qwen3, Gemma 2 and 3, OLMo 2 and 3, Phi-3, SmolLM3 and Ministral 3 to GGUF.

These architectures of llama.cpp count heads once for all layers, so pruned heads are stored as zeros in the full shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.exporters.gguf_tensors import GgufFile, State, prune_notes, rotary_rows_for_engine, write_rotary_scaling
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, QKNorm, Rotary
from headwise.weights.export import full_shape_state, to_half_split_rotary
from headwise.weights.families.gguf_decoders import DECODER_FORMATS, GgufDecoderLayout, engine_scale

NOTE_LONGROPE = (
    "llama.cpp chooses between the short and long factors by the context of the server, not by the length of a text"
)
NOTE_GELU = "llama.cpp computes GELU in 16 bits: log-probabilities differ in the third digit"


def nearest_decoder(spec: ModelSpec) -> str:
    """Return the architecture that is nearest to a decoder with RMS norms."""
    attention, rotary = spec.attention, spec.attention.rotary
    norm = attention.qk_norm
    if attention.latent is not None:
        return "deepseek2"
    if norm is not None:
        return "olmo2" if norm.over == "width" else "gemma3" if norm.kind == "rms_plus_one" else "qwen3"
    if spec.norm_placement == "sandwich":
        return "gemma2"
    if attention.query_scaling is not None:
        return "mistral3"
    if None in spec.rotaries:
        return "smollm3"
    is_partial = rotary is not None and rotary.dims not in (None, attention.head_dim)
    is_longrope = rotary is not None and rotary.scaling is not None and rotary.scaling.kind == "longrope"
    return "phi3" if is_partial or is_longrope else "llama"


def layer_windows(spec: ModelSpec) -> list[int | None]:
    """Return the window of each layer; None if it sees the full context."""
    windows = [spec.attention_at(address).window for address in spec.layer_addresses]
    return [window if window is not None and window < spec.context else None for window in windows]


def layer_rotaries(spec: ModelSpec) -> list[Rotary | None]:
    """Return the rotary embedding of each layer."""
    return [spec.attention_at(address).rotary for address in spec.layer_addresses]


def decoder_problem_conditions(spec: ModelSpec, name: str) -> dict[str, bool]:
    """Return the reasons why an architecture of DECODER_FORMATS cannot hold a model, and whether they apply."""
    attention, windows, rotaries = spec.attention, layer_windows(spec), layer_rotaries(spec)
    rotary = next((value for value in rotaries if value is not None), None)
    has_norm = attention.qk_norm is not None
    expected_norm = {
        "qwen3": QKNorm(eps=spec.norm_eps),
        "gemma3": QKNorm("rms_plus_one", eps=spec.norm_eps),
        "olmo2": QKNorm(over="width", eps=spec.norm_eps),
    }.get(name)
    full_width = attention.heads * attention.head_dim == spec.width
    problems = {
        f"the norm of q and k is {attention.qk_norm}, but must be {expected_norm}": has_norm
        and attention.qk_norm != expected_norm,
        f"heads × head_dim is {attention.heads * attention.head_dim}, but must equal the width {spec.width}": not full_width
        and name in ("olmo2", "phi3"),
        f"its embedding scale is {spec.embed_scale}, but must be √width": name in ("gemma2", "gemma3")
        and spec.embed_scale != spec.width**0.5,
        "its layers have different windows": len({window for window in windows if window is not None}) > 1,
        "it has no rotary positions": rotary is None,
    }
    return problems | _rotary_problems(name, rotaries, windows, rotary, attention)


def _rotary_problems(
    name: str,
    rotaries: list[Rotary | None],
    windows: list[int | None],
    rotary: Rotary | None,
    attention: AttentionSpec,
) -> dict[str, bool]:
    """Return problems of the windows and rotary embeddings of the layers."""
    has_windows = any(window is not None for window in windows)
    scalings = {
        "phi3": ("longrope",),
        "qwen3": ("linear", "yarn"),
        "olmo2": ("linear", "yarn"),
        "mistral3": ("yarn", "linear"),
    }
    kinds = {value.scaling.kind for value in rotaries if value is not None and value.scaling is not None}
    not_truncated = any(
        value is not None and value.scaling is not None and not value.scaling.truncate for value in rotaries
    )
    is_full = rotary is None or rotary.dims in (None, attention.head_dim)
    expected_nope = [(layer + 1) % 4 == 0 for layer in range(len(rotaries))]
    by_kind = {
        is_local: {value for value, window in zip(rotaries, windows, strict=True) if (window is not None) is is_local}
        for is_local in (True, False)
    }
    theta = {value.theta for value in rotaries if value is not None}
    unscaled = all(value is not None and value.scaling is None for value in by_kind[True])
    can_mix = name == "gemma3" or (name == "olmo2" and len(theta) == 1)
    problem = f"its rotary scaling is {', '.join(sorted(kinds))}" if kinds else "no scaling"
    return {
        "YaRN with truncate=False": not_truncated,
        "its attention window is shorter than its context": has_windows and name not in ("gemma2", "gemma3", "olmo2"),
        problem: bool(kinds - set(scalings.get(name, ("linear",)))),
        "rotary positions apply to only part of a head's channels": not is_full and name != "phi3",
        "layers without positions are not every fourth layer": name == "smollm3"
        and [value is None for value in rotaries] != expected_nope,
        "it has layers without positions": name != "smollm3" and None in rotaries,
        "its layers have rotary positions that differ in another way than by their windows": name != "smollm3"
        and len(set(rotaries)) > 1
        and not (can_mix and unscaled and all(len(kind) <= 1 for kind in by_kind.values())),
        "layers with a window have scaled rotary positions": name in ("gemma3", "olmo2")
        and bool(by_kind[True])
        and not unscaled,
    }


def write_decoder(model: Transformer, store: GgufFile, name: str) -> list[str]:
    """Write sizes and tensors of a decoder in one of the architectures of DECODER_FORMATS. Returns notes."""
    spec, state, layout = model.spec, full_shape_state(model), DECODER_FORMATS[name]
    _write_sizes(store, spec, name)
    for native, external in layout.names.items():
        per_layer = "{i}" in native
        for i in range(spec.layers) if per_layer else (0,):
            key = native.format(i=i)
            if key == "output.vocabulary.weight" and spec.tied:
                if name == "olmo2":  # this architecture has no tied output
                    store.add_tensor(external, state["embed.tokens.weight"], is_vocab_table=True)
                continue
            _write_tensor(store, spec, name, state, (key, external.format(i=i)))
    if name == "phi3":
        _write_fused(store, spec, state)
    notes = prune_notes(spec)
    notes += [NOTE_LONGROPE] if _write_longrope(store, spec) else []
    return notes + ([NOTE_GELU] if spec.activation == "geglu_tanh" else [])


def _write_tensor(store: GgufFile, spec: ModelSpec, name: str, state: State, names: tuple[str, str]) -> None:
    """Write the weight of one native name, and its bias if there is one."""
    native, external = names
    if name == "phi3" and any(part in native for part in (".qkv.", ".mlp.gate", ".mlp.up")):
        return
    convert = _converter(spec, name, native)
    is_norm = "norm" in native
    source = native.replace("_weight", ".weight").replace(".qkv.q_", ".qkv.q.") if ".qkv." in native else native
    weight = state[source]
    if ".qkv." in native:
        weight = weight.flatten(0, 1)  # (heads · d, D)
    elif native.endswith("output_projection.weight"):
        weight = weight.flatten(1)
    elif is_norm:
        weight = weight.flatten() + DECODER_FORMATS[name].norm_offset
    store.add_tensor(
        external, convert(weight), keep_float32=is_norm, is_vocab_table=native.startswith(("embed.", "output."))
    )
    bias = state.get(source.removesuffix("weight") + "bias")
    if bias is not None:
        store.add_tensor(external.removesuffix("weight") + "bias", convert(bias.flatten()), keep_float32=True)


def _converter(spec: ModelSpec, name: str, native: str) -> Callable[[Tensor], Tensor]:
    """Return the conversion of rows of q or k, and of their norms: rotary layout and the scale of the scores."""
    is_query = native.endswith(("qkv.q_weight", "q_norm.weight"))
    if not is_query and not native.endswith(("qkv.k_weight", "k_norm.weight")):
        return lambda tensor: tensor
    attention, layout = spec.attention, DECODER_FORMATS[name]
    default = engine_scale(name, spec.layers, spec.width, attention.heads, attention.head_dim)
    has_norm = attention.qk_norm is not None
    scales_here = is_query and (native.endswith("q_norm.weight") or not has_norm)
    factor = (attention.scale or attention.head_dim**-0.5) / default if scales_here else 1.0

    def convert(tensor: Tensor) -> Tensor:
        return _to_layout(tensor, spec, layout) * factor

    return convert


def _to_layout(rows: Tensor, spec: ModelSpec, layout: GgufDecoderLayout) -> Tensor:
    """Reorder rows of q or k from the rotary layout of a model to that of the file."""
    rotary = next(value for value in layer_rotaries(spec) if value is not None)
    if rotary.layout == layout.layout:
        return rows
    if layout.layout == "interleaved":
        return rotary_rows_for_engine(rows, spec.attention.head_dim)
    return to_half_split_rotary(rows, spec.attention.head_dim)


def _write_fused(store: GgufFile, spec: ModelSpec, state: State) -> None:
    """Write Phi-3's tensors of q, k and v, and of both up projections."""
    for i in range(spec.layers):
        prefix = f"blocks.{i}."
        parts = []
        for projection in "qkv":
            rows = state[f"{prefix}attention.qkv.{projection}.weight"].flatten(0, 1)
            parts.append(_converter(spec, "phi3", f"qkv.{projection}_weight")(rows))
        store.add_tensor(f"blk.{i}.attn_qkv.weight", torch.cat(parts))
        up = [state[f"{prefix}mlp.{part}.weight"] for part in ("gate", "up")]
        store.add_tensor(f"blk.{i}.ffn_up.weight", torch.cat(up))


def _write_longrope(store: GgufFile, spec: ModelSpec) -> bool:
    rotary = spec.attention.rotary
    if rotary is None or rotary.scaling is None or rotary.scaling.kind != "longrope":
        return False
    for length in ("short", "long"):
        factors = torch.tensor(getattr(rotary.scaling, f"{length}_factors"), dtype=torch.float32)
        store.add_tensor(f"rope_factors_{length}.weight", factors, keep_float32=True)
    return True


def _write_sizes(store: GgufFile, spec: ModelSpec, name: str) -> None:
    attention, writer = spec.attention, store.writer
    windows, rotaries = layer_windows(spec), layer_rotaries(spec)
    pairs = list(zip(windows, rotaries, strict=True))
    rotary = next((r for window, r in pairs if window is None and r is not None), None)
    rotary = next(r for _, r in pairs if r is not None) if rotary is None else rotary  # every layer has a window
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.mlp_width)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.value_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(rotary.dims or attention.head_dim)
    writer.add_rope_freq_base(rotary.theta)
    writer.add_vocab_size(spec.vocab)
    write_rotary_scaling(store, rotary)
    if attention.softcap is not None:
        writer.add_attn_logit_softcapping(attention.softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    scaling: Any = attention.query_scaling
    if scaling is not None:
        writer.add_attn_temperature_scale(scaling.beta)
    _write_windows(store, spec, name, pairs)


def _write_windows(store: GgufFile, spec: ModelSpec, name: str, pairs: list[tuple[int | None, Rotary | None]]) -> None:
    """Write the window, the layers that have it, and their rotary positions."""
    period, has_window = DECODER_FORMATS[name].window_period, [window is not None for window, _ in pairs]
    window = next((window for window, _ in pairs if window is not None), None)
    if period and (window is not None or name != "olmo2"):
        store.writer.add_sliding_window(window or spec.context)
        if window is not None and has_window != [(layer + 1) % period != 0 for layer in range(spec.layers)]:
            store.writer.add_sliding_window_pattern(has_window)
    if name == "gemma3":
        local = next((rotary for value, rotary in pairs if value is not None), pairs[0][1])
        assert local is not None
        store.writer.add_rope_freq_base_swa(local.theta)
