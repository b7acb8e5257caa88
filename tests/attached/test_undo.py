"""A failed, interrupted or lost attach leaves the model unchanged, and it can be attached again."""

import copy
import gc
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attached.hooked_sdpa import ACTIVE, sdpa_with_hooks
from headwise.attached.layer import layer_of
from tests.attached.models import BY_NAME, Case, main_output, transformers

FOLDER = str(Path(hw.__file__).parent / "attach")
NAMES = ["llama", "gpt_oss", "falcon"]  # on SDPA, on the eager function, and traced
POINTS = 40  # number of interrupts per model and kind of event


class Interrupt:
    """Raises KeyboardInterrupt at the k-th event of one kind in the files of `attach`."""

    def __init__(self, kind: str, at: int | None = None) -> None:
        self.kind, self.at, self.count = kind, at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        closed = (
            frame.f_code.co_flags & inspect.CO_GENERATOR
        )  # Python ignores errors raised while it closes a generator
        if event == self.kind and frame.f_code.co_name != "restore" and not closed and not _in_destructor(frame):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    @contextmanager
    def installed(self) -> Iterator["Interrupt"]:
        before = sys.gettrace()
        gc.disable()  # else it would run destructors of other tests
        sys.settrace(self)
        try:
            yield self
        finally:
            sys.settrace(before)
            gc.enable()


def _in_destructor(frame: FrameType | None) -> bool:
    """Return whether the frame runs in a destructor, where Python ignores errors."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def state_of(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return every attribute of every module; hooks and children by key and identity."""
    return [
        (name, {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()})
        for name, module in model.named_modules()
    ]


def is_unchanged(model: Any, before: list[tuple[str, dict[str, Any]]]) -> bool:
    now = state_of(model)
    return [name for name, _ in now] == [name for name, _ in before] and all(
        was.keys() == is_.keys() and all(_same(was[key], is_[key]) for key in was)
        for (_, was), (_, is_) in zip(before, now, strict=True)
    )


def _same(was: Any, now: Any) -> bool:
    if isinstance(was, dict):
        return was.keys() == now.keys() and all(now[key] is was[key] for key in was)
    return was is now or (not isinstance(was, Tensor) and was == now)


def check_not_attached(model: Any, before: Any, inputs: dict[str, Tensor], logits: Tensor) -> None:
    functions = transformers.AttentionInterface
    assert is_unchanged(model, before)
    assert not any(layer_of(module) is not None for module in model.modules())
    assert not any(attachment.model is model for attachment in ACTIVE)
    assert ACTIVE or functions._global_mapping["sdpa"] is not sdpa_with_hooks
    assert "eager" not in functions._global_mapping
    assert torch.overrides._get_current_function_mode() is None
    assert torch.equal(main_output(model(**inputs)), logits)


def check_attached(attached: Any, inputs: dict[str, Tensor], logits: Tensor) -> None:
    assert torch.equal(main_output(attached.model(**inputs)), logits)
    with attached.heads["1.1"].silenced():
        assert not torch.equal(main_output(attached.model(**inputs)), logits)


@pytest.fixture
def tiny(request: pytest.FixtureRequest) -> Any:
    case: Case = BY_NAME[request.param]
    model, inputs = case.build().train(), case.inputs()
    model.get_submodule("lm_head").eval()  # modules in different modes
    model.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        return model, inputs, main_output(model(**inputs))


@pytest.mark.parametrize("kind", ["call", "line", "return"])
@pytest.mark.parametrize("tiny", NAMES, indirect=True)
@torch.no_grad()
def test_attach_interrupted_anywhere_leaves_the_model_as_it_was(tiny: Any, kind: str) -> None:
    model, inputs, logits = tiny
    hw.attach(model).detach()  # fills the caches of source files
    with Interrupt(kind).installed() as counted:
        attached = hw.attach(model)
    attached.detach()
    before, total = state_of(model), counted.count
    assert total > POINTS
    for at in sorted({1 + k * (total - 1) // (POINTS - 1) for k in range(POINTS)}):
        with pytest.raises(KeyboardInterrupt), Interrupt(kind, at).installed():
            hw.attach(model)
        check_not_attached(model, before, inputs, logits)
    check_attached(hw.attach(model), inputs, logits)


@pytest.mark.parametrize("tiny", NAMES, indirect=True)
@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (torch.nn.Module, "register_forward_hook"),
        (torch.nn.Module, "register_forward_pre_hook"),
        (torch.nn.functional, "linear"),
        (torch.nn.functional, "softmax"),
        (torch.autograd, "grad"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.no_grad()
def test_attach_interrupted_after_a_call_of_torch_leaves_the_model_as_it_was(
    tiny: Any, holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has taken effect, but its return value is lost."""
    model, inputs, logits = tiny
    own, before, count = getattr(holder, name), state_of(model), 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        result = own(*arguments, **named)
        if count == at:
            raise KeyboardInterrupt
        return result

    for at in (1, 2, 3, 5, 8, 13):
        count = 0
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, interrupted)
            try:
                attached = hw.attach(model)
            except KeyboardInterrupt:
                assert count == at
            else:
                assert count < at
                attached.detach()
        check_not_attached(model, before, inputs, logits)
    check_attached(hw.attach(model), inputs, logits)


@pytest.mark.parametrize("tiny", NAMES, indirect=True)
@torch.no_grad()
def test_attach_after_an_error_in_its_trial_attaches(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, logits = tiny
    before = state_of(model)
    with monkeypatch.context() as patched:
        patched.setattr(
            "headwise.attached.layer_structure_check.LayerTestCallRecorder.store_probe_results", lambda self: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            hw.attach(model)
    check_not_attached(model, before, inputs, logits)
    check_attached(hw.attach(model), inputs, logits)


@torch.no_grad()
def test_load_that_fails_in_the_trial_leaves_nothing_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BY_NAME["gpt_neox"].build().save_pretrained(tmp_path)
    gc.collect()
    before = set(ACTIVE)
    monkeypatch.setattr(
        "headwise.attached.layer_structure_check.LayerTestCallRecorder.store_probe_results", lambda self: 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        hw.load(tmp_path)
    assert before == ACTIVE


# Dropped handles, and attaching twice.


def test_attach_of_an_attached_model_returns_its_handle() -> None:
    model = BY_NAME["llama"].build()
    attached = hw.attach(model)
    assert hw.attach(model) is attached
    assert attached.tokenizer is None
    tokenizer = hw.Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])
    assert hw.attach(model, tokenizer) is attached
    assert attached.tokenizer is tokenizer
    assert hw.attach(model).tokenizer is tokenizer
    attached.detach()
    assert hw.attach(model) is not attached


@pytest.mark.parametrize("tiny", NAMES, indirect=True)
@torch.no_grad()
def test_a_dropped_handle_is_detached(tiny: Any) -> None:
    model, inputs, logits = tiny
    before = state_of(model)
    attached = hw.attach(model)
    handle_ref = weakref.ref(attached)
    hw.record(attached, tensors="z")
    del attached
    gc.collect()
    assert handle_ref() is None
    check_not_attached(model, before, inputs, logits)
    check_attached(hw.attach(model), inputs, logits)


def test_a_dropped_model_is_freed_with_its_handle() -> None:
    attached = hw.attach(BY_NAME["llama"].build())
    model = weakref.ref(attached.model)
    del attached
    gc.collect()
    assert model() is None


@torch.no_grad()
def test_heads_and_open_contexts_hold_the_handle() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    logits = main_output(model(**inputs))
    heads, head = hw.attach(model).heads, hw.attach(model).heads["1.1"]
    few = hw.attach(model).heads.select("1.*")
    for selection in (heads.select("1.1"), head, few, next(iter(few))):
        gc.collect()
        with selection.silenced():
            assert not torch.equal(main_output(model(**inputs)), logits)
    del heads, head, few, selection
    gc.collect()
    assert torch.equal(main_output(model(**inputs)), logits)
    assert not any(layer_of(module) is not None for module in model.modules())
    for context in (
        hw.attach(model).heads["1.1"].silenced(),
        hw.attach(model).heads["1.*"].silenced(),
    ):
        with context:
            gc.collect()
            assert not torch.equal(main_output(model(**inputs)), logits)
    with hw.record(hw.attach(model), tensors="z") as recording:
        gc.collect()
        model(**inputs)
    assert recording["1.1"].z.shape[0] == 2
    steps = hw.attach(model).stream(inputs["input_ids"], 4, gates={"1.*": 0.0})
    gc.collect()
    with hw.attach(model) as attached:
        silenced = attached.stream(inputs["input_ids"], 4, gates={"1.*": 0.0})
        assert all(torch.equal(*pair) for pair in zip(steps, silenced, strict=True))


@torch.no_grad()
def test_a_hook_point_whose_handle_is_gone_raises() -> None:
    """An edit would have no effect on the model."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    logits = main_output(model(**inputs))
    attached = hw.attach(model)
    hook_point = attached.hook_points()[1]
    with hook_point.scaled(torch.zeros(6)):
        del attached
        gc.collect()  # the open context keeps the handle alive
        assert not torch.equal(main_output(model(**inputs)), logits)
    gc.collect()
    for context in (
        hook_point.scaled(torch.zeros(6)),
        hook_point.replaced(torch.zeros(())),
        hook_point.listen(print),
    ):
        with pytest.raises(hw.HeadwiseError, match=r"Attach it again"), context:
            pass
    attached = hw.attach(model)
    heads = attached.heads["1.1"]
    attached.detach()
    with pytest.raises(hw.HeadwiseError, match=r"Attach it again"), heads.silenced():
        pass


def test_nested_contexts_of_one_handle_detach_at_the_outermost_exit() -> None:
    model = BY_NAME["llama"].build()
    with hw.attach(model) as attached:
        with hw.attach(model) as inner:
            assert inner is attached
        assert attached.is_attached
    assert not attached.is_attached


@torch.no_grad()
def test_a_dropped_handle_of_a_pruned_model_leaves_a_plain_model() -> None:
    """Groups of different sizes, which plain transformers does not support, get one key per head, as with `detach`."""
    case = BY_NAME["llama"]
    inputs, detached = case.inputs(), hw.attach(case.build()).prune("1.4", in_place=True).detach()
    model = case.build()
    hw.attach(model).prune("1.4", in_place=True)
    gc.collect()
    assert not any(layer_of(module) is not None for module in model.modules())
    assert torch.equal(main_output(model(**inputs)), main_output(detached(**inputs)))


@torch.no_grad()
def test_a_failed_attach_whose_traceback_is_kept_does_not_undo_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    logits = main_output(model(**inputs))
    with monkeypatch.context() as patched:
        patched.setattr("headwise.attached.attached_model.check_reconstruction", lambda layers: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failure:
            hw.attach(model)
    attached = hw.attach(model)
    del failure
    gc.collect()
    check_attached(attached, inputs, logits)
    copied = copy.deepcopy(attached)
    del attached
    gc.collect()
    check_attached(copied, inputs, logits)
