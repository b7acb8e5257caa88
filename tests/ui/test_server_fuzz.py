"""The live view among clients that break off, lie or send anything at all: others are answered rightly, and it stays up."""

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ui.live_model import TEXT, View, make_folder, viewing
from tests.ui.test_server_load import load, request, resident

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "get", "\x00", "POST" * 50)
PATHS = (
    "/",
    "/api/book",
    "/api/sentence",
    "/api/predict",
    "/api/step",
    "/api/why",
    "/style.css",
    "/..%2f",
    "*",
    "//",
    "/api/",
)
VERSIONS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9", "")
HEADERS = (
    "Host: localhost", "Host: 127.0.0.1", "Host: evil.example", "Content-Type: application/json", "Content-Type: text/plain",
    "Content-Length: -1", "Content-Length: 99999999999", "Content-Length: 3", "Transfer-Encoding: chunked", "Origin: null",
    "Expect: 100-continue", "Connection: close", "Range: bytes=0-1", "Cookie: a=b", "X: \xff\xfe", "Host", ": empty",
)  # fmt: skip
BODIES = (
    json.dumps({"text": TEXT}), json.dumps({"text": TEXT, "silenced": ["0.1"]}), "{", "[]", "null", '{"text": 1e999}',
    json.dumps({"text": TEXT, "head": "1.1", "at": 4, "to": 1, "words": False}), '{"text": "' + "a" * 9000 + '"}',
    "5\r\nabc", "\x00" * 64,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[View]:
    with viewing(folder) as opened:
        yield opened


def any_request(dice: random.Random) -> bytes:
    """A request, or something that is none."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(200))
    lines = [
        f"{dice.choice(METHODS)} {dice.choice(PATHS)} {dice.choice(('HTTP/1.1', 'HTTP/1.1', 'HTTP/1.0', 'HTTP/9', ''))}"
    ]
    lines += dice.sample(HEADERS, dice.randrange(5))
    body = dice.choice(BODIES) if dice.random() < 0.6 else ""
    if body and dice.random() < 0.7:
        lines.append(f"Content-Length: {len(body)}")
    raw = ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1", "replace")
    return raw[: dice.randrange(len(raw) + 1)] if dice.random() < 0.2 else raw


def throw(view: View, count: int, seed: int) -> dict[str, int]:
    """So many, one after the other, some of whose senders do not wait; how they were answered."""
    dice, met = random.Random(seed), {"answered": 0, "closed": 0, "left": 0}
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", view.port), timeout=30) as opened:
            sent = any_request(dice)
            try:
                opened.sendall(sent)
                if dice.random() < 0.1:
                    met["left"] += 1
                    continue
                opened.shutdown(socket.SHUT_WR)
                answer = opened.recv(4096)
            except ConnectionError:
                answer = b""
            except TimeoutError:
                raise AssertionError(f"no answer within 30 s to {sent!r}") from None
        met["answered" if answer else "closed"] += 1
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), answer[:80]
            assert answer.split(b" ")[1] not in (b"500", b"502"), answer[:200]
    return met


def test_some_of_anything(view: View) -> None:
    throw(view, 150, seed=1)
    assert view.process.poll() is None
    assert request(view.port, "/api/step", {"text": TEXT})[0] == 200


@pytest.mark.slow
def test_ten_thousand_of_anything(folder: Path) -> None:
    with viewing(folder) as view:
        throw(view, 500, seed=2)
        warm, start = resident(view), time.monotonic()
        met = throw(view, 10_000, seed=3)
        print(f"{met} in {time.monotonic() - start:.0f} s; {warm:.0f} MB, {resident(view) - warm:+.1f} MB")
        assert view.process.poll() is None
        assert resident(view) - warm < 16
        assert request(view.port, "/api/step", {"text": TEXT})[0] == 200


@pytest.mark.slow
def test_sixty_four_at_once_among_others_who_break_off_or_lie(folder: Path) -> None:
    """64 clients with 20 questions each; beside them one request in ten breaks off and one in ten is hostile."""
    from concurrent.futures import ThreadPoolExecutor

    with viewing(folder) as view:
        load(view, folder, clients=64, requests=5)
        warm = resident(view)
        with ThreadPoolExecutor(2) as beside:
            hostile = beside.submit(throw, view, 128, 4)
            broken = beside.submit(break_off, view, 128)
            waited = load(view, folder, clients=64, requests=20)
            met = hostile.result()
            broken.result()
        grown = resident(view) - warm
        print(f"asked again {waited} times; hostile {met}; {warm:.0f} MB, {grown:+.1f} MB")
        assert view.process.poll() is None
        assert grown < 16


def break_off(view: View, count: int) -> None:
    """Good questions whose senders are gone before the answer."""
    body = json.dumps({"text": TEXT}).encode()
    lines = ("POST /api/sentence HTTP/1.1", "Host: localhost", *HEADERS[3:4], f"Content-Length: {len(body)}", "", "")
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", view.port), timeout=30) as opened:
            opened.sendall("\r\n".join(lines).encode() + body)
