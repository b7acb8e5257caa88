"""Request queue of the live view: the model handles one request at a time, the queue is bounded, shutdown is fast."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headwise.ui.request_guard import RequestError

MAX_REQUESTS = 16  # running and waiting requests; further ones get status 503
GRACE_SECONDS = 1.0  # time for the running request to finish at shutdown
ResultT = TypeVar("ResultT")


class RequestQueue:
    """Run requests in order of arrival. The model runs in its own thread, so that the server stays responsive."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self.max_requests, self.pending = max_requests, 0
        self._lock, self._closing = asyncio.Lock(), asyncio.Event()
        self._executor = ThreadPoolExecutor(1, "model")

    async def run(
        self, work: Callable[[], ResultT], is_disconnected: Callable[[], Awaitable[bool]] | None = None
    ) -> ResultT:
        """Wait in the queue, then run `work`. Skip it if the client has disconnected by then."""
        if self.pending >= self.max_requests:
            raise RequestError(
                503, f"server: busy, {self.pending} requests are waiting. Try again in a second.", {"Retry-After": "1"}
            )
        self.pending += 1
        try:
            async with self._lock:
                if self._closing.is_set():
                    raise _shutdown_error()
                if is_disconnected is not None and await is_disconnected():
                    raise RequestError(400, "client: disconnected before the request started.")
                return await self._run_in_thread(work)
        finally:
            self.pending -= 1

    def close(self) -> None:
        """Reject waiting and new requests. The running request has `GRACE_SECONDS` to finish."""
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
    return RequestError(503, "server: shutting down. Start it again.", {"Retry-After": "10"})
