"""Writing on from a text with somebody else's `generate`, token by token."""

import contextvars
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HOOKS, adopt_hooks
from headwise.text import Tokenizer

LIMITS = ("max_new_tokens", "max_length", "generation_config")  # their own words for how much is written
TOKENS = 64  # where nobody has said it


def speak(
    model: Any,
    ids: Tensor,
    tokens: int = TOKENS,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Generator[Tensor, None, None]:
    """The tokens that follow ids (B, T), (B,) each, as they are made; temperature 0 takes the best one every time.

    Their `generate` writes in a thread of its own, which moves only while the next token is waited for.
    """
    check_speaker(model)
    if type(tokens) is not int or tokens < 0:
        raise HeadwiseError(f"tokens must be a whole number, 0 or more; got {tokens!r}.")
    pad = model.generation_config.pad_token_id
    how: dict[str, Any] = {
        "max_new_tokens": tokens,
        "num_beams": 1,
        "do_sample": temperature > 0,
        "pad_token_id": 0 if pad is None else pad,
    }
    if temperature > 0:
        how |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    return _steps(model, ids, how, seed)


def speak_whole(model: Any, prompt: Any, tokens: int | None, seed: int | None, how: dict[str, Any]) -> Any:
    """Their `generate` with its own options, of ids or of whatever else it takes: what was given and what follows.

    `tokens` is how many at most. Where neither it nor one of their own limits is given, ids are followed by 64.
    """
    check_speaker(model)
    given = [name for name in LIMITS if name in how]
    if tokens is not None and given:
        raise HeadwiseError(f"how many tokens are written is said twice, by tokens= and {given[0]}=; give one of them.")
    if tokens is None and not given and prompt is not None:
        tokens = TOKENS
    if tokens is not None:
        how = {**how, "max_new_tokens": tokens}
    if "temperature" in how and "do_sample" not in how:  # which alone would say nothing to them
        how = {**how, "do_sample": how["temperature"] > 0}
        how = how if how["do_sample"] else {name: value for name, value in how.items() if name != "temperature"}
    listed = isinstance(prompt, Sequence)
    ids = torch.tensor([prompt], device=model.device) if listed else prompt  # (1, T)
    with nullcontext() if seed is None else _Dice(seed, model.device).lent():
        made = model.generate(**how) if ids is None else model.generate(ids, **how)
    return made[0].tolist() if listed else made


def read_prompt(model: Any, tokenizer: Tokenizer | None, text: str) -> Tensor:
    """A text to go on from, (1, T)."""
    check_speaker(model)
    if tokenizer is None:
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; hw.attach(model, tokenizer).")
    return torch.tensor([tokenizer.encode(text)], device=model.device)


def check_speaker(model: Any) -> None:
    """Refuse a model that does not write."""
    if not model.can_generate():
        raise HeadwiseError(f"{type(model).__name__} does not generate; take a model with a language-model head.")


def _steps(model: Any, ids: Tensor, how: dict[str, Any], seed: int | None) -> Generator[Tensor, None, None]:
    if how["max_new_tokens"] == 0:
        return
    mask = torch.ones_like(ids)
    writer = _Writer(lambda streamer: model.generate(ids, attention_mask=mask, streamer=streamer, **how), ids.device)
    dice = None if seed is None else _Dice(seed, ids.device)
    try:
        while True:
            with nullcontext() if dice is None else dice.lent():
                step = writer.next()
            if step is None:
                return
            yield step.to(ids.device)
    finally:
        writer.close()


class _Stopped(BaseException):
    """Nobody waits for more. Not an `Exception`, so that nothing on the way takes it for a failure."""


class _Writer:
    """What transformers calls a streamer: `put` hears the prompt, (B, T), then token after token, (B,).

    Writer and reader take turns and never run at the same time. So whatever is open while the reader waits (silenced heads,
    drawn numbers) is in force for that token, and nothing is worked out that nobody reads. The writer adopts the edits and
    listeners of the reader's context for each token.
    """

    def __init__(self, write: Callable[["_Writer"], object], device: torch.device) -> None:
        self._go, self._made = threading.Semaphore(0), threading.Semaphore(0)
        self._step: Tensor | None = None
        self._error: BaseException | None = None
        self._stopped = self._done = False
        self._hooks = HOOKS.now
        kind = device.type  # a thread begins without autocast and without context variables
        cast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._work, write, cast), daemon=True)
        self._thread.start()

    def next(self) -> Tensor | None:
        """Let it write one token, (B,); None at the end."""
        self._hooks = HOOKS.now
        self._go.release()
        self._made.acquire()
        if not self._done:
            return self._step
        self._thread.join()
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """End, wherever it is; the thread is gone afterwards."""
        self._stopped = True
        self._go.release()
        self._thread.join()

    def put(self, value: Tensor) -> None:
        """Called by their `generate`."""
        if value.ndim > 1:
            return  # the prompt
        self._step = value
        self._made.release()
        self._wait()
        if self._stopped:
            raise _Stopped

    def end(self) -> None:
        """Called by their `generate`; it returns just after."""

    def _wait(self) -> None:
        """Wait for the reader, and adopt the hooks that are open there."""
        self._go.acquire()
        adopt_hooks(self._hooks)

    def _work(self, write: Callable[["_Writer"], object], cast: Any) -> None:
        self._wait()
        try:
            if not self._stopped:
                with cast:
                    write(self)
        except _Stopped:
            pass
        except BaseException as error:  # whoever reads must hear of it
            self._error = error
        finally:
            self._done = True
            self._made.release()


class _Dice:
    """Random numbers of one's own, for code that draws torch's."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = [torch.Generator(place).manual_seed(seed).get_state() for place in ("cpu", *self._devices)]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While open torch draws them; afterwards it goes on where it was."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
