"""`attach`: access the heads of a transformers model without changing its outputs."""

from typing import Any

from headwise.attached.attach_support import check_supported
from headwise.attached.attached_model import AttachedModel
from headwise.attached.attachment import live_handle
from headwise.attached.save_load import make_attached_layers
from headwise.attached.tokenizer import wrap_tokenizer
from headwise.io.images import ImagePreprocessor


def attach(model: Any, tokenizer: Any = None) -> AttachedModel:
    """Attach to a transformers model to access its heads.

    The returned handle works like one of Headwise's own models: every function of Headwise accepts it. The model itself
    computes the same outputs as before.

    Args:
        model: Transformers model. If it is already attached, its existing handle is returned.
        tokenizer: Tokenizer of transformers or Headwise, needed by functions that take text. For an image model, its image
            processor. If the model is already attached, replaces the handle's tokenizer.

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
    handle = live_handle(model)
    if handle is None:
        check_supported(model)
    preprocessor = ImagePreprocessor.from_config(tokenizer.to_dict()) if hasattr(tokenizer, "image_mean") else None
    wrapped_tokenizer = wrap_tokenizer(tokenizer) if preprocessor is None else None
    if handle is None:
        return AttachedModel.attach_layers(model, make_attached_layers(model), wrapped_tokenizer, preprocessor)
    if tokenizer is not None:
        handle.tokenizer, handle.preprocessor = wrapped_tokenizer, preprocessor
    return handle
