"""Peak memory of a function, above the memory of the process before the call. Measure in a fresh process."""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headwise.errors import HeadwiseError

# Linux only. getrusage on Linux also includes the peak of the parent process.
STATUS_FILE = Path("/proc/self/status")


def peak_memory(work: Callable[[], object], warm_up: Callable[[], object] | None = None) -> float:
    """Return the peak memory in megabytes.

    Args:
        work: Function to measure.
        warm_up: Smaller work of the same kind, run first so that the one-time setup of torch is not counted.
    """
    if not peak_memory_available():
        raise HeadwiseError("Peak memory cannot be measured on Windows. Run this on Linux or macOS.")
    if warm_up is not None:
        warm_up()
    gc.collect()
    with suppress(
        OSError
    ):  # if the kernel does not allow a reset, the peak at startup stays, and smaller peaks are not seen
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _process_memory("VmRSS")
    work()
    return max(0.0, _process_memory("VmHWM") - before)


def peak_memory_available() -> bool:
    """Whether the operating system reports the peak memory of a process."""
    return sys.platform != "win32"


def _process_memory(field: str) -> float:
    if STATUS_FILE.is_file():
        line = next(line for line in STATUS_FILE.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024
    import resource  # not on Windows

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
