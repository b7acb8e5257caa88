"""Encoder-decoders that read text pairs, and their losses computed directly: one pair at a time, without padding."""

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

# The lengths differ strongly: a long source with a short text, and the other way round.
PAIRS = [
    ("the cat sat", "a mat"),
    ("at", "it was a cat that sat there"),
    ("it was that cat that was there", "it"),
    ("a mat", "the cat"),
    ("the mat", "that was a mat"),
]
ENCODER_DECODER = MODELS["encoder-decoder"]
SPECS: dict[str, ModelSpec] = {
    "plain": ENCODER_DECODER,
    "rotary, windows": replace(MODELS["decoder, rotary"], kind="encoder-decoder", encoder_layers=1, windows=(3, None)),
    "learned, post": replace(ENCODER_DECODER, positions="learned", norm_placement="post", encoder_layers=3),
    "cut": ENCODER_DECODER.without("enc.0.1,dec.1.*,cross.0.2,cross.1.0"),
}
WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the cat sat a mat it was that there at".split()]  # noqa: SIM905


def pair_model(spec: ModelSpec, tokenizer: Tokenizer | None = None, seed: int = 0) -> Transformer:
    """Make a model of a variant in double precision. It reads characters, or the tokens of a given tokenizer."""
    model = make_model(replace(spec, vocab=17, context=64), seed)
    model.tokenizer = tokenizer or character_tokenizer("".join(source + text for source, text in PAIRS))
    return model


def wordpiece_tokenizer() -> Tokenizer:
    """Make a word tokenizer that adds [CLS] and [SEP], as for BERT."""
    return Tokenizer.from_wordpiece(WORDPIECES)


def encode_pairs(model: Transformer, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[Tensor, Tensor]]:
    """Encode each pair by hand: the source with its end token (1, S), and the text between two end tokens (1, T)."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    end = tokenizer.special["eos"] if tokenizer.special["eos"] is not None else tokenizer.special["sep"]
    assert end is not None

    def encode_with_end(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        return ids if ids[-1] == end else [*ids, end]

    return [
        (torch.tensor([encode_with_end(source)]), torch.tensor([[end, *encode_with_end(text)]]))
        for source, text in pairs
    ]


def token_losses(model: Transformer, pairs: list[tuple[str, str]] = PAIRS, **options: object) -> list[Tensor]:
    """Return −log p of every token of each text, (T − 1,) each."""
    losses = []
    for source, text in encode_pairs(model, pairs):
        logits = model(text[:, :-1], source=source, **options)[0]  # (T − 1, V)
        losses.append(F.cross_entropy(logits, text[0, 1:], reduction="none"))
    return losses


def mean_loss(model: Transformer, pairs: list[tuple[str, str]] = PAIRS) -> float:
    """Return the mean loss over all tokens of all texts."""
    with torch.no_grad():
        return float(torch.cat(token_losses(model, pairs)).mean())


@torch.no_grad()
def head_outputs(model: Transformer, head: Address, full_text: bool = False) -> list[Tensor]:
    """Return z of a head in each pair, (T, e), for the full text or without its last token, which is never an input."""
    outputs = []
    for source, text in encode_pairs(model):
        with record(model, str(head), tensors="z") as recording:
            model(text if full_text else text[:, :-1], source=source)
        outputs.append(recording[head].z[0])
    return outputs


def token_losses_without(model: Transformer, head: Address, replacements: list[Tensor] | None = None) -> list[Tensor]:
    """Compute `token_losses` with z of a head replaced by rows (T, e) of `replacements`, or by zero. The share of the head in
    W_O is set to zero temporarily, and the replacement is added to the output of the layer."""
    layer = next(layer for layer in model.attention_layers() if layer.hook_point.address == head.layer_address)
    W_O: Tensor = model.heads[str(head)].W_O  # pyright: ignore
    losses = []
    with torch.no_grad():
        before = W_O.clone()
        for index, pair in enumerate(PAIRS):
            added = before.new_zeros(()) if replacements is None else replacements[index] @ before  # (T, D)
            W_O.zero_()
            with output_offset(layer, added):
                losses += token_losses(model, [pair])
            W_O.copy_(before)
    return losses


def ablation_costs(
    model: Transformer, replacement_of: Callable[[Address], list[Tensor]] | None = None, last_only: bool = False
) -> list[float]:
    """Return the loss increase without each head. `replacement_of(head)` returns the rows that replace it in each pair, or
    None for zero."""
    costs = []
    with torch.no_grad():
        clean = token_losses(model)
    for head in model.spec.head_addresses:
        lost = token_losses_without(model, head, None if replacement_of is None else replacement_of(head))
        if last_only:
            costs.append(float(torch.stack([a[-1] - b[-1] for a, b in zip(lost, clean, strict=True)]).mean()))
        else:
            costs.append(float((torch.cat(lost) - torch.cat(clean)).mean()))
    return costs


@contextmanager
def output_offset(layer: nn.Module, added: Tensor) -> Iterator[None]:
    """Add a tensor (T, D) or (D,) to the output of a layer while the context is active."""
    hook = layer.register_forward_hook(partial(_add_to_output, added))
    try:
        yield
    finally:
        hook.remove()


def _add_to_output(added: Tensor, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output + added
