"""headwise prune, as a person and a program use it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.head_outputs import read_on
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.plan import Plan
from headwise.compression.prune_heads import cut
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.runner import Done, headwise
from tests.training.tiny import same_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    attention = AttentionSpec(width=24, heads=4, kv_heads=2)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=attention, hidden=16))
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.write.weight.mul_(20)
    model.tokenizer = tokenizer
    return str(model.save(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "little.txt"
    path.write_text(" ".join(item.text for item in Corpus.little("held-out", documents=24).items()))
    return str(path)


def prune(*arguments: object) -> Done:
    return headwise("prune", *arguments)


def test_a_model_is_cut_saved_and_reported(folder: str, texts: str, tmp_path: Path) -> None:
    out, plan = tmp_path / "half", tmp_path / "plan.json"
    done = prune(folder, texts, "--keep", 0.5, "--length", 20, "--limit", 16, "--out", out, "--plan", plan, "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["out"] == str(out)
    assert (told["plan"]["by"], told["plan"]["folded"], len(told["plan"]["heads"])) == ("ablation", True, 4)
    assert len(told["plan"]["scores"]) == 8
    assert told["report"]["texts"] == 8, "every other text judges"
    assert (told["report"]["before"]["heads"], told["report"]["after"]["heads"]) == (8, 4)
    assert len(told["report"]["random"]) == 3
    assert told["curve"] is None
    small, full = hw.load(out), hw.load(folder)
    assert [str(head) for head in full.spec.addresses if str(head) not in told["plan"]["heads"]] == [
        str(head) for head in small.spec.addresses
    ]
    assert same_weights(small, Plan.load(plan).apply(full))
    assert "\n" in prune(folder, "the cat saw the dog", "--apply", plan, "--seeds", 0).out
    again = json.loads(prune(folder, texts, "--apply", plan, "--length", 20, "--limit", 16, "--json").out)
    assert again["plan"] == told["plan"]
    assert again["report"]["loss_after"] == told["report"]["loss_after"]
    assert again["report"]["random"] == told["report"]["random"]


def test_named_heads_need_no_second_text(folder: str, tmp_path: Path) -> None:
    done = prune(folder, "the cat saw the dog", "--heads", "1.*", "--no-fold", "--out", tmp_path / "m", "--seeds", 0)
    assert done.code == 0, done.err
    assert "4 of 8 heads are cut, named by hand; nothing is folded." in done.out
    assert "layer 1 loses 0 1 2 3, all it had" in done.out
    assert "cache bytes per token" in done.out
    assert same_weights(hw.load(tmp_path / "m"), cut(hw.load(folder), "1.*"))
    done = prune(folder, "the cat saw the dog", "--heads", "1.*")
    assert (done.code, done.out) == (2, "")
    assert "a single text cannot both choose" in done.err


def test_a_curve_with_its_picture(folder: str, texts: str, tmp_path: Path) -> None:
    asked = (folder, texts, "--length", 20, "--limit", 8, "--shares", "0.75,0.25", "--seeds", 2)
    for name in ("curve.svg", "curve.png"):
        done = prune(*asked, "--plot", tmp_path / name, "--json")
        assert done.code == 0, done.err
        assert (tmp_path / name).stat().st_size > 5000
    told = json.loads(done.out)
    assert told["plan"] is told["report"] is told["out"] is None
    assert [(p["by"], p["heads"]) for p in told["curve"]["points"]] == [
        (by, heads) for by in ("ablation", "gradient", "random") for heads in (6, 2)
    ]
    svg = (tmp_path / "curve.svg").read_text()
    assert all(f"<!-- {words} -->" in svg for words in ("ablation", "gradient", "random", "share of heads kept"))
    done = prune(*asked, "--keep", 0.75, "--by", "gates", "--steps", 3, "--curve")
    assert "gates" in done.out
    assert "more than full" in done.out
    assert "What it cost" in done.out


def test_judged_by_another_text(folder: str, texts: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the cat saw the dog")
    done = prune(folder, texts, "--keep", 0.5, "--test", other, "--length", 20, "--limit", 6, "--json")
    assert json.loads(done.out)["report"]["texts"] == 1


def test_an_encoder_decoder_is_cut_without_a_word(tmp_path: Path) -> None:
    spec = ModelSpec(vocab=11, context=8, layers=1, attention=AttentionSpec(width=8, heads=2), kind="encoder-decoder")
    Transformer(spec).save(tmp_path / "full")
    done = prune(tmp_path / "full", "--heads", "cross.0.1", "--no-fold", "--out", tmp_path / "small")
    assert done.code == 0, done.err
    assert [str(head) for head in hw.load(tmp_path / "small").spec.addresses if head.stack == "cross"] == ["cross.0.0"]
    assert (
        "needs pairs: give on=hw.Corpus.pairs(sources, texts), TEXT and --source"
        in prune(tmp_path / "full", "--keep", 0.5).err
    )


def test_trouble_is_one_line(folder: str, texts: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    torch.manual_seed(1)
    Transformer(ModelSpec(vocab=9, context=8, layers=1, attention=AttentionSpec(width=8, heads=2))).save(tmp_path / "m")
    Plan.make(hw.load(tmp_path / "m"), cut="0.1", fold=False).save(tmp_path / "theirs.json")
    for arguments, message in (
        ((folder, texts), "say which heads go, in one way"),
        ((folder, texts, "--keep", 0.5, "--heads", "0.1"), "say which heads go, in one way"),
        ((folder, texts, "--curve", "--out", tmp_path / "o"), "say which heads go, in one way"),
        ((folder, texts, "--keep", 0), "above 0 and at most 1"),
        ((folder, texts, "--keep", 1.2), "above 0 and at most 1"),
        ((folder, texts, "--heads", "0.*,1.*"), "would cut all 8 heads"),
        ((folder, texts, "--heads", "0.7"), "names no head here"),
        ((folder, tmp_path / "empty.txt", "--keep", 0.5), "is empty"),
        ((folder, texts, "--apply", tmp_path / "theirs.json"), "the plan was made for another model"),
        ((folder, texts, "--apply", tmp_path / "no.json"), "could not be read"),
        ((folder, texts, "--keep", 0.5, "--out", tmp_path / "full"), "holds something else"),
        ((folder, texts, "--keep", 0.5, "--by", "luck"), "cannot be ranked by 'luck'"),
        ((folder, texts, "--curve", "--plot", tmp_path / "curve.txt"), "a picture is written as"),
        ((folder, texts, "--curve", "--plot", tmp_path / "no" / "curve.png"), "make it first"),
        ((folder, texts, "--curve", "--shares", "half"), "numbers with commas"),
        ((folder, texts, "--keep", 0.5, "--limit", 0), "a limit of 0"),
        ((tmp_path / "nowhere", texts, "--keep", 0.5), "nowhere"),
    ):
        done = prune(*arguments, "--length", 20, *(() if "--limit" in arguments else ("--limit", 4)))
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err.count("\n") == 1
        assert message in done.err
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty.txt", "m", "theirs.json"}, (
        "nothing is left behind"
    )


def test_breaking_off_leaves_nothing_behind(folder: str, texts: str, tmp_path: Path) -> None:
    code = (
        "import sys, headwise.analysis.ablation.importance as worth\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "worth.importance = stop\n"
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


def test_a_cut_model_is_healed_before_it_is_saved(folder: str, texts: str, tmp_path: Path) -> None:
    out = tmp_path / "healed"
    plan = tmp_path / "plan.json"
    done = prune(
        folder,
        texts,
        "--keep",
        0.5,
        "--by",
        "random",
        "--heal",
        5,
        "--out",
        out,
        "--plan",
        plan,
        "--limit",
        8,
        "--json",
    )
    assert done.code == 0, done.err
    healed, bare = hw.load(out), Plan.load(plan).apply(hw.load(folder))
    assert healed.spec == bare.spec
    assert not same_weights(healed, bare)
    told = json.loads(done.out)["report"]
    _, judging = read_on(bare, Corpus.named([texts])).first(8).halves()
    for model, figure in ((bare, told["loss_after"]), (healed, told["healed"]["loss"])):
        trial = PairedEvaluation.of(model, judging)
        assert figure["mean"] == pytest.approx(trial.full.sum() / trial.counts.sum(), abs=1e-6)
    assert len(told["random"]) == len(told["healed"]["random"]) == 3
    assert all(after != before for after, before in zip(told["healed"]["random"], told["random"], strict=True))
    assert told["time"]["share"] == told["time"]["after"] / told["time"]["before"]


def test_what_cannot_be_healed(folder: str, texts: str) -> None:
    assert "heal trains a model that was cut" in prune(folder, texts, "--curve", "--heal", 5).err
    assert "cannot be asked for tokens" in prune("minilm", texts, "--keep", 0.5, "--heal", 5).err
