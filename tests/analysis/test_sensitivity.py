"""Quantization cost by head: equal to a copy of the model with that head quantized, and the model is restored."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.analysis.ablation import ablated_rerun
from headwise.analysis.ablation import quantization_sensitivity as room
from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult, sensitivity
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.quantize import quantize
from headwise.errors import HeadwiseError
from headwise.kernels.quantization import fake_quantize
from headwise.model import ModelProtocol, Transformer
from tests.distillation.tiny import make_model

TEXTS = [
    "to be or not to be, that is the question",
    "whether 'tis nobler",
    "in the mind to suffer the slings and arrows",
]


def loss_difference(model: Transformer, other: ModelProtocol) -> float:
    evaluation = PairedEvaluator.of(model, TEXTS)
    return evaluation.difference(evaluation.losses_per_text(other), evaluation.full_losses_per_text).mean


def copy_state(model: ModelProtocol) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_unchanged(model: ModelProtocol, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("basis", ["given", "balanced"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_sensitivity_equals_quantized_copy(kv_heads: int, basis: room.Basis) -> None:
    model = make_model(rotary=True, kv_heads=kv_heads, bias=True)
    before = copy_state(model)
    result = sensitivity(model, TEXTS, bits=(3, 2), basis=basis)
    assert is_unchanged(model, before)
    assert len(result) == 2 * (kv_heads or 4) * 2 * 2
    for cost in list(result)[::5]:
        pattern = f"{cost.heads.replace(' ', ',')}:{cost.part}"
        copy = quantize(model, {pattern: cost.bits}, basis=basis)
        assert cost.loss_increase == pytest.approx(loss_difference(model, copy), abs=2e-5)
        assert cost.low <= cost.loss_increase <= cost.high
        assert cost.kl_divergence >= 0


def test_sensitivity_encoder_decoder_equals_quantized_copy() -> None:
    model, texts = make_model(kind="encoder-decoder"), [(text, text) for text in TEXTS]
    result = sensitivity(model, texts, heads="cross.1.*", bits=(2,), basis="given")
    copy, evaluation = quantize(model, {"cross.1.0:qk": 2}), PairedEvaluator.of(model, texts)
    loss_increase = evaluation.difference(evaluation.losses_per_text(copy), evaluation.full_losses_per_text).mean
    assert result["cross.1.0", "qk", 2].loss_increase == pytest.approx(loss_increase, abs=2e-5)


def test_sensitivity_cached_keys_and_values_equal_manual_quantization() -> None:
    """Quantize the keys of one KV head by hand, without any other change. Keys and values together are the cache."""
    model = make_model(kv_heads=2)
    result = sensitivity(model, TEXTS, bits=(4,), parts=("keys", "values"), heads="1.2")
    assert [(cost.kv_head, cost.heads) for cost in result] == [("1.1", "1.2 1.3")] * 2
    layer: Any = list(model.attention_layers())[1]
    project = layer._project

    def manual_cost(part: str) -> float:
        def project_quantized(*args: Any, **kwargs: Any) -> Any:
            q, k, v, request = project(*args, **kwargs)
            kv = {"keys": k.clone(), "values": v.clone()}
            kv[part][:, 1] = fake_quantize(kv[part][:, 1], 4)
            k, v = (kv["keys"], v) if part == "keys" else (k, kv["values"])
            return q, k, v, request

        evaluation = PairedEvaluator.of(model, TEXTS)
        layer._project = project_quantized
        try:
            return evaluation.difference(evaluation.losses_per_text(model), evaluation.full_losses_per_text).mean
        finally:
            del layer._project

    for cost in result:
        assert cost.loss_increase == pytest.approx(manual_cost(cost.part), abs=2e-5)


def test_sensitivity_drift_equals_kl_divergence() -> None:
    model = make_model()
    result = sensitivity(model, TEXTS[:1], bits=(2,), heads="0.0", basis="given")
    ids = torch.tensor([model.tokenizer.encode(TEXTS[0])])  # pyright: ignore[reportOptionalMemberAccess]
    other = quantize(model, {"0.0:vo": 2})
    with torch.no_grad():
        clean_logs, quantized_logs = (
            scored_model(ids)[0, :-1].double().log_softmax(-1) for scored_model in (model, other)
        )
    want = (clean_logs.exp() * (clean_logs - quantized_logs)).sum(-1).mean()
    assert result["0.0", "vo", 2].kl_divergence == pytest.approx(want.item(), rel=1e-3)


def test_sensitivity_eight_bits_drift_is_small() -> None:
    model = make_model()
    drift = {bits: sensitivity(model, TEXTS, bits=(bits,)).kl_divergence.sum() for bits in (8, 4)}
    assert drift[8] < drift[4] / 50  # the step is 127 / 7 times smaller, its square 329 times


def test_sensitivity_resumes_after_interrupt(tmp_path: Path) -> None:
    model, file = make_model(), tmp_path / "bits.jsonl"
    full, before = sensitivity(model, TEXTS), copy_state(model)
    progress_counts: list[int] = []

    def stop(stage: str, done: int, of: int | None) -> None:
        progress_counts.append(done)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sensitivity(model, TEXTS, out=file, progress=stop)
    assert is_unchanged(model, before)
    with open(file, "a") as torn:
        torn.write('{"kv_head": "0.3", "he')  # the process was killed while writing
    assert len(SensitivityResult.load(file)) == 5
    resumed = sensitivity(model, TEXTS, out=file, progress=lambda stage, done, of: progress_counts.append(done))
    assert progress_counts == list(range(1, 17))
    assert resumed.to_dict() == full.to_dict()
    assert len(SensitivityResult.load(file)) == 16
    with pytest.raises(HeadwiseError, match=r"another run\. Different: texts"):
        sensitivity(model, TEXTS[:2], out=file)
    with pytest.raises(HeadwiseError, match=r"another run\. Different: model"):
        sensitivity(make_model(1), TEXTS, out=file)
    file.write_text('{"counts": [1]}\n{"kv_head": 3}\n')
    with pytest.raises(HeadwiseError, match="not a sensitivity file"):
        SensitivityResult.load(file)


def test_sensitivity_error_restores_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(bias=True)
    before = copy_state(model)
    monkeypatch.setattr(
        ablated_rerun.PartialRerun,
        "hidden_at_targets",
        _fail_after_clean_passes(ablated_rerun.PartialRerun.hidden_at_targets),
    )
    with pytest.raises(RuntimeError, match="no memory"):
        sensitivity(model, TEXTS)
    assert is_unchanged(model, before)


def _fail_after_clean_passes(run: Any) -> Any:
    """Let the first passes, which are not quantized, run."""
    passes: list[int] = []

    def run_then_fail(self: Any, batch: int) -> torch.Tensor:
        passes.append(batch)
        if len(passes) > len(self.batches) + 1:
            raise RuntimeError("no memory")
        return run(self, batch)

    return run_then_fail


def test_sensitivity_invalid_arguments_raise() -> None:
    model = make_model()
    for options, message in [
        ({"bits": (5,)}, "8, 4, 3 or 2 bits"),
        ({"parts": ("ov",)}, "qk, vo, keys, values"),
        ({"bits": ()}, "both must be non-empty"),
        ({"heads": "9.*"}, "no such head"),
        ({"basis": "svd"}, "basis='svd'"),
        ({"group_size": 0}, "group_size"),
    ]:
        with pytest.raises(HeadwiseError, match=message):
            sensitivity(model, TEXTS, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match=r"hw.dequantize"):
        sensitivity(quantize(model, 4), TEXTS)
