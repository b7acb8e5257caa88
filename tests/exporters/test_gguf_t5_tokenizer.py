"""The Unigram tokenizer of T5 in GGUF: written, read back, and run in llama.cpp."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

import headwise as hw
from headwise.errors import UnsupportedModelError
from headwise.exporters.gguf_tokenizer import WHITE_SPACE, tokenizer_fields
from headwise.exporters.llama_cpp_runner import is_available, tokenize
from headwise.text.gguf_tokenizer import tokenizer_from_gguf
from tests.exporters.charsmap import build_charsmap
from tests.exporters.test_gguf_t5 import t5_spec

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")
TEXTS = (
    "The teacher gave the students their homework.", "  two  spaces,\tatab\nand\u00a0more \n ", "", " ",
    "Crème brûlée costs 3,14 €… ﬁne? ＡＢＣ", "日本語 и Москва 🙂", "x = f(1999, 'a_b')", "a</s>b <extra_id_0> c", "<unk>",
)  # fmt: skip
SPECIAL = {"pad": 0, "eos": 1, "unk": 2}


@cache
def charsmap() -> bytes:
    return build_charsmap(dict.fromkeys(WHITE_SPACE, " ") | {"…": "...", "ﬁ": "fi", "Ａ": "A", "Ｂ": "B"})


@cache
def pieces() -> tuple[tuple[str, float], ...]:
    """Return a trained vocabulary of T5's form: <pad>, </s>, <unk>, pieces, and two sentinels."""
    backend = Backend(models.Unigram())  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = words()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")  # pyright: ignore
    backend.train_from_iterator([document.text for document in hw.Corpus.probe_set().items()], trainer)

    vocab = json.loads(backend.to_str())["model"]["vocab"]
    return (*((token, score) for token, score in vocab), ("<extra_id_1>", 0.0), ("<extra_id_0>", 0.0))


def words() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "always")])


def make_tokenizer(
    normalizer: Any = None, pre_tokenizer: Any = None, *, table: bool = True, **model: Any
) -> hw.Tokenizer:
    """Return a tokenizer as transformers builds it for T5."""
    settings: dict[str, Any] = {"vocab": list(pieces()), "unk_id": 2, "byte_fallback": False} | model
    backend = Backend(models.Unigram(**settings))
    steps = [normalizers.Precompiled(charsmap())] if table else []
    backend.normalizer = normalizer or (normalizers.Sequence(steps) if steps else None)  # pyright: ignore
    backend.pre_tokenizer = pre_tokenizer or words()
    backend.decoder = decoders.Metaspace("▁", "always")  # pyright: ignore
    backend.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])  # pyright: ignore
    names = ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return hw.Tokenizer(backend, SPECIAL)


def merging_spaces() -> hw.Tokenizer:
    """Return a tokenizer as transformers converts it from SentencePiece, for example for mT5."""
    steps = [
        normalizers.Precompiled(charsmap()),
        normalizers.Strip(False, True),
        normalizers.Replace(Regex(" {2,}"), "▁"),
    ]
    return make_tokenizer(normalizers.Sequence(steps), pre_tokenizers.Metaspace("▁", "always"))  # pyright: ignore


TOKENIZERS = {"words": make_tokenizer, "merged spaces": merging_spaces}


def export_with(tokenizer: hw.Tokenizer, path: Path, spare_rows: int = 3) -> Path:
    fields = {"vocab": len(tokenizer) + spare_rows, "kind": "encoder", "output": "none", "decoder_start_id": None}
    model = hw.Transformer(t5_spec(**fields)).eval()
    model.tokenizer = tokenizer
    hw.export(model, path, to="gguf")
    return path


@pytest.mark.parametrize("name", TOKENIZERS)
def test_load_gguf_t5_reads_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    again: Any = hw.load(export_with(tokenizer, tmp_path / "m.gguf")).tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert again.decode(ids) == tokenizer.decode(ids)
    assert again.special == tokenizer.special
    assert again.template_ids == tokenizer.template_ids == ((), (1,))
    assert len({len(tokenizer.encode(text)) for text in TEXTS}) > 5, "the texts have several tokens"


@engine
@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_export_gguf_t5_tokenizes_as_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    path = export_with(tokenizer, tmp_path / "m.gguf")
    texts = [text for text in TEXTS if text.strip()]
    assert tokenize(path, texts) == [tokenizer.encode(text) for text in texts]


@engine
@pytest.mark.slow
def test_load_gguf_t5_spaces_that_are_not_merged_match_llama_cpp(tmp_path: Path) -> None:
    """Files may keep runs of spaces, with or without a space before the text."""
    fields = tokenizer_fields(make_tokenizer(), len(make_tokenizer()))
    for is_prefixed in (True, False):
        changed = fields | {"add_space_prefix": is_prefixed, "remove_extra_whitespaces": False}
        named = {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
        own = tokenizer_from_gguf(named)
        path = export_with(make_tokenizer(), tmp_path / "m.gguf", spare_rows=0)
        written = path.read_bytes()
        for name, value in (("add_space_prefix", is_prefixed), ("remove_extra_whitespaces", False)):
            key = f"tokenizer.ggml.{name}".encode()
            start = written.index(key) + len(key) + 4  # the type of the value, then the value
            written = written[:start] + bytes([value]) + written[start + 1 :]
        path.write_bytes(written)
        texts = ["The teacher", "  two  spaces", "a b  ", "日本語"]
        assert tokenize(path, texts) == [own.encode(text) for text in texts]


def test_tokenizer_from_gguf_of_the_converter_adds_eos() -> None:
    """The converter writes no flags of special tokens, and unused rows with a score of −10000."""
    fields = tokenizer_fields(make_tokenizer(), len(make_tokenizer()) + 2)
    del fields["add_bos_token"], fields["add_eos_token"]
    fields["scores"] = [*fields["scores"][:-2], -10000.0, -10000.0]
    fields["token_type"] = [*fields["token_type"][:-2], 5, 5]
    again = tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    assert [again.encode(text) for text in TEXTS] == [make_tokenizer().encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda: make_tokenizer(table=False), "does not replace other white space by spaces"),
        (lambda: make_tokenizer(normalizers.Lowercase()), "more than replace characters"),
        (lambda: make_tokenizer(pre_tokenizer=pre_tokenizers.Metaspace("▁", "always")), "keeps runs of spaces"),
        (lambda: make_tokenizer(pre_tokenizer=pre_tokenizers.Metaspace("▁", "never")), "do not begin with ▁"),
        (
            lambda: make_tokenizer(
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.Digits(), pre_tokenizers.Metaspace("▁", "always")]
                )
            ),
            "another way than at spaces",
        ),
        (lambda: make_tokenizer(byte_fallback=True), "byte fallback"),
        (lambda: make_tokenizer(vocab=[*pieces(), ("▁of▁the", -3.0)]), "after its first character"),
    ],
)
def test_export_gguf_other_unigram_tokenizers_raise(tokenizer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        export_with(tokenizer(), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
