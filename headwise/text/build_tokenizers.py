"""Build tokenizers: bytes, characters, words, or byte-level BPE trained on a corpus. They are saved with the model."""

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headwise.errors import ArgumentError
from headwise.text.corpus import Corpus
from headwise.text.synthetic.vocabulary import VOCABULARY
from headwise.text.tokenizer import Tokenizer, check_lone_surrogates

END_TOKEN, UNKNOWN_TOKEN, MASK_TOKEN = "<end>", "<unknown>", "<mask>"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one id per byte, 0 to 255, and `<end>`. It encodes any text and needs no training.

    >>> t = byte_tokenizer()
    >>> t.encode("Hé"), t.decode(t.encode("Hé")), len(t), t.eos
    ([72, 195, 169], 'Hé', 257, 256)
    """
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Backend(models.BPE(vocab, []))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens([END_TOKEN])
    return Tokenizer(backend, {"eos": 256, "bos": 256})


def character_tokenizer(text: str) -> Tokenizer:
    """Return a tokenizer with one id per character of a text, in the order of code points.

    >>> character_tokenizer("abba").encode("ab")
    [0, 1]
    """
    if not text:
        raise ArgumentError(
            "text: the text is empty, so the vocabulary would have no characters. Give a text that contains every character "
            "of the vocabulary."
        )
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    return _word_level_tokenizer(vocab, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse())


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with one id per word of a list. Words are separated by spaces.

    >>> t = word_tokenizer(["the", "cat", "."])
    >>> t.encode("the cat ."), t.decode([0, 1, 2])
    ([0, 1, 2], 'the cat .')
    """
    if len(set(words)) != len(words) or not words:
        raise ArgumentError(
            f"words: must have at least one word, and no word twice. Got {len(words)} words, {len(set(words))} of them "
            "distinct. Add a word or remove duplicates."
        )
    vocab = {word: i for i, word in enumerate(words)}
    return _word_level_tokenizer(vocab, pre_tokenizers.WhitespaceSplit(), None)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE tokenizer (https://arxiv.org/abs/1508.07909) with `vocab_size` tokens.

    >>> t = bpe_tokenizer(["low lower lowest"] * 10, vocab_size=262)
    >>> t.decode(t.encode("slower")), len(t)
    ('slower', 262)
    """
    if vocab_size < 257:
        raise ArgumentError(
            f"vocab_size: byte-level BPE needs 256 bytes and an end token. Got {vocab_size}. Use at least 257."
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_reject_lone_surrogates(texts), trainer)
    return Tokenizer(backend, {"eos": 0, "bos": 0})


def _reject_lone_surrogates(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        check_lone_surrogates([text])
        yield text


def make_tokenizer(name: str, corpus: Corpus) -> Tokenizer:
    """Return a tokenizer by name, trained on a corpus if needed: byte, character, word, bpe or bpe:8000.

    >>> len(make_tokenizer("character", Corpus.of("abba")))
    4
    """
    kind, _, size = name.partition(":")
    if kind not in ("byte", "character", "word", "bpe") or (size and (kind != "bpe" or not size.isdigit())):
        raise ArgumentError(f"tokenizer: unknown name. Got {name!r}. Use byte, character, word, or bpe:SIZE.")
    if kind == "byte":
        return byte_tokenizer()
    if kind == "word":
        return word_tokenizer(VOCABULARY)
    texts = (chunk.text for chunk in corpus.chunks())
    if kind == "bpe":
        return bpe_tokenizer(texts, int(size or 4096))
    return character_tokenizer("".join(set().union(*texts)))


def add_mask_token(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a mask token for the masked objective. A tokenizer with a mask token is not changed.

    >>> t = add_mask_token(byte_tokenizer())
    >>> t.mask, len(t)
    (257, 258)
    """
    if tokenizer.mask is not None:
        return tokenizer
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([MASK_TOKEN])
    return Tokenizer(backend, {**tokenizer.special, "mask": backend.token_to_id(MASK_TOKEN)})


def add_bos_eos(tokenizer: Tokenizer, *, add_eos: bool = False) -> Tokenizer:
    """Return the tokenizer with a template that adds the end token before every text, and after it with `add_eos`.

    An existing template is kept. The template is saved with the tokenizer.

    >>> add_bos_eos(word_tokenizer(["the", "cat"])).encode("the cat"), add_bos_eos(byte_tokenizer()).template_ids
    ([3, 0, 1], ((256,), ()))
    """
    prefix, suffix = tokenizer.template_ids
    if prefix and (suffix or not add_eos):
        return tokenizer
    if tokenizer.end_id is None:
        raise ArgumentError(
            "tokenizer: it has no end token for the BOS/EOS template. Use a tokenizer with an end token."
        )
    template = prefix or (tokenizer.end_id,), suffix or (tokenizer.end_id,) * add_eos
    special_tokens = [
        {"id": f"t{id}", "ids": [id], "tokens": [tokenizer.token(id)]} for id in {*template[0], *template[1]}
    ]
    template_parts = [*(f"t{id}" for id in template[0]), "$A", *(f"t{id}" for id in template[1])]
    template_processor = processors.TemplateProcessing(template_parts, None, special_tokens)  # pyright: ignore
    backend = Backend.from_str(tokenizer.backend.to_str())
    # Only the first of two templates in a sequence would work.
    existing = None if prefix or suffix else backend.post_processor
    backend.post_processor = (
        template_processor if existing is None else processors.Sequence([existing, template_processor])
    )  # pyright: ignore
    return Tokenizer(backend, tokenizer.special)


def _word_level_tokenizer(vocab: dict[str, int], pre_tokenizer: object, decoder: object | None) -> Tokenizer:
    """Build a tokenizer with one token per unit. `<unknown>` and `<end>` are the last ids."""
    full_vocab = {**vocab, UNKNOWN_TOKEN: len(vocab), END_TOKEN: len(vocab) + 1}
    check_lone_surrogates(full_vocab)
    backend = Backend(models.WordLevel(full_vocab, unk_token=UNKNOWN_TOKEN))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizer  # pyright: ignore
    if decoder is not None:
        backend.decoder = decoder  # pyright: ignore
    backend.add_special_tokens([UNKNOWN_TOKEN, END_TOKEN])
    return Tokenizer(backend, {"unk": len(vocab), "eos": len(vocab) + 1, "bos": len(vocab) + 1})


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers: itself, or the next one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    replacements = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(replacements)) for byte in range(256)]
