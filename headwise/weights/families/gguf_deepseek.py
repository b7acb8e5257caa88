"""GGUF files of DeepSeek-V2 with dense MLPs (`deepseek2`): settings and tensor names.

llama.cpp's converter splits the up-projection of the latent into keys and values, and transposes that of the keys, so that
the engine can multiply queries by it. Older files have one tensor. `SplitLatentReader` shows both as one tensor.

YaRN's scale of the scores is stored as `rope.scaling.yarn_log_multiplier`, 0.1 · mscale_all_dim. The factor of cosines and
sines is not stored: it is 1 if a multiplier is stored, as in all released models.
"""

from typing import Any

import torch
from torch import Tensor

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.io.weight_readers import WeightReader
from headwise.spec import AttentionSpec, Latent, ModelSpec, Rotary, RotaryScaling
from headwise.weights.families.deepseek import has_query_rank, scale_from_mscale
from headwise.weights.families.family import Config, required_setting
from headwise.weights.keymap import TensorMapping

LOG_MULTIPLIER_UNIT = 0.1  # the files store this times mscale_all_dim
NAMES = {
    "embed.tokens.weight": "token_embd.weight",
    "blocks.{i}.norm_attention.weight": "blk.{i}.attn_norm.weight",
    "blocks.{i}.attention.qkv.kv_down_weight": "blk.{i}.attn_kv_a_mqa.weight",
    "blocks.{i}.attention.qkv.kv_norm_weight": "blk.{i}.attn_kv_a_norm.weight",
    "blocks.{i}.attention.output_projection.weight": "blk.{i}.attn_output.weight",
    "blocks.{i}.norm_mlp.weight": "blk.{i}.ffn_norm.weight",
    "blocks.{i}.mlp.gate.weight": "blk.{i}.ffn_gate.weight",
    "blocks.{i}.mlp.up.weight": "blk.{i}.ffn_up.weight",
    "blocks.{i}.mlp.down.weight": "blk.{i}.ffn_down.weight",
    "norm.weight": "output_norm.weight",
}
DIRECT_QUERIES = {"blocks.{i}.attention.qkv.q_weight": "blk.{i}.attn_q.weight"}
RANKED_QUERIES = {
    "blocks.{i}.attention.qkv.q_down_weight": "blk.{i}.attn_q_a.weight",
    "blocks.{i}.attention.qkv.q_norm_weight": "blk.{i}.attn_q_a_norm.weight",
    "blocks.{i}.attention.qkv.q_weight": "blk.{i}.attn_q_b.weight",
}
JOINED, SPLIT_KEYS, SPLIT_VALUES = (f"blk.{{i}}.attn_{name}.weight" for name in ("kv_b", "k_b", "v_b"))


def _has_direct_queries(spec: ModelSpec) -> bool:
    return not has_query_rank(spec)


DEEPSEEK_MAPPINGS = (
    *(TensorMapping(external, native) for native, external in NAMES.items()),
    *(TensorMapping(external, native, when=_has_direct_queries) for native, external in DIRECT_QUERIES.items()),
    *(TensorMapping(external, native, when=has_query_rank) for native, external in RANKED_QUERIES.items()),
    TensorMapping(JOINED, "blocks.{i}.attention.qkv.kv_weight"),
    TensorMapping("output.weight", "output.vocabulary.weight", when=lambda spec: not spec.tied),
)


def split_latent_weight(weight: Tensor, key_channels: int) -> tuple[Tensor, Tensor]:
    """Split rows of keys and values by head, (H, d + e, r), into keys (H, r, d) and values (H, e, r)."""
    keys, values = weight[:, :key_channels], weight[:, key_channels:]
    return keys.mT, values


class SplitLatentReader(WeightReader):
    """Reader of a GGUF file that joins the split up-projections of keys and values."""

    def __init__(self, reader: WeightReader) -> None:
        super().__init__()
        self._reader, self.default_dtype = reader, reader.default_dtype
        self.shapes = dict(reader.shapes)
        self._parts: dict[str, tuple[str, str]] = {}  # names of keys and values by the name of the joined tensor
        for name in reader.shapes:
            if not name.endswith(".attn_k_b.weight"):
                continue
            values_name = name.replace("attn_k_b", "attn_v_b")
            keys, values = reader.shapes[name], reader.shapes.get(values_name, ())
            if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
                raise FileFormatError(f"{name}: does not match the values. Got {keys} and {values}. Convert it again.")
            joined = name.replace("attn_k_b", "attn_kv_b")
            self._parts[joined] = (name, values_name)
            self.shapes[joined] = (keys[0] * (keys[2] + values[1]), keys[1])
            del self.shapes[name], self.shapes[values_name]

    def get(self, name: str) -> Tensor:
        """Return one tensor by its name in older files."""
        if name not in self._parts:
            return self._reader.get(name)
        keys, values = (self._reader.get(part) for part in self._parts[name])
        return torch.cat((keys.mT, values), 1).flatten(0, 1)


def deepseek_spec_from_gguf(fields: Config, reader: WeightReader) -> ModelSpec:
    """Convert the metadata of a GGUF file of DeepSeek-V2 to a spec."""
    settings = {key.removeprefix("deepseek2."): value for key, value in fields.items() if key.startswith("deepseek2.")}
    layers, heads = required_setting(settings, "block_count"), required_setting(settings, "attention.head_count")
    _reject_unsupported(settings, layers)
    suffix = "_mla" if "attention.key_length_mla" in settings else ""  # older files have no other lengths
    head_dim, value_dim = (required_setting(settings, f"attention.{part}_length{suffix}") for part in ("key", "value"))
    rotary_dims = required_setting(settings, "rope.dimension_count")
    eps = float(f"{required_setting(settings, 'attention.layer_norm_rms_epsilon'):.6g}")  # 1e-6 in float32 is another
    scaling, scale = _scaling(settings, head_dim)
    return ModelSpec(
        vocab=settings.get("vocab_size") or len(required_setting(fields, "tokenizer.ggml.tokens")),
        context=required_setting(settings, "context_length"),
        layers=layers,
        attention=AttentionSpec(
            required_setting(settings, "embedding_length"),
            heads,
            head_dim=head_dim,
            value_dim=value_dim,
            scale=scale,
            rotary=Rotary(settings.get("rope.freq_base", 10000.0), "interleaved", dims=rotary_dims, scaling=scaling),
            latent=Latent(
                required_setting(settings, "attention.kv_lora_rank"),
                rotary_dims,
                settings.get("attention.q_lora_rank") or 0,
                eps,
            ),
        ),
        mlp_width=required_setting(settings, "feed_forward_length"),
        norm="rms",
        norm_eps=eps,
        activation="swiglu",
        mlp_bias=False,
        positions="none",
        tied="output.weight" not in reader.shapes,
    )


def _reject_unsupported(settings: Config, layers: int) -> None:
    """Raise an error for a part of the file that Headwise does not implement."""
    dense, experts = settings.get("leading_dense_block_count", 0), settings.get("expert_count", 0)
    if dense < layers:
        raise UnsupportedModelError(
            f"deepseek2: Headwise does not implement its mixture-of-experts MLPs ({experts} experts) in layers {dense} to "
            f"{layers - 1}. Use a model whose MLPs are all dense."
        )
    neutral: dict[str, tuple[Any, ...]] = {
        "rope.scaling.attn_factor": (1.0,), "attention.temperature_scale": (0.0,), "attention.causal": (True,),
    }  # fmt: skip
    for key, values in neutral.items():
        if settings.get(key) not in (None, *values):
            raise UnsupportedModelError(
                f"deepseek2.{key} is {settings[key]!r}, which Headwise does not support. It must be {values[0]!r} or "
                f"absent."
            )


def _scaling(settings: Config, head_dim: int) -> tuple[RotaryScaling | None, float | None]:
    """Return the rotary scaling and the factor of the scores."""
    kind = settings.get("rope.scaling.type", "none")
    if kind not in ("none", "yarn"):
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} is not supported in a GGUF file of deepseek2. Supported: none, yarn."
        )
    if kind == "none":
        return None, None
    factor = required_setting(settings, "rope.scaling.factor")
    mscale = round(settings.get("rope.scaling.yarn_log_multiplier", 0.0) / LOG_MULTIPLIER_UNIT, 6)
    scaling = RotaryScaling(
        "yarn",
        factor,
        original_context=required_setting(settings, "rope.scaling.original_context_length"),
        beta_fast=settings.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.get("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=1.0 if mscale else None,
    )
    return scaling, scale_from_mscale(head_dim, factor, mscale)
