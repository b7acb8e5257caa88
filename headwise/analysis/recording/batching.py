"""Samples (tokenized texts or images) and padded batches of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.recording.model_calls import reads_calls
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads import HookPoint
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import LayerAddress, select
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.corpus import TextPair
from headwise.text.token_alignment import Alignment


@dataclass(frozen=True, eq=False)
class TextSample:
    """One tokenized text: the sampling unit of all statistics. A long text is split into several samples.

    Attributes:
        index: Number of the sample in the corpus.
        bucket: Bucket to which its sums are added. It is a hash of the text.
        ids: Token ids. For a text pair, the decoder start token and the target text.
        document: Words and relations, or None for plain text.
        source: Encoder input of a text pair, as token ids.
        text: The part of the text that the sample covers. For a text pair, the target text.
        source_text: Source text of a text pair.
        image: The `InputImage` if the tokens are patches.
    """

    index: int
    bucket: int
    ids: tuple[int, ...]
    document: Document | None
    _align: Callable[[], Alignment]
    source: tuple[int, ...] = ()
    text: str = ""
    source_text: str = ""
    image: Any = None

    @property
    def num_batch_tokens(self) -> int:
        """Number of tokens that the sample takes in a batch."""
        return max(len(self.ids), len(self.source))

    @property
    def corpus_item(self) -> "Document | TextPair | str":
        """Corpus item from which this sample can be created again."""
        return self.document or (TextPair(self.source_text, self.text) if self.source else self.text)

    @cached_property
    def alignment(self) -> Alignment:
        """Alignment between the tokens and the words."""
        return self._align()

    @cached_property
    def token_texts(self) -> tuple[str, ...]:
        """Text of each token, without markers such as `##`. A token without text has its vocabulary name."""
        aligned = self.alignment
        spans = zip(aligned.spans, aligned.tokens, strict=True)
        return tuple(aligned.text[start:end].strip() or token for (start, end), token in spans)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A padded batch of samples.

    Attributes:
        samples: The samples, in the order of the batch.
        ids: Token ids, (B, T).
        real_tokens: True at tokens, False at padding, (B, T).
        source: Source ids of text pairs, (B, S).
        source_real_tokens: True at source tokens, False at padding, (B, S).
        pixels: Pixels of images, (B, C, height, width).
    """

    samples: tuple[TextSample, ...]
    ids: Tensor
    real_tokens: Tensor
    source: Tensor | None = None
    source_real_tokens: Tensor | None = None
    pixels: Tensor | None = None

    @cached_property
    def first_token_positions(self) -> Tensor:
        """Column of the first token of each sample, (B,)."""
        return self.real_tokens.long().argmax(1)

    @cached_property
    def first_columns(self) -> list[int]:
        """Column of the first token of each sample, as numbers on the host."""
        return [0] * len(self.samples) if self.is_unpadded else self.first_token_positions.tolist()

    @property
    def is_unpadded(self) -> bool:
        """Whether the batch has no padding. Known from the lengths of the samples, without a copy from the device."""
        return all(len(sample.ids) == self.ids.shape[1] for sample in self.samples)

    @property
    def source_attention_mask(self) -> Tensor | None:
        """Attention mask of the sources, or None if they have no padding."""
        return (
            None if self.source_real_tokens is None or bool(self.source_real_tokens.all()) else self.source_real_tokens
        )


def make_batches(
    samples: Iterable[TextSample], batch_tokens: int = 4096, side: str = "right", device: torch.device | str = "cpu"
) -> Iterator[TokenBatch]:
    """Group samples into batches of at most `batch_tokens` tokens, padding included.

    Samples are sorted by length within a window of eight batches to reduce padding.
    """
    pending: list[TextSample] = []
    pending_tokens = 0

    def flush() -> Iterator[TokenBatch]:
        pending.sort(key=lambda sample: sample.num_batch_tokens)
        group: list[TextSample] = []
        for sample in pending:
            if group and (len(group) + 1) * sample.num_batch_tokens > batch_tokens:
                yield make_batch(group, side, device)
                group = []
            group.append(sample)
        if group:
            yield make_batch(group, side, device)
        pending.clear()

    for sample in samples:
        pending.append(sample)
        pending_tokens += sample.num_batch_tokens
        if pending_tokens > 8 * batch_tokens:
            yield from flush()
            pending_tokens = 0
    yield from flush()


def make_batch(samples: list[TextSample], side: str = "right", device: torch.device | str = "cpu") -> TokenBatch:
    """Pad samples to one length. `side` is the padding side of the texts; sources are padded on the right."""
    ids, real_tokens = _pad_ids([sample.ids for sample in samples], side)
    batch = TokenBatch(tuple(samples), ids.to(device), real_tokens.to(device))
    if samples[0].image is not None:
        return replace(batch, pixels=torch.stack([sample.image.pixels for sample in samples]).to(device))
    if not samples[0].source:
        return batch
    sources, source_real_tokens = _pad_ids([sample.source for sample in samples])
    return replace(batch, source=sources.to(device), source_real_tokens=source_real_tokens.to(device))


def forward_batch(model: ModelProtocol, batch: TokenBatch, *, hidden: bool = True) -> Any:
    """Run one forward pass over a batch. Images return the output of the model itself.

    An attention mask is passed only if the batch has padding.
    """
    if batch.pixels is not None:
        untyped_model: Any = model
        return untyped_model(pixel_values=batch.pixels.to(next(iter(model.parameters())).dtype))
    return forward_ids(model, batch.ids, None if batch.is_unpadded else batch.real_tokens, hidden=hidden)


def forward_ids(
    model: ModelProtocol, ids: Tensor, attention_mask: Tensor | None = None, *, hidden: bool = True
) -> Tensor:
    """Run one forward pass over token ids, (B, T). An encoder-decoder reads them as source and as target."""
    source_kwargs = (
        {"source": ids, "source_attention_mask": attention_mask} if model.spec.kind == "encoder-decoder" else {}
    )
    return model(ids, attention_mask=attention_mask, hidden=hidden, **source_kwargs)


def tokenizer_of(model: ModelProtocol) -> Tokenizer:
    """Return the tokenizer of a model. Raise an error if it is missing or if the model reads images."""
    if model.image_input is not None:
        raise UnsupportedModelError(
            "this model reads images, and this function needs a model that reads text. hw.attention_maps, hw.profile and "
            "hw.record support images. hw.importance supports calls with labels, [{'pixel_values': …, 'labels': …}, …], and "
            "hw.prune takes heads=…, fold_mean=False."
        )
    if not isinstance(model.tokenizer, Tokenizer):
        advice = "Set model.tokenizer."
        if reads_calls(model):
            advice = "Call your module inside hw.record(attached)."
        elif hasattr(model, "is_attached"):
            advice = "Attach it with one: hw.attach(model, tokenizer)."
        raise UnsupportedModelError(f"model: it has no tokenizer, so it cannot read text. {advice}")
    return model.tokenizer


def reachable_hook_points(model: ModelProtocol, heads: HeadPattern = "*") -> list[HookPoint]:
    """Return the hook points that run when the model reads a text or an image.

    A model with several towers is called on a few tokens to find the layers that token ids reach. An error is raised if the
    pattern `heads` selects a head that they do not reach.
    """
    hook_points = model.gathered_hook_points()
    if not model.spec.stacks or model.image_input is not None:
        return hook_points
    called: set[LayerAddress] = set()
    with eval_mode(model), torch.no_grad(), ExitStack() as listeners:
        for hook_point in hook_points:
            listeners.enter_context(hook_point.listen(lambda call: called.add(call.hook_point.address)))
        model(torch.tensor([tokenizer_of(model).encode("one two three")], device=model.device), hidden=True)
    if not (isinstance(heads, str) and heads.strip() == "*"):
        unreachable = [
            address for address in select(heads, model.spec.head_addresses) if address.layer_address not in called
        ]
        if unreachable:
            reached = ", ".join(f"{stack or '*'}.*" for stack in dict.fromkeys(address.stack for address in called))
            raise ArgumentError(
                f"heads: head {unreachable[0]} cannot be measured on texts, because its tower does not read text. Text "
                f"reaches {reached}. To measure the head, call the model inside hw.record, or pass your own calls to "
                f"hw.importance. To prune it without measuring, name it explicitly."
            )
    return [hook_point for hook_point in hook_points if hook_point.address in called]


def _pad_ids(rows: Sequence[tuple[int, ...]], side: str = "right") -> tuple[Tensor, Tensor]:
    """Pad token ids to one length. Return the ids and a mask of the real tokens, (B, T) each."""
    max_length = max(map(len, rows))
    ids = torch.zeros(len(rows), max_length, dtype=torch.long, device="cpu")
    real_tokens = torch.zeros(len(rows), max_length, dtype=torch.bool, device="cpu")
    for i, row in enumerate(rows):
        columns = slice(0, len(row)) if side == "right" else slice(max_length - len(row), max_length)
        ids[i, columns], real_tokens[i, columns] = torch.tensor(row, device="cpu"), True
    return ids, real_tokens
