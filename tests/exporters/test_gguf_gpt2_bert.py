"""GPT-2 and BERT in stock llama.cpp: a random GPT-2 checkpoint of transformers, and MiniLM."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.errors import UnsupportedModelError
from headwise.exporters.engine_parity import EncoderParityReport
from headwise.exporters.gguf_export import BERT, GPT2, LLAMA, MODERN_BERT
from headwise.exporters.llama_cpp_runner import embeddings, is_available, tokenize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import bpe_tokenizer

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")
TOLERANCE = 5e-3  # nats, for the top five tokens in float32; llama.cpp's GELU is a table of 16-bit values
TEXTS = (
    "The teacher gave 1984's students  their\n\nhomework.", "Crème brûlée costs 3,14 €… no?",
    "I'll say: don't\u00a0GO there!",
    "日本語 и Москва 🙂", "x = f(1999, 'a_b')",
)  # fmt: skip


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """A random GPT-2 saved by transformers, with a byte-level BPE trained here, loaded by Headwise."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = bpe_tokenizer([document.text for document in hw.Corpus.probe_set().items()], vocab_size=600)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=48, n_layer=3, n_head=4,
        bos_token_id=tokenizer.eos, eos_token_id=tokenizer.eos,
    )  # fmt: skip
    hf_model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in hf_model.parameters():
            weight.mul_(5.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
        partial_ids = [
            i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])
        ]  # llama.cpp reports no candidates for them
        hf_model.transformer.wte.weight[partial_ids] *= 0.01
    hf_model.save_pretrained(folder)
    tokenizer.save(folder)
    model = hw.load(folder)
    assert isinstance(model, Transformer)
    return model


PRUNINGS = {"whole": None, "uneven": "0.1,2.0,2.3", "emptied": "1.*"}


@engine
@pytest.mark.parametrize("pruning", PRUNINGS)
def test_export_gguf_gpt2_matches_llama_cpp(gpt2: Transformer, pruning: str, tmp_path: Path) -> None:
    heads = PRUNINGS[pruning]
    model = gpt2 if heads is None else hw.prune(gpt2, heads=heads, corpus=["the cat sat on the mat", "a dog saw it"])
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert exported.notes[0] == "architecture gpt2"
    assert exported.parity is not None
    assert exported.parity.values > 200
    assert exported.parity.max_difference < TOLERANCE
    assert exported.parity.agrees
    zeros = {"whole": 0, "uneven": 3, "emptied": 4}[pruning]
    assert [note.split()[0] for note in exported.notes if "pruned heads are stored as zeros" in note] == (
        [str(zeros)] if zeros else []
    )
    if heads is None:
        assert gpt2.tokenizer is not None
        assert tokenize(tmp_path / "m.gguf", TEXTS) == [gpt2.tokenizer.encode(text) for text in TEXTS]


def small_spec(**fields) -> ModelSpec:
    heads = AttentionSpec(width=32, heads=4, bias=True, out_bias=True)
    return ModelSpec(
        **{"vocab": 50, "context": 64, "layers": 2, "activation": "gelu_tanh", "attention": heads, **fields}
    )


@cache
def make_model(spec: ModelSpec) -> Transformer:
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
        small_spec(
            tied=False, attention=AttentionSpec(width=32, heads=4, kv_heads=2, out_bias=True, scale=1.0), windows=(None, 64)
        ),
        small_spec(positions="sinusoidal", mlp_bias=False, attention=AttentionSpec(width=30, heads=3, bias=True)),
    ],
    ids=["as GPT-Neo, grouped, untied", "sinusoids, no biases, odd width"],
)  # fmt: skip
def test_export_gguf_other_decoders_match_llama_cpp(spec: ModelSpec, tmp_path: Path) -> None:
    """Missing biases are zeros, another scale is folded into W_Q, positions of any kind are a table."""
    exported = hw.export(make_model(spec), tmp_path / "m.gguf", to="gguf", check=True)
    assert exported.parity is not None
    assert exported.parity.max_difference < TOLERANCE
    assert exported.parity.agrees


ENCODER = {"kind": "encoder", "norm_placement": "post", "output": "none", "embed_norm": True, "activation": "gelu"}


@pytest.mark.parametrize(
    "spec",
    [
        small_spec(),
        small_spec(
            tied=False, attention=AttentionSpec(width=32, heads=4, kv_heads=2, out_bias=True, scale=1.0), windows=(None, 64)
        ),
        small_spec(**ENCODER, token_types=2),
        small_spec(**ENCODER, token_types=1, position_offset=2),
        small_spec(**ENCODER),
    ],
    ids=["GPT-2", "as GPT-Neo, grouped, untied", "BERT", "RoBERTa", "DistilBERT"],
)  # fmt: skip
@torch.no_grad()
def test_load_gguf_equals_exported_model(spec: ModelSpec, tmp_path: Path) -> None:
    model = make_model(spec)
    small = hw.prune(model, heads="0.1", fold_mean=False)
    ids = torch.arange(40).reshape(2, 20)
    for exported, name in ((model, "full"), (small, "pruned")):
        hw.export(exported, tmp_path / f"{name}.gguf", to="gguf")
        loaded = hw.load(tmp_path / f"{name}.gguf")
        assert isinstance(loaded, Transformer)
        torch.testing.assert_close(loaded(ids), exported(ids), rtol=1e-5, atol=1e-5)
        assert loaded.spec.kind == spec.kind
        assert loaded.spec.tied or not spec.tied
    assert loaded.spec.context == spec.context  # pyright: ignore[reportPossiblyUnboundVariable]


def test_load_gguf_gpt2_equals_transformers_with_its_tokenizer(gpt2: Transformer, tmp_path: Path) -> None:
    hw.export(gpt2, tmp_path / "m.gguf", to="gguf")
    loaded = hw.load(tmp_path / "m.gguf")
    assert isinstance(loaded, Transformer)
    assert loaded.tokenizer is not None
    assert gpt2.tokenizer is not None
    assert [loaded.tokenizer.encode(text) for text in TEXTS] == [gpt2.tokenizer.encode(text) for text in TEXTS]
    assert loaded.spec.norm_eps == pytest.approx(gpt2.spec.norm_eps, rel=1e-6)  # stored in float32
    assert replace(loaded.spec, norm_eps=gpt2.spec.norm_eps) == gpt2.spec
    assert loaded.generate(TEXTS[0], max_new_tokens=5) == gpt2.generate(TEXTS[0], max_new_tokens=5)


def test_load_gguf_other_attention_raises(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "bert")
    writer.add_bool("bert.attention.causal", True)
    writer.add_tensor("token_types.weight", torch.zeros(1, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"bert\.attention\.causal is True"):
        hw.load(tmp_path / "m.gguf")


@engine
def test_export_gguf_minilm_matches_llama_cpp(tmp_path: Path) -> None:
    model = hw.load("minilm")
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert isinstance(exported.parity, EncoderParityReport)
    assert exported.parity.max_difference < 5e-3, "states are up to 6; GELU there is its tanh form, in 16 bits"
    assert exported.parity.min_cosine > 1 - 1e-5
    texts = ["The teacher gave the students their homework.", *TEXTS]
    actual = torch.tensor(embeddings(tmp_path / "m.gguf", texts, 64))
    expected = hw.embed(model, texts, normalize=False)
    assert (actual - expected).abs().max() < 3e-3
    assert model.tokenizer is not None
    assert tokenize(tmp_path / "m.gguf", texts) == [model.tokenizer.encode(text) for text in texts]
    loaded = hw.load(tmp_path / "m.gguf")
    assert loaded.tokenizer is not None
    assert [loaded.tokenizer.encode(text) for text in texts] == [model.tokenizer.encode(text) for text in texts]
    assert (hw.embed(loaded, texts, normalize=False) - expected).abs().max() < 1e-5


@engine
@pytest.mark.parametrize("pooling", ["cls", "none"])
def test_export_gguf_pruned_encoder_matches_llama_cpp(pooling: str, tmp_path: Path) -> None:
    spec = small_spec(kind="encoder", norm_placement="post", output="none", embed_norm=True, activation="gelu")
    model = hw.prune(make_model(spec), heads="0.1,1.*", fold_mean=False)
    path = tmp_path / "m.gguf"
    exported = hw.export(model, path, to="gguf", check=True, pooling=pooling)
    assert exported.parity is not None
    assert exported.parity.agrees
    assert any(note.startswith("5 pruned heads are stored as zeros") for note in exported.notes)
    pooling_type = gguf.GGUFReader(path).fields["bert.pooling_type"].contents()
    assert pooling_type == {"none": 0, "cls": 2}[pooling]


@engine
def test_export_gguf_wordpiece_casing_tokenizes_equally(tmp_path: Path) -> None:
    spec = small_spec(vocab=8, kind="encoder", norm_placement="post", output="none", embed_norm=True, activation="gelu")
    model, text = Transformer(spec), "Café café head heads CAFÉ"
    for lower in (True, False):
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "head", "##s", "cafe", "Café"]
        tokenizer = model.tokenizer = hw.Tokenizer.from_wordpiece(pieces, lowercase=lower)
        hw.export(model, tmp_path / "m.gguf", to="gguf")
        assert tokenize(tmp_path / "m.gguf", [text]) == [tokenizer.encode(text)]
        loaded = hw.load(tmp_path / "m.gguf").tokenizer
        assert loaded is not None
        assert loaded.encode(text) == tokenizer.encode(text)


def test_export_gguf_unsupported_layer_norm_spec_raises(tmp_path: Path) -> None:
    encoder = small_spec(kind="encoder", norm_placement="post", output="none", embed_norm=True, activation="gelu")
    for spec, message in (
        (replace(encoder, output="mlm"), "output is 'mlm', but must be 'none'"),
        (replace(encoder, windows=(8,)), "attention window is shorter"),
        (
            small_spec(attention=AttentionSpec(width=32, heads=3, head_dim=8)),
            "3 × 8, but must equal the width 32",
        ),
        (small_spec(embed_scale=2.0), "embed_scale is 2.0"),
        (small_spec(norm_placement="parallel"), "norm_placement is 'parallel'"),
    ):
        with pytest.raises(hw.HeadwiseError, match=message):
            hw.export(Transformer(spec), tmp_path / "m.gguf", to="gguf")
    with pytest.raises(hw.HeadwiseError, match="must be one of mean, cls, none"):
        hw.export(Transformer(encoder), tmp_path / "m.gguf", to="gguf", pooling="max")
    with pytest.raises(hw.HeadwiseError, match="applies only to encoders"):
        hw.export(Transformer(small_spec()), tmp_path / "m.gguf", to="gguf", pooling="mean")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("architecture", [LLAMA, GPT2, BERT, MODERN_BERT], ids=lambda architecture: architecture.name)
def test_gguf_compat_covers_every_spec_field(architecture) -> None:
    """A new field raises an error until it is listed for each architecture."""
    assert {field.name for field in fields(ModelSpec)} == set(architecture.model_fields)
    assert {field.name for field in fields(AttentionSpec)} == set(architecture.attention_fields)
