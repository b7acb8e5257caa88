"""How much memory a piece of work takes at its peak, above what the process held before. Ask in a fresh process: `apart`."""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headwise.errors import HeadwiseError

# on Linux; getrusage there tells a process the peak of the one that started it, too
STATUS_FILE = Path("/proc/self/status")


def peak_memory(work: Callable[[], object], warm_up: Callable[[], object] | None = None) -> float:
    """Megabytes. `warm_up` is smaller work of the same kind: what torch sets up once is then there and not counted."""
    if not peak_memory_available():
        raise HeadwiseError(
            "how much memory a process held at most is not told on Windows; run this on Linux or macOS."
        )
    if warm_up is not None:
        warm_up()
    gc.collect()
    with suppress(OSError):  # a kernel may refuse; then the peak of the start stands, and small work hides below it
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _process_memory("VmRSS")
    work()
    return max(0.0, _process_memory("VmHWM") - before)


def peak_memory_available() -> bool:
    """Whether the system says how much a process held at most."""
    return sys.platform != "win32"


def _process_memory(field: str) -> float:
    if STATUS_FILE.is_file():
        line = next(line for line in STATUS_FILE.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024
    import resource  # not on Windows

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
