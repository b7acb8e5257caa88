"""A reading: tokenised once, the same however often it is asked, in the same room however long the corpus is."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise import HeadwiseError, Reading
from headwise.analysis.ablation import head_outputs
from headwise.analysis.ablation.head_outputs import mean_activations, read_on
from headwise.analysis.recording import tokenized_corpus as module
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.control_sentences import WRITTEN
from headwise.analysis.roles.profile import profile
from headwise.compression.curve import curve
from headwise.compression.report import report
from headwise.experiments.engine.memory import STATUS
from headwise.model import Transformer
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.constructed_heads import decoder, documents
from tests.analysis.models import TEXTS
from tests.analysis.models import reading as model_of
from tests.analysis.stream_script import WORDS, make, write, write_treebank
from tests.contract.layers import MODELS

ROOT = Path(__file__).parents[2]


class Counting:
    """A backend that counts how often each text is encoded."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.read = backend, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.read[text] += 1
        return self.backend.encode(text, **options)


def counted(model: Transformer) -> Counter[str]:
    """How often this model's tokenizer reads each text, from now on."""
    tokenizer = tokenizer_of(model)
    assert len(tokenizer.around) == 2  # worked out once, from a letter
    counting = tokenizer.backend = Counting(tokenizer.backend)  # pyright: ignore[reportAttributeAccessIssue]
    return counting.read


def ids(units: Any) -> list[tuple[int, ...]]:
    return [unit.ids for unit in units]


# Once.


@pytest.mark.parametrize("by", ["ablation", pytest.param("gradient", marks=pytest.mark.slow), "gates"])
def test_prune_with_a_report_and_a_curve_reads_texts_and_takes_means_once(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(MODELS["decoder, rotary"])
    read, taken = counted(model), []
    first = head_outputs.mean_of
    monkeypatch.setattr(head_outputs, "mean_of", lambda *given: (taken.append(1), first(*given))[1])
    some = ["the cat sat", "a mat", "it was a cat", "that sat there", "at a mat"]
    choosing, judging = read_on(model, some).halves()
    means = mean_activations(model, choosing)
    plan = hw.Plan.make(model, keep=0.5, by=by, on=choosing, means=means, rounds=2, steps=2)
    small = plan.apply(model)
    report(model, small, judging, means=means, seeds=2, turns=1)
    curve(model, choosing, judging, keeps=(0.5,), bys=(by,), means=means, seeds=1, steps=2)
    assert read == Counter(some)
    assert len(taken) == 1


def test_prune_alone_reads_each_text_once() -> None:
    model = model_of(MODELS["decoder, rotary"])
    read = counted(model)
    hw.prune(model, keep=0.5, on=TEXTS, rounds=2)
    assert read == Counter(TEXTS)


def test_a_profile_reads_each_document_once() -> None:
    model, some = decoder(), documents(30)
    read = counted(model)
    profile(model, some)
    expected = Counter([*(document.text for document in some), *WRITTEN["bracket"]])  # the latter: controls of a probe
    assert read == expected, "relations, cases, means and probes included"
    again = Reading.of(model, some)
    profile(model, again, causal=False)
    profile(model, again, causal=False)
    hw.importance(model, again)
    assert max(read.values()) == 2


# The same.


def test_what_streams_is_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    kept = Reading.of(model, documents(40))
    whole = profile(model, kept)
    monkeypatch.setattr(module, "KEPT", 50)
    streamed = Reading.of(model, documents(40))
    read = counted(model)
    assert streamed.count_ahead() is None
    assert len(read) < 5
    other = profile(model, streamed)
    assert max(read.values()) == 1, "what was read ahead is not read again"
    assert (streamed.texts, streamed.tokens, streamed.fingerprint) == (kept.texts, kept.tokens, kept.fingerprint)
    assert (kept.texts, kept.tokens) == (40, sum(len(unit.ids) for unit in kept))
    assert ids(streamed) == ids(streamed) == ids(kept)
    assert other.to_dict() == whole.to_dict()
    for group, sums in whole.tally.sums.items():
        np.testing.assert_array_equal(other.tally.sums[group], sums)
    for name, array in whole.cases.arrays.items():
        np.testing.assert_array_equal(other.cases.arrays[name], array)


@pytest.mark.parametrize("how", ["mean", "zero", "resample"])
def test_importance_of_what_streams(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MODELS["decoder, rotary"])
    kept = hw.importance(model, TEXTS, how=how)
    monkeypatch.setattr(module, "KEPT", 12)
    np.testing.assert_array_equal(hw.importance(model, TEXTS, how=how).mean, kept.mean)


def test_a_fingerprint_is_of_the_ids() -> None:
    import hashlib

    model = decoder()
    made = Reading.of(model, documents(5))
    assert made.fingerprint == hashlib.sha256(repr(ids(made)).encode()).hexdigest()


def test_long_texts_are_parted_where_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(["don't stop  now,", "(the) cat", "é à la", "1,000.50"] * 40)
    byte, model = make(WORDS), make(WORDS)  # they are not run
    byte.tokenizer = byte_tokenizer()
    for one in (byte, hw.load("minilm"), model):
        whole = list(Reading.of(one, text, 32))
        monkeypatch.setattr(module, "PART", 100)
        parted = list(Reading.of(one, text, 32))
        monkeypatch.undo()
        assert len(whole) > 2
        assert ids(parted) == ids(whole)
        assert [unit.text for unit in parted] == [unit.text for unit in whole]
        assert [unit.alignment.spans for unit in parted] == [unit.alignment.spans for unit in whole]


def test_units_are_cut_without_reading_again() -> None:
    model = make(WORDS)
    text = " ".join(WORDS[:150])
    long = Reading.of(model, [text], 64)
    read = counted(model)
    short = Reading.of(model, long, 16)
    assert ids(short) == ids(Reading.of(make(WORDS), [text], 16))
    assert [unit.text for unit in short][:2] == [" ".join(WORDS[:16]), " ".join(WORDS[16:32])]
    assert read == Counter({text: 1})
    with pytest.raises(HeadwiseError, match="at most 64 tokens"):
        long.cut(65)


# Where it is taken, and where not.


def test_a_reading_is_taken_wherever_a_corpus_is() -> None:
    model = decoder()
    given = Reading.of(model, documents(12))
    assert profile(model, given).to_dict() == profile(model, documents(12)).to_dict()
    assert mean_activations(model, given)["0.0"].tolist() == mean_activations(model, documents(12))["0.0"].tolist()
    some = given.first(4)
    assert ids(some) == ids(given)[:4]
    assert [document.text for document in some.documents()] == [document.text for document in documents(12)[:4]]
    assert Corpus.of(given) is given.corpus
    assert [item.text for item in Corpus.of(some).items()] == [document.text for document in documents(12)[:4]]
    assert hw.train(model.spec, some, hw.Recipe(steps=1, batch=2, context=16), progress=False).step == 1


def test_another_tokenizer_is_refused() -> None:
    model, other = make(WORDS), make(WORDS[::-1])
    given = Reading.of(model, " ".join(WORDS[:20]))
    assert Reading.of(make(WORDS), given) is given, "the same tokenizer, made twice"
    for act in (profile, hw.importance, mean_activations, lambda m, c: hw.prune(m, keep=0.5, on=c)):
        with pytest.raises(HeadwiseError, match="another tokenizer than this model's"):
            act(other, given)


def test_units_longer_than_a_model_can_read_are_refused() -> None:
    attention = hw.AttentionSpec(width=8, heads=2)
    specs = [
        hw.ModelSpec(vocab=257, context=n, layers=1, hidden=8, attention=attention, positions="learned")
        for n in (64, 8)
    ]
    long, short = map(Transformer, specs)
    long.tokenizer = short.tokenizer = byte_tokenizer()
    given = Reading.of(long, "to be or not to be")
    with pytest.raises(HeadwiseError, match="more than the 8 positions"):
        Reading.of(short, given)


# Memory.


def streamed(*arguments: str, timeout: int) -> tuple[int, float]:
    """Tokens read, and megabytes that memory rose by, in a process of its own under a limit."""
    command = [sys.executable, "-m", "tests.analysis.stream_script", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, megabytes = done.stdout.split(" tokens: ")
    return int(tokens), float(megabytes.split()[0])


@pytest.mark.skipif(not STATUS.is_file(), reason="the limit is Linux's")
def test_a_longer_corpus_takes_no_more_memory(tmp_path: Path) -> None:
    small, some, more = (str(write(tmp_path / f"{n}.txt", n)) for n in (8_000, 120_000, 240_000))
    (first, low), (second, high) = (streamed(small, one, timeout=300) for one in (some, more))
    assert (first, second) == (120_000, 240_000)  # what waits between batches has its full size by then
    assert high < low + 6, f"{first} tokens: {low} MB; {second}: {high} MB"


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.is_file(), reason="the limit is Linux's")
def test_two_million_tokens_within_a_limit(tmp_path: Path) -> None:
    """In a list of units they would take more than the limit leaves."""
    small, large = (str(write(tmp_path / f"{n}.txt", n)) for n in (8_000, 2_000_000))
    tokens, megabytes = streamed(small, large, timeout=1800)
    assert tokens == 2_000_000
    assert megabytes < 40


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.is_file(), reason="the limit is Linux's")
def test_a_larger_treebank_takes_no_more_memory(tmp_path: Path) -> None:
    """Documents with relations stream too: their arcs are counted as they go by."""
    small, some, more = (str(write_treebank(tmp_path / f"{n}.conllu", n)) for n in (100, 600, 1800))
    (first, low), (second, high) = (streamed(small, one, timeout=300) for one in (some, more))
    assert second > 2.5 * first > 10_000
    assert high < low + 6, f"{first} tokens: {low} MB; {second}: {high} MB"


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.is_file(), reason="the limit is Linux's")
def test_a_treebank_of_half_a_million_tokens_within_a_limit(tmp_path: Path) -> None:
    """Kept as documents they would take more than the limit leaves."""
    small, large = (str(write_treebank(tmp_path / f"{n}.conllu", n)) for n in (600, 45_000))
    tokens, megabytes = streamed(small, large, timeout=3000)
    assert tokens > 500_000
    assert megabytes < 40
