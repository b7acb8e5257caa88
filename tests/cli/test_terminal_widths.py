"""All tables of all commands in terminals of 80, 100 and 120 columns are complete."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import headwise as hw
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.roles import RoleEvidence
from headwise.cli import COMMANDS
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from headwise.ui.print_profile import show_head, show_profile, show_role
from headwise.ui.terminal_table import TextTable
from tests.cli.test_experiment_commands import SWEEP
from tests.runner import run_command
from tests.ui.test_tables import assert_not_truncated, print_table

TEXT = "the dog near the tree sees the cat"
TINY = ("--width", "16", "--steps", "4", "--batch-size", "4")
TABLES: list[TextTable] = []


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> list[TextTable]:
    """Record every table that is created."""
    init, TABLES[:] = TextTable.__init__, []

    def keep_table(self: TextTable, *args: object) -> None:
        init(self, *args)  # pyright: ignore[reportArgumentType]
        TABLES.append(self)

    monkeypatch.setattr(TextTable, "__init__", keep_table)
    return TABLES


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    model = hw.Transformer(
        ModelSpec(vocab=len(tokenizer), context=64, layers=2, attention=AttentionSpec(width=16, heads=4))
    )
    model.tokenizer = tokenizer
    model.save(folder / "model")
    texts = [item.text for item in Corpus.synthetic("held-out", documents=12).items()]
    (folder / "texts.txt").write_text("\n".join(texts))
    head_profile = profile(model, texts[:6], relations=False, causal=False)
    head_profile.save(folder / "seen.npz")
    return folder


def table_commands(workdir: Path, cache: Path = Path("lab")) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return calls of each command that together print all its tables."""
    model, texts, profile_path = str(workdir / "model"), str(workdir / "texts.txt"), str(workdir / "seen.npz")
    return {
        "info": ((model,),),
        "presets": ((),),
        "corpus": (("--documents", "20"),),
        "train": ((*TINY, "--layers", "1", "--num-heads", "2", "--context", "32", "--warmup", "2", "--watch-heads",
                   "--evaluate-every", "2", "--out", str(workdir / "run")),),
        "profile": ((profile_path,),),
        "describe": ((profile_path, "0.1", "--all"),),
        "maps": ((model, TEXT), (model, TEXT, "--heads", "0.1"), (model, TEXT, "--query", "sees", "--key", "dog")),
        "explain": ((model, TEXT, "--head", "1.1", "--query", "sees"),),
        "scan": ((model, TEXT),),
        "evaluate": ((model, "--tasks", texts),),
        "layout": (("llama2-70b", "--processes", "8"),),
        "importance": ((model, texts, "--ranking", "gradient", "--max-texts", "2"),),
        "prune": ((model, texts, "--keep", "0.7", "--ranking", "gradient", "--max-texts", "4", "--seeds", "1",
                   "--recover-steps", "1",
                   "--curve", "--fractions", "0.5"),),
        "diff": ((profile_path, profile_path),),
        "quantize": ((model, texts, "--weights", "*=8,0.1=4", "--max-texts", "2"),),
        "sensitivity": ((model, texts, "--heads", "0.*", "--max-texts", "2"),),
        "cache": ((model, texts, "--fraction", "0.5", "--sink-tokens", "1", "--window", "4", "--max-texts", "4",
                   "--seeds", "1", "--curve",
                   "--fractions", "0.5"),),
        "sweep": ((*SWEEP, "--cache", str(cache)),),
        "claims": (("--list",), ("parameters", "--seeds", "1", "--cache", str(cache), "--processes", "1")),
    }  # fmt: skip


WITHOUT_TABLES = {
    "circuit",  # tests/analysis/test_circuits.py reads its table
    "demo",
    "distill",
    "find",  # tests/cli and tests/analysis read its table
    "selftest",
    "steer",
    "store",  # its table has the files of this machine: tests/io/test_result_store.py
    "generate",
    "export",
    "plot",
    "view",
}  # the tables of the demo are tested in tests/ui/test_demo.py


def test_table_commands_cover_all_commands() -> None:
    assert set(table_commands(Path())) | WITHOUT_TABLES == {command.__name__.rpartition(".")[2] for command in COMMANDS}


@pytest.mark.parametrize("verb", table_commands(Path()))
def test_command_tables_are_not_truncated(
    verb: str, workdir: Path, tables: list[TextTable], lab_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workdir)  # a path longer than half a line would wrap
    for arguments in table_commands(Path(), lab_cache)[verb]:
        with FileLock(lab_cache / "lock"):
            done = run_command(verb, *arguments, columns=80)
        assert "…" not in done.output, "omissions are marked [...]"
    assert tables, "the command prints a table"
    for table in tables:
        for width in (80, 100, 120):
            assert_not_truncated(table, width)


def test_role_tables_are_not_truncated(
    workdir: Path, tables: list[TextTable], capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest names, several roles per head, and causal effects."""
    head_profile = hw.Profile.load(workdir / "seen.npz")
    evidence = RoleEvidence(
        "pronoun-antecedent", "<", "value-weighted", 0.98765, 0.12345, (0.91, 1.0), 0.9, 0.00012, 2.0, "referent", 123_456,
        effect=0.123, effect_interval=(0.1, 0.2), cost=1.234, cost_threshold=0.5,
        corpus_label="names in GAP, development part",
    )  # fmt: skip
    head_profile = replace(head_profile, evidence=[[evidence], *head_profile.evidence[1:]])
    everything = {str(address) for address in head_profile.addresses}
    show_profile(head_profile, everything)
    show_role(head_profile, "pronoun-antecedent", everything)
    show_head(head_profile, head_profile["0.0"])
    assert len(tables) >= 4
    for table in tables:
        for width in (80, 100, 120):
            assert_not_truncated(table, width)
    assert any("names in GAP, development part" in " ".join(print_table(table, 120).split()) for table in tables)
    capsys.readouterr()
