"""The live view as a process of its own: many at once, memory, breaking off, what the verb says."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import headwise as hw
from headwise.ui import server
from headwise.ui.live_session import Live
from headwise.ui.request_queue import Turns
from tests.runner import headwise
from tests.ui.live_model import TEXT, View, make_folder, viewing

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[View]:
    with viewing(folder) as opened:
        yield opened


def request(port: int, path: str, asked: dict | None = None, headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own."""
    opened = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        if asked is None:
            opened.request("GET", path, headers=headers or {})
        else:
            given = {"Content-Type": "application/json", "Origin": f"http://127.0.0.1:{port}", **(headers or {})}
            opened.request("POST", path, json.dumps(asked), given)
        answer = opened.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        opened.close()


def patient(port: int, path: str, asked: dict | None = None) -> tuple[bytes, int]:
    """The same, asked again where the line was full; also how often that was."""
    for again in range(200):
        status, headers, body = request(port, path, asked)
        if status != 503:
            assert status == 200, body
            return body, again
        assert headers["retry-after"] == "1"
        time.sleep(0.05)
    raise AssertionError("never answered")


def load(view: View, folder: Path, clients: int, requests: int) -> int:
    """So many clients at once, each asking what every other asks in another order; every answer is the model's own."""
    live = Live(hw.load(folder / "small"))
    texts = [f"the {noun} likes the {other}" for noun in ("cat", "dog", "goat") for other in ("cat", "dog")]
    asked: list[tuple[str, dict | None, Callable[[], Any] | None]] = [("/api/book", None, None), ("/", None, None)]
    for text in texts:
        for silenced in ([], ["0.1"], ["1.0", "1.3"]):
            given = {"text": text, "silenced": silenced}
            asked.append(("/api/predict", given, lambda t=text, s=silenced: live.predict(t, s)))
            asked.append(("/api/step", given, lambda t=text, s=silenced: live.step(t, s)))
        asked.append(("/api/sentence", {"text": text}, lambda t=text: live.sentence(t)))
    expected = [None if right is None else json.loads(json.dumps(right())) for _, _, right in asked]
    fixed = [patient(view.port, path)[0] for path, _, _ in asked[:2]]

    def one_client(number: int) -> int:
        waited = 0
        for turn in range(requests):
            which = (number * 7 + turn * 5) % len(asked)
            path, given, _ = asked[which]
            body, again = patient(view.port, path, given)
            waited += again
            assert body == fixed[which] if which < 2 else json.loads(body) == expected[which], (path, given)
        return waited

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(one_client, range(clients)))


def resident(view: View) -> float:
    """Megabytes of memory the server holds."""
    status = Path(f"/proc/{view.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_many_at_once_are_answered_rightly(view: View, folder: Path) -> None:
    load(view, folder, clients=8, requests=6)
    assert view.process.poll() is None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_thirty_two_at_once_and_memory_stays_flat(folder: Path) -> None:
    with viewing(folder) as view:
        load(view, folder, clients=32, requests=5)
        warm = resident(view)
        waited = load(view, folder, clients=32, requests=20)
        grown = resident(view) - warm
        print(f"asked again {waited} times; {warm:.0f} MB, {grown:+.1f} MB")
        assert waited > 0, "the line was never full"
        assert grown < 16


def test_hostile_bytes_on_a_real_connection(view: View) -> None:
    large = json.dumps({"text": "a" * 50_000_000})
    opened = http.client.HTTPConnection("127.0.0.1", view.port, timeout=30)
    opened.request("POST", "/api/sentence", large, {"Content-Type": "application/json"})
    assert opened.getresponse().status == 413
    opened.close()
    for raw, status in (
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET /..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"421"),
        (b"GET / HTTP/1.0\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"400"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"\x16\x03\x01\x00\xff not http\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"400"),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
            b"200",
        ),  # the page, and no upgrade
    ):
        with socket.create_connection(("127.0.0.1", view.port), timeout=10) as plain:
            plain.sendall(raw)
            assert plain.recv(4096).split(b" ")[1] == status, raw[:60]
    assert request(view.port, "/api/step", {"text": TEXT})[0] == 200
    assert "server" not in request(view.port, "/")[1]


def test_serve_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More idle connections than the server allows, one of them with a part of a request: others are answered again."""
    monkeypatch.setattr(server, "CONNECTIONS", 4)
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    with server.bind("127.0.0.1", 0) as listening, ExitStack() as stack:
        port, running = listening.getsockname()[1], Event()
        Thread(target=server.serve, args=(app, Turns(), listening, running.set), daemon=True).start()
        assert running.wait(60)
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost: loc")
        for connection in idle:
            connection.settimeout(60)
            assert connection.recv(1) == b"", "closed by the server"
        assert request(port, "/")[::2] == (200, b"here")


SLOW = """
import time, headwise.ui.live_session as live
def slow(*_): time.sleep({seconds}); return {{}}
live.Live.predict = slow
"""


@pytest.mark.parametrize("seconds", [0.5, 30])
def test_ctrl_c_ends_it_and_nobody_is_left_waiting(folder: Path, seconds: float) -> None:
    with viewing(folder, code=SLOW.format(seconds=seconds)) as view:
        answers: list[Answer] = []
        asking = [
            Thread(target=lambda: answers.append(request(view.port, "/api/predict", {"text": TEXT}))) for _ in range(4)
        ]
        for one in asking:
            one.start()
        idle = socket.create_connection(("127.0.0.1", view.port))  # a browser keeps some open
        time.sleep(0.3)
        start = time.perf_counter()
        view.process.send_signal(signal.SIGINT)
        assert view.process.wait(10) == 0
        took = time.perf_counter() - start
        for one in asking:
            one.join(5)
        idle.close()
        print(f"ended after {took:.2f} s")
        assert took < 3
        statuses = sorted(status for status, _, _ in answers)
        assert statuses == ([200, 503, 503, 503] if seconds < 1 else [503] * 4)
        assert all(b"ending" in body for status, _, body in answers if status == 503)
        assert view.process.stderr is not None
        assert "Traceback" not in view.process.stderr.read()


def test_a_full_line_is_asked_to_come_again(folder: Path) -> None:
    with viewing(folder, code=SLOW.format(seconds=0.1)) as view, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: request(view.port, "/api/predict", {"text": TEXT}), range(24)))
        assert {status for status, _, _ in answers} == {200, 503}
        assert sum(status == 200 for status, _, _ in answers) >= 16
        assert all(headers["retry-after"] == "1" for status, headers, _ in answers if status == 503)


def test_nothing_is_done_for_those_who_left(folder: Path, tmp_path: Path) -> None:
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    code = SLOW.format(seconds=0.3).replace("time.sleep", f"{count}; time.sleep")
    with viewing(folder, code=code) as view:
        body = json.dumps({"text": TEXT})
        raw = (
            f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        for _ in range(8):
            with socket.create_connection(("127.0.0.1", view.port)) as plain:
                plain.sendall(raw.encode())
                time.sleep(0.02)
        assert request(view.port, "/api/predict", {"text": TEXT})[0] == 200
        assert len((tmp_path / "count").read_text()) < 5


def test_a_port_that_is_taken_and_other_trouble(folder: Path, view: View) -> None:
    for arguments, message in (
        ((folder / "small", "--port", view.port), "cannot listen at 127.0.0.1 port"),
        ((folder / "small", "--host", "999.1.1.1", "--port", 0), "is no address of this machine"),
        ((folder / "nowhere", "--port", 0), "nowhere"),
        ((folder / "small", "--profile", folder / "small", "--port", 0), "small"),
        (("minilm", "--profile", folder / "profile", "--port", 0), "8 heads that are not this model's"),
    ):
        done = headwise("view", *arguments)
        assert message in done.refused
        assert done.err.count("\n") == 1


def test_elsewhere_than_on_this_machine_a_token_is_asked_for(folder: Path) -> None:
    with viewing(folder, "--host", "0.0.0.0") as view:
        token = view.url.split("?token=")[1]
        assert len(token) == 32
        assert request(view.port, "/api/book")[0] == 401
        assert request(view.port, "/api/book", headers={"Authorization": f"Bearer {token}"})[0] == 200
        status, headers, _ = request(view.port, f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        assert headers["set-cookie"].endswith("HttpOnly; SameSite=Strict; Path=/")
