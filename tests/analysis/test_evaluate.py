"""Evaluation: log-likelihoods against HFLM of lm_eval, values and intervals against direct computations."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import headwise as hw
from headwise.text.build_tokenizers import word_tokenizer
from tests.contract.layers import MODELS, make_model

lm_eval: Any = pytest.importorskip("lm_eval")
transformers: Any = pytest.importorskip("transformers")

from headwise.analysis.evaluation.evaluate import MetricResult, _differences  # noqa: E402
from headwise.analysis.evaluation.local_harness_tasks import minimal_pairs, read_articles  # noqa: E402

WORDS = sorted({word for pair in minimal_pairs() for word in f"{pair['good']} {pair['bad']}".split()})
CONTEXT = 24


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def build_llama(**changes: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=END,
        pad_token_id=END, **changes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    return model


TOKENIZER = word_tokenizer(WORDS)
END = next(i for name in ("eos", "sep", "bos") if (i := TOKENIZER.special[name]) is not None)
REQUESTS = [
    ("", "The baker sells bread"),
    ("The dog", " followed us home."),
    ("The dog ", "followed us home."),
    ("The dog", " followed"),
    ("The dog", " asked"),
    ("The river floods the valley in spring. We saw a fox in the garden. " * 3, " They sang an old song."),
]
TEXTS = ["The nurse smiled at me.", "He waited for the bus. The bell has rung twice today. " * 4]


def instances(arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [SimpleNamespace(args=item) for item in arguments]


def harness_reference(inner: Any) -> Any:
    from lm_eval.models import huggingface

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER.backend, eos_token=TOKENIZER.token(END), pad_token=TOKENIZER.token(END)
    )
    return cast(Any, huggingface.HFLM)(pretrained=inner, tokenizer=tokenizer, batch_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    with torch.no_grad():
        build_llama().save_pretrained(path)
    TOKENIZER.save(path)
    return path


@pytest.mark.parametrize("kind", ["native", "attached"])
def test_loglikelihoods_equal_those_of_hflm(kind: str, folder: Path) -> None:
    """Contexts of one token, of several, longer than the model reads, and one-token continuations of one context."""
    inner = build_llama()
    model = hw.load(folder) if kind == "native" else hw.attach(inner, TOKENIZER)
    adapter, harness = hw.HarnessModel(model, batch_tokens=64), harness_reference(build_llama())
    assert adapter.max_length == harness.max_length == CONTEXT
    for (value, greedy), (expected, expected_greedy) in zip(
        adapter.loglikelihood(instances(REQUESTS)),
        harness.loglikelihood(instances(REQUESTS), disable_tqdm=True),
        strict=True,
    ):
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == expected_greedy
    rolling = [(text,) for text in TEXTS]
    expected_rolling = harness.loglikelihood_rolling(instances(rolling), disable_tqdm=True)
    assert adapter.loglikelihood_rolling(instances(rolling)) == pytest.approx(expected_rolling, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", "attached"])
def test_loglikelihoods_of_smollm2_equal_those_of_hflm(kind: str) -> None:
    """Real weights and a real tokenizer: all sentences of four phenomena, and texts of several windows."""
    from lm_eval.models import huggingface

    from tests.parity.real import smollm2_folder

    path = str(smollm2_folder())
    inner = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = hw.load(path) if kind == "native" else hw.attach(inner, transformers.AutoTokenizer.from_pretrained(path))
    harness = cast(Any, huggingface.HFLM)(pretrained=path, dtype="float32", device="cpu", max_length=64, batch_size=4)
    adapter = hw.HarnessModel(model, max_length=64)
    requests = [("", pair[key]) for pair in minimal_pairs()[::6] for key in ("good", "bad")]
    requests += [("The capital of France is", f" {city}") for city in ("Paris", "London")]
    actual = adapter.loglikelihood(instances(requests))
    expected = harness.loglikelihood(instances(requests), disable_tqdm=True)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    assert [value for value, _ in actual] == pytest.approx([value for value, _ in expected], abs=1e-4, rel=0)
    rolling = instances([("The old sign shows a fish in bright colors, and nobody knows who painted it. " * 12,)])
    expected_rolling = harness.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert adapter.loglikelihood_rolling(rolling) == pytest.approx(expected_rolling, abs=1e-4 * 4, rel=0)  # windows


@pytest.mark.parametrize("kind", ["native", "attached"])
def test_greedy_generation_equals_that_of_hflm(kind: str, folder: Path) -> None:
    model = hw.load(folder) if kind == "native" else hw.attach(build_llama(), TOKENIZER)
    harness = harness_reference(build_llama())
    options = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    arguments = [("The dog followed", options), ("We saw", {**options, "until": []})]
    expected = harness.generate_until(instances(arguments), disable_tqdm=True)
    assert hw.HarnessModel(model).generate_until(instances(arguments)) == expected
    assert any(expected)


def native_model(**changes: Any) -> hw.Transformer:
    from dataclasses import replace

    model = make_model(replace(MODELS["decoder, rotary"], vocab=len(TOKENIZER), context=64, **changes))
    model.tokenizer = TOKENIZER
    return model


def pair_log_probability(model: Any, sentence: str) -> float:
    """Sum log p of a sentence after the end token."""
    ids = [END, *TOKENIZER.encode(sentence, add_special_tokens=False)]
    log_probs = model(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(ids[1:])[:, None]).sum())


def test_minimal_pairs_accuracy_equals_direct_count() -> None:
    model = native_model()
    result = hw.evaluate(model)["minimal_pairs"]["acc"]
    hits = [
        pair_log_probability(model, pair["good"]) > pair_log_probability(model, pair["bad"]) for pair in minimal_pairs()
    ]
    assert result.value == pytest.approx(np.mean(hits))
    assert result.items == 120
    assert result.low < result.value < result.high
    assert len(result.by_group) == 12
    assert np.mean(list(result.by_group.values())) == pytest.approx(result.value)


def test_minimal_pairs_differ_in_one_place_and_are_unique() -> None:
    pairs = minimal_pairs()
    assert len({pair["good"] for pair in pairs} | {pair["bad"] for pair in pairs}) == 240
    assert all(pair["good"] != pair["bad"] and pair["good"][0].isupper() for pair in pairs)


def test_perplexity_of_file_equals_direct_computation(tmp_path: Path) -> None:
    model, documents = (
        native_model(),
        ["The dog followed us home.", "We saw a fox\nin the garden. He waited for the bus."],
    )
    (tmp_path / "book.txt").write_text("\n\n".join(documents))
    metrics = hw.evaluate(model, str(tmp_path / "book.txt"))["book"]
    total = sum(pair_log_probability(model, document) for document in documents)
    num_bytes, num_words = (sum(len(size) for size in sizes) for sizes in (
        [document.encode() for document in documents], [document.split() for document in documents]
    ))  # fmt: skip
    assert metrics["bits_per_byte"].value == pytest.approx(-total / num_bytes / math.log(2), rel=1e-5)
    assert metrics["byte_perplexity"].value == pytest.approx(math.exp(-total / num_bytes), rel=1e-5)
    assert metrics["word_perplexity"].value == pytest.approx(math.exp(-total / num_words), rel=1e-5)


def test_wikitext_file_is_split_at_articles(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text(" \n = First = \n\n A @-@ b . \n\n = = Part = = \n\n More . \n = Second = \n\n End . \n")
    documents, is_wikitext = read_articles(path)
    assert is_wikitext
    assert [document.strip().splitlines()[0].strip() for document in documents] == ["= First =", "= Second ="]


def variants() -> dict[str, Any]:
    """Return models that were changed in memory."""
    model = native_model()
    return {
        "pruned": model.prune("0.1,1.0"),
        "quantized": hw.quantize(model, 4),
        "streaming": model.prune((), cache={"0.0": hw.CachePolicy(sink_tokens=1, window=3)}),
        "half precision": native_model().to(torch.bfloat16),
        "attached, streaming": attached_streaming_model(),
    }


def attached_streaming_model() -> Any:
    """Return an attached model, one KV head of which streams in every call."""
    attached = hw.attach(build_llama(), TOKENIZER)
    return hw.apply(hw.plan_pruning(attached, cache={"0.0": hw.CachePolicy(sink_tokens=1, window=3)}), attached)


@pytest.mark.parametrize("name", ["pruned", "quantized", "streaming", "half precision", "attached, streaming"])
def test_changed_models_score_like_their_forward_pass(name: str) -> None:
    model = variants()[name]
    arguments = [("", pair["good"]) for pair in minimal_pairs()[:6]]
    values = [value for value, _ in hw.HarnessModel(model, batch_tokens=64).loglikelihood(instances(arguments))]
    expected = [pair_log_probability(model, sentence) for _, sentence in arguments]
    assert values == pytest.approx(expected, rel=2e-2 if name == "half precision" else 1e-5)


def test_silenced_model_is_compared_with_full_model() -> None:
    model = native_model()
    full = hw.evaluate(model, max_items=30)
    with model.heads["0.*,1.*"].silenced():
        result = hw.evaluate(model, reference=full, max_items=30)
        hits = [
            pair_log_probability(model, pair["good"]) > pair_log_probability(model, pair["bad"])
            for pair in minimal_pairs()[:30]
        ]
    difference = result.differences[0]
    assert difference.value == pytest.approx(np.mean(hits))
    assert difference.reference == full.metrics[0].value
    assert difference.difference == pytest.approx(difference.value - difference.reference)
    assert difference.low <= difference.difference <= difference.high


def metric_result(values: list[float]) -> MetricResult:
    def mean(items: Any) -> float:
        return float(np.mean(items))

    hashes = tuple(map(str, range(len(values))))
    return MetricResult("t", "acc", float(np.mean(values)), 0, 0, len(values), {}, tuple(values), hashes, mean)


def test_paired_interval_leaves_out_shared_variance() -> None:
    """The model is worse by 0.1 on every item, so the paired interval is a point although items differ by 10."""
    rng = np.random.default_rng(0)
    values = rng.normal(scale=10, size=60)
    difference = _differences([metric_result(list(values - 0.1))], [metric_result(list(values))], 0)[0]
    assert (difference.low, difference.high) == (pytest.approx(-0.1), pytest.approx(-0.1))


def test_paired_interval_covers_the_true_difference() -> None:
    """Over 200 draws of items, the 95% interval of a mean difference covers it in 95% of the cases (binomial bounds)."""
    rng, covered = np.random.default_rng(5), 0
    for seed in range(200):
        common, noise = rng.normal(size=80), rng.normal(0.3, 1.0, size=80)
        difference = _differences([metric_result(list(common + noise))], [metric_result(list(common))], seed)[0]
        covered += difference.low <= 0.3 <= difference.high
    assert 178 <= covered <= 199


def test_evaluate_changes_neither_random_states_nor_mode() -> None:
    model = native_model().train()
    torch_state, numpy_state, python_state = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    hw.evaluate(model, max_items=3)
    assert model.training
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert str(np.random.get_state()) == numpy_state
    assert random.getstate() == python_state


def test_reference_on_other_items_raises() -> None:
    model = native_model()
    with pytest.raises(hw.HeadwiseError, match="same items"):
        hw.evaluate(model, max_items=3, reference=hw.evaluate(model, max_items=4))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"tasks": []}, "at least one task"),
        ({"max_items": 0}, "at least one task"),
        ({"tasks": "missing.txt"}, "could not be read"),
        ({"batch_tokens": 0}, "batch_tokens"),
    ],
)
def test_wrong_argument_raises(arguments: dict[str, Any], fragment: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=fragment):
        hw.evaluate(native_model(), **arguments)


def test_model_without_logits_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match="decoder with an output layer"):
        hw.HarnessModel(native_model(output="none", tied=False))


def test_user_task_from_folder_runs(tmp_path: Path) -> None:
    rows = [{"q": "The dog", "a": ["followed", "asked"], "label": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        "task: own_task\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\n  cache_dir: {tmp_path}\ntest_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: "{{label}}"\ndoc_to_choice: "{{a}}"\nmetric_list:\n  - metric: acc\n'
    )
    result = hw.evaluate(native_model(), "own_task", include_path=tmp_path)
    assert result["own_task"]["acc"].value == 0.5


def test_command_silences_and_compares(tmp_path: Path) -> None:
    from headwise.cli import app

    native_model().save(tmp_path / "model")
    words = ["evaluate", str(tmp_path / "model"), "--silence", "0.1", "--reference", str(tmp_path / "model")]
    done = CliRunner().invoke(app, [*words, "--max-items", "5", "--json"])
    assert done.exit_code == 0, done.exception
    data = json.loads(done.stdout)
    assert data["differences"][0]["items"] == 5


def loglikelihoods(model: Any) -> Tensor:
    values = hw.HarnessModel(model).loglikelihood(instances([("", pair["good"]) for pair in minimal_pairs()[:8]]))
    return torch.tensor([value for value, _ in values])


def test_loglikelihoods_do_not_depend_on_batches() -> None:
    model = native_model()
    requests = instances([("", pair["good"]) for pair in minimal_pairs()[:8]])
    small = [value for value, _ in hw.HarnessModel(model, batch_tokens=1).loglikelihood(requests)]
    assert loglikelihoods(model).tolist() == pytest.approx(small, abs=1e-4)
