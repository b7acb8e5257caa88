"""Encoder-decoders that read pairs, and what they lose the plain way: one pair at a time, unpadded, from all the logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.recording.recording import record
from headwise.model import Transformer
from headwise.spec import Address, ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import character_tokenizer
from tests.contract.layers import MODELS, make_model

# Of very different lengths on both sides: the long source beside the short text, and the other way round.
PAIRS = [
    ("the cat sat", "a mat"),
    ("at", "it was a cat that sat there"),
    ("it was that cat that was there", "it"),
    ("a mat", "the cat"),
    ("the mat", "that was a mat"),
]
BOTH = MODELS["encoder-decoder"]
SPECS: dict[str, ModelSpec] = {
    "plain": BOTH,
    "rotary, windows": replace(MODELS["decoder, rotary"], kind="encoder-decoder", encoder_layers=1, windows=(3, None)),
    "learned, post": replace(BOTH, positions="learned", form="post", encoder_layers=3),
    "cut": BOTH.without("enc.0.1,dec.1.*,cross.0.2,cross.1.0"),
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the cat sat a mat it was that there at".split()]  # noqa: SIM905


def reading(spec: ModelSpec, tokenizer: Tokenizer | None = None, seed: int = 0) -> Transformer:
    """A model of a variant, in double precision; it reads letters, or what the tokenizer given reads."""
    model = make_model(replace(spec, vocab=17, context=64), seed)
    model.tokenizer = tokenizer or character_tokenizer("".join(source + text for source, text in PAIRS))
    return model


def words() -> Tokenizer:
    """Words with [CLS] before and [SEP] behind, as BERT reads them."""
    return Tokenizer.from_wordpiece(PIECES)


def encoded(model: Transformer, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[Tensor, Tensor]]:
    """Each pair by hand: the source with its end (1, S), and the text behind an end token, with its own (1, T)."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    end = tokenizer.special["eos"] if tokenizer.special["eos"] is not None else tokenizer.special["sep"]
    assert end is not None

    def ended(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        return ids if ids[-1] == end else [*ids, end]

    return [(torch.tensor([ended(source)]), torch.tensor([[end, *ended(text)]])) for source, text in pairs]


def surprises(model: Transformer, pairs: list[tuple[str, str]] = PAIRS, **options: object) -> list[Tensor]:
    """−log p of every token of each text, (T − 1,) each."""
    made = []
    for source, text in encoded(model, pairs):
        logits = model(text[:, :-1], source=source, **options)[0]  # (T − 1, V)
        made.append(F.cross_entropy(logits, text[0, 1:], reduction="none"))
    return made


def mean_loss(model: Transformer, pairs: list[tuple[str, str]] = PAIRS) -> float:
    """The mean over all tokens of all texts."""
    with torch.no_grad():
        return float(torch.cat(surprises(model, pairs)).mean())


@torch.no_grad()
def given(model: Transformer, head: Address, whole: bool = False) -> list[Tensor]:
    """z of a head in each pair, (T, e): a text without its last token, which nobody reads to guess, or the whole of it."""
    made = []
    for source, text in encoded(model):
        with record(model, str(head), what="z") as recording:
            model(text if whole else text[:, :-1], source=source)
        made.append(recording[head].z[0])
    return made


def losses_without(model: Transformer, head: Address, instead: list[Tensor] | None = None) -> list[Tensor]:
    """`surprises` with a head's z replaced, in each pair by rows (T, e) of `instead`, or by nothing.

    The head's own share of W_O is emptied for the while, and what stands in for it is added behind the layer.
    """
    layer = next(layer for layer in model.attention_layers() if layer.site.address == head.site)
    W_O: Tensor = model.heads[str(head)].W_O  # pyright: ignore
    made = []
    with torch.no_grad():
        before = W_O.clone()
        for number, pair in enumerate(PAIRS):
            added = before.new_zeros(()) if instead is None else instead[number] @ before  # (T, D)
            W_O.zero_()
            with behind(layer, added):
                made += surprises(model, [pair])
            W_O.copy_(before)
    return made


def worths(
    model: Transformer, instead: Callable[[Address], list[Tensor]] | None = None, last: bool = False
) -> list[float]:
    """What is lost without each head; `instead(head)` are the rows that stand in for it in each pair, none: nothing."""
    made = []
    with torch.no_grad():
        clean = surprises(model)
    for head in model.spec.addresses:
        lost = losses_without(model, head, None if instead is None else instead(head))
        if last:
            made.append(float(torch.stack([a[-1] - b[-1] for a, b in zip(lost, clean, strict=True)]).mean()))
        else:
            made.append(float((torch.cat(lost) - torch.cat(clean)).mean()))
    return made


@contextmanager
def behind(layer: nn.Module, added: Tensor) -> Iterator[None]:
    """While open, this is added to what a layer writes, (T, D) or (D,)."""
    hook = layer.register_forward_hook(partial(_add, added))
    try:
        yield
    finally:
        hook.remove()


def _add(added: Tensor, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output + added
