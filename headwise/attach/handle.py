"""`attach`: the heads of a transformers model, with the same numbers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.attach.body import Output, hidden_states, takes_ids
from headwise.attach.check import check_model, configs_of, guard
from headwise.attach.describe import describe, has_output
from headwise.attach.find import find
from headwise.attach.interface import MARK, NAME, register
from headwise.attach.layer import Layer
from headwise.attach.masks import Masks
from headwise.attach.tokens import wrap_tokenizer
from headwise.errors import HeadwiseError
from headwise.heads import Heads, Site
from headwise.spec import ModelSpec, SiteAddress
from headwise.text import Tokenizer


def attach(model: Any, tokenizer: Any = None) -> "Attached":
    """The heads of a transformers model: a handle that everything here takes; the model computes what it always did.

    `tokenizer` is theirs, or one of ours, for what reads text. The handle is a context manager; `.detach()` ends it.
    """
    check_model(model)
    layers = [Layer(found, masks) for masks in [Masks()] for found in find(model)]
    if not layers:
        raise HeadwiseError(
            f"{type(model).__name__} has no attention on transformers' attention interface, so there is nothing to attach to."
        )
    return Attached(model, layers, wrap_tokenizer(tokenizer))


class Attached(nn.Module):
    """A transformers model with its heads: `.heads`, `.sites()`, and the calls that looking and changing make."""

    def __init__(self, model: Any, layers: list[Layer], tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.family: str | None = getattr(model.config, "model_type", None)
        self._layers = layers
        self._spec: ModelSpec | None = None
        register()
        self._before = {id(config): (config, config._attn_implementation_internal) for config in configs_of(model)}
        for config, _ in self._before.values():
            config._attn_implementation_internal = NAME
        self._hooks = guard(model, self.sites)
        for layer in layers:
            layer.module.__dict__[MARK] = layer
        self.attached = True

    def forward(
        self,
        ids: Tensor,
        *,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        gates: Mapping[str, float | Tensor] | Mapping[SiteAddress, Tensor] | None = None,
        hidden: bool = False,
    ) -> Tensor:
        """Token ids (B, T) → logits (B, T, V), or hidden states (B, T, D), as our own models do it.

        `padding` (B, T) is True at real tokens, left or right; `source` is what an encoder-decoder reads. For all else call
        the model itself: it stays attached.
        """
        self._check_attached()
        takes_ids(self.model, ids, padding)
        with ExitStack() as stack:
            for site, gate in self._gates(gates).items():
                stack.enter_context(site.scaled(gate))
            return hidden_states(
                self.model, self.spec, ids, padding, source, source_padding, hidden or self.output is None
            )

    # Heads.

    @property
    def heads(self) -> Heads:
        """Every head, by address: theirs.heads["5.1"]."""
        return Heads(self._layers)

    def sites(self) -> list[Site]:
        """Every place where attention happens, in the order data walks through them."""
        return [layer.site for layer in self._layers]

    def attention_layers(self) -> list[Layer]:
        """The attention layers, encoder first."""
        return list(self._layers)

    # What it is.

    @property
    def spec(self) -> ModelSpec:
        """The model as far as those who look at it ask."""
        if self._spec is None:
            self._spec = describe(self.model, self._layers)
        return self._spec

    @property
    def output(self) -> Callable[[Tensor], Tensor] | None:
        """From final hidden states to logits, as the model does it; None where it gives no logits of a vocabulary."""
        return Output(self.model) if has_output(self.model) else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def training(self) -> bool:
        """Whether the model is in training mode: theirs decides."""
        model = self.__dict__.get("_modules", {}).get("model")
        return False if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass  # `train` passes the mode on to the model, which keeps it

    def generate(self, *arguments: Any, **more: Any) -> Any:
        """The model's own `generate`."""
        return self.model.generate(*arguments, **more)

    # Leaving.

    def detach(self) -> Any:
        """Leave the model exactly as it was, and give it back."""
        self._check_attached()
        for layer in self._layers:
            layer.module.__dict__.pop(MARK, None)
        for config, before in self._before.values():
            config._attn_implementation_internal = before
        for hook in self._hooks:
            hook.remove()
        self.attached = False
        return self.model

    def __enter__(self) -> Self:
        self._check_attached()
        return self

    def __exit__(self, *_: object) -> None:
        if self.attached:
            self.detach()

    def _check_attached(self) -> None:
        if not self.attached:
            raise HeadwiseError("this handle was detached already; attach the model again: hw.attach(model).")

    def _gates(self, gates: Mapping[Any, Any] | None) -> dict[Site, Tensor]:
        """Gates by pattern or by layer become one gate per site, (H,) or (B, H)."""
        sites = {site.address: site for site in self.sites()}
        made: dict[Site, Tensor] = {}
        for key, amount in (gates or {}).items():
            new = (
                {key: torch.as_tensor(amount)} if isinstance(key, SiteAddress) else self.heads.select(key).gates(amount)
            )
            for address, gate in new.items():
                if address not in sites:
                    raise HeadwiseError(f"gates name layer {address}; the model has {', '.join(map(str, sites))}.")
                site = sites[address]
                made[site] = made[site] * gate if site in made else gate
        return made
