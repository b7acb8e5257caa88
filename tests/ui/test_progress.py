"""Progress without a terminal: occasional lines on standard error."""

import time

import pytest

import headwise as hw
from headwise.training.train_progress_display import BackoffTimer, ProgressDisplay
from headwise.ui.progress import show_progress


def test_backoff_timer_intervals_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    timer, seconds = BackoffTimer(), []
    for second in range(601):
        clock[0] = 100.0 + second
        if timer.is_due():
            seconds.append(second)
    assert seconds[:5] == [5, 15, 35, 75, 135], "after 5 s, then 10, 20, 40 and at most 60 s later"
    assert seconds[5:] == list(range(195, 601, 60))


def test_show_progress_pipe_prints_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with show_progress() as progress:
        for done in range(4):
            clock[0] = 3.0 * done
            progress("texts", done, 1200)
    captured = capsys.readouterr()
    assert captured.out == "", "standard output has only the result"
    assert captured.err == "texts: 2 of 1,200\n"


def test_progress_display_pipe_prints_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = ProgressDisplay(100, 0, progress=True)
    watch.log_step(10, 3.25, 1000.0)
    clock[0] = 6.0
    watch.log_step(20, 3.0, 2000.0)
    ProgressDisplay(100, 0, progress=False).log_step(20, 3.0, 2000.0)
    assert capsys.readouterr().err == "step 20 of 100: loss 3.0000, 2,000 tokens/s\n"


def test_train_progress_callback_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    """`train` accepts a progress callback like all other functions."""
    calls: list[tuple[str, int, int | None]] = []
    spec = hw.ModelSpec(vocab=257, context=16, layers=1, attention=hw.AttentionSpec(width=16, heads=2))
    recipe = hw.Recipe(steps=6, batch_size=2, warmup=1, log_every=2)
    hw.train(spec, "to be or not to be " * 50, recipe, progress=lambda *args: calls.append(args))
    assert calls == [("training", 2, 6), ("training", 4, 6), ("training", 6, 6)]
    assert capsys.readouterr().err == "", "the callback replaces the display"
