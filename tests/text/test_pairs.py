"""Pairs of a source and a text: read from lists or files, line by line, and dressed as an encoder-decoder reads them."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from headwise.errors import HeadwiseError
from headwise.experiments.engine.memory import rise
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer, make_tokenizer
from headwise.text.corpus import Pair, Piece
from tests.contract.variants import FIXED

PAIRS = [("Guten Tag.", "Good day."), ("ja", "yes, indeed"), ("Wer kommt?", "Who?")]
ODD = " \t\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u2029\ufeffab.é漢🙂"  # none of these ends a line


def write(folder: Path, sources: str, texts: str) -> tuple[Path, Path]:
    """Two files, byte by byte as given."""
    for name, content in (("sources", sources), ("texts", texts)):
        (folder / f"{name}.txt").write_bytes(content.encode())
    return folder / "sources.txt", folder / "texts.txt"


# Where pairs come from.


def test_lists_files_and_a_mix_are_the_same_pairs(tmp_path: Path) -> None:
    sources, texts = (list(side) for side in zip(*PAIRS, strict=True))
    files = write(tmp_path, "\n".join(sources) + "\n", "\n".join(texts) + "\n")
    made = {
        "tuples": Corpus.of(PAIRS),
        "a generator": Corpus.of(pair for pair in PAIRS),
        "named tuples": Corpus.of([Pair(*pair) for pair in PAIRS]),
        "two lists": Corpus.pairs(sources, texts),
        "two files": Corpus.pairs(*files),
        "two names": Corpus.pairs(str(files[0]), str(files[1])),
        "a file and a list": Corpus.pairs(files[0], texts),
    }
    for name, corpus in made.items():
        assert corpus.paired, name
        assert list(corpus.items()) == list(corpus.items()) == PAIRS, name  # as often as asked
        assert all(isinstance(item, Pair) for item in corpus.items()), name
    for one, other in (("tuples", "two lists"), ("tuples", "named tuples"), ("two files", "two names")):
        assert made[one].fingerprint == made[other].fingerprint
    assert made["tuples"].name == "a list of 3 pairs"
    assert made["two files"].name == f"{files[0]} and {files[1]}"
    assert Corpus.of(made["two files"]) is made["two files"]
    assert not Corpus.of(["Guten Tag.", "Good day."]).paired


def test_pieces_are_sources_and_texts_by_turns() -> None:
    pieces = list(Corpus.of(PAIRS).pieces())
    assert pieces == [Piece(text, True) for pair in PAIRS for text in pair]


def test_a_tokenizer_is_made_from_both_sides() -> None:
    made = make_tokenizer("character", Corpus.of([("ab", "cd"), ("ba", "e")]))
    assert made.decode(made.encode("abcde")) == "abcde"
    assert len(made) == len(character_tokenizer("abcde"))


@FIXED
@given(st.lists(st.tuples(*[st.text(ODD, min_size=1, max_size=6)] * 2), min_size=1, max_size=6))
def test_only_a_new_line_ends_a_line(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    pairs = [(f"{source}.", f"{text}.") for source, text in pairs]  # never blank, and never ending in \r
    sides = ("\n".join(side) for side in zip(*pairs, strict=True))
    files = write(
        tmp_path_factory.mktemp("pairs"), *(f"\ufeff{side}" for side in sides)
    )  # the mark of a file is no text
    assert list(Corpus.pairs(*files).items()) == pairs


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_are_no_part_of_a_text(ends: str, last: bool, tmp_path: Path) -> None:
    files = write(tmp_path, f"ab{ends}c d" + ends * last, f"x{ends}y")
    assert list(Corpus.pairs(*files).items()) == [("ab", "x"), ("c d", "y")]


def test_a_file_read_in_many_blocks_gives_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(f"é{i} a  b" * (i % 4 + 1), f"{i}, 漢") for i in range(40)]
    files = write(tmp_path, *("\n".join(side) for side in zip(*pairs, strict=True)))
    monkeypatch.setattr(sys.modules["headwise.text.file_formats"], "BLOCK", 7)
    assert list(Corpus.pairs(*files).items()) == pairs


def test_the_fingerprint_changes_when_a_pair_does() -> None:
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


def test_the_fingerprint_changes_when_a_file_does(tmp_path: Path) -> None:
    sources, texts = write(tmp_path, "a\nb\n", "c\nd\n")
    seen = [Corpus.pairs(*given).fingerprint for given in ((sources, texts), (texts, sources))]
    seen += [Corpus.pairs(*given).fingerprint for given in ((sources, ["c", "d"]), (["c", "d"], sources))]
    texts.write_text("c\nD\n")
    seen.append(Corpus.pairs(sources, texts).fingerprint)
    sources.write_text("a\nB\n")
    seen.append(Corpus.pairs(sources, texts).fingerprint)
    assert len(set(seen)) == len(seen)


# What is refused.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", "b"), ("c", "")], r"pair 2 lacks a text: \('c', ''\); leave it out on both sides"),
        ([(" \t", "b")], "pair 1 lacks a text"),
        ([("a", 3)], "pair 1 lacks a text"),
        ([("a", None)], "pair 1 lacks a text"),
        ([("a", "b"), "c"], "a corpus is a text, a list of texts or a path; got"),
        ([("a", "b", "c")], "a corpus is a text, a list of texts or a path; got"),
    ],
)
def test_what_is_no_pair_is_refused(given: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        list(Corpus.of(given).items())


def test_two_sides_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="there are 2 sources and 1 texts; each source needs its text"):
        Corpus.pairs(["a", "b"], ["c"])
    with pytest.raises(HeadwiseError, match="there are 2 sources and 3 texts"):
        Corpus.pairs(*write(tmp_path, "a\nb\n", "a\nb\nc\n"))
    with pytest.raises(HeadwiseError, match="there are 3 sources and 2 texts"):  # an empty line is a line
        Corpus.pairs(*write(tmp_path, "a\nb\n\n", "a\nb\n"))
    with pytest.raises(HeadwiseError, match="pair 2 lacks a text"):
        list(Corpus.pairs(*write(tmp_path, "a\n\nc\n", "a\nb\nc\n")).items())
    with pytest.raises(HeadwiseError, match="is empty"):
        list(Corpus.pairs(*write(tmp_path, "", "")).items())
    with pytest.raises(HeadwiseError, match="a list of 0 pairs is empty"):
        list(Corpus.pairs([], []).items())
    there = tmp_path / "texts.txt"
    for missing in (tmp_path / "none.txt", tmp_path, "some words"):
        with pytest.raises(
            HeadwiseError, match=r"there is no file .*; pairs are two files, line by line, or two lists"
        ):
            Corpus.pairs(missing, there)
        with pytest.raises(HeadwiseError, match="there is no file"):
            Corpus.pairs(there, missing)
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(HeadwiseError, match=r"latin\.txt, line 2: byte 0xe9 is not UTF-8"):
        Corpus.pairs(["one", "two"], tmp_path / "latin.txt")


def test_what_a_command_line_names(tmp_path: Path) -> None:
    sources, texts = write(tmp_path, "a b\nc d\n", "x y\nz\n")
    assert list(Corpus.named([texts], sources).items()) == list(Corpus.named([str(texts)], sources).items())
    assert list(Corpus.named([str(texts)], sources).items()) == [("a b", "x y"), ("c d", "z")]
    for named, want in (
        ([str(texts)], "x y\nz\n"),
        (["some words"], "some words"),
        ([texts, sources], "x y\nz\na b\nc d\n"),
    ):
        assert "".join(piece.text for piece in Corpus.named(named).pieces()) == want
    assert Corpus.named(None).name == Corpus.named([]).name == "the probe set"
    for named, count in (([], 0), (None, 0), ([texts, texts], 2)):
        with pytest.raises(HeadwiseError, match=f"a source belongs to one file, .* got {count} files"):
            Corpus.named(named, sources)


def test_pairs_are_read_line_by_line_never_whole(tmp_path: Path) -> None:
    line = "a line of some words, " * 40 + "\n"
    files = write(tmp_path, line * 60_000, line * 60_000)  # 53 MB each

    def work() -> None:
        assert sum(1 for _ in Corpus.pairs(*files).items()) == 60_000

    assert rise(work) < 25  # of 106


def test_which_model_a_corpus_suits() -> None:
    pairs, texts = Corpus.of(PAIRS), Corpus.of(["Good day."])
    pairs.suits("encoder-decoder")
    for kind in ("decoder", "encoder"):
        texts.suits(kind)
        with pytest.raises(HeadwiseError, match=f"are for an encoder-decoder; give this {kind} texts alone"):
            pairs.suits(kind)
    for corpus in (texts, Corpus.probe(), Corpus.little(documents=1)):
        with pytest.raises(HeadwiseError, match=r"needs pairs: .*Corpus\.pairs"):
            corpus.suits("encoder-decoder")


# As a model reads them.


def dressing(template: str | None, **special: int) -> Tokenizer:
    """Letters a to e, behind five tokens of other uses; `template` is what is put around a text."""
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
DRESSED: dict[str, tuple[Tokenizer, int | None, tuple[Any, Any], tuple[list[int], list[int]]]] = {
    "bare": (dressing(None, eos=3), 3, ((), ()), ([A, B, 3], [9, C, 3])),
    "T5": (dressing("$A </s>", eos=3), 3, ((), (3,)), ([A, B, 3], [9, C, 3])),
    "BART": (dressing("<s> $A </s>", bos=2, eos=3), 3, ((2,), (3,)), ([2, A, B, 3], [9, 2, C, 3])),
    "BERT": (dressing("<s> $A <sep>", cls=2, sep=4), 4, ((2,), (4,)), ([2, A, B, 4], [9, 2, C, 4])),
    "starts alone": (dressing("<s> $A", bos=2, eos=3), 3, ((2,), ()), ([2, A, B, 3], [9, 2, C, 3])),
    "both ends": (dressing("<s> $A <sep>", cls=2, sep=4, eos=3), 3, ((2,), (4,)), ([2, A, B, 4, 3], [9, 2, C, 4, 3])),
    "no end": (dressing("<s> $A", bos=2), None, ((2,), ()), ([2, A, B], [9, 2, C])),
    "the first id": (dressing(None, eos=0), 0, ((), ()), ([A, B, 0], [9, C, 0])),
}


@pytest.mark.parametrize("name", DRESSED)
def test_both_sides_end_and_only_the_text_has_a_start(name: str) -> None:
    tokenizer, end, around, pair = DRESSED[name]
    assert tokenizer.end == end
    assert tokenizer.around == around
    assert tokenizer.pair([A, B], [C], start=9) == pair
    whole = tokenizer.encode("a b")
    assert pair[0] == (whole if end is None or whole[-1] == end else [*whole, end])


def test_tokenizers_made_here_put_nothing_around_a_text() -> None:
    for tokenizer in (byte_tokenizer(), character_tokenizer("abc"), bpe_tokenizer(["abc"] * 9, 260)):
        assert tokenizer.around == ((), ())
        end = tokenizer.eos
        assert end is not None
        assert tokenizer.end == end
        assert tokenizer.pair([1], [2, 2], start=end) == ([1, end], [end, 2, 2, end])


def test_berts_pieces() -> None:
    tokenizer = Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b"])
    assert tokenizer.end == 3
    assert tokenizer.around == ((2,), (3,))
    assert tokenizer.pair([4], [4, 5], start=3) == ([2, 4, 3], [3, 2, 4, 5, 3])
