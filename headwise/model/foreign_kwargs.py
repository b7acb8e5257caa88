"""What models elsewhere are called with, and what to write here: told to whoever calls ours that way."""

from collections.abc import Callable, Iterable
from inspect import Parameter, signature

from headwise.errors import HeadwiseError, close_names

ELSEWHERE = {
    "input_ids": "model(ids)",
    "attention_mask": "padding=attention_mask.bool(), True where a token is real",
    "encoder_attention_mask": "source_padding=encoder_attention_mask.bool(), True where a token is real",
    "token_type_ids": "token_types=token_type_ids",
    "past_key_values": "cache=model.cache()",
    "head_mask": 'gates={"5.1": 0.0}, a number for each head',
    "output_attentions": "with hw.record(model) as seen",
    "output_hidden_states": "hidden=True",
    "max_new_tokens": "tokens=…",
}


def other_call(called: Callable[..., object], way: str, unknown: Iterable[str]) -> HeadwiseError:
    """The error for arguments that are not ours: what to write instead, for each.

    >>> print(other_call(lambda ids, padding: None, "model(ids)", ["attention_mask"]))
    this is called as model(ids): for attention_mask= write padding=attention_mask.bool(), True where a token is real.
    """
    ours = [name for name, one in signature(called).parameters.items() if one.kind is not Parameter.VAR_KEYWORD]
    told = [
        f"for {name}= write {ELSEWHERE[name]}"
        if name in ELSEWHERE
        else f"{name}= is unknown; {close_names(name, ours)}"
        for name in unknown
    ]
    return HeadwiseError(f"this is called as {way}: {'; '.join(told).rstrip('.')}.")
