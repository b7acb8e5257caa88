"""Access control of the live view: hosts, origins, token and request sizes, as a plain ASGI layer around the app.

Pages of other sites must not reach the model or the texts. Therefore a request must use a host name of this server (another
name that resolves to it indicates DNS rebinding), a request of a browser must come from the page itself, and the only
accepted content type is JSON.
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

MAX_BODY_BYTES = 1 << 18
BODY_TIMEOUT = 10  # seconds to receive the body

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
    """An error response: HTTP status, message and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})

    @property
    def body(self) -> bytes:
        """Return the response body, JSON with the key `error`."""
        return json.dumps({"error": self.message}).encode()


class RequestGuard:
    """Reject requests of other sites and add security headers to every response."""

    def __init__(self, app: ASGIApp, host: str, token: str | None = None, cookie_name: str = "headwise") -> None:
        self.app, self.host, self.token, self.cookie_name = app, host, token, cookie_name

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check one request and pass it to the app."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(
                f"scope: the live view supports only HTTP requests. Got a request of type {scope['type']}. Use an http:// "
                f"address."
            )

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
                421, f"host: unknown host name. Got {host[:80]!r}. Use the address that the server printed."
            )
        return host

    def _check_token(self, scope: Message, headers: Mapping[str, str]) -> None:
        """Check the token. A token in the URL is moved to a cookie, so that it does not remain in history and logs."""
        if self.token is None:
            return
        query_token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and scope["method"] == "GET" and self._matches_token(query_token):
            cookie = f"{self.cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            raise RequestError(
                303, "access token accepted. Open / to continue.", {"Location": "/", "Set-Cookie": cookie}
            )
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._matches_token(bearer.strip()):
            return
        if not self._matches_token(_cookie_value(headers.get("cookie", ""), self.cookie_name)):
            raise RequestError(
                401,
                "token: missing or wrong. Open the address that the server printed, or send Authorization: Bearer TOKEN.",
                {"WWW-Authenticate": "Bearer"},
            )

    def _matches_token(self, candidate: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(candidate.encode(), self.token.encode())  # constant time


def make_token() -> str:
    """Create a random token of 192 bits."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    address = _parse_ip(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_allowed_host(name: str, bound_host: str) -> bool:
    """Return whether a request may use this host name of a server bound to `bound_host`. IP addresses cannot be rebound.

    >>> is_allowed_host("localhost", "127.0.0.1"), is_allowed_host("evil.example", "127.0.0.1")
    (True, False)
    >>> is_allowed_host("10.0.0.7", "0.0.0.0")
    True
    """
    if is_loopback(bound_host) or is_loopback(name):
        return is_loopback(name)
    return _parse_ip(name) is not None or name in (bound_host.lower(), socket.gethostname().lower())


async def read_json_object(headers: Mapping[str, str], stream: AsyncIterator[bytes]) -> dict[str, Any]:
    """Read the JSON object of a request. Limit its size and the time to receive it."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(
            415, f"Content-Type: must be application/json. Got {content_type[:80] or 'none'!r}. Send JSON."
        )
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
            408, f"body: not received within {BODY_TIMEOUT} seconds. Send it again.", {"Connection": "close"}
        ) from None
    try:
        payload = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"body: not UTF-8, invalid byte at {error.start}. Send UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
        raise RequestError(400, f"body: not valid JSON: {reason}. Send a JSON object.") from None
    if not isinstance(payload, dict):
        raise RequestError(400, f"body: must be a JSON object, {{…}}. Got {type(payload).__name__}.")
    return payload


async def send_error(send: Send, error: RequestError) -> None:
    """Send an error response."""
    body = error.body
    header_values = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    headers = [(name.lower().encode(), value.encode()) for name, value in header_values.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _check_origin(method: str, headers: Mapping[str, str], host: str) -> None:
    """Reject requests of other sites. Requests without Origin, Referer and Sec-Fetch-Site do not come from a browser."""
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        raise RequestError(
            403, f"origin: the request comes from another site. Got {origin[:80]!r}. Use the page of the live view."
        )
    if origin is None and method not in ("GET", "HEAD"):
        referer = headers.get("referer")
        if referer is not None and not f"{referer}/".lower().startswith(f"http://{host}/".lower()):
            raise RequestError(403, "referer: the request comes from another page. Use the page of the live view.")
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise RequestError(
                403, "sec-fetch-site: the request comes from another site. Use the page of the live view."
            )


def _join_headers(scope: Message) -> dict[str, str]:
    """Return the headers by name. A repeated header is joined with commas (RFC 9110), so that it fails the checks."""
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
    return RequestError(413, f"body: larger than {MAX_BODY_BYTES} bytes. Send a shorter text.")
