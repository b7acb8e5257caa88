"""Pairs of a source and a text from lists or files, and their special tokens for an encoder-decoder."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from headwise.errors import HeadwiseError
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer, make_tokenizer
from headwise.text.corpus import TextChunk, TextPair
from tests.contract.variants import FIXED_SETTINGS

PAIRS = [("Guten Tag.", "Good day."), ("ja", "yes, indeed"), ("Wer kommt?", "Who?")]
ODD_CHARACTERS = " \t\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u2029\ufeffab.é漢🙂"  # none of these ends a line


def write_pair_files(folder: Path, sources: str, texts: str) -> tuple[Path, Path]:
    """Write two files."""
    for name, content in (("sources", sources), ("texts", texts)):
        (folder / f"{name}.txt").write_bytes(content.encode())
    return folder / "sources.txt", folder / "texts.txt"


# Sources of pairs.


def test_corpus_pairs_from_lists_and_files_are_equal(tmp_path: Path) -> None:
    sources, texts = (list(side) for side in zip(*PAIRS, strict=True))
    files = write_pair_files(tmp_path, "\n".join(sources) + "\n", "\n".join(texts) + "\n")
    corpora = {
        "tuples": Corpus.of(PAIRS),
        "a generator": Corpus.of(pair for pair in PAIRS),
        "named tuples": Corpus.of([TextPair(*pair) for pair in PAIRS]),
        "two lists": Corpus.pairs(sources, texts),
        "two files": Corpus.pairs(*files),
        "two names": Corpus.pairs(str(files[0]), str(files[1])),
        "a file and a list": Corpus.pairs(files[0], texts),
    }
    for name, corpus in corpora.items():
        assert corpus.paired, name
        assert list(corpus.items()) == list(corpus.items()) == PAIRS, name  # can be read repeatedly
        assert all(isinstance(item, TextPair) for item in corpus.items()), name
    for first, second in (("tuples", "two lists"), ("tuples", "named tuples"), ("two files", "two names")):
        assert corpora[first].fingerprint == corpora[second].fingerprint
    assert corpora["tuples"].name == "a list of 3 pairs"
    assert corpora["two files"].name == f"{files[0]} and {files[1]}"
    assert Corpus.of(corpora["two files"]) is corpora["two files"]
    assert not Corpus.of(["Guten Tag.", "Good day."]).paired


def test_corpus_pairs_chunks_alternate_sources_and_texts() -> None:
    pieces = list(Corpus.of(PAIRS).chunks())
    assert pieces == [TextChunk(text, True) for pair in PAIRS for text in pair]


def test_make_tokenizer_uses_both_sides_of_pairs() -> None:
    tokenizer = make_tokenizer("character", Corpus.of([("ab", "cd"), ("ba", "e")]))
    assert tokenizer.decode(tokenizer.encode("abcde")) == "abcde"
    assert len(tokenizer) == len(character_tokenizer("abcde"))


@FIXED_SETTINGS
@given(st.lists(st.tuples(*[st.text(ODD_CHARACTERS, min_size=1, max_size=6)] * 2), min_size=1, max_size=6))
def test_corpus_pairs_only_newline_ends_line(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    pairs = [(f"{source}.", f"{text}.") for source, text in pairs]  # never blank, and never ending in \r
    sides = ("\n".join(side) for side in zip(*pairs, strict=True))
    # A byte order mark is not part of the text.
    files = write_pair_files(tmp_path_factory.mktemp("pairs"), *(f"\ufeff{side}" for side in sides))
    assert list(Corpus.pairs(*files).items()) == pairs


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_corpus_pairs_strip_line_ends(ends: str, last: bool, tmp_path: Path) -> None:
    files = write_pair_files(tmp_path, f"ab{ends}c d" + ends * last, f"x{ends}y")
    assert list(Corpus.pairs(*files).items()) == [("ab", "x"), ("c d", "y")]


def test_corpus_pairs_block_size_does_not_change_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(f"é{i} a  b" * (i % 4 + 1), f"{i}, 漢") for i in range(40)]
    files = write_pair_files(tmp_path, *("\n".join(side) for side in zip(*pairs, strict=True)))
    monkeypatch.setattr(sys.modules["headwise.text.file_formats"], "READ_BYTES", 7)
    assert list(Corpus.pairs(*files).items()) == pairs


def test_corpus_pairs_fingerprint_changes_with_pair() -> None:
    others = [
        [("a", "b"), ("c", "d")],
        [("b", "a"), ("c", "d")],
        [("c", "d"), ("a", "b")],
        [("a", "c"), ("b", "d")],
        [("a", "b"), ("c", "d ")],
        [("a", "b")],
        [("ab", "c"), ("d", "e")],
        [("a", "bc"), ("d", "e")],
    ]
    assert len({Corpus.of(pairs).fingerprint for pairs in others}) == len(others)


def test_corpus_pairs_fingerprint_changes_with_file(tmp_path: Path) -> None:
    sources, texts = write_pair_files(tmp_path, "a\nb\n", "c\nd\n")
    fingerprints = [Corpus.pairs(*sides).fingerprint for sides in ((sources, texts), (texts, sources))]
    fingerprints += [Corpus.pairs(*sides).fingerprint for sides in ((sources, ["c", "d"]), (["c", "d"], sources))]
    texts.write_text("c\nD\n")
    fingerprints.append(Corpus.pairs(sources, texts).fingerprint)
    sources.write_text("a\nB\n")
    fingerprints.append(Corpus.pairs(sources, texts).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)


# Errors.


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", "b"), ("c", "")], r"pair 2 needs a source and a text.* Got \('c', ''\)"),
        ([(" \t", "b")], "pair 1 needs a source and a text"),
        ([("a", 3)], "pair 1 needs a source and a text"),
        ([("a", None)], "pair 1 needs a source and a text"),
        ([("a", "b"), "c"], "all documents or all pairs"),
        ([("a", "b", "c")], "all documents or all pairs"),
    ],
)
def test_corpus_of_invalid_pair_raises(pairs: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        list(Corpus.of(pairs).items())


def test_corpus_pairs_mismatched_sides_raise(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="Got 2 sources and 1 texts"):
        Corpus.pairs(["a", "b"], ["c"])
    with pytest.raises(HeadwiseError, match="Got 2 sources and 3 texts"):
        Corpus.pairs(*write_pair_files(tmp_path, "a\nb\n", "a\nb\nc\n"))
    with pytest.raises(HeadwiseError, match="Got 3 sources and 2 texts"):  # an empty line counts
        Corpus.pairs(*write_pair_files(tmp_path, "a\nb\n\n", "a\nb\n"))
    with pytest.raises(HeadwiseError, match="pair 2 needs a source and a text"):
        list(Corpus.pairs(*write_pair_files(tmp_path, "a\n\nc\n", "a\nb\nc\n")).items())
    with pytest.raises(HeadwiseError, match="is empty"):
        list(Corpus.pairs(*write_pair_files(tmp_path, "", "")).items())
    with pytest.raises(HeadwiseError, match="a list of 0 pairs is empty"):
        list(Corpus.pairs([], []).items())
    existing = tmp_path / "texts.txt"
    for missing in (tmp_path / "none.txt", tmp_path, "some words"):
        with pytest.raises(HeadwiseError, match=r"file not found.*Corpus\.pairs"):
            Corpus.pairs(missing, existing)
        with pytest.raises(HeadwiseError, match="file not found"):
            Corpus.pairs(existing, missing)
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(HeadwiseError, match=r"latin\.txt, line 2: byte 0xe9 is not UTF-8"):
        Corpus.pairs(["one", "two"], tmp_path / "latin.txt")


def test_corpus_named_reads_command_line_arguments(tmp_path: Path) -> None:
    sources, texts = write_pair_files(tmp_path, "a b\nc d\n", "x y\nz\n")
    assert list(Corpus.from_cli_arguments([texts], sources).items()) == list(
        Corpus.from_cli_arguments([str(texts)], sources).items()
    )
    assert list(Corpus.from_cli_arguments([str(texts)], sources).items()) == [("a b", "x y"), ("c d", "z")]
    for named, want in (
        ([str(texts)], "x y\nz\n"),
        (["some words"], "some words"),
        ([texts, sources], "x y\nz\na b\nc d\n"),
    ):
        assert "".join(piece.text for piece in Corpus.from_cli_arguments(named).chunks()) == want
    assert Corpus.from_cli_arguments(None).name == Corpus.from_cli_arguments([]).name == "the probe set"
    for named, count in (([], 0), (None, 0), ([texts, texts], 2)):
        with pytest.raises(HeadwiseError, match=f"exactly one file of target texts. Got {count} files"):
            Corpus.from_cli_arguments(named, sources)


def test_corpus_pairs_large_files_use_little_memory(tmp_path: Path) -> None:
    line = "a line of some words, " * 40 + "\n"
    files = write_pair_files(tmp_path, line * 60_000, line * 60_000)  # 53 MB each

    def work() -> None:
        assert sum(1 for _ in Corpus.pairs(*files).items()) == 60_000

    assert peak_memory(work) < 25  # of 106 MB


def test_corpus_suits_checks_model_kind() -> None:
    pairs, texts = Corpus.of(PAIRS), Corpus.of(["Good day."])
    pairs.check_model_kind("encoder-decoder")
    for kind in ("decoder", "encoder"):
        texts.check_model_kind(kind)
        with pytest.raises(HeadwiseError, match=f"Got a model of kind {kind}. Give it texts alone"):
            pairs.check_model_kind(kind)
    for corpus in (texts, Corpus.probe_set(), Corpus.synthetic(documents=1)):
        with pytest.raises(HeadwiseError, match=r"needs pairs .*Corpus\.pairs"):
            corpus.check_model_kind("encoder-decoder")


# Special tokens.


def template_tokenizer(template: str | None, **special: int) -> Tokenizer:
    """Return a tokenizer of the letters a to e, after five special tokens. `template` are the tokens around a text."""
    names = ["<pad>", "<unk>", "<s>", "</s>", "<sep>"]
    vocab = {name: i for i, name in enumerate([*names, *"abcde"])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    backend.add_special_tokens(names)
    if template is not None:
        used = [(name, vocab[name]) for name in names if name in template.split()]
        backend.post_processor = processors.TemplateProcessing(template, None, used)  # pyright: ignore
    return Tokenizer(backend, special)


A, B, C = 5, 6, 7
TEMPLATE_CASES: dict[str, tuple[Tokenizer, int | None, tuple[Any, Any], tuple[list[int], list[int]]]] = {
    "bare": (template_tokenizer(None, eos=3), 3, ((), ()), ([A, B, 3], [9, C, 3])),
    "T5": (template_tokenizer("$A </s>", eos=3), 3, ((), (3,)), ([A, B, 3], [9, C, 3])),
    "BART": (template_tokenizer("<s> $A </s>", bos=2, eos=3), 3, ((2,), (3,)), ([2, A, B, 3], [9, 2, C, 3])),
    "BERT": (template_tokenizer("<s> $A <sep>", cls=2, sep=4), 4, ((2,), (4,)), ([2, A, B, 4], [9, 2, C, 4])),
    "starts alone": (template_tokenizer("<s> $A", bos=2, eos=3), 3, ((2,), ()), ([2, A, B, 3], [9, 2, C, 3])),
    "both ends": (
        template_tokenizer("<s> $A <sep>", cls=2, sep=4, eos=3),
        3,
        ((2,), (4,)),
        ([2, A, B, 4, 3], [9, 2, C, 4, 3]),
    ),
    "no end": (template_tokenizer("<s> $A", bos=2), None, ((2,), ()), ([2, A, B], [9, 2, C])),
    "the first id": (template_tokenizer(None, eos=0), 0, ((), ()), ([A, B, 0], [9, C, 0])),
}


@pytest.mark.parametrize("name", TEMPLATE_CASES)
def test_tokenizer_pair_adds_ends_and_decoder_start(name: str) -> None:
    tokenizer, end, around, pair = TEMPLATE_CASES[name]
    assert tokenizer.end_id == end
    assert tokenizer.template_ids == around
    assert tokenizer.wrap_pair([A, B], [C], decoder_start_token=9) == pair
    encoded = tokenizer.encode("a b")
    assert pair[0] == (encoded if end is None or encoded[-1] == end else [*encoded, end])


def test_built_tokenizers_add_no_template() -> None:
    for tokenizer in (byte_tokenizer(), character_tokenizer("abc"), bpe_tokenizer(["abc"] * 9, 260)):
        assert tokenizer.template_ids == ((), ())
        end = tokenizer.eos
        assert end is not None
        assert tokenizer.end_id == end
        assert tokenizer.wrap_pair([1], [2, 2], decoder_start_token=end) == ([1, end], [end, 2, 2, end])


def test_tokenizer_pair_wordpiece_adds_cls_and_sep() -> None:
    tokenizer = Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b"])
    assert tokenizer.end_id == 3
    assert tokenizer.template_ids == ((2,), (3,))
    assert tokenizer.wrap_pair([4], [4, 5], decoder_start_token=3) == ([2, 4, 3], [3, 2, 4, 5, 3])
