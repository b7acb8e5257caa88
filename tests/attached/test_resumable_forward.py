"""The sweep over the heads of somebody else's model: what a whole pass for each head gives, most of the blocks left out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.ablation.ablate import stand_in
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.ablation.sweep import sweep
from headwise.attached.residual_stream import block_of
from headwise.model.loss import IGNORE
from tests.attached.models import BY_NAME, CASES, VOCAB, T

TEXTS = [case for case in CASES if case.kind in ("decoder", "encoder", "two")]
EXACT = 1e-6  # of the largest loss, relative


def asked_of(kind: str) -> TargetBatch:
    """Two texts, one padded on the right, each with a few tokens asked for."""
    dice = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, T), generator=dice)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -4:] = False
    targets = torch.randint(3, VOCAB, (2, T), generator=dice).masked_fill(~real, IGNORE)
    targets[:, ::3] = IGNORE
    if kind != "two":
        return TargetBatch(ids, real, targets, real)
    return TargetBatch(ids, real, targets, real, source=ids.roll(1, 1), source_real=real)


def by_whole_passes(theirs: Any, asked: TargetBatch) -> dict[Any, Tensor]:
    """Silence a head, run the model, read off the loss: for every head, text by text."""

    def loss() -> Tensor:
        assert asked.targets is not None
        with torch.no_grad():
            logits = theirs(asked.ids, padding=asked.padding, source=asked.source, source_padding=asked.source_real)
            return F.cross_entropy(logits.double().mT, asked.targets, ignore_index=IGNORE, reduction="none").sum(1)

    clean, lost = loss(), {}
    for address in theirs.heads.addresses:
        with theirs.heads[address].silenced():
            lost[address] = loss() - clean
    return lost


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.name)
def test_the_sweep_is_a_whole_pass_for_each_head(case: Any) -> None:
    theirs, asked = hw.attach(case.build().double()), asked_of(case.kind)
    assert theirs.whole_passes() == ""
    heads = theirs.heads.addresses
    lost, _ = sweep(theirs, asked, heads, lambda site, some: stand_in(site, some, "zero"), tokens=200)
    want = by_whole_passes(theirs, asked)
    size = max(float(each.abs().max()) for each in want.values())
    for row, address in enumerate(heads):
        assert (lost[row] - want[address]).abs().max() <= EXACT * size, address


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "bert", "t5"])
def test_single_precision_too(name: str) -> None:
    case = BY_NAME[name]
    theirs, asked = hw.attach(case.build()), asked_of(case.kind)
    heads = theirs.heads.addresses
    lost, _ = sweep(theirs, asked, heads, lambda site, some: stand_in(site, some, "zero"))
    want = by_whole_passes(theirs, asked)
    size = max(float(each.abs().max()) for each in want.values())
    for row, address in enumerate(heads):
        assert (lost[row] - want[address]).abs().max() <= 1e-5 * size


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_blocks_before_a_layer_do_not_run_again(name: str) -> None:
    """Counted at the MLPs' activations: the clean pass, then for the copies of each layer the blocks from there on."""
    case = BY_NAME[name]
    theirs, asked = hw.attach(case.build()), asked_of(case.kind)
    assert theirs.whole_passes() == ""
    layers = theirs.attention_layers()
    order = list(dict.fromkeys(block_of(theirs.model, layer) for layer in layers))
    ran: dict[nn.Module, int] = dict.fromkeys(order, 0)
    hooks = [
        next(iter(block.children())).register_forward_hook(
            lambda part, given, made, block=block: ran.update({block: ran[block] + 1})
        )
        for block in order
    ]
    sweep(theirs, asked, theirs.heads.addresses, lambda site, some: stand_in(site, some, "zero"))
    for hook in hooks:
        hook.remove()
    per_block = {block: sum(block_of(theirs.model, layer) is block for layer in layers) for block in order}
    for place, block in enumerate(order):
        assert ran[block] == 1 + sum(per_block[earlier] for earlier in order[: place + 1])


def test_hooks_of_others_count_once() -> None:
    """Somebody steers the stream behind a block: what stands in for the block is steered as well, and only once."""
    theirs, asked = hw.attach(BY_NAME["llama"].build().double()), asked_of("decoder")
    assert theirs.whole_passes() == ""
    torch.manual_seed(0)
    more = torch.randn(24, dtype=torch.double)
    theirs.model.model.layers[0].register_forward_hook(lambda block, given, made: made + more)
    heads = theirs.heads.addresses
    lost, _ = sweep(theirs, asked, heads, lambda site, some: stand_in(site, some, "zero"))
    want = by_whole_passes(theirs, asked)
    assert max(float((lost[row] - want[address]).abs().max()) for row, address in enumerate(heads)) <= 1e-9


# Where blocks cannot be left out.


class Leaking(nn.Module):
    """A block that leaves something beside the stream for the next one."""

    def __init__(self, inner: nn.Module, shelf: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.shelf = inner, shelf

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        beside = self.shelf.pop() if self.shelf else 0.0
        self.shelf.append(x.detach() * 0.1)
        return self.inner(x + beside, *more, **named)


def leaking(case: Any) -> Any:
    model = case.build().double()
    shelf: list[Tensor] = []
    blocks = model.model.layers
    for place in range(len(blocks)):
        block = blocks[place]
        block.self_attn.layer_idx = place
        blocks[place] = Leaking(block, shelf)
    model.model.register_forward_pre_hook(lambda module, given: shelf.clear())
    return model


def test_a_model_that_hands_more_on_is_run_whole_and_says_so() -> None:
    theirs, asked = hw.attach(leaking(BY_NAME["llama"])), asked_of("decoder")
    assert "hands on more than what it gives" in theirs.whole_passes()
    heads = theirs.heads.addresses
    lost, _ = sweep(theirs, asked, heads, lambda site, some: stand_in(site, some, "zero"))
    want = by_whole_passes(theirs, asked)
    assert max(float((lost[row] - want[address]).abs().max()) for row, address in enumerate(heads)) <= 1e-9


def test_a_block_that_is_run_twice_is_run_whole_and_says_so() -> None:
    model = BY_NAME["llama"].build()
    model.model.layers[2] = model.model.layers[1]
    theirs = hw.attach(model)
    assert "is called several times in a pass" in theirs.whole_passes()
