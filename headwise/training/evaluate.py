"""The loss on text that was held out, each token asked for once, the same windows every time."""

from collections.abc import Sequence

import numpy as np
import torch

from headwise.distributed.process_group import Team
from headwise.model import Transformer, quiet
from headwise.training.batches import Hide, make_rows, stack
from headwise.training.loss import LanguageLoss


@torch.no_grad()
def evaluate(
    model: Transformer,
    texts: Sequence[np.ndarray],
    sources: Sequence[np.ndarray],
    batch: int,
    hide: Hide | None,
    team: Team,
    in_step: bool = False,
) -> float:
    """Mean loss per token in nats, over texts with one token more than is read; shared out over the team.

    `sources` are what an encoder-decoder reads, one for each text, or none. `in_step`: processes hold parts of the model, so
    all of them must run as many batches; one that has none left reads the first once more, for nothing.
    """
    loss, total, asked = LanguageLoss(model), 0.0, 0
    with quiet(model):
        batches = -(-len(texts) // batch)
        for number in range(team.rank, -(-batches // team.size) * team.size if in_step else batches, team.size):
            first = number * batch if number < batches else 0
            some = slice(first, first + batch)
            rows = make_rows(stack(texts[some]), stack(sources[some]) if sources else None, hide, first)
            found = float(loss(*rows.part(slice(None), team.device)))
            if number < batches:
                total += found * rows.target_count
                asked += rows.target_count
    total, asked = team.total(total, asked)
    return total / asked
