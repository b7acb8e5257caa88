"""Profiles of small random models: nothing is found where nothing was learned, and no way of reading changes the numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.token_classes import class_flags
from headwise.analysis.recording.batching import make_batches
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import SHOWN, Profile
from headwise.analysis.roles.roles import RUNGS
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.random_attention import randomize_attention
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.documents import Document
from headwise.text.synthetic import VOCABULARY
from tests.contract import attached_models

HEADS = [f"{layer}.{head}" for layer in range(2) for head in range(4)]


def make(seed: int = 0, sharpness: float = 1.0) -> Transformer:
    """Random weights; with sharper queries and keys heads pick and choose, for no reason."""
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    spec = ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=AttentionSpec(width=32, heads=4))
    model = Transformer(spec)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.read.qkv_weight.mul_(sharpness)  # pyright: ignore
    model.tokenizer = tokenizer
    return model


def little(documents: int = 60, seed: int = 0) -> hw.Corpus:
    return hw.Corpus.little("held-out", documents=documents, seed=seed)


@pytest.fixture(scope="module")
def made() -> Profile:
    return profile(make(), little())


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_random_heads_have_no_roles(sharpness: float) -> None:
    """At most one head in a hundred, over four models: so none of 32."""
    told = [
        f"seed {seed}, {head.address}: {one.role} {one.detail}, {one.rung}"
        for seed in range(4)
        for head in profile(make(seed, sharpness), little(), causal=False)
        for one in head.supports
        if RUNGS.index(one.rung) > RUNGS.index("pattern")
    ]
    assert not told


@pytest.mark.parametrize("other", [{"tokens": 512}, {"tokens": 4096}])
def test_batches_change_nothing(made: Profile, other: dict[str, int]) -> None:
    again = profile(make(), little(), tokens=other["tokens"])
    assert set(again.tally.fields) == set(made.tally.fields)
    for name in made.tally.fields:
        np.testing.assert_allclose(again.measure(name), made.measure(name), rtol=0, atol=1e-5, err_msg=name)
        assert np.array_equal(again.tally.per_bucket(name)[1], made.tally.per_bucket(name)[1]), name
    assert [head.role for head in again] == [head.role for head in made]
    assert again.relations is not None
    assert made.relations is not None
    for name, array in made.relations.arrays().items():
        np.testing.assert_allclose(again.relations.arrays()[name], array, rtol=0, atol=1e-3, err_msg=name)


def test_two_halves_make_a_whole() -> None:
    model = make().eval()
    units = list(Reading.of(model, little()))
    flags = class_flags(model.tokenizer, model.spec.vocab)  # pyright: ignore

    def passed(some: list) -> Tally:
        tally = Tally(8)
        with torch.no_grad():
            Runner(tally, usual_measures(flags)).read(model, make_batches(some, 700))
        return tally

    whole, merged = passed(units), passed(units[:23]).merge(passed(units[23:]))
    assert set(whole.fields) == set(merged.fields)
    for name in whole.fields:
        for half in (None, 0, 1):
            np.testing.assert_allclose(merged.mean(name, half), whole.mean(name, half), atol=1e-5, err_msg=name)
    with pytest.raises(HeadwiseError, match="cannot be merged"):
        whole.merge(Tally(3))
    with pytest.raises(HeadwiseError, match="entropy"):
        whole.mean("entropie")


def test_looking_leaves_the_model_as_it_was() -> None:
    model = make().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(40)[None]
    plain = model(ids)
    profile(model, little(20))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids), plain)


def test_what_a_profile_answers(made: Profile) -> None:
    assert len(made) == 8
    assert [str(head.address) for head in made] == HEADS
    table = made.table()
    assert [row["head"] for row in table] == HEADS
    assert all(set(SHOWN) < set(row) for row in table)
    assert made.by_layer("entropy") == pytest.approx(made.measure("entropy").reshape(2, 4).mean(1))
    assert made["1.2"].measures["entropy"] == pytest.approx(made.measure("entropy")[6])
    tokens = sum(len(item.words) for item in little().items() if isinstance(item, Document))
    spec = make().spec
    assert made.about == {
        "model": f"decoder of 2 layers with 4 heads, width {spec.width}, {spec.vocab} tokens",
        "texts": 60, "tokens": tokens, "documents": 60, "relations": "own", "layers": ["0", "1"], "control": None,
        "seed": 0, "detail": "full", "every": 1, "unasked": {}, "chosen": {},
        **dict.fromkeys(("read", "asked"), "the little language (held-out, 60 documents, seed 0)"),
    }  # fmt: skip
    assert made.family > 8
    assert all(len(head.hardest) for head in made)
    assert made.roles() == {}
    assert made.best("induction") is None
    json.dumps(made.to_dict(), allow_nan=False)
    with pytest.raises(HeadwiseError, match=r"no head 2\.0"):
        made["2.0"]
    with pytest.raises(HeadwiseError, match="was not measured"):
        made.measure("nothing")


def test_files(made: Profile, tmp_path: Path) -> None:
    path = made.save(tmp_path / "small.npz")
    back = Profile.load(path)
    assert back.to_dict() == made.to_dict()
    assert back.table() == made.table()
    assert back.relations is not None
    assert made.relations is not None
    for name, array in made.relations.arrays().items():
        assert np.array_equal(back.relations.arrays()[name], array)
    assert np.array_equal(back.relations.coverage(), made.relations.coverage(), equal_nan=True)
    rows = made.diff(back)
    assert [row["head"] for row in rows] == HEADS
    assert all(row["before"] == row["after"] and row["entropy"] == 0 for row in rows)


def test_what_changed(made: Profile) -> None:
    other = profile(make(1), little(), causal=False)
    rows = made.diff(other)
    assert [row["entropy"] for row in rows] == pytest.approx(list(other.measure("entropy") - made.measure("entropy")))
    model = make()
    smaller = Transformer(model.spec.without("0.1,1.3"))
    smaller.tokenizer = model.tokenizer
    gone = {row["head"]: row["after"] for row in made.diff(profile(smaller, little(20), causal=False))}
    assert [head for head, role in gone.items() if role == "absent"] == ["0.1", "1.3"]


@pytest.mark.parametrize("damage", ["short", "noise", "empty", "other", "text"])
def test_damaged_files(made: Profile, damage: str, tmp_path: Path) -> None:
    path = made.save(tmp_path / "small.npz")
    whole = path.read_bytes()
    if damage == "other":
        np.savez(path, a=np.zeros(3))
    else:
        noise = whole[:1000] + bytes(x ^ 0x55 for x in whole[1000:3000]) + whole[3000:]
        path.write_bytes({"short": whole[: len(whole) // 2], "noise": noise, "empty": b"", "text": b"{}"}[damage])
    with pytest.raises(HeadwiseError, match="not a profile, or is damaged"):
        Profile.load(path)


def rewritten(path: Path, **changes: object) -> Path:
    """The same file with other things told in it."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    told = json.loads(arrays["told"].tobytes()) | changes
    arrays["told"] = np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)
    np.savez(path, **arrays)
    return path


def test_files_of_another_version_and_files_that_lack_something(made: Profile, tmp_path: Path) -> None:
    path = made.save(tmp_path / "small.npz")
    with pytest.raises(HeadwiseError, match="version 99"):
        Profile.load(rewritten(path, version=99))
    with pytest.raises(HeadwiseError):
        Profile.load(rewritten(path, version=1, supports=[[{"role": "x"}]]))
    with pytest.raises(HeadwiseError, match="no file"):
        Profile.load(tmp_path / "nothing.npz")


def test_controls() -> None:
    twin = profile(make(), little(20), causal=False, control="random-init", seed=3)
    same = profile(make(7), little(20), causal=False, control="random-init", seed=3)
    assert np.array_equal(twin.measure("entropy"), same.measure("entropy")), "whatever was learned"
    shuffled = profile(make(), little(20), causal=False, control="shuffled")
    assert shuffled.relations is None
    assert shuffled.about["tokens"] == twin.about["tokens"]


@pytest.mark.parametrize("attached", [False, True])
def test_profile_random_attention_equals_profile_of_redrawn_model(attached: bool) -> None:
    """The control profiles a model with the same embeddings and MLPs and other heads, for ours and for attached models."""
    model = attached_models.fresh("llama") if attached else make()
    texts = (
        ["the cat saw the dog and the dog saw the cat", "a dog ran", "the man saw a cat"] if attached else little(20)
    )
    asked: dict[str, Any] = {"causal": False, "relations": False}
    control = profile(model, texts, control="random-attention", seed=3, **asked)
    redrawn = profile(randomize_attention(model, 3), texts, seed=3, **asked)
    plain = profile(model, texts, seed=3, **asked)
    assert control.about["control"] == "random-attention"
    np.testing.assert_array_equal(control.measure("entropy"), redrawn.measure("entropy"))
    assert not np.allclose(control.measure("entropy"), plain.measure("entropy"))


def test_what_cannot_be_done() -> None:
    model = make()
    with pytest.raises(HeadwiseError, match="random-init, random-attention, shuffled"):
        profile(model, little(5), control="sorted")
    for empty in ([], ""):
        with pytest.raises(HeadwiseError):
            profile(model, empty)
    with pytest.raises(HeadwiseError, match="choose a smaller length"):
        profile(model, ["the dog"], longest=129)
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        profile(model, little(5))
