"""Writing on from a text with somebody else's `generate`, token by token."""

import contextvars
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HOOKS, set_open_hooks
from headwise.text import Tokenizer

LENGTH_OPTIONS = ("max_length", "generation_config")  # their own words for how much is written
DEFAULT_MAX_NEW_TOKENS = 64  # where nobody has said it


def stream_tokens(
    model: Any,
    ids: Tensor,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Generator[Tensor, None, None]:
    """The tokens that follow ids (B, T), (B,) each, as they are made; temperature 0 takes the best one every time.

    Their `generate` writes in a thread of its own, which moves only while the next token is waited for.
    """
    check_can_generate(model)
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise HeadwiseError(f"max_new_tokens must be a whole number, 0 or more; got {max_new_tokens!r}.")
    pad_token_id = model.generation_config.pad_token_id
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "num_beams": 1,
        "do_sample": temperature > 0,
        "pad_token_id": 0 if pad_token_id is None else pad_token_id,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    return _generate_steps(model, ids, options, seed)


def generate(model: Any, prompt: Any, max_new_tokens: int | None, seed: int | None, options: dict[str, Any]) -> Any:
    """Their `generate` with its own options, of ids or of whatever else it takes: what was given and what follows.

    `max_new_tokens` is how many at most. Where neither it nor one of their own limits is given, ids are followed by 64.
    """
    check_can_generate(model)
    if max_new_tokens is None and prompt is not None and not any(name in options for name in LENGTH_OPTIONS):
        max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens is not None:
        options = {**options, "max_new_tokens": max_new_tokens}
    if "temperature" in options and "do_sample" not in options:  # which alone would say nothing to them
        options = {**options, "do_sample": options["temperature"] > 0}
        options = (
            options
            if options["do_sample"]
            else {name: value for name, value in options.items() if name != "temperature"}
        )
    is_list = isinstance(prompt, Sequence)
    ids = torch.tensor([prompt], device=model.device) if is_list else prompt  # (1, T)
    with nullcontext() if seed is None else _ScopedRNG(seed, model.device).active():
        generated = model.generate(**options) if ids is None else model.generate(ids, **options)
    return generated[0].tolist() if is_list else generated


def prompt_to_ids(model: Any, tokenizer: Tokenizer | None, text: str) -> Tensor:
    """A text to go on from, (1, T)."""
    check_can_generate(model)
    if tokenizer is None:
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; hw.attach(model, tokenizer).")
    return torch.tensor([tokenizer.encode(text)], device=model.device)


def check_can_generate(model: Any) -> None:
    """Refuse a model that does not write."""
    if not model.can_generate():
        raise HeadwiseError(f"{type(model).__name__} does not generate; take a model with a language-model head.")


def _generate_steps(
    model: Any, ids: Tensor, options: dict[str, Any], seed: int | None
) -> Generator[Tensor, None, None]:
    if options["max_new_tokens"] == 0:
        return
    mask = torch.ones_like(ids)
    step_streamer = _StepStreamer(
        lambda streamer: model.generate(ids, attention_mask=mask, streamer=streamer, **options), ids.device
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
    """Nobody waits for more. Not an `Exception`, so that nothing on the way takes it for a failure."""


class _StepStreamer:
    """What transformers calls a streamer: `put` hears the prompt, (B, T), then token after token, (B,).

    Writer and reader take turns and never run at the same time. So whatever is open while the reader waits (silenced heads,
    drawn numbers) is in force for that token, and nothing is worked out that nobody reads. The writer adopts the edits and
    listeners of the reader's context for each token.
    """

    def __init__(self, run_generate: Callable[["_StepStreamer"], object], device: torch.device) -> None:
        self._resume, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._step: Tensor | None = None
        self._error: BaseException | None = None
        self._stopped = self._done = False
        self._hooks = HOOKS.now
        device_type = device.type  # a thread begins without autocast and without context variables
        autocast = torch.autocast(
            device_type, torch.get_autocast_dtype(device_type), enabled=torch.is_autocast_enabled(device_type)
        )
        run_in_context = contextvars.copy_context().run
        self._thread = threading.Thread(target=run_in_context, args=(self._run, run_generate, autocast), daemon=True)
        self._thread.start()

    def next(self) -> Tensor | None:
        """Let it write one token, (B,); None at the end."""
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
        """End, wherever it is; the thread is gone afterwards."""
        self._stopped = True
        self._resume.release()
        self._thread.join()

    def put(self, value: Tensor) -> None:
        """Called by their `generate`."""
        if value.ndim > 1:
            return  # the prompt
        self._step = value
        self._ready.release()
        self._wait()
        if self._stopped:
            raise _StopGeneration

    def end(self) -> None:
        """Called by their `generate`; it returns just after."""

    def _wait(self) -> None:
        """Wait for the reader, and adopt the hooks that are open there."""
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
        except BaseException as error:  # whoever reads must hear of it
            self._error = error
        finally:
            self._done = True
            self._ready.release()


class _ScopedRNG:
    """Random numbers of one's own, for code that draws torch's."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = [
            torch.Generator(rng_device).manual_seed(seed).get_state() for rng_device in ("cpu", *self._devices)
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While open torch draws them; afterwards it goes on where it was."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
