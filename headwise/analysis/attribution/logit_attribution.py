"""Direct logit attribution: how much each head, MLP and the embedding adds to a logit, straight through the last norm.

The stream is a sum, and the logit is linear in it once the final norm's scale is frozen at what it was; so the parts' shares
add up to the logit exactly (https://transformer-circuits.pub/2021/framework). What a part does through later layers is not
in its share.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.kernels.precision import rounding_bound
from headwise.model import AnyModel, Wiring, quiet

TOLERANCE = 1e-5  # relative; of a logit that the model computed in float32 or float64


@dataclass(frozen=True)
class Attribution:
    """What each part adds to a logit, or to the difference of two. `error` is |Σ parts − logit| beside the largest of
    |logit| and the parts: parts can be large and cancel."""

    logit: float
    heads: dict[str, float]
    mlps: dict[str, float]  # by layer
    embedding: float
    biases: float  # of the attention layers' outputs, of norms on their way and at the end, and of the output layer
    tolerance: float = TOLERANCE  # of `error`; larger in half precision

    @property
    def parts(self) -> dict[str, float]:
        """All of them by name, in the order data walks through them but for the biases."""
        mlps = {f"mlp.{layer}": share for layer, share in self.mlps.items()}
        return {"embedding": self.embedding, **self.heads, **mlps, "biases": self.biases}

    @property
    def total(self) -> float:
        """Their sum: the logit, up to rounding."""
        return sum(self.parts.values())

    @property
    def error(self) -> float:
        """How far the sum is off, relatively."""
        return abs(self.total - self.logit) / max(abs(self.logit), *map(abs, self.parts.values()), 1e-30)

    @property
    def complete(self) -> bool:
        """Whether the parts add up."""
        return self.error <= self.tolerance

    def strongest(self, k: int = 10) -> list[tuple[str, float]]:
        """The parts that matter most, for or against."""
        return sorted(self.parts.items(), key=lambda part: -abs(part[1]))[:k]


def logit_attribution(
    model: AnyModel, text: str | Sequence[int] | Tensor, answer: str | int, wrong: str | int | None = None,
    *, position: int = -1,
) -> Attribution:  # fmt: skip
    """Share out the logit of `answer` at a position, or its lead over `wrong`, among heads, MLPs, embedding and biases.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> made = logit_attribution(Transformer(preset("nano")), [72, 105], answer=33, wrong=34)
    >>> made.complete, len(made.heads), len(made.mlps)
    (True, 36, 6)
    """
    _check(model)
    ids = as_ids(model, text)
    T = ids.shape[1]
    if not -T <= position < T:
        raise HeadwiseError(f"there is no position {position}; the text has {T} tokens.")
    right = token_id(model, answer, "answer")
    other = None if wrong is None else token_id(model, wrong, "wrong")
    with quiet(model), torch.no_grad():
        wiring = model.wiring()
        with caught_parts(model, wiring, position) as caught:
            logits = model(ids)[0, position].double()  # (V,)
        direction, biases = _direction(wiring, caught.last, right, other)  # (D,)
        heads: dict[str, float] = {}
        for layer in model.attention_layers():
            way, added = _way(wiring, caught, layer.site.address.layer, direction)  # (D,)
            biases += added + (0.0 if layer.b_O is None else float(layer.b_O.double() @ way))
            for i, address in enumerate(layer.site.addresses):
                z, W_O = caught.z[layer.site][i], layer.site.W_O[i]  # (e,), (e, D)
                heads[str(address)] = float(z.double() @ (W_O.double() @ way))
        mlps = {str(layer): float(made.double() @ direction) for layer, made in caught.mlps.items()}
        embedding = float(caught.embedding.double() @ direction)
    logit = float(logits[right]) - (0.0 if other is None else float(logits[other]))
    return Attribution(logit, heads, mlps, embedding, biases, _tolerance(caught.last.dtype, len(wiring.steps)))


def _tolerance(dtype: torch.dtype, layers: int) -> float:
    """The tolerance of a logit: in every layer attention, its addition and that of the MLP are rounded; then the last norm
    (3) and the logit."""
    return max(TOLERANCE, rounding_bound(dtype, 3 * layers + 4))


class Caught:
    """What passed at one position of the only text, or at all of them: then every tensor has an axis of tokens more."""

    def __init__(self) -> None:
        self.z: dict[Any, Tensor] = {}  # by site: (H, e), or (H, T, e)
        self.mlps: dict[int, Tensor] = {}  # (D,), or (T, D)
        self.wrote: dict[int, Tensor] = {}  # what attention wrote, where a norm stands between it and the stream: (D,)
        self.embedding = self.last = torch.empty(0)  # (D,): as the stream begins, and as it enters the final norm


@contextmanager
def caught_parts(model: AnyModel, wiring: Wiring, position: int | slice) -> Iterator[Caught]:
    """Watch one position from outside, or all; nothing that passes is changed."""
    caught = Caught()

    def hear(seen: Seen) -> None:
        caught.z[seen.site] = seen.z[0, :, position].clone()

    def here(passing: Any) -> Tensor:
        states = passing[0] if isinstance(passing, tuple) else passing
        rows = states.reshape(-1, states.shape[-1])  # (T, D): some models drop the batch axis on the way
        return rows[position].clone()  # (D,)

    def keep_first(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        caught.embedding = here(given or named["hidden_states"])

    def keep_last(module: nn.Module, given: tuple[Tensor]) -> None:
        caught.last = here(given)

    def keep_wrote(module: nn.Module, given: tuple[Tensor], layer: int) -> None:
        caught.wrote[layer] = here(given)

    def keep_mlp(module: nn.Module, given: Any, made: Any, layer: int) -> None:
        caught.mlps[layer] = here(made)

    with ExitStack() as watching:
        for site in model.all_sites():
            watching.enter_context(site.listen(hear))
        for layer, step in wiring.steps.items():
            watching.callback(step.mlp.register_forward_hook(partial(keep_mlp, layer=layer)).remove)
            if step.after is not None:
                norm = step.after.module
                watching.callback(norm.register_forward_pre_hook(partial(keep_wrote, layer=layer)).remove)
        watching.callback(wiring.first.register_forward_pre_hook(keep_first, with_kwargs=True).remove)
        watching.callback(wiring.norm.module.register_forward_pre_hook(keep_last).remove)
        yield caught


@contextmanager
def layer_inputs(layer: Any) -> Iterator[list[Tensor]]:
    """Collect what an attention layer reads, while open."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def _direction(wiring: Wiring, last: Tensor, right: int, other: int | None) -> tuple[Tensor, float]:
    """The direction in the stream that the logit reads at this frozen scale, (D,), and what biases behind it add."""
    words, bias = wiring.vocabulary.weight, getattr(wiring.vocabulary, "bias", None)

    def lead(of: Tensor) -> Tensor:
        return (of[right].double() - (0.0 if other is None else of[other].double())) * wiring.scale

    read = lead(words)  # (D,)
    added = 0.0 if wiring.norm.bias is None else float(wiring.norm.bias.double() @ read)
    added += 0.0 if bias is None else float(lead(bias))
    return wiring.norm.back(read, last), added


def _way(wiring: Wiring, caught: Caught, layer: int, direction: Tensor) -> tuple[Tensor, float]:
    """The same direction as attention in a layer meets it, (D,), and what a norm in between adds of its own."""
    after = wiring.steps[layer].after
    if after is None:
        return direction, 0.0
    added = 0.0 if after.bias is None else float(after.bias.double() @ direction)
    return after.back(direction, caught.wrote[layer]), added


def _check(model: AnyModel) -> None:
    if model.spec.form == "post":
        raise HeadwiseError(
            "in a post-norm model every layer ends in a norm, so the stream is not a sum of what parts wrote and logits "
            "cannot be shared out; silence heads instead: model.heads[…].silenced()."
        )
    if model.spec.kind != "decoder" or model.output is None:
        raise HeadwiseError(
            f"logits are shared out in decoders with an output; this is kind {model.spec.kind}, output {model.spec.output}."
        )


def as_ids(model: AnyModel, text: str | Sequence[int] | Tensor) -> Tensor:
    """A text, a list of ids or a tensor of one row as (1, T)."""
    if isinstance(text, str):
        text = tokenizer_of(model).encode(text)
    ids = torch.as_tensor(text, device=model.device)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise HeadwiseError(f"one text with at least one token is needed; got ids of shape {tuple(ids.shape)}.")
    return ids


def token_id(model: AnyModel, token: str | int, what: str) -> int:
    """One entry of the vocabulary, by its id or by a text that is just one token."""
    if isinstance(token, str):
        tokenizer = tokenizer_of(model)
        ids = tokenizer.encode(token, special=False)
        if len(ids) != 1:
            pieces = " ".join(repr(tokenizer.token(i)) for i in ids) or "nothing"
            raise HeadwiseError(
                f"{what} must be one token, but {token!r} is {pieces}; give one of them or its id (a word that follows "
                f"another often begins with a space)."
            )
        return ids[0]
    if not 0 <= token < model.spec.vocab:
        raise HeadwiseError(f"{what} must be a token id in 0-{model.spec.vocab - 1}, got {token}.")
    return token
