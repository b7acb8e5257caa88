"""One sentence, now: which word looks at which, in any head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.recording.batching import forward_batch, make_batch, reachable_hook_points, tokenizer_of
from headwise.analysis.recording.input_image import InputImage, image_sample, read_image
from headwise.analysis.recording.recording import HeadCall, ModelRecording, record, select_heads
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text import Tokenizer
from headwise.text.token_alignment import Alignment

Word = str | int
WHITESPACE_SYMBOLS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


class AttentionEdge(NamedTuple):
    """One word looking at another in one head."""

    head: str
    word: str
    attended: str
    weight: float


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """What maps of a text have as rows and columns: its words and what belongs to no word, or its tokens one by one."""

    labels: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # for each part, the places of its tokens
    special: tuple[bool, ...]  # whether it is a token that stands for nothing in the text

    @staticmethod
    def of(alignment: Alignment, words: bool) -> "TokenGroups":
        """The parts of one text, in the order of their first tokens. Words that share a token are one part: `,"`."""
        groups: list[tuple[list[int], list[int]]] = []  # words and tokens of each part
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
        """The labels, with a number where one stands more than once: the#1, the#2."""
        counts: dict[str, int] = {}
        names = []
        for label in self.labels:
            counts[label] = counts.get(label, 0) + 1
            names.append(f"{label}#{counts[label]}" if self.labels.count(label) > 1 else label)
        return tuple(names)

    def find(self, word: Word) -> int:
        """The place of a word: by its number, its text, or its text and which of several it is."""
        if isinstance(word, int):
            if -len(self.labels) <= word < len(self.labels):
                return word % len(self.labels)
            raise HeadwiseError(
                f"there is no word {word}; there are {len(self.labels)}: {', '.join(self.unique_labels)}."
            )
        if word in self.unique_labels:
            return self.unique_labels.index(word)
        matches = [i for i, label in enumerate(self.labels) if label == word]
        matches = matches or [i for i, label in enumerate(self.labels) if label.casefold() == word.casefold()]
        if len(matches) == 1:
            return matches[0]
        if matches:
            options = " or ".join(self.unique_labels[i] for i in matches)
            raise HeadwiseError(f"{word!r} stands there {len(matches)} times; say which: {options}.")
        raise HeadwiseError(f"the word {word!r} is not there; there are {', '.join(self.unique_labels)}.")

    def sum_matrix(self, like: Tensor) -> Tensor:
        """A matrix that adds up the columns of each part: (tokens, parts)."""
        matrix = like.new_zeros(sum(map(len, self.tokens)), len(self.tokens))
        for group, token_ids in enumerate(self.tokens):
            matrix[list(token_ids), group] = 1.0
        return matrix

    def mean_matrix(self, like: Tensor) -> Tensor:
        """A matrix that takes the mean over the rows of each part: (parts, tokens)."""
        matrix = self.sum_matrix(like).mT
        return matrix / matrix.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class AttentionView:
    """A text as every head saw it. Maps are made when asked for; attention to a split word is the sum over its tokens, from
    it the mean. Special tokens are words of their own, so rows sum to 1 (to less where a head has a sink)."""

    text: str
    source: str | None
    _groups: TokenGroups
    _source_groups: TokenGroups | None
    _recording: ModelRecording
    _call_index: int | None = None  # which one, where a layer is called several times in a pass
    image: InputImage | None = None  # what was looked at, where that is no text: its words are patches, `row,column`

    @property
    def words(self) -> tuple[str, ...]:
        """The words, or the tokens, of the text."""
        return self._groups.labels

    @property
    def unique_words(self) -> tuple[str, ...]:
        """The same, each with a number where it stands more than once."""
        return self._groups.unique_labels

    @property
    def source_words(self) -> tuple[str, ...]:
        """The words of the source of an encoder-decoder; none in other models."""
        return () if self._source_groups is None else self._source_groups.labels

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that were looked at."""
        return tuple(map(str, self._recording.addresses))

    def resolve_head_pattern(self, heads: HeadPattern | Sequence[str]) -> tuple[str, ...]:
        """Some of these heads, by pattern."""
        return tuple(map(str, select_heads(heads, self._recording.addresses)))

    def query_key_groups(self, head: str | Address | None = None) -> tuple[TokenGroups, TokenGroups]:
        """What looks and what is looked at in a head: the rows and the columns of its map."""
        stack = self._resolve_head(head).stack
        text, source = self._groups, self._source_groups
        if source is None or stack == "dec":
            return text, text
        return (text, source) if stack == "cross" else (source, source)

    def map(self, head: str | Address | None = None) -> Tensor:
        """Who looks at whom, (words, words): row i says where word i looks."""
        query_groups, key_groups = self.query_key_groups(head)
        weights = self._head_call(self._resolve_head(head)).map()[0].float()  # (T, S)
        return query_groups.mean_matrix(weights) @ (weights @ key_groups.sum_matrix(weights))

    def image_map(self, head: str | Address | None = None, at: Word | tuple[int, int] | None = None) -> Tensor:
        """A head's attention over the picture, (rows, columns): from a patch, (2, 3) or "2,3", from "[CLS]", or the mean
        from all patches. What is on tokens that are no patches is left out."""
        if self.image is None:
            raise HeadwiseError("what was looked at is a text; view.map(head) is its map.")
        grid, address = self.image.grid, self._resolve_head(head)
        rows = grid.token_of_patch if at is None else (grid.token_index(at),)
        weights = self._head_call(address).map(rows=rows)[0].float().mean(0)  # (S,)
        return weights[list(grid.token_of_patch)].unflatten(0, (grid.rows, grid.columns))

    def attention_from_word(self, word: Word, head: str | Address | None = None) -> list[tuple[str, float]]:
        """Where one word looks: (word, weight), the strongest first. A word is its text, "the#2", or its place."""
        query_groups, key_groups = self.query_key_groups(head)
        weights = self._row(query_groups.find(word), self._resolve_head(head)).tolist()
        return sorted(zip(key_groups.unique_labels, weights, strict=True), key=lambda pair: -pair[1])

    def top_heads_for_pair(self, word: Word, attended: Word, k: int = 10) -> list[tuple[str, float]]:
        """The heads in which one word looks hardest at another: (head, weight)."""
        scores, last_error = [], None
        for address in self._recording.addresses:
            query_groups, key_groups = self.query_key_groups(address)
            try:
                row, column = query_groups.find(word), key_groups.find(attended)
            except HeadwiseError as error:  # in an encoder-decoder a word may be in one of the texts alone
                last_error = error
                continue
            scores.append((str(address), self._row(row, address)[column].item()))
        if not scores and last_error is not None:
            raise last_error
        return sorted(scores, key=lambda pair: -pair[1])[:k]

    def top_edges(self, k: int = 10, word: Word | None = None) -> list[AttentionEdge]:
        """The hardest looks of all heads, or of one word: at other words, not at the first one or at special tokens, where
        heads rest."""
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
        """Everything, as plain data."""
        source = {} if self.source is None else {"source": self.source, "source_words": list(self.source_words)}
        maps = {head: self.map(head).tolist() for head in self.heads}
        return {"text": self.text, "words": list(self.words), **source, "maps": maps}

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import attention_html

        return attention_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_mime_bundle

        return widget_mime_bundle(self)

    def _head_call(self, head: Address) -> HeadCall:
        """The call of a head that was asked for, or the only one."""
        recorded = self._recording[head]
        if self._call_index is None and len(recorded.calls) > 1:
            raise HeadwiseError(
                f"{head} is called {len(recorded.calls)} times in one pass of this model; say which: "
                f"attention_maps(…, call_index=0), "
                f"call_index=-1 for the last."
            )
        return recorded.only_call if self._call_index is None else recorded.call(self._call_index)

    def _row(self, group: int, head: Address) -> Tensor:
        """Where one part looks, (words,): no other row of the map is made."""
        query_groups, key_groups = self.query_key_groups(head)
        weights = self._head_call(head).map(rows=query_groups.tokens[group])[0].float()  # (its tokens, S)
        return weights.mean(0) @ key_groups.sum_matrix(weights)

    def _idle_mask(self, head: Address, rows: Sequence[int]) -> Tensor:
        """Looks that say little: at the first word, at special tokens, at oneself. (rows, words)"""
        query_groups, key_groups = self.query_key_groups(head)
        idle = torch.tensor([index == 0 or special for index, special in enumerate(key_groups.special)])
        self_edges = torch.tensor(rows)[:, None] == torch.arange(len(key_groups.labels))
        device = self._head_call(head).q.device
        return (idle | self_edges if query_groups is key_groups else idle.expand_as(self_edges)).to(device)

    def _resolve_head(self, head: str | Address | None) -> Address:
        if head is None:
            if len(self._recording) > 1:
                raise HeadwiseError(f"there are {len(self._recording)} heads; say which, e.g. head={self.heads[0]!r}.")
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
    """Run a model once on a text and keep where its heads looked; words=False keeps tokens apart.

    An encoder-decoder reads `source` and writes `text`; its maps have the words of one or both. Where a layer is called
    several times in a pass, as ALBERT's one layer is, `call_index` says which is meant, from 0.

    A model that reads pixels looks at a picture: a path, a Pillow image, or a tensor (C, height, width) that is ready for it.
    Its words are patches, `row,column`; `image_map` gives a head's attention over the picture.

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
        raise HeadwiseError(
            f"{name} must be a string, got {type(text).__name__}; attention_maps looks at one text at a time."
        )
    aligned = tokenizer.align(text)
    if not aligned.ids or not text.strip():  # special tokens alone look at nothing worth seeing
        raise HeadwiseError(f"{name} is empty; give at least one word.")
    return aligned


def _words_text(alignment: Alignment, word_ids: Sequence[int]) -> str:
    """Words as they stand in the text."""
    return alignment.text[alignment.word_spans[min(word_ids)][0] : alignment.word_spans[max(word_ids)][1]]


def _token_label(alignment: Alignment, token: int) -> str:
    """A token as a person reads it: its characters, or its name if it stands for none."""
    start, end = alignment.spans[token]
    text = alignment.text[start:end]
    if not text:
        return alignment.tokens[token]
    return text.translate(WHITESPACE_SYMBOLS) if text.isspace() else text
