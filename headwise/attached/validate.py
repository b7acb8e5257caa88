"""What can be attached to, and what is refused with its reason; and the guards that stand at the model's door meanwhile."""

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from headwise.attached.discover import FoundAttention, check_sums, config_of, find
from headwise.attached.hooks import Hook
from headwise.attached.interface import NAME, is_replaced
from headwise.attached.layer import Layer, layer_of
from headwise.attached.non_sdpa_hooks import brings_eager
from headwise.attached.offload import is_offloaded
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HOOKS, repeated

OURS = ("gpt2", "gpt_neo", "bert", "llama", "mistral", "qwen2")  # families that our own loader maps


def check_theirs(model: Any) -> None:
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
        base = getattr(model, "get_base_model", None)
        if callable(base) and isinstance(base(), transformers.PreTrainedModel):
            raise HeadwiseError(f"{name} holds a model with adapters; attach that: hw.attach(model.get_base_model()).")
        raise HeadwiseError(f"attach takes a transformers model; got {name}. Our own models have .heads as they are.")
    for path, part in model.named_modules():
        if layer_of(part) is not None:
            raise HeadwiseError(
                f"{path} of this {name} is attached already, through the handle of another model that holds it. Use that "
                f"handle, or detach it first."
            )
    if any(weight.device.type == "meta" for weight in model.parameters()) and not is_offloaded(model):
        raise HeadwiseError(
            f"{name} has weights on the meta device, which have no values. Load the model with its weights."
        )
    kind = getattr(model.config, "model_type", "")
    if not find(model):
        instead = f" Our own loader reads this family: hw.load(folder)." if kind in OURS else ""  # noqa: F541
        raise HeadwiseError(
            f"{name} is not on transformers' attention interface: its attention cannot be reached from outside.{instead}"
        )
    for one in find(model):
        check_sums(name, one)
        if one.kept == ():
            continue  # it has no heads, and runs no attention
        if one.way == "sdpa" or (one.way == "eager" and _could_be_fused(model, one)):
            _check_backend(name, config_of(model, one.module)._attn_implementation)
    if is_replaced():
        raise HeadwiseError(
            f"somebody has registered a function of their own as {NAME!r}; attaching keeps a model's numbers, and ours are "
            f"those of transformers' SDPA."
        )


def _could_be_fused(model: Any, found: FoundAttention) -> bool:
    """Whether a module on the eager path could run on SDPA, or brings no eager function of its own."""
    from transformers import PreTrainedModel

    names = found.name.split(".")
    holders = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
    holder = next(part for part in reversed(holders) if isinstance(part, PreTrainedModel))
    return bool(holder._supports_sdpa) or not brings_eager(type(found.module))


def inside_config(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    if not hasattr(config, "_attn_implementation_internal"):
        return []
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(one for part in inner for one in inside_config(part))]


def own_config(model: Any) -> Any:
    """A copy of a model's configuration, to build another one that runs on the same attention."""
    config = copy.deepcopy(model.config)
    for inner, was in zip(inside_config(config), inside_config(model.config), strict=True):
        inner._attn_implementation_internal = was._attn_implementation
    return config


def _check_backend(name: str, backend: str | None) -> None:
    if backend == NAME:
        return
    if backend == "eager":
        raise HeadwiseError(
            f"{name} runs on the eager path; attaching keeps a model's numbers, and ours are SDPA's. Load it with "
            f'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa"), if it can.'
        )
    raise HeadwiseError(
        f'{name} runs on the attention {backend!r}; call model.set_attn_implementation("sdpa") first, then attach.'
    )


class CallGuard:
    """Stands at the doors of an attached model: the model itself, and those parts of it that can be called alone."""

    def __init__(self, model: Any, layers: Sequence[Layer]) -> None:
        self._model = model
        run = [layer for layer in layers if layer.spec.head_ids and layer.found.way != "watched"]
        there = [(config_of(model, layer.module), layer.found.way) for layer in run]
        self._configs = list({id(config): (config, way) for config, way in there}.values())
        self._wrapped: list[tuple[Any, Any]] = []  # blocks, and how they are checkpointed when we are not there
        self._lock, self._calls = threading.Lock(), 0  # of all threads, for which blocks are wrapped
        self._entered = threading.local()  # `outermost`: the part whose call is the outermost wrapped one of a thread

    def hooks(self) -> list[Any]:
        """Before and behind every call; each has `.remove()`."""
        from transformers import PreTrainedModel

        doors = [part for part in self._model.modules() if isinstance(part, PreTrainedModel)]
        before = [door.register_forward_pre_hook(Hook(self._enter), with_kwargs=True) for door in doors]
        return before + [door.register_forward_hook(Hook(self._leave), always_call=True) for door in doors]

    def _enter(self, door: nn.Module, arguments: Any, kwargs: dict[str, Any]) -> None:
        config: Any = door.config
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise HeadwiseError(
                "output_attentions=True asks for every map at once, which the fused path never makes; look at heads with "
                "hw.attend or hw.record, or detach first."
            )
        for one, way in self._configs:
            if one._attn_implementation != way:
                raise HeadwiseError(
                    f"{type(self._model).__name__} was attached while it ran on {way!r} and runs on "
                    f"{one._attn_implementation!r} now, where heads can be neither seen nor silenced; detach it first, or "
                    f'call model.set_attn_implementation("{way}").'
                )
        if HOOKS.now is not HOOKS and door.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._wrap(door)

    def _wrap(self, door: nn.Module) -> None:
        """For the calls that run now, blocks that are checkpointed remember with which edits they were run."""
        if getattr(self._entered, "outermost", None) is not None:
            return
        blocks = [block for block in self._model.modules() if "_gradient_checkpointing_func" in block.__dict__]
        if not blocks:
            return
        self._entered.outermost = door
        with self._lock:
            self._calls += 1
            for block in blocks if self._calls == 1 else ():
                run: Any = block._gradient_checkpointing_func
                self._wrapped.append((block, run))
                block._gradient_checkpointing_func = partial(_run_and_repeat, run)

    def _leave(self, door: nn.Module, arguments: Any, made: Any) -> None:
        if torch.compiler.is_compiling() or door is not getattr(self._entered, "outermost", None):
            return
        self._entered.outermost = None
        with self._lock:
            self._calls -= 1
            if self._calls == 0:
                for block, run in self._wrapped:
                    block._gradient_checkpointing_func = run
                self._wrapped = []


def _run_and_repeat(run: Callable[..., Any], block: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """A checkpointed block is run again in the backward pass: with the edits of the first time, and unheard."""
    hooks, times = HOOKS.now, count()

    def either(*again: Any, **more: Any) -> Any:
        if next(times) == 0:
            return block(*again, **more)
        with repeated(hooks):
            return block(*again, **more)

    return run(either, *arguments, **named)
