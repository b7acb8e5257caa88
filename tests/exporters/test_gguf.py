"""GGUF files of whole and cut models, run in stock llama.cpp where it is installed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

import headwise as hw
from headwise.exporters.llama_cpp import EngineToken, cut_texts, is_there, write_on
from headwise.exporters.pad_head_groups import filled_layers
from headwise.exporters.parity import compare
from headwise.spec import Rotary, RotaryScaling
from tests.exporters.llamas import SPEC, TEXTS, llama, random_cut, sentencepiece, tokenizer, without

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_there(), reason="needs xllamacpp, which carries llama.cpp")
STRETCHED = Rotary(theta=500.0, scaling=RotaryScaling("llama3", 8.0, original_context=32))
WITHIN = 5e-3  # nats, of the five likeliest tokens in float32


def fields(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def prompts(count: int = 3) -> list[list[int]]:
    return [tokenizer().encode(text) for text in TEXTS[:count]]


CUTS = {
    "whole": lambda model: model,
    "uneven": lambda model: without(model, "0.1,1.0,1.1,2.5", folded=False),
    "emptied": lambda model: without(model, "1.*"),
    "first emptied": lambda model: without(model, "0.*,2.1"),
    "folded": lambda model: without(model, "0.1,0.4,2.0"),
}


@engine
@pytest.mark.parametrize("name", CUTS)
def test_llama_cpp_says_what_we_say(name: str, tmp_path: Path) -> None:
    model = CUTS[name](llama())
    made = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert made.checked is not None
    assert made.checked.largest < WITHIN
    assert made.checked.numbers > 100
    assert made.checked.agrees
    assert made.notes[0] == f"architecture {'llama' if name == 'whole' else 'deci'}"


@engine
@pytest.mark.parametrize(
    "more",
    [
        {"tied": False},
        {"attention": replace(SPEC.attention, rotary=Rotary(layout="interleaved"))},
        {"attention": replace(SPEC.attention, rotary=STRETCHED)},
        {"attention": replace(SPEC.attention, bias=True)},
        {"attention": replace(SPEC.attention, bias=True), "cut": "1.*,2.0"},
        {"attention": replace(SPEC.attention, rotary=Rotary(scaling=RotaryScaling("linear", 4.0)), scale=0.2)},
        {"attention": replace(SPEC.attention, bias=True, window=64, scale=0.5), "mlp_bias": True, "cut": "0.*,2.*"},
    ],
    ids=["untied", "interleaved", "stretched", "biases", "biases, cut", "linear, another scale", "all biases, cut"],
)  # fmt: skip
def test_other_llamas(more: dict, tmp_path: Path) -> None:
    gone = more.pop("cut", None) if "cut" in (more := dict(more)) else None
    model = llama(1, **more)
    model = model if gone is None else without(model, gone)
    made = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert made.checked is not None
    assert made.checked.largest < WITHIN
    assert made.checked.numbers > 100
    assert made.checked.agrees


@engine
def test_sentencepiece_cuts_as_ours(tmp_path: Path) -> None:
    words = sentencepiece()
    model = hw.Transformer(replace(SPEC, layers=1, vocab=len(words) + 3))
    model.tokenizer = words
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    texts = [one.text for one, _ in zip(hw.Corpus.probe().items(), range(100), strict=False)]
    texts += ["Crème brûlée costs 3,14 €…", "  two  spaces\n\nnew", "日本語 🙂", "a </s> b <|user|> c", "<|user|>x"]
    assert cut_texts(tmp_path / "m.gguf", texts) == [words.encode(text) for text in texts]
    merges = json.loads(words.backend.to_str())
    merges["model"]["merges"].reverse()  # another order, which scores can say
    others = model.tokenizer = hw.Tokenizer(Backend.from_str(json.dumps(merges)), words.special)
    others.backend.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    assert cut_texts(tmp_path / "m.gguf", texts) == [others.encode(text) for text in texts]
    merges["model"]["merges"].pop()  # a pair that is not joined though its token is there
    model.tokenizer = hw.Tokenizer(Backend.from_str(json.dumps(merges)), words.special)
    with pytest.raises(hw.HeadwiseError, match="in an order no score can say"):
        hw.export(model, tmp_path / "m.gguf", to="gguf")
    merges["normalizer"] = {"type": "NFKC"}
    model.tokenizer = hw.Tokenizer(Backend.from_str(json.dumps(merges)), words.special)
    with pytest.raises(hw.HeadwiseError, match="cannot treat spaces as this tokenizer does"):
        hw.export(model, tmp_path / "m.gguf", to="gguf")


@pytest.mark.parametrize(("dtype", "steps"), [("f16", 2**-11), ("q8_0", 1 / 254), ("q4_0", 1 / 8)])
def test_weights_are_rounded_as_the_type_says(dtype: str, steps: float, tmp_path: Path) -> None:
    """A block of 32 shares a scale: its largest number over 127, or over −8; f16 rounds each number by itself."""
    model = llama(hidden=96)
    made = hw.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype)
    held = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    rows = held["blk.1.ffn_down.weight"]  # 96 inputs: three blocks a row
    assert rows.tensor_type.name.lower() == dtype
    found = torch.from_numpy(gguf.quants.dequantize(rows.data, rows.tensor_type).reshape(32, 96).astype("float32"))
    mlp: Any = model.blocks[1].mlp  # pyright: ignore[reportAttributeAccessIssue]
    blocks = mlp.down.weight.detach().unflatten(1, (3, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    apart = (found.unflatten(1, (3, 32)) - blocks).abs()
    assert (apart <= largest * (steps + 2e-3)).all()
    assert (apart > 0).any()
    assert held["output_norm.weight"].tensor_type.name == "F32"
    assert held["token_embd.weight"].tensor_type.name == ("Q8_0" if dtype == "q4_0" else dtype.upper())
    narrow = [
        one.name for one in held.values() if one.name.endswith("attn_output.weight") and one.tensor_type.name == "F16"
    ]
    told = [note for note in made.notes if "are at 16 bits" in note]
    assert (len(narrow), told) == (
        (3, []) if dtype == "f16" else (3, ["3 tensors whose rows are no multiple of 32 are at 16 bits"])
    )


@engine
@pytest.mark.parametrize(("dtype", "within"), [("f16", 0.1), ("q8_0", 0.5), ("q4_0", 3.0)])
def test_fewer_bits(dtype: str, within: float, tmp_path: Path) -> None:
    model = without(llama(), "0.1,1.*", folded=False)
    hw.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype)
    answers = write_on(tmp_path / "m.gguf", prompts(1), 4)
    assert compare(model, prompts(1), answers).largest < within


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.slow)])
@engine
def test_no_cut_ends_the_engine(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        model = random_cut(llama(seed), seed)
        hw.export(model, tmp_path / f"{seed}.gguf", to="gguf")
        answers = write_on(tmp_path / f"{seed}.gguf", prompts(1), 2)  # raises if the process ended
        assert compare(model, prompts(1), answers).largest < WITHIN, seed
        (tmp_path / f"{seed}.gguf").unlink()


def test_what_stands_in_the_file(tmp_path: Path) -> None:
    model = without(llama(), "0.0,2.*")
    made = hw.export(model, tmp_path / "m.gguf", to="gguf")
    told = fields(tmp_path / "m.gguf")
    assert told["deci.attention.head_count"] == [6, 6, 0]  # 0.0 is gone, and a head of zeros stands for it
    assert told["deci.attention.head_count_kv"] == [3, 3, 0]
    assert told["deci.feed_forward_length"] == [64, 64, 64]
    assert told["tokenizer.ggml.pre"] == "gpt-2"
    assert told["tokenizer.ggml.tokens"][5] == tokenizer().token(5)
    assert "1 heads of zeros make groups even" in made.notes
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert "blk.2.attn_q.weight" not in tensors
    constant = list(model.attention_layers())[2].b_O
    assert constant is not None
    assert torch.equal(torch.from_numpy(tensors["blk.1.ffn_down.bias"].copy()), constant.detach())


def test_groups_are_filled_up_with_heads_that_write_nothing() -> None:
    model = without(llama(), "0.1,0.2,0.3", folded=False)  # key heads 0 and 2 are left, with 1 and 2 heads
    layers, behind = filled_layers(model)
    first = layers[0]
    assert (first.heads, first.kv_heads, first.zeros) == (4, 2, 1)
    assert first.o is not None
    written = first.o.unflatten(1, (4, 8)).abs().sum((0, 2))
    assert written[1] == 0
    assert (written[[0, 2, 3]] > 0).all()
    assert not behind


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hw.Transformer(hw.preset("nano")), "activation is 'gelu', there it is 'gelu_tanh'"),
        (lambda: llama(attention=replace(SPEC.attention, window=8)), "looks back only so far"),
        (lambda: llama(windows=(None, 8)), "looks back only so far"),
        (lambda: llama(attention=replace(SPEC.attention, softmax="sink")), "softmax is 'sink', there it is 'plain'"),
        (lambda: llama(attention=replace(SPEC.attention, softcap=30.0)), "softcap is 30.0"),
        (lambda: llama(attention=replace(SPEC.attention, alibi=True)), "alibi is True"),
        (
            lambda: llama(attention=replace(SPEC.attention, rotary=Rotary(dims=4))),
            "only part of a head's channels turn",
        ),
        (lambda: llama(attention=replace(SPEC.attention, value_dim=4)), "values have another size than keys"),
        (lambda: llama(token_types=2), "token_types is 2"),
        (lambda: llama(kind="encoder", output="mlm"), "llama.cpp's bert cannot compute this model: form is 'pre'"),
        (lambda: hw.Transformer(hw.preset("transformer-base").resized(layers=1, width=16, heads=2)), "encoder-decoder"),
        (lambda: hw.quantise(llama(), 8), "no weights at bits by head"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(make, said: str, tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=said):
        hw.export(make(), tmp_path / "m.gguf", to="gguf")
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_bad_input(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(hw.HeadwiseError, match="there is no target 'ggml'"):
        hw.export(model, tmp_path / "m.gguf", to="ggml")
    with pytest.raises(hw.HeadwiseError, match="weights are written as f32, f16"):
        hw.export(model, tmp_path / "m.gguf", to="gguf", dtype="q5_k")
    with pytest.raises(hw.HeadwiseError, match="gguf has no option shards; it has dtype, tokenizer, pooling"):
        hw.export(model, tmp_path / "m.gguf", to="gguf", shards=2)
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(hw.HeadwiseError, match="is no GGUF file written here"):
        hw.export(model, tmp_path / "diary.txt", to="gguf")
    with pytest.raises(hw.HeadwiseError, match="is no GGUF file written here"):
        hw.export(model, tmp_path, to="gguf")
    assert (tmp_path / "diary.txt").read_text() == "dear diary"
    words = llama()
    words.tokenizer = hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the"])
    hw.export(words, tmp_path / "words.gguf", to="gguf")
    from headwise.text.build_tokenizers import word_tokenizer

    words.tokenizer = word_tokenizer(["the", "cat"])
    with pytest.raises(hw.HeadwiseError, match="tokenizer=False"):
        hw.export(words, tmp_path / "none.gguf", to="gguf")
    hw.export(words, tmp_path / "none.gguf", to="gguf", tokenizer=False)
    assert fields(tmp_path / "none.gguf")["tokenizer.ggml.tokens"][:3] == [" 0", " 1", " 2"]


def test_where_texts_part_is_told() -> None:
    """Our own two likeliest tokens: the first agrees, the second parts, and is close only if it is."""
    model = llama()
    ids = prompts(1)[0]
    logs = model(torch.tensor([ids]))[0, -1].log_softmax(-1).detach()
    best, second = logs.topk(2).indices.tolist()
    right = [[EngineToken(best, {best: float(logs[best])})]]
    assert compare(model, [ids], right).agrees
    wrong = compare(model, [ids], [[EngineToken(second, {second: float(logs[second]) + 0.25})]])
    assert wrong.parted == 1
    assert wrong.largest == pytest.approx(0.25, abs=1e-6)
    assert wrong.agrees == (float(logs[best] - logs[second]) < 1e-2)
