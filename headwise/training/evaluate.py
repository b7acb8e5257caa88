"""Held-out loss. Each token is a target once, in the same windows every time."""

from collections.abc import Sequence

import numpy as np
import torch

from headwise.distributed.process_group import ProcessGroup
from headwise.model import ModelProtocol, eval_mode
from headwise.training.batch_samplers import MaskTokens, make_train_batch, pad_with_minus_one
from headwise.training.model_with_loss import LanguageLoss


@torch.no_grad()
def evaluate(
    model: ModelProtocol,
    texts: Sequence[np.ndarray],
    sources: Sequence[np.ndarray],
    batch_size: int,
    mask_tokens: MaskTokens | None,
    process_group: ProcessGroup,
    equal_batch_counts: bool = False,
) -> float:
    """Return the mean loss per token in nats, computed by all processes together.

    Args:
        model: The model.
        texts: Token ids of each text, with one token more than the inputs.
        sources: Source of each text for an encoder-decoder, otherwise empty.
        batch_size: Texts per batch.
        mask_tokens: Function that masks tokens for the masked objective. None: next-token targets.
        process_group: Processes that share the batches.
        equal_batch_counts: Run as many batches in every process, as sharded models require. A process without a batch runs
            the first one again and ignores its loss.

    Returns:
        Mean loss per token in nats.
    """
    loss, total, num_targets = LanguageLoss(model), 0.0, 0
    with eval_mode(model):
        num_batches = -(-len(texts) // batch_size)
        for index in range(
            process_group.rank,
            -(-num_batches // process_group.size) * process_group.size if equal_batch_counts else num_batches,
            process_group.size,
        ):
            first = index * batch_size if index < num_batches else 0
            batch_slice = slice(first, first + batch_size)
            train_batch = make_train_batch(
                pad_with_minus_one(texts[batch_slice]),
                pad_with_minus_one(sources[batch_slice]) if sources else None,
                mask_tokens,
                first,
            )
            batch_loss = float(loss(*train_batch.select_rows(slice(None), process_group.device)))
            if index < num_batches:
                total += batch_loss * train_batch.num_targets
                num_targets += train_batch.num_targets
    total, num_targets = process_group.all_reduce_values(total, num_targets)
    return total / num_targets
