"""The live view's server: right numbers for its own page, a clear refusal for everything else."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import headwise as hw
from headwise.analysis.recording.recording import record
from headwise.model import Transformer
from headwise.text.build_tokenizers import add_mask, byte_tokenizer
from headwise.ui import request_guard
from headwise.ui.live_session import CHARACTERS, Live
from tests.ui.live_model import FILES, TEXT, make_model, make_view

HOME = "http://127.0.0.1:8642"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


@pytest.fixture(scope="module")
def client(model: Transformer) -> Iterator[TestClient]:
    with TestClient(make_view(model), base_url=HOME) as opened:
        yield opened


def ask(client: TestClient, what: str, **asked: Any) -> dict[str, Any]:
    answer = client.post(f"/api/{what}", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_page_and_book(client: TestClient) -> None:
    for name in ("style.css", "main.js"):
        answer = client.get(f"/{name}")
        assert (answer.status_code, answer.content) == (200, FILES[name])
    page = client.get("/").text
    assert page == client.get("/index.html").text
    assert page == '<!doctype html><head>\n<meta name="headwise-live" content="yes"><title>x</title></head>'
    assert client.get("/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/api/book").json() == {"version": 1}
    assert client.head("/").status_code == 200


def test_headers_are_on_every_answer(client: TestClient) -> None:
    answers = (client.get("/"), client.get("/none"), client.post("/api/step"), client.get("/", headers={"host": "x"}))
    assert [answer.status_code for answer in answers] == [200, 404, 415, 421]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_predictions_are_the_models_own(client: TestClient, model: Transformer) -> None:
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.no_grad():
        whole = torch.softmax(model(ids)[0, -1], 0)
        with model.heads["1.1,0.2"].silenced():
            without = torch.softmax(model(ids)[0, -1], 0)
    told = ask(client, "predict", text=TEXT, silenced=["1.1", "0.2"])
    for side, chances in (("before", whole), ("after", without)):
        values, places = chances.topk(10)
        assert [token for token, _ in told[side]] == [model.tokenizer.decode([id]) for id in places.tolist()]
        assert [chance for _, chance in told[side]] == pytest.approx(values.tolist(), rel=1e-5)
    assert told["before"] != told["after"]
    unchanged = ask(client, "predict", text=TEXT, silenced=[])
    assert unchanged["before"] == unchanged["after"] == told["before"]
    assert ask(client, "predict", text=TEXT) == unchanged


def test_a_step_is_greedy_and_shows_each_heads_row(client: TestClient, model: Transformer) -> None:
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with model.heads["0.*"].silenced(), torch.no_grad(), record(model, what="map") as recording:
        best = int(model(ids)[0, -1].argmax())
    told = ask(client, "step", text=TEXT, silenced=["0.0", "0.1", "0.2", "0.3"])
    assert told["token"] == model.tokenizer.decode([best])
    assert told["text"] == f"{TEXT} {told['token']}"
    assert told["tokens"] == TEXT.split()
    assert list(told["rows"]) == [str(address) for address in model.spec.addresses]
    for head, row in told["rows"].items():
        assert row == pytest.approx(recording[head].map(rows=[-1])[0, 0].tolist(), abs=1e-6)
    text = TEXT
    for _ in range(4):
        text = ask(client, "step", text=text)["text"]
    assert text == model.generate(TEXT, 4)


def test_a_sentence_shows_every_head(client: TestClient) -> None:
    told = ask(client, "sentence", text=TEXT)
    assert (told["text"], told["tokens"], len(told["heads"])) == (TEXT, TEXT.split(), 8)


def test_nobody_else_sees_a_silenced_head(client: TestClient, model: Transformer) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([[3, 5, 7]])
    whole = model(ids)
    model.train()
    try:
        ask(client, "predict", text=TEXT, silenced=["0.1"])
        ask(client, "step", text=TEXT, silenced=["0.1"])
        assert all(part.training for part in model.modules())
    finally:
        model.eval()
    assert torch.equal(model(ids), whole)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(site.is_open for site in model.sites())


def test_script_comes_back_as_text(client: TestClient) -> None:
    text = "<script>alert(1)</script> the cat"
    answer = client.post("/api/sentence", json={"text": text})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["text"] == text
    assert client.get("/<script>alert(1)</script>").headers["content-type"] == "application/json"


GOOD = {"content-type": "application/json"}


@pytest.mark.parametrize("what", ["sentence", "predict", "step"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b'{"text": "\xff\xfe"}', 400, "not UTF-8"),
        (b'["text"]', 400, "JSON object"),
        (b'"text"', 400, "JSON object"),
        (b"null", 400, "JSON object"),
        (b"{}", 400, "text must be a string; got NoneType"),
        (b'{"text": 5}', 400, "text must be a string; got int"),
        (b'{"text": ["a"]}', 400, "text must be a string; got list"),
        (b'{"text": "a", "tokens": 9}', 400, "'tokens' is not asked for"),
        (b'{"text": ""}', 422, "empty"),
        (b'{"text": " \\n "}', 422, "empty"),
        (b'{"text": "the \\u0000 cat"}', 422, "NUL"),
        (b'{"text": "the \\ud800 cat"}', 422, "half a character"),
        (json.dumps({"text": "a" * (CHARACTERS + 1)}).encode(), 413, f"{CHARACTERS + 1} characters"),
        (json.dumps({"text": "the " * 129}).encode(), 413, "129 tokens; at most 128"),
        (b'{"text": "' + b"a" * 50_000_000 + b'"}', 413, "larger than"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_hostile_bodies(client: TestClient, what: str, body: bytes, status: int, message: str) -> None:
    answer = client.post(f"/api/{what}", content=body, headers=GOOD)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert message in answer.json()["error"]


@pytest.mark.parametrize("what", ["predict", "step"])
@pytest.mark.parametrize(
    ("silenced", "status", "message"),
    [
        ("0.1", 400, "list of heads"),
        ([1.5], 400, "list of heads"),
        ({"0.1": 0}, 400, "list of heads"),
        (["9" * 5000], 400, "list of heads"),
        (["7.1"], 422, "there is no head 7.1 here"),
        (["0.*"], 422, "not the address of one head"),
        (["../0"], 422, "not the address of one head"),
        (["enc.0.1"], 422, "there is no head enc.0.1"),
    ],
)
def test_unknown_heads(client: TestClient, what: str, silenced: Any, status: int, message: str) -> None:
    answer = client.post(f"/api/{what}", json={"text": TEXT, "silenced": silenced})
    assert answer.status_code == status
    assert message in answer.json()["error"]


LOOK = {"text": TEXT, "head": "1.1", "at": 4, "to": 1, "words": False}


def test_why_is_what_the_library_says(client: TestClient, model: Transformer) -> None:
    answer = client.post("/api/why", json=LOOK)
    assert answer.status_code == 200
    made = hw.why(model, TEXT, "1.1", 4, 1, lead=True, words=False)
    assert (answer.json()["at"], answer.json()["to"]) == (made.at, made.to)
    assert [tuple(pair.values()) for pair in answer.json()["pairs"]] == [tuple(pair) for pair in made.pairs[:12]]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"head": 5}, 400, "head must be an address"),
        ({"head": "9" * 5000}, 400, "head must be an address"),
        ({"at": "4"}, 400, "whole numbers"),
        ({"to": True}, 400, "whole numbers"),
        ({"words": 1}, 400, "true or false"),
        ({"silenced": []}, 400, "'silenced' is not asked for"),
        ({"head": "7.1"}, 422, "there is no head 7.1"),
        ({"at": 99}, 422, "there is no word 99"),
        ({"at": 1, "to": 4}, 422, "cannot see"),
    ],
)
def test_unknown_looks(client: TestClient, change: dict[str, Any], status: int, message: str) -> None:
    answer = client.post("/api/why", json=LOOK | change)
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_a_body_without_a_length_is_cut_off(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(1000):
            yield b"a" * 10_000

    answer = client.post("/api/step", content=endless(), headers=GOOD)
    assert answer.status_code == 413


def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    monkeypatch.setattr(request_guard, "SECONDS", 0.05)
    with pytest.raises(request_guard.RequestError, match="did not come within"):
        asyncio.run(request_guard.read_object(GOOD, slow()))


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%5c..%5cetc",
        "/%252e%252e%252fetc",
        "//etc/passwd",
        "/style.css/",
        "/style.css%00.html",
        "/server.py",
        "/api/",
        "/api/none",
        "/api/../server.py",
    ],
)
def test_there_is_no_way_out(client: TestClient, path: str) -> None:
    for answer in (client.get(path), client.get(f"{HOME}{path}")):
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")
        assert "there is no such thing" in answer.json()["error"]


def test_unknown_methods(client: TestClient) -> None:
    for method, path in (
        ("PUT", "/"), ("DELETE", "/api/book"), ("GET", "/api/step"), ("OPTIONS", "/api/step"), ("TRACE", "/"),
        ("BREW", "/api/predict"), ("POST", "/api/book"), ("POST", "/"),
    ):  # fmt: skip
        answer = client.request(method, path, headers={"access-control-request-method": "POST"})
        assert answer.status_code == 405, (method, path)
        assert "is not answered here" in answer.json()["error"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.7:8642", ""],
)
def test_foreign_hosts(client: TestClient, host: str) -> None:
    for answer in (
        client.get("/api/book", headers={"host": host}),
        client.post("/api/step", json={"text": TEXT}, headers={"host": host}),
    ):
        assert answer.status_code == 421
        assert "does not answer to the name" in answer.json()["error"]


def test_our_own_names(client: TestClient) -> None:
    for host in ("127.0.0.1:8642", "localhost:9000", "LOCALHOST", "[::1]:8642", "127.0.0.2"):
        headers = {"host": host, "origin": f"http://{host}"}
        assert client.post("/api/step", json={"text": TEXT}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8642"},
        {"origin": "http://127.0.0.1:8642.evil.example"},
        {"referer": "http://evil.example/page"},
        {"referer": "http://127.0.0.1:8642.evil.example/"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages(client: TestClient, headers: dict[str, str]) -> None:
    answer = client.post("/api/predict", json={"text": TEXT}, headers=headers)
    assert answer.status_code == 403
    assert "comes from" in answer.json()["error"]


def test_a_form_is_not_json(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = client.post("/api/step", content=b'{"text": "a"}', headers={"content-type": kind})
        assert answer.status_code == 415


def test_our_own_page(client: TestClient) -> None:
    for headers in ({"origin": HOME}, {"referer": f"{HOME}/"}, {"origin": HOME, "sec-fetch-site": "same-origin"}):
        assert client.post("/api/step", json={"text": TEXT}, headers=headers).status_code == 200


def test_a_token_where_others_can_reach_it(model: Transformer) -> None:
    app = make_view(model, host="0.0.0.0", token="secret")
    with TestClient(app, base_url="http://10.0.0.7:8642") as client:
        for answer in (
            client.get("/"), client.get("/api/book"), client.get("/style.css"), client.get("/?token=wrong"),
            client.get("/api/book?token=secret"), client.post("/api/step", json={"text": TEXT}),
            client.get("/", headers={"authorization": "Bearer wrong"}), client.get("/", headers={"cookie": "headwise=x"}),
            client.get("/", headers={"cookie": 'headwise="; ='}), client.get("/?token=%ff%00"),
        ):  # fmt: skip
            assert answer.status_code == 401, answer.request.url
            assert "wants its token" in answer.json()["error"]
        assert client.get("/", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/api/book", headers={"authorization": "Bearer secret"}).status_code == 200
        opened = client.get("/?token=secret", follow_redirects=False)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert opened.headers["set-cookie"] == "headwise=secret; HttpOnly; SameSite=Strict; Path=/"
        assert client.get("/").status_code == 200  # by the cookie
        assert client.post("/api/step", json={"text": TEXT}).status_code == 200


def test_models_that_predict_nothing_say_so() -> None:
    with TestClient(make_view(make_model(kind="encoder", output="none")), base_url=HOME) as client:
        for what, message in (("predict", "it makes vectors"), ("step", "has no next token")):
            answer = client.post(f"/api/{what}", json={"text": TEXT})
            assert answer.status_code == 422
            assert message in answer.json()["error"]
        ask(client, "sentence", text=TEXT)


def test_an_encoder_guesses_at_the_mask() -> None:
    model = make_model(kind="encoder", output="mlm", vocab=281)
    model.tokenizer = tokenizer = add_mask(model.tokenizer)  # pyright: ignore[reportArgumentType]
    with TestClient(make_view(model), base_url=HOME) as client:
        answer = client.post("/api/predict", json={"text": TEXT})
        assert answer.status_code == 422
        assert "write <mask> where" in answer.json()["error"]
        told = ask(client, "predict", text="the <mask> likes the dog", silenced=["1.0"])
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([tokenizer.encode("the <mask> likes the dog")]))[0, 1], 0)
    assert [chance for _, chance in told["before"]] == pytest.approx(chances.topk(10).values.tolist(), rel=1e-5)


def test_part_of_a_character_is_never_left_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(vocab=257)
    model.tokenizer = byte_tokenizer()
    following = {ord("a"): 0xC3, 0xC3: 0xA9}  # after "a" the two bytes of é
    monkeypatch.setattr(Live, "_chances", lambda _, ids, *__: torch.eye(257)[following[ids[-1]]])
    told = Live(model).step("a")
    assert (told["token"], told["text"]) == ("é", "aé")


def test_our_own_mistakes_are_told_on_the_terminal_alone(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the weights at 0x7f are odd")

    monkeypatch.setattr(Live, "predict", broken)
    with TestClient(make_view(model), base_url=HOME, raise_server_exceptions=False) as client:
        answer = client.post("/api/predict", json={"text": TEXT})
        assert (answer.status_code, "0x7f" in answer.text) == (500, False)
        assert answer.headers["x-content-type-options"] == "nosniff"
        ask(client, "step", text=TEXT)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['starlette.applications'] = None\n"
        "sys.argv = ['headwise', 'view', 'smollm2']\n"
        "from headwise.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headwise: the live view needs starlette and uvicorn: pip install 'headwise[view]'.\n"
