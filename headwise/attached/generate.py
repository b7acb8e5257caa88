"""Text generation with transformers' `generate`, token by token."""

import contextvars
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import HOOKS, set_open_hooks
from headwise.kernels.random_state import fork_rng, get_rng_state, make_generator, set_rng_state
from headwise.text import Tokenizer

LENGTH_OPTIONS = ("max_length", "generation_config")  # options of transformers that limit the length
DEFAULT_MAX_NEW_TOKENS = 64


def stream_tokens(
    model: Any,
    ids: Tensor,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    run_generate: Callable[..., Any] | None = None,
) -> Generator[Tensor, None, None]:
    """Yield the tokens after ids (B, T), (B,) per step. Temperature 0 is greedy.

    `run_generate` replaces `model.generate`.

    transformers' `generate` runs in a thread of its own, which is active only while the caller waits for the next token.
    """
    check_can_generate(model)
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ArgumentError(f"max_new_tokens={max_new_tokens!r}: must be an integer of at least 0.")
    pad_token_id = model.generation_config.pad_token_id
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "num_beams": 1,
        "do_sample": temperature > 0,
        "pad_token_id": 0 if pad_token_id is None else pad_token_id,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    return _generate_steps(run_generate or model.generate, ids, options, seed)


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int | None,
    seed: int | None,
    options: dict[str, Any],
    run_generate: Callable[..., Any],
) -> Any:
    """Call transformers' `generate`, given as `run_generate`, with its own options. Returns the prompt and its continuation.

    If neither `max_new_tokens` nor one of transformers' length options is given, at most 64 tokens are generated.
    """
    check_can_generate(model)
    if max_new_tokens is None and prompt is not None and not any(name in options for name in LENGTH_OPTIONS):
        max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens is not None:
        options = {**options, "max_new_tokens": max_new_tokens}
    if "temperature" in options and "do_sample" not in options:  # transformers ignores temperature without do_sample
        options = {**options, "do_sample": options["temperature"] > 0}
        options = (
            options
            if options["do_sample"]
            else {name: value for name, value in options.items() if name != "temperature"}
        )
    is_list = isinstance(prompt, Sequence)
    ids = torch.tensor([prompt], device=model.device) if is_list else prompt  # (1, T)
    with nullcontext() if seed is None else _ScopedRNG(seed, model.device).active():
        generated = run_generate(**options) if ids is None else run_generate(ids, **options)
    return generated[0].tolist() if is_list else generated


def prompt_to_ids(model: Any, tokenizer: Tokenizer | None, text: str) -> Tensor:
    """Tokenize a prompt: (1, T)."""
    check_can_generate(model)
    if tokenizer is None:
        raise ArgumentError(
            "prompt: this model has no tokenizer and cannot take text. Attach it with one: hw.attach(model, tokenizer)."
        )
    return torch.tensor([tokenizer.encode(text)], device=model.device)


def check_can_generate(model: Any) -> None:
    """Raise an error if the model cannot generate."""
    if not model.can_generate():
        raise UnsupportedModelError(f"{type(model).__name__} cannot generate text. Use a model with an LM head.")


def _generate_steps(
    run_generate: Callable[..., Any], ids: Tensor, options: dict[str, Any], seed: int | None
) -> Generator[Tensor, None, None]:
    if options["max_new_tokens"] == 0:
        return
    mask = torch.ones_like(ids)
    step_streamer = _StepStreamer(
        lambda streamer: run_generate(ids, attention_mask=mask, streamer=streamer, **options), ids.device
    )
    rng = None if seed is None else _ScopedRNG(seed, ids.device)
    try:
        while True:
            with nullcontext() if rng is None else rng.active():
                step = step_streamer.next()
            if step is None:
                return
            yield step.to(ids.device)
    finally:
        step_streamer.close()


class _StopGeneration(BaseException):
    """Stops the generating thread. Not an `Exception`, so that no code in between treats it as a failure."""


class _StepStreamer:
    """Streamer for transformers' `generate`: `put` receives the prompt, (B, T), then each token, (B,).

    The generating thread and the caller alternate and never run at the same time. Contexts that are open while the caller
    waits (silenced heads, RNG state) therefore apply to that token, and no token is computed before it is requested. The
    generating thread takes over the caller's edits and listeners for each token.
    """

    def __init__(self, run_generate: Callable[["_StepStreamer"], object], device: torch.device) -> None:
        self._resume, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._step: Tensor | None = None
        self._error: BaseException | None = None
        self._stopped = self._done = False
        self._hooks = HOOKS.now
        device_type = device.type  # a new thread starts without autocast and context variables
        autocast = torch.autocast(
            device_type, torch.get_autocast_dtype(device_type), enabled=torch.is_autocast_enabled(device_type)
        )
        run_in_context = contextvars.copy_context().run
        self._thread = threading.Thread(target=run_in_context, args=(self._run, run_generate, autocast), daemon=True)
        self._thread.start()

    def next(self) -> Tensor | None:
        """Generate one token, (B,). Returns None at the end."""
        self._hooks = HOOKS.now
        self._resume.release()
        self._ready.acquire()
        if not self._done:
            return self._step
        self._thread.join()
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """Stop generation and join the thread."""
        self._stopped = True
        self._resume.release()
        self._thread.join()

    def put(self, value: Tensor) -> None:
        """Receive a token. Called by transformers' `generate`."""
        if value.ndim > 1:
            return  # the prompt
        self._step = value
        self._ready.release()
        self._wait()
        if self._stopped:
            raise _StopGeneration

    def end(self) -> None:
        """End of generation. Called by transformers' `generate`."""

    def _wait(self) -> None:
        """Wait for the caller and take over its open hooks."""
        self._resume.acquire()
        set_open_hooks(self._hooks)

    def _run(self, run_generate: Callable[["_StepStreamer"], object], autocast: Any) -> None:
        self._wait()
        try:
            if not self._stopped:
                with autocast:
                    run_generate(self)
        except _StopGeneration:
            pass
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        finally:
            self._done = True
            self._ready.release()


class _ScopedRNG:
    """Separate RNG state for code that uses torch's global RNG."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = list(dict.fromkeys((torch.device("cpu"), device)))
        self._states = [make_generator(rng_device, seed).get_state() for rng_device in self._devices]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this RNG state while the context is open, then restore torch's own."""
        with fork_rng(self._devices[-1]):
            for device, state in zip(self._devices, self._states, strict=True):
                set_rng_state(state, device)
            yield
            self._states = [get_rng_state(device) for device in self._devices]
