"""Page data of costs: bits, cache sizes and quantization costs computed by hand, and errors for foreign files."""

from pathlib import Path

import pytest

import headwise as hw
from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult, sensitivity
from headwise.compression import PruneRequest
from headwise.compression.head_compression_cost import CACHE_TOKENS, head_cost_data
from headwise.errors import HeadwiseError
from headwise.spec import CachePolicy
from headwise.ui.report_data import make_report_data
from tests.distillation.tiny import make_model
from tests.runner import run_command

TEXTS = ["to be or not to be, that is the question", "whether 'tis nobler in the mind"]


def test_cost_rows_of_plan_equal_closed_form() -> None:
    model = make_model(kv_heads=2)
    cache: dict[str, CachePolicy | int] = {"0.1": CachePolicy(sink_tokens=4, window=28), "1.*": 8}
    weights = {"0.1": 4, "0.2:vo": 3}
    plan = hw.plan_pruning(model, PruneRequest(heads="1.0,1.1", fold_mean=False), cache=cache, weights=weights)
    assert plan.changed_spec == hw.apply(plan, model).spec
    costs = sensitivity(model, TEXTS, bits=(3,), parts=("qk", "values"))
    rows, summary = head_cost_data(model.spec.head_addresses, model.spec, costs, plan)
    assert summary is not None
    assert rows["1.0"]["pruned"]
    assert rows["1.0"]["bits"] is None
    assert rows["1.0"]["cache"]["policy"] == "nothing: no head reads it"
    assert rows["0.1"]["bits"] == {"qk": 4, "vo": 4}
    assert rows["0.2"]["bits"] == {"qk": 32, "vo": 3}
    assert rows["0.2"]["kv_siblings"] == ["0.3"]
    # A key and a value of 4 dimensions per token; streaming heads cache 32 tokens; an 8-bit row has 4 bytes and a scale.
    assert rows["0.3"]["cache"]["bytes"] == 32 * 2 * 4 * 4
    assert rows["0.0"]["cache"]["bytes"] == rows["0.0"]["cache"]["full_bytes"] == CACHE_TOKENS * 2 * 4 * 4
    assert rows["1.2"]["cache"]["bytes"] == CACHE_TOKENS * 2 * (4 + 4)
    assert summary["cache"] == [4 * CACHE_TOKENS * 32, CACHE_TOKENS * 32 + 32 * 32 + CACHE_TOKENS * 16]
    cost = costs["0.1", "values", 3]
    assert rows["0.2"]["costs"] == rows["0.3"]["costs"]
    assert rows["0.2"]["costs"][1] == {
        "part": "values", "bits": 3, "loss_increase": cost.loss_increase, "low": cost.low, "high": cost.high,
        "kl_divergence": cost.kl_divergence,
    }  # fmt: skip


def test_cost_rows_without_plan_use_model_spec() -> None:
    model = make_model()
    rows, summary = head_cost_data(model.spec.head_addresses, model.spec)
    assert summary is None, "an uncompressed model has no cost summary"
    assert rows["0.1"]["cache"]["policy"] == "everything"
    small = hw.apply(hw.plan_pruning(model, cache={"0.1": CachePolicy(sink_tokens=1, window=7)}), model)
    rows, summary = head_cost_data(small.spec.head_addresses, small.spec)
    assert summary is not None
    assert not summary["has_plan"]
    assert rows["0.1"]["cache"]["streaming"]
    assert summary["full_cache"] > summary["cache"][1]
    encoder = make_model(kind="encoder")
    rows, _ = head_cost_data(encoder.spec.head_addresses, encoder.spec)
    assert rows["0.1"]["cache"] is None


def test_cost_rows_other_model_raises() -> None:
    model, other = make_model(), make_model(heads=2)
    head_profile = hw.profile(model, TEXTS, relations=False, causal=False)
    with pytest.raises(HeadwiseError, match="another model"):
        make_report_data(head_profile, model, plan=hw.plan_pruning(other, cache={"*": 8}))
    with pytest.raises(HeadwiseError, match=r"has no head 0\.2"):
        head_cost_data(other.spec.head_addresses, other.spec, sensitivity(model, TEXTS, heads="0.2", bits=(4,)))
    with pytest.raises(HeadwiseError, match="Pass the model"):
        make_report_data(head_profile, plan=hw.plan_pruning(model, cache={"*": 8}))


def test_profile_report_costs_come_from_files(tmp_path: Path) -> None:
    model = make_model()
    model.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 3))
    hw.plan_pruning(model, cache={"0.*": CachePolicy(sink_tokens=1, window=7)}).save(tmp_path / "plan.json")
    sensitivity(model, TEXTS, heads="0.1", bits=(4,), out=tmp_path / "bits.jsonl")
    assert len(SensitivityResult.load(tmp_path / "bits.jsonl")) == 2
    command = (
        "profile",
        tmp_path / "model",
        tmp_path / "text.txt",
        "--no-causal",
        "--sensitivity",
        tmp_path / "bits.jsonl",
    )
    assert "--report" in run_command(*command).error_line
    done = run_command(*command, "--plan", tmp_path / "plan.json", "--report", tmp_path / "heads.html", "--json")
    assert '"heads"' in done.output
    page = (tmp_path / "heads.html").read_text()
    assert "streaming 1 + 7" in page
    assert '"part":"vo"' in page
