"""Save and load again: our own format is bitwise equal; an export gives transformers the same logits, pruned or not."""

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
from tests.contract.layers import MODELS, make_model, prune_by_slicing, run_model
from tests.parity import real
from tests.parity.cases import CASES, VOCAB, Case, mark_slow
from tests.weights.checkpoints import assert_same_logits, assert_same_model, copy_to_own_memory, make_llama

BY_NAME = {case.name: case for case in CASES}
SIZES: dict[str, Any] = {"vocab": 17, "context": 19, "layers": 2, "mlp_width": 23}


def ids_for(length: int = 23) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(6))


def load_case(name: str, folder: Path) -> hw.Transformer:
    model = hw.load(BY_NAME[name].save(folder / "theirs"))
    assert isinstance(model, hw.Transformer)
    return model


# Our own format.


@pytest.mark.parametrize("case", [mark_slow(case) for case in CASES])
def test_save_and_load_of_hf_models_is_bitwise(case: Case, tmp_path: Path) -> None:
    model = load_case(case.name, tmp_path)
    assert model.save(tmp_path / "ours") == tmp_path / "ours"
    back = hw.load(tmp_path / "ours")
    assert_same_model(back, model)
    with torch.no_grad():
        assert torch.equal(copy_to_own_memory(back)(ids_for()), copy_to_own_memory(model)(ids_for()))
        torch.testing.assert_close(back(ids_for()), model(ids_for()))  # the weights are aligned as in the exported file
    back.save(tmp_path / "again")
    assert_same_model(hw.load(tmp_path / "again"), model)
    assert (tmp_path / "again" / "spec.json").read_bytes() == (tmp_path / "ours" / "spec.json").read_bytes()


@pytest.mark.parametrize("storage", ["qkv", "q,kv", "q,k,v"])
@pytest.mark.parametrize("name", MODELS)
def test_save_and_load_of_native_models_is_bitwise(name: str, storage: str, tmp_path: Path) -> None:
    model = make_model(MODELS[name], storage=storage)
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m", dtype=None)  # float64
    assert_same_model(back, model)
    assert isinstance(back, hw.Transformer)
    assert [layer.qkv.storage for layer in back.attention_layers()] == [
        layer.qkv.storage for layer in model.attention_layers()
    ]
    assert torch.equal(run_model(back), run_model(model))
    single = hw.load(tmp_path / "m", dtype=torch.float32)
    assert_same_model(single, make_model(MODELS[name], storage=storage).float())


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "cross"])
def test_save_and_load_of_every_layer_kind_is_bitwise(name: str, tmp_path: Path) -> None:
    layer = ATTENTION[name]
    kept_heads = {} if layer.kept_heads is None else {"0": layer.kept_heads}
    model = make_model(hw.ModelSpec(**SIZES, attention=replace(layer, kept_heads=None), kept_heads=kept_heads))
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m", dtype=None)
    assert_same_model(back, model)
    assert torch.equal(run_model(back), run_model(model))


def test_save_and_load_of_pruned_model_keeps_addresses(tmp_path: Path) -> None:
    model = prune_by_slicing(make_model(MODELS["encoder-decoder"]), "enc.0.*, dec.1.2, cross.0.0-2")
    model.save(tmp_path / "m")
    back = hw.load(tmp_path / "m", dtype=None)
    assert_same_model(back, model)
    assert torch.equal(run_model(back), run_model(model))
    assert [str(head.address) for head in back.heads] == [str(address) for address in model.spec.head_addresses]


def test_load_keeps_tied_weights_trainable(tmp_path: Path) -> None:
    make_model(MODELS["decoder"]).save(tmp_path / "m")
    back = hw.load(tmp_path / "m")
    assert isinstance(back, hw.Transformer)
    assert back.output is not None
    assert back.output.vocabulary.weight is back.embed.tokens.weight
    assert not back.training
    run_model(back).sum().backward()
    assert all(parameter.grad is not None for parameter in back.parameters())


def test_save_over_model_replaces_it(tmp_path: Path) -> None:
    make_model(MODELS["encoder"]).save(tmp_path / "m")
    later = make_model(MODELS["decoder"])
    later.save(tmp_path / "m")
    assert_same_model(hw.load(tmp_path / "m", dtype=None), later)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_save_over_source_folder_keeps_weights(tmp_path: Path) -> None:
    make_model(MODELS["decoder"]).save(tmp_path / "m")
    model = hw.load(tmp_path / "m")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save(tmp_path / "m")  # its weights are views of the file that is replaced
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert_same_model(hw.load(tmp_path / "m"), model)


# Export to transformers.

NOT_EXPORTABLE = {
    "qwen2, windows from layer 1": "windows given layer by layer",
    "qwen2, windows on all": "a window together with biases",
}


def hf_output(case: Case, folder: Path, ids: Tensor) -> Tensor:
    """Run the class that the exported config.json names, as `from_pretrained` does."""
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    with torch.no_grad():
        out = kind.from_pretrained(folder, dtype=torch.float32).eval()(ids)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("case", [mark_slow(c) for c in CASES if c.name not in NOT_EXPORTABLE])
def test_export_equals_transformers_output(case: Case, tmp_path: Path) -> None:
    model = load_case(case.name, tmp_path)
    assert hw.export(model, tmp_path / "out").path == tmp_path / "out"
    with torch.no_grad():
        got = model(ids_for())
        torch.testing.assert_close(hf_output(case, tmp_path / "out", ids_for()), got, rtol=0, atol=1e-4)
        again = hw.load(tmp_path / "out")
        assert again.family == model.family
        assert torch.equal(copy_to_own_memory(again)(ids_for()), copy_to_own_memory(model)(ids_for()))
        torch.testing.assert_close(again(ids_for()), got)


@pytest.mark.parametrize("name", NOT_EXPORTABLE)
def test_export_unsupported_by_family_raises(name: str, tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=rf"Llama format cannot represent .*{NOT_EXPORTABLE[name]}.*model\.save"):
        hw.export(load_case(name, tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


PRUNED = {
    "gpt2, untied": "0.1-3, 2.*",
    "gpt-neo, global and local": "1.0, 2.5",
    "bert, masked tokens": "0.*, 1.2",
    "roberta, masked tokens": "0.*, 1.2",
    "distilbert, masked tokens": "0.*, 1.2",
    "deepseek-v2, direct queries": "0.1-3, 2.*",
    "llama, 9 heads on 3": "0.0-2, 1.4, 2.0-7",  # a full group, one head of a group, all heads but one
    "llama, biases": "0.1, 1.*",
    "mistral, window": "0.0-1, 2.3",
    "qwen2": "0.0-4, 1.5",
    "qwen3": "0.0-4, 1.5",
    "phi3, longrope": "0.0-1, 2.3",
    "olmo2": "0.0-2, 1.4",
    "gemma3": "0.0-4, 1.5",
}


@pytest.mark.parametrize("name", PRUNED)
def test_export_of_pruned_model_equals_silenced_output(name: str, tmp_path: Path) -> None:
    model = load_case(name, tmp_path)
    small = prune_by_slicing(model, PRUNED[name]).float()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    small.save(tmp_path / "small")
    back = hw.load(tmp_path / "small")
    assert_same_model(back, small)
    hw.export(back, tmp_path / "out", family=model.family)
    with torch.no_grad():
        got = back(ids_for())
        silent = model(ids_for(), gates={PRUNED[name]: 0.0})
        hf_logits = hf_output(BY_NAME[name], tmp_path / "out", ids_for())
    torch.testing.assert_close(got, silent, rtol=0, atol=1e-5)
    torch.testing.assert_close(hf_logits, got, rtol=0, atol=1e-4)


def test_export_of_smollm2_restores_transformers_rows(tmp_path: Path) -> None:
    model = hw.load("smollm2")
    assert model.spec.attention.rotary is not None
    assert model.spec.attention.rotary.layout == "interleaved"
    hw.export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("llama", 1, 2)
    want = real.smollm2_oracle()
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    actual_state, expected_state = got.state_dict(), want.state_dict()
    assert all(torch.equal(actual_state[name], expected_state[name]) for name in expected_state)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "It's 2024, isn't it? <|im_end|>"
    assert model.tokenizer is not None
    assert tokenizer(text).input_ids == model.tokenizer.encode(text)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_export_of_minilm_includes_tokenizer(tmp_path: Path) -> None:
    model = hw.load("minilm")
    hw.export(model, tmp_path / "out")
    actual_state = transformers.AutoModel.from_pretrained(tmp_path / "out").state_dict()
    expected_state = real.minilm_oracle().state_dict()
    assert all(torch.equal(actual_state[name], expected_state[name]) for name in expected_state)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.tokenizer is not None
    assert tokenizer("Unbelievably naïve!").input_ids == model.tokenizer.encode("Unbelievably naïve!")
    assert tokenizer.mask_token == "[MASK]"


@pytest.mark.parametrize("bundle", ["minilm", "smollm2"])
def test_save_includes_tokenizer(bundle: str, tmp_path: Path) -> None:
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


# Choice of the family.


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
def test_export_family_is_named_or_original(name: str, family: str | None, kind: str, tmp_path: Path) -> None:
    hw.export(load_case(name, tmp_path), tmp_path / "out", family)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind


def test_export_without_family_uses_first_that_fits(tmp_path: Path) -> None:
    model = make_model(MODELS["decoder, rotary"]).float()
    hw.export(model, tmp_path / "out")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert hf_model.config.model_type == "llama"
    ids = torch.randint(17, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(hf_model(ids).logits, model(ids), rtol=0, atol=1e-4)


ROTARY = MODELS["decoder, rotary"]
UNSUPPORTED_SPECS = {
    "an encoder-decoder": (MODELS["encoder-decoder"], "llama", "an encoder-decoder"),
    "a sink": (replace(ROTARY, attention=replace(ROTARY.attention, softmax="sink")), "llama", "a learned sink"),
    "gates": (replace(ROTARY, attention=replace(ROTARY.attention, gated=True)), "llama", "gates"),
    "a cap": (replace(ROTARY, attention=replace(ROTARY.attention, softcap=3.0)), "llama", "soft-capped scores"),
    "alibi": (replace(ROTARY, attention=replace(ROTARY.attention, alibi=True)), "llama", "a position bias"),
    "wide values": (replace(ROTARY, attention=replace(ROTARY.attention, value_dim=8)), "llama", "value_dim"),
    "parallel": (replace(ROTARY, norm_placement="parallel"), "llama", "parallel blocks"),
    "an embedding scale": (replace(ROTARY, embed_scale=3.0), "llama", "an embedding scale"),
    "positions": (MODELS["decoder"], "llama", "positions other than rotary"),
    "groups": (ROTARY, "gpt2", "rotary positions"),
    "a decoder": (ROTARY, "bert", "a model that is not an encoder"),
    "an encoder": (MODELS["encoder"], "gpt2", "a model that is not a decoder"),
    "scaled scores": (
        replace(MODELS["decoder"], attention=hw.AttentionSpec(12, 4, out_bias=True)), "gpt-neo", "scaled scores",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED_SPECS)
def test_export_unsupported_spec_names_reason(name: str, tmp_path: Path) -> None:
    spec, family, reason = UNSUPPORTED_SPECS[name]
    with pytest.raises(hw.HeadwiseError, match=rf"format cannot represent {reason}.*Use model\.save\(folder\)"):
        hw.export(hw.Transformer(spec), tmp_path / "out", family)
    assert list(tmp_path.iterdir()) == []


def test_export_without_matching_family_lists_reasons(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"no model family .*GPT-2.*GPT-Neo.*BERT.*Llama.*save"):
        hw.export(make_model(MODELS["encoder-decoder"]), tmp_path / "out")


def test_export_unknown_family_raises(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"unknown model family; did you mean gpt2"):
        hw.export(hw.Transformer(MODELS["decoder"]), tmp_path / "out", "gpt3")


def test_export_over_export_replaces_it(tmp_path: Path) -> None:
    first, second = make_llama(tie_word_embeddings=True), make_llama()
    for index, hf_model in enumerate((first, second)):
        hf_model.save_pretrained(tmp_path / str(index))
        hw.export(hw.load(tmp_path / str(index)), tmp_path / "out")
        assert_same_logits(hw.load(tmp_path / "out"), hf_model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "headwise-export.json",  # marks the folder as an export of Headwise
        "model.safetensors",
    ]


def test_export_keeps_dtype(tmp_path: Path) -> None:
    make_llama().to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    hw.export(hw.load(tmp_path / "theirs", dtype=None), tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == torch.bfloat16
