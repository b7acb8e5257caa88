"""What can be attached to, and what is refused with its reason; and the guards that stand at the model's door meanwhile."""

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from headwise.attached.discover import AttentionModuleInfo, check_no_sinks_or_softcap, config_of, find_attention_modules
from headwise.attached.interface import SDPA_NAME, has_third_party_sdpa
from headwise.attached.layer import AttachedLayer, layer_of
from headwise.attached.non_sdpa_hooks import has_eager_function
from headwise.attached.offload import is_offloaded
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HOOKS, replaying

NATIVE_FAMILIES = ("gpt2", "gpt_neo", "bert", "llama", "mistral", "qwen2")  # families that our own loader maps


def check_supported(model: Any) -> None:
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
    for path, module in model.named_modules():
        if layer_of(module) is not None:
            raise HeadwiseError(
                f"{path} of this {name} is attached already, through the handle of another model that holds it. Use that "
                f"handle, or detach it first."
            )
    if any(weight.device.type == "meta" for weight in model.parameters()) and not is_offloaded(model):
        raise HeadwiseError(
            f"{name} has weights on the meta device, which have no values. Load the model with its weights."
        )
    model_type = getattr(model.config, "model_type", "")
    if not find_attention_modules(model):
        hint = f" Our own loader reads this family: hw.load(folder)." if model_type in NATIVE_FAMILIES else ""  # noqa: F541
        raise HeadwiseError(
            f"{name} is not on transformers' attention interface: its attention cannot be reached from outside.{hint}"
        )
    for info in find_attention_modules(model):
        check_no_sinks_or_softcap(name, info)
        if info.kept_heads == ():
            continue  # it has no heads, and runs no attention
        if info.backend == "sdpa" or (info.backend == "eager" and _could_be_fused(model, info)):
            _check_backend(name, config_of(model, info.module)._attn_implementation)
    if has_third_party_sdpa():
        raise HeadwiseError(
            f"somebody has registered a function of their own as {SDPA_NAME!r}; attaching keeps a model's numbers, and ours "
            f"are those of transformers' SDPA."
        )


def _could_be_fused(model: Any, info: AttentionModuleInfo) -> bool:
    """Whether a module on the eager path could run on SDPA, or brings no eager function of its own."""
    from transformers import PreTrainedModel

    names = info.name.split(".")
    holders = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
    holder = next(module for module in reversed(holders) if isinstance(module, PreTrainedModel))
    return bool(holder._supports_sdpa) or not has_eager_function(type(info.module))


def nested_configs(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    if not hasattr(config, "_attn_implementation_internal"):
        return []
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(nested for subconfig in inner for nested in nested_configs(subconfig))]


def copy_config(model: Any) -> Any:
    """A copy of a model's configuration, to build another one that runs on the same attention."""
    config = copy.deepcopy(model.config)
    for inner, original in zip(nested_configs(config), nested_configs(model.config), strict=True):
        inner._attn_implementation_internal = original._attn_implementation
    return config


def _check_backend(name: str, backend: str | None) -> None:
    if backend == SDPA_NAME:
        return
    if backend == "eager":
        raise HeadwiseError(
            f"{name} runs on the eager path; attaching keeps a model's numbers, and ours are SDPA's. Load it with "
            f'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa"), if it can.'
        )
    raise HeadwiseError(
        f'{name} runs on the attention {backend!r}; call model.set_attn_implementation("sdpa") first, then attach.'
    )


class ModelForwardGuard:
    """Stands at the doors of an attached model: the model itself, and those parts of it that can be called alone."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer]) -> None:
        self._model = model
        active_layers = [layer for layer in layers if layer.spec.head_ids and layer.info.backend != "traced"]
        config_backends = [(config_of(model, layer.module), layer.info.backend) for layer in active_layers]
        self._configs = list({id(config): (config, backend) for config, backend in config_backends}.values())
        self._wrapped: list[tuple[Any, Any]] = []  # blocks, and how they are checkpointed when we are not there
        self._lock, self._calls = threading.Lock(), 0  # of all threads, for which blocks are wrapped
        self._entered = threading.local()  # `outermost`: the part whose call is the outermost wrapped one of a thread

    def register_hooks(self) -> list[Any]:
        """Before and behind every call; each has `.remove()`."""
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
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise HeadwiseError(
                "output_attentions=True asks for every map at once, which the fused path never makes; look at heads with "
                "hw.attention_maps or hw.record, or detach first."
            )
        for layer_config, backend in self._configs:
            if layer_config._attn_implementation != backend:
                raise HeadwiseError(
                    f"{type(self._model).__name__} was attached while it ran on {backend!r} and runs on "
                    f"{layer_config._attn_implementation!r} now, where heads can be neither seen nor silenced; detach it "
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
        """For the calls that run now, blocks that are checkpointed remember with which edits they were run."""
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
    """A checkpointed block is run again in the backward pass: with the edits of the first time, and unheard."""
    hooks, calls = HOOKS.now, count()

    def run_block(*block_args: Any, **block_kwargs: Any) -> Any:
        if next(calls) == 0:
            return block(*block_args, **block_kwargs)
        with replaying(hooks):
            return block(*block_args, **block_kwargs)

    return checkpoint(run_block, *args, **kwargs)
