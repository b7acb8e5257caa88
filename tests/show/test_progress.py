"""How far long work is, where nobody watches: a line now and then, on standard error."""

import time

import pytest

from headwise.show.progress import noting
from headwise.train.progress import Now, Watch


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
    with noting() as note:
        for done in range(4):
            clock[0] = 3.0 * done
            note("texts", done, 1200)
    said = capsys.readouterr()
    assert said.out == "", "standard output is the result alone"
    assert said.err == "texts: 2 of 1,200\n"


def test_training_tells_a_pipe_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = Watch(100, 0, shown=True)
    watch.step(10, 3.25, 1000.0)
    clock[0] = 6.0
    watch.step(20, 3.0, 2000.0)
    Watch(100, 0, shown=False).step(20, 3.0, 2000.0)
    assert capsys.readouterr().err == "step 20 of 100: loss 3.0000, 2,000 tokens/s\n"
