"""`attach`: access the heads of a transformers model without changing its outputs."""

from typing import Any

from torch import nn

from headwise.attached.attach_support import check_supported, is_transformers_model, unwrap_peft
from headwise.attached.attached_model import AttachedModel
from headwise.attached.attached_torch_model import AttachedTorchModel, CallFunction, active_module_handle
from headwise.attached.attachment import active_handle
from headwise.attached.save_load_transformers_folder import make_attached_layers
from headwise.attached.tokenizer import wrap_tokenizer
from headwise.errors import ArgumentError
from headwise.io.images import ImagePreprocessor
from headwise.model.protocols import is_model


def attach(
    model: Any, tokenizer: Any = None, *, forward: CallFunction | None = None, example: Any = None
) -> AttachedModel:
    """Attach to a transformers model, or to any torch module with attention, to access its heads.

    The returned handle works like one of Headwise's own models: every function of Headwise accepts it. The model itself
    computes the same outputs as before.

    Args:
        model: Transformers model, a `PeftModel` of one, or a torch module with `nn.MultiheadAttention` or other attention
            modules (docs/attached.md). If it is already attached, its existing handle is returned.
        tokenizer: Tokenizer of transformers or Headwise, needed by functions that take text. For an image model, its image
            processor. If the model is already attached, replaces the handle's tokenizer.
        forward: For a torch module: `forward(model, call)` runs one call of a corpus and returns the output or a scalar
            loss. Default: a dict is passed as keyword arguments, a tuple as arguments, anything else as one argument.
        example: For a torch module: one call. Layers other than `nn.MultiheadAttention` need it for pruning and for views of
            weights, and pruned modules are verified on it.

    Returns:
        A handle. `handle.detach()`, or leaving the handle's `with` block, restores the model. A handle that is garbage
        collected is detached automatically; heads taken from it and open contexts keep it alive. After an error or an
        interrupt during `attach` the model is unchanged.

    Raises:
        HeadwiseError: The model cannot be attached. The message gives the reason.

    >>> import torch, transformers
    >>> sizes = dict(n_embd=16, n_layer=2, n_head=4, vocab_size=31, bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> before = model(ids).logits
    >>> attached = attach(model)
    >>> torch.equal(model(ids).logits, before), len(attached.heads)
    (True, 8)
    >>> with attached.heads["1.2"].silenced():
    ...     torch.equal(model(ids).logits, before)
    False
    >>> attached.detach() is model
    True
    """
    model = unwrap_peft(model)
    if isinstance(model, nn.Module) and not is_transformers_model(model) and not is_model(model):
        return _attach_module(model, tokenizer, forward, example)
    if forward is not None or example is not None:
        raise ArgumentError(
            f"forward, example: used only for torch modules. Got a {type(model).__name__}. Remove these arguments."
        )
    handle = active_handle(model)
    if handle is None:
        check_supported(model)
    preprocessor = ImagePreprocessor.from_config(tokenizer.to_dict()) if hasattr(tokenizer, "image_mean") else None
    wrapped_tokenizer = wrap_tokenizer(tokenizer) if preprocessor is None else None
    if handle is None:
        return AttachedModel.attach_layers(model, make_attached_layers(model), wrapped_tokenizer, preprocessor)
    if tokenizer is not None:
        handle.tokenizer, handle.preprocessor = wrapped_tokenizer, preprocessor
    return handle


def _attach_module(model: nn.Module, tokenizer: Any, forward: CallFunction | None, example: Any) -> AttachedTorchModel:
    """Attach to a torch module, or return its existing handle."""
    if tokenizer is not None:
        raise ArgumentError(
            f"tokenizer: used only for transformers models. Got a {type(model).__name__}. Tokenize the texts yourself "
            f"and pass calls, with forward=."
        )
    handle = active_module_handle(model)
    if handle is None:
        return AttachedTorchModel.attach_module(model, forward, example)
    if forward is not None or example is not None:
        raise ArgumentError(
            "forward, example: the module is already attached, and these cannot be changed. Detach it first."
        )
    return handle
