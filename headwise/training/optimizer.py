"""AdamW (https://arxiv.org/abs/1711.05101), and how its state goes to a file and back without pickle."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.training.recipe import Recipe


def make_optimizer(learning: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Matrices and tables decay, biases, norms and gates do not."""
    trained = [value for value in learning.values() if value.numel()]  # a layer without heads has weights of no size
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


def optimizer_state(learning: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, by the name of what and of which parameter."""
    return {
        f"{what}/{name}": value.contiguous()
        for name, parameter in learning.items()
        for what, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    learning: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Give the optimizer back what it remembered."""
    for key, value in state.items():
        what, name = key.split("/", 1)
        # the count of steps stays where fused AdamW wants it: beside its parameter
        optimizer.state[learning[name]][what] = value.to(learning[name].device)
