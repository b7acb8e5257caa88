"""RoBERTa, XLM-R and DistilBERT: settings of config.json, positions, other classes, pruning and GGUF."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.weights import open_checkpoint
from tests.parity.cases import CASES, VOCAB
from tests.weights.test_configs import hf_logits, load_logits, read_config, write_checkpoint

BY_NAME = {case.name: case for case in CASES}
KINDS = {"roberta": "roberta, masked tokens", "distilbert": "distilbert, masked tokens"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: BY_NAME[name].save(tmp_path_factory.mktemp(kind)) for kind, name in KINDS.items()}


def variant(folders: dict[str, Path], kind: str, to: Path, **changes: Any) -> Path:
    return write_checkpoint(folders[kind], read_config(folders[kind]) | changes, to)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("roberta", "pad_token_id"),
        *(
            pytest.param("roberta", key, marks=pytest.mark.slow)
            for key in ("hidden_act", "layer_norm_eps", "is_decoder")
        ),
        *(pytest.param("distilbert", key, marks=pytest.mark.slow) for key in ("activation", "tie_word_embeddings")),
    ],
)
def test_load_missing_setting_equals_transformers(
    kind: str, key: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = read_config(folders[kind])
    config.pop(key, None)
    folder = write_checkpoint(folders[kind], config, tmp_path)
    want, got = hf_logits(BY_NAME[KINDS[kind]], folder), load_logits(folder)
    assert want is not None
    assert got is not None
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "distilbert"])
def test_load_minimal_config_uses_transformers_defaults(model_type: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 52}
    if model_type == "distilbert":
        sizes = {"vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    torch.save({"nothing": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    spec, config = open_checkpoint(tmp_path).spec, transformers.AutoConfig.from_pretrained(tmp_path)
    assert spec.position_rows == config.max_position_embeddings
    assert spec.position_offset == (0 if model_type == "distilbert" else config.pad_token_id + 1)
    assert (spec.width, spec.layers) == (config.hidden_size, config.num_hidden_layers)
    assert spec.attention.heads == config.num_attention_heads
    assert spec.token_types == getattr(config, "type_vocab_size", 0)
    assert spec.tied == config.tie_word_embeddings


def test_roberta_longest_text_uses_the_last_row(folders: dict[str, Path]) -> None:
    model: Any = hw.load(folders["roberta"])
    assert model.spec.context == 46  # 48 rows, of which 2 precede the first token
    ids = torch.full((1, 46), 7)
    with torch.no_grad():
        model.embed.positions.weight[-1] += 1.0
        assert not torch.equal(model(ids), hw.load(folders["roberta"])(ids))
    with pytest.raises(HeadwiseError, match="46 positions"):
        model(torch.full((1, 47), 7))
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("roberta", {"pad_token_id": None}, "pad_token_id is null"),
        ("roberta", {"pad_token_id": 60}, "no position is left"),
        ("distilbert", {"n_heads": 6, "num_attention_heads": 4}, "conflicting values"),
    ],
)
def test_load_wrong_setting_raises(
    kind: str, changes: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(HeadwiseError, match=message):
        hw.load(variant(folders, kind, tmp_path, **changes))


@pytest.mark.parametrize(
    ("model", "config", "reason"),
    [
        ("RobertaForSequenceClassification", {}, "does not implement RobertaForSequenceClassification"),
        ("RobertaForMaskedLM", {"is_decoder": True}, "BERT as a decoder"),
    ],
)
def test_load_attaches_classes_and_settings_that_the_family_lacks(
    model: str, config: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(BY_NAME[KINDS["roberta"]], model=model).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(read_config(tmp_path) | config))
    assert not hw.load(tmp_path).is_native
    assert reason in capsys.readouterr().err


def test_roberta_gguf_has_no_rows_before_the_first_token(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    case = BY_NAME["xlm-roberta, pooler"]
    model: Any = hw.load(case.save(tmp_path / "xlmr"))
    hw.export(model, tmp_path / "model.gguf", to="gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    table = next(tensor for tensor in reader.tensors if tensor.name == "position_embd.weight")
    assert tuple(table.data.shape) == (46, 24)
    assert torch.equal(torch.tensor(table.data), model.embed.positions.weight[2:])
