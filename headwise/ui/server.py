"""Server of the live view: the page, its report data and the model API. It writes nothing to disk."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headwise.errors import ArgumentError, HeadwiseError, MissingDependencyError
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
    raise MissingDependencyError(
        "starlette, uvicorn: required by the live view, but not installed. Run: pip install 'headwise[view]'."
    ) from None

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml", "png": "image/png", "json": "application/json",
}  # fmt: skip
LIVE_META_TAG = b'<head>\n<meta name="headwise-live" content="yes">'  # tells the page that a server is available
MAX_CONNECTIONS = 512  # concurrent connections
REQUEST_TIMEOUT = 5.0  # seconds to receive the headers of a request
MAX_ADDRESS_CHARACTERS = 32  # length of a head address


def make_app(
    session: LiveSession,
    report_data: dict[str, Any],
    *,
    files: dict[str, bytes],
    request_queue: RequestQueue | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> ASGIApp:
    """Build the ASGI app: files, GET api/report, POST api/sentence, api/predict, api/step, api/continue, api/explain."""
    request_queue = request_queue or RequestQueue()
    steerings = {"steerings": session.steering_list()} if session.steerings else {}
    report_json = _encode_json({**report_data, **steerings})  # constant, serialized once
    files = {**files, "index.html": files["index.html"].replace(b"<head>", LIVE_META_TAG, 1)}
    endpoints: dict[str, Callable[..., dict]] = {
        "sentence": session.sentence_data,
        "predict": session.predict,
        "step": session.generate_next_token,
        "continue": session.continue_text,
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
            await request_queue.run(lambda: _encode_json(endpoints[endpoint](*arguments)), request.is_disconnected),
            media_type="application/json",
        )

    routes = [
        *(Route(f"/{name}", get_file) for name in ("", *files)),  # file names are never looked up on disk
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
    """Bind a socket that does not listen yet. Port 0 takes any free port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ArgumentError(
            f"host: not an address of this machine ({error.strerror}). Got {host!r}. Use 127.0.0.1 for local access."
        ) from None
    try:
        if sys.platform != "win32":  # on Windows two servers could share the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ArgumentError(
            f"port: cannot listen at {host} port {port}: {error}. Choose another --port, or 0 for any free port."
        ) from None
    return sock


def view_url(host: str, sock: socket.socket, token: str | None = None) -> str:
    """Return the URL of the live view.

    >>> with bind_socket("127.0.0.1", 0) as free:
    ...     view_url("127.0.0.1", free, "secret").startswith("http://127.0.0.1:")
    True
    """
    port = sock.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):  # bound to all interfaces
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + ("" if token is None else f"?token={token}")


def serve(
    app: ASGIApp, request_queue: RequestQueue, sock: socket.socket, on_ready: Callable[[], object] = lambda: None
) -> None:
    """Serve until Ctrl-C. A request that outlasts the grace period continues in its thread until the process exits."""
    # Malformed HTTP gets status 400 and is not logged, so that a client cannot flood the terminal.
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]  # plain dicts instead of uvicorn's message types
        http=TimedProtocol, ws="none", loop="asyncio", lifespan="off", log_level="error", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=5, timeout_graceful_shutdown=2,
        limit_concurrency=MAX_CONNECTIONS,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # the normal way to stop the server
        _LiveServer(config, request_queue, on_ready).run(sockets=[sock])


class TimedProtocol(H11Protocol):
    """Close connections that do not send complete headers in time. Idle ones would exhaust the connection limit."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. The timer stops when the headers are complete."""
        super().data_received(data)
        if self._awaits_request():
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
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
    """Call `on_ready` when the server listens, and close the request queue at shutdown."""

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
    """Return the text of a request. Reject fields that are not in `allowed`."""
    unknown = sorted(set(body) - {"text", *allowed})
    if unknown:
        raise RequestError(400, f"{unknown[0][:80]!r}: unknown field. Send {' and '.join(('text', *allowed))}.")
    if not isinstance(body.get("text"), str):
        raise RequestError(400, f"text: must be a string. Got {type(body.get('text')).__name__}.")
    return body["text"]


def _parse_text_heads_and_steering(body: dict[str, Any]) -> tuple[str, list[str], dict[str, float]]:
    text, silenced = _parse_text(body, "silenced", "steering"), body.get("silenced", [])
    steering = body.get("steering", {})
    if not isinstance(steering, dict) or not all(
        isinstance(strength, int | float) and not isinstance(strength, bool) and abs(strength) < float("inf")
        for strength in steering.values()
    ):
        raise RequestError(400, 'steering: must map names to strengths, for example {"sentiment": 1.5}.')
    if not isinstance(silenced, list) or not all(
        isinstance(head, str) and len(head) <= MAX_ADDRESS_CHARACTERS for head in silenced
    ):
        raise RequestError(400, 'silenced: must be a list of head addresses, for example ["5.1", "6.9"].')
    return text, silenced, {name: float(strength) for name, strength in steering.items()}


def _parse_attention_edge(body: dict[str, Any]) -> tuple[str, str, int, int, bool]:
    """Return text, head, query index, key index, and whether the indices count words instead of tokens."""
    text = _parse_text(body, "head", "query", "key", "words")
    head, query, key, words = (body.get(name) for name in ("head", "query", "key", "words"))
    if not isinstance(head, str) or len(head) > MAX_ADDRESS_CHARACTERS:
        raise RequestError(400, 'head: must be an address, for example "5.1".')
    if type(query) is not int or type(key) is not int or not isinstance(words, bool):
        raise RequestError(400, "query, key: must be integers; words: must be true or false.")
    return text, head, query, key, words


ARGUMENT_PARSERS: dict[str, Callable[[dict[str, Any]], tuple]] = {
    "sentence": lambda body: (_parse_text(body),),
    "predict": _parse_text_heads_and_steering,
    "step": _parse_text_heads_and_steering,
    "continue": _parse_text_heads_and_steering,
    "explain": _parse_attention_edge,
}


async def _error_response(request: Request, error: Exception) -> Response:
    """Convert an exception to a JSON response. Details of internal errors are only printed on the terminal."""
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        message = (
            f"method: {request.method[:20]} is not supported. Use {allowed}." if allowed else "path: not found. Open /."
        )
        error = RequestError(error.status_code, message, error.headers)
    elif isinstance(error, HeadwiseError):
        error = RequestError(422, str(error))
    elif isinstance(error, ClientDisconnect):
        error = RequestError(400, "client: disconnected during the request.")
    elif not isinstance(error, RequestError):
        error = RequestError(500, "server: internal error. See the terminal of the server for the traceback.")
    return Response(error.body, error.status, error.headers, "application/json")


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
