"""Listeners at the hook points of a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from headwise.heads.hook_point import HookPoint


@contextmanager
def listen_at_hook_points(
    hook_points: Sequence[HookPoint], listener: Callable[..., None], *arguments: Any
) -> Iterator[None]:
    """Call `listener(call, *arguments, first_head)` for every attention call. `first_head` counts over all hook points."""
    with ExitStack() as stack:
        first_head = 0
        for hook_point in hook_points:
            stack.enter_context(
                hook_point.listen(lambda call, first_head=first_head: listener(call, *arguments, first_head))
            )
            first_head += len(hook_point.head_ids)
        yield
