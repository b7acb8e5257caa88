"""One model, one question at a time: a short line of those who wait, and an end that comes quickly."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headwise.ui.request_guard import RequestError

MOST = 16  # questions at work or waiting; more are asked to come again
GRACE = 1.0  # seconds the question at work may still take when the server is to end
X = TypeVar("X")


class Turns:
    """Takes questions in the order they come. The model works on a thread of its own, so the server goes on listening."""

    def __init__(self, most: int = MOST) -> None:
        self.most, self.here = most, 0
        self._turn, self._closing = asyncio.Lock(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")

    async def take(self, work: Callable[[], X], gone: Callable[[], Awaitable[bool]] | None = None) -> X:
        """Wait for a turn and do the work; nothing is done for someone who is `gone` by then."""
        if self.here >= self.most:
            raise RequestError(503, f"{self.here} questions are waiting already; ask again soon.", {"Retry-After": "1"})
        self.here += 1
        try:
            async with self._turn:
                if self._closing.is_set():
                    raise _ending()
                if gone is not None and await gone():
                    raise RequestError(400, "nobody waits for this answer any more.")
                return await self._do(work)
        finally:
            self.here -= 1

    def close(self) -> None:
        """No more questions: those who wait are refused, the one at work has a moment to end."""
        self._closing.set()

    async def _do(self, work: Callable[[], X]) -> X:
        answer = asyncio.wrap_future(self._thread.submit(work))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({answer, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=GRACE)
            if not answer.done():
                raise _ending()
            return answer.result()
        finally:
            closing.cancel()


def _ending() -> RequestError:
    return RequestError(503, "the server is ending; start it again.", {"Retry-After": "10"})
