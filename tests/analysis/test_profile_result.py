"""Methods of a profile for layers, including layers without heads."""

from dataclasses import replace
from io import StringIO

import numpy as np
from rich.console import Console

from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import DEFAULT_ROLES, RoleEvidence, role_names
from headwise.text.annotated_document import Document, Relation
from headwise.ui.print_profile import show_profile
from headwise.ui.terminal_head_grid import make_selected_heads_grid
from tests.analysis.test_profile_invariance import SYNTHETIC, synthetic_model


def test_profile_empty_layer_is_shown_as_empty(tmp_path) -> None:
    model = synthetic_model(layers=3, kept_heads={"0": (0, 3), "1": (), "2": (1,)})
    profiled = profile(model, SYNTHETIC, causal=False)
    entropy = profiled.metric("entropy")
    expected = [entropy[:2].mean(), np.nan, entropy[2]]
    np.testing.assert_allclose(profiled.mean_by_layer("entropy"), expected, rtol=1e-12)
    lines = make_selected_heads_grid(profiled, {str(address) for address in profiled.addresses}).plain.splitlines()
    assert lines == [
        "   head   0  1  2  3", "      0  ··       ··", "      1  no heads", "      2     ~~      ",
    ], "columns have numbers, and a head that was cut leaves a gap"  # fmt: skip
    assert len(make_selected_heads_grid(profiled, {"2.1"}).plain.splitlines()) == 3, (
        "a layer nobody asked for is left out; an empty one is told"
    )
    assert [line[:8] for line in make_selected_heads_grid(profiled, {"2.1"}, width=14).plain.splitlines()] == [
        "   head ", "      1 ", "      2 ", "   head ", "      1 ", "      2 ",
    ], "wide grids go on below"  # fmt: skip
    back = Profile.load(profiled.save(tmp_path / "profile.npz"))
    np.testing.assert_array_equal(back.mean_by_layer("entropy"), profiled.mean_by_layer("entropy"))


def test_role_names_include_relations_of_documents() -> None:
    document = Document.of(
        ["a", "b", "c"], [Relation("nsubj", 1, 0), Relation("coref", 2, 0), Relation("unrelated", 2, 1)]
    )
    names = role_names([document])
    assert {role.name for role in DEFAULT_ROLES} < names
    assert {"nsubj", "coreference", "part of speech", "same phrase"} <= names
    assert names.isdisjoint({"coref", "unrelated", "same class"}), "what heads are told by other names"


def profile_with_several_roles() -> Profile:
    """Three heads: one with three roles, one that is better at the third, one with attention evidence only."""
    profiled = profile(synthetic_model(layers=3, kept_heads={"0": (0, 3), "1": (), "2": (1,)}), SYNTHETIC, causal=False)

    def make_evidence(role: str, score: float, level: str = "value-weighted") -> RoleEvidence:
        return RoleEvidence(
            role, ">", level, score, 0.1, (score - 0.1, score + 0.1), (score - 0.1) / 0.9, 0.01, 2.0, None, 40
        )

    evidence = [
        [
            make_evidence("possessive", 0.91),
            make_evidence("det", 0.8),
            make_evidence("obj", 0.5),
            make_evidence("case", 0.3, "none"),
        ],
        [make_evidence("nsubj", 0.95), make_evidence("obj", 0.7)],
        [make_evidence("case", 0.4, "none")],
    ]
    return replace(profiled, evidence=evidence)


def test_head_profile_lists_all_supported_roles(tmp_path) -> None:
    profiled = profile_with_several_roles()
    head = profiled["0.0"]
    assert head.role == "possessive"
    assert [role_evidence.role for role_evidence in head.roles] == ["possessive", "det", "obj"], "a pattern is no role"
    assert [profiled[address].role_label for address in profiled.addresses] == [
        "possessive > +2",
        "nsubj > +1",
        "unclear",
    ]
    assert [row["roles"] for row in profiled.table()] == ["possessive; det; obj", "nsubj; obj", ""]
    assert [role_evidence["role"] for role_evidence in profiled.to_dict()["heads"][0]["roles"]] == [
        "possessive",
        "det",
        "obj",
    ]
    assert Profile.load(profiled.save(tmp_path / "profile.npz"))["0.0"].roles == head.roles


def test_profile_best_head_may_have_role_second() -> None:
    profiled = profile_with_several_roles()
    ranked = {role: [str(address) for address in heads] for role, heads in profiled.heads_by_role().items()}
    assert ranked == {"possessive": ["0.0"], "det": ["0.0"], "nsubj": ["0.3"], "obj": ["0.3", "0.0"]}
    best = profiled.best_head("obj")
    assert best is not None
    assert str(best.address) == "0.3"
    console = Console(file=StringIO(), width=200)
    show_profile(profiled, {str(address) for address in profiled.addresses}, console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]
    row_of_role = {words[0]: words for words in lines if len(words) > 5 and words[0] in ranked}
    assert row_of_role["obj"][2:7] == ["2", "0.3", ">", "value-weighted", "0.700"]
    assert "0.800" in row_of_role["det"], "it is nobody's first role"
