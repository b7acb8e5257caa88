"""Writing on: one token after another, with a cache, one prompt or many of different lengths."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor

from headwise.cache import ModelCache
from headwise.errors import HeadwiseError
from headwise.heads.head import Gates, resolve_gates
from headwise.model.protocols import eval_mode
from headwise.model.sampling import Sampling
from headwise.model.unsupported_kwargs import foreign_kwargs_error

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

Ids = Sequence[int]
Prompt = str | Sequence[str] | Tensor | Ids | Sequence[Ids]
StopTokens = int | Sequence[int | Sequence[int]]


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` and `stream`, by name."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop: StopTokens | None
    pad: int
    seed: int | None
    attention_mask: Tensor | None
    cache: ModelCache | None
    gates: Gates | None
    source: Tensor | None
    source_attention_mask: Tensor | None
    prompt_chunk: int


@dataclass(frozen=True, eq=False)
class GenerationSetup:
    """Everything that is settled before the first token is generated."""

    ids: Tensor  # (B, T), padded on the left
    real_tokens: Tensor | None  # (B, T): True at tokens; None: there is no padding
    max_new_tokens: int
    sampling: Sampling
    generator: torch.Generator | None
    stops: list[tuple[int, ...]]
    pad: int
    cache: ModelCache
    gates: Gates | None
    prompt_inputs: dict[str, Tensor | None]  # what only the prompt needs: its mask and its source
    prompt_chunk: int


def generate(model: "Transformer", prompt: Prompt, max_new_tokens: int = 64, **options: Unpack[GenerateOptions]) -> Any:
    """Prompt and continuation, in the kind the prompt came in: text, a tensor (B, T), a list of ids, or a list of those.

    Takes what `stream` takes. Texts and lists end where they stop; a tensor is filled up with `pad`. A text that an
    encoder-decoder reads gives what it writes.
    """
    setup = prepare_generation(model, prompt, max_new_tokens, **options)
    ids, steps = setup.ids, list(_generate_steps(model, setup))  # each (B,)
    generated = torch.stack(steps, 1) if steps else ids[:, :0]
    if isinstance(prompt, Tensor):
        return torch.cat((ids, generated), 1)
    ends = _end_positions(generated, setup.stops)
    real_tokens = torch.ones_like(ids, dtype=torch.bool) if setup.real_tokens is None else setup.real_tokens
    lists = [ids[i][real_tokens[i]].tolist() + generated[i, : ends[i]].tolist() for i in range(len(ids))]
    texts = [model.tokenizer.decode(row) for row in lists] if _is_text(prompt) and model.tokenizer else lists
    return texts[0] if isinstance(prompt, str) or isinstance(prompt[0], Integral) else texts


def stream(
    model: "Transformer", prompt: Prompt, max_new_tokens: int = 64, **options: Unpack[GenerateOptions]
) -> Generator[Tensor, None, None]:
    """Yield the next token of every prompt, (B,), step by step, until `max_new_tokens` are made or all have stopped.

    Temperature 0 takes the best token; above, it draws. `stop` is a token id, or a list of ids and of id sequences (for a
    text by default its end-of-text token); a row that has stopped yields `pad`. Prompts of different lengths are padded
    on the left and masked. `gates` scales heads for this call alone. An encoder-decoder needs `source`, token ids (B, S);
    without, a text is what it reads, and it writes from the start. A prompt is read `prompt_chunk` tokens at a time, so that
    what reading takes beside the cache does not grow with its length.
    """
    return _generate_steps(model, prepare_generation(model, prompt, max_new_tokens, **options))


def prepare_generation(
    model: "Transformer",
    prompt: Prompt,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: StopTokens | None = None,
    pad: int = 0,
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    cache: ModelCache | None = None,
    gates: Gates | None = None,
    source: Tensor | None = None,
    source_attention_mask: Tensor | None = None,
    prompt_chunk: int = 2048,
    **unknown: object,
) -> GenerationSetup:
    """Check the options of `generate` and `stream`, and tokenize and batch the prompts."""
    if unknown:
        usage = "model.generate(prompt, max_new_tokens, attention_mask=…)"
        raise foreign_kwargs_error(prepare_generation, usage, unknown)
    if source is None:
        source, source_attention_mask = _encode_source(model, prompt, cache)
        if source is not None:  # it generates from the start
            end = model.decoder_start_token
            prompt, stop = [[end]] * len(source), end if stop is None else stop
    if model.output is None or model.spec.kind == "encoder":
        raise HeadwiseError(
            "this model has no next-token output; generate needs a decoder with output='lm'. Load the folder of a model "
            "with an output head, for example LlamaForCausalLM instead of LlamaModel."
        )
    sampling = Sampling(temperature, top_k, top_p)
    ids, real_tokens = batch_prompts(model, prompt)
    attention_mask = real_tokens if attention_mask is None else attention_mask
    _check_length(model, ids, attention_mask, max_new_tokens)
    if type(prompt_chunk) is not int or prompt_chunk < 1:
        raise HeadwiseError(f"prompt_chunk counts tokens, 1 or more; got {prompt_chunk!r}.")
    return GenerationSetup(
        ids,
        real_tokens,
        max_new_tokens,
        sampling,
        None if seed is None else torch.Generator(model.device).manual_seed(seed),
        _stops(model, prompt, stop),
        pad,
        model.cache() if cache is None else cache,
        resolve_gates(model.gathered_layers(), gates),  # once, not at every step
        {"attention_mask": attention_mask, "source": source, "source_attention_mask": source_attention_mask},
        prompt_chunk,
    )


def _generate_steps(model: "Transformer", setup: GenerationSetup) -> Generator[Tensor, None, None]:
    """Generate one token after the other; the prompt is read a chunk at a time."""
    ids, prompt_inputs = setup.ids, setup.prompt_inputs
    running = torch.ones(len(ids), dtype=torch.bool, device=model.device)
    tail, modules = ids[:, :0], tuple(model.modules())
    for _ in range(setup.max_new_tokens):
        # step by step: whoever reads the tokens finds the model as it was
        with eval_mode(model, modules), torch.no_grad():
            last_state = _prefill(model, ids, setup, prompt_inputs)  # (B, 1, D)
            with model.matmul_tuner.decode_step(model, len(ids)):
                logits = model.output(last_state)[:, 0]  # (B, V)  # pyright: ignore[reportOptionalCall]
            next_tokens = torch.where(running, setup.sampling.pick(logits, setup.generator), setup.pad)  # (B,)
        yield next_tokens.clone()
        tail = torch.cat((tail, next_tokens[:, None]), 1)
        running = running & ~_ended(tail, setup.stops)
        if not running.any():
            return
        ids, prompt_inputs = next_tokens[:, None], {}


def _prefill(
    model: "Transformer", ids: Tensor, setup: GenerationSetup, prompt_inputs: dict[str, Tensor | None]
) -> Tensor:
    """The state of the last token, (B, 1, D); of the others nothing is kept but what the cache holds."""
    attention_mask, prompt_inputs = (
        prompt_inputs.get("attention_mask"),
        {name: value for name, value in prompt_inputs.items() if name != "attention_mask"},
    )
    last_state = ids.new_zeros(0)
    for start in range(0, ids.shape[1], setup.prompt_chunk):
        chunk_slice = slice(start, start + setup.prompt_chunk)
        chunk_mask = None if attention_mask is None else attention_mask[:, chunk_slice]
        last_state = model(
            ids[:, chunk_slice],
            attention_mask=chunk_mask,
            cache=setup.cache,
            gates=setup.gates,
            hidden=True,
            **prompt_inputs,
        )[:, -1:]
        prompt_inputs = {}  # a source is read once
    return last_state


def _check_length(model: "Transformer", ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> None:
    if ids.shape[1] == 0:
        raise HeadwiseError("the prompt is empty; give at least one token.")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise HeadwiseError(f"max_new_tokens must be a whole number, 0 or more; got {max_new_tokens}.")
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise HeadwiseError(
            "prompts of different lengths are padded on the left to generate; a row here ends in padding."
        )
    prompt_length = ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    max_fitting = model.spec.context - prompt_length + 1  # the last token made is not read again
    if model.spec.positions == "learned" and max_new_tokens > max_fitting:
        raise HeadwiseError(
            f"a prompt of {prompt_length} tokens and {max_new_tokens} more do not fit the {model.spec.context} positions "
            f"this model has learned; ask for at most {max(0, max_fitting)}."
        )


def _encode_source(
    model: "Transformer", prompt: Prompt, cache: ModelCache | None
) -> tuple[Tensor | None, Tensor | None]:
    """Token ids and mask of texts that an encoder-decoder reads as its source; None if the prompt is no such text."""
    has_memory = cache is not None and cache.memory is not None
    if model.spec.kind != "encoder-decoder" or has_memory or not _is_text(prompt):
        return None, None
    rows, end = _encode(model, prompt), model.decoder_start_token
    return batch_prompts(model, [row if row[-1:] == [end] else [*row, end] for row in rows])


def batch_prompts(model: "Transformer", prompt: Prompt) -> tuple[Tensor, Tensor | None]:
    """Prompts as one tensor, padded on the left, and where its real tokens are: (B, T), (B, T) or None."""
    if isinstance(prompt, Tensor):
        if prompt.ndim != 2:
            raise HeadwiseError(
                f"a prompt tensor is (batch, tokens), got {tuple(prompt.shape)}; one prompt is (1, tokens)."
            )
        return prompt.to(model.device), None
    if not isinstance(prompt, str | list | tuple):
        raise HeadwiseError(f"a prompt is a text, a list of token ids, or a tensor; got {type(prompt).__name__}.")
    is_single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], Integral)
    rows: Any = _encode(model, prompt) if _is_text(prompt) else [prompt] if is_single else prompt
    if not all(isinstance(token_id, Integral) for row in rows for token_id in row):
        raise HeadwiseError("token ids are whole numbers; a prompt here holds something else.")
    lengths = torch.tensor([len(row) for row in rows])
    if lengths.min() == 0:
        raise HeadwiseError("a prompt is empty; give at least one token.")
    T = int(lengths.max())
    ids = torch.tensor(
        [[0] * (T - len(row)) + [int(token_id) for token_id in row] for row in rows], device=model.device
    )
    if lengths.min() == T:
        return ids, None
    return ids, (torch.arange(T) >= (T - lengths)[:, None]).to(model.device)


def _encode(model: "Transformer", texts: Any) -> list[list[int]]:
    """A text, or several, as ids."""
    if model.tokenizer is None:
        raise HeadwiseError("this model has no tokenizer, so it takes token ids; encode the text first.")
    return [model.tokenizer.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]


def _is_text(prompt: Prompt) -> bool:
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return isinstance(prompt, str) or (is_list and isinstance(prompt[0], str))


def _stops(model: "Transformer", prompt: Prompt, stop: StopTokens | None) -> list[tuple[int, ...]]:
    if stop is None and _is_text(prompt) and model.tokenizer is not None:
        stop = model.tokenizer.special.get("eos")
    if isinstance(stop, str | Tensor):
        raise HeadwiseError(f"stop is a token id or a list of ids and id sequences, got {type(stop).__name__}.")
    items = [] if stop is None else [stop] if isinstance(stop, int) else stop
    stops = [(item,) if isinstance(item, int) else tuple(item) for item in items]
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


def _end_positions(generated: Tensor, stops: list[tuple[int, ...]]) -> list[int]:
    """Where each row's own text ends, its stop included."""
    ends = [generated.shape[1]] * len(generated)
    for length in range(generated.shape[1], 0, -1):
        for i, ended in enumerate(_ended(generated[:, :length], stops).tolist()):
            if ended:
                ends[i] = length
    return ends
