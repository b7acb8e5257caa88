"""A reading: a corpus as a model reads it, tokenised once and passed on from one question to the next."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from headwise.analysis.recording.batching import TextSample, tokenizer_of
from headwise.analysis.recording.text_hash_split import bucket_of_text
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus, TextChunk, TextPair
from headwise.text.synthetic import VOCABULARY
from headwise.text.token_alignment import Alignment
from headwise.text.tokenizer import trim_leading_space

DEFAULT_DOCUMENTS = 500  # of the synthetic language, where no text is given
DEFAULT_MAX_LENGTH = 512  # tokens of a unit of plain text, where nobody says it
MAX_CACHED_TOKENS = 1 << 16  # tokens that are kept; a larger corpus is read again from where it lies
# characters tokenised at once; those compared where a text is parted; how often
CHUNK_CHARS, CONTEXT_CHARS, MAX_TRIES = 1 << 15, 64, 8
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ChunkingConfig:
    """How a model cuts texts into units: what else a reading depends on beside the corpus and the tokenizer."""

    max_length: int  # tokens of a unit of plain text
    context_length: int  # tokens the model can read at once
    decoder_start_token: int | None  # what a decoder that is given pairs starts from

    @staticmethod
    def of(model: ModelProtocol, max_length: int | None, default_length: int, paired: bool) -> "ChunkingConfig":
        """For a model: `max_length` as it is asked for, or the default."""
        prefix, suffix = tokenizer_of(model).template_ids
        context_length = (
            model.spec.context if model.spec.positions == "learned" else max(model.spec.context, max_length or 0)
        )
        if max_length is not None and max_length > context_length:
            raise HeadwiseError(
                f"{max_length} tokens are more than the {context_length} positions of the model; choose a smaller length."
            )
        max_length = min(default_length if max_length is None else max_length, context_length)
        if max_length <= len(prefix) + len(suffix):
            raise HeadwiseError(f"a length of {max_length} tokens leaves no room for text; choose a longer one.")
        return ChunkingConfig(max_length, context_length, model.decoder_start_token if paired else None)


class TokenizedCorpus:
    """The units of a corpus, one after the other, as often as asked. Taken wherever a corpus is.

    What is small is kept, so it is tokenised once, whoever asks. A large corpus streams: each pass reads it from where it
    lies, and only what is under way is held.

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
        self._counts: tuple[int, int, str] | None = None  # known when all was read: texts, tokens, digest

    @staticmethod
    def of(
        model: ModelProtocol,
        corpus: Any = None,
        max_length: int | None = None,
        *,
        needs_targets: bool = False,
        default_length: int = DEFAULT_MAX_LENGTH,
    ) -> "TokenizedCorpus":
        """A text, a list of texts, a path or a Corpus, as this model reads it; None: `default_corpus`. A reading for the
        same tokenizer stays as it is; where units shall be shorter they are cut, and not tokenised anew.

        Plain text is cut into units of at most `max_length` tokens (None: `default_length`, or the model's context);
        documents and pairs stay whole. With `needs_targets` a model is judged by the text it should give: then an
        encoder-decoder reads pairs, and only those.
        """
        if isinstance(corpus, TokenizedCorpus):
            corpus._check(model, needs_targets)
            return corpus if max_length is None else corpus.rechunk(max_length)
        tokenizer, corpus = tokenizer_of(model), default_corpus(model) if corpus is None else Corpus.of(corpus)
        _check_kind(model, corpus, needs_targets)
        chunking = ChunkingConfig.of(model, max_length, default_length, corpus.paired)
        return TokenizedCorpus(corpus, tokenizer, chunking, partial(_tokenize_corpus, corpus, tokenizer, chunking))

    def __iter__(self) -> Iterator[TextSample]:
        if self._cached is not None:
            yield from map(replace, self._cached)  # copies: what is worked out about one goes with it
            return
        if self._lookahead is not None:
            lookahead, self._lookahead = self._lookahead, None
            yield from lookahead
            return
        cached: list[TextSample] | None = [] if self._counts is None else None  # what was too much once is so again
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
            raise HeadwiseError("there is no text to look at; the corpus is empty.")
        digest.update(b"]")
        self._counts, self._cached = (num_samples, num_tokens, digest.hexdigest()), cached

    @property
    def num_samples(self) -> int:
        """How many units there are. Like `num_tokens` and `fingerprint` it is counted while the corpus is first read."""
        return self._count_all()[0]

    @property
    def num_tokens(self) -> int:
        """How many tokens they have, sources of pairs not counted."""
        return self._count_all()[1]

    @property
    def fingerprint(self) -> str:
        """A digest of all ids: whether two readings are of the same units."""
        return self._count_all()[2]

    def count_if_small(self) -> int | None:
        """How many units there are, if they are few enough to be kept: those are read now. None: only a whole pass tells."""
        if self._counts is None and self._lookahead is None:
            samples, buffered, held_tokens = iter(self), [], 0
            for sample in samples:
                buffered.append(sample)
                held_tokens += _token_count(sample)
                if held_tokens > MAX_CACHED_TOKENS:
                    self._lookahead = chain(buffered, samples)  # the next pass begins with these
                    break
        return None if self._counts is None else self._counts[0]

    def relation_documents(self) -> Iterator[Document]:
        """The documents with relations among the texts; they are not tokenised for it."""
        if self._cached is not None:
            return (sample.document for sample in self._cached if sample.document is not None)
        return (item for item in self.corpus.items() if isinstance(item, Document))

    def first(self, max_samples: int) -> "TokenizedCorpus":
        """The first so many units, or all if there are not more; they are kept."""
        if max_samples < 1:
            raise HeadwiseError(f"at least one text must be read; got a limit of {max_samples}.")
        return self.subset(list(islice(self, max_samples)))

    def halves(self) -> "tuple[TokenizedCorpus, TokenizedCorpus]":
        """Some texts to choose heads on, some to judge the choice by: dealt in turn, in the order of a hash of them.

        What was chosen on a text looks better on it than it is; so nobody is judged by the texts of the choice. The order
        they stand in decides nothing: in a file of pairs every other line may be of one kind. A text that comes twice stays
        together.
        """
        samples = list(self)
        keys = [
            hashlib.sha256(repr(TextPair(s.source_text, s.text) if s.source else s.text).encode()).digest()
            for s in samples
        ]
        ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
        if len(ranks) < 2:
            raise HeadwiseError("a single text cannot both choose heads and judge the choice; give more text.")
        split = [
            [sample for sample, key in zip(samples, keys, strict=True) if ranks[key] % 2 == half] for half in (0, 1)
        ]
        return self.subset(split[0]), self.subset(split[1])

    def subset(self, samples: Sequence[TextSample]) -> "TokenizedCorpus":
        """A reading of some of these units alone, counted from 0 on; nothing is tokenised."""
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
        tokenized._cached = numbered  # whatever their size: they are here
        return tokenized

    def rechunk(self, max_length: int) -> "TokenizedCorpus":
        """The same with units of plain text of at most so many tokens."""
        if max_length == self.chunking.max_length:
            return self
        if max_length > self.chunking.max_length:
            raise HeadwiseError(
                f"this reading has units of at most {self.chunking.max_length} tokens, so none of {max_length} can be "
                f"made of it; "
                f"give the corpus itself."
            )
        template_length = len(self.tokenizer.template_ids[0]) + len(self.tokenizer.template_ids[1])
        if max_length <= template_length:
            raise HeadwiseError(f"a length of {max_length} tokens leaves no room for text; choose a longer one.")
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

    def _check(self, model: ModelProtocol, needs_targets: bool) -> None:
        """Whether a model can be given these units."""
        own_tokenizer, model_tokenizer = self.tokenizer, tokenizer_of(model)
        if own_tokenizer is not model_tokenizer and own_tokenizer.backend.to_str() != model_tokenizer.backend.to_str():
            raise HeadwiseError(
                f"this reading of {self.corpus.name} was made with another tokenizer than this model's; make one for it, "
                f"TokenizedCorpus.of(model, corpus), or give the corpus itself."
            )
        _check_kind(model, self.corpus, needs_targets)
        context_length = model.spec.context if model.spec.positions == "learned" else None
        if self.corpus.paired and self.chunking.decoder_start_token != model.decoder_start_token:
            raise HeadwiseError(
                "this reading is of pairs for a decoder that starts from another token; make one for it."
            )
        if (
            context_length is not None
            and self.chunking.context_length > context_length
            and max(sample.num_batch_tokens for sample in self) > context_length
        ):
            raise HeadwiseError(
                f"this reading has units of more than the {context_length} positions of the model; make one for it."
            )


def default_corpus(model: ModelProtocol) -> Corpus:
    """What a model reads where nothing is given: the synthetic language, if it knows its words, or the probe set; of these
    the documents that fit into its context, or, where none does, their texts, to be cut."""
    vocab = set(tokenizer_of(model).backend.get_vocab())
    corpus = (
        Corpus.synthetic("held-out", documents=DEFAULT_DOCUMENTS, seed=1)
        if vocab >= set(VOCABULARY)
        else Corpus.probe_set()
    )
    return documents_within_context(model, corpus)


def documents_within_context(model: ModelProtocol, corpus: Corpus, max_documents: int | None = None) -> Corpus:
    """The documents of a corpus that fit into a model's context, or so many of them; where none does, texts that are cut."""
    documents = [item for item in corpus.items() if isinstance(item, Document)]
    fitting_documents = [
        document for document in documents if 0 < len(tokenizer_of(model).encode(document.text)) <= model.spec.context
    ]
    if max_documents is None:
        if len(fitting_documents) == len(documents):
            return replace(corpus, _iterate=lambda: iter(fitting_documents))  # as it is, and not made a second time
        return Corpus.of(fitting_documents or [document.text for document in documents])
    return Corpus.of(
        fitting_documents[:: max(1, len(fitting_documents) // max_documents)][:max_documents]
        or [document.text for document in documents[:max_documents]]
    )


def _token_count(sample: TextSample) -> int:
    return len(sample.ids) + len(sample.source)


def _check_kind(model: ModelProtocol, corpus: Corpus, needs_targets: bool) -> None:
    if needs_targets or (corpus.paired and model.spec.kind != "encoder-decoder"):
        corpus.check_model_kind(model.spec.kind)
    elif corpus.paired:
        raise HeadwiseError("pairs are for what is asked of an encoder-decoder; give texts: each is source and target.")


def _tokenize_corpus(corpus: Corpus, tokenizer: Tokenizer, chunking: ChunkingConfig) -> Iterator[TextSample]:
    """Every text of a corpus, tokenised as it comes."""
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
            raise HeadwiseError(
                f"{label} has {sample.num_batch_tokens} tokens, more than the "
                f"{chunking.context_length} positions of the model: "
                f"{item.text[:60]!r}…; leave it out or cut it."
            )
        yield sample
        index += 1


def _chunk_text(index: int, text: str, tokenizer: Tokenizer, max_length: int) -> Iterator[TextSample]:
    """A text in units, tokenised part by part: what is not full at the end of a part goes on in the next."""
    prefix, suffix = tokenizer.template_ids
    step = max_length - len(prefix) - len(suffix)
    tokens: list[int] = []
    offsets: list[Span] = []
    for first, last in _text_spans(text, tokenizer):
        encoding = tokenizer.encoding(text[first:last], add_special_tokens=False)
        tokens += encoding.ids
        offsets += ((start + first, end + first) for start, end in encoding.offsets)
        complete = len(tokens) if last == len(text) else len(tokens) - len(tokens) % step
        for start in range(0, complete, step):
            spans = [(0, 0)] * len(prefix) + offsets[start : start + step] + [(0, 0)] * len(suffix)
            yield _plain_text_sample(index, text, (*prefix, *tokens[start : start + step], *suffix), spans, tokenizer)
            index += 1
        del tokens[:complete], offsets[:complete]


def _text_spans(text: str, tokenizer: Tokenizer) -> Iterator[Span]:
    """Where a long text can be parted so that the tokens are those of the whole: a tokenizer takes a hundred times the room
    of what it reads at once."""
    start = 0
    while len(text) - start > CHUNK_CHARS:
        split_at = _find_split(text, start + CHUNK_CHARS, start + CHUNK_CHARS // 2, tokenizer)
        if split_at is None:
            break
        yield start, split_at
        start = split_at
    yield start, len(text)


def _find_split(text: str, position: int, min_position: int, tokenizer: Tokenizer) -> int | None:
    """A place between two words, at which what stands around it has the same tokens parted and whole; None: there is none
    nearby, for this tokenizer puts something before whatever it reads."""
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
    """A unit of plain text. It holds the part of the text it covers, and nothing of what is around."""
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
    """The units of a reading, those of plain text cut further."""
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
    """The tokens and words of a unit."""
    tokens = [tokenizer.token(i) for i in ids]
    return Alignment.of(text, ids, tokens, [trim_leading_space(text, (a, b)) for a, b in spans.tolist()], words)
