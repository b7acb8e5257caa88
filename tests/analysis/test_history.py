"""Biographies: the same numbers as maps give, a run that is not disturbed, files that come back or are refused."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.roles.history import MEASURES, HeadHistory
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from headwise.text.documents import Document, Relation
from headwise.text.synthetic import VOCABULARY
from tests.runner import headwise
from tests.training import tiny

SPEC = ModelSpec(vocab=257, context=48, layers=2, attention=AttentionSpec(width=24, heads=6, kv_heads=3, head_dim=4))
ARCS = [
    Document.of(["one", "cat", "saw", "two", "dogs"], [Relation("object", 2, 4), Relation("subject", 2, 1)]),
    Document.of(["those", "men", "saw", "the", "old", "trees"], [Relation("object", 2, 5), Relation("subject", 2, 1)]),
]


def make(spec: ModelSpec = SPEC, seed: int = 3) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(spec)
    model.tokenizer = byte_tokenizer()
    for value in model.parameters():
        value.data += 0.2 * torch.randn_like(value)  # heads that differ
    return model


def filled(values: np.ndarray, steps: list[int]) -> HeadHistory:
    """A history with numbers put in by hand: (steps, heads, measures)."""
    made = HeadHistory()
    made.addresses = tuple(f"{i // 2}.{i % 2}" for i in range(values.shape[1]))
    made.names = MEASURES[: values.shape[2]]
    for step, row in zip(steps, values, strict=True):
        made._keep(step, row.astype(np.float32))
    return made


def maps(model: Transformer, text: str) -> torch.Tensor:
    """Every head's whole map of one text: (heads, T, T)."""
    seen = hw.attend(model, text, words=False)
    return torch.stack([seen.map(str(head)).double() for site in model.sites() for head in site.addresses])


def test_numbers_are_those_of_whole_maps() -> None:
    model, texts = make(), ["to be or not to be", "a cat"]
    history = HeadHistory(texts)
    history(model, 5)
    sums: dict[str, Any] = dict.fromkeys(("entropy", "confidence", "distance", "first", "offset 1"), 0.0)
    counts = dict.fromkeys(sums, 0)
    for text in texts:
        p = maps(model, text)
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
            assert history.of(head, name) == pytest.approx([float(sums[name][i]) / counts[name]], abs=2e-5), name
    assert history.names == MEASURES
    assert len(history.addresses) == 12


def test_uniform_heads_on_repeats() -> None:
    model = make()
    for value in model.parameters():
        value.data.zero_()
    history = HeadHistory("to be")
    history(model, 0)
    rows = 1 / np.arange(1, 33)  # what row i gives each key; R has 16 tokens, no start token before it
    expected = {
        "induction": rows[16:].mean(),
        "duplicate": rows[17:].mean(),
    }  # row 16 looks for the first token: not asked
    for name, value in expected.items():
        assert history.of("1.5", name) == pytest.approx([value], abs=1e-6), name


def test_relations_are_hits_of_the_most_attended_word() -> None:
    model = make(replace(SPEC, kind="encoder", output="mlm"))
    history = HeadHistory(ARCS)
    history(model, 0)
    hits: dict[str, list[torch.Tensor]] = {}
    for document in ARCS:
        seen = hw.attend(model, document.text, words=False)
        ends = np.cumsum([len(word) + 1 for word in document.words])  # a byte is a token, a space lies between words
        places = [range(end - 1 - len(word), end - 1) for word, end in zip(document.words, ends, strict=True)]
        p = torch.stack([seen.map(head) for head in history.addresses])
        to = torch.stack([p[..., list(some)].sum(-1) for some in places], -1)
        words = torch.stack([to[:, list(some)].mean(1) for some in places], 1)  # (heads, W, W)
        best = words.masked_fill(torch.eye(len(places), dtype=torch.bool), -1).argmax(-1)
        for name, source, target in document.relations:
            for way, a, b in ((">", source, target), ("<", target, source)):
                hits.setdefault(f"{name} {way} hits", []).append(best[:, a] == b)
    assert set(history.names) == {*MEASURES, *hits}
    for name, found in hits.items():
        expected = torch.stack(found).float().mean(0)
        assert [history.of(head, name)[0] for head in history.addresses] == pytest.approx(expected.tolist()), name
    silent = HeadHistory(ARCS, relations=False)
    silent(model, 0)
    assert silent.names == MEASURES


def test_a_decoder_is_not_asked_about_words_to_come() -> None:
    history = HeadHistory(ARCS)
    history(make(), 0)
    assert set(history.names) - set(MEASURES) == {"object < hits", "subject > hits"}
    assert not np.isnan(history.values).any()


@pytest.mark.parametrize("spec", [tiny.NOISY, tiny.ODD, tiny.MASKED])
def test_training_goes_on_to_the_same_bits(spec: ModelSpec, tmp_path: Path) -> None:
    recipe = replace(tiny.SHORT, steps=9, checkpointing=spec is tiny.NOISY)
    history = HeadHistory(["to be or not", "to be"])
    plain = tiny.run(spec, recipe, tmp_path / "plain")
    watched = tiny.run(spec, recipe, tmp_path / "watched", call=history, every=4)
    tiny.same_run(plain, watched)
    assert history.steps == [0, 4, 8, 9]
    first, *_, last = history.values
    assert not np.array_equal(first, last), "the heads did change"


def test_a_broken_run_goes_on_to_the_same_biography(tmp_path: Path) -> None:
    recipe, texts, path = replace(tiny.SHORT, steps=9), ["to be or not", "to be"], tmp_path / "heads.npz"
    whole, broken = HeadHistory(texts), HeadHistory(texts)
    tiny.run(tiny.NOISY, recipe, tmp_path / "whole", call=whole, every=2)

    def stop(model: Transformer, step: int) -> None:
        broken(model, step)
        if step == 6:
            broken.save(path)
            raise tiny.Stop

    with pytest.raises(tiny.Stop):
        tiny.run(tiny.NOISY, recipe, tmp_path / "broken", call=stop, every=2)
    again = HeadHistory.load(path, texts)
    assert again.steps == [0, 2, 4, 6]
    tiny.run(tiny.NOISY, recipe, tmp_path / "broken", call=again, every=2)  # from the checkpoint of step 4
    assert again.steps == whole.steps == [0, 2, 4, 6, 8, 9]
    assert np.array_equal(again.values, whole.values)


def test_nothing_stays_changed() -> None:
    model = make(replace(SPEC, dropout=0.3))
    model.train()
    part = next(iter(model.children()))
    part.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, history = torch.get_rng_state(), HeadHistory(ARCS)
    history(model, 1)
    history(model, 2)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert not any(site.is_open for site in model.sites())
    assert np.array_equal(*history.values), "dropout is off, the texts are the same"


def test_modes_come_back_after_an_error() -> None:
    model = make()
    model.train()
    with pytest.raises(hw.HeadwiseError, match="more than the 48 positions"):
        HeadHistory([Document.of(["word"] * 30)])(model, 0)
    assert model.training


def test_born_and_best() -> None:
    values = np.array([[[0.1, 9], [0.6, 9]], [[0.5, 9], [np.nan, 9]], [[0.9, 9], [0.2, 9]]])
    made = filled(values, [0, 10, 25])
    assert made.born("entropy", 0.5) == {"0.0": 10, "0.1": 0}
    assert made.born("entropy", 0.7) == {"0.0": 25}
    assert made.born("entropy", 1.1) == {}
    assert made.best("entropy") == ("0.0", pytest.approx(0.9))
    assert made.of("0.0", "entropy") == pytest.approx([0.1, 0.5, 0.9])
    with pytest.raises(hw.HeadwiseError, match="did you mean entropy"):
        made.of("0.0", "entropi")
    with pytest.raises(hw.HeadwiseError, match=r"no head '7\.1'"):
        made.of("7.1", "entropy")
    with pytest.raises(hw.HeadwiseError, match="empty"):
        HeadHistory().best("entropy")


def test_a_step_seen_again_takes_the_place_of_the_old() -> None:
    made = filled(np.arange(4.0).reshape(4, 1, 1), [0, 4, 8, 12])
    for step, value in ((8, 80.0), (6, 60.0), (12, 120.0)):
        made._keep(step, np.full((1, 1), value, np.float32))
    assert made.steps == [0, 4, 6, 8, 12]
    assert made.of("0.0", "entropy") == [0, 1, 60, 80, 120]


def test_a_file_comes_back_and_goes_on(tmp_path: Path) -> None:
    one, two = make(seed=3), make(seed=4)
    whole, half = HeadHistory(ARCS), HeadHistory(ARCS)
    whole(one, 0)
    whole(two, 5)
    half(one, 0)
    again = HeadHistory.load(half.save(tmp_path / "heads.npz"), ARCS)
    again(two, 5)
    assert (again.steps, again.addresses, again.names) == (whole.steps, whole.addresses, whole.names)
    assert np.array_equal(again.values, whole.values)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.npz"]
    with pytest.raises(hw.HeadwiseError, match="other texts"):
        HeadHistory.load(tmp_path / "heads.npz", "another text")(two, 9)
    with pytest.raises(hw.HeadwiseError, match="not the same"):
        again(make(replace(SPEC, layers=1)), 9)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = filled(np.random.default_rng(0).random((3, 4, 5)), [0, 1, 2]).save(tmp_path / "heads.npz")
    good = path.read_bytes()
    damaged = [good[: len(good) // 2], b"", b"nonsense", good[:60] + b"\0" * 40 + good[100:]]
    with np.load(BytesIO(good)) as file:
        values, told = file["values"], json.loads(file["told"].tobytes())
    wrong = ({"version": 99}, {"steps": [0, 1]}, {"steps": [2, 1, 0]}, {"heads": ["x"] * 4}, {"names": None})
    for changes, numbers in (
        *((one, values) for one in wrong), ({}, values.astype(np.float64)), ({}, values.astype(object)), ({}, values[0]),
    ):  # fmt: skip
        buffer = BytesIO()
        np.savez(buffer, values=numbers, told=np.frombuffer(json.dumps(told | changes).encode(), dtype=np.uint8))
        damaged.append(buffer.getvalue())
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(hw.HeadwiseError, match="not a history that can be read here"):
            HeadHistory.load(path)
    with pytest.raises(hw.HeadwiseError, match="there is no file"):
        HeadHistory.load(tmp_path / "none.npz")


def test_the_texts_it_chooses() -> None:
    english = HeadHistory()
    english(make(replace(SPEC, context=128, layers=1)), 0)
    assert any(name.endswith("hits") for name in english.names)
    short = HeadHistory()
    short(make(replace(SPEC, context=8, layers=1)), 0)
    assert short.names == MEASURES, "no sentence fits into 8 bytes; pieces of them do"
    tokenizer = word_tokenizer(VOCABULARY)
    little = make(replace(SPEC, vocab=len(tokenizer), context=256, layers=1))
    little.tokenizer = tokenizer
    own = HeadHistory()
    own(little, 0)
    assert "pronoun-antecedent > hits" in own.names


def test_the_command_line(tmp_path: Path) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "run"
    text.write_text("the dog saw the cat, and the cat ran to the tree.\n" * 20)
    sizes = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "32", "--batch", "2", "--warmup", "2"]
    sizes += ["--steps", "5", "--evaluate-every", "2"]

    def run(*more: str) -> str:
        return headwise("train", str(text), *sizes, "--out", str(out), *more).told

    assert "half of it at step" in run("--watch-heads")
    kept = HeadHistory.load(out / "heads.npz")
    assert kept.steps == [0, 2, 4, 5]
    told = json.loads(run("--watch-heads", "--json"))["heads"]
    assert [row["measure"] for row in told] == list(kept.names)
    for row in told:
        life = kept.of(row["head"], row["measure"])
        assert row["value"] == life[-1] == max(kept.of(head, row["measure"])[-1] for head in kept.addresses)
        reached = [step for step, value in zip(kept.steps, life, strict=True) if value >= row["value"] / 2]
        assert row["half_at"] == (reached[0] if row["value"] > 0 else None)
    assert "heads" not in json.loads(run("--json"))
