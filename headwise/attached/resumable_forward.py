"""Resumable forward pass of an attached model, tested on a few tokens before use."""

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
from headwise.model.resumable_forward import BlockOutputCache, ReplayForward, RowSelector, final_hidden_states_of_copies
from headwise.spec import LayerAddress

BATCH_SIZE, SEQUENCE_LENGTH, NUM_COPIES = 2, 5, 3  # sizes of the test
TOLERANCE = 1e-6  # relative to the largest value, in float32; scaled to the precision of other dtypes
NUM_EDITED_LAYERS = 3  # number of layers in which a head is silenced to test resuming there


def make_resumable_forward(
    attached: ModelProtocol,
    model: Any,
    layers: Sequence[AttachedLayer],
    layer_addresses: Collection[LayerAddress],
    select_rows: RowSelector,
    *inputs: Any,
) -> ReplayForward:
    """Return a resumable forward pass over ids, attention mask, source and its mask. It skips blocks if possible."""
    blocks = _blocks_by_hook_point(model, layers)
    block_of_hook_point = {
        hook_point: block for hook_point, block in blocks.items() if hook_point.address in layer_addresses
    }
    skippable_blocks = [] if attached.why_not_resumable() else list(blocks.values())
    return ReplayForward(
        partial(final_hidden_states_of_copies, attached, *inputs),
        len(inputs[0]),
        block_of_hook_point,
        skippable_blocks,
        select_rows,
    )


def _blocks_by_hook_point(model: Any, layers: Sequence[AttachedLayer]) -> dict[HookPoint, nn.Module]:
    return {layer.hook_point: block_of(model, layer) for layer in layers if layer.spec.head_ids}


@torch.no_grad()
def why_not_resumable(attached: ModelProtocol, model: Any, layers: Sequence[AttachedLayer]) -> str:
    """Test on a few tokens whether blocks before a layer can be skipped. Returns the reason if not, else an empty text.

    A pass resumed at any block must give the output of the full pass, also with a head silenced there, with several copies of
    the texts, and with padding.
    """
    blocks = _blocks_by_hook_point(model, layers)
    if not blocks:
        return "the model has no heads"
    try:
        table = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return "the model has no token embedding"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(table), (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator, device="cpu").to(table.device)
    real_tokens = torch.ones_like(ids, dtype=torch.bool)
    real_tokens[1, -2:] = False
    is_encoder_decoder = attached.spec.kind == "encoder-decoder"
    try:
        with eval_mode(attached):
            for attention_mask in (None, real_tokens):
                forward = partial(
                    final_hidden_states_of_copies,
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
        return f"a pass resumed at a block fails ({' '.join(str(error).split())})"
    return ""


def _find_problem(forward: Any, blocks: dict[HookPoint, nn.Module], real_tokens: Tensor) -> str:
    output_cache = BlockOutputCache(list(blocks.values()), BATCH_SIZE)
    with output_cache.recording():
        clean = forward(1)  # (B, T, D)
    if output_cache.called_again:
        return f"{type(output_cache.called_again[0]).__name__} is called more than once per pass"
    if set(output_cache.outputs) != set(blocks.values()):
        return "not every block with attention is called"
    for block in output_cache.outputs:
        with output_cache.skip_blocks_before(block, 1):
            if not _same(forward(1), clean, real_tokens):
                return f"{type(block).__name__} passes on more than its output"
    last = list(output_cache.outputs)[-1]
    with output_cache.skip_blocks_before(last, NUM_COPIES):
        if not _same(forward(NUM_COPIES), clean.repeat(NUM_COPIES, 1, 1), real_tokens.repeat(NUM_COPIES, 1)):
            return "copies of a text change each other's outputs in a batch"
    hook_points = list(blocks)
    for hook_point in {
        hook_points[index * (len(hook_points) - 1) // max(1, NUM_EDITED_LAYERS - 1)]: None
        for index in range(NUM_EDITED_LAYERS)
    }:
        with hook_point.scaled(torch.zeros(len(hook_point.head_ids), device="cpu")):
            full_output = forward(1)
            with output_cache.skip_blocks_before(blocks[hook_point], 1):
                if not _same(forward(1), full_output, real_tokens):
                    return f"an edit in {type(blocks[hook_point]).__name__} affects more than the block's output"
    return ""


def _same(actual: Tensor, expected: Tensor, real_tokens: Tensor) -> bool:
    """Return whether states are equal at real tokens, up to the rounding of other batch sizes: (B, T, D) each."""
    difference, size = (actual - expected)[real_tokens].abs().max(), expected[real_tokens].abs().max()
    return bool(difference <= max(TOLERANCE, 8 * torch.finfo(actual.dtype).eps) * size)
