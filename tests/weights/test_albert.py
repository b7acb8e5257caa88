"""ALBERT: parity with transformers, shared weights, pruning in all layers, saving, export, and RXNMapper."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.analysis.finding.bundled_examples_path import ATOM_MAPS
from headwise.analysis.finding.job_examples import read_examples
from headwise.compression import PruneRequest
from headwise.errors import HeadwiseError
from headwise.text.smiles_tokenization import atom_map_example, is_smiles_tokenizer, smiles_tokenizer, split_smiles

REACTION = "CC(C)S.Fc1ncccc1F>>CC(C)Sc1ncccc1F"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=31, embedding_size=10, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=20,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.AlbertForMaskedLM(config).save_pretrained(tmp_path / "albert")
    return tmp_path / "albert"


@pytest.fixture
def model(folder: Path) -> Any:
    return hw.load(folder)


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(12).reshape(2, 6)


def test_albert_layers_share_parameters_and_count_once(model: Any) -> None:
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.blocks[2].mlp.up.weight is model.blocks[0].mlp.up.weight
    assert len(model.spec.head_addresses) == 12
    assert len(model.hook_points()) == 3


def test_albert_silencing_acts_on_one_layer_and_pruning_on_all(model: Any, ids: Tensor) -> None:
    with model.heads["1.2"].silenced():
        single_layer = model(ids)
    with model.heads["*.2"].silenced():
        all_layers = model(ids)
    small = model.prune("1.2")
    assert [str(head) for head in small.spec.head_addresses] == [f"{i}.{h}" for i in range(3) for h in (0, 1, 3)]
    torch.testing.assert_close(small(ids), all_layers)
    assert not torch.allclose(single_layer, all_layers)
    assert small.spec.num_parameters == sum(parameter.numel() for parameter in small.parameters())


def test_albert_plan_says_that_all_layers_are_pruned(model: Any) -> None:
    plan = hw.plan_pruning(model, PruneRequest(heads="1.2", fold_mean=False))
    assert plan.pruned_heads == ("0.2", "1.2", "2.2")
    assert "head 2 is pruned in all 3 layers" in str(plan)
    ranked = hw.plan_pruning(model, PruneRequest(keep=0.5, ranking="random", fold_mean=False))
    assert len(ranked.pruned_heads) == 6
    assert len({head.split(".")[1] for head in ranked.pruned_heads}) == 2


@pytest.mark.parametrize("pruned", [False, True])
def test_albert_save_load_is_bitwise_and_stores_one_block(
    model: Any, ids: Tensor, tmp_path: Path, pruned: bool
) -> None:
    saved = model.prune("0.1") if pruned else model
    saved.save(tmp_path / "own")
    again: Any = hw.load(tmp_path / "own")
    assert torch.equal(again(ids), saved(ids))
    assert again.blocks[2].mlp.up.weight is again.blocks[0].mlp.up.weight
    assert (tmp_path / "own" / "model.safetensors").stat().st_size < 4.5 * saved.spec.num_parameters + 4096


def test_albert_export_loads_in_transformers(model: Any, ids: Tensor, tmp_path: Path) -> None:
    hw.export(model, tmp_path / "out")
    reference: Any = transformers.AlbertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(reference(ids).logits, model(ids))


def test_albert_trains_one_block(model: Any, ids: Tensor) -> None:
    model(ids).square().mean().backward()
    gradient = model.blocks[0].mlp.up.weight.grad
    assert gradient is not None
    assert gradient is model.blocks[1].mlp.up.weight.grad
    copied = model.to(torch.float64)
    assert copied.blocks[2].mlp.up.weight is copied.blocks[0].mlp.up.weight


def test_albert_unsupported_operations_raise_clear_errors(model: Any, folder: Path) -> None:
    with pytest.raises(HeadwiseError, match="shared layers"):
        hw.quantize(model, 8)
    with pytest.raises(HeadwiseError, match="cannot represent"):
        hw.export(model, folder.parent / "bert", family="bert")
    config = (folder / "config.json").read_text().replace('"num_hidden_groups": 1', '"num_hidden_groups": 2')
    (folder / "config.json").write_text(config)
    with pytest.raises(HeadwiseError, match="groups of layers"):
        hw.load(folder)
    with pytest.raises(HeadwiseError, match="all of them must have the same heads"):
        hw.ModelSpec(
            vocab=9, context=8, layers=2, attention=hw.AttentionSpec(width=8, heads=2), shared_layers=True,
            kept_heads={"0": (1,)},
        )  # fmt: skip


def test_smiles_tokenizer_splits_atoms_and_keeps_the_text() -> None:
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *dict.fromkeys(split_smiles("C[C@@H]c1[nH]%12BrCl>>().~-=#[O-]")),
    ]
    tokenizer = smiles_tokenizer(tokens)
    assert tokenizer.decode(tokenizer.encode("C[C@@H](Br)c1Cl.[O-]>>C%12")) == "C[C@@H](Br)c1Cl.[O-]>>C%12"
    assert tokenizer.encode("Zr", add_special_tokens=False) == [1, 1]
    assert is_smiles_tokenizer(tokenizer)


def test_atom_map_example_maps_product_atoms_to_reactant_atoms() -> None:
    example = atom_map_example("[CH3:1][CH:2]([CH3:3])[SH:4].F[c:5]1[nH:6][cH:7]1>>[S:4][c:5]1[nH:6][cH:7]1")
    assert example["text"] == "CC(C)S.Fc1[nH]c1>>Sc1[nH]c1"
    tokens = split_smiles(example["text"])
    assert [(tokens[query], tokens[key]) for query, key in example["pairs"]] == [
        ("S", "S"), ("c", "c"), ("[nH]", "[nH]"), ("c", "c"),
    ]  # fmt: skip
    assert [tokens[key] for key in example["candidates"]] == ["C", "C", "C", "S", "F", "c", "[nH]", "c"]


def test_rxnmapper_matches_transformers_and_reads_its_reactions_without_unknown_tokens() -> None:
    from headwise.io.resolve_path import resolve_model_path

    model = hw.load("rxnmapper")
    tokenizer: Any = model.tokenizer
    reference: Any = transformers.AlbertForMaskedLM.from_pretrained(resolve_model_path("rxnmapper")).eval()
    ids = torch.tensor([tokenizer.encode(REACTION)])
    torch.testing.assert_close(model(ids), reference(ids).logits, rtol=0, atol=1e-4)
    for example in read_examples(ATOM_MAPS, "pairs"):
        tokens, token_ids = split_smiles(example.text), tokenizer.encode(example.text, add_special_tokens=False)
        unknown = {token for token, index in zip(tokens, token_ids, strict=True) if index == tokenizer.unk}
        assert unknown <= {">", "[1*]", "[*]"}  # the dative bond of one reaction, the placeholder atoms of another


def test_find_heads_names_head_five_of_rxnmapper() -> None:
    result = hw.find_heads(hw.load("rxnmapper"))
    assert {head.split(".")[1] for head in result.supported_heads} == {"5"}
    assert "10.5" in result.supported_heads  # the published choice
    assert all(layer.address.endswith(".5") for layer in result.by_layer())
    assert result["10.5"].score > 0.8
    assert result.control.median < 0.1
