"""What the page is told of prices: bits, caches and costs, counted by hand; and who may be told of them."""

from pathlib import Path

import pytest

import headwise as hw
from headwise.analysis.ablation.sensitivity import Sensitivity, sensitivity
from headwise.compression.plan import Plan
from headwise.errors import HeadwiseError
from headwise.spec import Keeps
from headwise.ui.cost_view import LENGTH, tell_prices
from headwise.ui.report_data import make_book
from tests.distillation.tiny import make
from tests.runner import headwise

TEXTS = ["to be or not to be, that is the question", "whether 'tis nobler in the mind"]


def test_prices_of_a_plan() -> None:
    model = make(kv_heads=2)
    cache: dict[str, Keeps | int] = {"0.1": Keeps(first=4, last=28), "1.*": 8}
    weights = {"0.1": 4, "0.2:vo": 3}
    plan = Plan.make(model, cache=cache, weights=weights, cut="1.0,1.1", fold=False)
    assert plan.after == plan.apply(model).spec
    found = sensitivity(model, TEXTS, bits=(3,), parts=("qk", "values"))
    told, whole = tell_prices(model.spec.addresses, model.spec, found, plan)
    assert whole is not None
    assert told["1.0"]["cut"]
    assert told["1.0"]["bits"] is None
    assert told["1.0"]["cache"]["keeps"] == "nothing: no head reads it"
    assert told["0.1"]["bits"] == {"qk": 4, "vo": 4}
    assert told["0.2"]["bits"] == {"qk": 32, "vo": 3}
    assert told["0.2"]["shares"] == ["0.3"]
    # A key and a value of 4 numbers at each token; streaming keeps 32 of them; at 8 bits a row takes 4 bytes and a scale.
    assert told["0.3"]["cache"]["bytes"] == 32 * 2 * 4 * 4
    assert told["0.0"]["cache"]["bytes"] == told["0.0"]["cache"]["whole"] == LENGTH * 2 * 4 * 4
    assert told["1.2"]["cache"]["bytes"] == LENGTH * 2 * (4 + 4)
    assert whole["cache"] == [4 * LENGTH * 32, LENGTH * 32 + 32 * 32 + LENGTH * 16]
    cost = found["0.1", "values", 3]
    assert told["0.2"]["costs"] == told["0.3"]["costs"]
    assert told["0.2"]["costs"][1] == {
        "part": "values", "bits": 3, "more": cost.more, "low": cost.low, "high": cost.high, "drift": cost.drift,
    }  # fmt: skip


def test_a_model_says_itself_what_it_keeps() -> None:
    model = make()
    told, whole = tell_prices(model.spec.addresses, model.spec)
    assert whole is None, "there is nothing to say of a model as it comes"
    assert told["0.1"]["cache"]["keeps"] == "everything"
    small = Plan.make(model, cache={"0.1": Keeps(first=1, last=7)}).apply(model)
    told, whole = tell_prices(small.spec.addresses, small.spec)
    assert whole is not None
    assert not whole["given"]
    assert told["0.1"]["cache"]["streams"]
    assert whole["whole"] > whole["cache"][1]
    encoder = make(kind="encoder")
    told, _ = tell_prices(encoder.spec.addresses, encoder.spec)
    assert told["0.1"]["cache"] is None


def test_another_model_is_refused() -> None:
    model, other = make(), make(heads=2)
    seen = hw.profile(model, TEXTS, relations=False, causal=False)
    with pytest.raises(HeadwiseError, match="another model"):
        make_book(seen, model, plan=Plan.make(other, cache={"*": 8}))
    with pytest.raises(HeadwiseError, match=r"has no head 0\.2"):
        tell_prices(other.spec.addresses, other.spec, sensitivity(model, TEXTS, heads="0.2", bits=(4,)))
    with pytest.raises(HeadwiseError, match="give the model"):
        make_book(seen, plan=Plan.make(model, cache={"*": 8}))


def test_prices_come_from_files(tmp_path: Path) -> None:
    model = make()
    model.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 3))
    Plan.make(model, cache={"0.*": Keeps(first=1, last=7)}).save(tmp_path / "plan.json")
    sensitivity(model, TEXTS, heads="0.1", bits=(4,), out=tmp_path / "bits.jsonl")
    assert len(Sensitivity.load(tmp_path / "bits.jsonl")) == 2
    how = ("heads", tmp_path / "model", tmp_path / "text.txt", "--no-causal", "--costs", tmp_path / "bits.jsonl")
    assert "--report" in headwise(*how).refused
    shown = headwise(*how, "--plan", tmp_path / "plan.json", "--report", tmp_path / "heads.html", "--json")
    assert '"heads"' in shown.told
    page = (tmp_path / "heads.html").read_text()
    assert "streaming 1 + 7" in page
    assert '"part":"vo"' in page
