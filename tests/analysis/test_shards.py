"""A corpus in shards: whatever was killed on the way, the profile of one pass."""

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
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile_result import HeadProfile
from headwise.analysis.roles.shards import profile_shards
from headwise.errors import HeadwiseError
from headwise.experiments.engine.memory import STATUS
from headwise.model import Transformer
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from headwise.text.shards import cut_shards, sources_of
from headwise.text.synthetic import VOCABULARY, LittleLanguage
from tests.analysis.stream_script import ROOM, WORDS, make
from tests.analysis.stream_script import write as write_words

SIZE = 4000  # characters of a shard
FILES, TOKENS = 40, 2_000_000  # of a large corpus


def little(count: int) -> list[Document]:
    return list(islice(LittleLanguage(3), count))


def write(path: Path, documents: Sequence[Document], related: bool) -> Path:
    rows = [
        {"words": one.words, "relations": one.relations, "text": one.text} if related else {"text": one.text}
        for one in documents
    ]
    pack = gzip.open if path.suffix == ".gz" else open
    with pack(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make(VOCABULARY)


@pytest.fixture(scope="module", params=["own relations", "relations apart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files, cut elsewhere than shards are."""
    made = tmp_path_factory.mktemp("corpus")
    documents, related = little(90), request.param == "own relations"
    write(made / "a.jsonl", documents[:7], related)
    write(made / "b.jsonl.gz", documents[7:60], related)
    write(made / "c.jsonl", documents[60:], related)
    return made


def surely(head: HeadProfile) -> set[tuple[int, int, int]]:
    """Where it looked hardest; which of those that are as hard as the last is kept depends on the last bits."""
    least = min((c.weight for c in head.hardest), default=0.0)
    return {(c.unit, c.row, c.column) for c in head.hardest if c.weight > least + 1e-5}


def assert_same(one: hw.Profile, other: hw.Profile) -> None:
    assert one.about == other.about
    assert one.tally.fields.keys() == other.tally.fields.keys()
    for name in one.tally.fields:
        np.testing.assert_allclose(one.measure(name), other.measure(name), rtol=1e-5, atol=1e-5, err_msg=name)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.role, mine.rung, mine.rest) == (theirs.role, theirs.rung, theirs.rest)
        assert [c.weight for c in mine.hardest] == pytest.approx([c.weight for c in theirs.hardest], abs=1e-5)
        assert surely(mine) == surely(theirs)
        for a, b in zip(mine.supports, theirs.supports, strict=True):
            assert (a.role, a.rung, a.on) == (b.role, b.rung, b.on)
            assert (a.score, a.effect) == (pytest.approx(b.score, abs=1e-5), pytest.approx(b.effect, abs=1e-5))


def test_shards_are_the_corpus(folder: Path) -> None:
    corpus = Corpus.of(folder)
    shards, sources = cut_shards(corpus, SIZE), sources_of(corpus.files)
    assert len(shards) > 4
    assert any(shard.file == 0 and shard.items > 7 for shard in shards), "one reaches from file to file"
    assert [item for shard in shards for item in shard.read(sources, "it").items()] == list(corpus.items())
    assert all(shard.characters <= SIZE for shard in shards)
    assert cut_shards(Corpus.of(next(iter(corpus.pieces())).text), 1)[0].items == 1, "an item at least"


def test_the_end_of_a_line_is_no_shard(tmp_path: Path) -> None:
    for number, text in enumerate(("one two three\n", "\n\none two three\n\n", "\n")):
        (tmp_path / f"{number}.txt").write_text(text)
    shards = cut_shards(Corpus.of(tmp_path), 5)
    assert [shard.characters for shard in shards] == [14, 18], "what is blank goes with what is not"
    assert sum(shard.items for shard in shards) == len(list(Corpus.of(tmp_path).items()))


def test_merged_is_one_pass(folder: Path, model: Transformer, tmp_path: Path) -> None:
    seen: list[tuple] = []
    made = profile_shards(model, folder, tmp_path / "out", shard=SIZE, progress=lambda *told: seen.append(told))
    assert_same(made, hw.profile(model, folder))
    assert sum(what == "shards" for what, *_ in seen) == len(list((tmp_path / "out").glob("shard-*.npz"))) + 1
    assert_same(hw.Profile.load(tmp_path / "out" / "profile.npz"), made)


def test_stopped_it_goes_on(model: Transformer, tmp_path: Path) -> None:
    corpus, out = write(tmp_path / "a.jsonl", little(40), True), tmp_path / "out"

    def stop(what: str, done: int, of: int | None) -> None:
        if (what, done) == ("shards", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_shards(model, corpus, out, shard=SIZE, causal=False, progress=stop)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-*.npz")}
    assert len(kept) == 2
    made = profile_shards(model, corpus, out, shard=SIZE, causal=False)
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in out.glob("shard-*.npz")}.items()
    assert_same(made, hw.profile(model, corpus, causal=False))
    again = profile_shards(
        model, corpus, out, shard=SIZE, causal=False, progress=lambda *_: pytest.fail("all is there")
    )
    assert_same(again, made)


def test_what_is_refused(model: Transformer, tmp_path: Path) -> None:
    corpus, out = write(tmp_path / "a.jsonl", little(12), False), tmp_path / "out"
    asked: dict[str, Any] = {"shard": SIZE, "causal": False, "relations": False}
    profile_shards(model, corpus, out, **asked)
    with pytest.raises(HeadwiseError, match="shards of another profile: longest differ"):
        profile_shards(model, corpus, out, longest=64, **asked)
    with pytest.raises(HeadwiseError, match="another profile: model differ"):
        profile_shards(model.untrained(5), corpus, out, **asked)
    write(corpus, little(13), False)
    with pytest.raises(HeadwiseError, match="another profile: corpus differ"):
        profile_shards(model, corpus, out, **asked)
    with pytest.raises(HeadwiseError, match="holds something else"):
        profile_shards(model, corpus, tmp_path, **asked)
    with pytest.raises(HeadwiseError, match="there is no executor 'ray'"):
        profile_shards(model, corpus, out, executor="ray", **asked)
    with pytest.raises(HeadwiseError, match="give the model's name or path, and a corpus of files"):
        profile_shards(model, corpus, out, processes=2, **asked)
    with pytest.raises(HeadwiseError, match="pairs are for"):
        profile_shards(model, [("a", "b")], out, **asked)
    with pytest.raises(HeadwiseError, match="at least one character"):
        profile_shards(model, corpus, tmp_path / "other", **{**asked, "shard": 0})
    (shard,) = cut_shards(Corpus.of(corpus), 1 << 20)
    write(corpus, little(14)[1:], False)
    with pytest.raises(HeadwiseError, match="not the same here as where its shards were made"):
        list(Reading.of(model, shard.read(sources_of([corpus]), "it")))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "dask", "slurm:cluster=local"])
def test_workers_give_the_same(executor: str, model: Transformer, folder: Path, tmp_path: Path) -> None:
    if executor != "processes":
        pytest.importorskip("distributed" if executor == "dask" else "submitit")
    model.save(tmp_path / "model")
    how: dict[str, Any] = {"shard": SIZE, "processes": 2, "executor": executor}
    made = profile_shards(str(tmp_path / "model"), folder, tmp_path / "out", **how)
    assert_same(made, hw.profile(hw.load(tmp_path / "model"), folder))


def killed(command: list[str], out: Path, times: int, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Kill it so often, at moments spread over the work, each time starting the same again; then let it end."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    before = set[Path]()
    for kill in range(times):
        begun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=limited)
        wanted = len(before) + 1 + kill % 3
        while begun.poll() is None and len(set(out.glob("shard-*.npz"))) < wanted:
            time.sleep(0.01)
        assert begun.poll() is None, "the corpus is too small to kill it so often, or the limit too low"
        os.kill(begun.pid, signal.SIGKILL)
        begun.wait()
        now = set(out.glob("shard-*.npz"))
        assert before < now, "what was finished is there, and more of it"
        before = now
    return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limited)


def command_of(model: Path, corpus: Path, out: Path, size: int) -> list[str]:
    command = [sys.executable, "-m", "headwise", "heads", str(model), str(corpus), "--out", str(out)]
    return [*command, "--shard", str(size), "--no-causal", "--json"]


@pytest.mark.slow
def test_killed_ten_times(model: Transformer, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    corpus, out = write(tmp_path / "a.jsonl", little(600), True), tmp_path / "out"
    done = killed(command_of(tmp_path / "model", corpus, out, SIZE), out, 10)
    assert len(json.loads(done.stdout)["heads"]) == len(model.heads)
    assert_same(hw.Profile.load(out / "profile.npz"), hw.profile(hw.load(tmp_path / "model"), corpus, causal=False))


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.is_file(), reason="the limit is Linux's")
def test_two_million_tokens_killed_ten_times_within_a_limit(tmp_path: Path) -> None:
    """It may take 64 MB beyond what it takes for 8,000 tokens."""
    make(WORDS).save(tmp_path / "model")
    small, large = write_words(tmp_path / "small.txt", 8_000), tmp_path / "corpus"
    large.mkdir()
    for number in range(FILES):
        write_words(large / f"{number}.txt", TOKENS // FILES + 40 * number - 20 * (FILES - 1))
    first, most = subprocess.Popen(command_of(tmp_path / "model", small, tmp_path / "small", 1 << 18)), 0
    while first.poll() is None:
        with suppress(OSError, StopIteration, ValueError):
            told = Path(f"/proc/{first.pid}/status").read_text()
            most = max(most, int(next(row for row in told.splitlines() if row.startswith("VmData")).split()[1]) << 10)
        time.sleep(0.01)
    assert first.returncode == 0
    out = tmp_path / "out"
    killed(command_of(tmp_path / "model", large, out, 1 << 18), out, 10, most + ROOM)
    made = hw.Profile.load(out / "profile.npz")
    assert made.about["tokens"] == TOKENS
    assert_same(made, hw.profile(hw.load(tmp_path / "model"), large, causal=False))
