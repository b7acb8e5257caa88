"""The progress line of long functions: shown to a person by default, off by progress=False, one line for nested calls."""

import inspect
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import headwise.progress as progress_module
from headwise.progress import ProgressOption, callback_of, is_interactive_output, shows_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@shows_progress
def inner(steps: int, *, progress: ProgressOption = None) -> Any:
    callback = callback_of(progress)
    for step in range(steps):
        if callback is not None:
            callback("inner", step + 1, steps)
    return callback


@shows_progress
def outer(*, progress: ProgressOption = None) -> Any:
    callback = callback_of(progress)
    if callback is not None:
        callback("outer", 1, None)
    assert inner(3) is None
    return inner(2, progress=callback)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    # pytest replaces sys.stderr between a fixture and its test.
    monkeypatch.setattr(progress_module, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "INTERVAL_SECONDS", 0.0)
    return stream


def test_terminal_gets_one_line_that_is_cleared(terminal: Terminal) -> None:
    outer()
    lines = terminal.getvalue().split("\r")
    texts = [line.strip() for line in lines if line.strip()]
    assert [text.partition(",")[0] for text in texts] == ["outer: 1", "inner: 1 of 2 (50%)", "inner: 2 of 2 (100%)"]
    assert lines[-2].strip() == ""  # overwritten with spaces
    assert len(lines[-2]) >= len(texts[-1])
    assert "\n" not in terminal.getvalue()


def test_false_and_callbacks_write_nothing(terminal: Terminal) -> None:
    calls: list[tuple[str, int, int | None]] = []
    outer(progress=False)
    outer(progress=lambda *call: calls.append(call))
    assert terminal.getvalue() == ""
    assert calls == [("outer", 1, None), ("inner", 1, 2), ("inner", 2, 2)]


def test_short_work_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 1e9)
    outer()
    assert terminal.getvalue() == ""


def test_line_is_cleared_after_an_error(terminal: Terminal) -> None:
    @shows_progress
    def fail(*, progress: ProgressOption = None) -> None:
        callback = callback_of(progress)
        assert callback is not None
        callback("work", 1, 2)
        raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert terminal.getvalue().endswith("\r")
    assert inner(1) is not None  # the next call shows a line again


def test_notebook_counts_as_watched_and_a_pipe_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_interactive_output()
    assert inner(1) is None
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # pyright: ignore
    assert is_interactive_output()


def test_all_public_functions_show_a_line_by_default() -> None:
    """None is the default of `progress`, except in training, whose display is on by default: True."""
    import headwise as hw
    from headwise import analysis, compression, distillation, experiments, training

    functions = {
        f"{package.__name__}.{name}": getattr(package, name)
        for package in (hw, analysis, compression, distillation, experiments, training)
        for name in package.__all__
    }
    silent = []
    for name, function in functions.items():
        parameter = inspect.signature(function).parameters.get("progress") if inspect.isfunction(function) else None
        if parameter is not None and parameter.default is not True and not hasattr(function, "__wrapped__"):
            silent.append(name)
    assert silent == []
    assert hasattr(hw.profile, "__wrapped__")


def test_public_functions_take_false(terminal: Terminal) -> None:
    import torch

    import headwise as hw
    from tests.attached.torch_modules import ViT, randomize

    attached = hw.attach(randomize(ViT()))
    calls = [torch.randn(1, 3, 12, 12)]
    hw.importance(attached, calls, heads="0.1", loss=lambda output: output.sum(), progress=False)
    assert terminal.getvalue() == ""
    hw.importance(attached, calls, heads="0.1", loss=lambda output: output.sum())
    assert "head importance: 1 of 1 (100%)" in terminal.getvalue()
