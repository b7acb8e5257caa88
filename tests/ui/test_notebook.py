"""In a notebook things show themselves: plain HTML everywhere, a widget where a kernel runs and anywidget is there."""

import re
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.widget import attended_data, can_widget, profile_data
from tests.analysis.constructed_heads import DECODER, decoder, documents

SCRIPT = Path(hw.__file__).parent / "show" / "widget.js"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return hw.profile(decoder(), documents(), causal=False)


def test_a_profile_is_a_grid(profile: Profile) -> None:
    shown = profile._repr_html_()
    titles = re.findall(r'<td title="([^"]*)"', shown)
    assert [title.split(":")[0] for title in titles] == list(DECODER)
    assert all(role in title for title, (role, _) in zip(titles, DECODER.values(), strict=True))
    assert "<script" not in shown


def test_a_story_is_sentences_with_pointers(profile: Profile) -> None:
    for address in DECODER:
        told = profile.story(address)
        assert f"Head {address}" in str(told)
        shown = told._repr_html_()
        assert shown.count("<li>") == len(told.lines) == shown.count("docs/look.md#")


def test_a_head_shows_its_matrices() -> None:
    model = hw.Transformer(hw.preset("nano"))
    head = model.heads["5.1"]
    shown = head._repr_html_()  # pyright: ignore[reportAttributeAccessIssue]
    rows, columns = head.W_Q.shape  # pyright: ignore[reportAttributeAccessIssue]
    assert f"<td>{rows} × {columns}</td>" in shown
    assert shown.count("<rect") == 2 * columns, "as many singular values as the head has channels, of QK and of OV"


def test_a_sentence_is_words_and_lines() -> None:
    seen = hw.attend(decoder(), "1 w0x <b>& w2x", "0.0")
    shown = seen._repr_html_()
    strong = (torch.as_tensor(seen.map("0.0")) >= 0.02).sum()
    assert shown.count("<line") == strong
    assert "<b>" not in shown, "a word is never markup"
    several = hw.attend(decoder(), "1 w0x w1x w2x")
    assert several._repr_html_().count("<svg") <= 4
    assert "of 12 heads" in several._repr_html_()


def test_without_a_kernel_there_is_no_widget(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "ipykernel", raising=False)
    assert not can_widget()
    assert profile._repr_mimebundle_() == {}


def test_what_the_widget_gets_is_what_was_measured(profile: Profile) -> None:
    heads = {head["head"]: head for head in profile_data(profile)["heads"]}
    assert list(heads) == list(DECODER)
    assert all(heads[head]["role"].startswith(role) for head, (role, _) in DECODER.items())
    seen = hw.attend(decoder(), "1 w0x w1x w2x", "0.0,1.2")
    told = attended_data(seen)["maps"]["0.0"]
    torch.testing.assert_close(torch.tensor(told["weights"]), seen.map("0.0"), atol=5.1e-4, rtol=0)
    assert told["looking"] == list(seen.words)


def test_the_script_asks_for_nothing_from_outside() -> None:
    script = SCRIPT.read_text()
    assert not re.search(r"import |fetch\(|innerHTML|https?://(?!www\.w3\.org)", script)


@pytest.mark.slow
def test_a_notebook_runs_and_shows_widgets() -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("anywidget")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        "import headwise as hw\nfrom tests.analysis.constructed_heads import decoder, documents\nmodel = decoder()",
        "hw.profile(model, documents(20), causal=False)",
        "hw.attend(model, '1 w0x w1x w2x', '0.0')",
        "model.heads['1.1']",
        "hw.profile(model, documents(20), causal=False).plot.roles()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    root = str(Path(hw.__file__).parents[1])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": root}}).execute()
    shown = [{kind for out in cell.outputs for kind in out.get("data", {})} for cell in book.cells]
    widget = "application/vnd.jupyter.widget-view+json"
    assert {widget, "text/html"} <= shown[1]
    assert {widget, "text/html"} <= shown[2]
    assert "text/html" in shown[3]
    assert widget not in shown[3]
    assert "image/png" in shown[4]
