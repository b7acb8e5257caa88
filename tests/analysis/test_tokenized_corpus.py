"""Tokenized corpus: tokenized once, equal in every pass, in constant memory."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise import HeadwiseError, TokenizedCorpus
from headwise.analysis.ablation import recorded_head_outputs
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus, mean_activations
from headwise.analysis.recording import tokenized_corpus as module
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.unopened_bracket_sentences import CONTROL_SENTENCES
from headwise.compression import PruneRequest
from headwise.compression.plan_report import report
from headwise.compression.pruning_curve import pruning_curve
from headwise.experiments.engine.peak_process_memory import STATUS_FILE
from headwise.model import Transformer
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.constructed_heads import decoder, documents
from tests.analysis.models import TEXTS
from tests.analysis.models import character_model as model_of
from tests.analysis.stream_script import WORDS, make_model, write_treebank, write_words
from tests.contract.layers import MODELS

ROOT = Path(__file__).parents[2]


class CountingBackend:
    """A backend that counts how often each text is encoded."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.counts = backend, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.counts[text] += 1
        return self.backend.encode(text, **options)


def count_encodings(model: Transformer) -> Counter[str]:
    """Count from now on how often the tokenizer of a model encodes each text."""
    tokenizer = tokenizer_of(model)
    assert len(tokenizer.template_ids) == 2  # computed once, by encoding a letter
    counting = tokenizer.backend = CountingBackend(tokenizer.backend)  # pyright: ignore[reportAttributeAccessIssue]
    return counting.counts


def ids_of(samples: Any) -> list[tuple[int, ...]]:
    return [sample.ids for sample in samples]


# Tokenization happens once.


@pytest.mark.parametrize("ranking", ["ablation", pytest.param("gradient", marks=pytest.mark.slow), "gates"])
def test_prune_report_and_curve_tokenize_and_average_once(ranking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MODELS["decoder, rotary"])
    encodings, mean_calls = count_encodings(model), []
    original = recorded_head_outputs.mean_of_outputs
    monkeypatch.setattr(
        recorded_head_outputs, "mean_of_outputs", lambda *args: (mean_calls.append(1), original(*args))[1]
    )
    texts = ["the cat sat", "a mat", "it was a cat", "that sat there", "at a mat"]
    choosing, judging = eval_corpus(model, texts).halves()
    means = mean_activations(model, choosing)
    plan = hw.plan_pruning(
        model, PruneRequest(keep=0.5, ranking=ranking, corpus=choosing, rounds=2, gate_steps=2), means=means
    )
    small = hw.apply(plan, model)
    report(model, small, judging, means=means, seeds=2, repeats=1)
    pruning_curve(
        model, choosing, judging, keep_fractions=(0.5,), rankings=(ranking,), means=means, seeds=1, gate_steps=2
    )
    assert encodings == Counter(texts)
    assert len(mean_calls) == 1


def test_prune_tokenizes_each_text_once() -> None:
    model = model_of(MODELS["decoder, rotary"])
    encodings = count_encodings(model)
    hw.prune(model, keep=0.5, corpus=TEXTS, rounds=2)
    assert encodings == Counter(TEXTS)


def test_profile_tokenizes_each_document_once() -> None:
    model, docs = decoder(), documents(30)
    encodings = count_encodings(model)
    profile(model, docs)
    # the last ones are controls of a probe
    expected = Counter([*(document.text for document in docs), *CONTROL_SENTENCES["bracket"]])
    assert encodings == expected, "relations, cases, means and probes included"
    tokenized = TokenizedCorpus.of(model, docs)
    profile(model, tokenized, causal=False)
    profile(model, tokenized, causal=False)
    hw.importance(model, tokenized)
    assert max(encodings.values()) == 2


# Every pass is equal.


def test_tokenized_corpus_streamed_equals_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    cached = TokenizedCorpus.of(model, documents(40))
    expected = profile(model, cached)
    monkeypatch.setattr(module, "MAX_CACHED_TOKENS", 50)
    streamed = TokenizedCorpus.of(model, documents(40))
    encodings = count_encodings(model)
    assert streamed.count_if_small() is None
    assert len(encodings) < 5
    other = profile(model, streamed)
    assert max(encodings.values()) == 1, "what was read ahead is not read again"
    assert (streamed.num_samples, streamed.num_tokens, streamed.fingerprint) == (
        cached.num_samples,
        cached.num_tokens,
        cached.fingerprint,
    )
    assert (cached.num_samples, cached.num_tokens) == (40, sum(len(sample.ids) for sample in cached))
    assert ids_of(streamed) == ids_of(streamed) == ids_of(cached)
    assert other.to_dict() == expected.to_dict()
    for group, sums in expected.accumulator.sums.items():
        np.testing.assert_array_equal(other.accumulator.sums[group], sums)
    for name, array in expected.examples.arrays.items():
        np.testing.assert_array_equal(other.examples.arrays[name], array)


@pytest.mark.parametrize("method", ["mean", "zero", "resample"])
def test_importance_streamed_corpus_equals_cached(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MODELS["decoder, rotary"])
    expected = hw.importance(model, TEXTS, ablation=method)
    monkeypatch.setattr(module, "MAX_CACHED_TOKENS", 12)
    np.testing.assert_array_equal(hw.importance(model, TEXTS, ablation=method).mean, expected.mean)


def test_tokenized_corpus_fingerprint_is_hash_of_ids() -> None:
    import hashlib

    model = decoder()
    tokenized = TokenizedCorpus.of(model, documents(5))
    assert tokenized.fingerprint == hashlib.sha256(repr(ids_of(tokenized)).encode()).hexdigest()


def test_tokenized_corpus_long_text_chunks_keep_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(["don't stop  now,", "(the) cat", "é à la", "1,000.50"] * 40)
    byte, model = make_model(WORDS), make_model(WORDS)  # these are not run
    byte.tokenizer = byte_tokenizer()
    for reader in (byte, hw.load("minilm"), model):
        full = list(TokenizedCorpus.of(reader, text, 32))
        monkeypatch.setattr(module, "CHUNK_CHARS", 100)
        chunked = list(TokenizedCorpus.of(reader, text, 32))
        monkeypatch.undo()
        assert len(full) > 2
        assert ids_of(chunked) == ids_of(full)
        assert [sample.text for sample in chunked] == [sample.text for sample in full]
        assert [sample.alignment.spans for sample in chunked] == [sample.alignment.spans for sample in full]


def test_tokenized_corpus_rechunk_does_not_tokenize_again() -> None:
    model = make_model(WORDS)
    text = " ".join(WORDS[:150])
    long = TokenizedCorpus.of(model, [text], 64)
    encodings = count_encodings(model)
    short = TokenizedCorpus.of(model, long, 16)
    assert ids_of(short) == ids_of(TokenizedCorpus.of(make_model(WORDS), [text], 16))
    assert [sample.text for sample in short][:2] == [" ".join(WORDS[:16]), " ".join(WORDS[16:32])]
    assert encodings == Counter({text: 1})
    with pytest.raises(HeadwiseError, match="at most 64 tokens"):
        long.rechunk(65)


# Accepted and rejected inputs.


def test_tokenized_corpus_is_accepted_as_corpus() -> None:
    model = decoder()
    tokenized = TokenizedCorpus.of(model, documents(12))
    assert profile(model, tokenized).to_dict() == profile(model, documents(12)).to_dict()
    assert mean_activations(model, tokenized)["0.0"].tolist() == mean_activations(model, documents(12))["0.0"].tolist()
    subset = tokenized.first(4)
    assert ids_of(subset) == ids_of(tokenized)[:4]
    assert [document.text for document in subset.relation_documents()] == [
        document.text for document in documents(12)[:4]
    ]
    assert Corpus.of(tokenized) is tokenized.corpus
    assert [item.text for item in Corpus.of(subset).items()] == [document.text for document in documents(12)[:4]]
    assert hw.train(model.spec, subset, hw.Recipe(steps=1, batch_size=2, context=16), progress=False).step == 1


def test_tokenized_corpus_other_tokenizer_raises() -> None:
    model, other = make_model(WORDS), make_model(WORDS[::-1])
    tokenized = TokenizedCorpus.of(model, " ".join(WORDS[:20]))
    assert TokenizedCorpus.of(make_model(WORDS), tokenized) is tokenized, "the same tokenizer, made twice"
    for act in (profile, hw.importance, mean_activations, lambda m, c: hw.prune(m, keep=0.5, corpus=c)):
        with pytest.raises(HeadwiseError, match="another tokenizer"):
            act(other, tokenized)


def test_tokenized_corpus_too_long_for_context_raises() -> None:
    attention = hw.AttentionSpec(width=8, heads=2)
    specs = [
        hw.ModelSpec(vocab=257, context=n, layers=1, mlp_width=8, attention=attention, positions="learned")
        for n in (64, 8)
    ]
    long, short = map(Transformer, specs)
    long.tokenizer = short.tokenizer = byte_tokenizer()
    tokenized = TokenizedCorpus.of(long, "to be or not to be")
    with pytest.raises(HeadwiseError, match=r"longer than the context.*8 positions"):
        TokenizedCorpus.of(short, tokenized)


# Memory.


# With fixed thresholds glibc returns freed buffers at once. Its default thresholds change during a run, and so does the peak.
FIXED_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def profile_in_subprocess(*arguments: str, timeout: int) -> tuple[int, float]:
    """Return the tokens read and the memory increase in MB, in a separate process with a memory limit."""
    command, environment = [sys.executable, "-m", "tests.analysis.stream_script", *arguments], os.environ | FIXED_MALLOC
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, megabytes = done.stdout.split(" tokens: ")
    return int(tokens), float(megabytes.split()[0])


@pytest.mark.skipif(not STATUS_FILE.is_file(), reason="the limit is Linux's")
def test_profile_memory_does_not_grow_with_corpus(tmp_path: Path) -> None:
    small, medium, large = (str(write_words(tmp_path / f"{n}.txt", n)) for n in (8_000, 120_000, 240_000))
    (first, low), (second, high) = (profile_in_subprocess(small, path, timeout=300) for path in (medium, large))
    assert (first, second) == (120_000, 240_000)  # the buffers between batches have their full size by then
    assert high < low + 6, f"{first} tokens: {low} MB; {second}: {high} MB"


@pytest.mark.slow
@pytest.mark.skipif(not STATUS_FILE.is_file(), reason="the limit is Linux's")
def test_profile_two_million_tokens_within_memory_limit(tmp_path: Path) -> None:
    """A list of samples would exceed the memory limit."""
    small, large = (str(write_words(tmp_path / f"{n}.txt", n)) for n in (8_000, 2_000_000))
    tokens, megabytes = profile_in_subprocess(small, large, timeout=1800)
    assert tokens == 2_000_000
    assert megabytes < 40


@pytest.mark.slow
@pytest.mark.skipif(not STATUS_FILE.is_file(), reason="the limit is Linux's")
def test_profile_memory_does_not_grow_with_treebank(tmp_path: Path) -> None:
    """Documents with relations are streamed too: their arcs are counted on the fly."""
    small, medium, large = (str(write_treebank(tmp_path / f"{n}.conllu", n)) for n in (100, 600, 1800))
    (first, low), (second, high) = (profile_in_subprocess(small, path, timeout=300) for path in (medium, large))
    assert second > 2.5 * first > 10_000
    assert high < low + 6, f"{first} tokens: {low} MB; {second}: {high} MB"


@pytest.mark.slow
@pytest.mark.skipif(not STATUS_FILE.is_file(), reason="the limit is Linux's")
def test_profile_large_treebank_within_memory_limit(tmp_path: Path) -> None:
    """A list of documents would exceed the memory limit."""
    small, large = (str(write_treebank(tmp_path / f"{n}.conllu", n)) for n in (600, 45_000))
    tokens, megabytes = profile_in_subprocess(small, large, timeout=3000)
    assert tokens > 500_000
    assert megabytes < 40
