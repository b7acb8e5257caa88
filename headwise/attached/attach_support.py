"""Checks whether a model can be attached, and forward hooks that guard an attached model."""

import copy
import re
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.attached.cache_step import has_pending_cache_step, set_cache_step
from headwise.attached.discover import AttentionModuleInfo, check_no_sinks_or_softcap, config_of, find_attention_modules
from headwise.attached.hooked_sdpa import SDPA_NAME, has_third_party_sdpa
from headwise.attached.layer import AttachedLayer, layer_of
from headwise.attached.non_sdpa_hooks import has_eager_function
from headwise.attached.offload import is_offloaded
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import ArgumentError, MissingDependencyError, UnsupportedModelError
from headwise.heads.hook_point import HOOKS, replaying

MIN_TRANSFORMERS, BEFORE_TRANSFORMERS = (5, 22), (6, 0)  # supported versions: at least, and less than
NATIVE_FAMILIES = ("gpt2", "gpt_neo", "bert", "llama", "mistral", "qwen2")  # families that hw.load supports natively


# Why heads of other attention implementations cannot be accessed.
_FLASH = ": its kernel works on unpadded tokens, so heads would have to be assigned to texts again"
BACKEND_NOTES = {
    "flash_attention_2": _FLASH, "flash_attention_3": _FLASH,
    "flex_attention": ": it replaces masks by functions that are compiled into the kernel",
}  # fmt: skip


def is_transformers_model(model: object) -> bool:
    """Return whether an object is a transformers model. Does not import transformers."""
    return isinstance(model, getattr(sys.modules.get("transformers"), "PreTrainedModel", ()))


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model with adapters inside a `PeftModel`, or the model itself."""
    base = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else None
    if not is_transformers_model(inner):
        return model
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} puts learned tokens in front of the input of its base model, which functions of "
            f"Headwise would leave out. Attach the base model, hw.attach(model.get_base_model()), and call your model inside "
            f"hw.record or .silenced()."
        )
    return inner


def _check_transformers_version(version: str) -> None:
    """Raise an error if a version of transformers is not supported."""
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    if not MIN_TRANSFORMERS <= numbers < BEFORE_TRANSFORMERS:
        lowest, below = (".".join(map(str, bound)) for bound in (MIN_TRANSFORMERS, BEFORE_TRANSFORMERS))
        raise MissingDependencyError(
            f"transformers {version} is installed, but attaching requires at least {lowest} and less than {below}, because "
            f"its attention interface may differ. Run: pip install 'transformers>={lowest},<{below}'"
        )


def check_supported(model: Any) -> None:
    """Raise an error if the model cannot be attached, before anything is changed."""
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            "transformers 5 or newer is required to attach to a model. Run: pip install 'headwise[attach]'"
        ) from None
    _check_transformers_version(transformers.__version__)
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel):
        advice = "Headwise's own models have .heads without attaching."
        if isinstance(model, str | Path):
            name, advice = repr(str(model)), "Use hw.load(folder), or from_pretrained of transformers first."
        elif isinstance(model, type):
            name, advice = (
                f"the class {model.__name__}",
                f"Make a model first, with {model.__name__}.from_pretrained(…).",
            )
        elif not getattr(model, "is_native", True):
            advice = "It is attached already and has .heads."
        raise ArgumentError(f"model: must be a transformers model or a torch module. Got {name}. {advice}")
    for path, module in model.named_modules():
        if layer_of(module) is not None:
            raise ArgumentError(
                f"model: {path} of this {name} is already attached, through the handle of another model. Use the "
                f"handle of that model, or detach that model first."
            )
    if any(weight.device.type == "meta" for weight in model.parameters()) and not is_offloaded(model):
        raise ArgumentError(
            f"model: {name} has weights on the meta device, which have no values. Load the model with its weights."
        )
    model_type = getattr(model.config, "model_type", "")
    if not find_attention_modules(model):
        hint = " Headwise can load this model family itself: hw.load(folder)." if model_type in NATIVE_FAMILIES else ""
        raise UnsupportedModelError(
            f"model: {name} cannot be attached because it does not use transformers' attention interface.{hint}"
        )
    for info in find_attention_modules(model):
        check_no_sinks_or_softcap(name, info)
        if info.kept_heads == ():
            continue  # a layer without heads runs no attention
        if info.backend == "sdpa" or (info.backend == "eager" and _could_be_fused(model, info)):
            _check_backend(name, config_of(model, info.module)._attn_implementation)
    if has_third_party_sdpa():
        raise UnsupportedModelError(
            f"another library has replaced transformers' attention function {SDPA_NAME!r}. Attaching requires the original "
            f"function, so that the model's outputs stay the same. Restore it before attaching."
        )


def _could_be_fused(model: Any, info: AttentionModuleInfo) -> bool:
    """Return whether a module on the eager path could run on SDPA, or has no eager function of its own."""
    from transformers import PreTrainedModel

    names = info.name.split(".")
    holders = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
    holder = next(module for module in reversed(holders) if isinstance(module, PreTrainedModel))
    return bool(holder._supports_sdpa) or not has_eager_function(type(info.module))


def nested_configs(config: Any) -> list[Any]:
    """Return a configuration and its sub-configurations."""
    if not hasattr(config, "_attn_implementation_internal"):
        return []
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(nested for subconfig in inner for nested in nested_configs(subconfig))]


def copy_config(model: Any) -> Any:
    """Return a copy of a model's configuration that selects the same attention implementation."""
    config = copy.deepcopy(model.config)
    for inner, original in zip(nested_configs(config), nested_configs(model.config), strict=True):
        inner._attn_implementation_internal = original._attn_implementation
    return config


def _check_backend(name: str, backend: str | None) -> None:
    if backend == SDPA_NAME:
        return
    if backend == "eager":
        raise UnsupportedModelError(
            f"model: {name} runs eager attention, but attaching requires SDPA to reproduce the model's outputs. Load it with "
            f'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa").'
        )
    reason = BACKEND_NOTES.get(str(backend), "")
    raise UnsupportedModelError(
        f"model: {name} runs the attention implementation {backend!r}, but attaching requires SDPA{reason}. Call "
        f'model.set_attn_implementation("sdpa") first.'
    )


class ModelForwardGuard:
    """Forward hooks on an attached model and its submodels that reject unsupported calls and keep edits in checkpoints."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer]) -> None:
        self._model = model
        active_layers = [layer for layer in layers if layer.spec.head_ids and layer.info.backend != "traced"]
        config_backends = [(config_of(model, layer.module), layer.info.backend) for layer in active_layers]
        self._configs = list({id(config): (config, backend) for config, backend in config_backends}.values())
        self._wrapped: list[tuple[Any, Any]] = []  # blocks, and their original checkpointing functions
        self._lock, self._calls = (
            threading.Lock(),
            0,
        )  # number of running calls, in all threads, that need wrapped blocks
        self._entered = (
            threading.local()
        )  # `outermost`: the submodel whose call is the outermost wrapped one in a thread

    def register_hooks(self) -> list[Any]:
        """Register hooks before and after every call. Each returned hook has `.remove()`."""
        from transformers import PreTrainedModel

        submodels = [module for module in self._model.modules() if isinstance(module, PreTrainedModel)]
        pre_hooks = [
            submodel.register_forward_pre_hook(UncopiedHook(self._enter), with_kwargs=True) for submodel in submodels
        ]
        return pre_hooks + [
            submodel.register_forward_hook(UncopiedHook(self._leave), always_call=True) for submodel in submodels
        ]

    def _enter(self, submodel: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        config: Any = submodel.config
        if has_pending_cache_step():
            set_cache_step(None)  # left by an interrupted call
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise ArgumentError(
                "output_attentions=True: not supported while the model is attached, because SDPA does not compute attention "
                "weights. Use hw.attention_maps or hw.record, or detach the model first."
            )
        for layer_config, backend in self._configs:
            if layer_config._attn_implementation != backend:
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} was attached with attention {backend!r} but now runs "
                    f"{layer_config._attn_implementation!r}, whose heads cannot be recorded or silenced. Detach the model "
                    f'first, or call model.set_attn_implementation("{backend}").'
                )
        if (
            HOOKS.now is not HOOKS
            and submodel.training
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            self._wrap_checkpointing(submodel)

    def _wrap_checkpointing(self, submodel: nn.Module) -> None:
        """Make checkpointed blocks replay the edits of their first run, for the duration of the current calls."""
        if getattr(self._entered, "outermost", None) is not None:
            return
        blocks = [block for block in self._model.modules() if "_gradient_checkpointing_func" in block.__dict__]
        if not blocks:
            return
        self._entered.outermost = submodel
        with self._lock:
            self._calls += 1
            for block in blocks if self._calls == 1 else ():
                checkpoint: Any = block._gradient_checkpointing_func
                self._wrapped.append((block, checkpoint))
                block._gradient_checkpointing_func = partial(_run_and_replay, checkpoint)

    def _leave(self, submodel: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or submodel is not getattr(self._entered, "outermost", None):
            return
        self._entered.outermost = None
        with self._lock:
            self._calls -= 1
            if self._calls == 0:
                for block, checkpoint in self._wrapped:
                    block._gradient_checkpointing_func = checkpoint
                self._wrapped = []


def _run_and_replay(checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed block. In the backward pass it runs again with the same edits, but without listeners."""
    hooks, calls = HOOKS.now, count()

    def run_block(*block_args: Any, **block_kwargs: Any) -> Any:
        if next(calls) == 0:
            return block(*block_args, **block_kwargs)
        with replaying(hooks):
            return block(*block_args, **block_kwargs)

    return checkpoint(run_block, *args, **kwargs)
