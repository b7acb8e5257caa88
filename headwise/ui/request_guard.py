"""Who may ask the live view, and how much: hosts, origins, a token, sizes. Plain ASGI, so it stands around everything.

A page from elsewhere must reach neither the model nor the texts. So a request names us by a name that is ours (a foreign
name that resolves here is a rebinding), a browser's request comes from our own page, and JSON is all that is read.
"""

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

MAX_BODY_BYTES = 1 << 18  # bytes of a request
BODY_TIMEOUT = 10  # in which they must have come

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_HOST_PATTERN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


class RequestError(Exception):
    """An answer that is no result: a status, what is wrong and what to do."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})

    @property
    def body(self) -> bytes:
        """As JSON."""
        return json.dumps({"error": self.message}).encode()


class RequestGuard:
    """Stands before an app: refuses what is not ours to answer, and puts the headers on everything that leaves."""

    def __init__(self, app: ASGIApp, host: str, token: str | None = None, cookie_name: str = "headwise") -> None:
        self.app, self.host, self.token, self.cookie_name = app, host, token, cookie_name

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the live view speaks HTTP alone; got {scope['type']}.")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra_headers = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra_headers]}
            await send(message)

        headers = _join_headers(scope)
        try:
            host = self._check_host(headers)
            _check_origin(scope["method"], headers, host)
            self._check_token(scope, headers)
        except RequestError as error:
            await send_error(send_with_headers, error)
            return
        await self.app(scope, receive, send_with_headers)

    def _check_host(self, headers: Mapping[str, str]) -> str:
        host = headers.get("host", "")
        match = _HOST_PATTERN.fullmatch(host)
        if match is None or not is_allowed_host(match[1].strip("[]").lower(), self.host):
            raise RequestError(
                421, f"this server does not answer to the name {host[:80]!r}; use the address it printed."
            )
        return host

    def _check_token(self, scope: Message, headers: Mapping[str, str]) -> None:
        """A token in the address is put away in a cookie at once, so that it stays in no history and no log."""
        if self.token is None:
            return
        query_token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and scope["method"] == "GET" and self._matches_token(query_token):
            cookie = f"{self.cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            raise RequestError(303, "the token is kept; go on to /.", {"Location": "/", "Set-Cookie": cookie})
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._matches_token(bearer.strip()):
            return
        if not self._matches_token(_cookie_value(headers.get("cookie", ""), self.cookie_name)):
            raise RequestError(
                401,
                "this server wants its token; open the address it printed, or send it as Authorization: Bearer.",
                {"WWW-Authenticate": "Bearer"},
            )

    def _matches_token(self, candidate: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(candidate.encode(), self.token.encode())  # takes the same time however much is right


def make_token() -> str:
    """A token nobody guesses."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    address = _parse_ip(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_allowed_host(name: str, bound_host: str) -> bool:
    """Whether a request may call us by this name, where we listen at `bound_host`. A number cannot be a rebound name.

    >>> is_allowed_host("localhost", "127.0.0.1"), is_allowed_host("evil.example", "127.0.0.1")
    (True, False)
    >>> is_allowed_host("10.0.0.7", "0.0.0.0")
    True
    """
    if is_loopback(bound_host) or is_loopback(name):
        return is_loopback(name)
    return _parse_ip(name) is not None or name in (bound_host.lower(), socket.gethostname().lower())


async def read_json_object(headers: Mapping[str, str], stream: AsyncIterator[bytes]) -> dict[str, Any]:
    """The JSON object a request carries; nothing larger, slower or otherwise shaped."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(415, f"send JSON, with Content-Type: application/json; got {content_type[:80] or 'none'!r}.")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:12]) > MAX_BODY_BYTES:
        raise _too_large_error()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in stream:
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large_error()
    except TimeoutError:
        raise RequestError(
            408, f"the request did not come within {BODY_TIMEOUT} seconds.", {"Connection": "close"}
        ) from None
    try:
        payload = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the request is not UTF-8: byte {error.start} is wrong.") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
        raise RequestError(400, f"the request is not JSON: {reason}.") from None
    if not isinstance(payload, dict):
        raise RequestError(400, f"the request must be a JSON object, {{…}}; got {type(payload).__name__}.")
    return payload


async def send_error(send: Send, error: RequestError) -> None:
    """Send a refusal."""
    body = error.body
    header_values = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    headers = [(name.lower().encode(), value.encode()) for name, value in header_values.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _check_origin(method: str, headers: Mapping[str, str], host: str) -> None:
    """Browsers say where a request that changes or reads across pages comes from; what says nothing is no browser's."""
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        raise RequestError(403, f"this request comes from {origin[:80]!r}; the live view answers its own page alone.")
    if origin is None and method not in ("GET", "HEAD"):
        referer = headers.get("referer")
        if referer is not None and not f"{referer}/".lower().startswith(f"http://{host}/".lower()):
            raise RequestError(403, "this request comes from another page; the live view answers its own alone.")
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise RequestError(403, "this request comes from another site; the live view answers its own page alone.")


def _join_headers(scope: Message) -> dict[str, str]:
    """Each header once: one that is said twice is joined, as the protocol has it, and then is nobody's name."""
    joined: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _cookie_value(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _too_large_error() -> RequestError:
    return RequestError(413, f"the request is larger than {MAX_BODY_BYTES} bytes; send a shorter text.")
