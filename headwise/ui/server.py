"""The live view's server: the page, its book, and a model that answers. Nothing is written to disk."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headwise.errors import HeadwiseError
from headwise.ui.live_session import Live
from headwise.ui.request_guard import App, Guard, RequestError, read_object
from headwise.ui.request_queue import Turns

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

KINDS = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml", "png": "image/png", "json": "application/json",
}  # fmt: skip
LIVE = b'<head>\n<meta name="headwise-live" content="yes">'  # how the page knows that somebody answers
CONNECTIONS = 512  # at once
REQUEST_TIMEOUT = 5.0  # seconds to send the head of a request
ADDRESS = 32  # characters of a head's


def make_app(
    live: Live,
    book: dict[str, Any],
    *,
    files: dict[str, bytes],
    turns: Turns | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> App:
    """The view as an ASGI app, guarded: its files, GET api/book, POST api/sentence, api/predict, api/step, api/why."""
    turns = turns or Turns()
    told = _json(book)  # once: it stays the same
    files = {**files, "index.html": files["index.html"].replace(b"<head>", LIVE, 1)}
    answers: dict[str, Callable[..., dict]] = {"sentence": live.sentence, "predict": live.predict, "step": live.step}
    answers["why"] = live.why

    async def get_book(_: Request) -> Response:
        return Response(told, media_type="application/json")

    async def get_file(request: Request) -> Response:
        name = request.scope["path"][1:] or "index.html"
        return Response(files[name], media_type=KINDS[name.rpartition(".")[2]])

    async def ask(request: Request) -> Response:
        what = request.scope["path"].rpartition("/")[2]
        arguments = ARGUMENTS[what](await read_object(request.headers, request.stream()))
        return Response(
            await turns.take(lambda: _json(answers[what](*arguments)), request.is_disconnected),
            media_type="application/json",
        )

    routes = [
        *(Route(f"/{name}", get_file) for name in ("", *files)),  # no name is ever looked up on a disk
        Route("/api/book", get_book),
        *(Route(f"/api/{what}", ask, methods=["POST"]) for what in answers),
    ]
    handlers: dict[Any, Any] = dict.fromkeys(
        (RequestError, HTTPException, HeadwiseError, ClientDisconnect, Exception), _refusal
    )
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, host, token)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, not listening yet; port 0 takes any that is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise HeadwiseError(f"{host!r} is no address of this machine: {error.strerror}.") from None
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        raise HeadwiseError(f"cannot listen at {host} port {port}: {error}; choose another --port, 0 is any.") from None
    return made


def address_of(host: str, at: socket.socket, token: str | None = None) -> str:
    """What to open in a browser.

    >>> with bind("127.0.0.1", 0) as free:
    ...     address_of("127.0.0.1", free, "secret").startswith("http://127.0.0.1:")
    True
    """
    port = at.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):  # every address of this machine
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + ("" if token is None else f"?token={token}")


def serve(app: App, turns: Turns, at: socket.socket, ready: Callable[[], object] = lambda: None) -> None:
    """Answer until Ctrl-C. A question that takes longer than its moment of grace goes on in a thread nobody waits for."""
    # What is no HTTP is answered with 400 and not noted: somebody could fill the terminal with it.
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]  # plain dicts, where uvicorn names each kind of message
        http=TimedProtocol, ws="none", loop="asyncio", lifespan="off", log_level="error", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=5, timeout_graceful_shutdown=2,
        limit_concurrency=CONNECTIONS,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # how a server is meant to end
        _Server(config, turns, ready).run(sockets=[at])


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


class _Server(uvicorn.Server):
    """Says when it listens, and lets nobody wait when it ends."""

    def __init__(self, config: uvicorn.Config, turns: Turns, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.turns, self.ready = turns, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.turns.close()
        await super().shutdown(sockets)


def _text(given: dict[str, Any], *others: str) -> str:
    """The text of a request that may ask for these others too, and for nothing else."""
    unknown = sorted(set(given) - {"text", *others})
    if unknown:
        raise RequestError(400, f"{unknown[0][:80]!r} is not asked for; send {' and '.join(('text', *others))}.")
    if not isinstance(given.get("text"), str):
        raise RequestError(400, f"text must be a string; got {type(given.get('text')).__name__}.")
    return given["text"]


def _text_and_heads(given: dict[str, Any]) -> tuple[str, list[str]]:
    text, silenced = _text(given, "silenced"), given.get("silenced", [])
    if not isinstance(silenced, list) or not all(isinstance(head, str) and len(head) <= ADDRESS for head in silenced):
        raise RequestError(400, 'silenced must be a list of heads by address, ["5.1", "6.9"].')
    return text, silenced


def _look(given: dict[str, Any]) -> tuple[str, str, int, int, bool]:
    """One look: a text, a head, and the places of who looks and who is looked at, among words or tokens."""
    text = _text(given, "head", "at", "to", "words")
    head, at, to, words = (given.get(name) for name in ("head", "at", "to", "words"))
    if not isinstance(head, str) or len(head) > ADDRESS:
        raise RequestError(400, 'head must be an address, "5.1".')
    if type(at) is not int or type(to) is not int or not isinstance(words, bool):
        raise RequestError(400, "at and to must be places, whole numbers; words true or false.")
    return text, head, at, to, words


ARGUMENTS: dict[str, Callable[[dict[str, Any]], tuple]] = {
    "sentence": lambda given: (_text(given),), "predict": _text_and_heads, "step": _text_and_heads, "why": _look,
}  # fmt: skip


async def _refusal(request: Request, error: Exception) -> Response:
    """Anything that went wrong, as JSON; what is our own fault is told on the terminal alone."""
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        told = (
            f"{request.method[:20]} is not answered here; use {allowed}." if allowed else "there is no such thing here."
        )
        error = RequestError(error.status_code, told, error.headers)
    elif isinstance(error, HeadwiseError):
        error = RequestError(422, str(error))
    elif isinstance(error, ClientDisconnect):
        error = RequestError(400, "the request broke off.")
    elif not isinstance(error, RequestError):
        error = RequestError(500, "something is wrong in the server; its terminal says what.")
    return Response(error.body, error.status, error.headers, "application/json")


def _json(made: Any) -> bytes:
    return json.dumps(made, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
