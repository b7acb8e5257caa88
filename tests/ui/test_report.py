"""The report is one self-contained file, and its data cannot be interpreted as markup."""

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
from headwise.ui.report import bundle_js_modules, render_report_html, write_report
from headwise.ui.report_data import page_files
from tests.runner import run_command
from tests.ui import report_fixtures

MB = 1_000_000


def test_write_report_data_round_trips(tmp_path):
    report_data = report_fixtures.make_report_data(
        2, 3, [report_fixtures.make_sentence(2, 3, 9)], name="</script><script>alert(1)</script>"
    )
    html = write_report(report_data, tmp_path / "deep" / "heads.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.DOTALL)
    assert "<" not in data
    assert json.loads(data) == report_fixtures.round_six_digits(report_data)


def test_make_report_is_self_contained():
    html = render_report_html(report_fixtures.make_report_data(1, 2))
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", html)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"^(?:import|export) ", html, re.MULTILINE)


def test_bundle_modules_names_do_not_collide():
    page = {name: content.decode() for name, content in page_files().items() if name.endswith(".js")}
    names = [
        name
        for source in page.values()
        for name in re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", source, re.MULTILINE)
    ]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}
    for source in page.values():  # every import has the form that the bundler supports
        assert len(re.findall(r"^import ", source, re.MULTILINE)) == len(
            re.findall(r'^import \{[^}]*\} from "\./\w+\.js";\n', source, re.MULTILINE)
        )
    text = bundle_js_modules(page)
    assert all(f"function {name}(" in text for name in ("overview", "heatMap", "livePanel"))


def test_page_scripts_never_insert_markup():
    for name, content in page_files().items():
        if name.endswith(".js"):
            unsafe_calls = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", content.decode()
            )
            assert not unsafe_calls, name


def test_write_report_failure_leaves_existing_files(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(HeadwiseError, match="could not be written"):
        write_report(report_fixtures.make_report_data(1, 1), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "file").read_text() == "mine"


@pytest.mark.usefixtures("few_documents")
def test_profile_command_writes_report(tmp_path):
    torch.manual_seed(0)
    model = hw.Transformer(
        ModelSpec(vocab=300, context=128, layers=2, attention=AttentionSpec(width=12, heads=3, head_dim=4))
    )
    model.tokenizer = byte_tokenizer()
    folder = model.save(tmp_path / "small")
    done = run_command(
        "profile", folder, "It was soft. It sat.", "--no-causal", "--report", tmp_path / "heads.html", "--json"
    )
    heads = json.loads(done.output)["heads"]
    (data,) = re.findall(r'id="report-data">(.*?)</script>', (tmp_path / "heads.html").read_text(), re.DOTALL)
    report_data = json.loads(data)
    assert (report_data["model"]["name"], len(report_data["sentences"])) == ("small", 4)
    assert [(head["address"], head["role"], head["score"]) for head in report_data["heads"]] == [
        (head["address"], head["role"], head["score"]) for head in heads
    ]


def test_make_report_144_heads_128_tokens_below_3_mb():
    sentence = report_fixtures.make_sentence(12, 12, 128)
    assert sentence["form"] == "full"
    assert len(zlib.decompress(b64decode(sentence["maps"]))) == 144 * 128 * 128
    assert len(render_report_html(report_fixtures.make_report_data(12, 12, [sentence])).encode()) <= 3 * MB


@pytest.mark.slow
def test_make_report_1024_heads_512_tokens_below_15_mb():
    sentence = report_fixtures.make_sentence(32, 32, 512)
    assert sentence["form"] == "edges"
    assert len(render_report_html(report_fixtures.make_report_data(32, 32, [sentence])).encode()) <= 15 * MB
