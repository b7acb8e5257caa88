"""What a profile answers about layers, those without heads too."""

import numpy as np

from headwise.look.profile import profile
from headwise.look.result import Profile
from headwise.look.roles import TABLE, role_names
from headwise.show.heads import grid
from headwise.text.documents import Document, Relation
from tests.look.test_profile_invariance import LITTLE, little


def test_a_layer_without_heads_is_there_and_empty(tmp_path) -> None:
    model = little(layers=3, kept={"0": (0, 3), "1": (), "2": (1,)})
    made = profile(model, LITTLE, causal=False)
    entropy = made.measure("entropy")
    expected = [entropy[:2].mean(), np.nan, entropy[2]]
    np.testing.assert_allclose(made.by_layer("entropy"), expected, rtol=1e-12)
    shown = grid(made, {str(address) for address in made.addresses}).plain.splitlines()
    assert [line.split()[0] for line in shown] == ["0", "1", "2"]
    assert shown[1].split()[1:] == ["no", "heads"]
    assert len(shown[0].split()) == 3
    assert len(grid(made, {"2.1"}).plain.splitlines()) == 2, (
        "a layer nobody asked for is left out; an empty one is told"
    )
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
