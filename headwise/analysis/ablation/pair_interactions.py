"""What heads cost at few bits together, beside what each of them costs alone.

A pair is coupled as far as loss(a, b) − loss(a) − loss(b) + loss is not 0. As in `sensitivity`, weights are rounded in place,
in their balanced basis, and put back bitwise; heads that share keys are one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.eval_targets import ask, askable_units, check_askable
from headwise.analysis.ablation.head_outputs import read_on
from headwise.analysis.ablation.quantized_in_place import (
    WEIGHTS,
    AtBits,
    at_few_bits,
    check_in_place,
    check_parts,
    questions,
)
from headwise.analysis.ablation.sensitivity import TOKENS, usual_basis, walked
from headwise.analysis.recording.batching import make_batches
from headwise.errors import HeadwiseError, close_names
from headwise.heads.balanced_basis import Matrices, in_basis
from headwise.model import AnyModel, quiet
from headwise.progress import Progress
from headwise.spec.weight_bits import GROUP

Set = tuple[str, ...]  # key heads whose weights are at few bits at once


@dataclass(frozen=True, eq=False)
class JointCosts:
    """What sets of heads cost, text by text."""

    sets: tuple[Set, ...]
    sums: np.ndarray  # (sets, texts): what each text loses
    drifts: np.ndarray  # (sets, texts): how far the model has drifted on it
    counts: np.ndarray  # (texts,): tokens it was asked for

    def of(self, *keys: str) -> np.ndarray:
        """What a set of key heads costs each text, (texts,)."""
        return self.sums[self.sets.index(keys)]

    def coupling(self, one: str, other: str) -> np.ndarray:
        """loss(one, other) − loss(one) − loss(other) + loss, summed over each text: (texts,)."""
        return self.of(one, other) - self.of(one) - self.of(other)


@torch.no_grad()
def together(
    model: AnyModel,
    on: Any,
    sets: Sequence[Sequence[str]],
    bits: int,
    *,
    longest: int | None = None,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> JointCosts:
    """What the loss gains when all weights of some key heads, named by addresses, are stored at few bits at once.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> found = together(model, ["To be or not to be"], [("0.1",), ("1.0",), ("0.1", "1.0")], bits=2)
    >>> found.coupling("0.1", "1.0").shape
    (1,)
    """
    check_askable(model, "loss")
    check_parts(WEIGHTS, (bits,))
    layers = [layer for layer in model.attention_layers() if layer.spec.head_ids]
    parts: dict[str, list[AtBits]] = {}  # of each key head
    place: dict[str, int] = {}  # and its layer
    for number, layer in enumerate(layers):
        for one in questions(layer, model.spec.addresses, WEIGHTS, (bits,)):
            parts.setdefault(one.key, []).append(one)
            place[one.key] = number
    wanted = tuple(tuple(some) for some in sets)
    for key in dict.fromkeys(key for some in wanted for key in some):
        if key not in parts:
            raise HeadwiseError(f"there is no key head {key}; {close_names(key, parts)}")
        check_in_place(layers[place[key]])
    if not all(wanted):
        raise HeadwiseError("a set of heads is empty; name at least one key head in each.")
    used = {place[key] for some in wanted for key in some}
    base = {number: in_basis(Matrices.of(layers[number]), layers[number].spec, usual_basis(model)) for number in used}

    @contextmanager
    def at_few(some: Set, batch: int) -> Iterator[None]:
        with ExitStack() as stack:
            for key in some:
                for one in parts[key]:
                    layer = layers[place[key]]
                    stack.enter_context(at_few_bits(layer, one, base[place[key]], GROUP, None))
            yield

    made: dict[Set, list[list[float]]] = {}
    with quiet(model):
        units = list(askable_units(model, read_on(model, on, longest)))
        batches = [ask(model, batch) for batch in make_batches(units, tokens, device=model.device)]
        walk = walked(model, batches)

        every = sorted(set(wanted), key=lambda some: min(place[key] for key in some))  # as the walk goes
        for done, some in enumerate(every, 1):
            walk.come_to(layers[min(place[key] for key in some)])
            made[some] = walk.lost(partial(at_few, some))
            if progress is not None:
                progress("heads at few bits together", done, len(every))
    counts = torch.cat([one.counts for one in batches]).double().numpy()
    both = np.array([made[some] for some in wanted]).reshape(len(wanted), 2, len(counts))
    return JointCosts(wanted, both[:, 0], both[:, 1], counts)
