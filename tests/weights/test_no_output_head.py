"""Folders of LlamaModel, MistralModel and Qwen2Model, as used by embedding models, return hidden states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.weights.model_info import info
from tests.parity.cases import LOGITS_LIMIT, VOCAB
from tests.weights.checkpoints import make_llama

KINDS = ("LlamaModel", "MistralModel", "Qwen2Model")
IDS = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_load_of_a_body_gives_the_hidden_states_of_transformers(name: str, tmp_path: Path) -> None:
    body = make_llama(name)
    body.save_pretrained(tmp_path / "theirs")
    model = hw.load(tmp_path / "theirs")
    assert isinstance(model, hw.Transformer)
    assert (model.spec.kind, model.spec.output, model.output) == ("decoder", "none", None)
    states = body(IDS).last_hidden_state
    assert (model(IDS) - states).abs().max() <= LOGITS_LIMIT
    assert torch.equal(model(IDS), model(IDS, hidden=True))
    assert info(tmp_path / "theirs").parameters == sum(weight.numel() for weight in body.parameters())
    again = hw.load(model.save(tmp_path / "ours"))
    assert again.spec == model.spec
    assert (again(IDS) - states).abs().max() <= LOGITS_LIMIT
    hw.export(model, tmp_path / "exported")
    exported = transformers.AutoModel.from_pretrained(tmp_path / "exported").eval()
    assert type(exported) is type(body)
    assert (exported(IDS).last_hidden_state - states).abs().max() <= LOGITS_LIMIT


@pytest.mark.parametrize("name", KINDS)
def test_generate_without_an_output_head_raises(name: str, tmp_path: Path) -> None:
    make_llama(name).save_pretrained(tmp_path)
    model = hw.load(tmp_path)
    for prompt in (IDS, [1, 2, 3]):
        with pytest.raises(hw.HeadwiseError, match="no next-token output"):
            model.generate(prompt, 4)
    with pytest.raises(hw.HeadwiseError, match="no next-token output"):
        next(iter(model.stream(IDS, 4)))


@torch.no_grad()
def test_pruned_body_is_the_body_with_silenced_heads(tmp_path: Path) -> None:
    make_llama("LlamaModel").save_pretrained(tmp_path / "theirs")
    model = hw.load(tmp_path / "theirs")
    with model.heads["0.1,1.*"].silenced():
        silenced = model(IDS)
    small = hw.prune(model, heads="0.1,1.*", fold_mean=False)
    assert (small(IDS) - silenced).abs().max() < 1e-5
    again = hw.load(small.save(tmp_path / "small"))
    assert (again(IDS) - silenced).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_causal_lm_folder_without_the_prefix_needs_its_output_head(tied: bool, tmp_path: Path) -> None:
    """transformers ties the head to the embedding if config.json says so; otherwise it would initialize it randomly."""
    causal_lm = make_llama("LlamaForCausalLM", tie_word_embeddings=tied)
    causal_lm.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name.removeprefix("model."): value for name, value in load_file(file).items() if name != "lm_head.weight"
    }
    save_file(tensors, file, {"format": "pt"})
    if tied:
        model = hw.load(tmp_path)
        assert model.spec.output == "lm"
        with torch.no_grad():
            assert (model(IDS) - causal_lm(IDS).logits).abs().max() <= LOGITS_LIMIT
    else:
        with pytest.raises(hw.HeadwiseError, match=r"missing: lm_head\.weight"):
            hw.load(tmp_path)
    edit_config(tmp_path, architectures=["LlamaModel"])
    assert hw.load(tmp_path).spec.output == "none"


def test_prefixed_folder_without_an_output_head_raises(tmp_path: Path) -> None:
    make_llama("LlamaForCausalLM").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(hw.HeadwiseError, match=r"missing: lm_head\.weight"):
        hw.load(tmp_path)
