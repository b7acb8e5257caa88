"""Models with several towers: maps equal the eager path, silencing equals zeroed rows of W_O, in every tower."""

import copy
import math
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.variability import variability
from headwise.attached import AttachedModel
from headwise.attached.prune_in_place import flatten_tensors
from headwise.errors import HeadwiseError
from tests.attached import towers
from tests.contract.attached_models import TEXTS, TOKENIZER

NAMES = {
    "clip": {"vision", "text"}, "llava": {"vision", "text"}, "paligemma": {"vision", "text"}, "gemma3": {"vision", "text"},
    "qwen": {"vision", "text"}, "blip2": {"vision", "query", "cross", "text"}, "whisper": {"enc", "dec", "cross"},
}  # fmt: skip


def outputs(model, call):
    with torch.no_grad():
        return flatten_tensors(dict(model(**call)))


def max_difference(actual, expected) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("build", towers.ALL, ids=lambda build: build.__name__)
def test_attach_towers_records_and_silences_each(build) -> None:
    model, call = towers.build_model(build)
    before = outputs(model, call)
    with hw.attach(model) as attached:
        assert {hook_point.address.stack for hook_point in attached.hook_points()} == NAMES[build.__name__]
        assert [str(a) for a in attached.spec.head_addresses] == [str(a) for a in attached.heads.addresses]
        with hw.record(attached, "*", tensors="map") as recording:
            assert all(map(torch.equal, outputs(model, call), before))  # recording does not change outputs
        for layer in attached.attention_layers():
            head, e = layer.hook_point.head_addresses[1], layer.spec.value_dim
            projection: Any = layer.info.output_module
            for recorded in recording[str(head)].calls:
                torch.testing.assert_close(
                    recorded.map().sum(-1), torch.ones(recorded.map().shape[:-1]), atol=1e-9, rtol=0, check_dtype=False
                )
            if layer.z_path == "coupled":
                with pytest.raises(HeadwiseError, match="combines heads"), attached.heads[str(head)].silenced():
                    pass
                continue
            with attached.heads[str(head)].silenced():
                silent = outputs(model, call)
            saved = projection.weight.detach().clone()
            with torch.no_grad():
                projection.weight[:, e : 2 * e] = 0
                zeroed = outputs(model, call)
                projection.weight.copy_(saved)
            assert max_difference(silent, zeroed) < 1e-9
            assert max_difference(silent, before) > 0, f"{head} is not reached"
    assert all(map(torch.equal, outputs(model, call), before))


@pytest.mark.parametrize("build", [towers.clip, towers.llava, towers.paligemma], ids=lambda build: build.__name__)
def test_record_towers_maps_equal_eager(build) -> None:
    model, call = towers.build_model(build)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    caught: dict[str, torch.Tensor] = {}
    with hw.attach(model) as attached, hw.record(attached, "*", tensors="map") as recording:
        for layer in attached.attention_layers():
            part = eager.get_submodule(layer.info.name)
            part.register_forward_hook(
                lambda _, __, output, at=str(layer.hook_point.address): caught.update({at: output[1]})
            )
        outputs(model, call)
        outputs(eager, call)
        for address in attached.heads.addresses:
            expected = caught[str(address.layer_address)][:, address.head]
            # the eager path computes softmax in float32
            torch.testing.assert_close(recording[str(address)].map(), expected, atol=1e-6, rtol=0)


def test_importance_of_calls_equals_loss_change() -> None:
    model, call = towers.build_model(towers.llava)
    calls = [{name: value[i : i + 1] for name, value in call.items()} for i in range(2)]
    for sample in calls:
        sample["labels"] = sample["input_ids"].clone()
    with hw.attach(model) as attached:
        importance = hw.importance(attached, calls)
        slopes = hw.importance(attached, calls, ranking="gradient", heads="vision.0.*")
        layer = attached.attention_layers()[0]
        with torch.no_grad():
            clean = [float(model(**sample).loss) for sample in calls]
            projection: Any = layer.info.output_module
            saved, e = projection.weight.clone(), layer.spec.value_dim
            projection.weight[:, :e] = 0
            lost = [float(model(**sample).loss) for sample in calls]
            projection.weight.copy_(saved)
        assert (
            abs(importance["vision.0.0"].importance - sum(b - a for a, b in zip(clean, lost, strict=True)) / 2) < 1e-6
        )
        assert abs(importance.clean_loss - sum(clean) / 2) < 1e-6
        step = 1e-2
        with torch.no_grad():
            moved = []
            for sample in calls:
                with attached.heads["vision.0.1"].scaled(1 + step):
                    up = float(model(**sample).loss)
                with attached.heads["vision.0.1"].scaled(1 - step):
                    moved.append(abs(up - float(model(**sample).loss)) / (2 * step))
        assert abs(slopes["vision.0.1"].importance - sum(moved) / 2) < 1e-4
        own = hw.importance(attached, calls[:1], heads="text.1.2", loss=lambda output: output.logits.square().mean())
        assert own.addresses[0].stack == "text"
        with pytest.raises(HeadwiseError, match="has no loss"):
            hw.importance(attached, {"input_ids": call["input_ids"], "pixel_values": call["pixel_values"]})
        with pytest.raises(HeadwiseError, match="a list of model calls"):
            hw.importance(attached, ["a text"], loss=lambda output: output.loss)


@pytest.mark.parametrize("build", [towers.clip, towers.llava, towers.gemma3], ids=lambda build: build.__name__)
def test_prune_towers_equals_silenced_and_loads(build, tmp_path) -> None:
    model, call = towers.build_model(build)
    pruned = "vision.0.1,vision.1.*,text.0.0-1,text.1.3"
    with hw.attach(model) as attached:
        with attached.heads[pruned].silenced():
            silent = outputs(model, call)
        small = attached.prune(pruned)
        assert max_difference(outputs(small.model, call), silent) < 1e-9
        small.save(tmp_path / "small")
        small.detach()
    back = hw.load(tmp_path / "small", dtype=torch.float64)
    assert isinstance(back, AttachedModel)
    with back:
        assert max_difference(outputs(back.model, call), silent) < 1e-9
        assert not {str(a) for a in back.heads.addresses} & {"vision.0.1", "vision.1.0", "text.0.1"}


def test_prune_towers_plan_is_saved_with_the_model_and_alone(tmp_path) -> None:
    model, call = towers.build_model(towers.clip)
    with hw.attach(model) as attached:
        small = hw.prune(attached, heads="vision.0.1,text.1.3", fold_mean=False)
        (plan,) = small.plans
        small.save(tmp_path / "small")
        plan.save(tmp_path / "plan.json")
        assert hw.Plan.load(tmp_path / "plan.json") == plan
        again = hw.apply(hw.Plan.load(tmp_path / "plan.json"), attached)
        assert max_difference(outputs(again.model, call), outputs(small.model, call)) == 0
    back: Any = hw.load(tmp_path / "small", dtype=torch.float64)
    assert back.plans == (plan,)


def test_quantize_towers_without_a_common_vocabulary_says_so() -> None:
    model, _ = towers.build_model(towers.clip)
    with hw.attach(model) as attached:
        with pytest.raises(HeadwiseError, match=r"no single table of token embeddings. Leave out 'vocabulary'"):
            hw.quantize(attached, 8)
        assert hw.quantize(attached, {"*": 4, "mlp": 4}).spec.weight_rules


def test_text_functions_multimodal_cover_text_tower_only() -> None:
    """The vision tower is not part of the result, not even as NaN. Selecting it by name raises an error with the reason."""
    model, _ = towers.build_model(towers.llava)
    text = [f"text.{layer}.{head}" for layer in range(2) for head in range(4)]
    with hw.attach(model, TOKENIZER) as attached:
        view = hw.attention_maps(attached, TEXTS[0])
        assert list(view.heads) == text
        assert all(bool(view.map(head).isfinite().all()) for head in view.heads)
        profile = hw.profile(attached, TEXTS, relations=False, causal=False, prompts=True)
        assert [str(head) for head in profile.addresses] == text
        assert all(map(math.isfinite, profile.metric("outside window"))), "texts laid end to end"
        assert all(math.isfinite(head.metrics["entropy"]) for head in profile)
        for ranking in ("ablation", "gradient", "attribution"):
            importance = hw.importance(attached, TEXTS, ranking=ranking, check_heads=0)
            assert [str(head) for head in importance.addresses] == text
            assert all(map(math.isfinite, importance.mean))
        spread = variability(attached, TEXTS, length=5)
        assert list(spread) == text
        assert all(map(math.isfinite, spread.values()))
        assert {entry.kv_head for entry in hw.sensitivity(attached, TEXTS)} == {
            "text.0.0",
            "text.0.1",
            "text.1.0",
            "text.1.1",
        }
        assert [str(head) for head in hw.compare_heads(attached, TEXTS, rows=8).addresses] == text
        for ask in (
            lambda: hw.attention_maps(attached, TEXTS[0], heads="vision.0.1"),
            lambda: hw.importance(attached, TEXTS, heads="vision.0.*,text.0.1"),
            lambda: variability(attached, TEXTS, "vision.*", length=5),
            lambda: hw.compare_heads(attached, TEXTS, heads="vision.*"),
            lambda: hw.prune(attached, keep=0.5, corpus=TEXTS),
        ):
            with pytest.raises(HeadwiseError, match=r"head vision.* cannot be measured on texts.*reaches text\.\*"):
                ask()


def test_text_functions_model_needing_images_raise() -> None:
    model, _ = towers.build_model(towers.clip)
    with hw.attach(model, TOKENIZER) as attached:
        for ask in (lambda: hw.attention_maps(attached, TEXTS[0]), lambda: hw.importance(attached, TEXTS)):
            with pytest.raises(HeadwiseError, match="cannot be called with token ids alone"):
                ask()
