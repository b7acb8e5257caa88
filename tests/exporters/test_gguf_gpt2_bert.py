"""GPT-2 and BERT in stock llama.cpp: a checkpoint made by transformers, and MiniLM."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.exporters.gguf_compat import BERT, GPT2, LLAMA
from headwise.exporters.llama_cpp import cut_texts, is_there, vectors
from headwise.exporters.parity import CheckedStates
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import bpe_tokenizer

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_there(), reason="needs xllamacpp, which carries llama.cpp")
WITHIN = 5e-3  # nats, of the five likeliest tokens in float32; its GELU is a table of 16-bit numbers
TEXTS = (
    "The teacher gave 1984's students  their\n\nhomework.", "Crème brûlée costs 3,14 €… no?",
    "I'll say: don't\u00a0GO there!",
    "日本語 и Москва 🙂", "x = f(1999, 'a_b')",
)  # fmt: skip


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """A random GPT-2 as transformers saves it, with byte-level BPE learned here, loaded by us."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    words = bpe_tokenizer([one.text for one in hw.Corpus.probe().items()], size=600)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(words), n_positions=64, n_embd=48, n_layer=3, n_head=4, bos_token_id=words.eos, eos_token_id=words.eos
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.mul_(5.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
        parts = [i for i in range(len(words)) if "\ufffd" in words.decode([i])]  # of which llama.cpp tells nothing
        theirs.transformer.wte.weight[parts] *= 0.01
    theirs.save_pretrained(folder)
    words.save(folder)
    model = hw.load(folder)
    assert isinstance(model, Transformer)
    return model


CUTS = {"whole": None, "uneven": "0.1,2.0,2.3", "emptied": "1.*"}


@engine
@pytest.mark.parametrize("cut", CUTS)
def test_gpt2_in_llama_cpp(gpt2: Transformer, cut: str, tmp_path: Path) -> None:
    heads = CUTS[cut]
    model = gpt2 if heads is None else hw.prune(gpt2, heads=heads, on=["the cat sat on the mat", "a dog saw it"])
    made = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert made.notes[0] == "architecture gpt2"
    assert made.checked is not None
    assert made.checked.numbers > 200
    assert made.checked.largest < WITHIN
    assert made.checked.agrees
    zeros = {"whole": 0, "uneven": 3, "emptied": 4}[cut]
    assert [note.split()[0] for note in made.notes if "cut heads are zeros" in note] == ([str(zeros)] if zeros else [])
    if heads is None:
        assert gpt2.tokenizer is not None
        assert cut_texts(tmp_path / "m.gguf", TEXTS) == [gpt2.tokenizer.encode(text) for text in TEXTS]


def small(**more) -> ModelSpec:
    heads = AttentionSpec(width=32, heads=4, bias=True, out_bias=True)
    return ModelSpec(**{"vocab": 50, "context": 64, "layers": 2, "activation": "gelu_tanh", "attention": heads, **more})


@cache
def sharper(spec: ModelSpec) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(spec).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    return model


@engine
@pytest.mark.parametrize(
    "spec",
    [
        small(
            tied=False, attention=AttentionSpec(width=32, heads=4, kv_heads=2, out_bias=True, scale=1.0), windows=(None, 64)
        ),
        small(positions="sinusoidal", mlp_bias=False, attention=AttentionSpec(width=30, heads=3, bias=True)),
    ],
    ids=["as GPT-Neo, grouped, untied", "sinusoids, no biases, odd width"],
)  # fmt: skip
def test_other_decoders_as_gpt2(spec: ModelSpec, tmp_path: Path) -> None:
    """Biases that are not there are zeros, another scale is in W_Q, positions of any kind are a table."""
    made = hw.export(sharper(spec), tmp_path / "m.gguf", to="gguf", check=True)
    assert made.checked is not None
    assert made.checked.largest < WITHIN
    assert made.checked.agrees


@engine
def test_minilm_in_llama_cpp(tmp_path: Path) -> None:
    model = hw.load("minilm")
    made = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert isinstance(made.checked, CheckedStates)
    assert made.checked.largest < 5e-3, "states are up to 6; GELU there is its tanh form, in 16 bits"
    assert made.checked.cosine > 1 - 1e-5
    texts = ["The teacher gave the students their homework.", *TEXTS]
    found = torch.tensor(vectors(tmp_path / "m.gguf", texts, 64))
    ours = hw.embed(model, texts, normalise=False)
    assert (found - ours).abs().max() < 3e-3
    assert model.tokenizer is not None
    assert cut_texts(tmp_path / "m.gguf", texts) == [model.tokenizer.encode(text) for text in texts]


@engine
@pytest.mark.parametrize("pooling", ["cls", "none"])
def test_a_cut_encoder(pooling: str, tmp_path: Path) -> None:
    spec = small(kind="encoder", form="post", output="none", embed_norm=True, activation="gelu")
    model = hw.prune(sharper(spec), heads="0.1,1.*", fold=False)
    path = tmp_path / "m.gguf"
    made = hw.export(model, path, to="gguf", check=True, pooling=pooling)
    assert made.checked is not None
    assert made.checked.agrees
    assert "5 cut heads are zeros: the numbers are those of the cut model, the size is not" in made.notes
    told = gguf.GGUFReader(path).fields["bert.pooling_type"].contents()
    assert told == {"none": 0, "cls": 2}[pooling]


@engine
def test_a_cased_tokenizer(tmp_path: Path) -> None:
    spec = small(vocab=8, kind="encoder", form="post", output="none", embed_norm=True, activation="gelu")
    model, text = Transformer(spec), "Café café head heads CAFÉ"
    for lower in (True, False):
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "head", "##s", "cafe", "Café"]
        words = model.tokenizer = hw.Tokenizer.from_wordpiece(pieces, lower=lower)
        hw.export(model, tmp_path / "m.gguf", to="gguf")
        assert cut_texts(tmp_path / "m.gguf", [text]) == [words.encode(text)]


def test_what_is_refused(tmp_path: Path) -> None:
    encoder = small(kind="encoder", form="post", output="none", embed_norm=True, activation="gelu")
    for spec, said in (
        (replace(encoder, output="mlm"), "output is 'mlm', there it is 'none'"),
        (replace(encoder, windows=(8,)), "looks back only so far"),
        (small(attention=AttentionSpec(width=32, heads=3, head_dim=8)), "3 × 8 wide, there they fill the width 32"),
        (small(embed_scale=2.0), "embed_scale is 2.0"),
        (small(form="parallel"), "form is 'parallel'"),
    ):
        with pytest.raises(hw.HeadwiseError, match=said):
            hw.export(Transformer(spec), tmp_path / "m.gguf", to="gguf")
    with pytest.raises(hw.HeadwiseError, match="a text becomes one vector by mean, cls, none"):
        hw.export(Transformer(encoder), tmp_path / "m.gguf", to="gguf", pooling="max")
    with pytest.raises(hw.HeadwiseError, match="leave it out for a decoder"):
        hw.export(Transformer(small()), tmp_path / "m.gguf", to="gguf", pooling="mean")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("one", [LLAMA, GPT2, BERT], ids=lambda one: one.name)
def test_every_field_of_a_spec_is_decided(one) -> None:
    """A field that is new is refused until somebody says what llama.cpp makes of it."""
    assert {field.name for field in fields(ModelSpec)} == set(one.model)
    assert {field.name for field in fields(AttentionSpec)} == set(one.heads)
