"""The live view's server: the page, its report data, and a model that answers. Nothing is written to disk."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headwise.errors import HeadwiseError
from headwise.ui.live_session import LiveSession
from headwise.ui.request_guard import ASGIApp, RequestError, RequestGuard, read_json_object
from headwise.ui.request_queue import RequestQueue

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise HeadwiseError("the live view needs starlette and uvicorn: pip install 'headwise[view]'.") from None

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml", "png": "image/png", "json": "application/json",
}  # fmt: skip
LIVE_META_TAG = b'<head>\n<meta name="headwise-live" content="yes">'  # how the page knows that somebody answers
MAX_CONNECTIONS = 512  # at once
REQUEST_TIMEOUT = 5.0  # seconds to send the head of a request
MAX_ADDRESS_CHARACTERS = 32  # characters of a head's


def make_app(
    session: LiveSession,
    report_data: dict[str, Any],
    *,
    files: dict[str, bytes],
    request_queue: RequestQueue | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> ASGIApp:
    """The view as an ASGI app, guarded: its files, GET api/report, POST api/sentence, api/predict, api/step, api/explain."""
    request_queue = request_queue or RequestQueue()
    report_json = _to_json(report_data)  # once: it stays the same
    files = {**files, "index.html": files["index.html"].replace(b"<head>", LIVE_META_TAG, 1)}
    endpoints: dict[str, Callable[..., dict]] = {
        "sentence": session.sentence_data,
        "predict": session.predict,
        "step": session.generate_next_token,
        "explain": session.explain,
    }

    async def get_report_data(_: Request) -> Response:
        return Response(report_json, media_type="application/json")

    async def get_file(request: Request) -> Response:
        name = request.scope["path"][1:] or "index.html"
        return Response(files[name], media_type=MEDIA_TYPES[name.rpartition(".")[2]])

    async def handle_request(request: Request) -> Response:
        endpoint = request.scope["path"].rpartition("/")[2]
        arguments = ARGUMENT_PARSERS[endpoint](await read_json_object(request.headers, request.stream()))
        return Response(
            await request_queue.run(lambda: _to_json(endpoints[endpoint](*arguments)), request.is_disconnected),
            media_type="application/json",
        )

    routes = [
        *(Route(f"/{name}", get_file) for name in ("", *files)),  # no name is ever looked up on a disk
        Route("/api/report", get_report_data),
        *(Route(f"/api/{endpoint}", handle_request, methods=["POST"]) for endpoint in endpoints),
    ]
    handlers: dict[Any, Any] = dict.fromkeys(
        (RequestError, HTTPException, HeadwiseError, ClientDisconnect, Exception), _error_response
    )
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return RequestGuard(app, host, token)


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at this address, not listening yet; port 0 takes any that is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise HeadwiseError(f"{host!r} is no address of this machine: {error.strerror}.") from None
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise HeadwiseError(f"cannot listen at {host} port {port}: {error}; choose another --port, 0 is any.") from None
    return sock


def view_url(host: str, sock: socket.socket, token: str | None = None) -> str:
    """What to open in a browser.

    >>> with bind_socket("127.0.0.1", 0) as free:
    ...     view_url("127.0.0.1", free, "secret").startswith("http://127.0.0.1:")
    True
    """
    port = sock.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):  # every address of this machine
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + ("" if token is None else f"?token={token}")


def serve(
    app: ASGIApp, request_queue: RequestQueue, sock: socket.socket, on_ready: Callable[[], object] = lambda: None
) -> None:
    """Answer until Ctrl-C. A question that takes longer than its moment of grace goes on in a thread nobody waits for."""
    # What is no HTTP is answered with 400 and not noted: somebody could fill the terminal with it.
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]  # plain dicts, where uvicorn names each kind of message
        http=TimedProtocol, ws="none", loop="asyncio", lifespan="off", log_level="error", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=5, timeout_graceful_shutdown=2,
        limit_concurrency=MAX_CONNECTIONS,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # how a server is meant to end
        _LiveServer(config, request_queue, on_ready).run(sockets=[sock])


class TimedProtocol(H11Protocol):
    """Close connections that do not send a whole request head in time: idle ones would use up all connections."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; the time limit ends with the head of the request."""
        super().data_received(data)
        if self._awaits_request():
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time limit."""
        self._stop_timer()
        super().connection_lost(exc)

    def _awaits_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        if self.deadline is None:
            self.deadline = self.loop.call_later(REQUEST_TIMEOUT, self._give_up)

    def _stop_timer(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _give_up(self) -> None:
        self.deadline = None
        if self._awaits_request():
            self.transport.close()


class _LiveServer(uvicorn.Server):
    """Says when it listens, and lets nobody wait when it ends."""

    def __init__(self, config: uvicorn.Config, request_queue: RequestQueue, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.request_queue, self.on_ready = request_queue, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.request_queue.close()
        await super().shutdown(sockets)


def _parse_text(body: dict[str, Any], *allowed: str) -> str:
    """The text of a request that may ask for these others too, and for nothing else."""
    unknown = sorted(set(body) - {"text", *allowed})
    if unknown:
        raise RequestError(400, f"{unknown[0][:80]!r} is not asked for; send {' and '.join(('text', *allowed))}.")
    if not isinstance(body.get("text"), str):
        raise RequestError(400, f"text must be a string; got {type(body.get('text')).__name__}.")
    return body["text"]


def _parse_text_and_heads(body: dict[str, Any]) -> tuple[str, list[str]]:
    text, silenced = _parse_text(body, "silenced"), body.get("silenced", [])
    if not isinstance(silenced, list) or not all(
        isinstance(head, str) and len(head) <= MAX_ADDRESS_CHARACTERS for head in silenced
    ):
        raise RequestError(400, 'silenced must be a list of heads by address, ["5.1", "6.9"].')
    return text, silenced


def _parse_edge(body: dict[str, Any]) -> tuple[str, str, int, int, bool]:
    """One look: a text, a head, and the places of who looks and who is looked at, among words or tokens."""
    text = _parse_text(body, "head", "query", "key", "words")
    head, query, key, words = (body.get(name) for name in ("head", "query", "key", "words"))
    if not isinstance(head, str) or len(head) > MAX_ADDRESS_CHARACTERS:
        raise RequestError(400, 'head must be an address, "5.1".')
    if type(query) is not int or type(key) is not int or not isinstance(words, bool):
        raise RequestError(400, "query and key must be places, whole numbers; words true or false.")
    return text, head, query, key, words


ARGUMENT_PARSERS: dict[str, Callable[[dict[str, Any]], tuple]] = {
    "sentence": lambda body: (_parse_text(body),),
    "predict": _parse_text_and_heads,
    "step": _parse_text_and_heads,
    "explain": _parse_edge,
}


async def _error_response(request: Request, error: Exception) -> Response:
    """Anything that went wrong, as JSON; what is our own fault is told on the terminal alone."""
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        message = (
            f"{request.method[:20]} is not answered here; use {allowed}." if allowed else "there is no such thing here."
        )
        error = RequestError(error.status_code, message, error.headers)
    elif isinstance(error, HeadwiseError):
        error = RequestError(422, str(error))
    elif isinstance(error, ClientDisconnect):
        error = RequestError(400, "the request broke off.")
    elif not isinstance(error, RequestError):
        error = RequestError(500, "something is wrong in the server; its terminal says what.")
    return Response(error.body, error.status, error.headers, "application/json")


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
