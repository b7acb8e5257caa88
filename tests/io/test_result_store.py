"""Result store: keys, atomic files, damage, size limit, several processes."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwise as hw
from headwise.io.result_store import ResultStore, default_folder, result_key, version_with_code_digest
from headwise.io.source_digest import source_digest

KEY, OTHER = result_key({"a": 1}), result_key({"a": 2})


def test_key_depends_on_every_part_and_not_on_order() -> None:
    assert result_key({"a": 1, "b": 2}) == result_key({"b": 2, "a": 1})
    assert len({result_key(parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": None}, {})}) == 6


def test_key_depends_on_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.io.result_store.version_with_code_digest", lambda: "another")
    assert result_key({"a": 1}) != KEY


def test_version_names_the_package() -> None:
    assert version_with_code_digest().startswith(f"{hw.__version__}+")


def test_content_returns_as_written(tmp_path: Path) -> None:
    store, content = ResultStore(tmp_path), bytes(range(256)) * 3
    assert store.read("profile", KEY) is None
    store.write("profile", KEY, content, {"model": "m"})
    assert store.read("profile", KEY) == content
    assert store.read("importance", KEY) is None
    (result,) = store.list_entries()
    assert (result.kind, result.key, result.description) == ("profile", KEY, {"model": "m"})
    assert result.nbytes == result.path.stat().st_size


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text", "header"])
def test_damaged_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    store = ResultStore(tmp_path)
    store.write("profile", KEY, b"content" * 9, {})
    path = store.path("profile", KEY)
    data = path.read_bytes()
    changed = data[:-1] + bytes([data[-1] ^ 1])
    contents = {
        "cut": data[:-5],
        "changed": changed,
        "empty": b"",
        "text": b"hello\nworld",
        "header": data.replace(b"{", b"[", 1),
    }
    path.write_bytes(contents[damage])
    assert store.read("profile", KEY) is None
    store.write("profile", KEY, b"new", {})
    assert store.read("profile", KEY) == b"new"


def test_stray_files_are_ignored_and_kept(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    for name in ("notes.txt", "profile-12.result", f"x-{KEY}.result", f"profile-{KEY}.result.bak"):
        (tmp_path / name).write_text("mine")
    store.write("profile", OTHER, b"content", {})
    assert len(store.list_entries()) == 1
    store.prune()
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} >= {"notes.txt", "profile-12.result"}


def test_oldest_results_are_deleted_beyond_the_limit(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    keys = [result_key({"n": n}) for n in range(3)]
    for age, key in enumerate(keys):
        store.write("profile", key, bytes(1000), {})
        os.utime(store.path("profile", key), (1000 + age, 1000 + age))
    store.read("profile", keys[0])  # used last
    ResultStore(tmp_path, max_bytes=2500).write("profile", OTHER, bytes(1000), {})  # a file has a header, too
    assert {result.key for result in store.list_entries()} == {keys[0], OTHER}


def test_result_larger_than_the_limit_is_not_stored(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, max_bytes=100)
    store.write("profile", KEY, bytes(101), {})
    assert store.list_entries() == []


def test_prune_of_one_kind_keeps_the_others(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    for kind in ("profile", "importance"):
        store.write(kind, KEY, b"content", {})
    assert store.prune(kind="profile") == 1
    assert [result.kind for result in store.list_entries()] == ["importance"]


def test_read_only_store_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    store = ResultStore(folder, read_only=True)
    store.write("profile", KEY, b"content", {})
    with store.lock("profile", KEY):
        assert store.read("profile", KEY) is None
    assert not folder.exists()
    with pytest.raises(hw.HeadwiseError, match="read-only"):
        store.prune()


def test_reading_read_only_leaves_the_time_of_use(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.write("profile", KEY, b"content", {})
    os.utime(store.path("profile", KEY), (1000, 1000))
    assert ResultStore(tmp_path, read_only=True).read("profile", KEY) == b"content"
    assert store.list_entries()[0].used == 1000


def test_folder_that_is_a_file_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ResultStore(tmp_path / "file" / "store")
    with store.lock("profile", KEY), pytest.warns(UserWarning, match="was not stored"):
        store.write("profile", KEY, b"content", {})


def count_measurements(folder: str) -> None:
    """Append a letter to a file each time the result is measured."""
    store = ResultStore(folder)
    with store.lock("profile", KEY):
        if store.read("profile", KEY) is None:
            with open(Path(folder) / "measured.txt", "a") as file:
                file.write("x")
            store.write("profile", KEY, b"content" * 10_000, {})
    assert store.read("profile", KEY) == b"content" * 10_000


def test_processes_measure_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=count_measurements, args=(str(tmp_path),)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "measured.txt").read_text() == "x"


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWISE_STORE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("HEADWISE_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "headwise" / "results"


def test_invalid_limit_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWISE_STORE_BYTES", "many")
    with pytest.raises(hw.HeadwiseError, match="HEADWISE_STORE_BYTES"):
        ResultStore()


def test_source_digest_depends_on_weights_and_configuration(tmp_path: Path) -> None:
    for name, text in (("model.safetensors", "w"), ("config.json", "{}")):
        (tmp_path / name).write_text(text)
    digests = [source_digest(tmp_path), source_digest(tmp_path / "model.safetensors")]
    (tmp_path / "config.json").write_text('{"a": 1}')
    digests += [source_digest(tmp_path), source_digest(tmp_path / "model.safetensors")]
    (tmp_path / "model.safetensors").write_text("v")
    digests += [source_digest(tmp_path), source_digest(tmp_path / "model.safetensors")]
    assert len(set(digests[::2])) == len(set(digests[1::2])) == 3


def test_store_needs_no_torch() -> None:
    code = "import sys, headwise.ui.stored_head_descriptions, headwise.cli.store; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_description_is_json(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.write("profile", KEY, b"content", {"model": "é"})
    assert json.loads(store.path("profile", KEY).read_bytes().split(b"\n")[1])["description"] == {"model": "é"}
