# ruff: noqa: C408 (sizes read better as keywords)
"""Logit attribution and promoted tokens of attached models: equal to native models and to a direct computation."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import headwise as hw
from headwise.analysis.attribution.head_output_scores import logit_attribution, token_effects
from tests.attached.models import BY_NAME, GROUPED, PLAIN, Case
from tests.attached.test_analysis import TEXTS, build, save_model

NATIVE_FAMILIES = ["gpt2", "llama", "mistral", "qwen2"]  # decoders that hw.load also supports natively
DECODERS = [*NATIVE_FAMILIES, "qwen3", "gemma3", "opt", "gpt_neox", "phi3"]
IDS = [5, 9, 11, 30, 7, 9, 22]
UNGROUPED = {name: size for name, size in GROUPED.items() if name != "head_dim"}
MORE_CASES = [
    Case("one block after the other", "GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN | dict(use_parallel_residual=False)),
    Case("an output with a bias", "PhiForCausalLM", "PhiConfig", PLAIN | dict(hidden_size=32)),
    Case("tied, with biases", "LlamaForCausalLM", "LlamaConfig",
         GROUPED | dict(attention_bias=True, tie_word_embeddings=True)),
    Case("logits divided", "GraniteForCausalLM", "GraniteConfig", GROUPED | dict(logits_scaling=6.0)),
    Case("logits multiplied, a parallel block", "CohereForCausalLM", "CohereConfig", UNGROUPED),
    Case("norms behind, none before", "Olmo2ForCausalLM", "Olmo2Config", UNGROUPED),
    Case("LayerNorm above 1", "NemotronForCausalLM", "NemotronConfig", GROUPED),
    Case("experts", "MixtralForCausalLM", "MixtralConfig", GROUPED | dict(num_local_experts=3)),
]  # fmt: skip


@pytest.mark.parametrize("name", NATIVE_FAMILIES)
def test_logit_attribution_attached_equals_native(name: str, tmp_path: Path) -> None:
    native, attached = hw.load(save_model(name, tmp_path)), hw.attach(*build(name))
    assert isinstance(native, hw.Transformer)
    for wrong, position in ((None, -1), (3, -1), (3, 2)):
        a, b = (logit_attribution(model, IDS, 11, wrong, position=position) for model in (native, attached))
        assert list(a.parts) == list(b.parts)
        np.testing.assert_allclose(list(b.parts.values()), list(a.parts.values()), rtol=0, atol=1e-5 * largest(a))
    for head in ("0.1", "2.3"):
        for options in (dict(), dict(typical=True, corpus=TEXTS)):
            a, b = (token_effects(model, head, "the cat", k=5, **options) for model in (native, attached))  # pyright: ignore
            for native_effect, attached_effect in zip(a, b, strict=True):
                assert native_effect.token == attached_effect.token
                assert words(native_effect.promotes) == words(attached_effect.promotes)
                assert words(native_effect.suppresses) == words(attached_effect.suppresses)
                np.testing.assert_allclose(scores(attached_effect.promotes), scores(native_effect.promotes), rtol=1e-4)


@pytest.mark.parametrize("case", [*(BY_NAME[name] for name in DECODERS), *MORE_CASES], ids=lambda case: case.name)
def test_logit_attribution_parts_sum_to_logits(case: Case) -> None:
    model = case.build()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS])).logits[0].double()
    attached = hw.attach(model)
    for wrong, position in ((None, -1), (3, -1), (3, 2)):
        attribution = logit_attribution(attached, IDS, 11, wrong, position=position)
        want = float(logits[position, 11] - (0 if wrong is None else logits[position, wrong]))
        assert abs(attribution.total - want) <= 1e-5 * max(abs(want), largest(attribution))
        assert attribution.is_complete
        assert list(attribution.heads) == list(map(str, attached.spec.head_addresses))
        assert list(attribution.mlps) == ["0", "1", "2"]


# Paths of the last norm, the layers, and in each layer W_O and a norm after it.
MODULE_PATHS = {
    "gpt2": ("transformer.ln_f", "transformer.h", "attn.c_proj", None),
    "opt": ("model.decoder.final_layer_norm", "model.decoder.layers", "self_attn.out_proj", None),
    "gpt_neox": ("gpt_neox.final_layer_norm", "gpt_neox.layers", "attention.dense", None),
    "gemma3": ("model.norm", "model.layers", "self_attn.o_proj", "post_attention_layernorm"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), ("model.norm", "model.layers", "self_attn.o_proj", None)),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("layer", "head"), [(0, 1), (2, 3)])
def test_logit_attribution_head_equals_frozen_norm_effect(name: str, layer: int, head: int) -> None:
    """Reference: the model's own modules, with the scale of each norm frozen."""
    model, (last, layers, writes, post_norm) = BY_NAME[name].build(), MODULE_PATHS[name]
    write, norm = model.get_submodule(f"{layers}.{layer}.{writes}"), model.get_submodule(last)
    after = None if post_norm is None else model.get_submodule(f"{layers}.{layer}.{post_norm}")
    with torch.no_grad(), captured_io(write, norm, *([] if after is None else [after])) as (inputs, outputs):
        model(input_ids=torch.tensor([IDS]))
        heads = BY_NAME[name].sizes.get("num_attention_heads") or BY_NAME[name].sizes["n_head"]
        # (T, H, d): only this head
        z = inputs[write].unflatten(-1, (heads, -1)) * (torch.arange(heads) == head)[:, None]
        wrote = write(z.flatten(-2)) - write(torch.zeros_like(inputs[write]))  # (T, D)
        wrote = wrote if after is None else wrote * outputs[after] / inputs[after]
        x, out = inputs[norm], outputs[norm]
        if isinstance(norm, nn.LayerNorm):
            x, wrote, out = x - x.mean(-1, keepdim=True), wrote - wrote.mean(-1, keepdim=True), out - norm.bias
        moved = model.get_output_embeddings()(wrote * out / x)[-1]
    attribution = logit_attribution(hw.attach(model), IDS, 11, 3)
    assert attribution.heads[f"{layer}.{head}"] == pytest.approx(
        float(moved[11] - moved[3]), abs=1e-5 * largest(attribution)
    )


@contextmanager
def captured_io(*parts: nn.Module) -> Iterator[tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]]:
    """Record inputs and outputs of modules for one text: (T, D) each."""
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def store(part: nn.Module, arguments: tuple[Tensor], out: Tensor) -> None:
        inputs.setdefault(part, arguments[0][0])  # only the first call; later ones are made by the test
        outputs.setdefault(part, out[0])

    hooks = [part.register_forward_hook(store) for part in parts]
    yield inputs, outputs
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", DECODERS)
def test_vocabulary_single_token_equals_logit_attribution(name: str) -> None:
    """In a text of one token a head attends only to it, so attributions equal the scores times the scales of the norms."""
    model, tokenizer = build(name)
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "wpe" in part or "embed_positions" in part:
                weight.zero_()  # positions do not contribute to promoted tokens
    attached, count = hw.attach(model, tokenizer), model.config.vocab_size
    attributions = [logit_attribution(attached, [17], i).heads for i in range(count)]
    for head in ("0.0", "0.3"):
        promoted = token_effects(attached, head, [17], k=count)[0].promotes
        assert len(promoted) == count
        shares = np.array([by_head[head] for by_head in attributions])
        order = np.argsort(-shares)
        assert words(promoted) == [tokenizer.backend.decode([int(i)], skip_special_tokens=False) for i in order]
        factor = shares[order[0]] / promoted[0][1]
        assert factor > 0
        np.testing.assert_allclose(
            np.array(scores(promoted)) * factor, shares[order], rtol=0, atol=1e-5 * np.abs(shares).max()
        )


def test_logit_attribution_pruned_or_silenced_heads_have_no_share() -> None:
    for name in ("llama", "gemma3", "gpt2"):
        attached = hw.attach(BY_NAME[name].build())
        assert logit_attribution(attached, IDS, 11).is_complete
        small = attached.prune("0.1,1.*")
        attribution = logit_attribution(small, IDS, 11, 3)
        assert attribution.is_complete
        assert "0.1" not in attribution.heads
        assert "2.0" in attribution.heads
        with attached.heads["0.1,1.*"].silenced():
            silent = logit_attribution(attached, IDS, 11, 3)
        assert silent.is_complete
        assert silent.heads["0.1"] == silent.heads["1.2"] == 0
        for part, value in attribution.parts.items():
            assert value == pytest.approx(silent.parts[part], abs=1e-5 * largest(silent))


def test_residual_stream_lookup_leaves_model_unchanged() -> None:
    model = BY_NAME["gemma3"].build().train()
    ids = torch.tensor([IDS])
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    attached = hw.attach(model)
    with torch.no_grad():
        before = attached(ids)
        logit_attribution(attached, IDS, 11)
        assert torch.equal(attached(ids), before)
    assert model.training
    assert attached.residual_stream() is attached.residual_stream()
    attached.detach()
    assert hooks == [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]


ERROR_CASES = {
    "a norm or a factor may change": Case(
        "", "GraniteForCausalLM", "GraniteConfig", GROUPED | dict(residual_multiplier=0.5)
    ),
    "they may be capped": Case(
        "", "Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | dict(final_logit_softcapping=30.0)
    ),
    "does not add exactly two terms": Case(
        "", "OPTForCausalLM", "OPTConfig", BY_NAME["opt"].sizes | dict(do_layer_norm_before=False)
    ),
    "between its last layer and its output": Case(
        "", "OPTForCausalLM", "OPTConfig", BY_NAME["opt"].sizes | dict(word_embed_proj_dim=16)
    ),
    "logit attribution is not supported for|norm_placement='post'": BY_NAME["bert"],
    "kind 'encoder' with output 'mlm'|norm_placement='pre', output='mlm'": BY_NAME["modernbert"],
    "kind '?encoder-decoder|of a pre-norm decoder": BY_NAME["t5"],
    "with output 'none'|output='none'": Case("", "GPT2Model", "GPT2Config", BY_NAME["gpt2"].sizes),
}


@pytest.mark.parametrize("why", ERROR_CASES)
def test_logit_attribution_unsupported_model_raises(why: str) -> None:
    attached = hw.attach(ERROR_CASES[why].build(), build("opt")[1])
    with pytest.raises(hw.HeadwiseError, match=why):
        logit_attribution(attached, IDS, 11)
    with pytest.raises(hw.HeadwiseError, match=why):
        token_effects(attached, str(attached.spec.head_addresses[-1]).replace("cross", "dec"), [5])


def test_vocabulary_scaled_embedding_needs_typical() -> None:
    case = Case("", "GraniteForCausalLM", "GraniteConfig", GROUPED | dict(embedding_multiplier=3.0))
    attached = hw.attach(case.build(), build("opt")[1])
    assert logit_attribution(attached, IDS, 11).is_complete
    with pytest.raises(hw.HeadwiseError, match="typical=True"):
        token_effects(attached, "0.1", [5])
    assert token_effects(attached, "0.1", "t", typical=True, corpus=TEXTS)[0].token == "t"


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("name", ["gemma3", "roberta"])
def test_describe_command_reports_promoted_tokens(name: str, tmp_path: Path) -> None:
    from headwise.cli import app

    done = CliRunner().invoke(app, ["describe", str(save_model(name, tmp_path)), "1.0", TEXTS[0], "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(done.stdout)
    if name == "roberta":  # encoders have no promoted tokens
        assert result["promotes"] is None
    else:
        attached, looked_at = hw.attach(*build(name)), {entry["attended"] for entry in result["top_contexts"]}
        ids = {i for word in looked_at for i in attached.tokenizer.encode(word, add_special_tokens=False)[:1]}
        assert result["promotes"]
        for entry in result["promotes"]:
            (token_id,) = attached.tokenizer.encode(entry["token"], add_special_tokens=False)
            assert token_id in ids
            effect = token_effects(attached, "1.0", [token_id], k=6)[0]
            assert words(entry["promotes"]) == words(effect.promotes)
            assert scores(entry["promotes"]) == pytest.approx(scores(effect.promotes), rel=1e-5)


def largest(attribution: Any) -> float:
    return max(map(abs, attribution.parts.values()))


def words(scored: list[tuple[str, float]]) -> list[str]:
    return [word for word, _ in scored]


def scores(scored: list[tuple[str, float]]) -> list[float]:
    return [score for _, score in scored]
