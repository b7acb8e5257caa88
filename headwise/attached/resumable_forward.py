"""A clean pass through somebody else's model that stops at its attention layers; tried on a few tokens before it is used."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import Layer
from headwise.attached.residual_stream import block_of
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Site
from headwise.model import AnyModel, quiet
from headwise.model.resumable_forward import Memory, Pick, Replay, run_copies
from headwise.spec import SiteAddress

TEXTS, TOKENS, COPIES = 2, 5, 3  # what is tried
CLOSE = 1e-6  # of the largest number, in float32; as many roundings in other types
EDITED = 3  # layers in which a head is silenced to see that a pass from there is the whole one


def make_walk(
    theirs: AnyModel, model: Any, layers: Sequence[Layer], wanted: Collection[SiteAddress], pick: Pick, *given: Any
) -> Replay:
    """A walk over ids, padding, source and its padding; where blocks cannot be left out, of whole passes."""
    blocks = _blocks(model, layers)
    sites = {site: block for site, block in blocks.items() if site.address in wanted}
    known = [] if theirs.whole_passes() else list(blocks.values())
    return Replay(partial(run_copies, theirs, *given), len(given[0]), sites, known, pick)


def _blocks(model: Any, layers: Sequence[Layer]) -> dict[Site, nn.Module]:
    return {layer.site: block_of(model, layer) for layer in layers if layer.spec.head_ids}


@torch.no_grad()
def why_whole(theirs: AnyModel, model: Any, layers: Sequence[Layer]) -> str:
    """Why the blocks before a layer must run again in every pass, or nothing: found out on a few tokens.

    A pass that begins at any block must give what the whole pass gave; so must one with a head silenced there, and one over
    several copies of texts, padded or not.
    """
    blocks = _blocks(model, layers)
    if not blocks:
        return "it has no heads"
    try:
        table = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return "it has no table of tokens"
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(len(table), (TEXTS, TOKENS), generator=dice).to(table.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -2:] = False
    two = theirs.spec.kind == "encoder-decoder"
    try:
        with quiet(theirs):
            for padding in (None, real):
                run = partial(run_copies, theirs, ids, padding, ids if two else None, padding if two else None)
                wrong = _tried(run, blocks, real)
                if wrong:
                    return wrong
    except (HeadwiseError, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return f"a pass that begins at a block fails ({' '.join(str(error).split())})"
    return ""


def _tried(run: Any, blocks: dict[Site, nn.Module], real: Tensor) -> str:
    memory = Memory(list(blocks.values()), TEXTS)
    with memory.kept():
        clean = run(1)  # (B, T, D)
    if memory.again:
        return f"{type(memory.again[0]).__name__} is called several times in a pass"
    if set(memory.gave) != set(blocks.values()):
        return "not every block with attention is called"
    for block in memory.gave:
        with memory.before(block, 1):
            if not _same(run(1), clean, real):
                return f"{type(block).__name__} hands on more than what it gives"
    last = list(memory.gave)[-1]
    with memory.before(last, COPIES):
        if not _same(run(COPIES), clean.repeat(COPIES, 1, 1), real.repeat(COPIES, 1)):
            return "copies of a text do not fit beside one another"
    sites = list(blocks)
    for site in {sites[place * (len(sites) - 1) // max(1, EDITED - 1)]: None for place in range(EDITED)}:
        with site.scaled(torch.zeros(len(site.head_ids))):
            whole = run(1)
            with memory.before(blocks[site], 1):
                if not _same(run(1), whole, real):
                    return f"what is changed in {type(blocks[site]).__name__} reaches further than what it gives"
    return ""


def _same(one: Tensor, other: Tensor, real: Tensor) -> bool:
    """Whether states are the same at real tokens, but for the rounding of batches of another size: (B, T, D) each."""
    far, size = (one - other)[real].abs().max(), other[real].abs().max()
    return bool(far <= max(CLOSE, 8 * torch.finfo(one.dtype).eps) * size)
