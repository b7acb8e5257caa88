"""Out and in again: our own format is bitwise, an export gives transformers the same logits, pruned or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from tests.contract.layers import LAYERS as ATTENTION
from tests.contract.layers import MODELS, cut_model, make_model, run
from tests.parity import real
from tests.parity.cases import CASES, VOCAB, Case
from tests.weights.checkpoints import assert_same_logits, make_llama, moved, same

BY_NAME = {case.name: case for case in CASES}
SIZES: dict[str, Any] = {"vocab": 17, "context": 19, "layers": 2, "hidden": 23}


def ids_for(length: int = 23) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(6))


def loaded(name: str, folder: Path) -> hw.Transformer:
    model = hw.load(BY_NAME[name].save(folder / "theirs"))
    assert isinstance(model, hw.Transformer)
    return model


# Our own format.


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loaded_model_saved_and_loaded_is_the_same(case: Case, tmp_path: Path) -> None:
    model = loaded(case.name, tmp_path)
    assert model.save(tmp_path / "ours") == tmp_path / "ours"
    back = hw.load(tmp_path / "ours")
    same(back, model)
    with torch.no_grad():
        assert torch.equal(moved(back)(ids_for()), moved(model)(ids_for()))
        torch.testing.assert_close(back(ids_for()), model(ids_for()))  # whose weights lie as in their file
    back.save(tmp_path / "again")
    same(hw.load(tmp_path / "again"), model)
    assert (tmp_path / "again" / "spec.json").read_bytes() == (tmp_path / "ours" / "spec.json").read_bytes()


@pytest.mark.parametrize("storage", ["qkv", "q,kv", "q,k,v"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_our_own_saved_and_loaded_is_the_same(name: str, storage: str, tmp_path: Path) -> None:
    model = make_model(MODELS[name], storage=storage)
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m", dtype=None)  # float64
    same(back, model)
    assert isinstance(back, hw.Transformer)
    assert [layer.read.storage for layer in back.attention_layers()] == [
        layer.read.storage for layer in model.attention_layers()
    ]
    assert torch.equal(run(back), run(model))
    single = hw.load(tmp_path / "m")
    same(single, make_model(MODELS[name], storage=storage).float())


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "cross"])
def test_every_kind_of_layer_saved_and_loaded_is_the_same(name: str, tmp_path: Path) -> None:
    layer = ATTENTION[name]
    kept = {} if layer.kept is None else {"0": layer.kept}
    model = make_model(hw.ModelSpec(**SIZES, attention=replace(layer, kept=None), kept=kept))
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m", dtype=None)
    same(back, model)
    assert torch.equal(run(back), run(model))


def test_a_pruned_encoder_decoder_keeps_the_numbers_of_its_heads(tmp_path: Path) -> None:
    model = cut_model(make_model(MODELS["encoder-decoder"]), "enc.0.*, dec.1.2, cross.0.0-2")
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m", dtype=None)
    same(back, model)
    assert torch.equal(run(back), run(model))
    assert [str(head.address) for head in back.heads] == [str(address) for address in model.spec.addresses]


def test_tied_stays_tied_and_parameters_can_be_trained(tmp_path: Path) -> None:
    make_model(MODELS["decoder"]).save(tmp_path / "m")
    back = hw.load(tmp_path / "m")
    assert isinstance(back, hw.Transformer)
    assert back.output is not None
    assert back.output.vocabulary.weight is back.embed.tokens.weight
    assert not back.training
    run(back).sum().backward()
    assert all(parameter.grad is not None for parameter in back.parameters())


def test_saving_over_a_model_replaces_it(tmp_path: Path) -> None:
    make_model(MODELS["encoder"]).save(tmp_path / "m")
    later = make_model(MODELS["decoder"])
    later.save(tmp_path / "m")
    same(hw.load(tmp_path / "m", dtype=None), later)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_saving_over_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    make_model(MODELS["decoder"]).save(tmp_path / "m")
    model = hw.load(tmp_path / "m")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save(tmp_path / "m")  # its weights are views of the file that is being replaced
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    same(hw.load(tmp_path / "m"), model)


# For transformers.

REFUSED = {
    "qwen2, windows from layer 1": "windows given layer by layer",
    "qwen2, windows on all": "a window beside biases",
}


def their_output(case: Case, folder: Path, ids: Tensor) -> Tensor:
    """By the class the exported config.json names, which is what a user's from_pretrained takes."""
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    with torch.no_grad():
        out = kind.from_pretrained(folder, dtype=torch.float32).eval()(ids)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in REFUSED], ids=lambda case: case.name)
def test_an_export_gives_transformers_the_same_output(case: Case, tmp_path: Path) -> None:
    model = loaded(case.name, tmp_path)
    assert hw.export(model, tmp_path / "out").path == tmp_path / "out"
    with torch.no_grad():
        got = model(ids_for())
        torch.testing.assert_close(their_output(case, tmp_path / "out", ids_for()), got, rtol=0, atol=1e-4)
        again = hw.load(tmp_path / "out")
        assert again.family == model.family
        assert torch.equal(moved(again)(ids_for()), moved(model)(ids_for()))
        torch.testing.assert_close(again(ids_for()), got)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_cannot_hold_is_not_exported(name: str, tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=rf"Llama format cannot hold .*{REFUSED[name]}.*model\.save"):
        hw.export(loaded(name, tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


PRUNED = {
    "gpt2, untied": "0.1-3, 2.*",
    "gpt-neo, global and local": "1.0, 2.5",
    "bert, masked tokens": "0.*, 1.2",
    "llama, 9 heads on 3": "0.0-2, 1.4, 2.0-7",  # a whole group, one of a group, all but one
    "llama, biases": "0.1, 1.*",
    "mistral, window": "0.0-1, 2.3",
    "qwen2": "0.0-4, 1.5",
}


@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_model_is_exported_in_full_shape_with_the_same_output(name: str, tmp_path: Path) -> None:
    model = loaded(name, tmp_path)
    small = cut_model(model, PRUNED[name]).float()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    small.save(tmp_path / "small")
    back = hw.load(tmp_path / "small")
    same(back, small)
    hw.export(back, tmp_path / "out", family=model.family)
    with torch.no_grad():
        got = back(ids_for())
        silent = model(ids_for(), gates={PRUNED[name]: 0.0})
        theirs = their_output(BY_NAME[name], tmp_path / "out", ids_for())
    torch.testing.assert_close(got, silent, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs, got, rtol=0, atol=1e-4)


def test_smollm2_is_exported_in_transformers_order_of_rows(tmp_path: Path) -> None:
    model = hw.load("smollm2")
    assert model.spec.attention.rotary is not None
    assert model.spec.attention.rotary.layout == "interleaved"
    hw.export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("llama", 1, 2)
    want = real.smollm2_oracle()
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    mine, theirs = got.state_dict(), want.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "It's 2024, isn't it? <|im_end|>"
    assert model.tokenizer is not None
    assert tokenizer(text).input_ids == model.tokenizer.encode(text)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_minilm_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    model = hw.load("minilm")
    hw.export(model, tmp_path / "out")
    mine = transformers.AutoModel.from_pretrained(tmp_path / "out").state_dict()
    theirs = real.minilm_oracle().state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.tokenizer is not None
    assert tokenizer("Unbelievably naïve!").input_ids == model.tokenizer.encode("Unbelievably naïve!")
    assert tokenizer.mask_token == "[MASK]"


@pytest.mark.parametrize("bundle", ["minilm", "smollm2"])
def test_the_tokenizer_is_saved_with_the_model(bundle: str, tmp_path: Path) -> None:
    tokenizer = hw.load(bundle).tokenizer
    model = hw.Transformer(hw.preset("nano"))
    model.tokenizer = tokenizer
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m").tokenizer
    assert isinstance(tokenizer, hw.Tokenizer)
    assert isinstance(back, hw.Tokenizer)
    assert back.special == tokenizer.special
    assert len(back) == len(tokenizer)
    for text in ("Hello, wörld 123!", " two  spaces ", "[MASK] <|im_start|> 😀"):
        assert back.encode(text) == tokenizer.encode(text)
        assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text))


# Which family.


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("gpt2, tied", None, "gpt2"),
        ("gpt2, scores not scaled", "gpt2", "gpt2"),
        ("mistral, window", "mistral", "mistral"),
        ("mistral, no window", "llama", "llama"),
        ("qwen2", "qwen2", "qwen2"),
        ("gpt-neo, all global", "gpt_neo", "gpt_neo"),
        ("gpt-neo, all global", "gpt-neo", "gpt_neo"),
    ],
)
def test_the_family_is_the_one_named_or_where_it_came_from(
    name: str, family: str | None, kind: str, tmp_path: Path
) -> None:
    hw.export(loaded(name, tmp_path), tmp_path / "out", family)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind


def test_a_model_of_no_family_takes_the_first_that_can_hold_it(tmp_path: Path) -> None:
    model = make_model(MODELS["decoder, rotary"]).float()
    hw.export(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.model_type == "llama"
    ids = torch.randint(17, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=0, atol=1e-4)


ROTARY = MODELS["decoder, rotary"]
REFUSALS = {
    "an encoder-decoder": (MODELS["encoder-decoder"], "llama", "an encoder-decoder"),
    "a sink": (replace(ROTARY, attention=replace(ROTARY.attention, softmax="sink")), "llama", "a learned sink"),
    "gates": (replace(ROTARY, attention=replace(ROTARY.attention, gated=True)), "llama", "gates"),
    "a cap": (replace(ROTARY, attention=replace(ROTARY.attention, softcap=3.0)), "llama", "capped scores"),
    "alibi": (replace(ROTARY, attention=replace(ROTARY.attention, alibi=True)), "llama", "a bias by distance"),
    "wide values": (replace(ROTARY, attention=replace(ROTARY.attention, value_dim=8)), "llama", "value_dim"),
    "parallel": (replace(ROTARY, form="parallel"), "llama", "parallel blocks"),
    "an embedding scale": (replace(ROTARY, embed_scale=3.0), "llama", "an embedding scale"),
    "positions": (MODELS["decoder"], "llama", "positions other than rotary"),
    "groups": (ROTARY, "gpt2", "rotary positions"),
    "a decoder": (ROTARY, "bert", "anything but an encoder"),
    "an encoder": (MODELS["encoder"], "gpt2", "anything but a decoder"),
    "scaled scores": (
        replace(MODELS["decoder"], attention=hw.AttentionSpec(12, 4, out_bias=True)), "gpt-neo", "scaled scores",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_format_has_no_room_for_is_named(name: str, tmp_path: Path) -> None:
    spec, family, reason = REFUSALS[name]
    with pytest.raises(hw.HeadwiseError, match=rf"format cannot hold {reason}.*use model\.save\(folder\)"):
        hw.export(hw.Transformer(spec), tmp_path / "out", family)
    assert list(tmp_path.iterdir()) == []


def test_a_model_no_family_can_hold_is_told_why_by_each(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"no family can hold this model: .*GPT-2.*GPT-Neo.*BERT.*Llama.*save"):
        hw.export(make_model(MODELS["encoder-decoder"]), tmp_path / "out")


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"no family 'gpt3'; did you mean gpt2"):
        hw.export(hw.Transformer(MODELS["decoder"]), tmp_path / "out", "gpt3")


def test_an_export_may_replace_an_export(tmp_path: Path) -> None:
    first, second = make_llama(tie_word_embeddings=True), make_llama()
    for number, theirs in enumerate((first, second)):
        theirs.save_pretrained(tmp_path / str(number))
        hw.export(hw.load(tmp_path / str(number)), tmp_path / "out")
        assert_same_logits(hw.load(tmp_path / "out"), theirs)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "headwise-export.json",  # by which we know our own again
        "model.safetensors",
    ]


def test_an_export_keeps_the_type(tmp_path: Path) -> None:
    make_llama().to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    hw.export(hw.load(tmp_path / "theirs", dtype=None), tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == torch.bfloat16
