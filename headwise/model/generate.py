"""Autoregressive generation with a cache, for one or more prompts of any lengths."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor

from headwise.cache import ModelCache
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import Gates, resolve_gates
from headwise.kernels.random_state import make_generator
from headwise.model.protocols import eval_mode
from headwise.model.sampling import Sampling
from headwise.model.unsupported_kwargs import foreign_kwargs_error

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

Ids = Sequence[int]
Prompt = str | Sequence[str] | Tensor | Ids | Sequence[Ids]
StopTokens = int | Sequence[int | Sequence[int]]


class GenerateOptions(TypedDict, total=False):
    """Keyword options of `generate` and `stream`. `generate` documents them."""

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
    """Checked arguments of a generation.

    Attributes:
        ids: Prompts, padded on the left, (B, T).
        real_tokens: (B, T), True at real tokens. None if no row has padding.
        max_new_tokens: Maximum number of new tokens.
        sampling: Choice of the next token.
        generator: Random number generator. None means torch's default.
        stops: Token sequences that end a row.
        pad: Token of rows that have ended.
        cache: Cache of the model.
        gates: Factors of the head outputs.
        prompt_inputs: Model inputs of the first step only: attention mask, source and mask of the source.
        prompt_chunk: Number of prompt tokens per forward pass.
    """

    ids: Tensor
    real_tokens: Tensor | None
    max_new_tokens: int
    sampling: Sampling
    generator: torch.Generator | None
    stops: list[tuple[int, ...]]
    pad: int
    cache: ModelCache
    gates: Gates | None
    prompt_inputs: dict[str, Tensor | None]
    prompt_chunk: int


def generate(model: "Transformer", prompt: Prompt, max_new_tokens: int = 64, **options: Unpack[GenerateOptions]) -> Any:
    """Generate text and return the prompt with its continuation.

    Args:
        model: The model.
        prompt: A text, several texts, token ids, several lists of token ids, or a tensor (B, T). Prompts of different
            lengths are padded on the left. The prompt of an encoder-decoder is its source, if it is a text and `source`
            is not given.
        max_new_tokens: Maximum number of new tokens.
        **options: Further options:
            temperature: 0 (default) chooses the most likely token, a larger value samples.
            top_k: Sample from the `top_k` most likely tokens.
            top_p: Sample from the most likely tokens with a total probability of `top_p`.
            stop: Token id, or a list of token ids and token sequences, that end a row. The default for texts is the
                end-of-text token.
            pad: Token of rows that have ended. Default 0.
            seed: Seed of sampling.
            attention_mask: (B, T), True at real tokens of a prompt tensor.
            cache: Cache with earlier tokens. The default is a new dynamic cache.
            gates: Factors of head outputs for this call, such as {"5.1": 0.0}.
            source: Source token ids of an encoder-decoder, (B, S).
            source_attention_mask: (B, S), True at real tokens of the source.
            prompt_chunk: Number of prompt tokens per forward pass (default 2048), which limits memory for long prompts.

    Returns:
        Prompt and continuation in the type of the prompt. Texts and lists end after their stop token; tensors are filled
        with `pad`. For a text that an encoder-decoder reads as source, the generated text.
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
    """Yield the next token of every prompt, (B,), until `max_new_tokens` are generated or all rows have stopped.

    Args:
        model: The model.
        prompt: A text, several texts, token ids, several lists of token ids, or a tensor (B, T).
        max_new_tokens: Maximum number of new tokens.
        **options: Options as in `generate`. A row that has stopped yields `pad`.
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
        source, source_attention_mask = _tokenize_source(model, prompt, cache)
        if source is not None:  # the decoder starts with its start token
            prompt, stop = [[model.decoder_start_token]] * len(source), _end_token(model) if stop is None else stop
    if model.output is None or model.spec.kind == "encoder":
        raise UnsupportedModelError(
            "generate: this model has no next-token output. Use a decoder with output='lm', or load a model with an "
            "output head, for example LlamaForCausalLM instead of LlamaModel."
        )
    sampling = Sampling(temperature, top_k, top_p)
    ids, real_tokens = batch_prompts(model, prompt)
    attention_mask = real_tokens if attention_mask is None else attention_mask
    _check_length(model, ids, attention_mask, max_new_tokens)
    if type(prompt_chunk) is not int or prompt_chunk < 1:
        raise ArgumentError(f"prompt_chunk={prompt_chunk!r}: must be an integer number of tokens of at least 1.")
    return GenerationSetup(
        ids,
        real_tokens,
        max_new_tokens,
        sampling,
        None if seed is None else make_generator(model.device, seed),
        _stops(model, prompt, stop),
        pad,
        model.cache() if cache is None else cache,
        resolve_gates(model.gathered_layers(), gates),  # once for all steps
        {"attention_mask": attention_mask, "source": source, "source_attention_mask": source_attention_mask},
        prompt_chunk,
    )


def _generate_steps(model: "Transformer", setup: GenerationSetup) -> Generator[Tensor, None, None]:
    """Generate token by token. The prompt is processed in chunks."""
    ids, prompt_inputs = setup.ids, setup.prompt_inputs
    running = torch.ones(len(ids), dtype=torch.bool, device=model.device)
    tail, modules = ids[:, :0], tuple(model.modules())
    for _ in range(setup.max_new_tokens):
        # in each step, so that the consumer of the tokens finds the model in its original mode
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
    """Process the prompt in chunks and return the hidden state of the last token, (B, 1, D)."""
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
        prompt_inputs = {}  # the source is encoded in the first chunk only
    return last_state


def _check_length(model: "Transformer", ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> None:
    if ids.shape[1] == 0:
        raise ArgumentError("prompt: it is empty. Pass at least one token.")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ArgumentError(f"max_new_tokens={max_new_tokens}: must be an integer of at least 0.")
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise ArgumentError(
            "attention_mask: a row ends in padding. To generate, pad prompts of different lengths on the left."
        )
    prompt_length = ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    max_fitting = model.spec.context - prompt_length + 1  # the last generated token is not an input
    if model.spec.positions == "learned" and max_new_tokens > max_fitting:
        raise ArgumentError(
            f"max_new_tokens={max_new_tokens}: with a prompt of {prompt_length} tokens this exceeds the "
            f"{model.spec.context} learned positions of the model. Use at most max_new_tokens={max(0, max_fitting)}."
        )


def _tokenize_source(
    model: "Transformer", prompt: Prompt, cache: ModelCache | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return token ids and mask of texts that are the source of an encoder-decoder, or None for other prompts."""
    has_memory = cache is not None and cache.memory is not None
    if model.spec.kind != "encoder-decoder" or has_memory or not _is_text(prompt):
        return None, None
    rows, end = _encode(model, prompt), _end_token(model)
    return batch_prompts(model, [row if row[-1:] == [end] else [*row, end] for row in rows])


def _end_token(model: "Transformer") -> int:
    """Return the token that ends a text: eos, else sep, else the token that starts the decoder."""
    special = {} if model.tokenizer is None else model.tokenizer.special
    ends = [special[name] for name in ("eos", "sep") if special.get(name) is not None]
    return ends[0] if ends else model.decoder_start_token  # pyright: ignore[reportReturnType]


def batch_prompts(model: "Transformer", prompt: Prompt) -> tuple[Tensor, Tensor | None]:
    """Return the prompts as one tensor, padded on the left, and its attention mask: (B, T), (B, T) or None."""
    if isinstance(prompt, Tensor):
        if prompt.ndim != 2:
            raise ArgumentError(
                f"prompt: a tensor must have shape (batch, tokens). Got {tuple(prompt.shape)}. One prompt is (1, tokens)."
            )
        return prompt.to(model.device), None
    if not isinstance(prompt, str | list | tuple):
        raise ArgumentError(
            f"prompt: must be a text, a list of texts, a list of token ids or a tensor. Got {type(prompt).__name__}."
        )
    is_single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], Integral)
    rows: Any = _encode(model, prompt) if _is_text(prompt) else [prompt] if is_single else prompt
    if not all(isinstance(token_id, Integral) for row in rows for token_id in row):
        raise ArgumentError("prompt: token ids must be integers, but the prompt contains other values.")
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    if lengths.min() == 0:
        raise ArgumentError("prompt: it is empty. Pass at least one token per prompt.")
    T = int(lengths.max())
    ids = torch.tensor(
        [[0] * (T - len(row)) + [int(token_id) for token_id in row] for row in rows], device=model.device
    )
    if lengths.min() == T:
        return ids, None
    return ids, (torch.arange(T, device="cpu") >= (T - lengths)[:, None]).to(model.device)


def _encode(model: "Transformer", texts: Any) -> list[list[int]]:
    """Tokenize one or more texts."""
    if model.tokenizer is None:
        raise ArgumentError(
            "prompt: this model has no tokenizer, so it cannot read text. Pass token ids, or set model.tokenizer."
        )
    return [model.tokenizer.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]


def _is_text(prompt: Prompt) -> bool:
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return isinstance(prompt, str) or (is_list and isinstance(prompt[0], str))


def _stops(model: "Transformer", prompt: Prompt, stop: StopTokens | None) -> list[tuple[int, ...]]:
    if stop is None and _is_text(prompt) and model.tokenizer is not None:
        stop = model.tokenizer.special.get("eos")
    if isinstance(stop, str | Tensor):
        raise ArgumentError(
            f"stop: must be a token id, or a list of token ids and token sequences. Got {type(stop).__name__}."
        )
    items = [] if stop is None else [stop] if isinstance(stop, int) else stop
    stops = [(item,) if isinstance(item, int) else tuple(item) for item in items]
    if () in stops:
        raise ArgumentError("stop: contains an empty sequence. Each stop sequence needs at least one token id.")
    return stops


def _ended(tail: Tensor, stops: list[tuple[int, ...]]) -> Tensor:
    """Return True for rows that end in a stop sequence: (B, generated) → (B,)."""
    ended = torch.zeros(len(tail), dtype=torch.bool, device=tail.device)
    for stop in stops:
        if len(stop) <= tail.shape[1]:
            ended |= (tail[:, -len(stop) :] == torch.tensor(stop, device=tail.device)).all(1)
    return ended


def _end_positions(generated: Tensor, stops: list[tuple[int, ...]]) -> list[int]:
    """Return the number of generated tokens of each row, including its stop sequence."""
    ends = [generated.shape[1]] * len(generated)
    for length in range(generated.shape[1], 0, -1):
        for i, ended in enumerate(_ended(generated[:, :length], stops).tolist()):
            if ended:
                ends[i] = length
    return ends
