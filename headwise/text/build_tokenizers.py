"""Tokenizers made here: bytes, characters, words, and byte-level BPE trained on a text. All are saved with the model."""

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headwise.errors import HeadwiseError
from headwise.text.corpus import Corpus
from headwise.text.synthetic.vocabulary import VOCABULARY
from headwise.text.tokenizer import Tokenizer, check_texts

END, UNKNOWN, MASK = "<end>", "<unknown>", "<mask>"


def byte_tokenizer() -> Tokenizer:
    """One id per byte, 0 to 255, and `<end>`: reads anything, learns nothing.

    >>> t = byte_tokenizer()
    >>> t.encode("Hé"), t.decode(t.encode("Hé")), len(t), t.eos
    ([72, 195, 169], 'Hé', 257, 256)
    """
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Backend(models.BPE(vocab, []))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens([END])
    return Tokenizer(backend, {"eos": 256, "bos": 256})


def character_tokenizer(text: str) -> Tokenizer:
    """One id per character that occurs in a text, in the order of their code points.

    >>> character_tokenizer("abba").encode("ab")
    [0, 1]
    """
    if not text:
        raise HeadwiseError("the text is empty; a character tokenizer is made from the characters that occur in it.")
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    return _of_units(vocab, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse())


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One id per word of a list, in its order; words stand apart by spaces.

    >>> t = word_tokenizer(["the", "cat", "."])
    >>> t.encode("the cat ."), t.decode([0, 1, 2])
    ([0, 1, 2], 'the cat .')
    """
    if len(set(words)) != len(words) or not words:
        raise HeadwiseError("a word tokenizer takes a list of words, each once, and at least one.")
    vocab = {word: i for i, word in enumerate(words)}
    return _of_units(vocab, pre_tokenizers.WhitespaceSplit(), None)


def bpe_tokenizer(texts: Iterable[str], size: int = 4096) -> Tokenizer:
    """Byte-level BPE (https://arxiv.org/abs/1508.07909) trained on texts, `size` tokens in all.

    >>> t = bpe_tokenizer(["low lower lowest"] * 10, size=262)
    >>> t.decode(t.encode("slower")), len(t)
    ('slower', 262)
    """
    if size < 257:
        raise HeadwiseError(
            f"byte-level BPE has 256 bytes and an end token to begin with, so size must be 257 or more; got {size}."
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_checked(texts), trainer)
    return Tokenizer(backend, {"eos": 0, "bos": 0})


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        check_texts([text])
        yield text


def make_tokenizer(name: str, corpus: Corpus) -> Tokenizer:
    """One of the above by name, fitted to a corpus where it needs one: byte, character, word, bpe or bpe:8000.

    >>> len(make_tokenizer("character", Corpus.of("abba")))
    4
    """
    kind, _, size = name.partition(":")
    if kind not in ("byte", "character", "word", "bpe") or (size and (kind != "bpe" or not size.isdigit())):
        raise HeadwiseError(f"there is no tokenizer {name!r}; use byte, character, word, or bpe:SIZE.")
    if kind == "byte":
        return byte_tokenizer()
    if kind == "word":
        return word_tokenizer(VOCABULARY)
    texts = (piece.text for piece in corpus.pieces())
    if kind == "bpe":
        return bpe_tokenizer(texts, int(size or 4096))
    return character_tokenizer("".join(set().union(*texts)))


def add_mask(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with a token that hides others, for the masked objective; as it is, if it has one.

    >>> t = add_mask(byte_tokenizer())
    >>> t.mask, len(t)
    (257, 258)
    """
    if tokenizer.mask is not None:
        return tokenizer
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([MASK])
    return Tokenizer(backend, {**tokenizer.special, "mask": backend.token_to_id(MASK)})


def add_frame(tokenizer: Tokenizer, behind: bool = False) -> Tokenizer:
    """The same tokenizer, which puts the end token before every text, as it stands between any two; `behind` a text, too.

    Where something is put already, nothing is added. It is saved with the tokenizer, so whoever reads a text reads it so.

    >>> add_frame(word_tokenizer(["the", "cat"])).encode("the cat"), add_frame(byte_tokenizer()).around
    ([3, 0, 1], ((256,), ()))
    """
    before, after = tokenizer.around
    if before and (after or not behind):
        return tokenizer
    if tokenizer.end is None:
        raise HeadwiseError("the tokenizer has no end token to put before a text; use another tokenizer.")
    sides = before or (tokenizer.end,), after or (tokenizer.end,) * behind
    named = [{"id": f"t{id}", "ids": [id], "tokens": [tokenizer.token(id)]} for id in {*sides[0], *sides[1]}]
    pieces = [*(f"t{id}" for id in sides[0]), "$A", *(f"t{id}" for id in sides[1])]
    frame = processors.TemplateProcessing(pieces, None, named)  # pyright: ignore
    backend = Backend.from_str(tokenizer.backend.to_str())
    own = (
        None if before or after else backend.post_processor
    )  # of two templates in a sequence only the first would work
    backend.post_processor = frame if own is None else processors.Sequence([own, frame])  # pyright: ignore
    return Tokenizer(backend, tokenizer.special)


def _of_units(vocab: dict[str, int], cut: object, join: object | None) -> Tokenizer:
    """Whole units, unknown ones told as such; `<unknown>` and `<end>` come last."""
    units = {**vocab, UNKNOWN: len(vocab), END: len(vocab) + 1}
    check_texts(units)
    backend = Backend(models.WordLevel(units, unk_token=UNKNOWN))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = cut  # pyright: ignore
    if join is not None:
        backend.decoder = join  # pyright: ignore
    backend.add_special_tokens([UNKNOWN, END])
    return Tokenizer(backend, {"unk": len(vocab), "eos": len(vocab) + 1, "bos": len(vocab) + 1})


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte: itself, or the next one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
