"""One model, one question at a time: a short line of those who wait, and an end that comes quickly."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headwise.ui.request_guard import RequestError

MAX_REQUESTS = 16  # questions at work or waiting; more are asked to come again
GRACE_SECONDS = 1.0  # seconds the question at work may still take when the server is to end
ResultT = TypeVar("ResultT")


class RequestQueue:
    """Takes questions in the order they come. The model works on a thread of its own, so the server goes on listening."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self.max_requests, self.pending = max_requests, 0
        self._lock, self._closing = asyncio.Lock(), asyncio.Event()
        self._executor = ThreadPoolExecutor(1, "model")

    async def run(
        self, work: Callable[[], ResultT], is_disconnected: Callable[[], Awaitable[bool]] | None = None
    ) -> ResultT:
        """Wait for a turn and do the work; nothing is done for someone who is `gone` by then."""
        if self.pending >= self.max_requests:
            raise RequestError(
                503, f"{self.pending} questions are waiting already; ask again soon.", {"Retry-After": "1"}
            )
        self.pending += 1
        try:
            async with self._lock:
                if self._closing.is_set():
                    raise _shutdown_error()
                if is_disconnected is not None and await is_disconnected():
                    raise RequestError(400, "nobody waits for this answer any more.")
                return await self._run_in_thread(work)
        finally:
            self.pending -= 1

    def close(self) -> None:
        """No more questions: those who wait are refused, the one at work has a moment to end."""
        self._closing.set()

    async def _run_in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        answer = asyncio.wrap_future(self._executor.submit(work))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({answer, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=GRACE_SECONDS)
            if not answer.done():
                raise _shutdown_error()
            return answer.result()
        finally:
            closing.cancel()


def _shutdown_error() -> RequestError:
    return RequestError(503, "the server is ending; start it again.", {"Retry-After": "10"})
