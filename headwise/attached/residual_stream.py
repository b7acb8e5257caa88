"""How the stream of somebody else's decoder is put together: seen on a few tokens, and checked there number by number.

Nothing here knows an architecture. One pass shows what every module is given and what it gives; who adds to the stream, and
through which norms, follows from whose numbers are whose. What does not add up is refused, so that no share is ever wrong.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.forward import OutputHead
from headwise.attached.layer import Layer
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.model.residual_stream import Norm, Step, Wiring

TEXTS, TOKENS = 2, 6  # what is looked at to find out
LOUD = 128.0  # linear logits are as many times larger where states are; a power of two, so that nothing is rounded


@torch.no_grad()
def find_wiring(model: Any, layers: Sequence[Layer]) -> Wiring:
    """The wiring of a decoder with a language-model output, not in training mode; refused, with the reason, where it is not
    a sum that ends in one norm and a linear output."""
    seen = _Pass(model, layers)
    blocks = [block_of(model, layer) for layer in layers]
    steps = {}
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        if block not in seen.given or block not in seen.made:
            raise _refused(model, f"{layer.found.name} is in no block that is called once and passes the stream on")
        if i and not torch.equal(seen.made[blocks[i - 1]], seen.given[block]):
            raise _refused(model, f"something other than attention layers stands before layer {layer.site.address}")
        steps[layer.site.address.layer] = _step(model, seen, layer, block)
    norm = _last_norm(model, seen, blocks[-1])
    vocabulary = model.get_output_embeddings()
    scale = _scale(model, seen, vocabulary)
    return Wiring(blocks[0], steps, norm, vocabulary, _embed(model, seen, blocks[0]), scale)


class _Pass:
    """What modules were given and gave in one pass, as (B, T, D); those that are run more than once are left out."""

    def __init__(self, model: Any, layers: Sequence[Layer]) -> None:
        self.given: dict[nn.Module, Tensor] = {}
        self.made: dict[nn.Module, Tensor] = {}
        self.calls: dict[Any, Seen] = {}
        table = model.get_input_embeddings().weight
        dice = torch.Generator().manual_seed(0)
        self.ids = torch.randint(len(table), (TEXTS, TOKENS), generator=dice).to(table.device)
        with ExitStack() as watching:
            for layer in layers:
                watching.enter_context(layer.site.listen(self._hear))
            for part in model.modules():
                watching.callback(part.register_forward_pre_hook(self._keep_given, with_kwargs=True).remove)
                watching.callback(part.register_forward_hook(self._keep_made).remove)
            made = model(input_ids=self.ids, use_cache=False)
        self.logits = made.logits.double().cpu()  # (B, T, V)
        self.rounding = torch.finfo(made.logits.dtype).eps ** 0.5

    def close(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors in float64 are the same but for rounding on the way, beside their largest number."""
        if one.shape != other.shape:
            return False
        return bool((one - other).abs().max() <= self.rounding * other.abs().max())

    def inside(self, block: nn.Module, given: Tensor) -> list[nn.Module]:
        """The modules of a block that were given these numbers and have given others of that shape."""
        return [part for part in block.modules() if part in self.made and _same(self.given.get(part), given)]

    def _hear(self, seen: Seen) -> None:
        self.calls[seen.site] = seen

    def _keep_given(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._keep(self.given, module, given[0] if given else named.get("hidden_states"))

    def _keep_made(self, module: nn.Module, given: Any, made: Any) -> None:
        self._keep(self.made, module, made[0] if isinstance(made, tuple) else made)

    def _keep(self, kept: dict[nn.Module, Tensor], module: nn.Module, states: Any) -> None:
        if isinstance(states, Tensor) and states.is_floating_point() and states.numel() % self.ids.numel() == 0:
            again = module in kept
            kept[module] = states.detach().reshape(*self.ids.shape, -1).clone().cpu()  # (B, T, D)
            if again:
                kept[module].fill_(float("nan"))  # equal to nothing


def block_of(model: nn.Module, layer: Layer) -> nn.Module:
    """The part of a model that is one layer: as far as the number in its name."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", layer.found.name)
    return layer.found.parent if found is None else model.get_submodule(found[0])


def _step(model: Any, seen: _Pass, layer: Layer, block: nn.Module) -> Step:
    """What a layer reads through, and adds."""
    found, here = layer.found, f"layer {layer.site.address}"
    if found.writes is None:
        raise _refused(model, f"which part of {found.name} writes is not known")
    wrote = seen.made.get(found.writes if layer.spec.head_ids else found.module)
    if wrote is None or not seen.close(_sum_of_heads(seen, layer), wrote.double()):
        raise _refused(model, f"what attention in {here} gives is not the sum of what its heads write and a bias")
    after = next(
        (norm for part in seen.inside(block, wrote) if (norm := Norm.tried(part, layer.spec.width)) is not None), None
    )
    added = wrote if after is None else seen.made[after.module]
    attention = {block, *found.module.modules(), None if after is None else after.module}
    for part in block.modules():
        other = None if part in attention else seen.made.get(part)
        if other is not None and _adds_up(seen.made[block], seen.given[block], added, other):
            norm, unread = _reads(seen, layer, block)
            return Step(norm, after, part, unread)
    raise _refused(
        model,
        f"{here} does not add to the stream just what its attention and one other part wrote: a norm or a factor stands in "
        f"between",
    )


def _sum_of_heads(seen: _Pass, layer: Layer) -> Tensor:
    """Σ z W_O + b_O: (B, T, D)."""
    bias = 0.0 if layer.b_O is None else layer.b_O.double().cpu()
    if not layer.spec.head_ids:
        return torch.zeros(*seen.ids.shape, layer.spec.width, dtype=torch.double) + bias
    if layer.site not in seen.calls:
        return torch.full((1,), float("nan"))
    z, W_O = seen.calls[layer.site].z.double().cpu(), layer.site.W_O.double().cpu()
    return torch.einsum("bhte,hed->btd", z, W_O) + bias


def _reads(seen: _Pass, layer: Layer, block: nn.Module) -> tuple[nn.Module | None, str]:
    """The norm that heads read the stream through; and why what they bring does not follow from the stream, if so."""
    if not layer.spec.head_ids:
        return None, ""
    stream, read = seen.given[block], seen.given.get(layer.module)
    if read is None:
        return None, f"what {layer.found.name} reads cannot be seen."
    through = [part for part in seen.inside(block, stream) if _same(seen.made[part], read) and part is not block]
    if not through and not _same(stream, read):
        return None, f"between the stream and {layer.found.name} stands more than a norm."
    if layer.found.reads is not None:
        W_V, b_V = layer.read.weight("v").double().cpu(), layer.read.bias("v")  # (K, e, D)
        v = torch.einsum("btd,ked->bkte", read.double(), W_V)  # (B, K, T, e)
        v = v if b_V is None else v + b_V.double().cpu()[:, None]
        if not seen.close(v, seen.calls[layer.site].v.double().cpu()):
            return None, f"the values of {layer.found.name} are not what W_V makes of what is read."
    return (through[0] if through else None), ""


def _last_norm(model: Any, seen: _Pass, last: nn.Module) -> Norm:
    """What stands between the last layer and the output."""
    wrote, read = seen.made[last], seen.given.get(model.get_output_embeddings())
    for part in seen.inside(model, wrote):
        if _same(seen.made[part], read) and (norm := Norm.tried(part, wrote.shape[-1])) is not None:
            return norm
    raise _refused(model, "between its last layer and its output stands something other than one LayerNorm or RMSNorm")


def _scale(model: Any, seen: _Pass, vocabulary: Any) -> float:
    """What logits are multiplied by behind the output layer; refused if that is not all that happens to them."""
    states, weight = seen.given[vocabulary], vocabulary.weight  # (B, T, D), (V, D)
    bias = 0.0 if getattr(vocabulary, "bias", None) is None else vocabulary.bias.double().cpu()
    words = (states.to(weight) @ weight.mT).double().cpu()  # (B, T, V)
    raw, large = words + bias, words * LOUD + bias
    scale = 1.0 if seen.close(raw, seen.logits) else float((raw * seen.logits).sum() / raw.square().sum())
    loud = OutputHead(model)((states * LOUD).to(weight.device)).double().cpu()  # (B, T, V)
    if not seen.close(raw * scale, seen.logits) or not seen.close(large * scale, loud):
        raise _refused(model, "its logits are not linear in what its output layer reads; they may be capped")
    return scale


def _embed(model: Any, seen: _Pass, first: nn.Module) -> nn.Module | None:
    """The table of tokens, if the stream begins with its rows and something that does not depend on which they are."""
    table, begins = model.get_input_embeddings(), seen.given[first].double()  # (B, T, D)
    rows = table(seen.ids).double().cpu()  # (B, T, D)
    return table if rows.shape == begins.shape and seen.close(rows[0] - rows[1], begins[0] - begins[1]) else None


def _adds_up(total: Tensor, *parts: Tensor) -> bool:
    """Whether a sum is one, each number up to the rounding of its own parts: (B, T, D) each."""
    if any(part.shape != total.shape for part in parts):
        return False
    size = sum(part.double().abs() for part in parts)
    far = (total.double() - sum(part.double() for part in parts)).abs()
    return bool((far <= 8 * torch.finfo(total.dtype).eps * size).all())


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


def _refused(model: Any, why: str) -> HeadwiseError:
    return HeadwiseError(
        f"what parts of {type(model).__name__} add to its logits cannot be told apart: {why}; silence heads instead: "
        f"theirs.heads[…].silenced()."
    )
