"""Listeners at the hook points of a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import autocast_disabled


@contextmanager
def listen_at_hook_points(
    hook_points: Sequence[HookPoint], listener: Callable[..., None], *arguments: Any
) -> Iterator[None]:
    """Call `listener(call, *arguments, first_head)` for every attention call. `first_head` counts over all hook points.

    The listener runs without autocast, so that its sums are in float32 even if the model runs under `torch.autocast`.
    """

    def call_listener(first_head: int, call: AttentionCall) -> None:
        with autocast_disabled(call.q.device):
            listener(call, *arguments, first_head)

    with ExitStack() as stack:
        first_head = 0
        for hook_point in hook_points:
            stack.enter_context(hook_point.listen(partial(call_listener, first_head)))
            first_head += len(hook_point.head_ids)
        yield
