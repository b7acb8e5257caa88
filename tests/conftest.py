"""Each test process has one thread: several run side by side, and bits depend on how sums are shared out."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
