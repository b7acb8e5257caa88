"""The loss on text that was held out, each token asked for once, the same windows every time."""

import numpy as np
import torch

from headwise.model import Transformer
from headwise.train.batches import IGNORE, Texts, causal, in_order, masked, stack
from headwise.train.loss import LanguageLoss
from headwise.train.recipe import Recipe
from headwise.train.team import Team


@torch.no_grad()
def evaluate(
    model: Transformer,
    tokens: np.ndarray,
    context: int,
    recipe: Recipe,
    mask: int | None,
    team: Team,
    most: int | None,
    end: int | None = None,
) -> float:
    """Mean loss per token in nats, over all tokens or at most so many, spread evenly; shared out over the team.

    Text after text where they end with the token `end`, else in windows.
    """
    was = model.training
    model.eval()
    rows = in_order(tokens, context, most) if end is None else Texts(tokens, context, 0, end).in_order(most)
    read, loss, total, asked = list(rows), LanguageLoss(model), 0.0, 0
    for first in range(0, len(read), recipe.batch):
        if first // recipe.batch % team.size != team.rank:
            continue
        some = torch.from_numpy(stack(read[first : first + recipe.batch]))  # (B, ≤ context + 1), −1 where there is none
        if mask is None:
            ids, targets = causal(some)
        else:
            ids, targets = masked(some, recipe.mask_share, mask, model.spec.vocab, [recipe.seed, 1], first)
        count = int((targets != IGNORE).sum())
        real = some[:, :-1] >= 0
        padding = None if mask is None or bool(real.all()) else real.to(team.device)
        total += float(loss(ids.to(team.device), targets.to(team.device), padding=padding)) * count
        asked += count
    model.train(was)
    total, asked = team.total(total, asked)
    return total / asked
