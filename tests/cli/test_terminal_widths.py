"""Every table of every verb, as it stands in terminals of 80, 100 and 120 columns: whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import headwise as hw
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.roles import Support
from headwise.cli import VERBS
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from headwise.ui.heads_view import show_head, show_profile, show_role
from headwise.ui.tables import Sheet
from tests.cli.test_experiment_commands import SWEEP
from tests.runner import headwise
from tests.ui.test_tables import assert_whole, printed

TEXT = "the dog near the tree sees the cat"
TINY = ("--width", "16", "--steps", "4", "--batch", "4")
MADE: list[Sheet] = []


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Sheet]:
    """Every table that is made, whoever makes it."""
    init, MADE[:] = Sheet.__init__, []

    def keep(self: Sheet, *given: object) -> None:
        init(self, *given)  # pyright: ignore[reportArgumentType]
        MADE.append(self)

    monkeypatch.setattr(Sheet, "__init__", keep)
    return MADE


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    model = hw.Transformer(
        ModelSpec(vocab=len(tokenizer), context=64, layers=2, attention=AttentionSpec(width=16, heads=4))
    )
    model.tokenizer = tokenizer
    model.save(place / "model")
    texts = [item.text for item in Corpus.little("held-out", documents=12).items()]
    (place / "texts.txt").write_text("\n".join(texts))
    seen = profile(model, texts[:6], relations=False, causal=False)
    seen.save(place / "seen.npz")
    return place


def verbs(place: Path, lab: Path = Path("lab")) -> dict[str, tuple[tuple[str, ...], ...]]:
    """For each verb with tables, ways to call it that together show all of them."""
    model, texts, seen = str(place / "model"), str(place / "texts.txt"), str(place / "seen.npz")
    return {
        "info": ((model,),),
        "presets": ((),),
        "corpus": (("--documents", "20"),),
        "train": ((*TINY, "--layers", "1", "--heads", "2", "--context", "32", "--warmup", "2", "--watch-heads",
                   "--evaluate-every", "2", "--out", str(place / "run")),),
        "heads": ((seen,),),
        "head": ((seen, "0.1", "--all"),),
        "attend": ((model, TEXT), (model, TEXT, "--head", "0.1"), (model, TEXT, "--from", "sees", "--to", "dog")),
        "why": ((model, TEXT, "--head", "1.1", "--at", "sees"),),
        "layout": (("llama2-70b", "--processes", "8"),),
        "ablate": ((model, texts, "--by", "gradient", "--limit", "2"),),
        "prune": ((model, texts, "--keep", "0.7", "--by", "gradient", "--limit", "4", "--seeds", "1", "--heal", "1",
                   "--curve", "--shares", "0.5"),),
        "diff": ((seen, seen),),
        "quantise": ((model, texts, "--weights", "*=8,0.1=4", "--limit", "2"),),
        "sensitivity": ((model, texts, "--heads", "0.*", "--limit", "2"),),
        "cache": ((model, texts, "--stream", "0.5", "--first", "1", "--last", "4", "--limit", "4", "--seeds", "1", "--curve",
                   "--shares", "0.5"),),
        "sweep": ((*SWEEP, "--cache", str(lab)),),
        "claims": (("--list",), ("parameters", "--seeds", "1", "--cache", str(lab), "--processes", "1")),
    }  # fmt: skip


NONE = {"demo", "distil", "generate", "export", "plot", "view"}  # the demo's are those of attend, heads and prune


def test_all_verbs_are_here() -> None:
    assert set(verbs(Path())) | NONE == {verb.__name__.rpartition(".")[2] for verb in VERBS}


@pytest.mark.parametrize("verb", verbs(Path()))
def test_every_table_of_a_verb_is_whole(
    verb: str, place: Path, made: list[Sheet], lab_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)  # a path longer than half a line would be folded
    for arguments in verbs(Path(), lab_cache)[verb]:
        with FileLock(lab_cache / "lock"):
            done = headwise(verb, *arguments, columns=80)
        assert "…" not in done.told, "what is left out is marked [...]"
    assert made, "there is a table"
    for sheet in made:
        for width in (80, 100, 120):
            assert_whole(sheet, width)


def test_tables_of_roles_are_whole(place: Path, made: list[Sheet], capsys: pytest.CaptureFixture[str]) -> None:
    """With the longest names there are, several roles a head, and what ablation showed."""
    seen = hw.Profile.load(place / "seen.npz")
    long = Support(
        "pronoun-antecedent", "<", "effective", 0.98765, 0.12345, (0.91, 1.0), 0.9, 0.00012, 2.0, "referent", 123_456,
        effect=0.123, effect_interval=(0.1, 0.2), cost=1.234, bar=0.5, on="names in GAP, development part",
    )  # fmt: skip
    seen = replace(seen, supports=[[long], *seen.supports[1:]])
    everything = {str(address) for address in seen.addresses}
    show_profile(seen, everything)
    show_role(seen, "pronoun-antecedent", everything)
    show_head(seen, seen["0.0"])
    assert len(made) >= 4
    for sheet in made:
        for width in (80, 100, 120):
            assert_whole(sheet, width)
    assert any("names in GAP, development part" in " ".join(printed(sheet, 120).split()) for sheet in made)
    capsys.readouterr()
