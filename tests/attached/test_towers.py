"""Several towers as one model: maps beside transformers' eager path, silence beside zeroed rows of W_O, in every tower."""

import copy
import math
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.variability import variability
from headwise.attached import Attached
from headwise.attached.verify_prune import tensors
from headwise.errors import HeadwiseError
from tests.attached import towers
from tests.contract.attached_models import TEXTS, TOKENIZER

NAMES = {
    "clip": {"vision", "text"}, "llava": {"vision", "text"}, "paligemma": {"vision", "text"}, "gemma3": {"vision", "text"},
    "qwen": {"vision", "text"}, "blip2": {"vision", "query", "cross", "text"}, "whisper": {"enc", "dec", "cross"},
}  # fmt: skip


def numbers(model, call):
    with torch.no_grad():
        return tensors(dict(model(**call)))


def far(some, others) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("build", towers.ALL, ids=lambda build: build.__name__)
def test_every_tower_is_seen_and_silenced(build) -> None:
    model, call = towers.made(build)
    before = numbers(model, call)
    with hw.attach(model) as theirs:
        assert {site.address.stack for site in theirs.sites()} == NAMES[build.__name__]
        assert [str(a) for a in theirs.spec.addresses] == [str(a) for a in theirs.heads.addresses]
        with hw.record(theirs, "*", what="map") as recording:
            assert all(map(torch.equal, numbers(model, call), before))  # looking changes no bit
        for layer in theirs.attention_layers():
            head, e = layer.site.addresses[1], layer.spec.value_dim
            writes: Any = layer.found.writes
            for seen in recording[str(head)].calls:
                torch.testing.assert_close(
                    seen.map().sum(-1), torch.ones(seen.map().shape[:-1]), atol=1e-9, rtol=0, check_dtype=False
                )
            if layer.passes == "coupled":
                with pytest.raises(HeadwiseError, match="heads meet"), theirs.heads[str(head)].silenced():
                    pass
                continue
            with theirs.heads[str(head)].silenced():
                silent = numbers(model, call)
            kept = writes.weight.detach().clone()
            with torch.no_grad():
                writes.weight[:, e : 2 * e] = 0
                zeroed = numbers(model, call)
                writes.weight.copy_(kept)
            assert far(silent, zeroed) < 1e-9
            assert far(silent, before) > 0, f"{head} is not reached"
    assert all(map(torch.equal, numbers(model, call), before))


@pytest.mark.parametrize("build", [towers.clip, towers.llava, towers.paligemma], ids=lambda build: build.__name__)
def test_maps_are_those_of_the_eager_path(build) -> None:
    model, call = towers.made(build)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    caught: dict[str, torch.Tensor] = {}
    with hw.attach(model) as theirs, hw.record(theirs, "*", what="map") as recording:
        for layer in theirs.attention_layers():
            part = eager.get_submodule(layer.found.name)
            part.register_forward_hook(lambda _, __, made, at=str(layer.site.address): caught.update({at: made[1]}))
        numbers(model, call)
        numbers(eager, call)
        for address in theirs.heads.addresses:
            expected = caught[str(address.site)][:, address.head]
            # the eager path takes its softmax in float32
            torch.testing.assert_close(recording[str(address)].map(), expected, atol=1e-6, rtol=0)


def test_heads_are_worth_what_the_whole_model_loses() -> None:
    model, call = towers.made(towers.llava)
    calls = [{name: value[i : i + 1] for name, value in call.items()} for i in range(2)]
    for one in calls:
        one["labels"] = one["input_ids"].clone()
    with hw.attach(model) as theirs:
        found = hw.importance(theirs, calls)
        slopes = hw.importance(theirs, calls, by="gradient", heads="vision.0.*")
        layer = theirs.attention_layers()[0]
        with torch.no_grad():
            clean = [float(model(**one).loss) for one in calls]
            writes: Any = layer.found.writes
            kept, e = writes.weight.clone(), layer.spec.value_dim
            writes.weight[:, :e] = 0
            lost = [float(model(**one).loss) for one in calls]
            writes.weight.copy_(kept)
        assert abs(found["vision.0.0"].worth - sum(b - a for a, b in zip(clean, lost, strict=True)) / 2) < 1e-6
        assert abs(found.clean - sum(clean) / 2) < 1e-6
        step = 1e-2
        with torch.no_grad():
            moved = []
            for one in calls:
                with theirs.heads["vision.0.1"].scaled(1 + step):
                    up = float(model(**one).loss)
                with theirs.heads["vision.0.1"].scaled(1 - step):
                    moved.append(abs(up - float(model(**one).loss)) / (2 * step))
        assert abs(slopes["vision.0.1"].worth - sum(moved) / 2) < 1e-4
        own = hw.importance(theirs, calls[:1], heads="text.1.2", loss=lambda made: made.logits.square().mean())
        assert own.addresses[0].stack == "text"
        with pytest.raises(HeadwiseError, match="gives no loss"):
            hw.importance(theirs, {"input_ids": call["input_ids"], "pixel_values": call["pixel_values"]})
        with pytest.raises(HeadwiseError, match="calls of your own"):
            hw.importance(theirs, ["a text"], loss=lambda made: made.loss)


@pytest.mark.parametrize("build", [towers.clip, towers.llava, towers.gemma3], ids=lambda build: build.__name__)
def test_heads_are_cut_from_every_tower(build, tmp_path) -> None:
    model, call = towers.made(build)
    gone = "vision.0.1,vision.1.*,text.0.0-1,text.1.3"
    with hw.attach(model) as theirs:
        with theirs.heads[gone].silenced():
            silent = numbers(model, call)
        small = theirs.without(gone)
        assert far(numbers(small.model, call), silent) < 1e-9
        small.save(tmp_path / "small")
        small.detach()
    back = hw.load(tmp_path / "small", dtype=torch.float64)
    assert isinstance(back, Attached)
    with back:
        assert far(numbers(back.model, call), silent) < 1e-9
        assert not {str(a) for a in back.heads.addresses} & {"vision.0.1", "vision.1.0", "text.0.1"}


def test_texts_ask_the_towers_that_they_reach() -> None:
    """Of the tower of pictures nothing is said, no NaN either; whoever asks for it by name is told why not."""
    model, _ = towers.made(towers.llava)
    text = [f"text.{layer}.{head}" for layer in range(2) for head in range(4)]
    with hw.attach(model, TOKENIZER) as theirs:
        seen = hw.attend(theirs, TEXTS[0])
        assert list(seen.heads) == text
        assert all(bool(seen.map(head).isfinite().all()) for head in seen.heads)
        found = hw.profile(theirs, TEXTS, relations=False, causal=False, prompts=True)
        assert [str(head) for head in found.addresses] == text
        assert all(map(math.isfinite, found.measure("beyond"))), "texts laid end to end"
        assert all(math.isfinite(head.measures["entropy"]) for head in found)
        for by in ("ablation", "gradient", "attribution"):
            worth = hw.importance(theirs, TEXTS, by=by, check=0)
            assert [str(head) for head in worth.addresses] == text
            assert all(map(math.isfinite, worth.mean))
        spread = variability(theirs, TEXTS, length=5)
        assert list(spread) == text
        assert all(map(math.isfinite, spread.values()))
        assert {one.key for one in hw.sensitivity(theirs, TEXTS)} == {"text.0.0", "text.0.1", "text.1.0", "text.1.1"}
        assert [str(head) for head in hw.compare(theirs, TEXTS, rows=8).addresses] == text
        for ask in (
            lambda: hw.attend(theirs, TEXTS[0], heads="vision.0.1"),
            lambda: hw.importance(theirs, TEXTS, heads="vision.0.*,text.0.1"),
            lambda: variability(theirs, TEXTS, "vision.*", length=5),
            lambda: hw.compare(theirs, TEXTS, heads="vision.*"),
            lambda: hw.prune(theirs, keep=0.5, on=TEXTS),
        ):
            with pytest.raises(
                HeadwiseError, match=r"a text alone does not reach head vision.*Heads it reaches: text\.\*"
            ):
                ask()


def test_a_model_that_needs_pictures_beside_words_says_so() -> None:
    model, _ = towers.made(towers.clip)
    with hw.attach(model, TOKENIZER) as theirs:
        for ask in (lambda: hw.attend(theirs, TEXTS[0]), lambda: hw.importance(theirs, TEXTS)):
            with pytest.raises(HeadwiseError, match="cannot be called with token ids alone"):
                ask()
