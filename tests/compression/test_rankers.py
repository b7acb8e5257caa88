"""A new ranking method is one table entry. Plans, curves, tables and the command line use it."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import headwise as hw
from headwise.compression import PruneRequest
from headwise.compression.pruning_curve import default_rankings, pruning_curve
from headwise.compression.rankers import RANKERS, HeadRanker, RankingInput, Scores
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.spec import Plan
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.print_pruning import show_prune_plan
from tests.runner import run_command

TEXTS = ["the cat saw the dog", "a dog ran to the tree", "it was green", "and the cat slept"]


def rank_by_norm(model: ModelProtocol, ranking_input: RankingInput) -> Scores:
    """Rank heads by the norm of W_O, without texts."""
    return {head.address: head.W_O.detach().norm().item() for head in model.heads}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> hw.Transformer:
    monkeypatch.setitem(RANKERS, "length", HeadRanker(rank_by_norm, "the length of W_O", needs_corpus=False))
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=12, heads=3, head_dim=4)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=32, layers=2, attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    return model


def test_custom_ranker_works_in_plan_prune_curve_and_table(model: hw.Transformer) -> None:
    norms = {str(head.address): head.W_O.detach().norm().item() for head in model.heads}
    plan = hw.plan_pruning(model, PruneRequest(keep=0.5, ranking="length", fold_mean=False))
    assert set(plan.pruned_heads) == set(sorted(norms, key=lambda head: norms[head])[:3])
    assert plan.corpus == ""
    assert Plan.from_json(plan.to_json()) == plan
    assert len(hw.prune(model, keep=0.5, ranking="length", fold_mean=False).spec.head_addresses) == 3
    assert default_rankings(model) == ("ablation", "gradient", "random", "length")
    points = pruning_curve(model, TEXTS, keep_fractions=[0.5], rankings=["length"], fold_mean=False, seeds=1).points
    assert [(point.ranking, point.heads) for point in points] == [("length", 3)]
    output = io.StringIO()
    show_prune_plan(plan, Console(file=output, width=120))
    assert "scores (the length of W_O)" in output.getvalue()


def test_custom_ranker_works_on_command_line(model: hw.Transformer, tmp_path: Path) -> None:
    folder, text = model.save(tmp_path / "small"), tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    done = run_command(
        "prune", folder, text, "--keep", 0.5, "--ranking", "length", "--no-fold-mean", "--seeds", 1, "--json"
    )
    assert json.loads(done.output)["plan"]["ranking"] == "length"
    assert "did you mean length" in run_command("prune", folder, text, "--keep", 0.5, "--ranking", "lenght").error_line
    for name in ("ablation", "gradient", "random", "gates"):
        assert name in run_command("prune", "--help").output


def test_default_rankers_without_output_exclude_gradient(model: hw.Transformer) -> None:
    torch.manual_seed(0)
    headless = hw.Transformer(
        hw.ModelSpec(vocab=257, context=32, layers=1, attention=model.spec.attention, output="none")
    )
    assert default_rankings(headless) == ("ablation", "random", "length")
    with pytest.raises(HeadwiseError, match="Got 'slope'"):
        hw.plan_pruning(model, PruneRequest(keep=0.5, ranking="slope", fold_mean=False))
