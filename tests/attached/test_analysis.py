"""Everything that looks at heads, and changes them, on models of others: the same numbers as on our own loading of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.analysis.attribution.ov_analysis import copying, value_weighted, write_share
from headwise.compression.l0_gates import learn_gates
from headwise.compression.recovery import heal
from headwise.text import Tokenizer
from headwise.text.documents import Document
from tests.attached.models import BY_NAME

LETTERS = [chr(i) for i in range(97, 123)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS), ".", ",", "'", "?"]
TEXTS = [
    "the cats sat on the mat, and the dog saw them.",
    "a man who came late gave it to her. she was glad, he was not.",
]
BOTH = ["gpt2", "bert", "llama", "mistral", "qwen2"]  # families that our own loader maps as well
OTHERS = ["roberta", "distilbert", "qwen3", "gemma3", "phi3", "opt", "gpt_neox", "modernbert", "electra"]


def build(name: str) -> tuple[Any, Tokenizer]:
    """A model that can read words, letter by letter."""
    case = BY_NAME[name]
    sizes = case.sizes | {"n_positions" if name in ("gpt2", "t5") else "max_position_embeddings": 300}
    return dataclasses.replace(case, sizes=sizes).build(), Tokenizer.from_wordpiece(VOCABULARY)


def saved(name: str, folder: Path) -> Path:
    model, tokenizer = build(name)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def documents(count: int) -> list[Document]:
    return [item for item in hw.Corpus.probe().items() if isinstance(item, Document)][:count]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_few_bits_cost_what_they_cost_the_native_model(name: str, tmp_path: Path) -> None:
    """Nothing stays changed; keys are theirs to turn, so weights are rounded in the basis they are given in."""
    ours, theirs = hw.load(saved(name, tmp_path)), hw.attach(*build(name))
    before = {key: value.clone() for key, value in theirs.state_dict().items()}
    how: Any = {"bits": (2,), "heads": "1.*", "parts": ("qk", "vo", "keys", "values")}
    a, b = hw.sensitivity(ours, TEXTS, basis="given", **how), hw.sensitivity(theirs, TEXTS, **how)
    assert a.settings == b.settings
    np.testing.assert_allclose(a.more, b.more, atol=2e-4)
    assert all(torch.equal(value, before[key]) for key, value in theirs.state_dict().items())
    with pytest.raises(hw.HeadwiseError, match="basis='given'"):
        hw.sensitivity(theirs, TEXTS, basis="balanced")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("mistral", "qwen2") else name for name in BOTH]
)
def test_a_profile_is_that_of_the_native_model(name: str, tmp_path: Path) -> None:
    ours = hw.load(saved(name, tmp_path))
    theirs = hw.attach(*build(name))
    assert isinstance(ours, hw.Transformer)
    for causal in (False, True) if name == "llama" else (False,):
        a, b = (hw.profile(model, documents(5), causal=causal) for model in (ours, theirs))
        assert [head.address for head in a] == [head.address for head in b]
        for one, other in zip(a, b, strict=True):
            assert one.measures.keys() == other.measures.keys()
            assert one.role == other.role
            for measure, value in one.measures.items():
                np.testing.assert_allclose(other.measures[measure], value, atol=1e-5, rtol=0)
    light = [hw.profile(model, TEXTS, relations=documents(4), detail="light", causal=False) for model in (ours, theirs)]
    for one, other in zip(*light, strict=True):
        for measure, value in one.measures.items():
            np.testing.assert_allclose(other.measures[measure], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", BOTH)
def test_worth_and_likeness_are_those_of_the_native_model(name: str, tmp_path: Path) -> None:
    ours, theirs = hw.load(saved(name, tmp_path)), hw.attach(*build(name))
    for by in ("ablation", "gradient", "attribution"):
        a, b = (hw.importance(model, TEXTS, by=by, check=0) for model in (ours, theirs))
        np.testing.assert_allclose(b.mean, a.mean, atol=1e-5, rtol=0)
    a, b = (hw.compare(model, TEXTS, rows=16) for model in (ours, theirs))
    for measure, matrix in a.matrices.items():
        np.testing.assert_allclose(b.matrices[measure], matrix, atol=1e-4, rtol=0)
    assert copying(theirs) == pytest.approx(copying(ours), abs=1e-5)
    a, b = (write_share(model, TEXTS) for model in (ours, theirs))
    assert {head: x.share for head, x in b.items()} == pytest.approx({head: x.share for head, x in a.items()}, abs=1e-5)
    mine, other = (value_weighted(model, TEXTS[0], "1.1").weighted for model in (ours, theirs))
    assert (mine - other).abs().max() <= 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_families_that_are_not_ours_are_looked_at_all_the_same(name: str) -> None:
    model, tokenizer = build(name)
    theirs = hw.attach(model, tokenizer)
    seen = hw.attend(theirs, TEXTS[0], "1.1")
    assert (seen.map().sum(1) - 1).abs().max() < 1e-4
    assert len(seen.words) > 10
    made = hw.profile(theirs, documents(3), causal=False)
    assert len(list(made)) == len(theirs.heads)
    worth = hw.importance(theirs, TEXTS[:1], heads="1.*", how="zero")
    with torch.no_grad(), theirs.heads["1.0"].silenced():  # the loss itself, without the head
        lost = hw.importance(theirs, TEXTS[:1], heads="2.0", how="zero").clean - worth.clean
    assert worth["1.0"].worth == pytest.approx(lost, abs=1e-5)
    compared = hw.compare(theirs, TEXTS, rows=8)
    assert np.isfinite(compared.matrices["js"]).all()


def test_an_encoder_decoder_is_attended_with_its_source() -> None:
    model, tokenizer = BY_NAME["bart"].build(), Tokenizer.from_wordpiece(VOCABULARY)
    theirs = hw.attach(model, tokenizer)
    seen = hw.attend(theirs, "the cat", source="a dog ran")
    assert seen.map("cross.1.2").shape == (len(seen.words), len(seen.source_words))
    assert seen.map("enc.0.0").shape == (len(seen.source_words),) * 2
    ids, source = (torch.tensor([tokenizer.encode(text)]) for text in ("the cat", "a dog ran"))
    with torch.no_grad(), hw.record(theirs, "cross.1.2", what=("v", "map")) as recording:
        theirs(ids, source=source)
    (head,), found = theirs.heads.select("cross.1.2"), recording["cross.1.2"]
    want = found.map()[0] * (found.v[0] @ head.W_O).norm(dim=-1)
    made = value_weighted(theirs, "the cat", "cross.1.2", source="a dog ran", words=False)
    assert (made.weighted - want / want.sum(1, keepdim=True)).abs().max() <= 1e-5
    assert (len(made.words), len(made.seen)) == (ids.shape[1], source.shape[1])


@pytest.mark.parametrize("name", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_an_encoder_decoder_is_profiled(name: str, tmp_path: Path) -> None:
    """Each text is source and target; what is told of one head of every stack follows from its maps, text by text."""
    theirs = hw.attach(*build(name))
    seen = hw.profile(theirs, TEXTS, relations=documents(6))
    assert seen.addresses == theirs.heads.addresses
    heads = ("enc.1.2", "dec.0.3", "cross.1.2")
    rows: dict[str, list[tuple[float, ...]]] = {head: [] for head in heads}
    for text in TEXTS:
        ids = torch.tensor([theirs.tokenizer.encode(text)])
        with torch.no_grad(), hw.record(theirs, ",".join(heads), what="map") as recording:
            theirs(ids, source=ids)
        for head in heads:
            for place, p in enumerate(recording[head].map()[0].double()):
                back = float(p[place - 1]) if place else float("nan")
                rows[head].append((float(-torch.xlogy(p, p).sum()), float(1 / (p**2).sum()), float(p[0]), back))
    for head, told in rows.items():
        want = np.nanmean(np.array(told), 0)
        names = ("entropy", "participation", "first", *(() if head.startswith("cross") else ("offset 1",)))
        got = [seen[head].measures[measure] for measure in names]
        np.testing.assert_allclose(got, want[: len(names)], atol=1e-5, rtol=0)
    assert np.isnan(seen["cross.1.2"].measures["offset 1"])
    assert len(hw.profile(theirs, TEXTS, relations=documents(2), detail="light", control="random-init")) == len(seen)
    for picture in (seen.plot.roles(), seen.plot.depth(), seen.plot.offsets()):
        picture.save(tmp_path / "picture.png")
    assert seen.report(tmp_path / "heads.html", theirs).is_file()


PAIRS = [(TEXTS[0], "she saw a dog"), ("who came late?", TEXTS[1]), ("a cat", "the cat.")]  # of very different lengths


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_an_encoder_decoder_is_asked_about_pairs(name: str) -> None:
    """The loss is the one the model itself has for labels; without a head, the one it has while that is silent."""
    theirs = hw.attach(*build(name))
    model, encode = theirs.model, theirs.tokenizer.encode

    def loss() -> float:
        labels = [torch.tensor([encode(text)]) for _, text in PAIRS]
        with torch.no_grad():
            own = [
                float(model(input_ids=torch.tensor([encode(source)]), labels=label).loss) * label.numel()
                for (source, _), label in zip(PAIRS, labels, strict=True)
            ]
        return float(np.sum(own)) / sum(label.numel() for label in labels)

    heads = ("enc.1.2", "dec.0.3", "cross.1.0")
    worth = hw.importance(theirs, PAIRS, heads=",".join(heads), how="zero")
    clean = loss()
    assert worth.clean == pytest.approx(clean, abs=1e-5)
    for head in heads:
        with theirs.heads[head].silenced():
            assert worth[head].worth == pytest.approx(loss() - clean, abs=1e-5)
    assert hw.importance(theirs, PAIRS, by="attribution", check=0).mean.shape == (len(theirs.heads),)
    with pytest.raises(hw.HeadwiseError, match="needs pairs"):
        hw.importance(theirs, TEXTS)
    with pytest.raises(hw.HeadwiseError, match="each is source and target"):
        hw.profile(theirs, PAIRS)


def test_an_encoder_decoder_is_ranked_cut_and_healed(tmp_path: Path) -> None:
    theirs = hw.attach(*build("bart"))
    small = hw.prune(theirs, keep=0.5, on=PAIRS)
    assert len(small.heads) == len(theirs.heads) // 2
    how: dict[str, Any] = {"steps": 12, "batch": 3, "rate": 0.01, "evaluate_every": 3, "warmup": 0}
    healed = heal(small, PAIRS * 8, **how, out=tmp_path / "run", progress=False)
    losses = [row["valid_loss"] for row in healed.history if "valid_loss" in row]
    assert losses[-1] < losses[0]
    again = hw.load(tmp_path / "run" / "model")
    ids, source = torch.tensor([[1, 5, 6]]), torch.tensor([[2, 7, 8, 9]])
    with torch.no_grad():
        assert torch.equal(again(ids, source=source), small(ids, source=source))
    gates = learn_gates(theirs, PAIRS, keep=0.5, steps=4, batch=2)
    assert np.mean(list(gates.values())) == pytest.approx(0.5, abs=0.02)


def test_where_writing_starts_must_be_known() -> None:
    theirs = hw.attach(*build("bart"))
    for config in (theirs.model.config, theirs.model.generation_config):
        config.decoder_start_token_id = None
    with pytest.raises(hw.HeadwiseError, match="decoder_start_token_id"):
        hw.importance(theirs, PAIRS)
    body = hw.attach(build("bart")[0].model, theirs.tokenizer)  # which does not generate
    body.model.config.decoder_start_token_id = None
    with pytest.raises(hw.HeadwiseError, match="decoder_start_token_id"):
        hw.importance(body, PAIRS)
    body.model.config.model_type = "mbart"
    with pytest.raises(hw.HeadwiseError, match="languages by codes"):
        hw.importance(body, PAIRS)


def test_an_encoder_decoder_without_an_output_is_asked_for_its_state() -> None:
    model, tokenizer = build("bart")
    theirs = hw.attach(model.model, tokenizer)
    worth = hw.importance(theirs, PAIRS[:1], heads="cross.1.0", how="zero")
    ids, source = [1, *tokenizer.encode(PAIRS[0][1])], tokenizer.encode(PAIRS[0][0])
    given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([ids])}
    with torch.no_grad():
        clean = theirs.model(**given).last_hidden_state[0].mean(0)
        with theirs.heads["cross.1.0"].silenced():
            turned = theirs.model(**given).last_hidden_state[0].mean(0)
    assert worth["cross.1.0"].worth == pytest.approx(1 - float(torch.cosine_similarity(clean, turned, 0)), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "opt"])
def test_gates_are_learned(name: str) -> None:
    theirs = hw.attach(*build(name))
    before = {n: v.clone() for n, v in theirs.model.named_parameters()}
    gates = learn_gates(theirs, TEXTS * 4, keep=0.5, steps=4, batch=4, context=24)
    assert tuple(gates) == theirs.heads.addresses
    assert np.mean(list(gates.values())) == pytest.approx(0.5, abs=0.02)
    assert all(torch.equal(v, before[n]) for n, v in theirs.model.named_parameters())


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_a_cut_model_is_healed(name: str, tmp_path: Path) -> None:
    theirs = hw.attach(*build(name))
    small = hw.prune(theirs, keep=0.5, by="gradient", fold=False, on=TEXTS)
    assert len(small.heads) == len(theirs.heads) // 2
    how: dict[str, Any] = {"steps": 12, "batch": 4, "context": 24, "rate": 0.01, "evaluate_every": 3}
    healed = heal(small, " ".join(TEXTS * 20), **how, out=tmp_path / "run", progress=False)
    assert healed.model is small
    losses = [row["valid_loss"] for row in healed.history if "valid_loss" in row]
    assert losses[-1] < losses[0]
    small.save(tmp_path / "small")
    ids = torch.tensor([[5, 6, 7, 8]])
    for folder in ("small", "run/model", "run/checkpoints/step-00000012"):
        again = hw.load(tmp_path / folder)
        with torch.no_grad():
            assert torch.equal(again(ids), small(ids))


@pytest.mark.parametrize("name", ["llama", "bert", "opt"])
def test_healing_that_was_broken_off_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    recipe = hw.Recipe(steps=8, batch=4, context=24, rate=0.01, warmup=0, save_every=2, evaluate_every=4)
    text = " ".join(TEXTS * 20)

    def run(folder: str, call: Any = None) -> Any:
        theirs: Any = hw.attach(*build(name))
        theirs = theirs.cut("1.2") if name != "opt" else theirs
        return hw.train(theirs, text, recipe, out=tmp_path / folder, call=call, every=1, progress=False).model

    def stop(model: Any, step: int) -> None:
        if step == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run("broken", stop)
    whole, mended = run("whole"), run("broken")
    for one, other in zip(whole.model.parameters(), mended.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_random_twins_and_tokenizers_of_theirs() -> None:
    transformers: Any = pytest.importorskip("transformers")
    model, tokenizer = build("phi3")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, pad_token="[PAD]", cls_token="[CLS]"
    )
    theirs = hw.attach(model, fast)
    assert theirs.tokenizer.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert (theirs.tokenizer.pad, theirs.tokenizer.cls) == (0, 2)
    made = hw.profile(theirs, documents(2), control="random-init", causal=False)
    assert len(list(made)) == len(theirs.heads)
    with pytest.raises(hw.HeadwiseError, match="fast tokenizer"):
        hw.attach(build("phi3")[0], object())


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("name", ["opt", "roberta"])
def test_every_verb_takes_a_folder_of_another_family(name: str, tmp_path: Path) -> None:
    from headwise.cli import app

    folder = str(saved(name, tmp_path / name))
    short = ["--json"]
    verbs = [
        ["info", folder],
        ["attend", folder, TEXTS[0], "--head", "1.1"],
        ["heads", folder, TEXTS[0], "--no-causal"],
        ["ablate", folder, TEXTS[0], "--heads", "1.*"],
        ["export", folder, str(tmp_path / "out")],
    ]
    verbs += [["generate", folder, "the cat", "--tokens", "3", "--silence", "1.1"]] if name == "opt" else []
    for verb in verbs:
        done = CliRunner().invoke(app, [*verb, *short])
        assert done.exit_code == 0, (verb, done.output, done.exception)
        json.loads(done.stdout)
    facts = json.loads(CliRunner().invoke(app, ["info", folder, "--json"]).stdout)
    assert (facts["layers"], facts["heads"], facts["kind"]) == (3, 12, "decoder" if name == "opt" else "encoder")
    assert facts["parameters"] == sum(value.numel() for value in build(name)[0].parameters())


@pytest.mark.usefixtures("few_documents")
def test_a_folder_of_another_family_is_pruned_into_a_folder_that_loads(tmp_path: Path) -> None:
    from headwise.cli import app

    folder, out = str(saved("qwen3", tmp_path / "qwen3")), tmp_path / "half"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS))
    asked = ["prune", folder, str(text), "--keep", "0.5", "--by", "gradient", "--length", "16", "--seeds", "1"]
    done = CliRunner().invoke(app, [*asked, "--out", str(out), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads(done.stdout)
    small = hw.load(out)
    assert 2 * len(small.spec.addresses) == 2 * told["report"]["after"]["heads"] == told["report"]["before"]["heads"]
    assert not set(told["plan"]["heads"]) & {str(head) for head in small.spec.addresses}
    head = str(small.spec.addresses[0])
    shown = CliRunner().invoke(app, ["head", str(out), head, TEXTS[0], "--json"])
    assert shown.exit_code == 0, (shown.output, shown.exception)


def test_missing_weights_are_refused_not_drawn(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("opt", tmp_path / "opt")
    state = load_file(folder / "model.safetensors")
    gone = next(name for name in state if "fc1.weight" in name)
    save_file(
        {name: value for name, value in state.items() if name != gone}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(hw.HeadwiseError, match=r"lacks weights.*fc1"):
        hw.load(folder)


@pytest.mark.usefixtures("few_documents")
def test_the_heads_verb_takes_an_encoder_decoder(tmp_path: Path) -> None:
    from headwise.cli import app

    folder, page = saved("bart", tmp_path / "bart"), tmp_path / "heads.html"
    done = CliRunner().invoke(app, ["heads", str(folder), *TEXTS[:1], "--report", str(page), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert {record["address"].split(".")[0] for record in json.loads(done.stdout)["heads"]} == {"enc", "dec", "cross"}
    assert page.is_file()
