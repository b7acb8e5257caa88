"""What models elsewhere are called with, and what to write here: told to whoever calls ours that way."""

from collections.abc import Callable, Iterable
from inspect import Parameter, signature

from headwise.errors import HeadwiseError, suggest_names

FOREIGN_ARGUMENTS = {
    "input_ids": "model(ids)",
    "encoder_attention_mask": "source_attention_mask=encoder_attention_mask",
    "token_type_ids": "token_types=token_type_ids",
    "past_key_values": "cache=model.cache()",
    "head_mask": 'gates={"5.1": 0.0}, a number for each head',
    "output_attentions": "with hw.record(model) as recording",
    "output_hidden_states": "hidden=True",
}


def foreign_kwargs_error(function: Callable[..., object], usage: str, unknown: Iterable[str]) -> HeadwiseError:
    """The error for arguments that are not ours: what to write instead, for each.

    >>> print(foreign_kwargs_error(lambda ids: None, "model(ids)", ["token_type_ids"]))
    this is called as model(ids): for token_type_ids= write token_types=token_type_ids.
    """
    valid_names = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD
    ]
    hints = [
        f"for {name}= write {FOREIGN_ARGUMENTS[name]}"
        if name in FOREIGN_ARGUMENTS
        else f"{name}= is unknown; {suggest_names(name, valid_names)}"
        for name in unknown
    ]
    return HeadwiseError(f"this is called as {usage}: {'; '.join(hints).rstrip('.')}.")
