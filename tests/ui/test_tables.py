"""Tables at any width have all words and numbers unbroken and no line longer than the terminal."""

from collections import Counter
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from headwise.ui.terminal_table import TextTable, make_table


def print_table(table: TextTable, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def expected_words(table: TextTable, width: int) -> Counter[str]:
    """Count the expected words: the first column once per part, the other columns once."""
    counts = Counter(table.title.split())
    for part in table.column_groups(width):
        for column in part:
            counts.update(word for cell in table.cells(column) for word in cell.plain.split())
    return counts


def assert_not_truncated(table: TextTable, width: int) -> None:
    output = print_table(table, width)
    assert all(len(line) <= width for line in output.splitlines()), output
    printed_words = Counter(word for word in output.split() if set(word) != {"─"})
    assert printed_words == expected_words(table, width), output
    assert sorted({column for part in table.column_groups(width) for column in part}) == list(range(len(table.columns)))


WIDE_TABLE = make_table(
    "Presets, with a title that is itself longer than a line of the narrowest terminal that is tried here, by some words",
    ["preset", "kind", "layers", "heads", "kv_heads", "width", "head_dim", "context", "parameters", "source"],
    [
        ["bert-base", "encoder", 12, 12, 12, 768, 64, 512, 109_482_240, "Devlin et al. 2019, arXiv 1810.04805"],
        ["llama2-70b", "decoder", 80, 64, 8, 8192, 128, 4096, 68_976_648_192, "Touvron et al. 2023, arXiv 2307.09288"],
    ],
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_table_any_width_is_not_truncated(width: int) -> None:
    assert_not_truncated(WIDE_TABLE, width)


def test_table_parts_use_available_width() -> None:
    assert len(WIDE_TABLE.column_groups(160)) == 1
    (part,) = WIDE_TABLE.column_groups(160)
    assert part[9] == len("Touvron et al. 2023, arXiv 2307.09288"), "no cell wraps"
    assert len(WIDE_TABLE.column_groups(80)) == 2
    lengths = [max(map(len, print_table(WIDE_TABLE, width).splitlines())) for width in (80, 100, 120)]
    assert lengths == sorted(lengths)
    assert lengths[2] > 100


def test_make_table_empty_column_is_omitted() -> None:
    assert make_table("", ["a", "b", "c"], [["", "", 1], ["", "", 2]]).columns == ("a", "c"), (
        "the first column names the rows"
    )
    assert make_table("", ["a", "b"], []).columns == ("a", "b")


def test_table_small_p_value_is_not_zero() -> None:
    text = print_table(make_table("Heads", ["head", "p"], [["0.0", 0.0001], ["0.1", 0.0005], ["0.2", 1.0]]), 80)
    assert [line.split()[1] for line in text.splitlines()[-4:] if line.strip()] == ["<0.001", "0.001", "1.000"]


def test_table_cells_are_literal_and_keep_color() -> None:
    table = make_table("[red]t[/red]", ["[b]", "x"], [["[/b]", Text("holds", "green")], ["a", 0.12345]])
    output = print_table(table, 80)
    assert "[red]t[/red]" in output
    assert "[/b]" in output
    assert "0.123" in output
    out = StringIO()
    Console(file=out, width=80, force_terminal=True, color_system="standard").print(table)
    assert "\x1b[32mholds" in out.getvalue()


def test_table_long_word_is_wrapped() -> None:
    path = "a/very/" + "long" * 30
    output = print_table(make_table("", ["file"], [[path]]), 60)
    assert path in "".join(output.split())
    assert "…" not in output


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
def test_table_random_cells_are_not_truncated(width: int, rows: list[tuple]) -> None:
    words = [[" ".join(w[:12] for w in c.split()) if isinstance(c, str) else c for c in row] for row in rows]
    assert_not_truncated(make_table("t", [f"c{i}" for i in range(len(rows[0]))], words), width)
