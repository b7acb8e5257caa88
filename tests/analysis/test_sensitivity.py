"""What few bits cost, head by head: as a copy of the model with that head rounded says, and nothing stays changed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.analysis.ablation import rerun
from headwise.analysis.ablation import sensitivity as room
from headwise.analysis.ablation.sensitivity import Sensitivity, sensitivity
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.quantize import quantise
from headwise.errors import HeadwiseError
from headwise.kernels.quantization import rounded
from headwise.model import AnyModel, Transformer
from tests.distillation.tiny import make

TEXTS = [
    "to be or not to be, that is the question",
    "whether 'tis nobler",
    "in the mind to suffer the slings and arrows",
]


def gained(model: Transformer, other: AnyModel) -> float:
    trial = PairedEvaluation.of(model, TEXTS)
    return trial.difference(trial.losses(other), trial.full).mean


def state_of(model: AnyModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: AnyModel, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("basis", ["given", "balanced"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_it_is_what_a_copy_with_that_pair_rounded_loses(kv_heads: int, basis: room.Basis) -> None:
    model = make(rotary=True, kv_heads=kv_heads, bias=True)
    before = state_of(model)
    found = sensitivity(model, TEXTS, bits=(3, 2), basis=basis)
    assert unchanged(model, before)
    assert len(found) == 2 * (kv_heads or 4) * 2 * 2
    for cost in list(found)[::5]:
        named = f"{cost.heads.replace(' ', ',')}:{cost.part}"
        copy = quantise(model, {named: cost.bits}, basis=basis)
        assert cost.more == pytest.approx(gained(model, copy), abs=2e-5)
        assert cost.low <= cost.more <= cost.high
        assert cost.drift >= 0


def test_two_stacks() -> None:
    model, texts = make(kind="encoder-decoder"), [(one, one) for one in TEXTS]
    found = sensitivity(model, texts, heads="cross.1.*", bits=(2,), basis="given")
    copy, trial = quantise(model, {"cross.1.0:qk": 2}), PairedEvaluation.of(model, texts)
    more = trial.difference(trial.losses(copy), trial.full).mean
    assert found["cross.1.0", "qk", 2].more == pytest.approx(more, abs=2e-5)


def test_cached_keys_and_values() -> None:
    """Heads by hand: one key head's keys, rounded, in a model whose only other change is none; both at once is a cache."""
    model = make(kv_heads=2)
    found = sensitivity(model, TEXTS, bits=(4,), parts=("keys", "values"), heads="1.2")
    assert [(cost.key, cost.heads) for cost in found] == [("1.1", "1.2 1.3")] * 2
    layer: Any = list(model.attention_layers())[1]
    project = layer._project

    def by_hand(part: str) -> float:
        def changed(*given: Any, **named: Any) -> Any:
            q, k, v, mask, bias = project(*given, **named)
            held = {"keys": k.clone(), "values": v.clone()}
            held[part][:, 1] = rounded(held[part][:, 1], 4)
            k, v = (held["keys"], v) if part == "keys" else (k, held["values"])
            return q, k, v, mask, bias

        trial = PairedEvaluation.of(model, TEXTS)
        layer._project = rerun
        try:
            return trial.difference(trial.losses(model), trial.full).mean
        finally:
            del layer._project

    for cost in found:
        assert cost.more == pytest.approx(by_hand(cost.part), abs=2e-5)


def test_the_drift_is_the_divergence() -> None:
    model = make()
    found = sensitivity(model, TEXTS[:1], bits=(2,), heads="0.0", basis="given")
    ids = torch.tensor([model.tokenizer.encode(TEXTS[0])])  # pyright: ignore[reportOptionalMemberAccess]
    other = quantise(model, {"0.0:vo": 2})
    with torch.no_grad():
        sure, now = (one(ids)[0, :-1].double().log_softmax(-1) for one in (model, other))
    want = (sure.exp() * (sure - now)).sum(-1).mean()
    assert found["0.0", "vo", 2].drift == pytest.approx(want.item(), rel=1e-3)


def test_eight_bits_cost_next_to_nothing() -> None:
    model = make()
    drift = {bits: sensitivity(model, TEXTS, bits=(bits,)).drift.sum() for bits in (8, 4)}
    assert drift[8] < drift[4] / 50  # the step is 127 / 7 times as fine, its square 329


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    model, file = make(), tmp_path / "bits.jsonl"
    whole, before = sensitivity(model, TEXTS), state_of(model)
    answered: list[int] = []

    def stop(what: str, done: int, of: int | None) -> None:
        answered.append(done)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sensitivity(model, TEXTS, out=file, progress=stop)
    assert unchanged(model, before)
    with open(file, "a") as torn:
        torn.write('{"key": "0.3", "he')  # the process died while it wrote
    assert len(Sensitivity.load(file)) == 5
    again = sensitivity(model, TEXTS, out=file, progress=lambda what, done, of: answered.append(done))
    assert answered == list(range(1, 17))
    assert again.to_dict() == whole.to_dict()
    assert len(Sensitivity.load(file)) == 16
    with pytest.raises(HeadwiseError, match=r"another run \(texts"):
        sensitivity(model, TEXTS[:2], out=file)
    with pytest.raises(HeadwiseError, match=r"another run \(model\)"):
        sensitivity(make(1), TEXTS, out=file)
    file.write_text('{"counts": [1]}\n{"key": 3}\n')
    with pytest.raises(HeadwiseError, match="something else"):
        Sensitivity.load(file)


def test_weights_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(bias=True)
    before = state_of(model)
    monkeypatch.setattr(rerun.FromLayer, "run", _fails_later(rerun.FromLayer.run))
    with pytest.raises(RuntimeError, match="no memory"):
        sensitivity(model, TEXTS)
    assert unchanged(model, before)


def _fails_later(run: Any) -> Any:
    """The first passes, which are clean, run."""
    passes: list[int] = []

    def running(self: Any, batch: int) -> torch.Tensor:
        passes.append(batch)
        if len(passes) > len(self.batches) + 1:
            raise RuntimeError("no memory")
        return run(self, batch)

    return running


def test_what_is_refused() -> None:
    model = make()
    for options, told in [
        ({"bits": (5,)}, "8, 4, 3 or 2 bits"),
        ({"parts": ("ov",)}, "has the parts qk, vo, keys, values"),
        ({"bits": ()}, "which parts and how many bits"),
        ({"heads": "9.*"}, "names no head here"),
        ({"basis": "svd"}, "no basis 'svd'"),
        ({"group": 0}, "group counts"),
    ]:
        with pytest.raises(HeadwiseError, match=told):
            sensitivity(model, TEXTS, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match=r"hw.dequantise"):
        sensitivity(quantise(model, 4), TEXTS)
