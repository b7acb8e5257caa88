# ruff: noqa: C408 (sizes read better as keywords)
"""What heads of others' models add to logits, and promote: as on our own loading, as by hand, and adding up."""

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
from headwise.analysis.attribution.ov_analysis import logit_attribution, vocabulary
from tests.attached.models import BY_NAME, GROUPED, PLAIN, Case
from tests.attached.test_analysis import TEXTS, build, saved

BOTH = ["gpt2", "llama", "mistral", "qwen2"]  # decoders that our own loader maps as well
DECODERS = [*BOTH, "qwen3", "gemma3", "opt", "gpt_neox", "phi3"]
IDS = [5, 9, 11, 30, 7, 9, 22]
UNGROUPED = {name: size for name, size in GROUPED.items() if name != "head_dim"}
MORE = [
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


@pytest.mark.parametrize("name", BOTH)
def test_they_are_those_of_the_native_model(name: str, tmp_path: Path) -> None:
    ours, theirs = hw.load(saved(name, tmp_path)), hw.attach(*build(name))
    assert isinstance(ours, hw.Transformer)
    for wrong, position in ((None, -1), (3, -1), (3, 2)):
        a, b = (logit_attribution(model, IDS, 11, wrong, position=position) for model in (ours, theirs))
        assert list(a.parts) == list(b.parts)
        np.testing.assert_allclose(list(b.parts.values()), list(a.parts.values()), rtol=0, atol=1e-5 * largest(a))
    for head in ("0.1", "2.3"):
        for how in (dict(), dict(typical=True, corpus=TEXTS)):
            a, b = (vocabulary(model, head, "the cat", k=5, **how) for model in (ours, theirs))  # pyright: ignore
            for one, other in zip(a, b, strict=True):
                assert one.token == other.token
                assert words(one.promotes) == words(other.promotes)
                assert words(one.suppresses) == words(other.suppresses)
                np.testing.assert_allclose(scores(other.promotes), scores(one.promotes), rtol=1e-4)


@pytest.mark.parametrize("case", [*(BY_NAME[name] for name in DECODERS), *MORE], ids=lambda case: case.name)
def test_parts_add_up_to_the_models_own_logits(case: Case) -> None:
    model = case.build()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS])).logits[0].double()
    theirs = hw.attach(model)
    for wrong, position in ((None, -1), (3, -1), (3, 2)):
        made = logit_attribution(theirs, IDS, 11, wrong, position=position)
        want = float(logits[position, 11] - (0 if wrong is None else logits[position, wrong]))
        assert abs(made.total - want) <= 1e-5 * max(abs(want), largest(made))
        assert made.complete
        assert list(made.heads) == list(map(str, theirs.spec.addresses))
        assert list(made.mlps) == ["0", "1", "2"]


# Where a family keeps its last norm, its layers, and in them what writes, and a norm behind that.
PLACES = {
    "gpt2": ("transformer.ln_f", "transformer.h", "attn.c_proj", None),
    "opt": ("model.decoder.final_layer_norm", "model.decoder.layers", "self_attn.out_proj", None),
    "gpt_neox": ("gpt_neox.final_layer_norm", "gpt_neox.layers", "attention.dense", None),
    "gemma3": ("model.norm", "model.layers", "self_attn.o_proj", "post_attention_layernorm"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), ("model.norm", "model.layers", "self_attn.o_proj", None)),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("layer", "head"), [(0, 1), (2, 3)])
def test_a_heads_share_is_what_its_write_does_at_the_frozen_scales(name: str, layer: int, head: int) -> None:
    """By hand, with the model's own parts: what a norm made of each number, once the mean is out, is a factor it keeps."""
    model, (last, layers, writes, behind) = BY_NAME[name].build(), PLACES[name]
    write, norm = model.get_submodule(f"{layers}.{layer}.{writes}"), model.get_submodule(last)
    after = None if behind is None else model.get_submodule(f"{layers}.{layer}.{behind}")
    with torch.no_grad(), watched(write, norm, *([] if after is None else [after])) as (given, made):
        model(input_ids=torch.tensor([IDS]))
        heads = BY_NAME[name].sizes.get("num_attention_heads") or BY_NAME[name].sizes["n_head"]
        z = given[write].unflatten(-1, (heads, -1)) * (torch.arange(heads) == head)[:, None]  # (T, H, d): one of them
        wrote = write(z.flatten(-2)) - write(torch.zeros_like(given[write]))  # (T, D)
        wrote = wrote if after is None else wrote * made[after] / given[after]
        x, out = given[norm], made[norm]
        if isinstance(norm, nn.LayerNorm):
            x, wrote, out = x - x.mean(-1, keepdim=True), wrote - wrote.mean(-1, keepdim=True), out - norm.bias
        moved = model.get_output_embeddings()(wrote * out / x)[-1]
    share = logit_attribution(hw.attach(model), IDS, 11, 3)
    assert share.heads[f"{layer}.{head}"] == pytest.approx(float(moved[11] - moved[3]), abs=1e-5 * largest(share))


@contextmanager
def watched(*parts: nn.Module) -> Iterator[tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]]:
    """What parts of a model are given and give for the one text it reads: (T, D) each."""
    given: dict[nn.Module, Tensor] = {}
    made: dict[nn.Module, Tensor] = {}

    def keep(part: nn.Module, arguments: tuple[Tensor], out: Tensor) -> None:
        given.setdefault(part, arguments[0][0])  # the first time: later calls are the test's own
        made.setdefault(part, out[0])

    hooks = [part.register_forward_hook(keep) for part in parts]
    yield given, made
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_head_promotes_is_what_it_adds_to_the_logits_of_a_text_of_one_token(name: str) -> None:
    """A text of one token: a head looks at nothing else, so its shares are the scores, times what norms' scales are."""
    model, tokenizer = build(name)
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "wpe" in part or "embed_positions" in part:
                weight.zero_()  # positions are left out of what is promoted
    theirs, count = hw.attach(model, tokenizer), model.config.vocab_size
    every = [logit_attribution(theirs, [17], i).heads for i in range(count)]
    for head in ("0.0", "0.3"):
        found = vocabulary(theirs, head, [17], k=count)[0].promotes
        assert len(found) == count
        shares = np.array([made[head] for made in every])
        order = np.argsort(-shares)
        assert words(found) == [tokenizer.backend.decode([int(i)], skip_special_tokens=False) for i in order]
        factor = shares[order[0]] / found[0][1]
        assert factor > 0
        np.testing.assert_allclose(
            np.array(scores(found)) * factor, shares[order], rtol=0, atol=1e-5 * np.abs(shares).max()
        )


def test_cut_and_silenced_heads_have_no_share() -> None:
    for name in ("llama", "gemma3", "gpt2"):
        theirs = hw.attach(BY_NAME[name].build())
        assert logit_attribution(theirs, IDS, 11).complete
        small = theirs.without("0.1,1.*")
        made = logit_attribution(small, IDS, 11, 3)
        assert made.complete
        assert "0.1" not in made.heads
        assert "2.0" in made.heads
        with theirs.heads["0.1,1.*"].silenced():
            silent = logit_attribution(theirs, IDS, 11, 3)
        assert silent.complete
        assert silent.heads["0.1"] == silent.heads["1.2"] == 0
        for part, share in made.parts.items():
            assert share == pytest.approx(silent.parts[part], abs=1e-5 * largest(silent))


def test_looking_for_the_wiring_changes_nothing() -> None:
    model = BY_NAME["gemma3"].build().train()
    ids = torch.tensor([IDS])
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    theirs = hw.attach(model)
    with torch.no_grad():
        before = theirs(ids)
        logit_attribution(theirs, IDS, 11)
        assert torch.equal(theirs(ids), before)
    assert model.training
    assert theirs.wiring() is theirs.wiring()
    theirs.detach()
    assert hooks == [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]


REFUSED = {
    "a factor stands in between": Case(
        "", "GraniteForCausalLM", "GraniteConfig", GROUPED | dict(residual_multiplier=0.5)
    ),
    "they may be capped": Case(
        "", "Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | dict(final_logit_softcapping=30.0)
    ),
    "does not add to the stream just what": Case(
        "", "OPTForCausalLM", "OPTConfig", BY_NAME["opt"].sizes | dict(do_layer_norm_before=False)
    ),
    "between its last layer and its output": Case(
        "", "OPTForCausalLM", "OPTConfig", BY_NAME["opt"].sizes | dict(word_embed_proj_dim=16)
    ),
    "a post-norm model|pre-norm decoder": BY_NAME["bert"],
    "kind encoder, output mlm|pre-norm decoder": BY_NAME["modernbert"],
    "kind encoder-decoder|is of kind encoder-decoder": BY_NAME["t5"],
    "output none|pre-norm decoder": Case("", "GPT2Model", "GPT2Config", BY_NAME["gpt2"].sizes),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_such_a_sum_is_refused_with_the_reason(why: str) -> None:
    theirs = hw.attach(REFUSED[why].build(), build("opt")[1])
    with pytest.raises(hw.HeadwiseError, match=why):
        logit_attribution(theirs, IDS, 11)
    with pytest.raises(hw.HeadwiseError, match=why):
        vocabulary(theirs, str(theirs.spec.addresses[-1]).replace("cross", "dec"), [5])


def test_an_embedding_that_is_scaled_on_its_way_is_not_taken_for_a_bare_one() -> None:
    case = Case("", "GraniteForCausalLM", "GraniteConfig", GROUPED | dict(embedding_multiplier=3.0))
    theirs = hw.attach(case.build(), build("opt")[1])
    assert logit_attribution(theirs, IDS, 11).complete
    with pytest.raises(hw.HeadwiseError, match="typical=True"):
        vocabulary(theirs, "0.1", [5])
    assert vocabulary(theirs, "0.1", "t", typical=True, corpus=TEXTS)[0].token == "t"


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("name", ["gemma3", "roberta"])
def test_the_story_of_a_head_tells_what_it_promotes(name: str, tmp_path: Path) -> None:
    from headwise.cli import app

    done = CliRunner().invoke(app, ["head", str(saved(name, tmp_path)), "1.0", TEXTS[0], "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads(done.stdout)
    if name == "roberta":  # an encoder promotes nothing
        assert told["promotes"] is None
    else:
        theirs, looked_at = hw.attach(*build(name)), {one["attended"] for one in told["hardest"]}
        ids = {i for word in looked_at for i in theirs.tokenizer.encode(word, special=False)[:1]}
        assert told["promotes"]
        for one in told["promotes"]:
            (number,) = theirs.tokenizer.encode(one["token"], special=False)
            assert number in ids
            found = vocabulary(theirs, "1.0", [number], k=6)[0]
            assert words(one["promotes"]) == words(found.promotes)
            assert scores(one["promotes"]) == pytest.approx(scores(found.promotes), rel=1e-5)


def largest(made: Any) -> float:
    return max(map(abs, made.parts.values()))


def words(scored: list[tuple[str, float]]) -> list[str]:
    return [word for word, _ in scored]


def scores(scored: list[tuple[str, float]]) -> list[float]:
    return [score for _, score in scored]
