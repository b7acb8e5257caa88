"""A new way to rank heads is one entry of a table: plans, curves, printing and the command line know it."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import headwise as hw
from headwise.compression.curve import curve, usual_bys
from headwise.compression.plan import Plan
from headwise.compression.rankers import WAYS, RankingInput, Scores, Way
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.prune_view import show_plan
from tests.runner import headwise

TEXTS = ["the cat saw the dog", "a dog ran to the tree", "it was green", "and the cat slept"]


def by_length(model: AnyModel, ask: RankingInput) -> Scores:
    """The length of what a head writes with; no text is read."""
    return {head.address: head.W_O.detach().norm().item() for head in model.heads}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> hw.Transformer:
    monkeypatch.setitem(WAYS, "length", Way(by_length, "the length of W_O", reads=False))
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=12, heads=3, head_dim=4)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=32, layers=2, attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    return model


def test_plans_prunes_curves_and_tables_know_it(model: hw.Transformer) -> None:
    lengths = {str(head.address): head.W_O.detach().norm().item() for head in model.heads}
    plan = Plan.make(model, keep=0.5, by="length", fold=False)
    assert set(plan.cut) == set(sorted(lengths, key=lambda head: lengths[head])[:3])
    assert plan.on == ""
    assert Plan.from_json(plan.to_json()) == plan
    assert len(hw.prune(model, keep=0.5, by="length", fold=False).spec.addresses) == 3
    assert usual_bys(model) == ("ablation", "gradient", "random", "length")
    points = curve(model, TEXTS, keeps=[0.5], bys=["length"], folded=False, seeds=1).points
    assert [(point.by, point.heads) for point in points] == [("length", 3)]
    shown = io.StringIO()
    show_plan(plan, Console(file=shown, width=120))
    assert "a head and its score (the length of W_O)" in shown.getvalue()


def test_the_command_line_knows_it(model: hw.Transformer, tmp_path: Path) -> None:
    folder, text = model.save(tmp_path / "small"), tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    done = headwise("prune", folder, text, "--keep", 0.5, "--by", "length", "--no-fold", "--seeds", 1, "--json")
    assert json.loads(done.told)["plan"]["by"] == "length"
    assert "did you mean length" in headwise("prune", folder, text, "--keep", 0.5, "--by", "lenght").refused
    for name in ("ablation", "gradient", "random", "gates"):
        assert name in headwise("prune", "--help").told


def test_without_an_output_there_is_no_slope(model: hw.Transformer) -> None:
    torch.manual_seed(0)
    bare = hw.Transformer(hw.ModelSpec(vocab=257, context=32, layers=1, attention=model.spec.attention, output="none"))
    assert usual_bys(bare) == ("ablation", "random", "length")
    with pytest.raises(HeadwiseError, match="cannot be ranked by 'slope'"):
        Plan.make(model, keep=0.5, by="slope", fold=False)
