"""Profiles of small random models: no roles are found, and the way of reading the corpus does not change the scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.recording.batching import make_batches
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_tables import DEFAULT_COLUMNS
from headwise.analysis.roles.roles import EVIDENCE_LEVELS
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.randomize_attention_weights import randomize_attention
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.annotated_document import Document
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY
from tests.contract import attached_models

HEADS = [f"{layer}.{head}" for layer in range(2) for head in range(4)]


def make_model(seed: int = 0, sharpness: float = 1.0) -> Transformer:
    """Make a model with random weights. Larger queries and keys give random but sharper attention."""
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    spec = ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=AttentionSpec(width=32, heads=4))
    model = Transformer(spec)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.qkv_weight.mul_(sharpness)  # pyright: ignore
    model.tokenizer = tokenizer
    return model


def synthetic_corpus(documents: int = 60, seed: int = 0) -> hw.Corpus:
    return hw.Corpus.synthetic("held-out", documents=documents, seed=seed)


@pytest.fixture(scope="module")
def random_profile() -> Profile:
    return profile(make_model(), synthetic_corpus())


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_profile_random_model_has_no_roles(sharpness: float) -> None:
    """At most 1% of the heads of four models: none of 32."""
    alarms = [
        f"seed {seed}, {head.address}: {role_evidence.role} {role_evidence.detail}, {role_evidence.evidence_level}"
        for seed in range(4)
        for head in profile(make_model(seed, sharpness), synthetic_corpus(), causal=False)
        for role_evidence in head.evidence
        if EVIDENCE_LEVELS.index(role_evidence.evidence_level) > EVIDENCE_LEVELS.index("none")
    ]
    assert not alarms


@pytest.mark.parametrize("other", [{"batch_tokens": 512}, {"batch_tokens": 4096}])
def test_profile_does_not_depend_on_batch_size(random_profile: Profile, other: dict[str, int]) -> None:
    profiled = profile(make_model(), synthetic_corpus(), batch_tokens=other["batch_tokens"])
    assert set(profiled.accumulator.fields) == set(random_profile.accumulator.fields)
    for name in random_profile.accumulator.fields:
        np.testing.assert_allclose(profiled.metric(name), random_profile.metric(name), rtol=0, atol=1e-5, err_msg=name)
        assert np.array_equal(
            profiled.accumulator.bucket_sums_and_counts(name)[1],
            random_profile.accumulator.bucket_sums_and_counts(name)[1],
        ), name
    assert [head.role for head in profiled] == [head.role for head in random_profile]
    assert profiled.relation_metric is not None
    assert random_profile.relation_metric is not None
    for name, array in random_profile.relation_metric.arc_count_arrays().items():
        np.testing.assert_allclose(
            profiled.relation_metric.arc_count_arrays()[name], array, rtol=0, atol=1e-3, err_msg=name
        )


def test_accumulator_merge_equals_single_pass() -> None:
    model = make_model().eval()
    samples = list(TokenizedCorpus.of(model, synthetic_corpus()))
    flags = token_class_flags(model.tokenizer, model.spec.vocab)  # pyright: ignore

    def accumulate(batch_samples: list) -> Accumulator:
        accumulator = Accumulator(8)
        with torch.no_grad():
            MetricRunner(accumulator, default_metrics(flags)).run(model, make_batches(batch_samples, 700))
        return accumulator

    full, merged = accumulate(samples), accumulate(samples[:23]).merge(accumulate(samples[23:]))
    assert set(full.fields) == set(merged.fields)
    for name in full.fields:
        for half in (None, 0, 1):
            np.testing.assert_allclose(merged.mean(name, half), full.mean(name, half), atol=1e-5, err_msg=name)
    with pytest.raises(HeadwiseError, match="cannot be merged"):
        full.merge(Accumulator(3))
    with pytest.raises(HeadwiseError, match="entropy"):
        full.mean("entropie")


def test_profile_leaves_model_unchanged() -> None:
    model = make_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(40)[None]
    plain = model(ids)
    profile(model, synthetic_corpus(20))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids), plain)


def test_profile_tables_and_metadata_match_model(random_profile: Profile) -> None:
    assert len(random_profile) == 8
    assert [str(head.address) for head in random_profile] == HEADS
    table = random_profile.table()
    assert [row["head"] for row in table] == HEADS
    assert all(set(DEFAULT_COLUMNS) < set(row) for row in table)
    assert random_profile.mean_by_layer("entropy") == pytest.approx(
        random_profile.metric("entropy").reshape(2, 4).mean(1)
    )
    assert random_profile["1.2"].metrics["entropy"] == pytest.approx(random_profile.metric("entropy")[6])
    tokens = sum(len(item.words) for item in synthetic_corpus().items() if isinstance(item, Document))
    spec = make_model().spec
    assert random_profile.metadata == {
        "model": f"decoder of 2 layers with 4 heads, width {spec.width}, {spec.vocab} tokens",
        "texts": 60, "tokens": tokens, "documents": 60, "relations": "own", "layers": ["0", "1"], "control": None,
        "seed": 0, "row_stride": 1, "skipped": {}, "chosen_offsets": {},
        **dict.fromkeys(("corpus", "relations_corpus"), "the synthetic language (held-out, 60 documents, seed 0)"),
    }  # fmt: skip
    assert random_profile.family_size > 8
    assert all(len(head.top_contexts) for head in random_profile)
    assert random_profile.heads_by_role() == {}
    assert random_profile.best_head("induction") is None
    json.dumps(random_profile.to_dict(), allow_nan=False)
    with pytest.raises(HeadwiseError, match=r"no head 2\.0"):
        random_profile["2.0"]
    with pytest.raises(HeadwiseError, match="was not measured"):
        random_profile.metric("nothing")


def test_profile_save_and_load_round_trip(random_profile: Profile, tmp_path: Path) -> None:
    path = random_profile.save(tmp_path / "small.npz")
    back = Profile.load(path)
    assert back.to_dict() == random_profile.to_dict()
    assert back.table() == random_profile.table()
    assert back.relation_metric is not None
    assert random_profile.relation_metric is not None
    for name, array in random_profile.relation_metric.arc_count_arrays().items():
        assert np.array_equal(back.relation_metric.arc_count_arrays()[name], array)
    assert np.array_equal(
        back.relation_metric.comparable_row_fraction(),
        random_profile.relation_metric.comparable_row_fraction(),
        equal_nan=True,
    )
    rows = random_profile.diff(back)
    assert [row["head"] for row in rows] == HEADS
    assert all(row["before"] == row["after"] and row["entropy"] == 0 for row in rows)


def test_profile_diff_lists_changes_and_absent_heads(random_profile: Profile) -> None:
    other = profile(make_model(1), synthetic_corpus(), causal=False)
    rows = random_profile.diff(other)
    assert [row["entropy"] for row in rows] == pytest.approx(
        list(other.metric("entropy") - random_profile.metric("entropy"))
    )
    model = make_model()
    smaller = Transformer(model.spec.without("0.1,1.3"))
    smaller.tokenizer = model.tokenizer
    roles_after = {
        row["head"]: row["after"] for row in random_profile.diff(profile(smaller, synthetic_corpus(20), causal=False))
    }
    assert [head for head, role in roles_after.items() if role == "absent"] == ["0.1", "1.3"]


@pytest.mark.parametrize("damage", ["short", "noise", "empty", "other", "text"])
def test_profile_load_damaged_file_raises(random_profile: Profile, damage: str, tmp_path: Path) -> None:
    path = random_profile.save(tmp_path / "small.npz")
    file_bytes = path.read_bytes()
    if damage == "other":
        np.savez(path, a=np.zeros(3))
    else:
        noise = file_bytes[:1000] + bytes(x ^ 0x55 for x in file_bytes[1000:3000]) + file_bytes[3000:]
        path.write_bytes(
            {"short": file_bytes[: len(file_bytes) // 2], "noise": noise, "empty": b"", "text": b"{}"}[damage]
        )
    with pytest.raises(HeadwiseError, match="not a profile, or damaged"):
        Profile.load(path)


def rewrite_metadata(path: Path, **changes: object) -> Path:
    """Write the file again with changed metadata."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    metadata = json.loads(arrays["header"].tobytes()) | changes
    arrays["header"] = np.frombuffer(json.dumps(metadata).encode(), dtype=np.uint8)
    np.savez(path, **arrays)
    return path


def test_profile_load_other_version_or_missing_data_raises(random_profile: Profile, tmp_path: Path) -> None:
    path = random_profile.save(tmp_path / "small.npz")
    with pytest.raises(HeadwiseError, match="version 99"):
        Profile.load(rewrite_metadata(path, version=99))
    with pytest.raises(HeadwiseError):
        Profile.load(rewrite_metadata(path, version=1, supports=[[{"role": "x"}]]))
    with pytest.raises(HeadwiseError, match="file not found"):
        Profile.load(tmp_path / "nothing.npz")


def test_profile_controls_ignore_training_and_relations() -> None:
    twin = profile(make_model(), synthetic_corpus(20), causal=False, control="random-init", seed=3)
    same = profile(make_model(7), synthetic_corpus(20), causal=False, control="random-init", seed=3)
    assert np.array_equal(twin.metric("entropy"), same.metric("entropy")), "whatever was learned"
    shuffled = profile(make_model(), synthetic_corpus(20), causal=False, control="shuffled")
    assert shuffled.relation_metric is None
    assert shuffled.metadata["tokens"] == twin.metadata["tokens"]


@pytest.mark.parametrize("attached", [False, True])
def test_profile_random_attention_equals_profile_of_redrawn_model(attached: bool) -> None:
    """The control profiles a model with the same embeddings and MLPs but other heads, for native and attached models."""
    model = attached_models.new_model("llama") if attached else make_model()
    texts = (
        ["the cat saw the dog and the dog saw the cat", "a dog ran", "the man saw a cat"]
        if attached
        else synthetic_corpus(20)
    )
    options: dict[str, Any] = {"causal": False, "relations": False}
    control = profile(model, texts, control="random-attention", seed=3, **options)
    redrawn = profile(randomize_attention(model, 3), texts, seed=3, **options)
    plain = profile(model, texts, seed=3, **options)
    assert control.metadata["control"] == "random-attention"
    np.testing.assert_array_equal(control.metric("entropy"), redrawn.metric("entropy"))
    assert not np.allclose(control.metric("entropy"), plain.metric("entropy"))


def test_profile_invalid_arguments_raise() -> None:
    model = make_model()
    with pytest.raises(HeadwiseError, match="random-init, random-attention, shuffled"):
        profile(model, synthetic_corpus(5), control="sorted")
    for empty in ([], ""):
        with pytest.raises(HeadwiseError):
            profile(model, empty)
    with pytest.raises(HeadwiseError, match="larger than the context"):
        profile(model, ["the dog"], max_length=129)
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        profile(model, synthetic_corpus(5))
