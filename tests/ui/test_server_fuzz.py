"""The live view with clients that disconnect or send malformed requests still answers other clients correctly."""

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ui.live_model import TEXT, ViewProcess, make_folder, running_view
from tests.ui.test_server_load import resident_memory_mb, run_load, send_request

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "get", "\x00", "POST" * 50)
PATHS = (
    "/",
    "/api/report",
    "/api/sentence",
    "/api/predict",
    "/api/step",
    "/api/explain",
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
    json.dumps({"text": TEXT, "head": "1.1", "query": 4, "key": 1, "words": False}), '{"text": "' + "a" * 9000 + '"}',
    "5\r\nabc", "\x00" * 64,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[ViewProcess]:
    with running_view(folder) as opened:
        yield opened


def random_request(rng: random.Random) -> bytes:
    """Return a valid or malformed request."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    lines = [
        f"{rng.choice(METHODS)} {rng.choice(PATHS)} {rng.choice(('HTTP/1.1', 'HTTP/1.1', 'HTTP/1.0', 'HTTP/9', ''))}"
    ]
    lines += rng.sample(HEADERS, rng.randrange(5))
    body = rng.choice(BODIES) if rng.random() < 0.6 else ""
    if body and rng.random() < 0.7:
        lines.append(f"Content-Length: {len(body)}")
    raw = ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1", "replace")
    return raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.2 else raw


def send_random_requests(view: ViewProcess, count: int, seed: int) -> dict[str, int]:
    """Send `count` requests in turn, some without waiting, and count the outcomes."""
    rng, outcomes = random.Random(seed), {"answered": 0, "closed": 0, "left": 0}
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", view.port), timeout=600) as connection:
            sent = random_request(rng)
            try:
                connection.sendall(sent)
                if rng.random() < 0.1:
                    outcomes["left"] += 1
                    continue
                connection.shutdown(socket.SHUT_WR)
                response = connection.recv(4096)
            except ConnectionError:
                response = b""
            except TimeoutError:
                raise AssertionError(f"no answer within 600 s to {sent!r}") from None
        outcomes["answered" if response else "closed"] += 1
        if response:
            assert response.startswith(b"HTTP/1.1 "), response[:80]
            assert response.split(b" ")[1] not in (b"500", b"502"), response[:200]
    return outcomes


def test_server_random_requests_stays_up(view: ViewProcess) -> None:
    send_random_requests(view, 150, seed=1)
    assert view.process.poll() is None
    assert send_request(view.port, "/api/step", {"text": TEXT})[0] == 200


@pytest.mark.slow
def test_server_10000_random_requests_memory_stays_flat(folder: Path) -> None:
    with running_view(folder) as view:
        send_random_requests(view, 500, seed=2)
        memory_before, start = resident_memory_mb(view), time.monotonic()
        outcomes = send_random_requests(view, 10_000, seed=3)
        print(
            f"{outcomes} in {time.monotonic() - start:.0f} s; {memory_before:.0f} MB, "
            f"{resident_memory_mb(view) - memory_before:+.1f} MB"
        )
        assert view.process.poll() is None
        assert resident_memory_mb(view) - memory_before < 16
        assert send_request(view.port, "/api/step", {"text": TEXT})[0] == 200


@pytest.mark.slow
def test_server_64_clients_with_hostile_requests_correct(folder: Path) -> None:
    """64 clients with 20 requests each; 10% of the requests disconnect and 10% are malformed."""
    from concurrent.futures import ThreadPoolExecutor

    with running_view(folder) as view:
        run_load(view, folder, clients=64, requests=5)
        memory_before = resident_memory_mb(view)
        with ThreadPoolExecutor(2) as pool:
            hostile = pool.submit(send_random_requests, view, 128, 4)
            broken = pool.submit(send_and_disconnect, view, 128)
            retries = run_load(view, folder, clients=64, requests=20)
            outcomes = hostile.result()
            broken.result()
        memory_growth = resident_memory_mb(view) - memory_before
        print(f"asked again {retries} times; hostile {outcomes}; {memory_before:.0f} MB, {memory_growth:+.1f} MB")
        assert view.process.poll() is None
        assert memory_growth < 16


def send_and_disconnect(view: ViewProcess, count: int) -> None:
    """Valid requests whose senders disconnect before the response."""
    body = json.dumps({"text": TEXT}).encode()
    lines = ("POST /api/sentence HTTP/1.1", "Host: localhost", *HEADERS[3:4], f"Content-Length: {len(body)}", "", "")
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", view.port), timeout=600) as connection:
            connection.sendall("\r\n".join(lines).encode() + body)
