"""Every family gives the same logits and attention maps as transformers. `python -m tests.parity` prints the differences."""

import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise as hw
from tests.parity import __main__ as command
from tests.parity import real
from tests.parity.cases import CASES, LENGTHS, Case, Result, mark_slow, measure_case
from tests.parity.sentences import SENTENCES

PLAIN_TEXTS = (
    "Hello world",
    " leading and  double spaces ",
    "It's the teacher's, isn't it? They'll say we've lost.",
    "def f(x):\n\treturn x\n\n\n    # done",
    "Café, naïve, Zürich, coöperate",
    "東京は大きい。 Привет, мир!",
    "I 😀 emoji 🚀🚀 and 👩‍👩‍👧 a lot",
    "MixedCASE camelCase snake_case kebab-case",
    "!!! ??? ... --- ### @@@ $$$",
    "antidisestablishmentarianism",
    "\n\nTwo blank lines\r\nand a return\r",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "tab\tand\u00a0no-break and \u2003em spaces",
)


@pytest.mark.parametrize("case", [mark_slow(case) for case in CASES])
def test_load_family_equals_transformers(case: Case, tmp_path: Path) -> None:
    results = list(measure_case(case, tmp_path / "model"))
    assert {result.tokens for result in results} == set(LENGTHS)
    assert {result.padding_side for result in results} == {"", "left", "right"}
    assert [result for result in results if not result.ok] == []


def test_pooled_bert_equals_transformers(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "bert, pooler")
    case.save(tmp_path)
    native, reference = hw.load(tmp_path), case.oracle(tmp_path)
    assert isinstance(native, hw.Transformer)
    ids, types = torch.randint(61, (3, 11)), torch.randint(3, (3, 11))
    real_tokens = torch.arange(11)[None] < torch.tensor([[11], [4], [9]])
    with torch.no_grad():
        want = reference(ids, attention_mask=real_tokens.long(), token_type_ids=types).pooler_output
        got = native.pooled(ids, attention_mask=real_tokens, token_types=types)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_parity_wrong_config_exceeds_limit(tmp_path: Path) -> None:
    """Changing the setting that a case tests changes its results by much more than the limit."""
    by_name = {case.name: case for case in CASES}
    ids = torch.randint(61, (1, 31), generator=torch.Generator().manual_seed(5))
    for name, change in {
        "gpt2, tied": {"activation_function": "gelu", "layer_norm_epsilon": 1e-5},
        "gpt2, scores not scaled": {"scale_attn_weights": True},
        "gpt-neo, global and local": {"window_size": 6},
        "bert, pooler": {"hidden_act": "gelu_new"},
        "llama, llama3 rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "llama, linear rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "mistral, window": {"sliding_window": 6},
        "qwen2, windows from layer 1": {"max_window_layers": 2},
    }.items():
        case = by_name[name]
        folder = case.save(tmp_path / name)
        config = {**case.config, **change}
        other = Case(name, case.model, config).save(tmp_path / f"{name}, changed")  # the same weights
        with torch.no_grad():
            difference = (hw.load(folder)(ids) - hw.load(other)(ids)).abs().max()
        assert difference > 2e-4, f"{name}: {change} moves the output by {difference} only"


# Real weights.


def test_load_minilm_equals_transformers() -> None:
    results = list(real.measure_minilm())
    assert len(results) == 6
    assert [result for result in results if not result.ok] == []


def test_embed_minilm_equals_transformers() -> None:
    reference = real.minilm_oracle()
    tokenizer = transformers.AutoTokenizer.from_pretrained(real.minilm_folder())
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = reference(**batch).last_hidden_state
    present = batch["attention_mask"][..., None]
    want = (hidden * present).sum(1) / present.sum(1)
    model = hw.load("minilm")
    got = hw.embed(model, SENTENCES)
    assert len(SENTENCES) == len(set(SENTENCES)) == 50
    assert got.shape == (50, 384)
    assert torch.cosine_similarity(got, want).min() >= 0.99999
    torch.testing.assert_close(got.norm(dim=-1), torch.ones(50))
    torch.testing.assert_close(hw.embed(model, SENTENCES, normalize=False, batch_size=7), want, rtol=0, atol=5e-4)
    torch.testing.assert_close(hw.embed(model, SENTENCES[3])[0], got[3], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def smollm2() -> hw.Transformer:
    model = hw.load("smollm2")
    assert isinstance(model, hw.Transformer)
    return model


@pytest.fixture(scope="module")
def reader(smollm2: hw.Transformer) -> hw.Tokenizer:
    assert isinstance(smollm2.tokenizer, hw.Tokenizer)
    return smollm2.tokenizer


def test_load_smollm2_equals_transformers(smollm2: hw.Transformer) -> None:
    results = list(real.measure_smollm2(smollm2))
    assert len(results) == 6
    assert [result for result in results if not result.ok] == []


def test_stream_smollm2_equals_transformers(smollm2: hw.Transformer) -> None:
    prompt = "The capital of France is"
    ids = hf_tokenizer()(prompt, return_tensors="pt").input_ids
    want = real.smollm2_oracle().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
    assert smollm2.tokenizer is not None
    got = [*smollm2.tokenizer.encode(prompt), *(int(step[0]) for step in smollm2.stream(prompt, 32))]
    assert got == want[0].tolist()
    assert len(got) > len(ids[0]) + 3
    assert "Paris" in smollm2.generate(prompt, 32)


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_tokenizer_smollm2_equals_transformers(reader: hw.Tokenizer, text: str) -> None:
    assert reader.encode(text) == hf_tokenizer()(text).input_ids
    assert reader.decode(reader.encode(text), keep_special_tokens=True) == text


@cache
def hf_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(real.smollm2_folder())


@pytest.mark.parametrize("text", ["2024", "In 1999, 42 of 100.", "v3.14 x10"])
def test_tokenizer_smollm2_splits_digits(reader: hw.Tokenizer, text: str) -> None:
    """The GGUF file requires it (tokenizer.ggml.pre = smollm). The conversion of transformers ignores it."""
    tokens = [reader.token(id) for id in reader.encode(text)]
    assert [token for token in tokens if any(c.isdigit() for c in token)] == [c for c in text if c.isdigit()]
    assert reader.decode(reader.encode(text)) == text


# The test suite itself.


def test_make_once_many_threads_convert_once(tmp_path: Path) -> None:
    calls, starts = [], threading.Barrier(4)

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "first").write_text("a")
        assert not (tmp_path / "made").exists()  # no partial folder is visible
        (folder / "second").write_text("b")

    def call_at_once() -> None:
        starts.wait(60)
        real.make_once(tmp_path / "made", make)

    threads = [threading.Thread(target=call_at_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["first", "second"]


def test_make_once_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "first").write_text("a")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        real.make_once(tmp_path / "made", make)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.slow
def test_convert_smollm2_equals_cached(tmp_path: Path) -> None:
    real.convert_smollm2(tmp_path)
    new, cached = hw.load(tmp_path).state_dict(), hw.load(real.smollm2_folder()).state_dict()
    assert all(torch.equal(tensor, cached[name]) for name, tensor in new.items())


@pytest.mark.parametrize(("far", "code"), [(0.9e-4, 0), (1.1e-4, 1), (float("nan"), 1)])
def test_main_exit_code_follows_limits(
    far: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [Result("near", 7, "", 1e-6, 1e-7), Result("far", 7, "left", far, 1e-7)]
    monkeypatch.setattr(command, "results", lambda: iter(results))
    assert command.main() == code
    output = capsys.readouterr().out
    assert "1.0e-06" in output
    assert ("NO" in output) == bool(code)
