"""What a model reads while it is looked at: texts as units, units in batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
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
    """One text as a model reads it: the unit of the statistics. Long texts are cut into several.

    Of a pair `ids` are the text behind the token a decoder starts from, and `source` is what the encoder reads.
    """

    index: int  # where it stands in the corpus
    bucket: int  # where its sums go, by its text
    ids: tuple[int, ...]
    document: Document | None  # None: a piece of plain text
    _align: Callable[[], Alignment]
    source: tuple[int, ...] = ()
    text: str = ""  # what it covers; of a pair what is to be written
    source_text: str = ""  # of a pair
    image: Any = None  # the picture, where tokens are patches (image.py)

    @property
    def num_batch_tokens(self) -> int:
        """Tokens that it takes in a batch."""
        return max(len(self.ids), len(self.source))

    @property
    def corpus_item(self) -> "Document | TextPair | str":
        """What a corpus would hold to give this unit again."""
        return self.document or (TextPair(self.source_text, self.text) if self.source else self.text)

    @cached_property
    def alignment(self) -> Alignment:
        """Its tokens and words."""
        return self._align()

    @cached_property
    def token_texts(self) -> tuple[str, ...]:
        """Its tokens as a person would write them."""
        aligned = self.alignment
        spans = zip(aligned.spans, aligned.tokens, strict=True)
        return tuple(aligned.text[start:end].strip() or token for (start, end), token in spans)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Some units side by side, padded."""

    samples: tuple[TextSample, ...]
    ids: Tensor  # (B, T)
    real_tokens: Tensor  # (B, T): True at tokens, False at padding
    source: Tensor | None = None  # (B, S), of pairs
    source_real_tokens: Tensor | None = None  # (B, S)
    pixels: Tensor | None = None  # (B, C, height, width), of pictures

    @cached_property
    def first_token_positions(self) -> Tensor:
        """Where each row's first token stands, (B,)."""
        return self.real_tokens.long().argmax(1)

    @property
    def is_unpadded(self) -> bool:
        """Whether there is no padding at all."""
        return bool(self.real_tokens.all())

    @property
    def source_attention_mask(self) -> Tensor | None:
        """Which tokens of the sources are real, where there is padding among them."""
        return (
            None if self.source_real_tokens is None or bool(self.source_real_tokens.all()) else self.source_real_tokens
        )


def make_batches(
    samples: Iterable[TextSample], batch_tokens: int = 4096, side: str = "right", device: torch.device | str = "cpu"
) -> Iterator[TokenBatch]:
    """Units in their order, as many as fit into so many tokens; sorted within a handful, so that little is padding."""
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
    """Units of any lengths, padded on one side; sources on the right."""
    ids, real_tokens = _pad_ids([sample.ids for sample in samples], side)
    batch = TokenBatch(tuple(samples), ids.to(device), real_tokens.to(device))
    if samples[0].image is not None:
        return replace(batch, pixels=torch.stack([sample.image.pixels for sample in samples]).to(device))
    if not samples[0].source:
        return batch
    sources, source_real_tokens = _pad_ids([sample.source for sample in samples])
    return replace(batch, source=sources.to(device), source_real_tokens=source_real_tokens.to(device))


def forward_batch(model: ModelProtocol, batch: TokenBatch, hidden: bool = True) -> Any:
    """One forward pass over a batch; padding is named only where there is some, so that the plain path stays plain. Of
    pictures the model's own output comes back."""
    if batch.pixels is not None:
        untyped_model: Any = model
        return untyped_model(pixel_values=batch.pixels.to(next(iter(model.parameters())).dtype))
    return forward_ids(model, batch.ids, None if batch.is_unpadded else batch.real_tokens, hidden)


def forward_ids(model: ModelProtocol, ids: Tensor, attention_mask: Tensor | None = None, hidden: bool = True) -> Tensor:
    """One forward pass over texts, (B, T); an encoder-decoder reads each as its source and as its target."""
    source_kwargs = (
        {"source": ids, "source_attention_mask": attention_mask} if model.spec.kind == "encoder-decoder" else {}
    )
    return model(ids, attention_mask=attention_mask, hidden=hidden, **source_kwargs)


def tokenizer_of(model: ModelProtocol) -> Tokenizer:
    """The model's tokenizer, or an error that says what to do."""
    if model.image_input is not None:
        raise HeadwiseError(
            "this model reads pictures, not text; hw.attention_maps, hw.profile and hw.record look at them, what is "
            "asked on texts "
            "cannot be asked of it."
        )
    if not isinstance(model.tokenizer, Tokenizer):
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; set model.tokenizer.")
    return model.tokenizer


def reachable_hook_points(model: ModelProtocol, heads: HeadPattern = "*") -> list[HookPoint]:
    """Where attention happens when a model reads texts, or pictures: of several towers those that token ids alone reach.

    Found out by a call of a few tokens; a pattern that names heads of other towers is refused.
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
            raise HeadwiseError(
                f"a text alone does not reach head {unreachable[0]}: its tower reads something else. Heads it "
                f"reaches: {reached}; "
                f"for others call the model inside hw.record, or give hw.importance your own calls; name heads to cut."
            )
    return [hook_point for hook_point in hook_points if hook_point.address in called]


def _pad_ids(rows: Sequence[tuple[int, ...]], side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids of any lengths, padded on one side, and where they are real: (B, T) each."""
    max_length = max(map(len, rows))
    ids = torch.zeros(len(rows), max_length, dtype=torch.long)
    real_tokens = torch.zeros(len(rows), max_length, dtype=torch.bool)
    for i, row in enumerate(rows):
        columns = slice(0, len(row)) if side == "right" else slice(max_length - len(row), max_length)
        ids[i, columns], real_tokens[i, columns] = torch.tensor(row), True
    return ids, real_tokens
