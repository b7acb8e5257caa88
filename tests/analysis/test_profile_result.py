"""What a profile answers about layers, those without heads too."""

from dataclasses import replace
from io import StringIO

import numpy as np
from rich.console import Console

from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import TABLE, Support, role_names
from headwise.text.documents import Document, Relation
from headwise.ui.head_grid import grid
from headwise.ui.heads_view import show_profile
from tests.analysis.test_profile_invariance import LITTLE, little


def test_a_layer_without_heads_is_there_and_empty(tmp_path) -> None:
    model = little(layers=3, kept={"0": (0, 3), "1": (), "2": (1,)})
    made = profile(model, LITTLE, causal=False)
    entropy = made.measure("entropy")
    expected = [entropy[:2].mean(), np.nan, entropy[2]]
    np.testing.assert_allclose(made.by_layer("entropy"), expected, rtol=1e-12)
    shown = grid(made, {str(address) for address in made.addresses}).plain.splitlines()
    assert shown == [
        "   head   0  1  2  3", "      0  ··       ··", "      1  no heads", "      2     ~~      ",
    ], "columns have numbers, and a head that was cut leaves a gap"  # fmt: skip
    assert len(grid(made, {"2.1"}).plain.splitlines()) == 3, (
        "a layer nobody asked for is left out; an empty one is told"
    )
    assert [line[:8] for line in grid(made, {"2.1"}, width=14).plain.splitlines()] == [
        "   head ", "      1 ", "      2 ", "   head ", "      1 ", "      2 ",
    ], "wide grids go on below"  # fmt: skip
    back = Profile.load(made.save(tmp_path / "made.npz"))
    np.testing.assert_array_equal(back.by_layer("entropy"), made.by_layer("entropy"))


def test_the_names_of_roles() -> None:
    document = Document.of(
        ["a", "b", "c"], [Relation("nsubj", 1, 0), Relation("coref", 2, 0), Relation("unrelated", 2, 1)]
    )
    names = role_names([document])
    assert {role.name for role in TABLE} < names
    assert {"nsubj", "coreference", "part of speech", "same phrase"} <= names
    assert names.isdisjoint({"coref", "unrelated", "same class"}), "what heads are told by other names"


def several() -> Profile:
    """Three heads: one that does three things, one that does the third of them better, one that shows a mere pattern."""
    made = profile(little(layers=3, kept={"0": (0, 3), "1": (), "2": (1,)}), LITTLE, causal=False)

    def does(role: str, score: float, rung: str = "effective") -> Support:
        return Support(
            role, ">", rung, score, 0.1, (score - 0.1, score + 0.1), (score - 0.1) / 0.9, 0.01, 2.0, None, 40
        )

    supports = [
        [does("possessive", 0.91), does("det", 0.8), does("obj", 0.5), does("case", 0.3, "pattern")],
        [does("nsubj", 0.95), does("obj", 0.7)],
        [does("case", 0.4, "pattern")],
    ]
    return replace(made, supports=supports)


def test_all_roles_that_stand_are_told(tmp_path) -> None:
    made = several()
    head = made["0.0"]
    assert head.role == "possessive"
    assert [one.role for one in head.roles] == ["possessive", "det", "obj"], "a pattern is no role"
    assert [made[address].role_label for address in made.addresses] == ["possessive > +2", "nsubj > +1", "unclear"]
    assert [row["roles"] for row in made.table()] == ["possessive; det; obj", "nsubj; obj", ""]
    assert [one["role"] for one in made.to_dict()["heads"][0]["roles"]] == ["possessive", "det", "obj"]
    assert Profile.load(made.save(tmp_path / "made.npz"))["0.0"].roles == head.roles


def test_the_strongest_head_of_a_role_need_not_have_it_first() -> None:
    made = several()
    ranked = {role: [str(address) for address in heads] for role, heads in made.roles().items()}
    assert ranked == {"possessive": ["0.0"], "det": ["0.0"], "nsubj": ["0.3"], "obj": ["0.3", "0.0"]}
    best = made.best("obj")
    assert best is not None
    assert str(best.address) == "0.3"
    console = Console(file=StringIO(), width=200)
    show_profile(made, {str(address) for address in made.addresses}, console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]
    told = {words[0]: words for words in lines if len(words) > 5 and words[0] in ranked}
    assert told["obj"][2:7] == ["2", "0.3", ">", "effective", "0.700"]
    assert "0.800" in told["det"], "it is nobody's first role"
