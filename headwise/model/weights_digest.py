"""Digest of the weights of a model, and the check that a plan was made for these weights."""

import hashlib
from collections.abc import Callable

import torch

from headwise.errors import ArgumentError
from headwise.model.protocols import ModelProtocol, check_model
from headwise.spec import Plan
from headwise.spec.migration import FORMAT_1_DIGEST, to_format_1_tensor_name


def weights_digest(model: ModelProtocol, tensor_name: Callable[[str], str] = str) -> str:
    """Return a SHA-256 digest of the names, shapes and bytes of all tensors of a model. A tied tensor counts once.

    Args:
        model: The model.
        tensor_name: Function that returns the name of a tensor in the digest.
    """
    hasher = hashlib.sha256()
    for name, tensor in model.copy_offloaded_to_memory().state_dict().items():
        if not (model.spec.tied and name == "output.vocabulary.weight"):
            hasher.update(f"{tensor_name(name)}:{tuple(tensor.shape)}".encode())
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def check_plan(plan: Plan, model: ModelProtocol) -> None:
    """Raise if a plan was made for another model or for other weights."""
    check_model(model)
    plan.check_spec(model.spec)
    digest = plan.digest.removeprefix(FORMAT_1_DIGEST)
    tensor_name = str if digest == plan.digest else to_format_1_tensor_name
    if weights_digest(model, tensor_name) != digest:
        raise ArgumentError(
            "plan: made for a model with the same spec but other weights or another dtype. Make a plan for this model."
        )
