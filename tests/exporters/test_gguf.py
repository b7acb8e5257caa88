"""GGUF files of full and pruned models, run in stock llama.cpp if it is installed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

import headwise as hw
from headwise.exporters.engine_parity import compare_generated
from headwise.exporters.gguf_tensors import padded_layers_and_biases
from headwise.exporters.llama_cpp_runner import EngineToken, generate, is_available, tokenize
from headwise.spec import Rotary, RotaryScaling
from tests.exporters.llamas import (
    SPEC,
    TEXTS,
    make_llama,
    prune_random_heads,
    sentencepiece_tokenizer,
    tokenizer,
    without_heads,
)

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")
SCALED_ROTARY = Rotary(theta=500.0, scaling=RotaryScaling("llama3", 8.0, original_context=32))
TOLERANCE = 5e-3  # nats, for the top five tokens in float32


def fields(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def prompts(count: int = 3) -> list[list[int]]:
    return [tokenizer().encode(text) for text in TEXTS[:count]]


PRUNINGS = {
    "whole": lambda model: model,
    "uneven": lambda model: without_heads(model, "0.1,1.0,1.1,2.5", folded=False),
    "emptied": lambda model: without_heads(model, "1.*"),
    "first emptied": lambda model: without_heads(model, "0.*,2.1"),
    "folded": lambda model: without_heads(model, "0.1,0.4,2.0"),
}


@engine
@pytest.mark.parametrize("name", PRUNINGS)
def test_export_gguf_pruned_llama_matches_llama_cpp(name: str, tmp_path: Path) -> None:
    model = PRUNINGS[name](make_llama())
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert exported.parity is not None
    assert exported.parity.max_difference < TOLERANCE
    assert exported.parity.values > 100
    assert exported.parity.agrees
    assert exported.notes[0] == f"architecture {'llama' if name == 'whole' else 'deci'}"


@engine
@pytest.mark.parametrize(
    "more",
    [
        {"tied": False},
        {"attention": replace(SPEC.attention, rotary=Rotary(layout="interleaved"))},
        {"attention": replace(SPEC.attention, rotary=SCALED_ROTARY)},
        {"attention": replace(SPEC.attention, bias=True)},
        {"attention": replace(SPEC.attention, bias=True), "cut": "1.*,2.0"},
        {"attention": replace(SPEC.attention, rotary=Rotary(scaling=RotaryScaling("linear", 4.0)), scale=0.2)},
        {"attention": replace(SPEC.attention, bias=True, window=64, scale=0.5), "mlp_bias": True, "cut": "0.*,2.*"},
    ],
    ids=["untied", "interleaved", "stretched", "biases", "biases, cut", "linear, another scale", "all biases, cut"],
)  # fmt: skip
def test_export_gguf_llama_variants_match_llama_cpp(more: dict, tmp_path: Path) -> None:
    pruned_heads = more.pop("cut", None) if "cut" in (more := dict(more)) else None
    model = make_llama(1, **more)
    model = model if pruned_heads is None else without_heads(model, pruned_heads)
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert exported.parity is not None
    assert exported.parity.max_difference < TOLERANCE
    assert exported.parity.values > 100
    assert exported.parity.agrees


@engine
def test_export_gguf_sentencepiece_tokenizes_equally(tmp_path: Path) -> None:
    spm = sentencepiece_tokenizer()
    model = hw.Transformer(replace(SPEC, layers=1, vocab=len(spm) + 3))
    model.tokenizer = spm
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    texts = [document.text for document, _ in zip(hw.Corpus.probe_set().items(), range(100), strict=False)]
    texts += ["Crème brûlée costs 3,14 €…", "  two  spaces\n\nnew", "日本語 🙂", "a </s> b <|user|> c", "<|user|>x"]
    assert tokenize(tmp_path / "m.gguf", texts) == [spm.encode(text) for text in texts]
    merges = json.loads(spm.backend.to_str())
    merges["model"]["merges"].reverse()  # another order that scores can express
    reversed_spm = model.tokenizer = hw.Tokenizer(Backend.from_str(json.dumps(merges)), spm.special)
    reversed_spm.backend.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    assert tokenize(tmp_path / "m.gguf", texts) == [reversed_spm.encode(text) for text in texts]
    merges["model"]["merges"].pop()  # a pair that is not merged although its token exists
    model.tokenizer = hw.Tokenizer(Backend.from_str(json.dumps(merges)), spm.special)
    with pytest.raises(hw.HeadwiseError, match="cannot be expressed by scores"):
        hw.export(model, tmp_path / "m.gguf", to="gguf")
    merges["normalizer"] = {"type": "NFKC"}
    model.tokenizer = hw.Tokenizer(Backend.from_str(json.dumps(merges)), spm.special)
    with pytest.raises(hw.HeadwiseError, match="treats spaces"):
        hw.export(model, tmp_path / "m.gguf", to="gguf")


@pytest.mark.parametrize(("dtype", "steps"), [("f16", 2**-11), ("q8_0", 1 / 254), ("q4_0", 1 / 8)])
def test_export_gguf_quantized_weights_within_step(dtype: str, steps: float, tmp_path: Path) -> None:
    """A block of 32 weights shares a scale: its largest value divided by 127 or −8. f16 rounds each weight separately."""
    model = make_llama(mlp_width=96)
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    rows = tensors["blk.1.ffn_down.weight"]  # 96 inputs: three blocks per row
    assert rows.tensor_type.name.lower() == dtype
    dequantized = torch.from_numpy(
        gguf.quants.dequantize(rows.data, rows.tensor_type).reshape(32, 96).astype("float32")
    )
    mlp: Any = model.blocks[1].mlp  # pyright: ignore[reportAttributeAccessIssue]
    blocks = mlp.down.weight.detach().unflatten(1, (3, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    error = (dequantized.unflatten(1, (3, 32)) - blocks).abs()
    assert (error <= largest * (steps + 2e-3)).all()
    assert (error > 0).any()
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    assert tensors["token_embd.weight"].tensor_type.name == ("Q8_0" if dtype == "q4_0" else dtype.upper())
    narrow = [
        tensor.name
        for tensor in tensors.values()
        if tensor.name.endswith("attn_output.weight") and tensor.tensor_type.name == "F16"
    ]
    notes = [note for note in exported.notes if "are stored as f16" in note]
    assert (len(narrow), notes) == (
        (3, []) if dtype == "f16" else (3, ["3 tensors whose rows are not a multiple of 32 are stored as f16"])
    )


@engine
@pytest.mark.parametrize(("dtype", "within"), [("f16", 0.1), ("q8_0", 0.5), ("q4_0", 3.0)])
def test_export_gguf_quantized_logits_within_tolerance(dtype: str, within: float, tmp_path: Path) -> None:
    model = without_heads(make_llama(), "0.1,1.*", folded=False)
    hw.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype)
    answers = generate(tmp_path / "m.gguf", prompts(1), 4)
    assert compare_generated(model, prompts(1), answers).max_difference < within


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.slow)])
@engine
def test_export_gguf_random_pruning_never_aborts_llama_cpp(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        model = prune_random_heads(make_llama(seed), seed)
        hw.export(model, tmp_path / f"{seed}.gguf", to="gguf")
        answers = generate(tmp_path / f"{seed}.gguf", prompts(1), 2)  # raises if the process crashed
        assert compare_generated(model, prompts(1), answers).max_difference < TOLERANCE, seed
        (tmp_path / f"{seed}.gguf").unlink()


def test_export_gguf_pruned_model_metadata_and_tensors(tmp_path: Path) -> None:
    model = without_heads(make_llama(), "0.0,2.*")
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf")
    metadata = fields(tmp_path / "m.gguf")
    assert metadata["deci.attention.head_count"] == [6, 6, 0]  # head 0.0 is pruned and replaced by a zero head
    assert metadata["deci.attention.head_count_kv"] == [3, 3, 0]
    assert metadata["deci.feed_forward_length"] == [64, 64, 64]
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert metadata["tokenizer.ggml.tokens"][5] == tokenizer().token(5)
    assert "1 zero heads pad KV groups to equal size" in exported.notes
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert "blk.2.attn_q.weight" not in tensors
    constant = list(model.attention_layers())[2].b_O
    assert constant is not None
    assert torch.equal(torch.from_numpy(tensors["blk.1.ffn_down.bias"].copy()), constant.detach())


def test_pad_head_groups_uneven_groups_get_zero_heads() -> None:
    model = without_heads(make_llama(), "0.1,0.2,0.3", folded=False)  # KV heads 0 and 2 remain, with 1 and 2 heads
    layers, biases = padded_layers_and_biases(model)
    first = layers[0]
    assert (first.heads, first.kv_heads, first.zero_heads) == (4, 2, 1)
    assert first.o is not None
    output_norms = first.o.unflatten(1, (4, 8)).abs().sum((0, 2))
    assert output_norms[1] == 0
    assert (output_norms[[0, 2, 3]] > 0).all()
    assert not biases


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hw.Transformer(hw.preset("nano")), "activation is 'gelu', but must be 'gelu_tanh'"),
        (lambda: make_llama(attention=replace(SPEC.attention, window=8)), "attention window is shorter"),
        (lambda: make_llama(windows=(None, 8)), "attention window is shorter"),
        (
            lambda: make_llama(attention=replace(SPEC.attention, softmax="sink")),
            "softmax is 'sink', but must be 'plain'",
        ),
        (lambda: make_llama(attention=replace(SPEC.attention, softcap=30.0)), "softcap is 30.0"),
        (lambda: make_llama(attention=replace(SPEC.attention, alibi=True)), "alibi is True"),
        (
            lambda: make_llama(attention=replace(SPEC.attention, rotary=Rotary(dims=4))),
            "heads × head_dim is 48, but must equal the width 32",
        ),
        (lambda: make_llama(attention=replace(SPEC.attention, value_dim=4)), "value_dim differs from head_dim"),
        (lambda: make_llama(token_types=2), "token_types is 2"),
        (
            lambda: make_llama(kind="encoder", output="mlm"),
            "bert architecture cannot compute this model: norm_placement is 'pre'",
        ),
        (lambda: hw.Transformer(hw.preset("transformer-base").resized(layers=1, width=16, heads=2)), "encoder-decoder"),
        (lambda: hw.quantize(make_llama(), 8), "weights quantized per head"),
    ],
)
def test_export_gguf_unsupported_spec_raises(make, message: str, tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=message):
        hw.export(make(), tmp_path / "m.gguf", to="gguf")
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_export_gguf_invalid_arguments_raise(tmp_path: Path) -> None:
    model = make_llama()
    with pytest.raises(hw.HeadwiseError, match="to='ggml': unknown export target"):
        hw.export(model, tmp_path / "m.gguf", to="ggml")
    with pytest.raises(hw.HeadwiseError, match="must be one of f32, f16"):
        hw.export(model, tmp_path / "m.gguf", to="gguf", dtype="q5_k")
    with pytest.raises(hw.HeadwiseError, match=r"unknown option shards\. Valid options: dtype, tokenizer, pooling"):
        hw.export(model, tmp_path / "m.gguf", to="gguf", shards=2)
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(hw.HeadwiseError, match="not a GGUF file written by Headwise"):
        hw.export(model, tmp_path / "diary.txt", to="gguf")
    with pytest.raises(hw.HeadwiseError, match="not a GGUF file written by Headwise"):
        hw.export(model, tmp_path, to="gguf")
    assert (tmp_path / "diary.txt").read_text() == "dear diary"
    model_with_words = make_llama()
    model_with_words.tokenizer = hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the"])
    hw.export(model_with_words, tmp_path / "words.gguf", to="gguf")
    from headwise.text.build_tokenizers import word_tokenizer

    model_with_words.tokenizer = word_tokenizer(["the", "cat"])
    with pytest.raises(hw.HeadwiseError, match="tokenizer=False"):
        hw.export(model_with_words, tmp_path / "none.gguf", to="gguf")
    hw.export(model_with_words, tmp_path / "none.gguf", to="gguf", tokenizer=False)
    assert fields(tmp_path / "none.gguf")["tokenizer.ggml.tokens"][:3] == [" 0", " 1", " 2"]


def test_compare_different_token_is_reported() -> None:
    """With our two most likely tokens: the first agrees, the second diverges, and is a near-tie only if it is close."""
    model = make_llama()
    ids = prompts(1)[0]
    log_probs = model(torch.tensor([ids]))[0, -1].log_softmax(-1).detach()
    best, second = log_probs.topk(2).indices.tolist()
    right = [[EngineToken(best, {best: float(log_probs[best])})]]
    assert compare_generated(model, [ids], right).agrees
    wrong = compare_generated(model, [ids], [[EngineToken(second, {second: float(log_probs[second]) + 0.25})]])
    assert wrong.diverged == 1
    assert wrong.max_difference == pytest.approx(0.25, abs=1e-6)
    assert wrong.agrees == (float(log_probs[best] - log_probs[second]) < 1e-2)
