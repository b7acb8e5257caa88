"""BERT: an encoder with post-norm, token types, a pooler and, if it was trained to fill gaps, an output for that."""

from dataclasses import replace
from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import (
    Config,
    Family,
    choose,
    common_refusals,
    common_unread,
    need,
    refuse,
    setting,
    switch,
    unread,
    whole,
)
from headwise.weights.keymap import Line

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def spec(config: Config) -> ModelSpec:
    """From config.json. Whether there is a pooler and an output is told by the tensors; see `adjust`."""
    positions = setting(config, "position_embedding_type", default="absolute")
    unread(
        common_unread(config)
        | {
            f"{positions} positions (position_embedding_type)": positions != "absolute",
            "a decoder made of BERT (is_decoder)": switch(config, "is_decoder", default=False),
        }
    )
    return ModelSpec(
        vocab=need(config, "vocab_size"),
        context=whole(config, "max_position_embeddings", default=512),
        layers=need(config, "num_hidden_layers"),
        attention=AttentionSpec(
            need(config, "hidden_size"),
            whole(config, "num_attention_heads", default=12),
            bias=True,
            out_bias=True,
        ),
        hidden=need(config, "intermediate_size"),
        kind="encoder",
        form="post",
        norm_eps=setting(config, "layer_norm_eps", default=1e-12),
        activation=choose(setting(config, "hidden_act", default="gelu"), ACTIVATIONS, "activation"),
        embed_norm=True,
        token_types=whole(config, "type_vocab_size", default=2),
        output="none",
        tied=switch(config, "tie_word_embeddings", default=True),
    )


def config(spec: ModelSpec) -> dict[str, Any]:
    """To config.json."""
    heads = spec.attention
    refuse(
        {
            **common_refusals(spec),
            "anything but an encoder": spec.kind != "encoder" or spec.output == "lm",
            "rotary positions": heads.rotary is not None or spec.positions != "learned",
            "grouped keys": heads.kv_heads != heads.heads,
            "head_dim other than width / heads": heads.head_dim * heads.heads != heads.width,
            "pre-norm or RMS norms": spec.form != "post" or spec.norm != "layer" or not spec.embed_norm,
            "windows": bool(spec.windows) or heads.window is not None,
            "layers without biases": not (heads.bias and heads.out_bias and spec.mlp_bias),
            "a scale of its own": heads.scale is not None,
            "swiglu": spec.activation == "swiglu",
            "a model without token types": spec.token_types == 0,
        },
        "BERT",
    )
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM" if spec.output == "mlm" else "BertModel"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": heads.heads,
        "intermediate_size": spec.hidden,
        "hidden_act": {"gelu_tanh": "gelu_new"}.get(spec.activation, spec.activation),
        "layer_norm_eps": spec.norm_eps,
        "type_vocab_size": spec.token_types,
        "tie_word_embeddings": spec.tied,
        "attention_probs_dropout_prob": heads.dropout,
        "hidden_dropout_prob": spec.dropout,
    }


def adjust(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Whether there is a pooler and an output for gaps is told by the tensors."""
    filling = "cls.predictions.transform.dense.weight" in names
    pooler = any(name.endswith("pooler.dense.weight") for name in names)
    return replace(spec, pooler=pooler, output="mlm" if filling else "none")


def _mlm(spec: ModelSpec) -> bool:
    return spec.output == "mlm"


_LAYER = "encoder.layer.{i}."
_OURS = "blocks.{i}."
_LAYER_NAMES = {
    "attention.self.query.{p}": "attention.read.q_{p}",
    "attention.self.key.{p}": "attention.read.k_{p}",
    "attention.self.value.{p}": "attention.read.v_{p}",
    "attention.output.dense.{p}": "attention.write.{p}",
    "attention.output.LayerNorm.{p}": "norm_attention.{p}",
    "intermediate.dense.{p}": "mlp.up.{p}",
    "output.dense.{p}": "mlp.down.{p}",
    "output.LayerNorm.{p}": "norm_mlp.{p}",
}
LINES = (
    Line("embeddings.word_embeddings.weight", "embed.tokens.weight"),
    Line("embeddings.position_embeddings.weight", "embed.positions.weight"),
    Line("embeddings.token_type_embeddings.weight", "embed.types.weight"),
    Line("embeddings.LayerNorm.weight", "embed.norm.weight"),
    Line("embeddings.LayerNorm.bias", "embed.norm.bias"),
    *(
        Line(_LAYER + theirs.replace("{p}", part), _OURS + ours.replace("{p}", part))
        for theirs, ours in _LAYER_NAMES.items()
        for part in ("weight", "bias")
    ),
    Line("pooler.dense.weight", "pooler.dense.weight", when=lambda spec: spec.pooler),
    Line("pooler.dense.bias", "pooler.dense.bias", when=lambda spec: spec.pooler),
    Line("/cls.predictions.transform.dense.weight", "output.transform.weight", when=_mlm),
    Line("/cls.predictions.transform.dense.bias", "output.transform.bias", when=_mlm),
    Line("/cls.predictions.transform.LayerNorm.weight", "output.norm.weight", when=_mlm),
    Line("/cls.predictions.transform.LayerNorm.bias", "output.norm.bias", when=_mlm),
    Line("/cls.predictions.bias", "output.vocabulary.bias", when=lambda spec: _mlm(spec) and spec.tied),
    Line("/cls.predictions.decoder.bias", "output.vocabulary.bias", when=lambda spec: _mlm(spec) and not spec.tied),
    Line("/cls.predictions.decoder.weight", "output.vocabulary.weight", when=lambda spec: _mlm(spec) and not spec.tied),
)

FAMILY = Family(
    name="bert",
    model_types=("bert",),
    spec=spec,
    config=config,
    lines=LINES,
    storage="q,k,v",
    adjust=adjust,
    prefixes=("bert.", ""),
    export_prefix=lambda spec: "bert." if spec.output == "mlm" else "",
    ignored=(
        "position_ids",
        *("cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
    ),
)
