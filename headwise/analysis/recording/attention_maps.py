"""Attention maps of one text or image, by word, token or patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.recording.batching import forward_batch, make_batch, reachable_hook_points, tokenizer_of
from headwise.analysis.recording.read_images import InputImage, image_sample, read_image
from headwise.analysis.recording.recording import HeadCall, ModelRecording, record, select_heads
from headwise.errors import ArgumentError, HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text import Tokenizer
from headwise.text.token_alignment import Alignment

Word = str | int
WHITESPACE_SYMBOLS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


class AttentionEdge(NamedTuple):
    """Attention from one word to another in one head.

    Attributes:
        head: Address of the head.
        word: Query word.
        attended: Key word.
        weight: Attention weight.
    """

    head: str
    word: str
    attended: str
    weight: float


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Rows and columns of an attention map: groups of tokens that form a word, or single tokens.

    Attributes:
        labels: Text of each group.
        tokens: Token positions of each group.
        special: Whether the group is a special token, which covers no text.
    """

    labels: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    special: tuple[bool, ...]

    @staticmethod
    def of(alignment: Alignment, words: bool) -> "TokenGroups":
        """Group the tokens of a text by word, in the order of their first tokens. Words that share a token, such as `,"`,
        form one group. With `words=False` each token is a group."""
        groups: list[tuple[list[int], list[int]]] = []  # words and tokens of each group
        for token, token_words in enumerate(alignment.words_of_token):
            if words and token_words and groups and token_words[0] in groups[-1][0]:
                groups[-1][0].extend(token_words)
                groups[-1][1].append(token)
            else:
                groups.append(([*token_words] if words else [], [token]))
        labels = [
            _words_text(alignment, word_ids) if word_ids else _token_label(alignment, token_ids[0])
            for word_ids, token_ids in groups
        ]
        special = [alignment.spans[token_ids[0]][0] == alignment.spans[token_ids[0]][1] for _, token_ids in groups]
        return TokenGroups(tuple(labels), tuple(tuple(token_ids) for _, token_ids in groups), tuple(special))

    @cached_property
    def unique_labels(self) -> tuple[str, ...]:
        """The labels. Repeated labels have a number: the#1, the#2."""
        counts: dict[str, int] = {}
        names = []
        for label in self.labels:
            counts[label] = counts.get(label, 0) + 1
            names.append(f"{label}#{counts[label]}" if self.labels.count(label) > 1 else label)
        return tuple(names)

    def find(self, word: Word) -> int:
        """Return the index of a word, given as an index, as text, or as numbered text such as `the#2`."""
        if isinstance(word, int):
            if -len(self.labels) <= word < len(self.labels):
                return word % len(self.labels)
            raise ArgumentError(
                f"word={word}: the text has {len(self.labels)} words: {', '.join(self.unique_labels)}. Use an index from 0 "
                f"to {len(self.labels) - 1}, or the word itself."
            )
        if word in self.unique_labels:
            return self.unique_labels.index(word)
        matches = [i for i, label in enumerate(self.labels) if label == word]
        matches = matches or [i for i, label in enumerate(self.labels) if label.casefold() == word.casefold()]
        if len(matches) == 1:
            return matches[0]
        if matches:
            options = " or ".join(self.unique_labels[i] for i in matches)
            raise ArgumentError(f"word={word!r}: it occurs {len(matches)} times in the text. Use {options}.")
        raise ArgumentError(f"word={word!r}: not in the text. The words are {', '.join(self.unique_labels)}.")

    def sum_matrix(self, like: Tensor) -> Tensor:
        """Return the matrix that sums the columns of each group, (tokens, groups)."""
        matrix = like.new_zeros(sum(map(len, self.tokens)), len(self.tokens))
        for group, token_ids in enumerate(self.tokens):
            matrix[list(token_ids), group] = 1.0
        return matrix

    def mean_matrix(self, like: Tensor) -> Tensor:
        """Return the matrix that averages the rows of each group, (groups, tokens)."""
        matrix = self.sum_matrix(like).mT
        return matrix / matrix.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class AttentionView:
    """Attention maps of one text or image.

    Maps are computed on demand. The weight on a word of several tokens is the sum over its tokens, the weight from it the
    mean. Special tokens count as words, so rows sum to 1, or to less if a head has an attention sink.

    Attributes:
        text: The text, or the name of the image.
        source: Source text of an encoder-decoder, otherwise None.
        image: The image, or None for a text. Its words are patches named `row,column`.
    """

    text: str
    source: str | None
    _groups: TokenGroups
    _source_groups: TokenGroups | None
    _recording: ModelRecording
    _call_index: int | None = None  # call to show if a layer is called several times in one forward pass
    image: InputImage | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Words (or tokens, or patches) of the text."""
        return self._groups.labels

    @property
    def unique_words(self) -> tuple[str, ...]:
        """Words of the text. Repeated words have a number: the#1, the#2."""
        return self._groups.unique_labels

    @property
    def source_words(self) -> tuple[str, ...]:
        """Words of the source text of an encoder-decoder. Empty for other models."""
        return () if self._source_groups is None else self._source_groups.labels

    @property
    def heads(self) -> tuple[str, ...]:
        """Addresses of the heads in this view."""
        return tuple(map(str, self._recording.addresses))

    def resolve_head_pattern(self, heads: HeadPattern | Sequence[str]) -> tuple[str, ...]:
        """Return the addresses in this view that match a pattern."""
        return tuple(map(str, select_heads(heads, self._recording.addresses)))

    def query_key_groups(self, head: str | Address | None = None) -> tuple[TokenGroups, TokenGroups]:
        """Return the token groups of the queries (rows) and of the keys (columns) of a head."""
        stack = self._resolve_head(head).stack
        text, source = self._groups, self._source_groups
        if source is None or stack == "dec":
            return text, text
        return (text, source) if stack == "cross" else (source, source)

    def map(self, head: str | Address | None = None) -> Tensor:
        """Compute the attention map of a head, (words, words). Row i is the attention from word i.

        Args:
            head: Address of the head. It may be omitted if the view has a single head.
        """
        query_groups, key_groups = self.query_key_groups(head)
        weights = self._head_call(self._resolve_head(head)).map()[0].float()  # (T, S)
        return query_groups.mean_matrix(weights) @ (weights @ key_groups.sum_matrix(weights))

    def image_map(self, head: str | Address | None = None, at: Word | tuple[int, int] | None = None) -> Tensor:
        """Compute the attention of a head over the image, (rows, columns). Tokens that are not patches are left out.

        Args:
            head: Address of the head. It may be omitted if the view has a single head.
            at: Query: a patch such as (2, 3) or "2,3", or a token such as "[CLS]". None selects the mean over all patches.
        """
        if self.image is None:
            raise HeadwiseError("image_map: this is the view of a text, not of an image. Use view.map(head).")
        grid, address = self.image.grid, self._resolve_head(head)
        rows = grid.token_of_patch if at is None else (grid.token_index(at),)
        weights = self._head_call(address).map(rows=rows)[0].float().mean(0)  # (S,)
        return weights[list(grid.token_of_patch)].unflatten(0, (grid.rows, grid.columns))

    def attention_from_word(self, word: Word, head: str | Address | None = None) -> list[tuple[str, float]]:
        """Return the attention from one word to all words as (word, weight), largest weight first.

        Args:
            word: The word, a numbered word such as "the#2", or its index.
            head: Address of the head. It may be omitted if the view has a single head.
        """
        query_groups, key_groups = self.query_key_groups(head)
        weights = self._row(query_groups.find(word), self._resolve_head(head)).tolist()
        return sorted(zip(key_groups.unique_labels, weights, strict=True), key=lambda pair: -pair[1])

    def top_heads_for_pair(self, word: Word, attended: Word, k: int = 10) -> list[tuple[str, float]]:
        """Return the heads with the largest weight from one word to another as (head, weight), largest weight first.

        Args:
            word: Query word: its text, a numbered word such as "the#2", or its index.
            attended: Key word, in the same form.
            k: Number of heads.
        """
        scores, last_error = [], None
        for address in self._recording.addresses:
            query_groups, key_groups = self.query_key_groups(address)
            try:
                row, column = query_groups.find(word), key_groups.find(attended)
            except HeadwiseError as error:  # in an encoder-decoder, a word may occur in only one of the two texts
                last_error = error
                continue
            scores.append((str(address), self._row(row, address)[column].item()))
        if not scores and last_error is not None:
            raise last_error
        return sorted(scores, key=lambda pair: -pair[1])[:k]

    def top_edges(self, k: int = 10, word: Word | None = None) -> list[AttentionEdge]:
        """Return the largest attention weights between different words over all heads, largest first.

        Attention to the first word and to special tokens is left out, because heads use them as attention sinks.

        Args:
            k: Number of edges.
            word: Query word: its text, a numbered word such as "the#2", or its index. None selects all words.
        """
        edges = []
        for address in self._recording.addresses:
            query_groups, key_groups = self.query_key_groups(address)
            row_ids = range(len(query_groups.labels)) if word is None else [query_groups.find(word)]
            weights = self.map(address) if word is None else self._row(row_ids[0], address)[None]
            weights = weights.masked_fill(self._idle_mask(address, row_ids), 0.0)
            best, columns = weights.max(1)
            edges += [
                AttentionEdge(
                    str(address), query_groups.unique_labels[row], key_groups.unique_labels[int(column)], float(weight)
                )
                for row, weight, column in zip(row_ids, best, columns, strict=True)
                if weight > 0
            ]
        return sorted(edges, key=lambda edge: -edge.weight)[:k]

    def to_dict(self) -> dict[str, Any]:
        """Return the text, the words and all maps as JSON-serializable data."""
        source = {} if self.source is None else {"source": self.source, "source_words": list(self.source_words)}
        maps = {head: self.map(head).tolist() for head in self.heads}
        return {"text": self.text, "words": list(self.words), **source, "maps": maps}

    def __repr__(self) -> str:
        from headwise.ui.result_text import largest_weights_table

        return largest_weights_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import attention_html

        return attention_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_mime_bundle

        return widget_mime_bundle(self)

    def _head_call(self, head: Address) -> HeadCall:
        """Return the recorded call of a head."""
        recorded = self._recording[head]
        if self._call_index is None and len(recorded.calls) > 1:
            raise HeadwiseError(
                f"head {head} is called {len(recorded.calls)} times in one forward pass of this model. Select a call: "
                f"attention_maps(…, call_index=0) for the first, call_index=-1 for the last."
            )
        return recorded.only_call if self._call_index is None else recorded.call(self._call_index)

    def _row(self, group: int, head: Address) -> Tensor:
        """Compute one row of the map of a head, (words,)."""
        query_groups, key_groups = self.query_key_groups(head)
        weights = self._head_call(head).map(rows=query_groups.tokens[group])[0].float()  # (its tokens, S)
        return weights.mean(0) @ key_groups.sum_matrix(weights)

    def _idle_mask(self, head: Address, rows: Sequence[int]) -> Tensor:
        """Mask attention to the first word, to special tokens and of a word to itself, (rows, words)."""
        query_groups, key_groups = self.query_key_groups(head)
        idle = torch.tensor([index == 0 or special for index, special in enumerate(key_groups.special)], device="cpu")
        self_edges = torch.tensor(rows, device="cpu")[:, None] == torch.arange(len(key_groups.labels), device="cpu")
        device = self._head_call(head).q.device
        return (idle | self_edges if query_groups is key_groups else idle.expand_as(self_edges)).to(device)

    def _resolve_head(self, head: str | Address | None) -> Address:
        if head is None:
            if len(self._recording) > 1:
                raise ArgumentError(
                    f"head: this view has {len(self._recording)} heads. Select one, for example head={self.heads[0]!r}."
                )
            return self._recording.addresses[0]
        return Address.parse(head) if isinstance(head, str) else head


def attention_maps(
    model: ModelProtocol,
    text: Any,
    heads: HeadPattern = "*",
    *,
    words: bool = True,
    source: str | None = None,
    call_index: int | None = None,
) -> AttentionView:
    """Run a model on one text or image and return its attention maps.

    Args:
        model: A `Transformer` or an attached model.
        text: The text. For a model that reads images: a path, a Pillow image, or a preprocessed tensor (C, height, width).
            The words of an image are its patches, named `row,column`.
        heads: Addresses or a pattern such as `"5.1,3.*"`. The default `"*"` selects all heads.
        words: Whether to merge the tokens of a word. If False, rows and columns are tokens.
        source: Source text of an encoder-decoder; `text` is then the target. Self-attention maps have the words of one
            text, cross-attention maps those of both.
        call_index: Call to show if a layer is called several times in one forward pass, as in ALBERT. The first is 0, the
            last -1.

    Returns:
        An `AttentionView`. `view.map("5.1")` is the map of one head; `view.image_map("5.1")` shows it on the image.

    Raises:
        HeadwiseError: If the text is empty, or if a text alone does not reach one of the heads.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])
    >>> view = attention_maps(model, "The cats sat", "5.1")
    >>> view.words
    ('[CLS]', 'The', 'cats', 'sat', '[SEP]')
    >>> view.map("5.1").shape, round(sum(weight for _, weight in view.attention_from_word("cats")), 4)
    (torch.Size([5, 5]), 1.0)
    """
    if model.image_input is not None:
        return _image_attention_maps(model, read_image(model, text), heads, call_index)
    tokenizer = tokenizer_of(model)
    aligned = _align_text(tokenizer, text, "the text")
    aligned_source = None if source is None else _align_text(tokenizer, source, "the source")
    ids = torch.tensor([aligned.ids], device=model.device)  # (1, T)
    source_ids = None if aligned_source is None else torch.tensor([aligned_source.ids], device=model.device)
    heads = select_heads(
        heads, [address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses]
    )
    with eval_mode(model), torch.no_grad(), record(model, heads, tensors="map") as recording:
        model(ids, source=source_ids, hidden=True)
    source_groups = None if aligned_source is None else TokenGroups.of(aligned_source, words)
    return AttentionView(text, source, TokenGroups.of(aligned, words), source_groups, recording, call_index)


def _image_attention_maps(
    model: ModelProtocol, image: InputImage, heads: HeadPattern, call_index: int | None
) -> AttentionView:
    grid = image.grid
    special = tuple(cell < 0 for cell in grid.patch_of_token)
    groups = TokenGroups(grid.token_names, tuple((token,) for token in range(len(grid))), special)
    with eval_mode(model), torch.no_grad(), record(model, heads, tensors="map") as recording:
        forward_batch(model, make_batch([image_sample(0, image)], device=model.device))
    return AttentionView(image.name, None, groups, None, recording, call_index, image)


def _align_text(tokenizer: Tokenizer, text: str, name: str) -> Alignment:
    if not isinstance(text, str):
        raise ArgumentError(f"{name} must be a string. Got {type(text).__name__}. Call attention_maps once per text.")
    aligned = tokenizer.align(text)
    if not aligned.ids or not text.strip():
        raise ArgumentError(f"{name} is empty. Give at least one word.")
    return aligned


def _words_text(alignment: Alignment, word_ids: Sequence[int]) -> str:
    """Return the words as written in the text."""
    return alignment.text[alignment.word_spans[min(word_ids)][0] : alignment.word_spans[max(word_ids)][1]]


def _token_label(alignment: Alignment, token: int) -> str:
    """Return the characters of a token, or its vocabulary name if it covers no text."""
    start, end = alignment.spans[token]
    text = alignment.text[start:end]
    if not text:
        return alignment.tokens[token]
    return text.translate(WHITESPACE_SYMBOLS) if text.isspace() else text
