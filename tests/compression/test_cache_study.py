"""What key heads that keep less save and cost, against losses and bytes by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.compression.cache_study import CacheStudy, cache_study
from headwise.compression.evaluation import PairedEvaluation
from headwise.errors import HeadwiseError
from headwise.spec import Keeps
from headwise.spec.parallel_cost import cache_bytes
from tests.distillation.tiny import make

LINES = [f"{n} and {n} are {2 * n}, and so on and so on, and on it goes." for n in range(8)]


def loss_past(model: hw.Transformer, lines: list[str], past: int) -> list[tuple[float, int]]:
    """Summed loss and number of the tokens behind the first so many, text by text, by plain logits."""
    made = []
    assert model.tokenizer is not None
    for line in lines:
        ids = torch.tensor([model.tokenizer.encode(line)])
        with torch.no_grad():
            odds = model(ids)[0, past:-1]
        wanted = ids[0, past + 1 :]
        made.append((F.cross_entropy(odds, wanted, reduction="sum").item(), len(wanted)))
    return made


def test_losses_are_those_behind_what_is_kept() -> None:
    model = make(rotary=True, kv_heads=2)
    made = cache_study(model, CacheStudy(heads="1.*", first=2, last=6, on=LINES, seeds=2))
    report = made.report
    assert report is not None
    assert made.model is not None
    assert (report.past, report.texts) == (8, 8)
    for figure, one in ((report.loss_before, model), (report.loss_after, made.model)):
        sums = loss_past(one, LINES, 8)
        assert figure.mean == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), abs=1e-5)
    assert report.more.mean == pytest.approx(report.loss_after.mean - report.loss_before.mean, abs=1e-6)
    assert report.more.low <= report.more.mean <= report.more.high
    assert len(report.random) == 2
    # 2 layers, 2 key heads, a key and a value of 4 float32 numbers; those of layer 1 keep 8 tokens.
    length = min(1024, model.spec.context)
    assert report.bytes_before == 4 * length * 2 * 4 * 4
    assert report.bytes_after == 2 * length * 2 * 4 * 4 + 2 * 8 * 2 * 4 * 4


def test_what_is_asked_before_anything_is_forgotten_cannot_differ() -> None:
    model = make()
    small = hw.Plan.make(model, cache={"*": Keeps(first=2, last=6)}).apply(model)
    whole, few = (np.array(loss_past(one, LINES, 0)) for one in (model, small))
    behind = np.array(loss_past(small, LINES, 8)) - np.array(loss_past(model, LINES, 8))
    assert (few - whole)[:, 0] == pytest.approx(behind[:, 0], abs=1e-4)


def test_key_heads_are_chosen_on_other_texts_than_they_are_judged_by() -> None:
    model = make()
    made = cache_study(model, CacheStudy(share=0.5, first=1, last=8, bits=8, on=LINES, seeds=1))
    assert made.plan is not None
    assert made.report is not None
    assert made.report.texts == 4
    assert {rule.keeps for rule in made.plan.cache} == {Keeps(bits=8, first=1, last=8), Keeps(bits=8)}
    assert sum(len(rule.heads) for rule in made.plan.cache) == 8
    again = hw.Plan.streaming(model, 0.5, first=1, last=8, by="random", seed=3)
    assert {rule.keeps for rule in again.cache} == {Keeps(first=1, last=8)}
    other = cache_study(model, CacheStudy(share=0.5, first=1, last=8, on=LINES[:4], test=LINES[4:], seeds=0))
    assert other.report is not None
    assert other.report.more_than_random is None


def test_the_curve_ends_where_the_plan_is() -> None:
    model = make()
    study = CacheStudy(share=0.5, first=1, last=8, on=LINES, seeds=2, shares=(0.5, 1.0))
    made = cache_study(model, study)
    assert made.report is not None
    chosen = [point for point in made.curve if point.line == "writes"]
    assert [point.streaming for point in chosen] == [4, 8]
    assert chosen[0].more == made.report.more
    assert chosen[0].bytes == made.report.bytes_after
    everyone = [point for point in made.curve if point.streaming == 8]
    assert everyone[0].more.mean == pytest.approx(everyone[1].more.mean), "all of them is all of them, drawn or chosen"
    assert [point.bits for point in made.curve if point.line == "all at fewer bits"] == [16, 8, 4]
    rows = {point.line for point in cache_study(model, CacheStudy(shares=(0.5,), first=1, last=8, on=LINES)).curve}
    assert rows == {"writes", "random", "all at fewer bits"}


def test_the_saved_model_says_it_all(tmp_path: Path) -> None:
    model = make()
    study = CacheStudy(heads="0.1,1.*", first=2, last=5, bits=8, on=LINES, seeds=0, passkeys=0)
    made = cache_study(model, study, out=tmp_path / "small", save_plan=tmp_path / "plan.json")
    assert made.plan is not None
    loaded = hw.load(tmp_path / "small")
    assert isinstance(loaded, hw.Transformer)
    assert loaded.spec.cache == made.plan.cache
    prompt = torch.arange(model.spec.context)[None]  # full, so that no room is left over
    with torch.no_grad():
        cache = loaded.cache()
        loaded(prompt, cache=cache)
    assert cache.bytes == cache_bytes(loaded.spec, prompt.shape[1])
    assert loaded.generate(LINES[3], 8) == hw.Plan.load(tmp_path / "plan.json").apply(model).generate(LINES[3], 8)
    again = cache_study(model, CacheStudy(plan=hw.Plan.load(tmp_path / "plan.json"), on=LINES, seeds=0))
    assert again.report == made.report


def test_pass_keys_are_counted_on_what_the_whole_cache_finds() -> None:
    model = make(rotary=True)
    study = CacheStudy(bits=16, on=["word after word and so on and on " * 20], limit=8, length=120, passkeys=2, seeds=0)
    made = cache_study(model, study)
    assert made.report is not None
    assert made.report.passkeys == (0, 0), "random weights find none"


def test_what_cannot_be_is_refused() -> None:
    model = make()
    for study, told in (
        (dict[str, object](), "say what key heads keep"),
        ({"share": 0.5, "heads": "0.1"}, "say what key heads keep"),
        ({"bits": 5}, "32, 16, 8, 4 bits"),
        ({"share": 0.5, "first": -1}, "first counts tokens"),
        ({"plan": hw.Plan.make(model, cut="0.1", fold=False)}, "other things"),
    ):
        with pytest.raises(HeadwiseError, match=told):
            CacheStudy(**study)  # pyright: ignore[reportArgumentType]
    for other, study, told in (
        (make(kind="encoder"), CacheStudy(bits=8), "which has none"),
        (make(kind="encoder-decoder"), CacheStudy(bits=8), "which has none"),
        (model, CacheStudy(share=0.5, on=LINES), "nothing is forgotten"),
        (model, CacheStudy(share=1.5, first=1, last=8, on=LINES), "from 0 to 1"),
        (model, CacheStudy(share=0.5, first=1, last=8, on=LINES, by="magic"), "cannot be ranked by"),
        (model, CacheStudy(heads="0.1", first=10, last=90, on=LINES), "no text is longer than 101"),
        (model, CacheStudy(share=0.5, first=1, last=8, on=LINES, limit=1), "raise the limit"),
        (model, CacheStudy(plan=hw.Plan.make(make(1), cache={"0.1": 8}), on=LINES), "other weights"),
    ):
        with pytest.raises(HeadwiseError, match=told):
            cache_study(other, study)
    with pytest.raises(HeadwiseError, match="say what key heads keep"):
        cache_study(model, CacheStudy(shares=(0.5,), first=1, last=8, on=LINES), out="nowhere")
    with pytest.raises(HeadwiseError, match="no text is longer than 71 tokens"):
        PairedEvaluation.of(model, LINES, past=70)
