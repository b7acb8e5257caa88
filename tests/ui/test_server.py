"""Server of the live view: correct results for its own page, clear errors for other requests."""

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
from headwise.text.build_tokenizers import add_mask_token, byte_tokenizer
from headwise.ui import request_guard
from headwise.ui.live_session import MAX_CHARACTERS, LiveSession
from tests.ui.live_model import FILES, TEXT, make_live_app, make_model

BASE_URL = "http://127.0.0.1:8642"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


@pytest.fixture(scope="module")
def client(model: Transformer) -> Iterator[TestClient]:
    with TestClient(make_live_app(model), base_url=BASE_URL) as opened:
        yield opened


def post_json(client: TestClient, endpoint: str, **body: Any) -> dict[str, Any]:
    response = client.post(f"/api/{endpoint}", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def test_server_page_and_report_data(client: TestClient) -> None:
    for name in ("style.css", "main.js"):
        response = client.get(f"/{name}")
        assert (response.status_code, response.content) == (200, FILES[name])
    page = client.get("/").text
    assert page == client.get("/index.html").text
    assert page == '<!doctype html><head>\n<meta name="headwise-live" content="yes"><title>x</title></head>'
    assert client.get("/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/api/report").json() == {"version": 1}
    assert client.head("/").status_code == 200


def test_server_security_headers_on_every_response(client: TestClient) -> None:
    responses = (client.get("/"), client.get("/none"), client.post("/api/step"), client.get("/", headers={"host": "x"}))
    assert [response.status_code for response in responses] == [200, 404, 415, 421]
    for response in responses:
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_server_predict_equals_model(client: TestClient, model: Transformer) -> None:
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.no_grad():
        full_probabilities = torch.softmax(model(ids)[0, -1], 0)
        with model.heads["1.1,0.2"].silenced():
            silenced_probabilities = torch.softmax(model(ids)[0, -1], 0)
    result = post_json(client, "predict", text=TEXT, silenced=["1.1", "0.2"])
    for side, probabilities in (("before", full_probabilities), ("after", silenced_probabilities)):
        values, token_ids = probabilities.topk(10)
        assert [token for token, _ in result[side]] == [model.tokenizer.decode([id]) for id in token_ids.tolist()]
        assert [probability for _, probability in result[side]] == pytest.approx(values.tolist(), rel=1e-5)
    assert result["before"] != result["after"]
    unchanged = post_json(client, "predict", text=TEXT, silenced=[])
    assert unchanged["before"] == unchanged["after"] == result["before"]
    assert post_json(client, "predict", text=TEXT) == unchanged


def test_server_step_is_greedy_with_head_rows(client: TestClient, model: Transformer) -> None:
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with model.heads["0.*"].silenced(), torch.no_grad(), record(model, tensors="map") as recording:
        best = int(model(ids)[0, -1].argmax())
    result = post_json(client, "step", text=TEXT, silenced=["0.0", "0.1", "0.2", "0.3"])
    assert result["token"] == model.tokenizer.decode([best])
    assert result["text"] == f"{TEXT} {result['token']}"
    assert result["tokens"] == TEXT.split()
    assert list(result["rows"]) == [str(address) for address in model.spec.head_addresses]
    for head, row in result["rows"].items():
        assert row == pytest.approx(recording[head].map(rows=[-1])[0, 0].tolist(), abs=1e-6)
    text = TEXT
    for _ in range(4):
        text = post_json(client, "step", text=text)["text"]
    assert text == model.generate(TEXT, 4)


def test_server_sentence_returns_every_head(client: TestClient) -> None:
    result = post_json(client, "sentence", text=TEXT)
    assert (result["text"], result["tokens"], len(result["heads"])) == (TEXT, TEXT.split(), 8)


def test_server_silencing_leaves_model_unchanged(client: TestClient, model: Transformer) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([[3, 5, 7]])
    before_logits = model(ids)
    model.train()
    try:
        post_json(client, "predict", text=TEXT, silenced=["0.1"])
        post_json(client, "step", text=TEXT, silenced=["0.1"])
        assert all(module.training for module in model.modules())
    finally:
        model.eval()
    assert torch.equal(model(ids), before_logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(hook_point.is_active for hook_point in model.hook_points())


def test_server_script_text_is_returned_as_json(client: TestClient) -> None:
    text = "<script>alert(1)</script> the cat"
    response = client.post("/api/sentence", json={"text": text})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["text"] == text
    assert client.get("/<script>alert(1)</script>").headers["content-type"] == "application/json"


JSON_HEADERS = {"content-type": "application/json"}


@pytest.mark.parametrize("endpoint", ["sentence", "predict", "step"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", 400, "not valid JSON"),
        (b'{"text": "\xff\xfe"}', 400, "not UTF-8"),
        (b'["text"]', 400, "JSON object"),
        (b'"text"', 400, "JSON object"),
        (b"null", 400, "JSON object"),
        (b"{}", 400, "text: must be a string. Got NoneType"),
        (b'{"text": 5}', 400, "text: must be a string. Got int"),
        (b'{"text": ["a"]}', 400, "text: must be a string. Got list"),
        (b'{"text": "a", "tokens": 9}', 400, "'tokens': unknown field"),
        (b'{"text": ""}', 422, "empty"),
        (b'{"text": " \\n "}', 422, "empty"),
        (b'{"text": "the \\u0000 cat"}', 422, "NUL"),
        (b'{"text": "the \\ud800 cat"}', 422, "half a character"),
        (json.dumps({"text": "a" * (MAX_CHARACTERS + 1)}).encode(), 413, f"{MAX_CHARACTERS + 1} characters"),
        (json.dumps({"text": "the " * 129}).encode(), 413, "129 tokens. Send at most 128"),
        (b'{"text": "' + b"a" * 50_000_000 + b'"}', 413, "larger than"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_server_invalid_body_returns_error(
    client: TestClient, endpoint: str, body: bytes, status: int, message: str
) -> None:
    response = client.post(f"/api/{endpoint}", content=body, headers=JSON_HEADERS)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert message in response.json()["error"]


@pytest.mark.parametrize("endpoint", ["predict", "step"])
@pytest.mark.parametrize(
    ("silenced", "status", "message"),
    [
        ("0.1", 400, "list of head addresses"),
        ([1.5], 400, "list of head addresses"),
        ({"0.1": 0}, 400, "list of head addresses"),
        (["9" * 5000], 400, "list of head addresses"),
        (["7.1"], 422, "the model does not have head"),
        (["0.*"], 422, "not the address of one head"),
        (["../0"], 422, "not the address of one head"),
        (["enc.0.1"], 422, "not have head enc.0.1"),
    ],
)
def test_server_unknown_heads_return_error(
    client: TestClient, endpoint: str, silenced: Any, status: int, message: str
) -> None:
    response = client.post(f"/api/{endpoint}", json={"text": TEXT, "silenced": silenced})
    assert response.status_code == status
    assert message in response.json()["error"]


EXPLAIN_REQUEST = {"text": TEXT, "head": "1.1", "query": 4, "key": 1, "words": False}


def test_server_explain_equals_library(client: TestClient, model: Transformer) -> None:
    response = client.post("/api/explain", json=EXPLAIN_REQUEST)
    assert response.status_code == 200
    attribution = hw.explain(model, TEXT, "1.1", 4, 1, relative_to_mean=True, words=False)
    assert (response.json()["query_token"], response.json()["key_token"]) == (
        attribution.query_token,
        attribution.key_token,
    )
    assert [tuple(pair.values()) for pair in response.json()["pairs"]] == [
        tuple(pair) for pair in attribution.pairs[:12]
    ]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"head": 5}, 400, "head: must be an address"),
        ({"head": "9" * 5000}, 400, "head: must be an address"),
        ({"query": "4"}, 400, "must be integers"),
        ({"key": True}, 400, "must be integers"),
        ({"words": 1}, 400, "true or false"),
        ({"silenced": []}, 400, "'silenced': unknown field"),
        ({"head": "7.1"}, 422, "does not have head 7.1"),
        ({"query": 99}, 422, "word=99"),
        ({"query": 1, "key": 4}, 422, "hidden from the query"),
    ],
)
def test_server_explain_invalid_request_returns_error(
    client: TestClient, change: dict[str, Any], status: int, message: str
) -> None:
    response = client.post("/api/explain", json=EXPLAIN_REQUEST | change)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_server_unbounded_body_returns_413(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(1000):
            yield b"a" * 10_000

    response = client.post("/api/step", content=endless(), headers=JSON_HEADERS)
    assert response.status_code == 413


def test_read_object_slow_body_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    monkeypatch.setattr(request_guard, "BODY_TIMEOUT", 0.05)
    with pytest.raises(request_guard.RequestError, match="not received within"):
        asyncio.run(request_guard.read_json_object(JSON_HEADERS, slow()))


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
def test_server_path_traversal_returns_404(client: TestClient, path: str) -> None:
    for response in (client.get(path), client.get(f"{BASE_URL}{path}")):
        assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
        assert "not found" in response.json()["error"]


def test_server_unknown_methods_return_405(client: TestClient) -> None:
    for method, path in (
        ("PUT", "/"), ("DELETE", "/api/report"), ("GET", "/api/step"), ("OPTIONS", "/api/step"), ("TRACE", "/"),
        ("BREW", "/api/predict"), ("POST", "/api/report"), ("POST", "/"),
    ):  # fmt: skip
        response = client.request(method, path, headers={"access-control-request-method": "POST"})
        assert response.status_code == 405, (method, path)
        assert "is not supported" in response.json()["error"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.7:8642", ""],
)
def test_server_foreign_host_returns_421(client: TestClient, host: str) -> None:
    for response in (
        client.get("/api/report", headers={"host": host}),
        client.post("/api/step", json={"text": TEXT}, headers={"host": host}),
    ):
        assert response.status_code == 421
        assert "unknown host name" in response.json()["error"]


def test_server_local_hosts_are_accepted(client: TestClient) -> None:
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
def test_server_cross_origin_returns_403(client: TestClient, headers: dict[str, str]) -> None:
    response = client.post("/api/predict", json={"text": TEXT}, headers=headers)
    assert response.status_code == 403
    assert "comes from" in response.json()["error"]


def test_server_form_content_type_returns_415(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = client.post("/api/step", content=b'{"text": "a"}', headers={"content-type": kind})
        assert response.status_code == 415


def test_server_same_origin_is_accepted(client: TestClient) -> None:
    for headers in (
        {"origin": BASE_URL},
        {"referer": f"{BASE_URL}/"},
        {"origin": BASE_URL, "sec-fetch-site": "same-origin"},
    ):
        assert client.post("/api/step", json={"text": TEXT}, headers=headers).status_code == 200


def test_server_public_host_requires_token(model: Transformer) -> None:
    app = make_live_app(model, host="0.0.0.0", token="secret")
    with TestClient(app, base_url="http://10.0.0.7:8642") as client:
        for response in (
            client.get("/"), client.get("/api/report"), client.get("/style.css"), client.get("/?token=wrong"),
            client.get("/api/report?token=secret"), client.post("/api/step", json={"text": TEXT}),
            client.get("/", headers={"authorization": "Bearer wrong"}), client.get("/", headers={"cookie": "headwise=x"}),
            client.get("/", headers={"cookie": 'headwise="; ='}), client.get("/?token=%ff%00"),
        ):  # fmt: skip
            assert response.status_code == 401, response.request.url
            assert "missing or wrong" in response.json()["error"]
        assert client.get("/", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/api/report", headers={"authorization": "Bearer secret"}).status_code == 200
        opened = client.get("/?token=secret", follow_redirects=False)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert opened.headers["set-cookie"] == "headwise=secret; HttpOnly; SameSite=Strict; Path=/"
        assert client.get("/").status_code == 200  # authorized by the cookie
        assert client.post("/api/step", json={"text": TEXT}).status_code == 200


def test_server_model_without_output_returns_422() -> None:
    with TestClient(make_live_app(make_model(kind="encoder", output="none")), base_url=BASE_URL) as client:
        for endpoint, message in (("predict", "no output layer"), ("step", "does not predict a next token")):
            response = client.post(f"/api/{endpoint}", json={"text": TEXT})
            assert response.status_code == 422
            assert message in response.json()["error"]
        post_json(client, "sentence", text=TEXT)


def test_server_encoder_predicts_mask() -> None:
    model = make_model(kind="encoder", output="mlm", vocab=281)
    model.tokenizer = tokenizer = add_mask_token(model.tokenizer)  # pyright: ignore[reportArgumentType]
    with TestClient(make_live_app(model), base_url=BASE_URL) as client:
        response = client.post("/api/predict", json={"text": TEXT})
        assert response.status_code == 422
        assert "Write <mask> where" in response.json()["error"]
        result = post_json(client, "predict", text="the <mask> likes the dog", silenced=["1.0"])
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([tokenizer.encode("the <mask> likes the dog")]))[0, 1], 0)
    assert [probability for _, probability in result["before"]] == pytest.approx(
        probabilities.topk(10).values.tolist(), rel=1e-5
    )


def test_live_step_completes_multibyte_character(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(vocab=257)
    model.tokenizer = byte_tokenizer()
    following = {ord("a"): 0xC3, 0xC3: 0xA9}  # after "a" the two bytes of é
    monkeypatch.setattr(LiveSession, "_probabilities", lambda _, ids, *__: torch.eye(257)[following[ids[-1]]])
    result = LiveSession(model).generate_next_token("a")
    assert (result["token"], result["text"]) == ("é", "aé")


def test_server_internal_error_hides_details(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the weights at 0x7f are odd")

    monkeypatch.setattr(LiveSession, "predict", broken)
    with TestClient(make_live_app(model), base_url=BASE_URL, raise_server_exceptions=False) as client:
        response = client.post("/api/predict", json={"text": TEXT})
        assert (response.status_code, "0x7f" in response.text) == (500, False)
        assert response.headers["x-content-type-options"] == "nosniff"
        post_json(client, "step", text=TEXT)


def test_view_missing_extra_names_install_command(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['starlette.applications'] = None\n"
        "sys.argv = ['headwise', 'view', 'smollm2']\n"
        "from headwise.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "headwise: starlette, uvicorn: required by the live view, but not installed. Run: pip install 'headwise[view]'.\n"
    )
