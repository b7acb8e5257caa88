"""AdamW (https://arxiv.org/abs/1711.05101), and how its state goes to a file and back without pickle."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.training.recipe import Recipe


def make_optimizer(parameters: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Matrices and tables decay, biases, norms and gates do not."""
    nonempty = [value for value in parameters.values() if value.numel()]  # a layer without heads has weights of no size
    if not nonempty:
        raise HeadwiseError("no parameter of this model is to be trained; set requires_grad on some.")
    groups = [
        {"params": [value for value in nonempty if value.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [value for value in nonempty if value.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.learning_rate, betas=betas, fused=True)


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that change, by name, tied ones once."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def optimizer_state(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, by the name of what and of which parameter."""
    return {
        f"{state_name}/{name}": value.contiguous()
        for name, parameter in parameters.items()
        for state_name, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Give the optimizer back what it remembered."""
    for key, value in state.items():
        state_name, name = key.split("/", 1)
        # the count of steps stays where fused AdamW wants it: beside its parameter
        optimizer.state[parameters[name]][state_name] = value.to(parameters[name].device)
