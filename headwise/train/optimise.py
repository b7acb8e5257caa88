"""AdamW (https://arxiv.org/abs/1711.05101), and how its state goes to a file and back without pickle."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.train.recipe import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Matrices and tables decay, biases, norms and gates do not."""
    trained = [value for _, value in trainable(model)]
    if not trained:
        raise HeadwiseError("no parameter of this model is to be trained; set requires_grad on some.")
    groups = [
        {"params": [value for value in trained if value.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [value for value in trained if value.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.rate, betas=betas, fused=True)


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that change, by name, tied ones once."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, by the name of what and of which parameter."""
    return {
        f"{what}/{name}": value.contiguous()
        for name, parameter in trainable(model)
        for what, value in optimizer.state[parameter].items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Give the optimizer back what it remembered."""
    named = dict(trainable(model))
    for key, value in state.items():
        what, name = key.split("/", 1)
        # the count of steps stays where fused AdamW wants it: beside its parameter
        optimizer.state[named[name]][what] = value.to(named[name].device)
