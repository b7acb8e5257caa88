"""Treebanks, JSON Lines and GAP: contents, and errors with file and line."""

import json
import os
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.text.annotated_document import Document, Relation
from headwise.text.annotated_documents import read_conllu, read_documents, read_gap
from headwise.text.file_formats import read_corpus_file

DATA = Path(os.environ.get("HEADWISE_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="no data at $HEADWISE_DATA; docs/text.md says where to get it"
)


def conllu_row(index: str, form: str, upos: str, head: str, relation: str) -> str:
    return "\t".join([index, form, "_", upos, "_", "_", head, relation, "_", "_"])


TREE = "\n".join(
    [
        "# text = Old dogs don't bark.",
        conllu_row("1", "Old", "ADJ", "2", "amod"),
        conllu_row("2", "dogs", "NOUN", "5", "nsubj"),
        conllu_row("3-4", "don't", "_", "_", "_"),
        conllu_row("3", "do", "AUX", "5", "aux"),
        conllu_row("4", "n't", "PART", "5", "advmod"),
        conllu_row("5", "bark", "VERB", "0", "root"),
        conllu_row("5.1", "left-out", "VERB", "_", "_"),
        conllu_row("6", ".", "PUNCT", "5", "punct"),
        "",
        conllu_row("1", "Yes", "INTJ", "0", "root"),
    ]
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_read_documents_conllu(tmp_path: Path) -> None:
    first, second = read_documents(write(tmp_path, "a.conllu", TREE))
    assert first.text == "Old dogs don't bark."
    assert first.words == ("Old", "dogs", "do", "n't", "bark", ".")
    assert first.classes == ("ADJ", "NOUN", "AUX", "PART", "VERB", "PUNCT")
    assert first.relations[:2] == (Relation("amod", 0, 1), Relation("nsubj", 1, 4))
    assert first.phrases == ((0, 2), (0, 6))
    assert (second.words, second.relations) == (("Yes",), ())


def test_read_conllu_words_not_in_text_are_joined(tmp_path: Path) -> None:
    tree = "# text = du vin\n" + "\n".join(
        [
            conllu_row("1", "de", "ADP", "3", "case"),
            conllu_row("2", "le", "DET", "3", "det"),
            conllu_row("3", "vin", "NOUN", "0", "root"),
        ]
    )
    (document,) = read_conllu(write(tmp_path, "a.conllu", tree))
    assert document.text == "de le vin"


BROKEN = {
    "columns": (TREE.replace("Old\t_", "Old _", 1), r"a\.conllu, line 2: a CoNLL-U line has 10 columns\. Got 9"),
    "head": (TREE.replace("\t2\tamod", "\t9\tamod"), r"a\.conllu, sentence at line 1: word 1 \(Old\).* is 9"),
    "second sentence": (TREE.replace("Yes\t_", "Yes _"), r"a\.conllu, line 11: a CoNLL-U line has 10 columns"),
    "empty": ("", r"a\.conllu: the file is empty"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_read_conllu_malformed_file_raises_with_line(name: str, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    with pytest.raises(HeadwiseError, match=message):
        list(read_conllu(write(tmp_path, "a.conllu", text)))


def documents(path: Path) -> list[Document]:
    return [item for item in read_corpus_file(path) if isinstance(item, Document)]


def test_read_stored_json_lines_documents(tmp_path: Path) -> None:
    lines = [
        {"words": ["Ann", "saw", "her"], "relations": [["coref", 2, 0]], "classes": ["N", "V", "P"]},
        {"words": ["Go"], "relations": [], "text": "Go!"},
    ]
    first, second = documents(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert (first.text, first.relations, first.classes) == ("Ann saw her", (Relation("coref", 2, 0),), ("N", "V", "P"))
    assert second.text == "Go!"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"words": ["a"], "relations": [["x", 0, 1]]}',
            r"line 2: relations: the relation 'x' refers to word 1\. Got 1 words",
        ),
        ('{"words": ["a"]}', r"line 2: not a document with relations.*words"),
        ("[1]", r"line 2: not a document with relations.*words"),
        ("{", r"line 2: not valid JSON"),
        ('{"words": ["a", "b"], "relations": [], "classes": ["N"]}', r"line 2: classes: .*Got 2 words and 1 classes"),
    ],
)
def test_read_stored_malformed_line_raises(line: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"words": ["a"], "relations": []}\n' + line)
    with pytest.raises(HeadwiseError, match=message):
        documents(path)


def test_read_documents_other_files_raise(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"no relations between words.*\.conllu or \.tsv"):
        read_documents(tmp_path / "a.txt")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"words": ["a"], "relations": []}\n\xff\xfe\n')
    with pytest.raises(HeadwiseError, match="line 2: not UTF-8"):
        documents(path)


HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def test_read_gap_pronoun_and_names(tmp_path: Path) -> None:
    text = 'Ann Lee met Eva. "Then she left."'
    gap_row = f"d-1\t{text}\tshe\t{text.index('she')}\tAnn Lee\t0\tTRUE\tEva\t{text.index('Eva')}\tFALSE\thttp://x\n"
    (example,) = read_gap(write(tmp_path, "gap.tsv", HEADER + gap_row))
    words = example.document.words
    assert (words[example.pronoun], [words[i] for i in example.a], [words[i] for i in example.b]) == (
        "she",
        ["Ann", "Lee"],
        ["Eva"],
    )
    assert (example.answer, example.nearest_name_answer) == ("A", "B")
    assert example.document.relations == (Relation("coref", example.pronoun, 1),)
    with pytest.raises(HeadwiseError, match=r"gap\.tsv, line 2: .*'she' does not begin at character 3"):
        list(read_gap(write(tmp_path, "gap.tsv", HEADER + gap_row.replace(f"she\t{text.index('she')}", "she\t3"))))
    with pytest.raises(HeadwiseError, match=r"line 1: the columns Text, .* are missing"):
        list(read_gap(write(tmp_path, "gap.tsv", "a\tb\n")))


@needs_data
def test_read_documents_and_gap_real_files_are_complete() -> None:
    trees = list(read_documents(DATA / "ud-english-ewt" / "en_ewt-ud-test.conllu"))
    text = (DATA / "ud-english-ewt" / "en_ewt-ud-test.conllu").read_text(encoding="utf-8")
    assert len(trees) == text.count("# sent_id")
    assert sum(len(tree.words) for tree in trees) == sum(line.split("\t")[0].isdigit() for line in text.splitlines())
    examples = list(read_gap(DATA / "gap-coreference" / "gap-development.tsv"))
    assert len(examples) == 2000
    assert all(
        example.document.words[example.pronoun].lower().split("'")[0] in {"he", "she", "him", "her", "his", "hers"}
        for example in examples
    )
