"""AdamW (https://arxiv.org/abs/1711.05101), and its state as named tensors without pickle."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedModelError
from headwise.training.recipe import Recipe


def make_optimizer(parameters: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices and embeddings, but not on biases, norms and gates."""
    nonempty = [value for value in parameters.values() if value.numel()]  # layers without heads have empty weights
    if not nonempty:
        raise UnsupportedModelError("model: it has no trainable parameter. Set requires_grad=True on some parameters.")
    groups = [
        {"params": [value for value in nonempty if value.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [value for value in nonempty if value.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.learning_rate, betas=betas, fused=True)


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters by name, tied ones once."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def optimizer_state(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of the optimizer by "state name/parameter name"."""
    return {
        f"{state_name}/{name}": value.contiguous()
        for name, parameter in parameters.items()
        for state_name, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Load the state of the optimizer."""
    for key, value in state.items():
        state_name, name = key.split("/", 1)
        # Fused AdamW requires all state, including the step count, on the device of the parameter.
        optimizer.state[parameters[name]][state_name] = value.to(parameters[name].device)
