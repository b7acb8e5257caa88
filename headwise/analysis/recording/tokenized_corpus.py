"""A corpus tokenized for one model. It is tokenized once and can be passed to several analyses."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from headwise.analysis.recording.batching import TextSample, tokenizer_of
from headwise.analysis.recording.text_hash_split import bucket_of_text
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus, TextChunk, TextPair
from headwise.text.synthetic import VOCABULARY
from headwise.text.token_alignment import Alignment
from headwise.text.tokenizer import trim_leading_space

DEFAULT_DOCUMENTS = 500  # documents of the synthetic language that are read if no corpus is given
DEFAULT_MAX_LENGTH = 512  # default maximum length of a plain-text sample, in tokens
MAX_CACHED_TOKENS = 1 << 16  # a corpus with more tokens is not cached; each pass reads it from its files
CHUNK_CHARS = 1 << 15  # characters that are tokenized at once
CONTEXT_CHARS = 64  # characters on each side of a split that must tokenize equally with and without the split
MAX_TRIES = 8  # split positions that are tried
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ChunkingConfig:
    """Settings that determine how texts are split into samples for one model.

    Attributes:
        max_length: Maximum number of tokens of a plain-text sample.
        context_length: Maximum number of tokens of one forward pass.
        decoder_start_token: First token of the decoder input of a text pair, or None for other texts.
    """

    max_length: int
    context_length: int
    decoder_start_token: int | None

    @staticmethod
    def of(model: ModelProtocol, max_length: int | None, default_length: int, paired: bool) -> "ChunkingConfig":
        """Return the settings for a model. `default_length` applies if `max_length` is None."""
        prefix, suffix = tokenizer_of(model).template_ids
        context_length = (
            model.spec.context if model.spec.positions == "learned" else max(model.spec.context, max_length or 0)
        )
        if max_length is not None and max_length > context_length:
            raise ArgumentError(
                f"max_length={max_length}: larger than the context of the model ({context_length} positions). "
                f"Set max_length to at most {context_length}."
            )
        max_length = min(default_length if max_length is None else max_length, context_length)
        if max_length <= len(prefix) + len(suffix):
            raise _too_short_error(max_length, len(prefix) + len(suffix))
        return ChunkingConfig(max_length, context_length, model.decoder_start_token if paired else None)


class TokenizedCorpus:
    """A corpus tokenized for one model. Iterate over it to get its `TextSample` objects.

    Every function with a `corpus` argument accepts it, so that several analyses share one tokenization. A corpus of up to
    65,536 tokens is cached in memory after the first pass. A larger one is read from its source in every pass and is never
    held in memory as a whole.

    Create one with `TokenizedCorpus.of`.

    Attributes:
        corpus: The texts.
        tokenizer: Tokenizer of the model.
        chunking: How texts are split into samples.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> tokenized = TokenizedCorpus.of(model, ["to be", "or not"])
    >>> [sample.text for sample in tokenized], tokenized.num_samples, tokenized.num_tokens
    (['to be', 'or not'], 2, 11)
    >>> TokenizedCorpus.of(model, tokenized) is tokenized
    True
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        chunking: ChunkingConfig,
        make_samples: Callable[[], Iterator[TextSample]],
    ) -> None:
        self.corpus, self.tokenizer, self.chunking = corpus, tokenizer, chunking
        self._make_samples = make_samples
        self._cached: list[TextSample] | None = None
        self._lookahead: Iterator[TextSample] | None = None
        self._counts: tuple[int, int, str] | None = None  # samples, tokens, digest; set after the first full pass

    @staticmethod
    def of(
        model: ModelProtocol,
        corpus: Any = None,
        max_length: int | None = None,
        *,
        needs_targets: bool = False,
        default_length: int = DEFAULT_MAX_LENGTH,
    ) -> "TokenizedCorpus":
        """Tokenize a corpus for a model.

        Plain text is split into samples of at most `max_length` tokens. Annotated documents and text pairs are never
        split.

        Args:
            model: Model whose tokenizer and context length are used.
            corpus: A text, a list of texts, a path, a `Corpus`, or a `TokenizedCorpus` with the same tokenizer, which is
                reused without tokenizing again. None selects the default corpus: the synthetic language if the
                tokenizer knows its words, otherwise the probe set.
            max_length: Maximum number of tokens of a plain-text sample. None selects `default_length`, or the context
                length of the model if that is smaller.
            needs_targets: Whether the model is evaluated on the text that it should produce. If True, an encoder-decoder
                accepts text pairs only.
            default_length: Length used if `max_length` is None.

        Returns:
            The tokenized corpus. Tokenization happens on the first iteration.

        Raises:
            HeadwiseError: If the corpus was tokenized with another tokenizer, if `max_length` does not fit the model, or
                if the model cannot read this kind of corpus.
        """
        if isinstance(corpus, TokenizedCorpus):
            corpus._check(model, needs_targets=needs_targets)
            return corpus if max_length is None else corpus.rechunk(max_length)
        tokenizer, corpus = tokenizer_of(model), default_corpus(model) if corpus is None else Corpus.of(corpus)
        _check_kind(model, corpus, needs_targets=needs_targets)
        chunking = ChunkingConfig.of(model, max_length, default_length, corpus.paired)
        return TokenizedCorpus(corpus, tokenizer, chunking, partial(_tokenize_corpus, corpus, tokenizer, chunking))

    def __iter__(self) -> Iterator[TextSample]:
        if self._cached is not None:
            yield from map(replace, self._cached)  # copies, so that cached properties are freed with each copy
            return
        if self._lookahead is not None:
            lookahead, self._lookahead = self._lookahead, None
            yield from lookahead
            return
        cached: list[TextSample] | None = [] if self._counts is None else None  # counted but not cached: too large
        num_samples, num_tokens, held_tokens, digest = 0, 0, 0, hashlib.sha256()
        for sample in self._make_samples():
            digest.update(f"{', ' if num_samples else '['}{sample.ids!r}".encode())
            num_samples, num_tokens, held_tokens = (
                num_samples + 1,
                num_tokens + len(sample.ids),
                held_tokens + _token_count(sample),
            )
            if cached is not None:
                cached.append(replace(sample))
                cached = cached if held_tokens <= MAX_CACHED_TOKENS else None
            yield sample
        if not num_samples:
            raise ArgumentError(f"corpus: {self.corpus.name} is empty. Give at least one text.")
        digest.update(b"]")
        self._counts, self._cached = (num_samples, num_tokens, digest.hexdigest()), cached

    @property
    def num_samples(self) -> int:
        """Number of samples. The first access to this, `num_tokens` or `fingerprint` reads the full corpus."""
        return self._count_all()[0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens. The source tokens of text pairs are not counted."""
        return self._count_all()[1]

    @property
    def fingerprint(self) -> str:
        """SHA-256 digest of all token ids. It is equal for two corpora with the same samples."""
        return self._count_all()[2]

    def count_if_small(self) -> int | None:
        """Return the number of samples if the corpus is small enough to be cached, otherwise None.

        Reads at most 65,536 tokens, which the next pass reuses.
        """
        if self._counts is None and self._lookahead is None:
            samples, buffered, held_tokens = iter(self), [], 0
            for sample in samples:
                buffered.append(sample)
                held_tokens += _token_count(sample)
                if held_tokens > MAX_CACHED_TOKENS:
                    self._lookahead = chain(buffered, samples)  # the next pass starts with the buffered samples
                    break
        return None if self._counts is None else self._counts[0]

    def relation_documents(self) -> Iterator[Document]:
        """Iterate over the documents with annotated relations. Does not tokenize."""
        if self._cached is not None:
            return (sample.document for sample in self._cached if sample.document is not None)
        return (item for item in self.corpus.items() if isinstance(item, Document))

    def first(self, max_samples: int) -> "TokenizedCorpus":
        """Return the first samples as a cached corpus.

        Args:
            max_samples: Maximum number of samples, at least 1.
        """
        if max_samples < 1:
            raise ArgumentError(f"the maximum number of texts must be at least 1. Got {max_samples}.")
        return self.subset(list(islice(self, max_samples)))

    def halves(self) -> "tuple[TokenizedCorpus, TokenizedCorpus]":
        """Split the texts into two halves: one to select heads on, one to evaluate the selection.

        Heads that were selected on a text score too well on that text, so the evaluation needs other texts. Texts are
        assigned alternately in the order of their hash. The order of the corpus has no effect, and duplicate texts go to
        the same half.

        Returns:
            The half for selection and the half for evaluation.
        """
        samples = list(self)
        keys = [
            hashlib.sha256(repr(TextPair(s.source_text, s.text) if s.source else s.text).encode()).digest()
            for s in samples
        ]
        ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
        if len(ranks) < 2:
            raise ArgumentError(
                "corpus: it has a single text, and heads are selected on one half of the texts and evaluated on the "
                "other half. Give at least two different texts."
            )
        split = [
            [sample for sample, key in zip(samples, keys, strict=True) if ranks[key] % 2 == half] for half in (0, 1)
        ]
        return self.subset(split[0]), self.subset(split[1])

    def subset(self, samples: Sequence[TextSample]) -> "TokenizedCorpus":
        """Return a cached corpus of some of the samples, renumbered from 0. Does not tokenize.

        Args:
            samples: Samples of this corpus.
        """
        numbered = [replace(sample, index=index) for index, sample in enumerate(samples)]
        items = [sample.corpus_item for sample in samples]
        same_kind = len({isinstance(item, Document) for item in items}) == 1
        tokenized = TokenizedCorpus(
            Corpus.of(items if same_kind else [sample.text for sample in samples]),
            self.tokenizer,
            self.chunking,
            lambda: iter(numbered),
        )
        for _ in tokenized:
            pass
        tokenized._cached = numbered  # cached at any size: the samples are in memory already
        return tokenized

    def rechunk(self, max_length: int) -> "TokenizedCorpus":
        """Split plain-text samples further, without tokenizing again.

        Args:
            max_length: Maximum number of tokens of a plain-text sample. At most the current maximum.
        """
        if max_length == self.chunking.max_length:
            return self
        if max_length > self.chunking.max_length:
            raise ArgumentError(
                f"max_length={max_length}: the corpus is already split into samples of at most "
                f"{self.chunking.max_length} tokens, which cannot be joined. Pass the original corpus instead of the "
                f"TokenizedCorpus."
            )
        template_length = len(self.tokenizer.template_ids[0]) + len(self.tokenizer.template_ids[1])
        if max_length <= template_length:
            raise _too_short_error(max_length, template_length)
        return TokenizedCorpus(
            self.corpus,
            self.tokenizer,
            replace(self.chunking, max_length=max_length),
            partial(_rechunk, self, max_length),
        )

    def _count_all(self) -> tuple[int, int, str]:
        if self._counts is None:
            for _ in self:
                pass
        assert self._counts is not None
        return self._counts

    def _check(self, model: ModelProtocol, *, needs_targets: bool) -> None:
        """Raise an error if a model cannot read these samples."""
        own_tokenizer, model_tokenizer = self.tokenizer, tokenizer_of(model)
        if own_tokenizer is not model_tokenizer and own_tokenizer.backend.to_str() != model_tokenizer.backend.to_str():
            raise ArgumentError(
                f"corpus: this TokenizedCorpus of {self.corpus.name} was made with another tokenizer. Create one for this "
                f"model with TokenizedCorpus.of(model, corpus), or pass the original corpus."
            )
        _check_kind(model, self.corpus, needs_targets=needs_targets)
        context_length = model.spec.context if model.spec.positions == "learned" else None
        if self.corpus.paired and self.chunking.decoder_start_token != model.decoder_start_token:
            raise ArgumentError(
                f"corpus: this TokenizedCorpus of text pairs was made for a model with another decoder start token "
                f"({self.chunking.decoder_start_token}, this model has {model.decoder_start_token}). Create one for this "
                f"model with TokenizedCorpus.of(model, corpus), or pass the original corpus."
            )
        if (
            context_length is not None
            and self.chunking.context_length > context_length
            and max(sample.num_batch_tokens for sample in self) > context_length
        ):
            raise ArgumentError(
                f"corpus: this TokenizedCorpus has samples that are longer than the context of the model "
                f"({context_length} positions). Create one for this model with TokenizedCorpus.of(model, corpus), or pass "
                f"the original corpus."
            )


def default_corpus(model: ModelProtocol) -> Corpus:
    """Return the corpus that is read if none is given.

    It is the synthetic language if the tokenizer knows all its words, otherwise the probe set. Documents that do not fit
    into the context are left out. If none fits, the result is plain text, which can be split.
    """
    vocab = set(tokenizer_of(model).backend.get_vocab())
    corpus = (
        Corpus.synthetic("held-out", documents=DEFAULT_DOCUMENTS, seed=1)
        if vocab >= set(VOCABULARY)
        else Corpus.probe_set()
    )
    return documents_within_context(model, corpus)


def documents_within_context(model: ModelProtocol, corpus: Corpus, max_documents: int | None = None) -> Corpus:
    """Return the documents that fit into the context, at most `max_documents`. If none fits, return their plain texts."""
    documents = [item for item in corpus.items() if isinstance(item, Document)]
    fitting_documents = [
        document for document in documents if 0 < len(tokenizer_of(model).encode(document.text)) <= model.spec.context
    ]
    if max_documents is None:
        if len(fitting_documents) == len(documents):
            return replace(corpus, _iterate=lambda: iter(fitting_documents))  # do not generate the documents again
        return Corpus.of(fitting_documents or [document.text for document in documents])
    return Corpus.of(
        fitting_documents[:: max(1, len(fitting_documents) // max_documents)][:max_documents]
        or [document.text for document in documents[:max_documents]]
    )


def _too_short_error(max_length: int, template_length: int) -> ArgumentError:
    return ArgumentError(
        f"max_length={max_length}: too short, because the special tokens around a text take {template_length} tokens. "
        f"Set max_length to at least {template_length + 1}."
    )


def _token_count(sample: TextSample) -> int:
    return len(sample.ids) + len(sample.source)


def _check_kind(model: ModelProtocol, corpus: Corpus, *, needs_targets: bool) -> None:
    if needs_targets or (corpus.paired and model.spec.kind != "encoder-decoder"):
        corpus.check_model_kind(model.spec.kind)
    elif corpus.paired:
        raise ArgumentError(
            f"corpus: this analysis does not support text pairs. Got {corpus.name}. Give plain texts; an encoder-decoder "
            f"reads each text as source and as target."
        )


def _tokenize_corpus(corpus: Corpus, tokenizer: Tokenizer, chunking: ChunkingConfig) -> Iterator[TextSample]:
    """Tokenize the texts of a corpus one by one."""
    index = 0
    for item in corpus.items():
        if isinstance(item, TextChunk):
            for sample in _chunk_text(index, item.text, tokenizer, chunking.max_length):
                yield sample
                index += 1
            continue
        is_pair = isinstance(item, TextPair)
        sample = (
            _pair_sample(index, item, tokenizer, chunking.decoder_start_token or 0)
            if is_pair
            else _document_sample(index, item, tokenizer)
        )
        if sample.num_batch_tokens > chunking.context_length:
            label = f"pair {index + 1}" if is_pair else f"document {index}"
            raise ArgumentError(
                f"corpus: {label} has {sample.num_batch_tokens} tokens, more than the context of the model "
                f"({chunking.context_length} positions). It begins with {item.text[:60]!r}. Remove or shorten it."
            )
        yield sample
        index += 1


def _chunk_text(index: int, text: str, tokenizer: Tokenizer, max_length: int) -> Iterator[TextSample]:
    """Split a text into samples. It is tokenized span by span; an incomplete sample continues in the next span."""
    prefix, suffix = tokenizer.template_ids
    step = max_length - len(prefix) - len(suffix)
    tokens: list[int] = []
    offsets: list[Span] = []
    for first, last in _split_long_text(text, tokenizer):
        encoding = tokenizer.encoding(text[first:last], add_special_tokens=False)
        tokens += encoding.ids
        offsets += ((start + first, end + first) for start, end in encoding.offsets)
        complete = len(tokens) if last == len(text) else len(tokens) - len(tokens) % step
        for start in range(0, complete, step):
            spans = [(0, 0)] * len(prefix) + offsets[start : start + step] + [(0, 0)] * len(suffix)
            yield _plain_text_sample(index, text, (*prefix, *tokens[start : start + step], *suffix), spans, tokenizer)
            index += 1
        del tokens[:complete], offsets[:complete]


def _split_long_text(text: str, tokenizer: Tokenizer) -> Iterator[Span]:
    """Split a long text into spans that tokenize like the full text. A tokenizer needs about 100 times the memory of the
    text it encodes at once, so long texts are encoded in spans."""
    start = 0
    while len(text) - start > CHUNK_CHARS:
        split_at = _find_split(text, start + CHUNK_CHARS, start + CHUNK_CHARS // 2, tokenizer)
        if split_at is None:
            break
        yield start, split_at
        start = split_at
    yield start, len(text)


def _find_split(text: str, position: int, min_position: int, tokenizer: Tokenizer) -> int | None:
    """Find a space at which a split does not change the tokens around it. Return None if there is none nearby, for example
    because the tokenizer adds a prefix to every text."""
    for _ in range(MAX_TRIES):
        position = text.rfind(" ", min_position, position)
        if position < 0:
            return None
        sides = text[max(0, position - CONTEXT_CHARS) : position], text[position : position + CONTEXT_CHARS]
        left, right, full = (tokenizer.encode(part, add_special_tokens=False) for part in (*sides, "".join(sides)))
        if text[position - 1].isalnum() and left + right == full:
            return position
    return None


def _plain_text_sample(
    index: int, text: str, ids: tuple[int, ...], spans: Sequence[Span], tokenizer: Tokenizer
) -> TextSample:
    """Create a plain-text sample. It stores only the part of the text that it covers."""
    covered = [span for span in spans if span[1] > span[0]]
    low, high = (covered[0][0], covered[-1][1]) if covered else (0, 0)
    relative_spans = np.array([(a - low, b - low) if b > a else (0, 0) for a, b in spans], dtype=np.int32).reshape(
        -1, 2
    )
    text = text[low:high]
    return TextSample(
        index, bucket_of_text(text), ids, None, partial(_align, tokenizer, text, ids, relative_spans), text=text
    )


def _document_sample(index: int, document: Document, tokenizer: Tokenizer) -> TextSample:
    encoding = tokenizer.backend.encode(document.text, add_special_tokens=True)
    ids, spans = tuple(encoding.ids), np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    align = partial(_align, tokenizer, document.text, ids, spans, document.words)
    return TextSample(index, bucket_of_text(document.text), ids, document, align, text=document.text)


def _pair_sample(index: int, pair: TextPair, tokenizer: Tokenizer, start_token: int) -> TextSample:
    source, text = (tokenizer.backend.encode(part, add_special_tokens=False) for part in pair)
    sources, ids = tokenizer.wrap_pair(source.ids, text.ids, start_token)
    prefix_length = 1 + len(tokenizer.template_ids[0])
    spans = [(0, 0)] * prefix_length + text.offsets
    spans += [(0, 0)] * (len(ids) - len(spans))
    sample = _plain_text_sample(index, pair.text, tuple(ids), spans, tokenizer)
    return replace(
        sample, bucket=bucket_of_text("\n".join(pair)), source=tuple(sources), text=pair.text, source_text=pair.source
    )


def _rechunk(corpus: TokenizedCorpus, max_length: int) -> Iterator[TextSample]:
    """Iterate over the samples of a corpus, with long plain-text samples split further."""
    prefix_length, suffix_length = (len(part) for part in corpus.tokenizer.template_ids)
    index, step = 0, max_length - prefix_length - suffix_length
    for sample in corpus:
        if sample.document is not None or sample.source or len(sample.ids) <= max_length:
            yield replace(sample, index=index)
            index += 1
            continue
        end, spans = len(sample.ids) - suffix_length, sample.alignment.spans
        for start in range(prefix_length, end, step):
            inner = slice(start, min(start + step, end))
            ids = (*sample.ids[:prefix_length], *sample.ids[inner], *sample.ids[end:])
            token_spans = [(0, 0)] * prefix_length + list(spans[inner]) + [(0, 0)] * suffix_length
            yield _plain_text_sample(index, sample.text, ids, token_spans, corpus.tokenizer)
            index += 1


def _align(
    tokenizer: Tokenizer, text: str, ids: tuple[int, ...], spans: np.ndarray, words: Sequence[str] | None = None
) -> Alignment:
    """Align the tokens and words of a sample."""
    tokens = [tokenizer.token(i) for i in ids]
    return Alignment.of(text, ids, tokens, [trim_leading_space(text, (a, b)) for a, b in spans.tolist()], words)
