"""Fold a steering into weights, so that the model computes the steered outputs without hooks.

z of a head enters the layer only through z W_O[h]. So each edit of z is a change of weights:

    shift        (z + s v) W_O[h]              = z W_O[h] + s v W_O[h]                 b_O gains s v W_O[h]
    project out  z (I − u uᵀ) W_O[h]                                                   W_O[h] becomes (I − u uᵀ) W_O[h]
    clamp to c   (z (I − u uᵀ) + c u) W_O[h]                                           both
"""

from typing import TypeVar

import torch
from torch import Tensor

from headwise.analysis.recording.batching import forward_ids
from headwise.analysis.steering.steering import Steering
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import Head
from headwise.heads.steering_edits import unit_vectors
from headwise.kernels.rounding_tolerance import to_float64, without_autocast
from headwise.model import ModelProtocol, check_model, eval_mode
from headwise.spec import LayerAddress

M = TypeVar("M", bound=ModelProtocol)
PROBE_TOKENS = (1, 2, 3, 5, 7)  # token ids on which a folded attached model is compared with the steered one


@without_autocast
@torch.no_grad()
def fold_steering(model: M, steering: Steering, *, check: bool = True) -> M:
    """Return a copy of a model that computes the steered outputs with changed weights and without hooks.

    A shift is folded into the output bias b_O of its layers; a model without output biases gains them. Projecting out a
    direction, and a clamp with `low` equal to `high`, are folded into W_O of their heads. Sums are computed in
    float64 and rounded once to the dtype of the weights. The folded model can be saved and exported like any other.

    Args:
        model: Native or attached model.
        steering: The steering to fold, for all tokens.
        check: Raise if the steering was made for another model.

    Returns:
        A new model of the same class that shares no memory with the given one.

    Raises:
        ArgumentError: The steering was made for another model, or a clamp with a range is not linear.
        UnsupportedModelError: The layer does not give access to W_O, shares it with other layers, or its weights are
            quantized.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model, ids = Transformer(preset("nano")), torch.tensor([[72, 105, 33]])
    >>> steering = Steering({"5.1": torch.ones(64)}, strength=0.5)
    >>> folded = fold_steering(model, steering)
    >>> with steering.applied(model):
    ...     torch.allclose(folded(ids), model(ids), atol=1e-5)
    True
    """
    check_model(model)
    if not isinstance(steering, Steering):
        raise ArgumentError(f"steering: must be a hw.Steering. Got {type(steering).__name__}.")
    model = model.copy_offloaded_to_memory()
    if steering.edit == "clamp" and steering.low != steering.high:
        raise ArgumentError(
            f"steering: a clamp to a range is not linear and cannot be folded. Got low={steering.low}, high={steering.high}. "
            f"Set low equal to high, or apply the steering with hooks: steering.applied(model)."
        )
    if check:
        steering.check_model(model)
    heads = list(steering.heads_of(model))
    for head in heads:
        head.layer.hook_point.check_editable()
    _check_weights(model, heads, changes_w_o=steering.edit != "shift")
    biases: dict[LayerAddress, Tensor] = {}
    for head in heads:
        bias = _bias_change(steering, head)
        address = head.address.layer_address
        if bias is not None:
            biases[address] = biases[address] + bias if address in biases else bias
    folded = model.prune((), biases)
    if steering.edit != "shift":
        for head in steering.heads_of(folded):
            W_O = to_float64(head.W_O)  # (e, D)
            u = to_float64(unit_vectors(steering.vectors[str(head.address)][None])).to(W_O.device)[0]
            head.W_O.copy_(W_O - torch.outer(u, u @ W_O))
    _check_folded(model, folded, steering)
    return folded


def _bias_change(steering: Steering, head: Head) -> Tensor | None:
    """Return the vector that folding a head adds to b_O, (D,), in float64."""
    vector = to_float64(steering.vectors[str(head.address)])
    if steering.edit == "project_out":
        return None
    step = steering.strength * vector if steering.edit == "shift" else steering.low * vector / vector.norm()  # pyright: ignore
    W_O = to_float64(head.W_O)
    return step.to(W_O.device) @ W_O


def _check_weights(model: ModelProtocol, heads: list[Head], *, changes_w_o: bool) -> None:
    """Raise if b_O or W_O of a layer cannot be changed, before anything is copied."""
    if model.is_sharded:
        raise UnsupportedModelError(
            "model: a sharded model cannot be changed, because this process holds only a part of it. "
            "Fold the full model, then "
            "call hw.shard."
        )
    pointers = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    users: dict[int, LayerAddress] = {}
    layers = {head.address.layer_address for head in heads}
    for head in model.heads:
        address, W_O = head.address.layer_address, _w_o_view(head, pointers)
        user = address if W_O is None else users.setdefault(W_O.data_ptr(), address)
        if user != address and {user, address} & layers:
            raise UnsupportedModelError(
                f"steering: layers {user} and {address} share one output projection, so a change of one "
                "would change both. Apply "
                f"the steering with hooks: steering.applied(model)."
            )
    for head in heads:
        _ = head.W_O  # raises with the reason if W_O is not available
        if changes_w_o and _w_o_view(head, pointers) is None:
            raise UnsupportedModelError(
                f"steering: W_O of head {head.address} is quantized or computed from adapters, so it cannot be edited. Use "
                f"hw.dequantize(model) or merge the adapters first, or apply the steering with hooks: "
                "steering.applied(model)."
            )


def _w_o_view(head: Head, pointers: set[int]) -> Tensor | None:
    """Return W_O[h] if it is a view of a parameter, None if it is a copy or not available."""
    try:
        W_O = head.W_O
    except UnsupportedModelError:
        return None
    return W_O if W_O.numel() and W_O.untyped_storage().data_ptr() in pointers else None


def _check_folded(model: ModelProtocol, folded: ModelProtocol, steering: Steering) -> None:
    """Raise if the model does not use the changed weights as expected, found on a few tokens."""
    if model.image_input is not None or model.spec.stacks:
        return  # not every layer reads token ids
    ids = torch.tensor([PROBE_TOKENS], device=model.device) % max(2, model.spec.vocab)
    with eval_mode(model), eval_mode(folded):
        actual = to_float64(forward_ids(folded, ids))
        with steering.applied(model, check=False):
            expected = to_float64(forward_ids(model, ids))
    tolerance = torch.finfo(next(iter(model.parameters())).dtype).eps ** 0.5
    if not bool((actual - expected).abs().max() <= tolerance * expected.abs().max()):
        raise UnsupportedModelError(
            "steering: the folded model does not compute the steered outputs, so this architecture does "
            "not add the output bias "
            "where its heads write. Apply the steering with hooks: steering.applied(model)."
        )
