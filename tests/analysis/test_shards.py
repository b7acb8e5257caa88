"""Sharded profiles: the result of one pass, even if processes were killed."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_corpus_shards import profile_shards
from headwise.errors import HeadwiseError
from headwise.experiments.engine.peak_process_memory import STATUS_FILE
from headwise.model import Transformer
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from headwise.text.corpus_shards import file_sources, split_shards
from headwise.text.synthetic import VOCABULARY, SyntheticLanguage
from tests.analysis.stream_script import MEMORY_MARGIN, WORDS, make_model
from tests.analysis.stream_script import write_words as write_words

SHARD_CHARS = 4000  # characters per shard
FILES, TOKENS = 40, 2_000_000  # sizes of a large corpus


def synthetic_documents(count: int) -> list[Document]:
    return list(islice(SyntheticLanguage(3), count))


def write_jsonl(path: Path, documents: Sequence[Document], related: bool) -> Path:
    rows = [
        {"words": document.words, "relations": document.relations, "text": document.text}
        if related
        else {"text": document.text}
        for document in documents
    ]
    pack = gzip.open if path.suffix == ".gz" else open
    with pack(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model(VOCABULARY)


@pytest.fixture(scope="module", params=["own relations", "relations apart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three files whose boundaries differ from those of the shards."""
    corpus_folder = tmp_path_factory.mktemp("corpus")
    documents, related = synthetic_documents(90), request.param == "own relations"
    write_jsonl(corpus_folder / "a.jsonl", documents[:7], related)
    write_jsonl(corpus_folder / "b.jsonl.gz", documents[7:60], related)
    write_jsonl(corpus_folder / "c.jsonl", documents[60:], related)
    return corpus_folder


def unambiguous_contexts(head: HeadProfile) -> set[tuple[int, int, int]]:
    """Return the top contexts except ties with the last one, whose order depends on rounding."""
    least = min((c.weight for c in head.top_contexts), default=0.0)
    return {(c.sample, c.row, c.column) for c in head.top_contexts if c.weight > least + 1e-5}


def assert_same(actual: hw.Profile, expected: hw.Profile) -> None:
    assert actual.metadata == expected.metadata
    assert actual.accumulator.fields.keys() == expected.accumulator.fields.keys()
    for name in actual.accumulator.fields:
        np.testing.assert_allclose(actual.metric(name), expected.metric(name), rtol=1e-5, atol=1e-5, err_msg=name)
    for head, expected_head in zip(actual, expected, strict=True):
        assert (head.role, head.evidence_level, head.idle_pattern) == (
            expected_head.role,
            expected_head.evidence_level,
            expected_head.idle_pattern,
        )
        assert [c.weight for c in head.top_contexts] == pytest.approx(
            [c.weight for c in expected_head.top_contexts], abs=1e-5
        )
        assert unambiguous_contexts(head) == unambiguous_contexts(expected_head)
        for a, b in zip(head.evidence, expected_head.evidence, strict=True):
            assert (a.role, a.evidence_level, a.corpus_label) == (b.role, b.evidence_level, b.corpus_label)
            assert (a.score, a.effect) == (pytest.approx(b.score, abs=1e-5), pytest.approx(b.effect, abs=1e-5))


def test_split_shards_contain_the_corpus(folder: Path) -> None:
    corpus = Corpus.of(folder)
    shards, sources = split_shards(corpus, SHARD_CHARS), file_sources(corpus.files)
    assert len(shards) > 4
    assert any(shard.file_index == 0 and shard.num_items > 7 for shard in shards), "one reaches from file to file"
    assert [item for shard in shards for item in shard.to_corpus(sources, "it").items()] == list(corpus.items())
    assert all(shard.characters <= SHARD_CHARS for shard in shards)
    assert split_shards(Corpus.of(next(iter(corpus.chunks())).text), 1)[0].num_items == 1, "an item at least"


def test_split_shards_blank_lines_make_no_shard(tmp_path: Path) -> None:
    for index, text in enumerate(("one two three\n", "\n\none two three\n\n", "\n")):
        (tmp_path / f"{index}.txt").write_text(text)
    shards = split_shards(Corpus.of(tmp_path), 5)
    assert [shard.characters for shard in shards] == [14, 18], "what is blank goes with what is not"
    assert sum(shard.num_items for shard in shards) == len(list(Corpus.of(tmp_path).items()))


def test_profile_shards_equals_single_pass(folder: Path, model: Transformer, tmp_path: Path) -> None:
    updates: list[tuple] = []
    merged = profile_shards(
        model, folder, tmp_path / "out", shard_characters=SHARD_CHARS, progress=lambda *update: updates.append(update)
    )
    assert_same(merged, hw.profile(model, folder))
    assert sum(stage == "shards" for stage, *_ in updates) == len(list((tmp_path / "out").glob("shard-*.npz"))) + 1
    assert_same(hw.Profile.load(tmp_path / "out" / "profile.npz"), merged)


def test_profile_shards_resumes_after_interrupt(model: Transformer, tmp_path: Path) -> None:
    corpus, out = write_jsonl(tmp_path / "a.jsonl", synthetic_documents(40), True), tmp_path / "out"

    def stop(stage: str, done: int, of: int | None) -> None:
        if (stage, done) == ("shards", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_shards(model, corpus, out, shard_characters=SHARD_CHARS, causal=False, progress=stop)
    mtimes = {path: path.stat().st_mtime_ns for path in out.glob("shard-*.npz")}
    assert len(mtimes) == 2
    merged = profile_shards(model, corpus, out, shard_characters=SHARD_CHARS, causal=False)
    assert mtimes.items() <= {path: path.stat().st_mtime_ns for path in out.glob("shard-*.npz")}.items()
    assert_same(merged, hw.profile(model, corpus, causal=False))
    again = profile_shards(
        model, corpus, out, shard_characters=SHARD_CHARS, causal=False, progress=lambda *_: pytest.fail("all is there")
    )
    assert_same(again, merged)


def test_profile_shards_invalid_request_raises(model: Transformer, tmp_path: Path) -> None:
    corpus, out = write_jsonl(tmp_path / "a.jsonl", synthetic_documents(12), False), tmp_path / "out"
    options: dict[str, Any] = {"shard_characters": SHARD_CHARS, "causal": False, "relations": False}
    profile_shards(model, corpus, out, **options)
    with pytest.raises(HeadwiseError, match="Different: max_length"):
        profile_shards(model, corpus, out, max_length=64, **options)
    with pytest.raises(HeadwiseError, match="Different: model"):
        profile_shards(model.untrained(5), corpus, out, **options)
    write_jsonl(corpus, synthetic_documents(13), False)
    with pytest.raises(HeadwiseError, match="Different: corpus"):
        profile_shards(model, corpus, out, **options)
    with pytest.raises(HeadwiseError, match="not a folder of shards"):
        profile_shards(model, corpus, tmp_path, **options)
    with pytest.raises(HeadwiseError, match="Got 'ray'"):
        profile_shards(model, corpus, out, executor="ray", **options)
    with pytest.raises(HeadwiseError, match="workers load both themselves"):
        profile_shards(model, corpus, out, processes=2, **options)
    with pytest.raises(HeadwiseError, match=r"pairs .* are not supported"):
        profile_shards(model, [("a", "b")], out, **options)
    with pytest.raises(HeadwiseError, match="characters: must be at least 1"):
        profile_shards(model, corpus, tmp_path / "other", **{**options, "shard_characters": 0})
    (shard,) = split_shards(Corpus.of(corpus), 1 << 20)
    write_jsonl(corpus, synthetic_documents(14)[1:], False)
    with pytest.raises(HeadwiseError, match="not the ones that the shards were made from"):
        list(TokenizedCorpus.of(model, shard.to_corpus(file_sources([corpus]), "it")))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "dask", "slurm:cluster=local"])
def test_profile_shards_executors_equal_single_pass(
    executor: str, model: Transformer, folder: Path, tmp_path: Path
) -> None:
    if executor != "processes":
        pytest.importorskip("distributed" if executor == "dask" else "submitit")
    model.save(tmp_path / "model")
    options: dict[str, Any] = {"shard_characters": SHARD_CHARS, "processes": 2, "executor": executor}
    merged = profile_shards(str(tmp_path / "model"), folder, tmp_path / "out", **options)
    assert_same(merged, hw.profile(hw.load(tmp_path / "model"), folder))


def run_with_kills(
    command: list[str], out: Path, times: int, limit: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Kill the process several times, spread over its run, and restart it each time; then let it finish."""

    def apply_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    before = set[Path]()
    for kill in range(times):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=apply_limit
        )
        target_count = len(before) + 1 + kill % 3
        while process.poll() is None and len(set(out.glob("shard-*.npz"))) < target_count:
            time.sleep(0.01)
        assert process.poll() is None, "the corpus is too small to kill it so often, or the limit too low"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        after = set(out.glob("shard-*.npz"))
        assert before < after, "what was finished is there, and more of it"
        before = after
    return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=apply_limit)


def command_of(model: Path, corpus: Path, out: Path, size: int) -> list[str]:
    command = [sys.executable, "-m", "headwise", "profile", str(model), str(corpus), "--out", str(out)]
    return [*command, "--shard-characters", str(size), "--no-causal", "--json"]


@pytest.mark.slow
def test_profile_shards_survives_ten_kills(model: Transformer, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    corpus, out = write_jsonl(tmp_path / "a.jsonl", synthetic_documents(600), True), tmp_path / "out"
    done = run_with_kills(command_of(tmp_path / "model", corpus, out, SHARD_CHARS), out, 10)
    assert len(json.loads(done.stdout)["heads"]) == len(model.heads)
    assert_same(hw.Profile.load(out / "profile.npz"), hw.profile(hw.load(tmp_path / "model"), corpus, causal=False))


@pytest.mark.slow
@pytest.mark.skipif(not STATUS_FILE.is_file(), reason="the limit is Linux's")
def test_profile_shards_large_corpus_with_kills_within_memory_limit(tmp_path: Path) -> None:
    """The process may use 64 MB more than for 8,000 tokens."""
    make_model(WORDS).save(tmp_path / "model")
    small, large = write_words(tmp_path / "small.txt", 8_000), tmp_path / "corpus"
    large.mkdir()
    for index in range(FILES):
        write_words(large / f"{index}.txt", TOKENS // FILES + 40 * index - 20 * (FILES - 1))
    first, max_bytes = subprocess.Popen(command_of(tmp_path / "model", small, tmp_path / "small", 1 << 18)), 0
    while first.poll() is None:
        with suppress(OSError, StopIteration, ValueError):
            status = Path(f"/proc/{first.pid}/status").read_text()
            max_bytes = max(
                max_bytes, int(next(row for row in status.splitlines() if row.startswith("VmData")).split()[1]) << 10
            )
        time.sleep(0.01)
    assert first.returncode == 0
    out = tmp_path / "out"
    run_with_kills(command_of(tmp_path / "model", large, out, 1 << 18), out, 10, max_bytes + MEMORY_MARGIN)
    merged = hw.Profile.load(out / "profile.npz")
    assert merged.metadata["tokens"] == TOKENS
    assert_same(merged, hw.profile(hw.load(tmp_path / "model"), large, causal=False))
