"""Finding out on a few tokens whether what is derived from a layer is so: z that enters W_O, weights that make q, k and v.

Nothing is taken on a name's word. One call of the model shows what every projection is given and gives, what attention is
called with, and what enters W_O; slopes say which of its numbers came from which. A view of weights that does not fit is
withheld, with the reason, and so is silence where heads meet before W_O.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import named_writers
from headwise.attached.dummy_inputs import samples
from headwise.attached.layer import Layer, bias_of, matrix
from headwise.attached.non_sdpa_hooks import hooks_around
from headwise.errors import HeadwiseError
from headwise.kernels import maps
from headwise.kernels.gradients import gradients_enabled
from headwise.kernels.score_params import Terms, spread

# Ways in which rows of a projection may be shared out among heads, by how many letters it projects.
LAYOUTS = {3: ("apart", "wide", "first"), 1: ("joined", "by head")}
OTHERS = 1e-3  # of what makes a head's q may come from rows of others, by rounding


class LayerTrial:
    """What one layer showed in its first call."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.made: dict[
            nn.Module, tuple[Tensor, Tensor, Tensor]
        ] = {}  # projections: given, gave, what went on as a leaf
        self.qkv: tuple[Tensor, Tensor, Tensor] | None = None
        self.z: Tensor | None = None  # (B, T, H, e), a leaf
        self.entered: Tensor | None = None
        self.terms: Terms | None = None
        self.left: Tensor | None = None  # what the whole layer gave
        self.packed = False  # whether z itself entered a module that is called as one that writes is

    def attention(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, terms: Callable[[], Terms]) -> Tensor:
        """Called for attention; what goes on are the same numbers, with slopes from here."""
        if self.qkv is not None:
            return out
        self.qkv, self.z = (q, k, v), out.detach().requires_grad_()
        try:
            self.terms = terms()
        except HeadwiseError:
            self.terms = None
        return self.z.clone()

    def reads(self, module: nn.Module, given: tuple[Any, ...], made: Any) -> Any:
        """Behind a projection that reads."""
        if module in self.made or not isinstance(made, Tensor) or not given:
            return None
        leaf = made.detach().requires_grad_()
        self.made[module] = given[0].detach(), made.detach(), leaf
        return leaf.clone()

    def enters(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Before the projection that writes."""
        if self.entered is None and self.z is not None and given:
            self.entered = given[0]

    def writes(self, module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        """Behind the projection that writes."""
        if given and given[0] is self.entered and isinstance(made, Tensor):
            self.made[module] = given[0].detach(), made.detach(), made.detach()

    def enters_packed(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Before a module with the name of one that writes, whose weights are not to be seen."""
        if self.z is not None and given and isinstance(given[0], Tensor) and given[0].numel() == self.z.numel():
            self.packed |= torch.equal(given[0].detach().reshape(self.z.shape), self.z.detach())

    def leaves(self, module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        """Behind the whole layer."""
        self.layer.gives = len(made) if isinstance(made, list | tuple) else 0
        made = made[0] if isinstance(made, list | tuple) and made else made
        if self.left is None and self.z is not None and isinstance(made, Tensor):
            self.left = made

    # What follows.

    def conclude(self) -> None:
        """Tell the layer what it is, and what it cannot show."""
        layer = self.layer
        if self.qkv is None or self.z is None:
            _unseen(layer, "it was not reached by the call that was tried")
            return
        layer.passes = self._passes(self.z)
        if layer.found.way != "sdpa" and not self._is_rebuilt(self.z):
            layer.unlike = "maps rebuilt from its queries and keys, times values, are not what it found"
        if layer.found.writes is not None and layer.passes != "coupled":
            layer.withheld |= _said("o", self._unlike(layer.found.writes))
        if layer.found.reads is not None:
            for letter in "qkv":
                self._place(letter)
        if self._sees_farther():
            layer.site.window = None

    def _passes(self, z: Tensor) -> Any:
        if self.layer.found.writes is None:
            return "unknown" if self._is_sum(z) else "untold"
        entered = self.entered
        if entered is None:
            self.layer.withheld["o"] = "what was taken for it is not called with what attention gave"
            return "unknown" if self._is_sum(z) else "untold"
        if entered.numel() != z.numel():
            return "coupled"
        if torch.equal(entered.detach().reshape(z.shape), z.detach()):
            return "plain"
        if not entered.requires_grad:
            return "coupled"
        dice = torch.Generator().manual_seed(0)
        way = (1 + torch.rand(entered.shape, generator=dice)).to(entered)
        (slope,) = torch.autograd.grad(entered, z, way, retain_graph=True, allow_unused=True)
        if slope is None:
            return "coupled"
        gate = slope / way.reshape(z.shape)
        return "gated" if _close(gate * z.detach(), entered.detach().reshape(z.shape)) else "coupled"

    def _is_sum(self, z: Tensor) -> bool:
        """Whether what the layer gives is linear in z, and more than z itself: then a head at 0 is its part taken away."""
        left = self.left
        if left is None or not left.requires_grad:
            return self.packed  # no slopes pass a packed projection
        if left.numel() == z.numel() and torch.equal(left.detach().reshape(z.shape), z.detach()):
            return False  # what becomes of it is decided outside
        dice = torch.Generator().manual_seed(0)
        ways = [torch.randn(x.shape, generator=dice).to(x) for x in (left, z)]
        try:
            (slope,) = torch.autograd.grad(left, z, ways[0], create_graph=True, allow_unused=True)
            if slope is None or not slope.requires_grad:
                return self.packed if slope is None else True
            (bend,) = torch.autograd.grad(slope, z, ways[1], retain_graph=True, allow_unused=True)
        except RuntimeError:  # no slopes there
            return self.packed
        if bend is None:
            return True
        size = torch.finfo(z.dtype).eps ** 0.5 * slope.detach().abs().max()
        return bool(bend.abs().max() * z.detach().abs().max() <= size)

    def _unlike(self, module: nn.Module) -> str:
        """Why the weight of a projection is not what it multiplies by, if it is not."""
        if module not in self.made:
            return "it is not called as a projection is"
        given, made, _ = self.made[module]
        try:
            weight, bias = matrix(module), bias_of(module)
        except HeadwiseError as error:
            return str(error).rstrip(".")
        if weight.device.type == "meta" or given.shape[-1] != weight.shape[1] or made.shape[-1] != weight.shape[0]:
            return "" if weight.device.type == "meta" else "its sizes are others than those of what it multiplies"
        product = given.to(weight.dtype) @ weight.detach().mT
        product = product if bias is None else product + bias.detach()
        return "" if _close(product.to(made.dtype), made) else "what it gives is not its weight times what it is given"

    def _place(self, letter: str) -> None:
        """Find the rows that make a letter, or withhold it."""
        layer = self.layer
        module = layer.found.reader("qkv".index(letter) if len(layer.found.reads[1]) == 3 else 0)  # pyright: ignore
        why = self._unlike(module)
        if not why:
            fits = [layout for layout in self._layouts() if self._fits(letter, layout, module)]
            if fits:
                layer.layouts[letter] = fits[0]
                return
            what = (
                "values are not what it gives"
                if letter == "v"
                else f"{letter} of a head does not come from rows of its own"
            )
            why = f"{what} in {type(layer.module).__name__}"
        layer.withheld[letter] = why

    def _layouts(self) -> list[str]:
        named, names = self.layer.found.reads or ("", ())
        return sorted(LAYOUTS[3 if len(names) == 3 else 1], key=lambda layout: layout != named)

    def _fits(self, letter: str, layout: str, module: nn.Module) -> bool:
        """Whether heads' numbers come from the rows that a layout gives them: asked of the first two and the last."""
        assert self.qkv is not None
        _, made, leaf = self.made[module]
        recorded, rows = self.qkv["qkv".index(letter)], torch.arange(made.shape[-1])
        try:
            places = self.layer.read.shared_out(letter, rows, layout)  # (heads, channels): rows by number
        except RuntimeError:
            return False
        if recorded.ndim != 4 or recorded.shape[1] % len(places) or recorded.shape[-1] != places.shape[1]:
            return False
        each = recorded.shape[1] // len(places)  # keys may have been spread to all heads of their group
        for head in sorted({0, min(1, len(places) - 1), len(places) - 1}):
            own = recorded[:, head * each]  # (B, T, d)
            if letter == "v":
                there = made[..., places[head].to(made.device)]
                if there.numel() != own.numel() or not _close(there.reshape(own.shape), own.detach()):
                    return False
                continue
            if not own.requires_grad:
                return False
            dice = torch.Generator().manual_seed(head)
            way = torch.randn(own.shape, generator=dice).to(own)
            along = own.detach()  # other heads may scale it, as an RMS norm over all of them does, but not turn it
            size = along.square().sum(-1, keepdim=True)
            way = way - along * (way * along).sum(-1, keepdim=True) / size.where(size > 0, 1.0)
            (slope,) = torch.autograd.grad(own, leaf, way, retain_graph=True, allow_unused=True)
            if slope is None:
                return False
            energy = slope.double().square().flatten(0, -2).sum(0).cpu()  # (rows,)
            if energy[places[head]].sum() <= (1 - OTHERS) * energy.sum():
                return False
        return True

    def _is_rebuilt(self, z: Tensor) -> bool:
        """Whether maps made of what was seen, times values, are what attention found."""
        if self.terms is None or self.qkv is None:
            return False
        q, k, v = (x.detach() for x in self.qkv)
        weights = maps(q, k, self.terms)  # (B, H, T, S)
        self.layer.looks_ahead = bool((weights.triu(1) > 0).any())
        found = (weights.to(v.dtype) @ spread(v, self.terms.groups)).transpose(1, 2)  # (B, T, H, e)
        half = z.dtype in (torch.float16, torch.bfloat16)
        return (
            _close(found, z.detach()) if half else _close(found.float(), z.detach().float())
        )  # softmax may be in float32

    def _sees_farther(self) -> bool:
        """Whether a query was seen to look farther than the window says."""
        window = self.layer.site.window
        if window is None or self.terms is None or self.qkv is None:
            return False
        q, k = (x.detach() for x in self.qkv[:2])
        T, S = q.shape[2], k.shape[2]
        away = (torch.arange(T)[:, None] + (S - T) - torch.arange(S)).abs() >= window  # (T, S)
        return bool((maps(q, k, self.terms)[..., away.to(q.device)] > 0).any())


@gradients_enabled()
def try_layers(model: Any, layers: Sequence[Layer]) -> None:
    """Call the model once, as it is outside of training, and tell each layer what was found out."""
    was = [(module, module.training) for module in model.modules()]
    trials = [LayerTrial(layer) for layer in layers if layer.spec.head_ids]
    why, first = "what it reads is not known here", ""
    around = [hook for layer in layers for hook in hooks_around(layer)]
    try:
        for module, _ in was:
            module.training = False
        for given in samples(model):
            trials = [LayerTrial(layer) for layer in layers if layer.spec.head_ids]
            why = _call(model, given, trials)
            if not why:
                break
            first = first or why  # said to what the model itself says it reads
    finally:
        for module, training in was:
            module.training = training
        for hook in around:
            hook.remove()
    for trial in trials:
        if why:
            _unseen(trial.layer, f"no call could be tried to check it ({first or why})")
        else:
            trial.conclude()


def check_rebuilt(layers: Sequence[Layer]) -> None:
    """Refuse attention that is not SDPA's where what is rebuilt of it is not what it computed."""
    for layer in layers:
        if layer.unlike:
            raise HeadwiseError(
                f"{layer.found.name} is not on SDPA, and {layer.unlike}; it was refused rather than shown wrongly."
            )


def _call(model: Any, given: dict[str, Tensor], trials: list[LayerTrial]) -> str:
    """One call; gives why it failed, if it did."""
    with ExitStack() as watching, torch.random.fork_rng():
        for trial in trials:
            found = trial.layer.found
            for number in range(0 if found.reads is None else len(found.reads[1])):
                watching.callback(found.reader(number).register_forward_hook(trial.reads).remove)
            if found.writes is not None:
                watching.callback(found.writes.register_forward_pre_hook(trial.enters).remove)
                watching.callback(found.writes.register_forward_hook(trial.writes).remove)
            else:
                for part in named_writers(found):
                    watching.callback(part.register_forward_pre_hook(trial.enters_packed).remove)
            watching.callback(trial.layer.module.register_forward_hook(trial.leaves).remove)
            trial.layer.trial = trial
            watching.callback(setattr, trial.layer, "trial", None)
        try:
            model(**given)
        except Exception as error:  # whatever somebody else's model says to inputs that were guessed
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def _unseen(layer: Layer, why: str) -> None:
    layer.passes = "unseen" if layer.found.writes is not None else "untold"
    layer.withheld = dict.fromkeys("qkvo", why)
    layer.unlike = "" if layer.found.way == "sdpa" else why


def _said(letter: str, why: str) -> dict[str, str]:
    return {letter: why} if why else {}


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether numbers are the same but for rounding on the way, beside the largest."""
    if not bool(other.isfinite().all()):
        return False
    far = (one.double() - other.double()).abs().max()
    return bool(far <= torch.finfo(other.dtype).eps ** 0.5 * other.double().abs().max())
