"""A clean pass through somebody else's model that stops at its attention layers; tried on a few tokens before it is used."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.attached.residual_stream import block_of
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HookPoint
from headwise.model import ModelProtocol, eval_mode
from headwise.model.resumable_forward import BlockOutputCache, ReplayForward, RowSelector, forward_copies
from headwise.spec import LayerAddress

BATCH_SIZE, SEQUENCE_LENGTH, NUM_COPIES = 2, 5, 3  # what is tried
TOLERANCE = 1e-6  # of the largest number, in float32; as many roundings in other types
NUM_EDITED_LAYERS = 3  # layers in which a head is silenced to see that a pass from there is the whole one


def make_resumable_forward(
    attached: ModelProtocol,
    model: Any,
    layers: Sequence[AttachedLayer],
    layer_addresses: Collection[LayerAddress],
    select_rows: RowSelector,
    *inputs: Any,
) -> ReplayForward:
    """A resumable forward over ids, attention mask, source and its mask; where blocks cannot be left out, of whole passes."""
    blocks = _blocks_by_hook_point(model, layers)
    block_of_hook_point = {
        hook_point: block for hook_point, block in blocks.items() if hook_point.address in layer_addresses
    }
    skippable_blocks = [] if attached.why_not_resumable() else list(blocks.values())
    return ReplayForward(
        partial(forward_copies, attached, *inputs), len(inputs[0]), block_of_hook_point, skippable_blocks, select_rows
    )


def _blocks_by_hook_point(model: Any, layers: Sequence[AttachedLayer]) -> dict[HookPoint, nn.Module]:
    return {layer.hook_point: block_of(model, layer) for layer in layers if layer.spec.head_ids}


@torch.no_grad()
def why_not_resumable(attached: ModelProtocol, model: Any, layers: Sequence[AttachedLayer]) -> str:
    """Why the blocks before a layer must run again in every pass, or nothing: found out on a few tokens.

    A pass that begins at any block must give what the whole pass gave; so must one with a head silenced there, and one over
    several copies of texts, padded or not.
    """
    blocks = _blocks_by_hook_point(model, layers)
    if not blocks:
        return "it has no heads"
    try:
        table = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return "it has no table of tokens"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(table), (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator).to(table.device)
    real_tokens = torch.ones_like(ids, dtype=torch.bool)
    real_tokens[1, -2:] = False
    is_encoder_decoder = attached.spec.kind == "encoder-decoder"
    try:
        with eval_mode(attached):
            for attention_mask in (None, real_tokens):
                forward = partial(
                    forward_copies,
                    attached,
                    ids,
                    attention_mask,
                    ids if is_encoder_decoder else None,
                    attention_mask if is_encoder_decoder else None,
                )
                problem = _find_problem(forward, blocks, real_tokens)
                if problem:
                    return problem
    except (HeadwiseError, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return f"a pass that begins at a block fails ({' '.join(str(error).split())})"
    return ""


def _find_problem(forward: Any, blocks: dict[HookPoint, nn.Module], real_tokens: Tensor) -> str:
    output_cache = BlockOutputCache(list(blocks.values()), BATCH_SIZE)
    with output_cache.recording():
        clean = forward(1)  # (B, T, D)
    if output_cache.called_again:
        return f"{type(output_cache.called_again[0]).__name__} is called several times in a pass"
    if set(output_cache.outputs) != set(blocks.values()):
        return "not every block with attention is called"
    for block in output_cache.outputs:
        with output_cache.skip_blocks_before(block, 1):
            if not _same(forward(1), clean, real_tokens):
                return f"{type(block).__name__} hands on more than what it gives"
    last = list(output_cache.outputs)[-1]
    with output_cache.skip_blocks_before(last, NUM_COPIES):
        if not _same(forward(NUM_COPIES), clean.repeat(NUM_COPIES, 1, 1), real_tokens.repeat(NUM_COPIES, 1)):
            return "copies of a text do not fit beside one another"
    hook_points = list(blocks)
    for hook_point in {
        hook_points[index * (len(hook_points) - 1) // max(1, NUM_EDITED_LAYERS - 1)]: None
        for index in range(NUM_EDITED_LAYERS)
    }:
        with hook_point.scaled(torch.zeros(len(hook_point.head_ids))):
            full_output = forward(1)
            with output_cache.skip_blocks_before(blocks[hook_point], 1):
                if not _same(forward(1), full_output, real_tokens):
                    return f"what is changed in {type(blocks[hook_point]).__name__} reaches further than what it gives"
    return ""


def _same(actual: Tensor, expected: Tensor, real_tokens: Tensor) -> bool:
    """Whether states are the same at real tokens, but for the rounding of batches of another size: (B, T, D) each."""
    difference, size = (actual - expected)[real_tokens].abs().max(), expected[real_tokens].abs().max()
    return bool(difference <= max(TOLERANCE, 8 * torch.finfo(actual.dtype).eps) * size)
