"""`attach`: the heads of a transformers model, with the same numbers."""

from typing import Any

from headwise.attached.attach_support import check_supported
from headwise.attached.attached_model import AttachedModel
from headwise.attached.attachment import live_handle
from headwise.attached.save_load import make_attached_layers
from headwise.attached.tokenizer import wrap_tokenizer
from headwise.io.images import ImagePreprocessor


def attach(model: Any, tokenizer: Any = None) -> AttachedModel:
    """The heads of a transformers model: a handle that everything here takes; the model computes what it always did.

    `tokenizer` is theirs, or one of ours, for what reads text; of a model that reads pictures, its image processor. The
    handle is a context manager; `.detach()` ends it. A model that is attached already gives the handle it has, with this
    `tokenizer` if there is one. A handle that is dropped without `.detach()` is detached when it is collected; heads taken
    from it, and open contexts, hold it. After an error or an interrupt the model is as it was.

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
