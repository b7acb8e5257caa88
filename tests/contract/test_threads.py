"""Edits and listeners belong to the context that opened them; another thread computes with the plain model."""

import contextvars
from collections.abc import Callable
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.models import BY_NAME, main_output

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def native_model() -> Any:
    torch.manual_seed(5)
    return hw.Transformer(hw.ModelSpec(23, 32, 2, hw.AttentionSpec(width=24, heads=4))).eval()


def attached_model() -> Any:
    return hw.attach(BY_NAME["llama"].build())


def forward(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids) if isinstance(model, hw.Transformer) else main_output(model.model(ids))


def in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in another thread."""
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


each_model = pytest.mark.parametrize("build", [native_model, attached_model])


@each_model
def test_silenced_in_one_thread_leaves_another_plain(build: Callable[[], Any]) -> None:
    model = build()
    plain = forward(model)
    with model.heads["1.1"].silenced():
        silenced = forward(model)
        assert torch.equal(in_thread(lambda: forward(model)), plain)
        assert torch.equal(forward(model), silenced)
    assert not torch.equal(silenced, plain)


@each_model
def test_two_threads_with_edits_of_their_own_see_only_these(build: Callable[[], Any]) -> None:
    model = build()
    expected = {}
    for heads in ("0.1", "1.2"):
        with model.heads[heads].silenced():
            expected[heads] = forward(model)
    barrier, actual = Barrier(2), dict[str, list[Tensor]]()

    def work(heads: str) -> None:
        with model.heads[heads].silenced():
            barrier.wait()  # both edits are open from here on
            actual[heads] = [forward(model) for _ in range(5)]
            barrier.wait()

    threads = [Thread(target=work, args=(heads,)) for heads in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for heads, logits in expected.items():
        assert all(torch.equal(each, logits) for each in actual[heads]), heads


@each_model
def test_thread_started_inside_silenced_sees_it_only_with_the_copied_context(build: Callable[[], Any]) -> None:
    model = build()
    plain = forward(model)
    with model.heads["0.0"].silenced():
        silenced = forward(model)
        context = contextvars.copy_context()
        assert torch.equal(in_thread(lambda: context.run(forward, model)), silenced)
        assert torch.equal(in_thread(lambda: forward(model)), plain)


@each_model
def test_listener_in_one_thread_hears_no_call_of_another(build: Callable[[], Any]) -> None:
    model, heard = build(), []
    with model.hook_points()[0].listen(heard.append):
        in_thread(lambda: forward(model))
        assert not heard
        forward(model)
    assert len(heard) == 1


def test_edit_closed_in_another_thread_raises() -> None:
    model = native_model()
    silenced = model.heads["0.0"].silenced()
    contextvars.copy_context().run(silenced.__enter__)  # in a copy, so that the edit does not stay open after the test

    def close() -> str:
        with pytest.raises(hw.HeadwiseError, match="closed in another") as caught:
            silenced.__exit__(None, None, None)
        return str(caught.value)

    assert "same" in in_thread(close)


@each_model
def test_two_threads_that_generate_leave_the_training_mode(build: Callable[[], Any]) -> None:
    """One thread leaves `eval_mode` while the other is inside. The mode is restored after the last one leaves."""
    from headwise.model import eval_mode

    model = build()
    model.train()
    entered, left = Event(), Event()

    def inner() -> None:
        with eval_mode(model):
            entered.set()
            left.wait()

    thread = Thread(target=inner)
    with eval_mode(model):
        thread.start()
        entered.wait()
    parts = list(model.modules())
    assert not any(part.training for part in parts), "the other thread still needs it"
    left.set()
    thread.join()
    assert all(part.training for part in parts)
