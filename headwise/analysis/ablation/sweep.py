"""Take heads away one by one, at a fraction of what running the model anew for each would cost.

The stream up to a layer is the same for all of its heads, and so is their z. So one clean walk through the model stops at
each layer, runs all its heads as one batch, each copy with another head replaced, through what is left of the network, and
goes on (`model/walk`). In a single stack of ours, where few tokens are asked for, the last block finishes their rows alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import Stand
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.ablation.head_outputs import chosen_sites
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Edit, Site
from headwise.kernels.gradients import gradients_enabled
from headwise.model import AnyModel
from headwise.spec import Address, ModelSpec

Stands = Callable[[Site, tuple[Address, ...]], Stand]  # what stands in for some heads of a layer
TOKENS = 2048  # run at once, copies included


@torch.no_grad()
def sweep(
    model: AnyModel, batch: TargetBatch, heads: Sequence[Address], stands: Stands, tokens: int = TOKENS
) -> tuple[Tensor, Tensor]:
    """What each text loses by each head, summed over its answers, (heads, B); and the untouched model's answers."""
    wanted = {site.address: chosen for site, chosen in chosen_sites(model, heads)}
    walk = model.walk(
        batch.ids, wanted, batch.pick, padding=batch.padding, source=batch.source, source_padding=batch.source_real
    )
    once = batch.ids.numel() + (0 if batch.source is None else batch.source.numel())
    most = 1 if model.whole_passes() else tokens // max(1, once)  # what must be run whole is run as it always was
    answers: dict[Address, Tensor] = {}
    for stop in walk:
        chosen, z = wanted[stop.site.address], stop.z  # (B, H, T, e)
        standing = stands(stop.site, chosen)(z).to(z).expand(len(z), len(chosen), *z.shape[2:])
        for some in _shares(len(chosen), most):
            changed = z.repeat(len(some), 1, 1, 1, 1)  # (n, B, H, T, e)
            for copy, place in enumerate(some):
                changed[copy, :, stop.site.index(chosen[place])] = standing[:, place]
            made = batch.answers(model, stop.onward(changed.flatten(0, 1)))
            answers |= zip((chosen[i] for i in some), made.unflatten(0, (len(some), -1)), strict=True)
    clean = batch.answers(model, walk.states)
    lost = [batch.lost(answers[head], clean) for head in heads]
    return torch.stack(lost) if lost else clean.new_zeros(0, len(batch.ids)), clean


def slopes(model: AnyModel, batch: TargetBatch, heads: Sequence[Address], stands: Stands) -> Tensor:
    """How steeply each text's summed surprise rises as each head begins to be replaced: (heads, B), from one backward pass.

    z becomes z + ε (stand-in − z), with an ε of its own for every head and text. Texts do not touch each other, so the
    slope in ε is that text's own; and as it comes from `autograd.grad`, nothing is ever added up in a `.grad`.
    """
    if batch.targets is None:
        raise HeadwiseError(
            "without an output a model is compared with itself, and there the slope is 0; use by='ablation'."
        )
    leaves: dict[Address, Tensor] = {}
    with gradients_enabled(model), ExitStack() as stack:
        for site, chosen in chosen_sites(model, heads):
            amounts = [torch.zeros(len(batch.ids), device=batch.ids.device, requires_grad=True) for _ in chosen]  # (B,)
            leaves |= zip(chosen, amounts, strict=True)
            stack.enter_context(site.replaced(_begin_to_replace(site, chosen, amounts, stands(site, chosen))))
        hidden = batch.pick(batch.run(model)).flatten(0, 1)  # (B·R, D)
        targets = batch.targets if batch.rows is None else batch.targets.gather(1, batch.rows)
        assert model.output is not None
        total = model.output.cross_entropy(hidden, targets.flatten(), total=1)
        found = torch.autograd.grad(total, [leaves[head] for head in heads]) if heads else ()
    return torch.stack([slope.double() for slope in found]) if found else torch.zeros(0, len(batch.ids))


def _begin_to_replace(site: Site, chosen: tuple[Address, ...], amounts: list[Tensor], stand: Stand) -> Edit:
    index = [site.index(address) for address in chosen]

    def edit(z: Tensor) -> Tensor:
        now = z.detach()
        towards = stand(now).to(z) - now[:, index]  # (B, n, T, e)
        begun = torch.zeros_like(now)
        begun[:, index] = torch.stack(amounts, 1).to(z)[..., None, None] * towards
        return z + begun

    return edit


def _shares(count: int, most: int) -> Iterator[range]:
    """`count` heads in as few even shares as `most` at a time allow."""
    parts = -(-count // max(1, most))
    for part in range(parts):
        yield range(part * count // parts, (part + 1) * count // parts)


@dataclass(frozen=True)
class SweepCost:
    """Floating-point operations of one text: by the sweep, and by a forward pass of the whole model for every head."""

    sweep: int
    naive: int

    @property
    def ratio(self) -> float:
        """The sweep's share of the naive loop."""
        return self.sweep / self.naive


def sweep_cost(spec: ModelSpec, length: int, rows: int | None = None) -> SweepCost:
    """What ablating every head costs on a text of so many tokens, `rows` of them asked about (None: all).

    Matrix products alone, 2 operations a multiplication, every pair of tokens counted; both sides project only the rows
    asked about onto the vocabulary.

    >>> from headwise.spec import preset
    >>> round(sweep_cost(preset("gpt2"), 256).ratio, 2), round(sweep_cost(preset("gpt2"), 256, rows=1).ratio, 2)
    (0.67, 0.47)
    """
    rows = length if rows is None else rows
    cost = pass_cost(spec, length)
    whole = cost.whole(rows)
    quick = whole  # the walk itself
    for layer, site in enumerate(spec.sites):
        full = len(spec.sites) - 1 - layer  # MLPs over all rows: this one and those behind it, but for the last
        onward = cost.write[layer] + sum(cost.attend[layer + 1 :]) + full * length * cost.mlp
        quick += len(spec.attention_at(site).head_ids) * (onward + rows * (cost.mlp + cost.out))
    return SweepCost(quick, whole * len(spec.addresses))


@dataclass(frozen=True)
class PassCost:
    """Floating-point operations of one text's forward pass: matrix products alone, 2 operations a multiplication."""

    attend: tuple[int, ...]  # for each attention layer: projections, scores and what is gathered by them, W_O
    write: tuple[int, ...]  # W_O alone
    mlp: int  # for one row
    out: int  # for one row
    rows: int  # that pass through MLPs, of all blocks together

    def whole(self, rows: int) -> int:
        """The pass, with so many rows projected onto the vocabulary."""
        return sum(self.attend) + self.rows * self.mlp + rows * self.out


def pass_cost(spec: ModelSpec, length: int, causal: bool = False) -> PassCost:
    """What a forward pass over so many tokens costs; `causal` leaves out pairs of tokens that a decoder's mask hides.

    >>> from headwise.spec import preset
    >>> pass_cost(preset("gpt2"), 1).whole(rows=1) // 2 - 2 * 12 * 768  # but for one pair of tokens: one a weight
    123532032
    """
    D, write, attend = spec.width, [], []
    for site in spec.sites:
        a = spec.attention_at(site)
        heads, channels = len(a.head_ids), a.head_dim + a.value_dim
        hidden = causal and site.stack in ("", "dec") and spec.kind != "encoder"
        pairs = length * (length + 1) // 2 if hidden else length * length
        width = D // a.heads if a.input == "slice" else D
        read = 2 * length * width * (heads * a.head_dim + len(a.kv_ids) * channels)
        write.append(2 * length * heads * a.value_dim * D)
        attend.append(read + 2 * pairs * heads * channels + write[-1])
    mlp = 2 * D * spec.hidden * (3 if spec.activation == "swiglu" else 2)
    out = 2 * D * spec.vocab * (spec.output != "none") + 2 * D * D * (spec.output == "mlm")
    return PassCost(tuple(attend), tuple(write), mlp, out, length * (spec.layers + spec.encoder_layers))
