"""headwise prune, as tables and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.compression import PruneRequest
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Plan
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.runner import CommandResult, run_command
from tests.training.tiny import same_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    attention = AttentionSpec(width=24, heads=4, kv_heads=2)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=attention, mlp_width=16))
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.output_projection.weight.mul_(20)
    model.tokenizer = tokenizer
    return str(model.save(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "little.txt"
    path.write_text(" ".join(item.text for item in Corpus.synthetic("held-out", documents=24).items()))
    return str(path)


def run_prune(*arguments: object) -> CommandResult:
    return run_command("prune", *arguments)


def test_prune_saves_model_plan_and_report(folder: str, texts: str, tmp_path: Path) -> None:
    out, plan = tmp_path / "half", tmp_path / "plan.json"
    done = run_prune(
        folder, texts, "--keep", 0.5, "--max-length", 20, "--max-texts", 16, "--out", out, "--save-plan", plan, "--json"
    )
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert result["out"] == str(out)
    assert (result["plan"]["ranking"], result["plan"]["fold_mean"]) == ("ablation", True)
    assert len(result["plan"]["pruned_heads"]) == 4
    assert len(result["plan"]["scores"]) == 8
    assert result["report"]["texts"] == 8, "every other text judges"
    assert (result["report"]["before"]["heads"], result["report"]["after"]["heads"]) == (8, 4)
    assert len(result["report"]["random"]) == 3
    assert result["curve"] is None
    small, full = hw.load(out), hw.load(folder)
    assert [str(head) for head in full.spec.head_addresses if str(head) not in result["plan"]["pruned_heads"]] == [
        str(head) for head in small.spec.head_addresses
    ]
    assert same_weights(small, hw.apply(Plan.load(plan), full))
    assert "\n" in run_prune(folder, "the cat saw the dog", "--plan", plan, "--seeds", 0).out
    reapplied = json.loads(
        run_prune(folder, texts, "--plan", plan, "--max-length", 20, "--max-texts", 16, "--json").out
    )
    assert reapplied["plan"] == result["plan"]
    assert reapplied["report"]["loss_after"] == result["report"]["loss_after"]
    assert reapplied["report"]["random"] == result["report"]["random"]


def test_prune_named_heads_single_text(folder: str, tmp_path: Path) -> None:
    done = run_prune(
        folder, "the cat saw the dog", "--heads", "1.*", "--no-fold-mean", "--out", tmp_path / "m", "--seeds", 0
    )
    assert done.code == 0, done.err
    assert "4 of 8 heads are pruned, named by hand; nothing is folded." in done.out
    assert "layer 1 loses 0 1 2 3 (all heads)" in done.out
    assert "cache bytes per token" in done.out
    assert same_weights(hw.load(tmp_path / "m"), hw.load(folder).prune("1.*"))
    done = run_prune(folder, "the cat saw the dog", "--heads", "1.*")
    assert (done.code, done.out) == (2, "")
    assert "single text" in done.err


def test_prune_curve_writes_figure(folder: str, texts: str, tmp_path: Path) -> None:
    arguments = (folder, texts, "--max-length", 20, "--max-texts", 8, "--fractions", "0.75,0.25", "--seeds", 2)
    for name in ("curve.svg", "curve.png"):
        done = run_prune(*arguments, "--plot", tmp_path / name, "--json")
        assert done.code == 0, done.err
        assert (tmp_path / name).stat().st_size > 5000
    result = json.loads(done.out)
    assert result["plan"] is result["report"] is result["out"] is None
    assert [(p["ranking"], p["heads"]) for p in result["curve"]["points"]] == [
        (ranking, heads) for ranking in ("ablation", "gradient", "random") for heads in (6, 2)
    ]
    svg = (tmp_path / "curve.svg").read_text()
    assert all(f"<!-- {words} -->" in svg for words in ("ablation", "gradient", "random", "fraction of heads kept"))
    done = run_prune(*arguments, "--keep", 0.75, "--ranking", "gates", "--gate-steps", 3, "--curve")
    assert "gates" in done.out
    assert "increase" in done.out
    assert "texts, with 95% CI" in done.out


def test_prune_test_option_evaluates_other_text(folder: str, texts: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the cat saw the dog")
    done = run_prune(folder, texts, "--keep", 0.5, "--test", other, "--max-length", 20, "--max-texts", 6, "--json")
    assert json.loads(done.out)["report"]["texts"] == 1


def test_prune_encoder_decoder_without_text(tmp_path: Path) -> None:
    spec = ModelSpec(vocab=11, context=8, layers=1, attention=AttentionSpec(width=8, heads=2), kind="encoder-decoder")
    Transformer(spec).save(tmp_path / "full")
    done = run_prune(tmp_path / "full", "--heads", "cross.0.1", "--no-fold-mean", "--out", tmp_path / "small")
    assert done.code == 0, done.err
    assert [str(head) for head in hw.load(tmp_path / "small").spec.head_addresses if head.stack == "cross"] == [
        "cross.0.0"
    ]
    assert (
        "Give corpus=hw.Corpus.pairs(sources, texts), or TEXT and --source"
        in run_prune(tmp_path / "full", "--keep", 0.5).err
    )


def test_prune_invalid_arguments_print_one_line(folder: str, texts: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    torch.manual_seed(1)
    Transformer(ModelSpec(vocab=9, context=8, layers=1, attention=AttentionSpec(width=8, heads=2))).save(tmp_path / "m")
    hw.plan_pruning(hw.load(tmp_path / "m"), PruneRequest(heads="0.1", fold_mean=False)).save(tmp_path / "theirs.json")
    for arguments, message in (
        ((folder, texts), "which heads to prune"),
        ((folder, texts, "--keep", 0.5, "--heads", "0.1"), "which heads to prune"),
        ((folder, texts, "--curve", "--out", tmp_path / "o"), "which heads to prune"),
        ((folder, texts, "--keep", 0), "above 0 and at most 1"),
        ((folder, texts, "--keep", 1.2), "above 0 and at most 1"),
        ((folder, texts, "--heads", "0.*,1.*"), "prune all 8 heads"),
        ((folder, texts, "--heads", "0.7"), "no such head"),
        ((folder, tmp_path / "empty.txt", "--keep", 0.5), "is empty"),
        ((folder, texts, "--plan", tmp_path / "theirs.json"), "made for another model"),
        ((folder, texts, "--plan", tmp_path / "no.json"), "could not be read"),
        ((folder, texts, "--keep", 0.5, "--out", tmp_path / "full"), "not written by Headwise"),
        ((folder, texts, "--keep", 0.5, "--ranking", "luck"), "ablation, gates, gradient, random"),
        ((folder, texts, "--curve", "--plot", tmp_path / "curve.txt"), "the suffix must be one of"),
        ((folder, texts, "--curve", "--plot", tmp_path / "no" / "curve.png"), "does not exist"),
        ((folder, texts, "--curve", "--fractions", "half"), "not a comma-separated list of numbers"),
        ((folder, texts, "--keep", 0.5, "--max-texts", 0), "number of texts must be at least 1"),
        ((tmp_path / "nowhere", texts, "--keep", 0.5), "nowhere"),
    ):
        done = run_prune(*arguments, "--max-length", 20, *(() if "--max-texts" in arguments else ("--max-texts", 4)))
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err.count("\n") == 1
        assert message in done.err
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty.txt", "m", "theirs.json"}, (
        "nothing is left behind"
    )


def test_prune_interrupted_writes_nothing(folder: str, texts: str, tmp_path: Path) -> None:
    code = (
        "import sys, headwise.analysis.ablation.importance as importance\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "importance.importance = stop\n"
        f"sys.argv = ['headwise', 'prune', {folder!r}, {texts!r}, '--keep', '0.5', '--out', {str(tmp_path / 'out')!r}]\n"
        "from headwise.cli import main\n"
        "main()\n"
    )
    before = hw.load(folder).state_dict()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, before[name]) for name, value in hw.load(folder).state_dict().items())


def test_prune_recover_steps_trains_before_saving(folder: str, texts: str, tmp_path: Path) -> None:
    out = tmp_path / "healed"
    plan = tmp_path / "plan.json"
    done = run_prune(
        folder,
        texts,
        "--keep",
        0.5,
        "--ranking",
        "random",
        "--recover-steps",
        5,
        "--out",
        out,
        "--save-plan",
        plan,
        "--max-texts",
        8,
        "--json",
    )
    assert done.code == 0, done.err
    recovered, bare = hw.load(out), hw.apply(Plan.load(plan), hw.load(folder))
    assert recovered.spec == bare.spec
    assert not same_weights(recovered, bare)
    result = json.loads(done.out)["report"]
    _, evaluation = eval_corpus(bare, Corpus.from_cli_arguments([texts])).first(8).halves()
    for model, loss in ((bare, result["loss_after"]), (recovered, result["recovered"]["loss"])):
        trial = PairedEvaluator.of(model, evaluation)
        assert loss["mean"] == pytest.approx(trial.full_losses_per_text.sum() / trial.counts.sum(), abs=1e-6)
    assert len(result["random"]) == len(result["recovered"]["random"]) == 3
    assert all(after != before for after, before in zip(result["recovered"]["random"], result["random"], strict=True))
    assert result["time"]["ratio"] == result["time"]["after"] / result["time"]["before"]


def test_prune_recover_unsupported_raises(folder: str, texts: str) -> None:
    assert "0 if no heads are pruned" in run_prune(folder, texts, "--curve", "--recover-steps", 5).err
    assert "language modeling head" in run_prune("minilm", texts, "--keep", 0.5, "--recover-steps", 5).err
