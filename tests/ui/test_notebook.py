"""Notebook views: plain HTML everywhere, and a widget if a kernel runs and anywidget is installed."""

import re
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.widget import attention_widget_data, is_widget_available, profile_widget_data
from tests.analysis.constructed_heads import DECODER, decoder, documents

SCRIPT = Path(hw.__file__).parent / "ui" / "widget.js"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return hw.profile(decoder(), documents(), causal=False)


def test_profile_html_is_grid(profile: Profile) -> None:
    html = profile._repr_html_()
    titles = re.findall(r'<td title="([^"]*)"', html)
    assert [title.split(":")[0] for title in titles] == list(DECODER)
    assert all(role in title for title, (role, _) in zip(titles, DECODER.values(), strict=True))
    assert "<script" not in html


def test_head_summary_html_links_docs(profile: Profile) -> None:
    for address in DECODER:
        summary = profile.summary(address)
        assert f"Head {address}" in str(summary)
        html = summary._repr_html_()
        assert html.count("<li>") == len(summary.lines) == html.count("docs/analysis")


def test_head_html_shows_matrices() -> None:
    model = hw.Transformer(hw.preset("nano"))
    head = model.heads["5.1"]
    html = head._repr_html_()  # pyright: ignore[reportAttributeAccessIssue]
    rows, columns = head.W_Q.shape  # pyright: ignore[reportAttributeAccessIssue]
    assert f"<td>{rows} × {columns}</td>" in html
    assert html.count("<rect") == 2 * columns, "one singular value per channel of the head, for QK and for OV"


def test_attention_view_html_shows_words_and_lines() -> None:
    view = hw.attention_maps(decoder(), "1 w0x <b>& w2x", "0.0")
    html = view._repr_html_()
    strong = (torch.as_tensor(view.map("0.0")) >= 0.02).sum()
    assert html.count("<line") == strong
    assert "<b>" not in html, "text is escaped"
    all_heads = hw.attention_maps(decoder(), "1 w0x w1x w2x")
    assert all_heads._repr_html_().count("<svg") <= 4
    assert "of 12 heads" in all_heads._repr_html_()


def test_widget_without_kernel_is_not_used(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "ipykernel", raising=False)
    assert not is_widget_available()
    assert profile._repr_mimebundle_() == {}


def test_widget_data_equals_analysis(profile: Profile) -> None:
    heads = {head["head"]: head for head in profile_widget_data(profile)["heads"]}
    assert list(heads) == list(DECODER)
    assert all(heads[head]["role"].startswith(role) for head, (role, _) in DECODER.items())
    view = hw.attention_maps(decoder(), "1 w0x w1x w2x", "0.0,1.2")
    map_data = attention_widget_data(view)["maps"]["0.0"]
    torch.testing.assert_close(torch.tensor(map_data["weights"]), view.map("0.0"), atol=5.1e-4, rtol=0)
    assert map_data["queries"] == list(view.words)


def test_widget_script_loads_nothing_external() -> None:
    script = SCRIPT.read_text()
    assert not re.search(r"import |fetch\(|innerHTML|https?://(?!www\.w3\.org)", script)


@pytest.mark.slow
def test_notebook_executes_and_shows_widgets() -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("anywidget")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        "import headwise as hw\nfrom tests.analysis.constructed_heads import decoder, documents\nmodel = decoder()",
        "hw.profile(model, documents(20), causal=False)",
        "hw.attention_maps(model, '1 w0x w1x w2x', '0.0')",
        "model.heads['1.1']",
        "hw.profile(model, documents(20), causal=False).plot.roles()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    root = str(Path(hw.__file__).parents[1])
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": root}}).execute()
    mime_types = [{kind for out in cell.outputs for kind in out.get("data", {})} for cell in notebook.cells]
    widget = "application/vnd.jupyter.widget-view+json"
    assert {widget, "text/html"} <= mime_types[1]
    assert {widget, "text/html"} <= mime_types[2]
    assert "text/html" in mime_types[3]
    assert widget not in mime_types[3]
    assert "image/png" in mime_types[4]
