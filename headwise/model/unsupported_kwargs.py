"""Error for arguments of other libraries, with the corresponding argument of headwise."""

from collections.abc import Callable, Iterable
from inspect import Parameter, signature

from headwise.errors import ArgumentError, HeadwiseError, suggest_names

FOREIGN_ARGUMENTS = {
    "input_ids": "model(ids)",
    "encoder_attention_mask": "source_attention_mask=encoder_attention_mask",
    "token_type_ids": "token_types=token_type_ids",
    "past_key_values": "cache=model.cache()",
    "head_mask": 'gates={"5.1": 0.0}, which maps heads to factors',
    "output_attentions": "with hw.record(model) as recording",
    "output_hidden_states": "hidden=True",
}


def foreign_kwargs_error(function: Callable[..., object], usage: str, unknown: Iterable[str]) -> HeadwiseError:
    """Return the error for unknown arguments, with a replacement for each.

    >>> print(foreign_kwargs_error(lambda ids: None, "model(ids)", ["token_type_ids"]))
    unknown argument: call it as model(ids). Instead of token_type_ids=, use token_types=token_type_ids.
    """
    valid_names = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD
    ]
    hints = [
        f"Instead of {name}=, use {FOREIGN_ARGUMENTS[name]}."
        if name in FOREIGN_ARGUMENTS
        else f"{name}= is unknown; {suggest_names(name, valid_names)}"
        for name in unknown
    ]
    return ArgumentError(f"unknown argument: call it as {usage}. {' '.join(hints)}")
