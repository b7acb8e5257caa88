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
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import rounding_bound
from headwise.model import ModelProtocol, ResidualStream, eval_mode

TOLERANCE = 1e-5  # relative; of a logit that the model computed in float32 or float64


@dataclass(frozen=True)
class LogitAttribution:
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
        mlps = {f"mlp.{layer}": contribution for layer, contribution in self.mlps.items()}
        return {"embedding": self.embedding, **self.heads, **mlps, "biases": self.biases}

    @property
    def total(self) -> float:
        """Their sum: the logit, up to rounding."""
        return sum(self.parts.values())

    @property
    def relative_error(self) -> float:
        """How far the sum is off, relatively."""
        return abs(self.total - self.logit) / max(abs(self.logit), *map(abs, self.parts.values()), 1e-30)

    @property
    def is_complete(self) -> bool:
        """Whether the parts add up."""
        return self.relative_error <= self.tolerance

    def top_parts(self, k: int = 10) -> list[tuple[str, float]]:
        """The parts that matter most, for or against."""
        return sorted(self.parts.items(), key=lambda part: -abs(part[1]))[:k]


def logit_attribution(
    model: ModelProtocol, text: str | Sequence[int] | Tensor, answer: str | int, wrong: str | int | None = None,
    *, position: int = -1,
) -> LogitAttribution:  # fmt: skip
    """Share out the logit of `answer` at a position, or its lead over `wrong`, among heads, MLPs, embedding and biases.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> attribution = logit_attribution(Transformer(preset("nano")), [72, 105], answer=33, wrong=34)
    >>> attribution.is_complete, len(attribution.heads), len(attribution.mlps)
    (True, 36, 6)
    """
    _check_supported(model)
    ids = as_ids(model, text)
    T = ids.shape[1]
    if not -T <= position < T:
        raise HeadwiseError(f"there is no position {position}; the text has {T} tokens.")
    answer_id = token_id(model, answer, "answer")
    wrong_id = None if wrong is None else token_id(model, wrong, "wrong")
    with eval_mode(model), torch.no_grad():
        residual = model.residual_stream()
        with capture_residual(model, residual, position) as capture:
            logits = model(ids)[0, position].double()  # (V,)
        direction, biases = _logit_direction(residual, capture.final_state, answer_id, wrong_id)  # (D,)
        heads: dict[str, float] = {}
        for layer in model.attention_layers():
            # (D,)
            layer_direction, bias_part = _direction_before_post_norm(
                residual, capture, layer.hook_point.address.layer, direction
            )
            biases += bias_part + (0.0 if layer.b_O is None else float(layer.b_O.double() @ layer_direction))
            for i, address in enumerate(layer.hook_point.head_addresses):
                z, W_O = capture.z[layer.hook_point][i], layer.hook_point.W_O[i]  # (e,), (e, D)
                heads[str(address)] = float(z.double() @ (W_O.double() @ layer_direction))
        mlps = {str(layer): float(output.double() @ direction) for layer, output in capture.mlps.items()}
        embedding = float(capture.embedding.double() @ direction)
    logit = float(logits[answer_id]) - (0.0 if wrong_id is None else float(logits[wrong_id]))
    return LogitAttribution(
        logit, heads, mlps, embedding, biases, _tolerance(capture.final_state.dtype, len(residual.layers))
    )


def _tolerance(dtype: torch.dtype, layers: int) -> float:
    """The tolerance of a logit: in every layer attention, its addition and that of the MLP are rounded; then the last norm
    (3) and the logit."""
    return max(TOLERANCE, rounding_bound(dtype, 3 * layers + 4))


class CapturedComponents:
    """What passed at one position of the only text, or at all of them: then every tensor has an axis of tokens more."""

    def __init__(self) -> None:
        self.z: dict[Any, Tensor] = {}  # by site: (H, e), or (H, T, e)
        self.mlps: dict[int, Tensor] = {}  # (D,), or (T, D)
        # what attention wrote, where a norm stands between it and the stream: (D,)
        self.attention_outputs: dict[int, Tensor] = {}
        # (D,): as the stream begins, and as it enters the final norm
        self.embedding = self.final_state = torch.empty(0)


@contextmanager
def capture_residual(
    model: ModelProtocol, residual: ResidualStream, position: int | slice
) -> Iterator[CapturedComponents]:
    """Watch one position from outside, or all; nothing that passes is changed."""
    capture = CapturedComponents()

    def on_call(call: AttentionCall) -> None:
        capture.z[call.hook_point] = call.z[0, :, position].clone()

    def at_position(value: Any) -> Tensor:
        states = value[0] if isinstance(value, tuple) else value
        rows = states.reshape(-1, states.shape[-1])  # (T, D): some models drop the batch axis on the way
        return rows[position].clone()  # (D,)

    def keep_first(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        capture.embedding = at_position(args or kwargs["hidden_states"])

    def keep_last(module: nn.Module, args: tuple[Tensor]) -> None:
        capture.final_state = at_position(args)

    def keep_attention_output(module: nn.Module, args: tuple[Tensor], layer: int) -> None:
        capture.attention_outputs[layer] = at_position(args)

    def keep_mlp(module: nn.Module, args: Any, output: Any, layer: int) -> None:
        capture.mlps[layer] = at_position(output)

    with ExitStack() as stack:
        for hook_point in model.gathered_hook_points():
            stack.enter_context(hook_point.listen(on_call))
        for layer, residual_layer in residual.layers.items():
            stack.callback(residual_layer.mlp.register_forward_hook(partial(keep_mlp, layer=layer)).remove)
            if residual_layer.post_norm is not None:
                norm = residual_layer.post_norm.module
                stack.callback(norm.register_forward_pre_hook(partial(keep_attention_output, layer=layer)).remove)
        stack.callback(residual.first_module.register_forward_pre_hook(keep_first, with_kwargs=True).remove)
        stack.callback(residual.norm.module.register_forward_pre_hook(keep_last).remove)
        yield capture


@contextmanager
def capture_layer_inputs(layer: Any) -> Iterator[list[Tensor]]:
    """Collect what an attention layer reads, while open."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def _logit_direction(
    residual: ResidualStream, final_state: Tensor, answer_id: int, wrong_id: int | None
) -> tuple[Tensor, float]:
    """The direction in the stream that the logit reads at this frozen scale, (D,), and what biases behind it add."""
    unembedding, bias = residual.vocabulary.weight, getattr(residual.vocabulary, "bias", None)

    def answer_minus_wrong(tensor: Tensor) -> Tensor:
        return (
            tensor[answer_id].double() - (0.0 if wrong_id is None else tensor[wrong_id].double())
        ) * residual.logit_scale

    direction = answer_minus_wrong(unembedding)  # (D,)
    bias_part = 0.0 if residual.norm.bias is None else float(residual.norm.bias.double() @ direction)
    bias_part += 0.0 if bias is None else float(answer_minus_wrong(bias))
    return residual.norm.pull_back(direction, final_state), bias_part


def _direction_before_post_norm(
    residual: ResidualStream, capture: CapturedComponents, layer: int, direction: Tensor
) -> tuple[Tensor, float]:
    """The same direction as attention in a layer meets it, (D,), and what a norm in between adds of its own."""
    post_norm = residual.layers[layer].post_norm
    if post_norm is None:
        return direction, 0.0
    bias_part = 0.0 if post_norm.bias is None else float(post_norm.bias.double() @ direction)
    return post_norm.pull_back(direction, capture.attention_outputs[layer]), bias_part


def _check_supported(model: ModelProtocol) -> None:
    if model.spec.norm_placement == "post":
        raise HeadwiseError(
            "in a post-norm model every layer ends in a norm, so the stream is not a sum of what parts wrote and logits "
            "cannot be shared out; silence heads instead: model.heads[…].silenced()."
        )
    if model.spec.kind != "decoder" or model.output is None:
        raise HeadwiseError(
            f"logits are shared out in decoders with an output; this is kind {model.spec.kind}, output {model.spec.output}."
        )


def as_ids(model: ModelProtocol, text: str | Sequence[int] | Tensor) -> Tensor:
    """A text, a list of ids or a tensor of one row as (1, T)."""
    if isinstance(text, str):
        text = tokenizer_of(model).encode(text)
    ids = torch.as_tensor(text, device=model.device)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise HeadwiseError(f"one text with at least one token is needed; got ids of shape {tuple(ids.shape)}.")
    return ids


def token_id(model: ModelProtocol, token: str | int, name: str) -> int:
    """One entry of the vocabulary, by its id or by a text that is just one token."""
    if isinstance(token, str):
        tokenizer = tokenizer_of(model)
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            token_texts = " ".join(repr(tokenizer.token(i)) for i in ids) or "nothing"
            raise HeadwiseError(
                f"{name} must be one token, but {token!r} is {token_texts}; give one of them or its id (a word that follows "
                f"another often begins with a space)."
            )
        return ids[0]
    if not 0 <= token < model.spec.vocab:
        raise HeadwiseError(f"{name} must be a token id in 0-{model.spec.vocab - 1}, got {token}.")
    return token
