"""What can be attached to, and what is refused with its reason; and the guards that stand at the model's door meanwhile."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.attach.find import find
from headwise.attach.interface import MARK, NAME
from headwise.errors import HeadwiseError
from headwise.heads.site import Site, edits_now, repeated

OURS = ("gpt2", "gpt_neo", "bert", "llama", "mistral", "qwen2")  # families that our own loader maps


def check_model(model: Any) -> None:
    """Refuse what cannot be attached to, before anything is touched."""
    try:
        import transformers
    except ImportError:
        raise HeadwiseError("to attach to a model transformers 5 is needed; pip install 'headwise[attach]'.") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise HeadwiseError(
            f"transformers {transformers.__version__} is installed; attaching needs 5 or newer: pip install -U transformers."
        )
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel):
        raise HeadwiseError(f"attach takes a transformers model; got {name}. Our own models have .heads as they are.")
    if any(MARK in part.__dict__ for part in model.modules()):
        raise HeadwiseError(f"this {name} is attached already; use the handle you have, or detach it first.")
    kind = getattr(model.config, "model_type", "")
    if not find(model):
        instead = f" Our own loader reads this family: hw.load(folder)." if kind in OURS else ""  # noqa: F541
        raise HeadwiseError(
            f"{name} is not on transformers' attention interface: its attention cannot be reached from outside.{instead}"
        )
    for part in {id(module): module for module in (one.module for one in find(model))}.values():
        _check_sums(name, part)
    for config in configs_of(model):
        _check_backend(name, config._attn_implementation)


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration that says which attention runs: the model's, its parts', and those inside them."""
    found: dict[int, Any] = {}
    for module in model.modules():
        found |= {id(config): config for config in inside_config(getattr(module, "config", None))}
    return list(found.values())


def inside_config(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    if not hasattr(config, "_attn_implementation_internal"):
        return []
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(one for part in inner for one in inside_config(part))]


def own_config(model: Any) -> Any:
    """A copy of a model's configuration, to build another one that runs on SDPA."""
    config = copy.deepcopy(model.config)
    for inner in inside_config(config):
        inner._attn_implementation_internal = "sdpa"
    return config


def _check_sums(name: str, module: nn.Module) -> None:
    """What a module adds to its scores that SDPA knows nothing of."""
    if isinstance(getattr(module, "sinks", None), torch.Tensor):
        raise HeadwiseError(
            f"{name} has learned sinks, which plain scaled-dot-product attention would drop; it was refused."
        )
    if getattr(module, "attn_logit_softcapping", None) is not None:
        raise HeadwiseError(f"{name} caps its scores, which plain scaled-dot-product attention cannot; it was refused.")


def _check_backend(name: str, backend: str | None) -> None:
    if backend == "sdpa":
        return
    if backend == NAME:
        raise HeadwiseError(
            f"the configuration of this {name} belongs to another model that is attached; detach that one first, or give "
            f"each model a configuration of its own."
        )
    if backend == "eager":
        raise HeadwiseError(
            f"{name} runs on the eager path; attaching keeps a model's numbers, and ours are SDPA's. Load it with "
            f'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa"), if it can.'
        )
    raise HeadwiseError(
        f'{name} runs on the attention {backend!r}; call model.set_attn_implementation("sdpa") first, then attach.'
    )


def guard(model: nn.Module, sites: Callable[[], list[Site]]) -> list[Any]:
    """Hooks before every call of the model and of its parts that can be called alone; each has `.remove()`."""
    from transformers import PreTrainedModel

    entered = partial(_enter, sites=sites)
    doors = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [door.register_forward_pre_hook(entered, with_kwargs=True) for door in doors]


def _enter(model: nn.Module, arguments: Any, kwargs: dict[str, Any], sites: Callable[[], list[Site]]) -> None:
    config: Any = model.config
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise HeadwiseError(
            "output_attentions=True asks for every map at once, which the fused path never makes; look at heads with "
            "hw.attend or hw.record, or detach first."
        )
    if model.training and torch.is_grad_enabled() and any(site.is_open for site in sites()):
        for layer in _checkpointed(model):
            layer._gradient_checkpointing_func = _remembering(layer._gradient_checkpointing_func, sites)


def _checkpointed(model: nn.Module) -> Iterator[Any]:
    for layer in model.modules():
        run = layer.__dict__.get("_gradient_checkpointing_func")
        if run is not None and getattr(run, "func", None) is not _run_and_repeat:
            yield layer


def _remembering(run: Callable[..., Any], sites: Callable[[], list[Site]]) -> Callable[..., Any]:
    return partial(_run_and_repeat, run, sites)


def _run_and_repeat(
    run: Callable[..., Any], sites: Callable[[], list[Site]], block: Callable[..., Any], *arguments: Any
) -> Any:
    """A checkpointed block is run again in the backward pass: with the edits of the first time, and unheard."""
    edits, times = edits_now(sites()), iter(range(2**62))

    def either(*again: Any) -> Any:
        if next(times) == 0:
            return block(*again)
        with repeated(edits):
            return block(*again)

    return run(either, *arguments)
