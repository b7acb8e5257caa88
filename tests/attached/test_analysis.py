"""Analysis and pruning of attached models give the same results as on the same model loaded natively."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.analysis.attribution.head_output_scores import output_shares, ov_eigenvalue_scores, value_weighted_map
from headwise.compression.l0_gates import learn_gates
from headwise.compression.recovery_finetune import recover
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from tests.attached.models import BY_NAME

LETTERS = [chr(i) for i in range(97, 123)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS), ".", ",", "'", "?"]
TEXTS = [
    "the cats sat on the mat, and the dog saw them.",
    "a man who came late gave it to her. she was glad, he was not.",
]
NATIVE_FAMILIES = ["gpt2", "bert", "llama", "mistral", "qwen2"]  # families that hw.load also supports natively
ATTACHED_ONLY = ["roberta", "distilbert", "qwen3", "gemma3", "phi3", "opt", "gpt_neox", "modernbert", "electra"]


def build(name: str) -> tuple[Any, Tokenizer]:
    """Return a model with a character tokenizer."""
    case = BY_NAME[name]
    sizes = case.sizes | {"n_positions" if name in ("gpt2", "t5") else "max_position_embeddings": 300}
    return dataclasses.replace(case, sizes=sizes).build(), Tokenizer.from_wordpiece(VOCABULARY)


def save_model(name: str, folder: Path) -> Path:
    model, tokenizer = build(name)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def documents(count: int) -> list[Document]:
    return [item for item in hw.Corpus.probe_set().items() if isinstance(item, Document)][:count]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sensitivity_attached_equals_native(name: str, tmp_path: Path) -> None:
    """The model is unchanged afterwards. Keys are not rotated to another basis, so weights are quantized in the given one."""
    native, attached = hw.load(save_model(name, tmp_path)), hw.attach(*build(name))
    before = {key: value.clone() for key, value in attached.state_dict().items()}
    options: Any = {"bits": (2,), "heads": "1.*", "parts": ("qk", "vo", "keys", "values")}
    a, b = hw.sensitivity(native, TEXTS, basis="given", **options), hw.sensitivity(attached, TEXTS, **options)
    assert a.targets == b.targets
    np.testing.assert_allclose(a.loss_increase, b.loss_increase, atol=2e-4)
    assert all(torch.equal(value, before[key]) for key, value in attached.state_dict().items())
    with pytest.raises(hw.HeadwiseError, match="basis='given'"):
        hw.sensitivity(attached, TEXTS, basis="balanced")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("mistral", "qwen2") else name for name in NATIVE_FAMILIES],
)
def test_profile_attached_equals_native(name: str, tmp_path: Path) -> None:
    native = hw.load(save_model(name, tmp_path))
    attached = hw.attach(*build(name))
    assert isinstance(native, hw.Transformer)
    for causal in (False, True) if name == "llama" else (False,):
        a, b = (hw.profile(model, documents(5), causal=causal) for model in (native, attached))
        assert [head.address for head in a] == [head.address for head in b]
        for native_head, attached_head in zip(a, b, strict=True):
            assert native_head.metrics.keys() == attached_head.metrics.keys()
            assert native_head.role == attached_head.role
            for metric, value in native_head.metrics.items():
                np.testing.assert_allclose(attached_head.metrics[metric], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NATIVE_FAMILIES)
def test_importance_and_similarity_attached_equal_native(name: str, tmp_path: Path) -> None:
    native, attached = hw.load(save_model(name, tmp_path)), hw.attach(*build(name))
    for ranking in ("ablation", "gradient", "attribution"):
        a, b = (hw.importance(model, TEXTS, ranking=ranking, check_heads=0) for model in (native, attached))
        np.testing.assert_allclose(b.mean, a.mean, atol=1e-5, rtol=0)
    a, b = (hw.compare_heads(model, TEXTS, rows=16) for model in (native, attached))
    for metric, matrix in a.matrices.items():
        np.testing.assert_allclose(b.matrices[metric], matrix, atol=1e-4, rtol=0)
    assert ov_eigenvalue_scores(attached) == pytest.approx(ov_eigenvalue_scores(native), abs=1e-5)
    a, b = (output_shares(model, TEXTS) for model in (native, attached))
    assert {head: x.fraction for head, x in b.items()} == pytest.approx(
        {head: x.fraction for head, x in a.items()}, abs=1e-5
    )
    native_map, attached_map = (value_weighted_map(model, TEXTS[0], "1.1").weighted for model in (native, attached))
    assert (native_map - attached_map).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ATTACHED_ONLY)
def test_analysis_attached_only_families_runs(name: str) -> None:
    model, tokenizer = build(name)
    attached = hw.attach(model, tokenizer)
    view = hw.attention_maps(attached, TEXTS[0], "1.1")
    assert (view.map().sum(1) - 1).abs().max() < 1e-4
    assert len(view.words) > 10
    profile = hw.profile(attached, documents(3), causal=False)
    assert len(list(profile)) == len(attached.heads)
    importance = hw.importance(attached, TEXTS[:1], heads="1.*", ablation="zero")
    with torch.no_grad(), attached.heads["1.0"].silenced():  # reference: the loss itself, without the head
        lost = hw.importance(attached, TEXTS[:1], heads="2.0", ablation="zero").clean_loss - importance.clean_loss
    assert importance["1.0"].importance == pytest.approx(lost, abs=1e-5)
    compared = hw.compare_heads(attached, TEXTS, rows=8)
    assert np.isfinite(compared.matrices["js"]).all()


def test_attention_maps_encoder_decoder_uses_source() -> None:
    model, tokenizer = BY_NAME["bart"].build(), Tokenizer.from_wordpiece(VOCABULARY)
    attached = hw.attach(model, tokenizer)
    view = hw.attention_maps(attached, "the cat", source="a dog ran")
    assert view.map("cross.1.2").shape == (len(view.words), len(view.source_words))
    assert view.map("enc.0.0").shape == (len(view.source_words),) * 2
    ids, source = (torch.tensor([tokenizer.encode(text)]) for text in ("the cat", "a dog ran"))
    with torch.no_grad(), hw.record(attached, "cross.1.2", tensors=("v", "map")) as recording:
        attached(ids, source=source)
    (head,), recorded = attached.heads.select("cross.1.2"), recording["cross.1.2"]
    want = recorded.map()[0] * (recorded.v[0] @ head.W_O).norm(dim=-1)
    weighted = value_weighted_map(attached, "the cat", "cross.1.2", source="a dog ran", words=False)
    assert (weighted.weighted - want / want.sum(1, keepdim=True)).abs().max() <= 1e-5
    assert (len(weighted.query_words), len(weighted.key_words)) == (ids.shape[1], source.shape[1])


@pytest.mark.parametrize("name", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_profile_encoder_decoder_equals_recorded_maps(name: str, tmp_path: Path) -> None:
    """Each text is source and target. The profile of one head per stack equals the statistics of its recorded maps."""
    attached = hw.attach(*build(name))
    profile = hw.profile(attached, TEXTS, relations=documents(6))
    assert profile.addresses == attached.heads.addresses
    heads = ("enc.1.2", "dec.0.3", "cross.1.2")
    rows: dict[str, list[tuple[float, ...]]] = {head: [] for head in heads}
    for text in TEXTS:
        ids = torch.tensor([attached.tokenizer.encode(text)])
        with torch.no_grad(), hw.record(attached, ",".join(heads), tensors="map") as recording:
            attached(ids, source=ids)
        for head in heads:
            for position, p in enumerate(recording[head].map()[0].double()):
                back = float(p[position - 1]) if position else float("nan")
                rows[head].append((float(-torch.xlogy(p, p).sum()), float(1 / (p**2).sum()), float(p[0]), back))
    for head, values in rows.items():
        want = np.nanmean(np.array(values), 0)
        names = ("entropy", "participation", "first", *(() if head.startswith("cross") else ("offset 1",)))
        got = [profile[head].metrics[metric] for metric in names]
        np.testing.assert_allclose(got, want[: len(names)], atol=1e-5, rtol=0)
    assert np.isnan(profile["cross.1.2"].metrics["offset 1"])
    assert len(hw.profile(attached, TEXTS, relations=documents(2), control="random-init")) == len(profile)
    for figure in (profile.plot.roles(), profile.plot.depth(), profile.plot.offsets()):
        figure.save(tmp_path / "picture.png")
    assert profile.report(tmp_path / "heads.html", attached).is_file()


# Texts of very different lengths.
PAIRS = [(TEXTS[0], "she saw a dog"), ("who came late?", TEXTS[1]), ("a cat", "the cat.")]


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_importance_pairs_equals_model_loss_change(name: str) -> None:
    """The reference is the model's own loss for labels, with and without the silenced head."""
    attached = hw.attach(*build(name))
    model, encode = attached.model, attached.tokenizer.encode

    def loss() -> float:
        labels = [torch.tensor([encode(text)]) for _, text in PAIRS]
        with torch.no_grad():
            own = [
                float(model(input_ids=torch.tensor([encode(source)]), labels=label).loss) * label.numel()
                for (source, _), label in zip(PAIRS, labels, strict=True)
            ]
        return float(np.sum(own)) / sum(label.numel() for label in labels)

    heads = ("enc.1.2", "dec.0.3", "cross.1.0")
    importance = hw.importance(attached, PAIRS, heads=",".join(heads), ablation="zero")
    clean = loss()
    assert importance.clean_loss == pytest.approx(clean, abs=1e-5)
    for head in heads:
        with attached.heads[head].silenced():
            assert importance[head].importance == pytest.approx(loss() - clean, abs=1e-5)
    assert hw.importance(attached, PAIRS, ranking="attribution", check_heads=0).mean.shape == (len(attached.heads),)
    with pytest.raises(hw.HeadwiseError, match="needs pairs"):
        hw.importance(attached, TEXTS)
    with pytest.raises(hw.HeadwiseError, match="does not support text pairs"):
        hw.profile(attached, PAIRS)


def test_recover_pruned_encoder_decoder_lowers_loss(tmp_path: Path) -> None:
    attached = hw.attach(*build("bart"))
    small = hw.prune(attached, keep=0.5, corpus=PAIRS)
    assert len(small.heads) == len(attached.heads) // 2
    options: dict[str, Any] = {"steps": 12, "batch_size": 3, "learning_rate": 0.01, "evaluate_every": 3, "warmup": 0}
    recovered = recover(small, PAIRS * 8, **options, out=tmp_path / "run", progress=False)
    losses = [row["valid_loss"] for row in recovered.history if "valid_loss" in row]
    assert losses[-1] < losses[0]
    again = hw.load(tmp_path / "run" / "model")
    ids, source = torch.tensor([[1, 5, 6]]), torch.tensor([[2, 7, 8, 9]])
    with torch.no_grad():
        assert torch.equal(again(ids, source=source), small(ids, source=source))
    gates = learn_gates(attached, PAIRS, keep=0.5, steps=4, batch=2)
    assert np.mean(list(gates.values())) == pytest.approx(0.5, abs=0.02)


def test_importance_unknown_decoder_start_raises() -> None:
    attached = hw.attach(*build("bart"))
    for config in (attached.model.config, attached.model.generation_config):
        config.decoder_start_token_id = None
    with pytest.raises(hw.HeadwiseError, match="decoder_start_token_id"):
        hw.importance(attached, PAIRS)
    body = hw.attach(build("bart")[0].model, attached.tokenizer)  # a body without an LM head cannot generate
    body.model.config.decoder_start_token_id = None
    with pytest.raises(hw.HeadwiseError, match="decoder_start_token_id"):
        hw.importance(body, PAIRS)
    body.model.config.model_type = "mbart"
    with pytest.raises(hw.HeadwiseError, match="requires language codes"):
        hw.importance(body, PAIRS)


def test_importance_without_output_uses_hidden_state() -> None:
    model, tokenizer = build("bart")
    attached = hw.attach(model.model, tokenizer)
    importance = hw.importance(attached, PAIRS[:1], heads="cross.1.0", ablation="zero")
    ids, source = [1, *tokenizer.encode(PAIRS[0][1])], tokenizer.encode(PAIRS[0][0])
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([ids])}
    with torch.no_grad():
        clean = attached.model(**inputs).last_hidden_state[0].mean(0)
        with attached.heads["cross.1.0"].silenced():
            silenced_state = attached.model(**inputs).last_hidden_state[0].mean(0)
    assert importance["cross.1.0"].importance == pytest.approx(
        1 - float(torch.cosine_similarity(clean, silenced_state, 0)), abs=1e-5
    )


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "opt"])
def test_learn_gates_attached_keeps_weights(name: str) -> None:
    attached = hw.attach(*build(name))
    before = {n: v.clone() for n, v in attached.model.named_parameters()}
    gates = learn_gates(attached, TEXTS * 4, keep=0.5, steps=4, batch=4, context=24)
    assert tuple(gates) == attached.heads.addresses
    assert np.mean(list(gates.values())) == pytest.approx(0.5, abs=0.02)
    assert all(torch.equal(v, before[n]) for n, v in attached.model.named_parameters())


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_recover_pruned_model_lowers_loss(name: str, tmp_path: Path) -> None:
    attached = hw.attach(*build(name))
    small = hw.prune(attached, keep=0.5, ranking="gradient", fold_mean=False, corpus=TEXTS)
    assert len(small.heads) == len(attached.heads) // 2
    options: dict[str, Any] = {"steps": 12, "batch_size": 4, "context": 24, "learning_rate": 0.01, "evaluate_every": 3}
    recovered = recover(small, " ".join(TEXTS * 20), **options, out=tmp_path / "run", progress=False)
    assert recovered.model is small
    losses = [row["valid_loss"] for row in recovered.history if "valid_loss" in row]
    assert losses[-1] < losses[0]
    small.save(tmp_path / "small")
    ids = torch.tensor([[5, 6, 7, 8]])
    for folder in ("small", "run/model", "run/checkpoints/step-00000012"):
        again = hw.load(tmp_path / folder)
        with torch.no_grad():
            assert torch.equal(again(ids), small(ids))


@pytest.mark.parametrize("name", ["llama", "bert", "opt"])
def test_train_resumed_attached_gives_same_weights(name: str, tmp_path: Path) -> None:
    recipe = hw.Recipe(steps=8, batch_size=4, context=24, learning_rate=0.01, warmup=0, save_every=2, evaluate_every=4)
    text = " ".join(TEXTS * 20)

    def run(folder: str, call: Any = None) -> Any:
        attached: Any = hw.attach(*build(name))
        attached = attached.prune("1.2", in_place=True) if name != "opt" else attached
        return hw.train(
            attached, text, recipe, out=tmp_path / folder, callback=call, callback_every=1, progress=False
        ).model

    def stop(model: Any, step: int) -> None:
        if step == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run("broken", stop)
    full, resumed = run("whole"), run("broken")
    for expected, actual in zip(full.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_attach_fast_tokenizer_profiles_with_random_control() -> None:
    transformers: Any = pytest.importorskip("transformers")
    model, tokenizer = build("phi3")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, pad_token="[PAD]", cls_token="[CLS]"
    )
    attached = hw.attach(model, fast)
    assert attached.tokenizer.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert (attached.tokenizer.pad, attached.tokenizer.cls) == (0, 2)
    profile = hw.profile(attached, documents(2), control="random-init", causal=False)
    assert len(list(profile)) == len(attached.heads)
    with pytest.raises(hw.HeadwiseError, match="fast tokenizer"):
        hw.attach(build("phi3")[0], object())


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("name", ["opt", "roberta"])
def test_commands_attached_only_folder_run(name: str, tmp_path: Path) -> None:
    from headwise.cli import app

    folder = str(save_model(name, tmp_path / name))
    short = ["--json"]
    commands = [
        ["info", folder],
        ["maps", folder, TEXTS[0], "--heads", "1.1"],
        ["profile", folder, TEXTS[0], "--no-causal"],
        ["importance", folder, TEXTS[0], "--heads", "1.*"],
        ["export", folder, str(tmp_path / "out")],
    ]
    commands += [["generate", folder, "the cat", "--max-new-tokens", "3", "--silence", "1.1"]] if name == "opt" else []
    for command in commands:
        done = CliRunner().invoke(app, [*command, *short])
        assert done.exit_code == 0, (command, done.output, done.exception)
        json.loads(done.stdout)
    facts = json.loads(CliRunner().invoke(app, ["info", folder, "--json"]).stdout)
    assert (facts["layers"], facts["heads"], facts["kind"]) == (3, 12, "decoder" if name == "opt" else "encoder")
    assert facts["parameters"] == sum(value.numel() for value in build(name)[0].parameters())


@pytest.mark.usefixtures("few_documents")
def test_prune_command_attached_only_folder_writes_loadable_model(tmp_path: Path) -> None:
    from headwise.cli import app

    folder, out = str(save_model("qwen3", tmp_path / "qwen3")), tmp_path / "half"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS))
    arguments = [
        "prune",
        folder,
        str(text),
        "--keep",
        "0.5",
        "--ranking",
        "gradient",
        "--max-length",
        "16",
        "--seeds",
        "1",
    ]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(done.stdout)
    small = hw.load(out)
    assert (
        2 * len(small.spec.head_addresses)
        == 2 * result["report"]["after"]["heads"]
        == result["report"]["before"]["heads"]
    )
    assert not set(result["plan"]["pruned_heads"]) & {str(head) for head in small.spec.head_addresses}
    head = str(small.spec.head_addresses[0])
    described = CliRunner().invoke(app, ["describe", str(out), head, TEXTS[0], "--json"])
    assert described.exit_code == 0, (described.output, described.exception)


def test_load_missing_weights_raises(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model("opt", tmp_path / "opt")
    state = load_file(folder / "model.safetensors")
    missing = next(name for name in state if "fc1.weight" in name)
    save_file(
        {name: value for name, value in state.items() if name != missing},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(hw.HeadwiseError, match=r"missing keys.*fc1"):
        hw.load(folder)


@pytest.mark.usefixtures("few_documents")
def test_profile_command_encoder_decoder_writes_report(tmp_path: Path) -> None:
    from headwise.cli import app

    folder, page = save_model("bart", tmp_path / "bart"), tmp_path / "heads.html"
    done = CliRunner().invoke(app, ["profile", str(folder), *TEXTS[:1], "--report", str(page), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert {record["address"].split(".")[0] for record in json.loads(done.stdout)["heads"]} == {"enc", "dec", "cross"}
    assert page.is_file()
