"""Writing on: one token after another, with a cache, one prompt or many of different lengths."""

from collections.abc import Generator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.head import Gates, resolve_gates
from headwise.kernels.autotuned_linear import step
from headwise.model.foreign_kwargs import other_call
from headwise.model.model_cache import ModelCache
from headwise.model.protocols import quiet
from headwise.model.sampling import Sampling

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

Ids = Sequence[int]
Prompt = str | Sequence[str] | Tensor | Ids | Sequence[Ids]
Stop = int | Sequence[int | Sequence[int]]


class How(TypedDict, total=False):
    """The settings of `stream`, by name."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop: Stop | None
    pad: int
    seed: int | None
    padding: Tensor | None
    cache: ModelCache | None
    gates: Gates | None
    source: Tensor | None
    source_padding: Tensor | None
    prompt_chunk: int


def generate(model: "Transformer", prompt: Prompt, tokens: int = 64, **how: Unpack[How]) -> Any:
    """Prompt and continuation, in the kind the prompt came in: text, a tensor (B, T), a list of ids, or a list of those.

    Takes what `stream` takes. Texts and lists end where they stop; a tensor is filled up with `pad`. A text that an
    encoder-decoder reads gives what it writes.
    """
    is_text, alone = _is_text(prompt), isinstance(prompt, str)
    prompt, how = _with_source(model, prompt, how)
    if _is_text(prompt):  # tokenised once; ids do not say what ends a text
        prompt, how = _encoded(model, prompt), {**how, "stop": _stops(model, prompt, how.get("stop"))}
    rows, real = as_batch(model, prompt)
    steps = list(stream(model, prompt, tokens, **how))  # each (B,)
    made = torch.stack(steps, 1) if steps else rows[:, :0]
    if isinstance(prompt, Tensor):
        return torch.cat((rows, made), 1)
    ends = _ends(made, _stops(model, prompt, how.get("stop")))
    real = torch.ones_like(rows, dtype=torch.bool) if real is None else real
    lists = [rows[i][real[i]].tolist() + made[i, : ends[i]].tolist() for i in range(len(rows))]
    texts = [model.tokenizer.decode(ids) for ids in lists] if is_text and model.tokenizer else lists
    return texts[0] if alone or isinstance(prompt[0], Integral) else texts


def stream(
    model: "Transformer",
    prompt: Prompt,
    tokens: int = 64,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Stop | None = None,
    pad: int = 0,
    seed: int | None = None,
    padding: Tensor | None = None,
    cache: ModelCache | None = None,
    gates: Gates | None = None,
    source: Tensor | None = None,
    source_padding: Tensor | None = None,
    prompt_chunk: int = 2048,
    **unknown: object,
) -> Generator[Tensor, None, None]:
    """Yield the next token of every prompt, (B,), step by step, until `tokens` are made or all have stopped.

    Temperature 0 takes the best token; above, it draws. `stop` is a token id, or a list of ids and of id sequences (for a
    text by default its end-of-text token); a row that has stopped yields `pad`. Prompts of different lengths are padded
    on the left and masked. `gates` scales heads for this call alone. An encoder-decoder needs `source`, token ids (B, S);
    without, a text is what it reads, and it writes from the start. A prompt is read `prompt_chunk` tokens at a time, so that
    what reading takes beside the cache does not grow with its length.
    """
    if unknown:
        raise other_call(stream, "model.generate(prompt, tokens, padding=…)", unknown)
    if source is None:
        prompt, more = _with_source(model, prompt, {"stop": stop, "cache": cache})
        stop, source, source_padding = more.get("stop"), more.get("source"), more.get("source_padding")
    if model.output is None or model.spec.kind == "encoder":
        raise HeadwiseError(
            "this model has no next-token output; generate needs a decoder with output='lm'. Load the folder of a model "
            "with an output head, for example LlamaForCausalLM instead of LlamaModel."
        )
    choose = Sampling(temperature, top_k, top_p)
    ids, made_padding = as_batch(model, prompt)
    padding = made_padding if padding is None else padding
    _check_room(model, ids, padding, tokens)
    if type(prompt_chunk) is not int or prompt_chunk < 1:
        raise HeadwiseError(f"prompt_chunk counts tokens, 1 or more; got {prompt_chunk!r}.")
    dice = None if seed is None else torch.Generator(model.device).manual_seed(seed)
    cache = model.cache() if cache is None else cache
    gates = resolve_gates(model.whole_layers(), gates)  # once, not at every step
    first = {"padding": padding, "source": source, "source_padding": source_padding}
    stops = _stops(model, prompt, stop)
    return _steps(model, ids, tokens, choose, dice, stops, pad, cache, gates, first, prompt_chunk)


def _steps(
    model: "Transformer",
    ids: Tensor,
    tokens: int,
    choose: Sampling,
    dice: torch.Generator | None,
    stops: list[tuple[int, ...]],
    pad: int,
    cache: ModelCache,
    gates: Gates | None,
    first: dict[str, Tensor | None],
    chunk: int,
) -> Generator[Tensor, None, None]:
    """One step after the other; `first` is what only the prompt needs, which is read a chunk at a time."""
    running = torch.ones(len(ids), dtype=torch.bool, device=model.device)
    tail, parts = ids[:, :0], tuple(model.modules())
    for _ in range(tokens):
        with quiet(model, parts), torch.no_grad():  # step by step: whoever reads the tokens finds the model as it was
            last = _read(model, ids, cache, gates, first, chunk)  # (B, 1, D)
            with step(model, len(ids)):
                logits = model.output(last)[:, 0]  # (B, V)  # pyright: ignore[reportOptionalCall]
            chosen = torch.where(running, choose.pick(logits, dice), pad)  # (B,)
        yield chosen.clone()
        tail = torch.cat((tail, chosen[:, None]), 1)
        running = running & ~_ended(tail, stops)
        if not running.any():
            return
        ids, first = chosen[:, None], {}


def _read(
    model: "Transformer",
    ids: Tensor,
    cache: ModelCache,
    gates: "Gates | None",
    first: dict[str, Tensor | None],
    chunk: int,
) -> Tensor:
    """The state of the last token, (B, 1, D); of the others nothing is kept but what the cache holds."""
    padding, first = first.get("padding"), {name: value for name, value in first.items() if name != "padding"}
    last = ids.new_zeros(0)
    for start in range(0, ids.shape[1], chunk):
        some = slice(start, start + chunk)
        real = None if padding is None else padding[:, some]
        last = model(ids[:, some], padding=real, cache=cache, gates=gates, hidden=True, **first)[:, -1:]
        first = {}  # a source is read once
    return last


def _check_room(model: "Transformer", ids: Tensor, padding: Tensor | None, tokens: int) -> None:
    if ids.shape[1] == 0:
        raise HeadwiseError("the prompt is empty; give at least one token.")
    if not isinstance(tokens, int) or tokens < 0:
        raise HeadwiseError(f"tokens must be a whole number, 0 or more; got {tokens}.")
    if padding is not None and not padding[:, -1].all():
        raise HeadwiseError(
            "prompts of different lengths are padded on the left to generate; a row here ends in padding."
        )
    longest = ids.shape[1] if padding is None else int(padding.sum(1).max())
    room = model.spec.context - longest + 1  # the last token made is not read again
    if model.spec.positions == "learned" and tokens > room:
        raise HeadwiseError(
            f"a prompt of {longest} tokens and {tokens} more do not fit the {model.spec.context} positions this model has "
            f"learned; ask for at most {max(0, room)}."
        )


def _with_source(model: "Transformer", prompt: Prompt, how: How) -> tuple[Prompt, How]:
    """Texts for an encoder-decoder that has no other source: they are the source, and writing starts anew."""
    cached = how.get("cache") is not None and how["cache"].memory is not None  # pyright: ignore
    if model.spec.kind != "encoder-decoder" or how.get("source") is not None or cached or not _is_text(prompt):
        return prompt, how
    rows, end = _encoded(model, prompt), model.start
    source, padding = as_batch(model, [row if row[-1:] == [end] else [*row, end] for row in rows])
    stop = end if how.get("stop") is None else how["stop"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
    return [[end]] * len(rows), {**how, "source": source, "source_padding": padding, "stop": stop}


def as_batch(model: "Transformer", prompt: Prompt) -> tuple[Tensor, Tensor | None]:
    """Prompts as one tensor, padded on the left, and where its real tokens are: (B, T), (B, T) or None."""
    if isinstance(prompt, Tensor):
        if prompt.ndim != 2:
            raise HeadwiseError(
                f"a prompt tensor is (batch, tokens), got {tuple(prompt.shape)}; one prompt is (1, tokens)."
            )
        return prompt.to(model.device), None
    if not isinstance(prompt, str | list | tuple):
        raise HeadwiseError(f"a prompt is a text, a list of token ids, or a tensor; got {type(prompt).__name__}.")
    alone = isinstance(prompt, str) or not prompt or isinstance(prompt[0], Integral)
    rows: Any = _encoded(model, prompt) if _is_text(prompt) else [prompt] if alone else prompt
    if not all(isinstance(id, Integral) for row in rows for id in row):
        raise HeadwiseError("token ids are whole numbers; a prompt here holds something else.")
    lengths = torch.tensor([len(row) for row in rows])
    if lengths.min() == 0:
        raise HeadwiseError("a prompt is empty; give at least one token.")
    T = int(lengths.max())
    ids = torch.tensor([[0] * (T - len(row)) + [int(id) for id in row] for row in rows], device=model.device)
    if lengths.min() == T:
        return ids, None
    return ids, (torch.arange(T) >= (T - lengths)[:, None]).to(model.device)


def _encoded(model: "Transformer", texts: Any) -> list[list[int]]:
    """A text, or several, as ids."""
    if model.tokenizer is None:
        raise HeadwiseError("this model has no tokenizer, so it takes token ids; encode the text first.")
    return [model.tokenizer.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]


def _is_text(prompt: Prompt) -> bool:
    several = isinstance(prompt, list | tuple) and bool(prompt)
    return isinstance(prompt, str) or (several and isinstance(prompt[0], str))


def _stops(model: "Transformer", prompt: Prompt, stop: Stop | None) -> list[tuple[int, ...]]:
    if stop is None and _is_text(prompt) and model.tokenizer is not None:
        stop = model.tokenizer.special.get("eos")
    if isinstance(stop, str | Tensor):
        raise HeadwiseError(f"stop is a token id or a list of ids and id sequences, got {type(stop).__name__}.")
    given = [] if stop is None else [stop] if isinstance(stop, int) else stop
    stops = [(item,) if isinstance(item, int) else tuple(item) for item in given]
    if () in stops:
        raise HeadwiseError("an empty sequence cannot be a stop; give at least one id.")
    return stops


def _ended(tail: Tensor, stops: list[tuple[int, ...]]) -> Tensor:
    """Which rows end in a stop: (B, made) → (B,)"""
    ended = torch.zeros(len(tail), dtype=torch.bool, device=tail.device)
    for stop in stops:
        if len(stop) <= tail.shape[1]:
            ended |= (tail[:, -len(stop) :] == torch.tensor(stop, device=tail.device)).all(1)
    return ended


def _ends(made: Tensor, stops: list[tuple[int, ...]]) -> list[int]:
    """Where each row's own text ends, its stop included."""
    ends = [made.shape[1]] * len(made)
    for length in range(made.shape[1], 0, -1):
        for i, ended in enumerate(_ended(made[:, :length], stops).tolist()):
            if ended:
                ends[i] = length
    return ends
