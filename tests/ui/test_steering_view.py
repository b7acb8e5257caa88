"""Steerings in the live view: sliders of the page, and requests with strengths."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.ui.live_session import LiveSession
from tests.ui.browser import enter_text, open_live_page
from tests.ui.live_model import FILES, TEXT, make_app, make_folder, make_model, running_view

starlette_testclient = pytest.importorskip("starlette.testclient")


def make_session() -> LiveSession:
    model = make_model()
    steering = hw.Steering({"0.1": torch.randn(6), "1.0": torch.randn(6)}, strength=40.0, name="test").for_model(model)
    return LiveSession(model, steerings={"test": steering})


@pytest.fixture
def client() -> Iterator[Any]:
    torch.manual_seed(1)
    app = make_app(make_session(), {"version": 1}, files=FILES)
    with starlette_testclient.TestClient(app, base_url="http://127.0.0.1") as opened:
        yield opened


def test_continue_with_strength_equals_generate_inside_context(client: Any) -> None:
    torch.manual_seed(1)
    session = make_session()
    model, steering = session.model, session.steerings["test"]
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    expected = {}
    for strength in (0.0, 20.0):
        with steering.applied(model, strength):
            expected[strength] = session.continue_text(TEXT)["text"]
            generated = model.generate(ids, 24)[0, ids.shape[1] :].tolist()
        assert model.tokenizer.decode(generated).startswith(expected[strength].strip())
    for strength, text in expected.items():
        response = client.post("/api/continue", json={"text": TEXT, "steering": {"test": strength}})
        assert response.json() == {"text": text}
    assert expected[0.0] != expected[20.0]
    assert client.get("/api/report").json()["steerings"][0]["heads"] == ["0.1", "1.0"]


def test_predict_and_step_are_steered(client: Any) -> None:
    plain = client.post("/api/predict", json={"text": TEXT}).json()
    steered = client.post("/api/predict", json={"text": TEXT, "steering": {"test": 20.0}}).json()
    assert plain["before"] == plain["after"] == steered["before"] != steered["after"]
    token = client.post("/api/step", json={"text": TEXT, "steering": {"test": 20.0}}).json()["token"]
    assert token == steered["after"][0][0]


@pytest.mark.parametrize(
    ("steering", "status", "message"),
    [
        ({"other": 1.0}, 422, "unknown name"),
        ({"test": 1e9}, 422, "strength must be"),
        ({"test": "much"}, 400, "must map names"),
        ({"test": True}, 400, "must map names"),
        ([1], 400, "must map names"),
    ],
)
def test_bad_steering_request_returns_error(client: Any, steering: Any, status: int, message: str) -> None:
    response = client.post("/api/continue", json={"text": TEXT, "steering": steering})
    assert response.status_code == status
    assert message in response.text


def test_session_with_steering_of_other_model_raises() -> None:
    steering = hw.Steering({"0.1": torch.ones(6)}).for_model(make_model(layers=1))
    model = make_model()
    next(iter(model.heads.select("0.1"))).W_O.data.mul_(3)
    with pytest.raises(HeadwiseError, match="another model"):
        LiveSession(model, steerings={"test": steering})


def test_live_page_slider_changes_continuation(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = hw.load(folder / "small")
    torch.manual_seed(1)
    vectors = {"0.1": torch.randn(6), "1.0": torch.randn(6)}
    hw.Steering(vectors, strength=20.0, name="test").for_model(model).save(tmp_path / "steering")
    session = LiveSession(model, steerings={"test": hw.Steering.load(tmp_path / "steering")})
    expected = {
        strength: session.continue_text(TEXT, steering_strengths={"test": strength})["text"]
        for strength in (0, 30, -40)
    }
    assert len(set(expected.values())) == 3
    with running_view(folder, "--steering", str(tmp_path / "steering")) as view, open_live_page(view.url) as page:
        enter_text(page, TEXT)
        slider = page.get_by_label("test", exact=True)
        assert [slider.get_attribute(name) for name in ("min", "max")] == ["-40", "40"]
        for strength in (30, 0, -40):
            slider.fill(str(strength))
            is_displayed = (
                "([side, text]) => document.querySelectorAll('#steering p.context')[side].textContent === text"
            )
            page.wait_for_function(is_displayed, arg=[1, expected[strength].strip()])
            page.wait_for_function(is_displayed, arg=[0, expected[0].strip()])
            assert page.text_content("#steering output") == f"{strength:.2f}"
        if screenshots := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=Path(screenshots) / "steering.png", full_page=True)
