"""DeepSeek-V2 with dense MLPs: multi-head latent attention, RMS norms, SwiGLU (https://arxiv.org/abs/2405.04434).

YaRN scales cosines and sines by a factor m(mscale) / m(mscale_all_dim), and all scores by m(mscale_all_dim)², with
m(x) = 1 + 0.1 · x · ln(factor). In the spec, these are `attention_factor` of the rotary scaling and `scale` of the layer.

Released models have mixture-of-experts MLPs in all layers but the first. `hw.load` attaches these.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headwise.errors import UnsupportedModelError
from headwise.spec import AttentionSpec, Latent, ModelSpec, Rotary
from headwise.weights.families.decoder_config import read_scaling, rope_parameters, yarn_factor
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    decoder_unsupported,
    gates_and_norms,
    positive_int_or_none,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    required_setting,
    setting_or_default,
    translate_setting,
)
from headwise.weights.keymap import TensorMapping

LATENT_EPS = 1e-6  # of the norms of the latents, fixed in transformers


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. A missing output head is set by `adjust_to_tensors`."""
    layers = positive_int_setting(config, "num_hidden_layers", default=32)
    heads = positive_int_setting(config, "num_attention_heads", default=32)
    kv_heads = positive_int_or_none(config, "num_key_value_heads") or heads
    dense_layers = setting_or_default(config, "first_k_dense_replace", default=0)
    reject_unsupported(
        decoder_unsupported(config)
        | {
            f"mixture-of-experts MLPs in layers {dense_layers} to {layers - 1} (first_k_dense_replace)": dense_layers
            < layers,
            f"{kv_heads} KV heads for {heads} heads with latents (num_key_value_heads)": kv_heads != heads,
        }
    )
    translate_setting(setting_or_default(config, "hidden_act", default="silu"), {"silu": "swiglu"}, "activation")
    rotary_dims = positive_int_setting(config, "qk_rope_head_dim", default=64)
    head_dim = positive_int_setting(config, "qk_nope_head_dim", default=128) + rotary_dims
    rotary, scale = _rotary_and_scale(config, rotary_dims, head_dim)
    biased = bool_setting(config, "attention_bias", default=False)
    return ModelSpec(
        vocab=required_setting(config, "vocab_size"),
        context=positive_int_setting(config, "max_position_embeddings", default=2048),
        layers=layers,
        attention=AttentionSpec(
            required_setting(config, "hidden_size"),
            heads,
            head_dim=head_dim,
            value_dim=positive_int_setting(config, "v_head_dim", default=128),
            bias=biased,
            out_bias=biased,
            scale=scale,
            rotary=rotary,
            latent=Latent(
                positive_int_setting(config, "kv_lora_rank", default=512),
                rotary_dims,
                positive_int_or_none(config, "q_lora_rank", default=1536) or 0,
                LATENT_EPS,
            ),
        ),
        mlp_width=required_setting(config, "intermediate_size"),
        norm="rms",
        norm_eps=setting_or_default(config, "rms_norm_eps", default=1e-6),
        activation="swiglu",
        mlp_bias=bool_setting(config, "mlp_bias", default=False),
        positions="none",
        tied=bool_setting(config, "tie_word_embeddings", default=False),
    )


def _rotary_and_scale(config: Config, rotary_dims: int, head_dim: int) -> tuple[Rotary, float | None]:
    """Read rope_parameters (transformers 5), or rope_scaling and rope_theta (4), and the factor of the scores."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise UnsupportedModelError(f"rope_parameters must be a mapping. Got {rope!r}.")
    theta = setting_or_default(rope, "rope_theta", default=setting_or_default(config, "rope_theta", default=10000.0))
    kind = setting_or_default(rope, "rope_type", default=rope.get("type", "default"))
    if kind not in ("default", "linear", "yarn"):
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} is not supported for DeepSeek-V2. Supported: default, linear, yarn."
        )
    context = positive_int_setting(config, "max_position_embeddings", default=2048)
    scaling, mscale = read_scaling(config, rope, context), rope.get("mscale_all_dim")
    rotary = Rotary(theta=theta, layout="interleaved", dims=rotary_dims, scaling=scaling)
    if scaling is None or not mscale:
        return rotary, None
    return rotary, scale_from_mscale(head_dim, required_setting(rope, "factor"), mscale)


def scale_from_mscale(head_dim: int, factor: float, mscale: float) -> float | None:
    """Return the factor of the scores for `mscale_all_dim`. None if it is the usual 1/√head_dim."""
    return head_dim**-0.5 * yarn_factor(factor, mscale) ** 2 if factor > 1 and mscale else None


def mscale_from_scale(attention: AttentionSpec) -> float | None:
    """Return `mscale_all_dim` of a layer; None if no value gives the factor of its scores."""
    scale, rotary = attention.scale, attention.rotary
    ratio = 1.0 if scale is None else scale * attention.head_dim**0.5
    if abs(ratio - 1) < 1e-9:
        return 0.0
    if rotary is None or rotary.scaling is None or rotary.scaling.factor <= 1 or ratio <= 0:
        return None
    factor = rotary.scaling.factor
    exact = (ratio**0.5 - 1) / (yarn_factor(factor, 1.0) - 1)
    for digits in (3, 6, 9):  # the shortest number that gives the same scale
        if scale_from_mscale(attention.head_dim, factor, round(exact, digits)) == scale:
            return round(exact, digits)
    return exact


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    attention, latent, rotary = spec.attention, spec.attention.latent, spec.attention.rotary
    reject_unrepresentable(
        {
            "attention without latents": latent is None,
            "latents without interleaved rotary positions": rotary is None or rotary.layout != "interleaved",
            "a model that is not a decoder": spec.kind != "decoder" or spec.output == "mlm",
            "norms other than pre-norm RMS norms": spec.norm != "rms"
            or spec.norm_placement != "pre"
            or spec.embed_norm,
            "an MLP other than SwiGLU": spec.activation != "swiglu",
            "absolute positions": spec.positions != "none",
            "windows": bool(spec.windows) or attention.window is not None,
            "a custom attention scale": mscale_from_scale(attention) is None,
            "a learned sink or off-by-one softmax": attention.softmax != "plain",
            "soft-capped scores": attention.softcap is not None,
            **gates_and_norms(spec),
            "biases of q, k and v without a bias of the output, or the reverse": attention.bias != attention.out_bias,
            f"norms of latents with another eps than {LATENT_EPS}": latent is not None
            and latent.norm_eps != LATENT_EPS,
            f"a position bias ({attention.position_bias_field})": attention.position_bias_field is not None,
            "token types": spec.token_types > 0,
            "an embedding scale or scaled logits": spec.embed_scale != 1.0 or spec.logit_scale != 1.0,
            "layers that share their weights": spec.shared_layers or bool(spec.embed_width),
        },
        "DeepSeek-V2",
    )
    assert latent is not None
    assert rotary is not None
    if rotary.scaling is not None and rotary.scaling.kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"the DeepSeek-V2 format is not written with {rotary.scaling.kind} rotary scaling.")
    rope = rope_parameters(rotary, latent.rotary_dims)
    if mscale := mscale_from_scale(attention):
        rope["mscale_all_dim"] = mscale
    return {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2Model" if spec.output == "none" else "DeepseekV2ForCausalLM"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "intermediate_size": spec.mlp_width,
        "first_k_dense_replace": spec.layers,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_rope_head_dim": latent.rotary_dims,
        "qk_nope_head_dim": attention.head_dim - latent.rotary_dims,
        "v_head_dim": attention.value_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "attention_bias": attention.bias,
        "mlp_bias": spec.mlp_bias,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": spec.tied,
    }


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Remove the output head if the file contains a DeepseekV2Model."""
    is_body = "embed_tokens.weight" in names and "lm_head.weight" not in names
    return replace(spec, output="none") if is_body else spec


def has_query_rank(spec: ModelSpec) -> bool:
    """Return whether queries are computed from a latent."""
    return spec.attention.latent is not None and spec.attention.latent.query_rank > 0


def _mapping(external_name: str, native_name: str, when: Any = lambda spec: True) -> TensorMapping:
    return TensorMapping(f"layers.{{i}}.{external_name}", f"blocks.{{i}}.{native_name}", when=when)


_ATTENTION = "self_attn"
MAPPINGS = (
    TensorMapping("embed_tokens.weight", "embed.tokens.weight"),
    _mapping("input_layernorm.weight", "norm_attention.weight"),
    _mapping(f"{_ATTENTION}.q_proj.weight", "attention.qkv.q_weight", lambda spec: not has_query_rank(spec)),
    _mapping(f"{_ATTENTION}.q_b_proj.weight", "attention.qkv.q_weight", has_query_rank),
    _mapping(f"{_ATTENTION}.q_a_proj.weight", "attention.qkv.q_down_weight", has_query_rank),
    _mapping(
        f"{_ATTENTION}.q_a_proj.bias",
        "attention.qkv.q_down_bias",
        lambda spec: has_query_rank(spec) and spec.attention.bias,
    ),
    _mapping(f"{_ATTENTION}.q_a_layernorm.weight", "attention.qkv.q_norm_weight", has_query_rank),
    _mapping(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "attention.qkv.kv_down_weight"),
    _mapping(f"{_ATTENTION}.kv_a_proj_with_mqa.bias", "attention.qkv.kv_down_bias", lambda spec: spec.attention.bias),
    _mapping(f"{_ATTENTION}.kv_a_layernorm.weight", "attention.qkv.kv_norm_weight"),
    _mapping(f"{_ATTENTION}.kv_b_proj.weight", "attention.qkv.kv_weight"),
    _mapping(f"{_ATTENTION}.o_proj.weight", "attention.output_projection.weight"),
    _mapping(f"{_ATTENTION}.o_proj.bias", "attention.output_projection.bias", lambda spec: spec.attention.out_bias),
    _mapping("post_attention_layernorm.weight", "norm_mlp.weight"),
    *(_mapping(f"mlp.{name}_proj.weight", f"mlp.{name}.weight") for name in ("gate", "up", "down")),
    *(
        _mapping(f"mlp.{name}_proj.bias", f"mlp.{name}.bias", lambda spec: spec.mlp_bias)
        for name in ("gate", "up", "down")
    ),
    TensorMapping("norm.weight", "norm.weight"),
    TensorMapping(
        "/lm_head.weight", "output.vocabulary.weight", when=lambda spec: spec.output == "lm" and not spec.tied
    ),
)

FAMILY = ModelFamilySpec(
    name="deepseek-v2",
    model_types=("deepseek_v2",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
    architectures=("DeepseekV2Model", "DeepseekV2ForCausalLM"),
)
