"""Small models of every kind, with random weights in all parameters."""

import torch

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, QKNorm, QueryScaling, Rotary
from headwise.text.build_tokenizers import byte_tokenizer


def make_spec(attention: AttentionSpec, **overrides: object) -> ModelSpec:
    return ModelSpec(**{"vocab": 53, "context": 32, "layers": 3, "attention": attention, "mlp_width": 22, **overrides})  # pyright: ignore


LLAMA = {"activation": "swiglu", "norm": "rms", "positions": "none", "mlp_bias": False}
SPECS = {
    "grouped": make_spec(AttentionSpec(width=36, heads=9, kv_heads=3, rotary=Rotary()), **LLAMA),
    "cut": make_spec(
        AttentionSpec(width=36, heads=6, kv_heads=3, bias=True, out_bias=True),
        kept_heads={"0": (0, 1, 2, 3, 5), "1": (4,), "2": ()},
    ),
    "one key": make_spec(AttentionSpec(width=36, heads=6, kv_heads=1, bias=True, head_dim=4, value_dim=6)),
    "parallel": make_spec(
        AttentionSpec(width=36, heads=4, alibi=True, softmax="sink", gated=True), norm_placement="parallel", tied=False
    ),
    "encoder": make_spec(
        AttentionSpec(width=36, heads=4, bias=True, out_bias=True, t5_buckets=8),
        kind="encoder", norm_placement="post", output="mlm", embed_norm=True, token_types=2,
    ),
    "two stacks": make_spec(AttentionSpec(width=36, heads=5, head_dim=7), kind="encoder-decoder", encoder_layers=2, layers=2),
    "slices": make_spec(AttentionSpec(width=36, heads=4, head_input="slice", softcap=5.0, window=5)),
    "norms and gates": make_spec(
        AttentionSpec(
            width=36, heads=6, kv_heads=3, rotary=Rotary(), bias=True, qk_norm=QKNorm(weights="per_head"),
            output_gate="channel", query_scaling=QueryScaling(0.3, 4),
        ),
        norm_placement="sandwich", rotaries=(Rotary(), None), windows=(4, None), logit_softcap=3.0, **LLAMA,
    ),
    "shared norms, first block without norm": make_spec(
        AttentionSpec(width=36, heads=6, kv_heads=2, rotary=Rotary(), qk_norm=QKNorm("rms_plus_one")),
        **LLAMA | {"norm": "layer_no_bias"}, embed_norm=True, first_norm=False,
    ),
}  # fmt: skip
# Nine heads with three KV heads, five in the second layer, one in the last, for generation.
GENERATING_SPEC = make_spec(
    AttentionSpec(width=36, heads=9, kv_heads=3, rotary=Rotary(), out_bias=True),
    vocab=257, context=64, mlp_width=40, kept_heads={"1": (0, 1, 4, 5, 8), "2": (3,)}, **LLAMA,
)  # fmt: skip


def make_model(spec: ModelSpec, double: bool = False) -> Transformer:
    """Return a model with the same random weights in every process, in float64 if `double`."""
    torch.manual_seed(0)
    model = Transformer(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.tokenizer = byte_tokenizer() if spec.vocab == 257 else None
    return (model.double() if double else model).eval()


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    if actual.shape != expected.shape:
        return float("inf")
    return (
        float((actual - expected).detach().abs().max() / actual.detach().abs().max().clamp(min=1e-12))
        if actual.numel()
        else 0.0
    )
