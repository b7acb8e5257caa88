"""Head histories: scores equal those of maps, training is not affected, files can be loaded or raise an error."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.roles.head_history import DEFAULT_METRICS, HeadHistory
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from headwise.text.synthetic import VOCABULARY
from tests.runner import run_command
from tests.training import tiny

SPEC = ModelSpec(vocab=257, context=48, layers=2, attention=AttentionSpec(width=24, heads=6, kv_heads=3, head_dim=4))
RELATION_DOCUMENTS = [
    Document.of(["one", "cat", "saw", "two", "dogs"], [Relation("object", 2, 4), Relation("subject", 2, 1)]),
    Document.of(["those", "men", "saw", "the", "old", "trees"], [Relation("object", 2, 5), Relation("subject", 2, 1)]),
]


def make_model(spec: ModelSpec = SPEC, seed: int = 3) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(spec)
    model.tokenizer = byte_tokenizer()
    for value in model.parameters():
        value.data += 0.2 * torch.randn_like(value)  # make the heads differ
    return model


def make_history(values: np.ndarray, steps: list[int]) -> HeadHistory:
    """Make a history with given values, (steps, heads, metrics)."""
    history = HeadHistory()
    history.addresses = tuple(f"{i // 2}.{i % 2}" for i in range(values.shape[1]))
    history.metric_names = DEFAULT_METRICS[: values.shape[2]]
    for step, row in zip(steps, values, strict=True):
        history._insert(step, row.astype(np.float32))
    return history


def token_maps(model: Transformer, text: str) -> torch.Tensor:
    """Return the full map of every head for one text, (heads, T, T)."""
    view = hw.attention_maps(model, text, words=False)
    return torch.stack(
        [view.map(str(head)).double() for hook_point in model.hook_points() for head in hook_point.head_addresses]
    )


def test_head_history_metrics_equal_dense_maps() -> None:
    model, texts = make_model(), ["to be or not to be", "a cat"]
    history = HeadHistory(texts)
    history(model, 5)
    sums: dict[str, Any] = dict.fromkeys(("entropy", "confidence", "distance", "first", "offset 1"), 0.0)
    counts = dict.fromkeys(sums, 0)
    for text in texts:
        p = token_maps(model, text)
        T = p.shape[-1]
        back = torch.arange(T)[:, None] - torch.arange(T)
        rows = {
            "entropy": -(p * p.clamp(min=1e-300).log()).sum(-1), "confidence": p.amax(-1), "distance": (p * back).sum(-1),
            "first": p[..., 0], "offset 1": p.diagonal(-1, 1, 2),
        }  # fmt: skip
        for name, row in rows.items():
            sums[name] += row.sum(-1)
            counts[name] += row.shape[-1]
    for name in sums:
        for i, head in enumerate(history.addresses):
            assert history.curve(head, name) == pytest.approx([float(sums[name][i]) / counts[name]], abs=2e-5), name
    assert history.metric_names == DEFAULT_METRICS
    assert len(history.addresses) == 12


def test_head_history_uniform_heads_match_closed_form() -> None:
    model = make_model()
    for value in model.parameters():
        value.data.zero_()
    history = HeadHistory("to be")
    history(model, 0)
    rows = 1 / np.arange(1, 33)  # weight of row i on each key; R has 16 tokens and no start token
    expected = {
        "induction": rows[16:].mean(),
        "duplicate": rows[17:].mean(),
    }  # the target of row 16 is the first token, so the row does not count
    for name, value in expected.items():
        assert history.curve("1.5", name) == pytest.approx([value], abs=1e-6), name


def test_head_history_relations_count_argmax_word_hits() -> None:
    model = make_model(replace(SPEC, kind="encoder", output="mlm"))
    history = HeadHistory(RELATION_DOCUMENTS)
    history(model, 0)
    hits: dict[str, list[torch.Tensor]] = {}
    for document in RELATION_DOCUMENTS:
        view = hw.attention_maps(model, document.text, words=False)
        ends = np.cumsum([len(word) + 1 for word in document.words])  # a byte is a token; a space separates words
        word_tokens = [range(end - 1 - len(word), end - 1) for word, end in zip(document.words, ends, strict=True)]
        p = torch.stack([view.map(head) for head in history.addresses])
        to = torch.stack([p[..., list(token_range)].sum(-1) for token_range in word_tokens], -1)
        words = torch.stack([to[:, list(token_range)].mean(1) for token_range in word_tokens], 1)  # (heads, W, W)
        best = words.masked_fill(torch.eye(len(word_tokens), dtype=torch.bool), -1).argmax(-1)
        for name, source, target in document.relations:
            for direction, a, b in ((">", source, target), ("<", target, source)):
                hits.setdefault(f"{name} {direction} hits", []).append(best[:, a] == b)
    assert set(history.metric_names) == {*DEFAULT_METRICS, *hits}
    for name, head_hits in hits.items():
        expected = torch.stack(head_hits).float().mean(0)
        assert [history.curve(head, name)[0] for head in history.addresses] == pytest.approx(expected.tolist()), name
    silent = HeadHistory(RELATION_DOCUMENTS, relations=False)
    silent(model, 0)
    assert silent.metric_names == DEFAULT_METRICS


def test_head_history_decoder_skips_later_words() -> None:
    history = HeadHistory(RELATION_DOCUMENTS)
    history(make_model(), 0)
    assert set(history.metric_names) - set(DEFAULT_METRICS) == {"object < hits", "subject > hits"}
    assert not np.isnan(history.values).any()


@pytest.mark.parametrize("spec", [tiny.NOISY, tiny.ODD, tiny.MASKED])
def test_head_history_does_not_change_training(spec: ModelSpec, tmp_path: Path) -> None:
    recipe = replace(tiny.SHORT, steps=9, checkpointing=spec is tiny.NOISY)
    history = HeadHistory(["to be or not", "to be"])
    plain = tiny.run(spec, recipe, tmp_path / "plain")
    watched = tiny.run(spec, recipe, tmp_path / "watched", callback=history, callback_every=4)
    tiny.assert_same_run(plain, watched)
    assert history.steps == [0, 4, 8, 9]
    first, *_, last = history.values
    assert not np.array_equal(first, last), "the heads did change"


def test_head_history_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    recipe, texts, path = replace(tiny.SHORT, steps=9), ["to be or not", "to be"], tmp_path / "heads.npz"
    uninterrupted, interrupted = HeadHistory(texts), HeadHistory(texts)
    tiny.run(tiny.NOISY, recipe, tmp_path / "whole", callback=uninterrupted, callback_every=2)

    def stop(model: Transformer, step: int) -> None:
        interrupted(model, step)
        if step == 6:
            interrupted.save(path)
            raise tiny.RunInterrupted

    with pytest.raises(tiny.RunInterrupted):
        tiny.run(tiny.NOISY, recipe, tmp_path / "broken", callback=stop, callback_every=2)
    resumed = HeadHistory.load(path, texts)
    assert resumed.steps == [0, 2, 4, 6]
    tiny.run(
        tiny.NOISY, recipe, tmp_path / "broken", callback=resumed, callback_every=2
    )  # from the checkpoint of step 4
    assert resumed.steps == uninterrupted.steps == [0, 2, 4, 6, 8, 9]
    assert np.array_equal(resumed.values, uninterrupted.values)


def test_head_history_leaves_model_unchanged() -> None:
    model = make_model(replace(SPEC, dropout=0.3))
    model.train()
    child = next(iter(model.children()))
    child.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, history = torch.get_rng_state(), HeadHistory(RELATION_DOCUMENTS)
    history(model, 1)
    history(model, 2)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert not any(hook_point.is_active for hook_point in model.hook_points())
    assert np.array_equal(*history.values), "dropout is off, the texts are the same"


def test_head_history_error_restores_mode() -> None:
    model = make_model()
    model.train()
    with pytest.raises(hw.HeadwiseError, match="48 positions"):
        HeadHistory([Document.of(["word"] * 30)])(model, 0)
    assert model.training


def test_head_history_born_and_best_follow_values() -> None:
    values = np.array([[[0.1, 9], [0.6, 9]], [[0.5, 9], [np.nan, 9]], [[0.9, 9], [0.2, 9]]])
    history = make_history(values, [0, 10, 25])
    assert history.first_step_reached("entropy", 0.5) == {"0.0": 10, "0.1": 0}
    assert history.first_step_reached("entropy", 0.7) == {"0.0": 25}
    assert history.first_step_reached("entropy", 1.1) == {}
    assert history.best_head("entropy") == ("0.0", pytest.approx(0.9))
    assert history.curve("0.0", "entropy") == pytest.approx([0.1, 0.5, 0.9])
    with pytest.raises(hw.HeadwiseError, match="did you mean entropy"):
        history.curve("0.0", "entropi")
    with pytest.raises(hw.HeadwiseError, match=r"unknown head '7\.1'"):
        history.curve("7.1", "entropy")
    with pytest.raises(hw.HeadwiseError, match="empty"):
        HeadHistory().best_head("entropy")


def test_head_history_repeated_step_replaces_old_values() -> None:
    history = make_history(np.arange(4.0).reshape(4, 1, 1), [0, 4, 8, 12])
    for step, value in ((8, 80.0), (6, 60.0), (12, 120.0)):
        history._insert(step, np.full((1, 1), value, np.float32))
    assert history.steps == [0, 4, 6, 8, 12]
    assert history.curve("0.0", "entropy") == [0, 1, 60, 80, 120]


def test_head_history_load_continues_recording(tmp_path: Path) -> None:
    first, second = make_model(seed=3), make_model(seed=4)
    full, partial = HeadHistory(RELATION_DOCUMENTS), HeadHistory(RELATION_DOCUMENTS)
    full(first, 0)
    full(second, 5)
    partial(first, 0)
    loaded = HeadHistory.load(partial.save(tmp_path / "heads.npz"), RELATION_DOCUMENTS)
    loaded(second, 5)
    assert (loaded.steps, loaded.addresses, loaded.metric_names) == (full.steps, full.addresses, full.metric_names)
    assert np.array_equal(loaded.values, full.values)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.npz"]
    with pytest.raises(hw.HeadwiseError, match="the texts differ"):
        HeadHistory.load(tmp_path / "heads.npz", "another text")(second, 9)
    with pytest.raises(hw.HeadwiseError, match="its heads differ"):
        loaded(make_model(replace(SPEC, layers=1)), 9)


def test_head_history_load_damaged_file_raises(tmp_path: Path) -> None:
    path = make_history(np.random.default_rng(0).random((3, 4, 5)), [0, 1, 2]).save(tmp_path / "heads.npz")
    good = path.read_bytes()
    damaged = [good[: len(good) // 2], b"", b"nonsense", good[:60] + b"\0" * 40 + good[100:]]
    with np.load(BytesIO(good)) as file:
        values, metadata = file["values"], json.loads(file["header"].tobytes())
    wrong = ({"version": 99}, {"steps": [0, 1]}, {"steps": [2, 1, 0]}, {"heads": ["x"] * 4}, {"metrics": None})
    for changes, array in (
        *((change, values) for change in wrong), ({}, values.astype(np.float64)), ({}, values.astype(object)),
        ({}, values[0]),
    ):  # fmt: skip
        buffer = BytesIO()
        np.savez(buffer, values=array, header=np.frombuffer(json.dumps(metadata | changes).encode(), dtype=np.uint8))
        damaged.append(buffer.getvalue())
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(hw.HeadwiseError, match="not a head history"):
            HeadHistory.load(path)
    with pytest.raises(hw.HeadwiseError, match="file not found"):
        HeadHistory.load(tmp_path / "none.npz")


def test_head_history_default_texts_fit_the_model() -> None:
    english = HeadHistory()
    english(make_model(replace(SPEC, context=128, layers=1)), 0)
    assert any(name.endswith("hits") for name in english.metric_names)
    short = HeadHistory()
    short(make_model(replace(SPEC, context=8, layers=1)), 0)
    assert short.metric_names == DEFAULT_METRICS, "no sentence fits into 8 bytes; pieces of them do"
    tokenizer = word_tokenizer(VOCABULARY)
    synthetic_model = make_model(replace(SPEC, vocab=len(tokenizer), context=256, layers=1))
    synthetic_model.tokenizer = tokenizer
    own = HeadHistory()
    own(synthetic_model, 0)
    assert "pronoun-antecedent > hits" in own.metric_names


def test_train_command_watch_heads_writes_history(tmp_path: Path) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "run"
    text.write_text("the dog saw the cat, and the cat ran to the tree.\n" * 20)
    sizes = ["--layers", "1", "--num-heads", "2", "--width", "16", "--context", "32", "--warmup", "2"]
    sizes += ["--batch-size", "2", "--steps", "5", "--evaluate-every", "2"]

    def run(*arguments: str) -> str:
        return run_command("train", str(text), *sizes, "--out", str(out), *arguments).output

    assert "step at half the value" in run("--watch-heads")
    history = HeadHistory.load(out / "heads.npz")
    assert history.steps == [0, 2, 4, 5]
    rows = json.loads(run("--watch-heads", "--json"))["heads"]
    assert [row["metric"] for row in rows] == list(history.metric_names)
    for row in rows:
        trajectory = history.curve(row["head"], row["metric"])
        assert (
            row["value"] == trajectory[-1] == max(history.curve(head, row["metric"])[-1] for head in history.addresses)
        )
        reached = [step for step, value in zip(history.steps, trajectory, strict=True) if value >= row["value"] / 2]
        assert row["half_step"] == (reached[0] if row["value"] > 0 else None)
    assert "heads" not in json.loads(run("--json"))
