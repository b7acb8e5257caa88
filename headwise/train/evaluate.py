"""The loss on text that was held out, each token asked for once, the same windows every time."""

from itertools import groupby

import numpy as np
import torch

from headwise.model import Transformer
from headwise.train.batches import IGNORE, causal, in_order, masked
from headwise.train.loss import LanguageLoss
from headwise.train.recipe import Recipe
from headwise.train.team import Team


@torch.no_grad()
def evaluate(
    model: Transformer, tokens: np.ndarray, context: int, recipe: Recipe, mask: int | None, team: Team, most: int | None
) -> float:
    """Mean loss per token in nats, over all tokens or at most so many, spread evenly; shared out over the team."""
    was = model.training
    model.eval()
    loss, total, asked = LanguageLoss(model), 0.0, 0
    numbered = enumerate(in_order(tokens, context, most))
    for _, group in groupby(numbered, key=lambda pair: (len(pair[1]), pair[0] // recipe.batch)):
        pairs = list(group)
        number, rows = pairs[0][0] // recipe.batch, torch.from_numpy(np.stack([row for _, row in pairs]))
        if number % team.size != team.rank:
            continue
        if mask is None:
            ids, targets = causal(rows)
        else:
            ids, targets = masked(rows, recipe.mask_share, mask, model.spec.vocab, [recipe.seed, 1], pairs[0][0])
        count = int((targets != IGNORE).sum())
        total += float(loss(ids.to(team.device), targets.to(team.device))) * count
        asked += count
    model.train(was)
    total, asked = team.total(total, asked)
    return total / asked
