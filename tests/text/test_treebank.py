"""Treebanks, JSON Lines and GAP: what is read, and errors with file and line."""

import json
import os
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.text.documents import Document, Relation
from headwise.text.file_formats import read_stored
from headwise.text.treebank import read_conllu, read_documents, read_gap

DATA = Path(os.environ.get("HEADWISE_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="no data at $HEADWISE_DATA; docs/text.md says where to get it"
)


def row(number: str, form: str, upos: str, head: str, relation: str) -> str:
    return "\t".join([number, form, "_", upos, "_", "_", head, relation, "_", "_"])


TREE = "\n".join(
    [
        "# text = Old dogs don't bark.",
        row("1", "Old", "ADJ", "2", "amod"),
        row("2", "dogs", "NOUN", "5", "nsubj"),
        row("3-4", "don't", "_", "_", "_"),
        row("3", "do", "AUX", "5", "aux"),
        row("4", "n't", "PART", "5", "advmod"),
        row("5", "bark", "VERB", "0", "root"),
        row("5.1", "left-out", "VERB", "_", "_"),
        row("6", ".", "PUNCT", "5", "punct"),
        "",
        row("1", "Yes", "INTJ", "0", "root"),
    ]
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_treebank(tmp_path: Path) -> None:
    first, second = read_documents(write(tmp_path, "a.conllu", TREE))
    assert first.text == "Old dogs don't bark."
    assert first.words == ("Old", "dogs", "do", "n't", "bark", ".")
    assert first.classes == ("ADJ", "NOUN", "AUX", "PART", "VERB", "PUNCT")
    assert first.relations[:2] == (Relation("amod", 0, 1), Relation("nsubj", 1, 4))
    assert first.phrases == ((0, 2), (0, 6))
    assert (second.words, second.relations) == (("Yes",), ())


def test_words_written_otherwise_than_analysed_are_joined(tmp_path: Path) -> None:
    tree = "# text = du vin\n" + "\n".join(
        [row("1", "de", "ADP", "3", "case"), row("2", "le", "DET", "3", "det"), row("3", "vin", "NOUN", "0", "root")]
    )
    (document,) = read_conllu(write(tmp_path, "a.conllu", tree))
    assert document.text == "de le vin"


BROKEN = {
    "columns": (TREE.replace("Old\t_", "Old _", 1), r"a\.conllu, line 2: a CoNLL-U line has 10 columns, this has 9"),
    "head": (TREE.replace("\t2\tamod", "\t9\tamod"), r"a\.conllu, sentence at line 1: word 1 \(Old\) has the head 9"),
    "second sentence": (TREE.replace("Yes\t_", "Yes _"), r"a\.conllu, line 11: a CoNLL-U line has 10 columns"),
    "empty": ("", r"a\.conllu is empty"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_treebank_is_told_by_line(name: str, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    with pytest.raises(HeadwiseError, match=message):
        list(read_conllu(write(tmp_path, "a.conllu", text)))


def documents(path: Path) -> list[Document]:
    return [item for item in read_stored(path) if isinstance(item, Document)]


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        {"words": ["Ann", "saw", "her"], "relations": [["coref", 2, 0]], "classes": ["N", "V", "P"]},
        {"words": ["Go"], "relations": [], "text": "Go!"},
    ]
    one, two = documents(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert (one.text, one.relations, one.classes) == ("Ann saw her", (Relation("coref", 2, 0),), ("N", "V", "P"))
    assert two.text == "Go!"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"words": ["a"], "relations": [["x", 0, 1]]}',
            r"line 2: the relation 'x' points at word 1, but there are 1 words",
        ),
        ('{"words": ["a"]}', r"line 2: expected .*words"),
        ("[1]", r"line 2: expected .*words"),
        ("{", r"line 2: not valid JSON"),
        ('{"words": ["a", "b"], "relations": [], "classes": ["N"]}', r"line 2: there are 2 words and 1 classes"),
    ],
)
def test_a_malformed_line_is_told(line: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"words": ["a"], "relations": []}\n' + line)
    with pytest.raises(HeadwiseError, match=message):
        documents(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"not a file of relations; known: \.conllu, \.tsv"):
        read_documents(tmp_path / "a.txt")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"words": ["a"], "relations": []}\n\xff\xfe\n')
    with pytest.raises(HeadwiseError, match="line 2: not UTF-8"):
        documents(path)


HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def test_gap(tmp_path: Path) -> None:
    text = 'Ann Lee met Eva. "Then she left."'
    case = f"d-1\t{text}\tshe\t{text.index('she')}\tAnn Lee\t0\tTRUE\tEva\t{text.index('Eva')}\tFALSE\thttp://x\n"
    (found,) = read_gap(write(tmp_path, "gap.tsv", HEADER + case))
    words = found.document.words
    assert (words[found.pronoun], [words[i] for i in found.a], [words[i] for i in found.b]) == (
        "she",
        ["Ann", "Lee"],
        ["Eva"],
    )
    assert (found.answer, found.nearer) == ("A", "B")
    assert found.document.relations == (Relation("coref", found.pronoun, 1),)
    with pytest.raises(HeadwiseError, match=r"gap\.tsv, line 2: 'she' does not stand at character 3"):
        list(read_gap(write(tmp_path, "gap.tsv", HEADER + case.replace(f"she\t{text.index('she')}", "she\t3"))))
    with pytest.raises(HeadwiseError, match=r"line 1: the columns Text, .* are missing"):
        list(read_gap(write(tmp_path, "gap.tsv", "a\tb\n")))


@needs_data
def test_the_real_files_are_read_whole() -> None:
    trees = list(read_documents(DATA / "ud-english-ewt" / "en_ewt-ud-test.conllu"))
    text = (DATA / "ud-english-ewt" / "en_ewt-ud-test.conllu").read_text(encoding="utf-8")
    assert len(trees) == text.count("# sent_id")
    assert sum(len(tree.words) for tree in trees) == sum(line.split("\t")[0].isdigit() for line in text.splitlines())
    cases = list(read_gap(DATA / "gap-coreference" / "gap-development.tsv"))
    assert len(cases) == 2000
    assert all(
        case.document.words[case.pronoun].lower().split("'")[0] in {"he", "she", "him", "her", "his", "hers"}
        for case in cases
    )
