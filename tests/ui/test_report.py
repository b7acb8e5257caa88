"""The report: one file, nothing fetched, nothing in the data that a browser could take for markup."""

import json
import re
import zlib
from base64 import b64decode

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.report import joined, make_report, write_report
from headwise.ui.report_data import page_files
from tests.runner import headwise
from tests.ui import report_fixtures

MB = 1_000_000


def test_the_book_comes_back_as_it_went_in(tmp_path):
    book = report_fixtures.make_book(
        2, 3, [report_fixtures.make_sentence(2, 3, 9)], name="</script><script>alert(1)</script>"
    )
    made = write_report(book, tmp_path / "deep" / "heads.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="book">(.*?)</script>', made, re.DOTALL)
    assert "<" not in data
    assert json.loads(data) == report_fixtures.six_digits(book)


def test_nothing_is_fetched_and_nothing_is_left_of_the_modules():
    made = make_report(report_fixtures.make_book(1, 2))
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", made)
    assert "http" not in made.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"^(?:import|export) ", made, re.MULTILINE)


def test_modules_share_one_scope_without_colliding():
    page = {name: content.decode() for name, content in page_files().items() if name.endswith(".js")}
    names = [
        name
        for source in page.values()
        for name in re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", source, re.MULTILINE)
    ]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}
    for source in page.values():  # every import has the one form that joining knows
        assert len(re.findall(r"^import ", source, re.MULTILINE)) == len(
            re.findall(r'^import \{[^}]*\} from "\./\w+\.js";\n', source, re.MULTILINE)
        )
    text = joined(page)
    assert all(f"function {name}(" in text for name in ("overview", "heatMap", "livePanel"))


def test_data_never_enters_as_markup():
    for name, content in page_files().items():
        if name.endswith(".js"):
            found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", content.decode())
            assert not found, name


def test_a_report_that_cannot_be_written_leaves_what_was_there(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(HeadwiseError, match="nothing was changed"):
        write_report(report_fixtures.make_book(1, 1), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "file").read_text() == "mine"


@pytest.mark.usefixtures("few_documents")
def test_a_verb_writes_the_report_of_a_model(tmp_path):
    torch.manual_seed(0)
    model = hw.Transformer(
        ModelSpec(vocab=300, context=128, layers=2, attention=AttentionSpec(width=12, heads=3, head_dim=4))
    )
    model.tokenizer = byte_tokenizer()
    folder = model.save(tmp_path / "small")
    done = headwise(
        "heads", folder, "It was soft. It sat.", "--no-causal", "--report", tmp_path / "heads.html", "--json"
    )
    told = json.loads(done.told)["heads"]
    (data,) = re.findall(r'id="book">(.*?)</script>', (tmp_path / "heads.html").read_text(), re.DOTALL)
    book = json.loads(data)
    assert (book["model"]["name"], len(book["sentences"])) == ("small", 4)
    assert [(one["address"], one["role"], one["score"]) for one in book["heads"]] == [
        (one["address"], one["role"], one["score"]) for one in told
    ]


def test_a_report_of_144_heads_at_128_tokens_stays_below_3_MB():
    sentence = report_fixtures.make_sentence(12, 12, 128)
    assert sentence["form"] == "whole"
    assert len(zlib.decompress(b64decode(sentence["maps"]))) == 144 * 128 * 128
    assert len(make_report(report_fixtures.make_book(12, 12, [sentence])).encode()) <= 3 * MB


@pytest.mark.slow
def test_a_report_of_1024_heads_at_512_tokens_stays_below_15_MB():
    sentence = report_fixtures.make_sentence(32, 32, 512)
    assert sentence["form"] == "edges"
    assert len(make_report(report_fixtures.make_book(32, 32, [sentence])).encode()) <= 15 * MB
