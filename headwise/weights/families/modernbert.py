"""ModernBERT: a pre-norm encoder with rotary positions, gated MLPs, and windows in two of three layers."""

from dataclasses import replace
from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.decoder_config import (
    DecoderDefaults,
    layer_rope_settings,
    layer_types_of,
    layer_windows_and_rotaries,
    read_rotary,
    require_same_spec,
    rope_parameters,
    varied_fields,
)
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    common_unsupported,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    required_setting,
    setting_or_default,
    translate_setting,
)
from headwise.weights.families.gguf_gpt2_bert import MODERN_BERT_MAPPINGS
from headwise.weights.keymap import TensorMapping

KINDS = ("full_attention", "sliding_attention")
DEFAULTS = {
    "full_attention": DecoderDefaults(8192, theta=160000.0),
    "sliding_attention": DecoderDefaults(8192, theta=10000.0),
}
THETA_NAMES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
ACTIVATIONS = {
    "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu", "relu": "reglu",
}  # fmt: skip
NAMES_OF_ACTIVATIONS = {"geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "swiglu": "silu", "reglu": "relu"}
OUTPUT_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
NAMES_OF_OUTPUT_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. The masked-LM head is set by `adjust_to_tensors`."""
    reject_unsupported(
        common_unsupported(config)
        | {
            "a masked-LM head without bias (decoder_bias false)": not bool_setting(
                config, "decoder_bias", default=True
            ),
        }
    )
    every = positive_int_setting(config, "global_attn_every_n_layers", default=3)
    kinds = layer_types_of(config, lambda layer: KINDS[layer % every != 0], KINDS)
    rotary_of = {
        kind: read_rotary(config, layer_rope_settings(config, kind, THETA_NAMES[kind]), DEFAULTS[kind])
        for kind in KINDS
    }
    window = (
        positive_int_setting(config, "local_attention", default=128) // 2 + 1
    )  # keys on each side, the token itself included
    attention, model_fields = varied_fields(
        [window if kind == "sliding_attention" else None for kind in kinds], [rotary_of[kind] for kind in kinds]
    )
    biased = bool_setting(config, "attention_bias", default=False)
    heads = positive_int_setting(config, "num_attention_heads", default=12)
    return ModelSpec(
        vocab=required_setting(config, "vocab_size"),
        context=positive_int_setting(config, "max_position_embeddings", default=8192),
        layers=required_setting(config, "num_hidden_layers"),
        attention=AttentionSpec(
            required_setting(config, "hidden_size"), heads, bias=biased, out_bias=biased, **attention
        ),
        mlp_width=required_setting(config, "intermediate_size"),
        kind="encoder",
        norm="layer" if bool_setting(config, "norm_bias", default=False) else "layer_no_bias",
        norm_eps=setting_or_default(config, "norm_eps", default=1e-5),
        activation=translate_setting(
            setting_or_default(config, "hidden_activation", default="gelu"), ACTIVATIONS, "activation"
        ),
        mlp_bias=bool_setting(config, "mlp_bias", default=False),
        positions="none",
        embed_norm=True,
        first_norm=False,
        output="none",
        output_activation=translate_setting(
            setting_or_default(config, "classifier_activation", default="gelu"), OUTPUT_ACTIVATIONS, "activation"
        ),
        transform_bias=bool_setting(config, "classifier_bias", default=False),
        tied=bool_setting(config, "tie_word_embeddings", default=True),
        **model_fields,
    )


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    attention, (windows, rotaries) = spec.attention, layer_windows_and_rotaries(spec)
    reject_unrepresentable(
        {
            "a model that is not an encoder": spec.kind != "encoder" or spec.output == "lm",
            "an output activation of a gated MLP": spec.output == "mlm" and not spec.output_activation,
            "layers without rotary positions": None in rotaries,
        },
        "ModernBERT",
    )
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    rotary_of = dict(zip(kinds, rotaries, strict=True))
    window = next((value for value in windows if value is not None), 65)
    config: dict[str, Any] = {
        "model_type": "modernbert",
        "architectures": ["ModernBertForMaskedLM" if spec.output == "mlm" else "ModernBertModel"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": attention.heads,
        "intermediate_size": spec.mlp_width,
        "hidden_activation": NAMES_OF_ACTIVATIONS.get(spec.activation, spec.activation),
        "classifier_activation": NAMES_OF_OUTPUT_ACTIVATIONS[spec.output_activation or "gelu"],
        "classifier_bias": spec.transform_bias,
        "norm_eps": spec.norm_eps,
        "norm_bias": spec.norm == "layer",
        "attention_bias": attention.bias,
        "mlp_bias": spec.mlp_bias,
        "layer_types": kinds,
        "local_attention": 2 * (window - 1),
        "rope_parameters": {
            kind: rope_parameters(rotary_of.get(kind, rotaries[0]), attention.head_dim) for kind in KINDS
        },
        "tie_word_embeddings": spec.tied,
        "attention_dropout": attention.dropout,
        "pad_token_id": None,  # the default is outside a small vocabulary
    }
    headless = replace(spec, output="none", output_activation=spec.output_activation or "gelu")
    return require_same_spec(headless, config, spec_from_config, "ModernBERT")


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Set the masked-LM head, which only the tensor names reveal."""
    return replace(spec, output="mlm" if "head.dense.weight" in names else "none")


def _has_mlm_head(spec: ModelSpec) -> bool:
    return spec.output == "mlm"


def _has_norm_bias(spec: ModelSpec) -> bool:
    return spec.norm == "layer"


def _norm(
    external: str, native: str, *, is_head: bool = False, first_layer: int = 0
) -> tuple[TensorMapping, TensorMapping]:
    """Return the rows of a norm: its weight, and its bias if the norms have one."""

    def has_weight(spec: ModelSpec) -> bool:
        return _has_mlm_head(spec) or not is_head

    return (
        TensorMapping(f"{external}.weight", f"{native}.weight", when=has_weight, first_layer=first_layer),
        TensorMapping(
            f"{external}.bias", f"{native}.bias", first_layer=first_layer,
            when=lambda spec: has_weight(spec) and _has_norm_bias(spec),
        ),
    )  # fmt: skip


_LINEAR = {
    "layers.{i}.attn.Wqkv": ("blocks.{i}.attention.qkv.qkv_", (0, 1), lambda spec: spec.attention.bias),
    "layers.{i}.attn.Wo": ("blocks.{i}.attention.output_projection.", (0, 1), lambda spec: spec.attention.out_bias),
    "layers.{i}.mlp.Wi": ("blocks.{i}.mlp.gate.", (0, 2), lambda spec: spec.mlp_bias),
    "layers.{i}.mlp.Wi ": ("blocks.{i}.mlp.up.", (1, 2), lambda spec: spec.mlp_bias),
    "layers.{i}.mlp.Wo": ("blocks.{i}.mlp.down.", (0, 1), lambda spec: spec.mlp_bias),
}
MAPPINGS = (
    TensorMapping("embeddings.tok_embeddings.weight", "embed.tokens.weight"),
    *_norm("embeddings.norm", "embed.norm"),
    *_norm("layers.{i}.attn_norm", "blocks.{i}.norm_attention", first_layer=1),
    *_norm("layers.{i}.mlp_norm", "blocks.{i}.norm_mlp"),
    *(
        TensorMapping(f"{external.strip()}.weight", f"{native}weight", part=part)
        for external, (native, part, _) in _LINEAR.items()
    ),
    *(
        TensorMapping(f"{external.strip()}.bias", f"{native}bias", part=part, when=has_bias)
        for external, (native, part, has_bias) in _LINEAR.items()
    ),
    *_norm("final_norm", "norm"),
    TensorMapping("/head.dense.weight", "output.transform.weight", when=_has_mlm_head),
    TensorMapping(
        "/head.dense.bias", "output.transform.bias", when=lambda spec: _has_mlm_head(spec) and spec.transform_bias
    ),
    *_norm("/head.norm", "output.norm", is_head=True),
    TensorMapping("/decoder.bias", "output.vocabulary.bias", when=_has_mlm_head),
    TensorMapping(
        "/decoder.weight", "output.vocabulary.weight", when=lambda spec: _has_mlm_head(spec) and not spec.tied
    ),
)

FAMILY = ModelFamilySpec(
    name="modernbert",
    model_types=("modernbert",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    other_mappings={"gguf": MODERN_BERT_MAPPINGS},
    storage="qkv",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "model." if spec.output == "mlm" else "",
    ignored_suffixes=(
        "decoder.weight",
        "cls.weight",
        "cls.norm.weight",
    ),  # cls: masked-LM output in GGUF, without its bias
    architectures=("ModernBertForMaskedLM", "ModernBertModel"),
)
