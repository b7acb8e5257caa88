"""T5 and mT5: encoder-decoders with RMS norms, unscaled scores, and one table of position biases per stack.

T5's first layer of a stack computes the position bias of all its layers (https://arxiv.org/abs/1910.10683). Here every layer
has a copy of the table, so that heads can be pruned in one layer only. Training changes the copies independently; an export
then raises an error. The model folder of a T5EncoderModel is an encoder.
"""

from dataclasses import replace
from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    gates_and_norms,
    positive_int_or_none,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    setting_or_default,
    translate_setting,
)
from headwise.weights.keymap import TensorMapping

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-gelu_pytorch_tanh": "geglu_tanh",
    "gated-relu": "reglu",
    "gated-silu": "swiglu",
}
NAMES_OF_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "geglu_tanh": "gated-gelu",
    "reglu": "gated-relu",
    "swiglu": "gated-silu",
}
# Defaults of transformers that differ between the two model types.
DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {"vocab": 32128, "mlp": 2048, "layers": 6, "heads": 8, "activation": "relu"},
    "mt5": {"vocab": 250112, "mlp": 1024, "layers": 8, "heads": 6, "activation": "gated-gelu"},
}


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. The output head and a missing decoder are set by `adjust_to_tensors`."""
    reject_unsupported(
        {
            "quantized weights (quantization_config)": bool(config.get("quantization_config")),
            "a decoder without an encoder (is_decoder)": bool_setting(config, "is_decoder", default=False),
        }
    )
    defaults = DEFAULTS[config.get("model_type", "t5")]
    width = positive_int_setting(config, "d_model", "hidden_size", default=512)
    encoder_layers = positive_int_setting(config, "num_layers", "num_hidden_layers", default=defaults["layers"])
    pad = setting_or_default(config, "pad_token_id", default=0, allow_null=True)
    return ModelSpec(
        vocab=positive_int_setting(config, "vocab_size", default=defaults["vocab"]),
        context=positive_int_setting(config, "n_positions", default=512),  # not a limit: positions are relative
        layers=positive_int_or_none(config, "num_decoder_layers") or encoder_layers,
        encoder_layers=encoder_layers,
        attention=AttentionSpec(
            width,
            positive_int_setting(config, "num_heads", "num_attention_heads", default=defaults["heads"]),
            head_dim=positive_int_setting(config, "d_kv", "head_dim", default=64),
            scale=1.0,
            t5_buckets=positive_int_setting(config, "relative_attention_num_buckets", default=32),
            t5_max_distance=positive_int_setting(config, "relative_attention_max_distance", default=128),
        ),
        mlp_width=positive_int_setting(config, "d_ff", default=defaults["mlp"]),
        kind="encoder-decoder",
        norm="rms",
        norm_eps=setting_or_default(config, "layer_norm_epsilon", default=1e-6),
        activation=translate_setting(
            setting_or_default(config, "feed_forward_proj", default=defaults["activation"]),
            ACTIVATIONS,
            "feed_forward_proj",
        ),
        mlp_bias=False,
        positions="none",
        causal_t5_buckets=True,
        decoder_start_id=setting_or_default(config, "decoder_start_token_id", default=pad, allow_null=True),
        logit_scale=width**-0.5 if _scales_logits(config) else 1.0,
    )


def _scales_logits(config: Config) -> bool:
    """Return whether hidden states are scaled before the output: in T5 version 1.0, whose embeddings are tied."""
    if config.get("model_type") == "mt5":
        return False
    return bool_setting(config, "scale_decoder_outputs", default=config.get("tie_word_embeddings") is not False)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    attention = spec.attention
    reject_unrepresentable(
        {
            "a decoder without an encoder": spec.kind == "decoder",
            "a model without T5 position biases": attention.t5_buckets == 0,
            "T5 buckets for later keys in the decoder": spec.kind != "encoder" and not spec.causal_t5_buckets,
            "latent projections (MLA)": attention.latent is not None,
            "scaled scores": attention.scale != 1.0,
            "value_dim other than head_dim": attention.value_dim != attention.head_dim,
            "grouped-query attention": attention.kv_heads != attention.heads,
            "biases": attention.bias or attention.out_bias or spec.mlp_bias,
            "norms other than pre-norm RMS norms": spec.norm != "rms" or spec.norm_placement != "pre",
            "a learned sink or off-by-one softmax": attention.softmax != "plain",
            "soft-capped scores": attention.softcap is not None,
            **gates_and_norms(spec),
            "head_input='slice'": attention.head_input == "slice",
            "windows": bool(spec.windows) or attention.window is not None,
            "rotary or absolute positions": attention.rotary is not None or spec.positions != "none",
            "an embedding scale": spec.embed_scale != 1.0,
            "an embedding norm, token types or a pooler": spec.embed_norm or spec.token_types > 0 or spec.pooler,
            "embeddings narrower than the model": bool(spec.embed_width),
            "layers that share their weights": spec.shared_layers,
            f"the activation {spec.activation}": spec.activation not in NAMES_OF_ACTIVATIONS,
            f"logits scaled by {spec.logit_scale}": spec.logit_scale not in (1.0, spec.width**-0.5),
            "an output of an encoder": spec.kind == "encoder" and spec.output != "none",
        },
        "T5",
    )
    classes = {"lm": "T5ForConditionalGeneration", "none": "T5Model"}
    return {
        "model_type": "t5",
        "architectures": ["T5EncoderModel" if spec.kind == "encoder" else classes[spec.output]],
        "is_encoder_decoder": spec.kind != "encoder",
        "vocab_size": spec.vocab,
        "n_positions": spec.context,
        "d_model": spec.width,
        "d_kv": attention.head_dim,
        "d_ff": spec.mlp_width,
        "num_layers": spec.encoder_layers or spec.layers,
        "num_decoder_layers": spec.layers,
        "num_heads": attention.heads,
        "relative_attention_num_buckets": attention.t5_buckets,
        "relative_attention_max_distance": attention.t5_max_distance,
        "layer_norm_epsilon": spec.norm_eps,
        "feed_forward_proj": NAMES_OF_ACTIVATIONS[spec.activation],
        "dropout_rate": spec.dropout,
        "decoder_start_token_id": spec.decoder_start_id,
        "scale_decoder_outputs": spec.logit_scale != 1.0,
        "tie_word_embeddings": spec.tied,
    }


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Set the output and the stacks, which the class and the tensor names reveal.

    An output in the file is used even if config.json ties it to the embedding, as in transformers 5.
    """
    classes = config.get("architectures")
    is_language_model = isinstance(classes, list) and any("ConditionalGeneration" in str(name) for name in classes)
    if not any(name.startswith("decoder.block.") for name in names):
        return replace(
            spec, kind="encoder", layers=spec.encoder_layers, encoder_layers=0, output="none", decoder_start_id=None,
            logit_scale=1.0,
        )  # fmt: skip
    if "lm_head.weight" in names:
        return replace(spec, tied=False)
    return spec if is_language_model or not isinstance(classes, list) else replace(spec, output="none")


def _attention_mappings(external_prefix: str, native_prefix: str, when: Any) -> list[TensorMapping]:
    names = dict.fromkeys("qkv", "qkv.{p}_weight") | {"o": "output_projection.weight"}
    return [
        TensorMapping(
            f"{external_prefix}.{projection}.weight", f"{native_prefix}.{name.replace('{p}', projection)}", when=when
        )
        for projection, name in names.items()
    ]


def _stack_mappings(external_stack: str, native_blocks: str, final_norm: str, when: Any) -> list[TensorMapping]:
    """Return the name map of one stack. Its MLP is sub-layer 1 of an encoder and 2 of a decoder."""
    block, own = f"{external_stack}.block.{{i}}.layer", f"{native_blocks}.{{i}}"
    is_decoder = external_stack == "decoder"
    mlp = f"{block}.{2 if is_decoder else 1}"
    mappings = [
        *_attention_mappings(f"{block}.0.SelfAttention", f"{own}.attention", when),
        TensorMapping(f"{block}.0.layer_norm.weight", f"{own}.norm_attention.weight", when=when),
        TensorMapping(
            f"{external_stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{own}.attention.position_bias",
            transposed=True,
            when=when,
        ),
        TensorMapping(f"{mlp}.layer_norm.weight", f"{own}.norm_mlp.weight", when=when),
        TensorMapping(f"{mlp}.DenseReluDense.wo.weight", f"{own}.mlp.down.weight", when=when),
        TensorMapping(
            f"{mlp}.DenseReluDense.wi.weight",
            f"{own}.mlp.up.weight",
            when=lambda spec: when(spec) and not spec.has_gated_mlp,
        ),
        *(
            TensorMapping(
                f"{mlp}.DenseReluDense.{external_name}.weight",
                f"{own}.mlp.{name}.weight",
                when=lambda spec: when(spec) and spec.has_gated_mlp,
            )
            for external_name, name in (("wi_0", "gate"), ("wi_1", "up"))
        ),
        TensorMapping(f"{external_stack}.final_layer_norm.weight", f"{final_norm}.weight", when=when),
    ]
    if is_decoder:
        mappings += _attention_mappings(f"{block}.1.EncDecAttention", f"{own}.cross", when)
        mappings.append(TensorMapping(f"{block}.1.layer_norm.weight", f"{own}.norm_cross.weight", when=when))
    return mappings


def _has_decoder(spec: ModelSpec) -> bool:
    return spec.kind == "encoder-decoder"


def _is_encoder(spec: ModelSpec) -> bool:
    return spec.kind == "encoder"


MAPPINGS = (
    TensorMapping("shared.weight", "embed.tokens.weight"),
    *_stack_mappings("encoder", "encoder_blocks", "encoder_norm", _has_decoder),
    *_stack_mappings("decoder", "blocks", "norm", _has_decoder),
    *_stack_mappings("encoder", "blocks", "norm", _is_encoder),
    TensorMapping(
        "lm_head.weight", "output.vocabulary.weight", when=lambda spec: spec.output == "lm" and not spec.tied
    ),
)

FAMILY = ModelFamilySpec(
    name="t5",
    model_types=("t5", "mt5"),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="q,k,v",
    adjust=adjust_to_tensors,
    ignored_suffixes=(
        *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        "layer.1.EncDecAttention.relative_attention_bias.weight",  # in old files, never used
        "cross_attn_rel_b.weight",  # the name of this tensor in GGUF
    ),
    architectures=(
        *("T5Model", "T5ForConditionalGeneration", "T5EncoderModel"),
        *("MT5Model", "MT5ForConditionalGeneration", "MT5EncoderModel"),
        "T5WithLMHeadModel",
    ),
)
