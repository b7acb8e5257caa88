"""How far long work is, where nobody watches: a line now and then, on standard error."""

import time

import pytest

import headwise as hw
from headwise.training.progress import Now, Watch
from headwise.ui.progress import show_progress


def test_now_and_then_is_soon_and_then_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    now, said = Now(), []
    for second in range(601):
        clock[0] = 100.0 + second
        if now.due():
            said.append(second)
    assert said[:5] == [5, 15, 35, 75, 135], "after 5 s, then 10, 20, 40 and at most 60 s later"
    assert said[5:] == list(range(195, 601, 60))


def test_a_pipe_is_told_how_far_work_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with show_progress() as progress:
        for done in range(4):
            clock[0] = 3.0 * done
            progress("texts", done, 1200)
    said = capsys.readouterr()
    assert said.out == "", "standard output is the result alone"
    assert said.err == "texts: 2 of 1,200\n"


def test_training_tells_a_pipe_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = Watch(100, 0, progress=True)
    watch.step(10, 3.25, 1000.0)
    clock[0] = 6.0
    watch.step(20, 3.0, 2000.0)
    Watch(100, 0, progress=False).step(20, 3.0, 2000.0)
    assert capsys.readouterr().err == "step 20 of 100: loss 3.0000, 2,000 tokens/s\n"


def test_training_calls_who_wants_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    """The same kind of function as everywhere."""
    heard: list[tuple[str, int, int | None]] = []
    spec = hw.ModelSpec(vocab=257, context=16, layers=1, attention=hw.AttentionSpec(width=16, heads=2))
    recipe = hw.Recipe(steps=6, batch=2, warmup=1, log_every=2)
    hw.train(spec, "to be or not to be " * 50, recipe, progress=lambda *told: heard.append(told))
    assert heard == [("training", 2, 6), ("training", 4, 6), ("training", 6, 6)]
    assert capsys.readouterr().err == "", "whoever hears it shows it"
