"""Tables at any width: every word and number is there, none broken, and no line is longer than the terminal."""

from collections import Counter
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from headwise.ui.tables import Sheet, make_table


def printed(sheet: Sheet, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width).print(sheet)
    return out.getvalue()


def words_of(sheet: Sheet, width: int) -> Counter[str]:
    """Every word that has to stand there: the first column in each part, the others once."""
    met = Counter(sheet.title.split())
    for part in sheet.parts(width):
        for column in part:
            met.update(word for cell in sheet.cells(column) for word in cell.plain.split())
    return met


def assert_whole(sheet: Sheet, width: int) -> None:
    said = printed(sheet, width)
    assert all(len(line) <= width for line in said.splitlines()), said
    there = Counter(word for word in said.split() if set(word) != {"─"})
    assert there == words_of(sheet, width), said
    assert sorted({column for part in sheet.parts(width) for column in part}) == list(range(len(sheet.columns)))


WIDE = make_table(
    "Presets, with a title that is itself longer than a line of the narrowest terminal that is tried here, by some words",
    ["preset", "kind", "layers", "heads", "kv_heads", "width", "head_dim", "context", "parameters", "source"],
    [
        ["bert-base", "encoder", 12, 12, 12, 768, 64, 512, 109_482_240, "Devlin et al. 2019, arXiv 1810.04805"],
        ["llama2-70b", "decoder", 80, 64, 8, 8192, 128, 4096, 68_976_648_192, "Touvron et al. 2023, arXiv 2307.09288"],
    ],
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_nothing_is_cut(width: int) -> None:
    assert_whole(WIDE, width)


def test_what_fits_is_one_table_without_wrapping_and_uses_the_width() -> None:
    assert len(WIDE.parts(160)) == 1
    (part,) = WIDE.parts(160)
    assert part[9] == len("Touvron et al. 2023, arXiv 2307.09288"), "nothing has to be wrapped"
    assert len(WIDE.parts(80)) == 2
    lengths = [max(map(len, printed(WIDE, width).splitlines())) for width in (80, 100, 120)]
    assert lengths == sorted(lengths)
    assert lengths[2] > 100


def test_a_column_without_anything_in_it_is_left_out() -> None:
    assert make_table("", ["a", "b", "c"], [["", "", 1], ["", "", 2]]).columns == ("a", "c"), "the first names the rows"
    assert make_table("", ["a", "b"], []).columns == ("a", "b")


def test_cells_are_printed_as_they_are_and_text_keeps_its_colour() -> None:
    sheet = make_table("[red]t[/red]", ["[b]", "x"], [["[/b]", Text("holds", "green")], ["a", 0.12345]])
    said = printed(sheet, 80)
    assert "[red]t[/red]" in said
    assert "[/b]" in said
    assert "0.123" in said
    out = StringIO()
    Console(file=out, width=80, force_terminal=True, color_system="standard").print(sheet)
    assert "\x1b[32mholds" in out.getvalue()


def test_a_word_longer_than_half_a_line_is_folded_never_cut() -> None:
    path = "a/very/" + "long" * 30
    said = printed(make_table("", ["file"], [[path]]), 60)
    assert path in "".join(said.split())
    assert "…" not in said


@settings(max_examples=40, deadline=None)
@given(
    st.integers(40, 130),
    st.integers(1, 9).flatmap(
        lambda n: st.lists(
            st.tuples(*[st.one_of(st.integers(-999, 10**9), st.text("ab c", max_size=30)) for _ in range(n)]),
            min_size=1, max_size=4,
        )
    ),
)  # fmt: skip
def test_any_table_is_whole(width: int, rows: list[tuple]) -> None:
    words = [[" ".join(w[:12] for w in c.split()) if isinstance(c, str) else c for c in row] for row in rows]
    assert_whole(make_table("t", [f"c{i}" for i in range(len(rows[0]))], words), width)
