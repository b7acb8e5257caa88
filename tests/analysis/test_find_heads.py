"""`find_heads`: heads with closed-form scores, the statistics, wrong input, resuming, comparison and roles."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.finding.gold_pair_scores import candidate_gold_masks, score_pairs
from headwise.analysis.finding.head_search_result import HeadSearchResult
from headwise.analysis.finding.job_examples import LabeledExample, assign_halves, read_examples
from headwise.analysis.finding.monotonic_alignment_scores import monotonic_path_weight
from headwise.analysis.finding.prepared_example import prepare_example
from headwise.errors import HeadwiseError
from headwise.text.build_tokenizers import word_tokenizer

WORDS = [f"w{i}" for i in range(24)]
BETA = 40.0


def lookup_model(noise: float = 0.0, heads: int = 3, layers: int = 1) -> hw.Transformer:
    """An encoder whose head 0.0 attends to the word with the partner number (0 to 1, 2 to 3 …), 0.1 to the previous token,
    0.2 uniformly. Further heads are random."""
    V, P = len(WORDS), 16
    width = V + P
    spec = hw.ModelSpec(
        vocab=V, context=P, layers=layers, kind="encoder", output="none", mlp_width=4, norm_placement="post",
        attention=hw.AttentionSpec(width=width, heads=heads, head_dim=width, scale=1.0),
    )  # fmt: skip
    torch.manual_seed(0)
    model = hw.Transformer(spec).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if "norm" in name else noise)
        model.embed.tokens.weight[:, :V] = torch.eye(V)
        assert model.embed.positions is not None
        model.embed.positions.weight[:, V:] = torch.eye(P)
        block: Any = model.blocks[0]
        partner = torch.arange(V) ^ 1
        q, k = (torch.zeros(heads, width, width) for _ in range(2))
        q[0, :V, :V] = BETA * torch.eye(V)[partner].T
        k[0, :V, :V] = torch.eye(V)
        q[1, V:, V:] = BETA * torch.eye(P).roll(1, 0)  # position i asks for position i − 1
        k[1, V:, V:] = torch.eye(P)
        layer = block.attention
        for projection, weights in (("q", q), ("k", k)):
            layer.qkv.weight_by_head(projection)[:] = weights.transpose(1, 2)
        layer.qkv.weight_by_head("v")[:] = torch.eye(width)
        layer.output_projection.weight[:] = torch.eye(width).repeat(1, heads)
    model.tokenizer = word_tokenizer(WORDS)
    return model


def partner_examples(count: int = 12, seed: int = 0, length: int = 8) -> list[dict[str, Any]]:
    """Texts of distinct words; each of three queries has its partner somewhere."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        partners = rng.permutation(len(WORDS) // 2)[:3]
        others = [2 * p for p in range(len(WORDS) // 2) if p not in partners][: length - 6]
        ids = rng.permutation([*[2 * p for p in partners], *[2 * p + 1 for p in partners], *others]).tolist()
        pairs = [[ids.index(2 * p), ids.index(2 * p + 1)] for p in partners]
        rows.append({"text": " ".join(WORDS[i] for i in ids), "unit": "token", "pairs": pairs})
    return rows


@pytest.fixture(scope="module")
def model() -> hw.Transformer:
    return lookup_model()


@pytest.fixture(scope="module")
def result(model: hw.Transformer) -> HeadSearchResult:
    return hw.find_heads(model, partner_examples(40))


def test_find_heads_constructed_lookup_head_has_closed_form_score(result: HeadSearchResult) -> None:
    """The lookup head hits every pair; a head with uniform attention hits 1 of the 7 other tokens; weight e^β/(e^β + 7)."""
    assert result.supported_heads == ("0.0",)
    assert result["0.0"].evidence_level == "value-weighted"
    assert result["0.0"].score == 1.0
    assert result["0.0"].weight == pytest.approx(np.exp(BETA) / (np.exp(BETA) + 7), abs=1e-6)
    assert result["0.2"].score == pytest.approx(1 / 7)
    assert result["0.2"].weight == pytest.approx(1 / 8)
    assert result.control.address == "0.0"


def test_find_heads_previous_token_head_scores_the_fraction_of_pairs_at_offset_one(result: HeadSearchResult) -> None:
    halves = assign_halves([item.key for item in result.examples])
    reporting = [item for item in result.examples if halves[item.key] == 1]
    pairs = [(int(query), int(key)) for item in reporting for query, (key,) in item.pairs]
    expected = []
    for query, key in pairs:  # the first token asks for a position that does not exist: a tie of the 7 others
        expected.append(1 / 7 if query == 0 else float(query - 1 == key))
    assert result["0.1"].score == pytest.approx(np.mean(expected))
    assert not result["0.1"].is_supported


def test_find_heads_position_rule_is_the_baseline_of_a_positional_job(model: hw.Transformer) -> None:
    """A job that is only 'previous token': the head hits all pairs, and so does the fixed offset."""
    rows = [item | {"pairs": [[3, 2], [5, 4]]} for item in partner_examples(20)]
    outcome = hw.find_heads(model, rows)
    assert outcome["0.1"].score == 1.0
    assert outcome["0.1"].baseline == 1.0
    assert outcome["0.1"].baseline_name == "offset +1"
    assert outcome.supported_heads == ()


def test_find_heads_shuffled_gold_is_the_baseline_of_a_head_that_ignores_the_query(model: hw.Transformer) -> None:
    """All queries share one gold key, so the choices of the other queries hit it as often."""
    rows = []
    for item in partner_examples(20):
        key = item["pairs"][0][1]
        rows.append(item | {"pairs": [[item["pairs"][0][0], key], [item["pairs"][1][0], key]]})
    example = prepare_example(model, read_examples(rows, "pairs")[0])
    scores = score_pairs(model, example, model.hook_points(), causal=False, allow_self=False)
    assert scores.baselines["shuffled gold"][0] == pytest.approx(scores.scores[0])
    assert scores.count == 2


def test_find_heads_random_pairs_find_nothing(model: hw.Transformer) -> None:
    rng = np.random.default_rng(5)
    rows = [
        item | {"pairs": [rng.permutation(8)[:2].tolist() for _ in range(3)]} for item in partner_examples(40, seed=3)
    ]
    assert hw.find_heads(model, rows).supported_heads == ()


def test_find_heads_causal_model_skips_pairs_it_cannot_see() -> None:
    spec = hw.ModelSpec(vocab=len(WORDS), context=16, layers=1, attention=hw.AttentionSpec(width=8, heads=2))
    decoder = hw.Transformer(spec).eval()
    decoder.tokenizer = word_tokenizer(WORDS)
    rows = [item | {"pairs": [[2, 5], [6, 3], [7, 0]]} for item in partner_examples(12)]
    outcome = hw.find_heads(decoder, rows)
    assert outcome.metadata["skipped_pairs"] == 24  # the later token, and the first token
    example = prepare_example(decoder, read_examples(rows, "pairs")[0])
    masks = candidate_gold_masks(example, 8, 8, causal=True, allow_self=False)
    assert masks.candidates[0].tolist() == [False, True, True, True, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_find_heads_half_precision_finds_the_same_head(dtype: torch.dtype) -> None:
    assert hw.find_heads(lookup_model().to(dtype), partner_examples(16)).supported_heads == ("0.0",)


def test_find_heads_attached_grouped_query_llama_equals_native_copy() -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(1)
    tokenizer = word_tokenizer(WORDS)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in llama.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    attached = hw.attach(llama, tokenizer=tokenizer)
    native = hw.to_native(attached)
    native.tokenizer = tokenizer
    of_attached, of_native = (hw.find_heads(model, partner_examples(24)) for model in (attached, native))
    assert {head.address for head in of_attached} == {f"{layer}.{head}" for layer in range(2) for head in range(6)}
    assert len({head.score for head in of_native}) > 3
    for head in of_native:
        assert of_attached[head.address].score == pytest.approx(head.score, abs=1e-9)
        assert of_attached[head.address].baseline == pytest.approx(head.baseline, abs=1e-9)
    assert of_attached.supported_heads == of_native.supported_heads


def test_find_heads_leaves_outputs_and_modes_unchanged(model: hw.Transformer) -> None:
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids)
    model.train()
    hw.find_heads(model, partner_examples(12))
    assert model.training
    model.eval()
    assert torch.equal(model(ids), expected)


def test_find_heads_pruned_model_keeps_addresses(model: hw.Transformer) -> None:
    small = model.prune("0.1")
    assert hw.find_heads(small, partner_examples(16)).supported_heads == ("0.0",)


def test_find_heads_resumes_after_interrupt_with_the_same_result(model: hw.Transformer, tmp_path: Path) -> None:
    rows, out = partner_examples(14), tmp_path / "find.jsonl"

    def stop(label: str, done: int, total: int | None) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.find_heads(model, rows, out=out, progress=stop)
    assert len(out.read_text().splitlines()) == 6
    out.write_text(out.read_text() + '{"index": 5, "key": "tru')  # a line truncated by a crash
    resumed = hw.find_heads(model, rows, out=out)
    assert resumed.to_dict()["heads"] == hw.find_heads(model, rows).to_dict()["heads"]
    assert len(out.read_text().splitlines()) == 15
    with pytest.raises(HeadwiseError, match="another search"):
        hw.find_heads(model, rows[1:], out=out)


def test_head_search_result_round_trips_and_compares(
    model: hw.Transformer, result: HeadSearchResult, tmp_path: Path
) -> None:
    result.to_json(tmp_path / "a.json")
    loaded = HeadSearchResult.load(tmp_path / "a.json")
    assert loaded.supported_heads == result.supported_heads
    assert loaded["0.0"] == result["0.0"]
    assert result.to_csv().splitlines()[1].startswith("0.0,value-weighted,1.0,")
    lost = lookup_model()
    block: Any = lost.blocks[0]
    with torch.no_grad():
        block.attention.qkv.weight_by_head("q")[0] = 0
    changes = loaded.compare(hw.find_heads(lost, partner_examples(40)))
    assert changes[0].address == "0.0"
    assert changes[0].change == "lost"
    assert changes[0].difference == pytest.approx(1 / 7 - 1)
    assert changes[0].p < 0.05
    assert all(change.difference == 0 for change in changes[1:])
    (tmp_path / "bad.json").write_text(json.dumps({"version": 1, "heads": 3}))
    with pytest.raises(HeadwiseError, match="not a result of headwise find"):
        HeadSearchResult.load(tmp_path / "bad.json")


def test_head_search_result_role_is_accepted_by_profile(model: hw.Transformer, result: HeadSearchResult) -> None:
    texts = [item["text"] for item in partner_examples(12)]
    profile = hw.profile(
        model, texts, metrics=[result.metric("partner")], roles=[result.role("partner")], relations=False, causal=False
    )
    (evidence,) = [item for item in profile.evidence[0] if item.role == "partner"]
    assert evidence.evidence_level == "value-weighted"
    assert evidence.score == 1.0
    assert not any(item.is_supported for item in profile.evidence[2] if item.role == "partner")


def test_head_search_plot_saves_picture_and_data(result: HeadSearchResult, tmp_path: Path) -> None:
    for suffix in ("svg", "pdf", "png", "csv"):
        assert result.plot().save(tmp_path / f"heads.{suffix}").stat().st_size > 100


def test_find_heads_words_may_be_given_as_text() -> None:
    example = LabeledExample(text="w1 w2 w1", unit="word", pairs=(("w2", ("w1",)),))
    prepared = prepare_example(lookup_model(), example)
    with pytest.raises(HeadwiseError, match="occurs 2 times"):
        candidate_gold_masks(prepared, 3, 3, causal=False, allow_self=False)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "Got 0"),
        (partner_examples(1), "Got 1"),
        ([*partner_examples(12), {"text": "w1 w2", "pairs": [[0, 9]]}], "outside the text"),
        ([*partner_examples(12), {"text": "w1", "pairs": []}], "has no pairs"),
        ([*partner_examples(12), {"text": "w1 w2", "pairs": [[0, -1]]}], "outside the text"),
        ([*partner_examples(12), {"text": "w1 w2", "pairs": [[0, True]]}], "must be integers"),
        ([*partner_examples(12), {"text": "w1 w2", "pairs": [0, 1]}], "a pair must be"),
        ([*partner_examples(12), {"txt": "w1 w2", "pairs": [[0, 1]]}], "did you mean text"),
        ([*partner_examples(12), {"pairs": [[0, 1]]}], "has no input"),
        ([*partner_examples(12), "w1 w2"], "must be an object"),
        ([*partner_examples(12), {"text": "w1 w2", "unit": "phrase", "pairs": [[0, 1]]}], "unit="),
        ([*partner_examples(12), {"text": "w1 w2", "source": "w3", "pairs": [[0, 0]]}], "not an encoder-decoder"),
        ([*partner_examples(12), {"text": " ".join(["w1"] * 17), "pairs": [[0, 1]]}], "more than the 16 positions"),
        ({"text": "w1"}, "list of dicts"),
        ("missing.jsonl", "does not exist"),
    ],
)
def test_find_heads_wrong_examples_raise_clear_errors(model: hw.Transformer, rows: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        hw.find_heads(model, rows)


def test_find_heads_wrong_options_raise_clear_errors(model: hw.Transformer) -> None:
    rows = partner_examples(12)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"job": "pair"}, "did you mean pairs"),
        ({"job": "effect"}, "needs one"),
        ({"heads": "7.1"}, "7"),
        ({"threshold": 2.0}, "threshold"),
        ({"threshold": "high"}, "must be a number"),
        ({"job": "classes"}, "no label"),
        ({"metric": "los"}, "did you mean loss"),
        ({"ablation": "medain"}, "did you mean mean"),
    ]
    for options, message in cases:
        with pytest.raises(HeadwiseError, match=message):
            hw.find_heads(model, rows, **options)
    with pytest.raises(HeadwiseError, match="no examples come with this model"):
        hw.find_heads(model)


def test_find_heads_metric_that_does_not_fit_raises_before_the_search(model: hw.Transformer) -> None:
    with pytest.raises(HeadwiseError, match="output layer"):
        hw.find_heads(model, partner_examples(12), metric="loss", progress=lambda *step: pytest.fail("searched"))


def test_find_heads_errors_name_the_line_of_the_file(model: hw.Transformer, tmp_path: Path) -> None:
    rows = [*partner_examples(12), {"text": "w1 w2", "pairs": [[0, 9]]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) + "\n" for row in rows))  # empty lines between them
    with pytest.raises(HeadwiseError, match=r"rows.jsonl, line 25: position 9"):
        hw.find_heads(model, path)


def test_monotonic_path_weight_equals_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((2, 4, 3))
    paths = [p for p in np.ndindex(3, 3, 3, 3) if list(p) == sorted(p)]
    expected = [max(sum(w[i, j] for i, j in enumerate(path)) for path in paths) for w in weights]
    assert monotonic_path_weight(weights) == pytest.approx(expected)


def aligned_model(heads: int = 3) -> hw.Transformer:
    """An encoder-decoder whose cross-attention head 0 attends to the source position of the token, 1 to the reversed position
    12 − i, 2 uniformly."""
    V, P = len(WORDS) + 3, 16
    width = V + P
    spec = hw.ModelSpec(
        vocab=V, context=P, layers=1, kind="encoder-decoder", norm_placement="post", mlp_width=4,
        attention=hw.AttentionSpec(width=width, heads=heads, head_dim=width, scale=1.0),
    )  # fmt: skip
    model = hw.Transformer(spec).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(float("norm" in name and "weight" in name))
        model.embed.tokens.weight[:, :V] = torch.eye(V)
        assert model.embed.positions is not None
        model.embed.positions.weight[:, V:] = torch.eye(P)
        block: Any = model.blocks[0]
        q, k = (block.cross.qkv.weight_by_head(projection) for projection in "qk")
        k[:2, V:, V:] = torch.eye(P)
        q[0, V:, V:] = BETA * torch.eye(P).roll(-1, 0)  # the decoder starts with a token of its own
        q[1, V:, V:] = BETA * torch.eye(P).flip(0).roll(-3, 0)
        block.cross.qkv.weight_by_head("v")[:] = torch.eye(width)
        block.cross.output_projection.weight[:] = torch.eye(width).repeat(1, heads)
    tokenizer = word_tokenizer([*WORDS, "<s>", "</s>", "<pad>"])
    tokenizer.special |= {"bos": V - 3, "eos": V - 2, "pad": V - 1}
    model.tokenizer = tokenizer
    return model


def translations(count: int = 14) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    texts = [rng.permutation(len(WORDS))[:8] for _ in range(count)]
    return [{"text": " ".join(WORDS[i] for i in ids), "source": " ".join(WORDS[i - 1] for i in ids)} for ids in texts]


def test_find_heads_alignment_finds_the_head_that_follows_the_source() -> None:
    """The aligned head has weight 1 on the best path, a uniform head 1/9 (8 words and the end token), whether its rows are
    shuffled or not. A reversed head follows no path."""
    outcome = hw.find_heads(aligned_model(), translations(), job="alignment")
    assert outcome.supported_heads == ("cross.0.0",)
    assert outcome["cross.0.0"].score == pytest.approx(1, abs=1e-6)
    assert outcome["cross.0.2"].score == pytest.approx(1 / 9, abs=1e-6)
    shuffled = outcome.table.baselines["shuffled rows"][:, 2]
    assert outcome.table.scores[:, 2] == pytest.approx(shuffled, abs=1e-6)
    assert outcome["cross.0.1"].score < outcome["cross.0.1"].baseline


def test_find_heads_pairs_of_two_texts_use_cross_attention() -> None:
    """The diagonal is a baseline, so a head that follows it has no gain in the job `pairs`."""
    rows = [item | {"pairs": [[2, 2], [5, 5], [6, 6]]} for item in translations()]
    outcome = hw.find_heads(aligned_model(), rows)
    assert outcome["cross.0.0"].score == 1.0
    assert outcome["cross.0.0"].baseline == 1.0
    assert outcome["cross.0.2"].score == pytest.approx(1 / 8)


def class_examples(count: int = 30) -> list[dict[str, Any]]:
    """Texts with w0 anywhere (label true) or without it."""
    rng, rows = np.random.default_rng(1), []
    for index in range(count):
        ids = (rng.permutation(len(WORDS) - 2)[:7] + 2).tolist()
        if index % 2:
            ids[int(rng.integers(7))] = 0
        rows.append({"text": " ".join(WORDS[i] for i in ids), "label": index % 2 == 1, "span": [0, 2], "unit": "token"})
    return rows


def test_find_heads_classes_finds_the_head_whose_output_tells_them_apart(model: hw.Transformer) -> None:
    """Head 0.2 averages all tokens, so its output contains the mean of w0's channel; a head with zero output guesses."""
    silent = lookup_model()
    block: Any = silent.blocks[0]
    with torch.no_grad():
        block.attention.qkv.weight_by_head("v")[1] = 0
    outcome = hw.find_heads(silent, class_examples(60), job="classes")
    assert outcome["0.2"].score > 0.9
    assert "0.2" in outcome.supported_heads
    assert "0.1" not in outcome.supported_heads
    assert outcome["0.1"].detail in ("output direction", "attention to the span")
    assert outcome.metadata["family_size"] >= 3


def test_find_heads_classes_resumes_after_interrupt_with_the_same_result(model: hw.Transformer, tmp_path: Path) -> None:
    rows, out = [row | {"span": [0, 1]} for row in class_examples()], tmp_path / "classes.jsonl"

    def stop(label: str, done: int, total: int | None) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.find_heads(model, rows, job="classes", out=out, progress=stop)
    assert len(out.read_text().splitlines()) == 8
    resumed = hw.find_heads(model, rows, job="classes", out=out)
    expected = hw.find_heads(model, rows, job="classes").to_dict()
    assert resumed.to_dict() | {"model": ""} == expected
    assert len(out.read_text().splitlines()) == 1 + len(rows)
    lines = out.read_text().splitlines()
    out.write_text("\n".join([lines[0], lines[1].replace('"z": "', '"z": "A')]))
    with pytest.raises(HeadwiseError, match="damaged"):
        hw.find_heads(model, rows, job="classes", out=out)


def test_find_heads_classes_input_length_is_a_baseline(model: hw.Transformer) -> None:
    """If one class is longer, every probe can use the length, so the length is the baseline."""
    rows = [{"text": " ".join(["w5"] * (4 + 6 * (i % 2)) + [f"w{i % 20}"]), "label": i % 2 == 1} for i in range(40)]
    outcome = hw.find_heads(model, rows, job="classes")
    assert outcome.supported_heads == ()
    assert outcome["0.2"].baseline == 1.0


def test_find_heads_classes_wrong_labels_raise_clear_errors(model: hw.Transformer) -> None:
    rows = class_examples()
    with pytest.raises(HeadwiseError, match="label true"):
        hw.find_heads(model, [row for row in rows if not row["label"]], job="classes")
    with pytest.raises(HeadwiseError, match="label must be"):
        hw.find_heads(model, [*rows, {"text": "w1", "label": "maybe"}], job="classes")
    with pytest.raises(HeadwiseError, match="both labels"):
        hw.find_heads(model, [*rows, rows[0] | {"label": not rows[0]["label"]}], job="classes")


def read_partner(output: torch.Tensor, example: LabeledExample) -> float:
    """Mean activation of the partner's channel at the queries, in the output of the encoder."""
    words = example.text.split()
    return float(np.mean([output[int(query), WORDS.index(words[int(query)]) ^ 1].item() for query, _ in example.pairs]))


def test_find_heads_effect_finds_the_head_that_the_metric_needs(model: hw.Transformer, tmp_path: Path) -> None:
    """Only head 0.0 writes the partner into the stream; the others cost less than it does."""
    rows, out = partner_examples(16), tmp_path / "effect.jsonl"
    outcome = hw.find_heads(model, rows, job="effect", metric=read_partner, ablation="zero", out=out)
    assert outcome.supported_heads == ("0.0",)
    assert outcome["0.0"].evidence_level == "causal"
    assert outcome["0.0"].baseline_name in ("other heads of the layer", "no effect")
    again = hw.find_heads(model, rows, job="effect", metric=read_partner, ablation="zero", out=out)
    assert again.to_dict() == outcome.to_dict()


def constant_metric(value: Any) -> Any:
    return lambda output, example: value


def test_find_heads_pairs_with_metric_reach_the_causal_level(model: hw.Transformer) -> None:
    outcome = hw.find_heads(model, partner_examples(30), metric=read_partner)
    assert outcome["0.0"].evidence_level == "causal"
    assert outcome["0.0"].cost_excess_interval is not None
    assert outcome["0.0"].cost_excess_interval[0] > 0
    with pytest.raises(HeadwiseError, match="must be a finite number"):
        hw.find_heads(model, partner_examples(16), job="effect", metric=lambda output, example: float("nan"))
    for value in ("high", None, torch.ones(2)):
        with pytest.raises(HeadwiseError, match="must return a number"):
            hw.find_heads(model, partner_examples(16), job="effect", metric=constant_metric(value))
    with pytest.raises(HeadwiseError, match="output layer"):
        hw.find_heads(model, partner_examples(16), job="effect", metric="loss")


def test_find_heads_answer_metric_equals_the_log_probability() -> None:
    spec = hw.ModelSpec(vocab=len(WORDS), context=16, layers=2, attention=hw.AttentionSpec(width=12, heads=3))
    torch.manual_seed(0)
    decoder = hw.Transformer(spec).double().eval()
    decoder.tokenizer = word_tokenizer(WORDS)
    rows = [{"text": f"w{i} w{i + 1} w3", "answer": "w5", "wrong_answer": "w6"} for i in range(12)]
    outcome = hw.find_heads(decoder, rows, job="effect", metric="answer", ablation="zero", heads="1.*")
    lead = []
    for gates in (None, {"1.2": 0.0}):
        with torch.no_grad():
            logits = decoder(torch.tensor([[0, 1, 3]]), gates=gates)[0, -1].double().log_softmax(-1)
        lead.append((logits[5] - logits[6]).item())
    key = [item.key for item in outcome.examples if item.text.startswith("w0 ")]
    column = outcome.metadata["addresses"].index("1.2")
    assert outcome.table.scores[outcome.table.keys.index(key[0]), column] == pytest.approx(lead[0] - lead[1], abs=1e-9)


def lookup_vision_model() -> Any:
    """A ViT whose head 0.1 attends from red patches to green ones. The other heads of layer 0 attend uniformly."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
    vision = transformers.ViTModel(
        transformers.ViTConfig(**sizes, image_size=(20, 28), patch_size=4), add_pooling_layer=False
    ).eval()
    names = dict(vision.named_parameters())
    with torch.no_grad():
        for name, parameter in names.items():
            if "embeddings" in name or (
                ".0." in name and any(part in name for part in ("query", "key", "q_proj", "k_proj"))
            ):
                parameter.zero_()
        pixels = next(value for name, value in names.items() if name.endswith("projection.weight"))
        pixels[0, 0], pixels[1, 1] = 1 / 16, 1 / 16  # red and green of a patch
        for parts, channel, factor in ((("query", "q_proj"), 0, 20.0), (("key", "k_proj"), 1, 1.0)):
            weight = next(
                value
                for name, value in names.items()
                if ".0." in name and name.endswith("weight") and any(part in name for part in parts)
            )
            weight[4, channel] = factor  # first channel of head 1
    return vision


def test_find_heads_image_patches_score_a_built_head_one_and_a_uniform_head_by_chance() -> None:
    rng, rows = np.random.default_rng(0), []
    for _ in range(14):
        red, green = rng.permutation(35)[:2].tolist()
        image = torch.zeros(3, 20, 28)
        for patch, channel in ((red, 0), (green, 1)):
            row, column = divmod(patch, 7)
            image[channel, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1.0
        rows.append({"image": image, "pairs": [[red, green]]})
    with hw.attach(lookup_vision_model()) as attached:
        outcome = hw.find_heads(attached, rows, heads="0.*")
        assert outcome.supported_heads == ("0.1",)
        assert outcome["0.1"].score == 1.0
        assert outcome["0.0"].score == pytest.approx(1 / 34)
        with pytest.raises(HeadwiseError, match="position 35 is outside"):
            hw.find_heads(attached, [*rows[1:], rows[0] | {"pairs": [[35, 0]]}])
        with pytest.raises(HeadwiseError, match="image contains NaN"):
            hw.find_heads(attached, [*rows[1:], rows[0] | {"image": rows[0]["image"] * torch.nan}])


def test_job_example_key_depends_on_the_content_of_images_and_inputs(tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    for path in (first, second):
        path.write_bytes(b"one")
    assert LabeledExample(image=str(first)).key == LabeledExample(image=second).key
    second.write_bytes(b"two")
    assert LabeledExample(image=str(first)).key != LabeledExample(image=second).key
    arrays = [LabeledExample(inputs={"x": np.array([[i]])}).key for i in range(3)]
    assert len(set(arrays)) == 3


def test_find_heads_inputs_may_be_lists_and_ragged_lists_raise() -> None:
    rows = [{"inputs": {"input_ids": [[i, i + 1, 3]]}, "pairs": [[2, 1]]} for i in range(12)]
    parsed = read_examples(rows, "pairs")
    assert parsed[4].inputs is not None
    assert parsed[4].inputs["input_ids"].tolist() == [[4, 5, 3]]
    for inputs, message in (({"input_ids": [[1, 2], [3]]}, "not an array"), ([1, 2], "by name"), ({}, "by name")):
        with pytest.raises(HeadwiseError, match=message):
            read_examples([*rows[1:], rows[0] | {"inputs": inputs}], "pairs")
    for name in ("pairs", "candidates", "span", "words"):
        with pytest.raises(HeadwiseError, match=f"{name} must be a list"):
            read_examples([*rows[1:], rows[0] | {name: 5}], "pairs")


def test_find_heads_alignment_without_cross_attention_raises(model: hw.Transformer) -> None:
    with pytest.raises(HeadwiseError, match="job='pairs'"):
        hw.find_heads(model, partner_examples(), job="alignment")


def test_find_heads_causal_test_resumes_after_interrupt(model: hw.Transformer, tmp_path: Path) -> None:
    rows, out = partner_examples(30), tmp_path / "causal.jsonl"
    calls = 0

    def counted(output: Any, example: LabeledExample) -> float:
        nonlocal calls
        calls += 1
        return read_partner(output, example)

    def stop(label: str, done: int, total: int | None) -> None:
        if label == "causal test" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.find_heads(model, rows, metric=counted, out=out, progress=stop)
    resumed = hw.find_heads(model, rows, metric=counted, out=out)
    calls = 0
    again = hw.find_heads(model, rows, metric=counted, out=out)
    assert calls == 0
    expected = hw.find_heads(model, rows, metric=counted).to_dict()
    assert calls > 0
    assert resumed.to_dict()["heads"] == again.to_dict()["heads"] == expected["heads"]


def test_find_heads_attached_model_whose_layers_share_one_module_raises() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 8}
    config = transformers.AlbertConfig(vocab_size=len(WORDS), embedding_size=5, max_position_embeddings=16, **sizes)
    with hw.attach(transformers.AlbertModel(config).eval(), word_tokenizer(WORDS)) as attached:
        with pytest.raises(HeadwiseError, match="several times per forward pass"):
            hw.find_heads(attached, partner_examples())
        rows = [{"text": row["text"], "label": index % 2} for index, row in enumerate(partner_examples(24))]
        with pytest.raises(HeadwiseError, match="several times per forward pass"):
            hw.find_heads(attached, rows, job="classes")
