"""GGUF files of T5, Flan-T5, mT5 and UMT5 (`t5`), and of their encoders (`t5encoder`): settings and tensor names.

A stack has one table of position biases, in its first layer, unless other layers have tables of their own (UMT5). A file does
not name the activation: MLPs with a gate have GELU, those without one have ReLU. The output has weights of its own, or it is
tied to the embedding; hidden states are then scaled by 1/√width, as in T5 version 1.0. llama.cpp does not scale them.
"""

from typing import Any

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.io.weight_readers import WeightReader
from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import Config, required_setting
from headwise.weights.keymap import TensorMapping

T5_FORMATS = ("t5", "t5encoder")
MAX_DISTANCE = 128  # fixed in llama.cpp and in all released models


def t5_tensor_names(*, is_encoder: bool, is_gated: bool) -> dict[str, str]:
    """Return the names of weights by native name, without the position biases and an output of its own."""
    encoder, decoder = _stacks(is_encoder=is_encoder)
    names = {"embed.tokens.weight": "token_embd.weight", f"{encoder[1]}.weight": "enc.output_norm.weight"}
    names |= _block_names(encoder[0], "enc", is_gated=is_gated)
    if decoder is not None:
        blocks, norm = decoder
        names |= {f"{norm}.weight": "dec.output_norm.weight"} | _block_names(blocks, "dec", is_gated=is_gated)
        names |= _attention_names(f"{blocks}.{{i}}.cross", "dec.blk.{i}.cross_attn")
        names[f"{blocks}.{{i}}.norm_cross.weight"] = "dec.blk.{i}.cross_attn_norm.weight"
    return names


def position_table_names(*, is_encoder: bool) -> dict[str, str]:
    """Return the names of the tables of position biases by native name."""
    encoder, decoder = _stacks(is_encoder=is_encoder)
    names = {f"{encoder[0]}.{{i}}.attention.position_bias": "enc.blk.{i}.attn_rel_b.weight"}
    if decoder is not None:
        names[f"{decoder[0]}.{{i}}.attention.position_bias"] = "dec.blk.{i}.attn_rel_b.weight"
    return names


def _stacks(*, is_encoder: bool) -> tuple[tuple[str, str], tuple[str, str] | None]:
    """Return the native names of the blocks and the last norm of the encoder and of the decoder."""
    return (("blocks", "norm"), None) if is_encoder else (("encoder_blocks", "encoder_norm"), ("blocks", "norm"))


def _attention_names(native: str, external: str) -> dict[str, str]:
    names = {f"{native}.qkv.{projection}_weight": f"{external}_{projection}.weight" for projection in "qkv"}
    return names | {f"{native}.output_projection.weight": f"{external}_o.weight"}


def _block_names(blocks: str, stack: str, *, is_gated: bool) -> dict[str, str]:
    native, external = f"{blocks}.{{i}}", f"{stack}.blk.{{i}}"
    names = _attention_names(f"{native}.attention", f"{external}.attn")
    names |= {f"{native}.norm_{part}.weight": f"{external}.{name}_norm.weight" for part, name in
              (("attention", "attn"), ("mlp", "ffn"))}  # fmt: skip
    parts = ("gate", "up", "down") if is_gated else ("up", "down")
    return names | {f"{native}.mlp.{part}.weight": f"{external}.ffn_{part}.weight" for part in parts}


def t5_gguf_mappings(fields: Config, reader: WeightReader) -> tuple[TensorMapping, ...]:
    """Return the tensor name map of a file. A layer without a table of position biases reads that of the first layer."""
    is_encoder = fields["general.architecture"] == "t5encoder"
    names = t5_tensor_names(is_encoder=is_encoder, is_gated=_is_gated(reader))
    mappings = [TensorMapping(external, native) for native, external in names.items()]
    mappings.append(
        TensorMapping(
            "output.weight", "output.vocabulary.weight", when=lambda spec: spec.output == "lm" and not spec.tied
        )
    )
    settings = _settings(fields)
    layers = {"enc": settings["block_count"], "dec": _decoder_layers(settings)}
    for native, external in position_table_names(is_encoder=is_encoder).items():
        for layer in range(layers[external[:3]]):
            own_name = external.format(i=layer)
            name = own_name if own_name in reader.shapes else external.format(i=0)
            mappings.append(TensorMapping(name, native.format(i=layer), transposed=True))
    return tuple(mappings)


def t5_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of T5 to a spec."""
    name, settings = fields["general.architecture"], _settings(fields)
    heads, head_dim = (required_setting(settings, f"attention.{key}") for key in ("head_count", "key_length"))
    _reject_other_values(name, settings, heads, head_dim)
    if "token_embd.weight" not in reader.shapes:
        raise FileFormatError("token_embd.weight is missing. The file may be truncated; download it again.")
    vocab, width = reader.shapes["token_embd.weight"]
    is_encoder, tied = name == "t5encoder", "output.weight" not in reader.shapes
    layers: dict[str, Any] = {"kind": "encoder", "layers": required_setting(settings, "block_count"), "output": "none"}
    if not is_encoder:
        layers = {
            "kind": "encoder-decoder", "layers": _decoder_layers(settings), "encoder_layers": layers["layers"],
            "decoder_start_id": settings.get("decoder_start_token_id"), "tied": tied,
            "logit_scale": width**-0.5 if tied else 1.0,
        }  # fmt: skip
    return ModelSpec(
        vocab=vocab,
        context=required_setting(settings, "context_length"),  # not a limit: positions are relative
        attention=AttentionSpec(
            required_setting(settings, "embedding_length"),
            heads,
            head_dim=head_dim,
            scale=1.0,
            t5_buckets=required_setting(settings, "attention.relative_buckets_count"),
            t5_max_distance=MAX_DISTANCE,
        ),
        mlp_width=required_setting(settings, "feed_forward_length"),
        norm="rms",
        norm_eps=float(f"{required_setting(settings, 'attention.layer_norm_rms_epsilon'):.6g}"),  # stored in float32
        activation="geglu_tanh" if _is_gated(reader) else "relu",
        mlp_bias=False,
        positions="none",
        causal_t5_buckets=True,
        **layers,
    )


def _reject_other_values(name: str, settings: Config, heads: Any, head_dim: Any) -> None:
    """Raise an error for a setting that the spec does not represent."""
    neutral = {"attention.value_length": head_dim, "attention.head_count_kv": heads}
    for key, value in neutral.items():
        if settings.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"{name}.{key} is {settings[key]!r}, which Headwise does not support. It must be {value!r} or absent."
            )
    if isinstance(heads, list):
        raise UnsupportedModelError(
            f"{name}.attention.head_count differs between layers, which Headwise does not support in {name}."
        )


def _settings(fields: Config) -> dict[str, Any]:
    prefix = f"{fields['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}


def _decoder_layers(settings: Config) -> int:
    return settings.get("decoder_block_count") or settings["block_count"]


def _is_gated(reader: WeightReader) -> bool:
    return "enc.blk.0.ffn_gate.weight" in reader.shapes
