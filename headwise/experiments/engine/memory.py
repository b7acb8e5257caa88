"""How much memory a piece of work takes at its peak, above what the process held before. Ask in a fresh process: `apart`."""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headwise.errors import HeadwiseError

STATUS = Path("/proc/self/status")  # on Linux; getrusage there tells a process the peak of the one that started it, too


def rise(work: Callable[[], object], warm_up: Callable[[], object] | None = None) -> float:
    """Megabytes. `warm_up` is smaller work of the same kind: what torch sets up once is then there and not counted."""
    if not is_known():
        raise HeadwiseError(
            "how much memory a process held at most is not told on Windows; run this on Linux or macOS."
        )
    if warm_up is not None:
        warm_up()
    gc.collect()
    with suppress(OSError):  # a kernel may refuse; then the peak of the start stands, and small work hides below it
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _held("VmRSS")
    work()
    return max(0.0, _held("VmHWM") - before)


def is_known() -> bool:
    """Whether the system says how much a process held at most."""
    return sys.platform != "win32"


def _held(what: str) -> float:
    if STATUS.is_file():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(what))
        return int(line.split()[1]) / 1024
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1 << 20 if sys.platform == "darwin" else 1 << 10)
