"""The live view as a subprocess: concurrent clients, memory, disconnects and printed messages."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import headwise as hw
from headwise.ui import server
from headwise.ui.live_session import LiveSession
from headwise.ui.request_queue import MAX_REQUESTS, RequestQueue
from tests.runner import run_command
from tests.ui.live_model import TEXT, ViewProcess, make_folder, running_view

Response = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[ViewProcess]:
    with running_view(folder) as opened:
        yield opened


def send_request(port: int, path: str, payload: dict | None = None, headers: dict[str, str] | None = None) -> Response:
    """Send one request on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        if payload is None:
            connection.request("GET", path, headers=headers or {})
        else:
            request_headers = {
                "Content-Type": "application/json",
                "Origin": f"http://127.0.0.1:{port}",
                **(headers or {}),
            }
            connection.request("POST", path, json.dumps(payload), request_headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def send_with_retries(port: int, path: str, payload: dict | None = None) -> tuple[bytes, int]:
    """Send a request and retry while the queue is full. Return also the number of retries."""
    for retries in range(12_000):  # at most ten minutes
        status, headers, body = send_request(port, path, payload)
        if status != 503:
            assert status == 200, body
            return body, retries
        assert headers["retry-after"] == "1"
        time.sleep(0.05)
    raise AssertionError("never answered")


def run_load(view: ViewProcess, folder: Path, clients: int, requests: int) -> int:
    """Run concurrent clients with the same requests in different orders and compare every response with the model."""
    live = LiveSession(hw.load(folder / "small"))
    texts = [f"the {noun} likes the {other}" for noun in ("cat", "dog", "goat") for other in ("cat", "dog")]
    calls: list[tuple[str, dict | None, Callable[[], Any] | None]] = [("/api/report", None, None), ("/", None, None)]
    for text in texts:
        for silenced in ([], ["0.1"], ["1.0", "1.3"]):
            payload = {"text": text, "silenced": silenced}
            calls.append(("/api/predict", payload, lambda t=text, s=silenced: live.predict(t, s)))
            calls.append(("/api/step", payload, lambda t=text, s=silenced: live.generate_next_token(t, s)))
        calls.append(("/api/sentence", {"text": text}, lambda t=text: live.sentence_data(t)))
    expected = [
        None if compute_expected is None else json.loads(json.dumps(compute_expected()))
        for _, _, compute_expected in calls
    ]
    fixed = [send_with_retries(view.port, path)[0] for path, _, _ in calls[:2]]

    def run_client(client: int) -> int:
        total_retries = 0
        for step in range(requests):
            index = (client * 7 + step * 5) % len(calls)
            path, payload, _ = calls[index]
            body, retries = send_with_retries(view.port, path, payload)
            total_retries += retries
            assert body == fixed[index] if index < 2 else json.loads(body) == expected[index], (path, payload)
        return total_retries

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(run_client, range(clients)))


def resident_memory_mb(view: ViewProcess) -> float:
    """Return the memory of the server in MB."""
    status = Path(f"/proc/{view.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_server_concurrent_requests_are_correct(view: ViewProcess, folder: Path) -> None:
    run_load(view, folder, clients=8, requests=6)
    assert view.process.poll() is None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_server_32_clients_memory_stays_flat(folder: Path) -> None:
    with running_view(folder) as view:
        run_load(view, folder, clients=32, requests=5)
        memory_before = resident_memory_mb(view)
        retries = run_load(view, folder, clients=32, requests=20)
        memory_growth = resident_memory_mb(view) - memory_before
        print(f"asked again {retries} times; {memory_before:.0f} MB, {memory_growth:+.1f} MB")
        assert retries > 0, "the queue was never full"
        assert memory_growth < 16


def test_server_malformed_bytes_return_errors(view: ViewProcess) -> None:
    large = json.dumps({"text": "a" * 50_000_000})
    connection = http.client.HTTPConnection("127.0.0.1", view.port, timeout=600)
    connection.request("POST", "/api/sentence", large, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 413
    connection.close()
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
        ),  # the page, without an upgrade
    ):
        with socket.create_connection(("127.0.0.1", view.port), timeout=600) as raw_socket:
            raw_socket.sendall(raw)
            assert raw_socket.recv(4096).split(b" ")[1] == status, raw[:60]
    assert send_request(view.port, "/api/step", {"text": TEXT})[0] == 200
    assert "server" not in send_request(view.port, "/")[1]


def test_serve_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more idle connections than allowed, one with a partial request, new requests are answered again."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    with server.bind_socket("127.0.0.1", 0) as listening, ExitStack() as stack:
        port, running = listening.getsockname()[1], Event()
        Thread(target=server.serve, args=(app, RequestQueue(), listening, running.set), daemon=True).start()
        assert running.wait(60)
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost: loc")
        for connection in idle:
            connection.settimeout(60)
            assert connection.recv(1) == b"", "closed by the server"
        monkeypatch.setattr(
            server, "REQUEST_TIMEOUT", 60.0
        )  # the next request is not late, however busy the machine is
        assert send_request(port, "/")[::2] == (200, b"here")


# Runs in the server process. Files in `folder` are the events: one `request-…` per request that reached the queue, one
# `started-…` per prediction, `closing` once the queue is closed. A prediction waits for the file `until`.
BLOCKING_PREDICT_CODE = """
import itertools, pathlib, time
import headwise.ui.live_session as live, headwise.ui.request_queue as queue
folder, number = pathlib.Path({folder!r}), itertools.count()
queue.GRACE_SECONDS = {grace}
run, close = queue.RequestQueue.run, queue.RequestQueue.close
async def counted_run(self, *arguments):
    (folder / f"request-{{next(number)}}").touch()
    return await run(self, *arguments)
def marked_close(self):
    close(self)
    (folder / "closing").touch()
def predict(*_):
    (folder / f"started-{{next(number)}}").touch()
    while not (folder / {until!r}).exists():
        time.sleep(0.005)
    return {{}}
queue.RequestQueue.run, queue.RequestQueue.close, live.LiveSession.predict = counted_run, marked_close, predict
"""


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    """Wait until this many files of the pattern exist."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{pattern}: fewer than {count}"
        time.sleep(0.005)


@pytest.mark.parametrize("ends", [True, False], ids=["prediction ends", "prediction hangs"])
def test_server_interrupted_answers_waiting_requests(folder: Path, tmp_path: Path, ends: bool) -> None:
    until, grace = ("closing", 60) if ends else ("never", 0.1)
    code = BLOCKING_PREDICT_CODE.format(folder=str(tmp_path), until=until, grace=grace)
    with running_view(folder, code=code) as view:
        responses: list[Response] = []
        threads = [
            Thread(target=lambda: responses.append(send_request(view.port, "/api/predict", {"text": TEXT})))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        idle = socket.create_connection(("127.0.0.1", view.port))  # browsers keep connections open
        wait_for_files(tmp_path, "request-*", 4)
        wait_for_files(tmp_path, "started-*", 1)
        view.process.send_signal(signal.SIGINT)
        assert view.process.wait(60) == 0
        for thread in threads:
            thread.join(60)
        idle.close()
        statuses = sorted(status for status, _, _ in responses)
        assert statuses == ([200, 503, 503, 503] if ends else [503] * 4)
        assert all(b"shutting down" in body for status, _, body in responses if status == 503)
        assert view.process.stderr is not None
        assert "Traceback" not in view.process.stderr.read()


def test_server_full_queue_returns_503(folder: Path, tmp_path: Path) -> None:
    code = BLOCKING_PREDICT_CODE.format(folder=str(tmp_path), until="release", grace=1)
    with running_view(folder, code=code) as view, ThreadPoolExecutor(MAX_REQUESTS + 8) as pool:
        waiting = [
            pool.submit(send_request, view.port, "/api/predict", {"text": TEXT}) for _ in range(MAX_REQUESTS + 8)
        ]
        rejected = list(islice(as_completed(waiting, timeout=600), 8))
        assert [request.result()[0] for request in rejected] == [503] * 8
        assert all(request.result()[1]["retry-after"] == "1" for request in rejected)
        (tmp_path / "release").touch()
        assert sorted(request.result(60)[0] for request in waiting) == [200] * MAX_REQUESTS + [503] * 8


def test_server_disconnected_requests_are_skipped(folder: Path, tmp_path: Path) -> None:
    code = BLOCKING_PREDICT_CODE.format(folder=str(tmp_path), until="release", grace=1)
    with running_view(folder, code=code) as view, ThreadPoolExecutor(1) as pool:
        body = json.dumps({"text": TEXT})
        raw = (
            f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        for sent in range(8):
            with socket.create_connection(("127.0.0.1", view.port)) as raw_socket:
                raw_socket.sendall(raw.encode())
                wait_for_files(tmp_path, "request-*", sent + 1)
        answered = pool.submit(send_request, view.port, "/api/predict", {"text": TEXT})
        wait_for_files(tmp_path, "request-*", 9)
        (tmp_path / "release").touch()
        assert answered.result(60)[0] == 200
        assert len(list(tmp_path.glob("started-*"))) < 5


def test_view_invalid_arguments_raise(folder: Path, view: ViewProcess) -> None:
    for arguments, message in (
        ((folder / "small", "--port", view.port), "cannot listen at 127.0.0.1 port"),
        ((folder / "small", "--host", "999.1.1.1", "--port", 0), "not an address of this machine"),
        ((folder / "nowhere", "--port", 0), "nowhere"),
        ((folder / "small", "--profile", folder / "small", "--port", 0), "small"),
        (("minilm", "--profile", folder / "profile", "--port", 0), "heads of this profile are not those of"),
    ):
        done = run_command("view", *arguments)
        assert message in done.error_line
        assert done.err.count("\n") == 1


def test_view_public_host_requires_token(folder: Path) -> None:
    with running_view(folder, "--host", "0.0.0.0") as view:
        token = view.url.split("?token=")[1]
        assert len(token) == 32
        assert send_request(view.port, "/api/report")[0] == 401
        assert send_request(view.port, "/api/report", headers={"Authorization": f"Bearer {token}"})[0] == 200
        status, headers, _ = send_request(view.port, f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        assert headers["set-cookie"].endswith("HttpOnly; SameSite=Strict; Path=/")
