"""Ablation sweep of attached models: equal to a full pass per head, while most blocks are skipped."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.ablation.ablate import make_replacement_fn
from headwise.analysis.ablation.ablation_sweep import ablation_sweep
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.attached.residual_stream import block_of
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from tests.attached.models import BY_NAME, CASES, VOCAB, T

TEXTS = [case for case in CASES if case.kind in ("decoder", "encoder", "two")]
TOLERANCE = 1e-6  # relative to the largest loss


def make_targets(kind: str) -> TargetBatch:
    """Return two texts, one padded on the right, with a few target tokens each."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, T), generator=generator)
    real_tokens = torch.ones_like(ids, dtype=torch.bool)
    real_tokens[1, -4:] = False
    targets = torch.randint(3, VOCAB, (2, T), generator=generator).masked_fill(~real_tokens, IGNORE_INDEX)
    targets[:, ::3] = IGNORE_INDEX
    if kind != "two":
        return TargetBatch(ids, real_tokens, targets, real_tokens)
    return TargetBatch(ids, real_tokens, targets, real_tokens, source=ids.roll(1, 1), source_real_tokens=real_tokens)


def losses_by_full_passes(attached: Any, batch: TargetBatch) -> dict[Any, Tensor]:
    """Return the loss of each text with each head silenced, by full passes."""

    def loss() -> Tensor:
        assert batch.targets is not None
        with torch.no_grad():
            logits = attached(
                batch.ids,
                attention_mask=batch.attention_mask,
                source=batch.source,
                source_attention_mask=batch.source_real_tokens,
            )
            return F.cross_entropy(logits.double().mT, batch.targets, ignore_index=IGNORE_INDEX, reduction="none").sum(
                1
            )

    clean, lost = loss(), {}
    for address in attached.heads.addresses:
        with attached.heads[address].silenced():
            lost[address] = loss() - clean
    return lost


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.name)
def test_sweep_attached_equals_full_pass_per_head(case: Any) -> None:
    attached, batch = hw.attach(case.build().double()), make_targets(case.kind)
    assert attached.why_not_resumable() == ""
    heads = attached.heads.addresses
    lost, _ = ablation_sweep(
        attached,
        batch,
        heads,
        lambda hook_point, selected: make_replacement_fn(hook_point, selected, "zero"),
        batch_tokens=200,
    )
    want = losses_by_full_passes(attached, batch)
    size = max(float(each.abs().max()) for each in want.values())
    for row, address in enumerate(heads):
        assert (lost[row] - want[address]).abs().max() <= TOLERANCE * size, address


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "bert", "t5"])
def test_sweep_single_precision_equals_full_passes(name: str) -> None:
    case = BY_NAME[name]
    attached, batch = hw.attach(case.build()), make_targets(case.kind)
    heads = attached.heads.addresses
    lost, _ = ablation_sweep(
        attached, batch, heads, lambda hook_point, selected: make_replacement_fn(hook_point, selected, "zero")
    )
    want = losses_by_full_passes(attached, batch)
    size = max(float(each.abs().max()) for each in want.values())
    for row, address in enumerate(heads):
        assert (lost[row] - want[address]).abs().max() <= 1e-5 * size


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_sweep_skips_blocks_before_layer(name: str) -> None:
    """Counted at the MLPs' activations: one clean pass, then for each layer only the blocks from that layer on."""
    case = BY_NAME[name]
    attached, batch = hw.attach(case.build()), make_targets(case.kind)
    assert attached.why_not_resumable() == ""
    layers = attached.attention_layers()
    order = list(dict.fromkeys(block_of(attached.model, layer) for layer in layers))
    run_counts: dict[nn.Module, int] = dict.fromkeys(order, 0)
    hooks = [
        next(iter(block.children())).register_forward_hook(
            lambda part, inputs, output, block=block: run_counts.update({block: run_counts[block] + 1})
        )
        for block in order
    ]
    ablation_sweep(
        attached,
        batch,
        attached.heads.addresses,
        lambda hook_point, selected: make_replacement_fn(hook_point, selected, "zero"),
    )
    for hook in hooks:
        hook.remove()
    per_block = {block: sum(block_of(attached.model, layer) is block for layer in layers) for block in order}
    for position, block in enumerate(order):
        assert run_counts[block] == 1 + sum(per_block[earlier] for earlier in order[: position + 1])


def test_sweep_foreign_hooks_apply_once() -> None:
    """A user's hook steers the residual stream after a block. It also applies to a skipped block, and only once."""
    attached, batch = hw.attach(BY_NAME["llama"].build().double()), make_targets("decoder")
    assert attached.why_not_resumable() == ""
    torch.manual_seed(0)
    offset = torch.randn(24, dtype=torch.double)
    attached.model.model.layers[0].register_forward_hook(lambda block, inputs, output: output + offset)
    heads = attached.heads.addresses
    lost, _ = ablation_sweep(
        attached, batch, heads, lambda hook_point, selected: make_replacement_fn(hook_point, selected, "zero")
    )
    want = losses_by_full_passes(attached, batch)
    assert max(float((lost[row] - want[address]).abs().max()) for row, address in enumerate(heads)) <= 1e-9


# Blocks that cannot be skipped.


class LeakyBlock(nn.Module):
    """Block that passes data to the next block outside of the residual stream."""

    def __init__(self, inner: nn.Module, stash: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.stash = inner, stash

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        carried = self.stash.pop() if self.stash else 0.0
        self.stash.append(x.detach() * 0.1)
        return self.inner(x + carried, *args, **kwargs)


def make_leaky_model(case: Any) -> Any:
    model = case.build().double()
    stash: list[Tensor] = []
    blocks = model.model.layers
    for index in range(len(blocks)):
        block = blocks[index]
        block.self_attn.layer_idx = index
        blocks[index] = LeakyBlock(block, stash)
    model.model.register_forward_pre_hook(lambda module, inputs: stash.clear())
    return model


def test_resumable_forward_leaky_block_runs_full_pass() -> None:
    attached, batch = hw.attach(make_leaky_model(BY_NAME["llama"])), make_targets("decoder")
    assert "passes on more than its output" in attached.why_not_resumable()
    heads = attached.heads.addresses
    lost, _ = ablation_sweep(
        attached, batch, heads, lambda hook_point, selected: make_replacement_fn(hook_point, selected, "zero")
    )
    want = losses_by_full_passes(attached, batch)
    assert max(float((lost[row] - want[address]).abs().max()) for row, address in enumerate(heads)) <= 1e-9


def test_resumable_forward_repeated_block_runs_full_pass() -> None:
    model = BY_NAME["llama"].build()
    model.model.layers[2] = model.model.layers[1]
    attached = hw.attach(model)
    assert "is called more than once per pass" in attached.why_not_resumable()
