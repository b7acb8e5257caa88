"""Worker processes that are started once and run one check after the other, which saves startup time.

As a script, this is one worker. It reads lines, {"check": "tests.distributed.checks:forward", "arguments": [...]}, and
answers each with one line.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[2]
CHECK_TIMEOUT = 180  # seconds per check, on a busy machine


class WorkerGroup:
    """A group of worker processes."""

    def __init__(self, size: int) -> None:
        self.size, self.workers, self.listeners = size, list[subprocess.Popen[str]](), list[Thread]()

    def start(self) -> None:
        self.stop()
        rendezvous = tempfile.mktemp(prefix="crew-")
        for rank in range(self.size):
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "CREW": f"{rank} {self.size} {rendezvous}", "PYTHONWARNINGS": "default",
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.distributed.process_fixtures"]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))

    def run(self, check: str, *arguments: Any, timeout: float = CHECK_TIMEOUT) -> list[Any]:
        """Return the result of a check in each process. If a process fails, raise its error and restart the group."""
        if not self.workers:
            self.start()
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"check": check, "arguments": arguments}) + "\n")
            worker.stdin.flush()
        answers: list[Any] = [None] * self.size
        self.listeners = listeners = [
            Thread(target=self._read_answer, args=(answers, rank), daemon=True) for rank in range(self.size)
        ]
        for listener in listeners:
            listener.start()
        deadline = time.monotonic() + timeout
        while any(listener.is_alive() for listener in listeners) and time.monotonic() < deadline:
            if any(answer is not None and "error" in answer for answer in answers):
                deadline = min(deadline, time.monotonic() + 2)  # the others may wait for the failed process
            time.sleep(0.01)
        wrong = [answer["error"] for answer in answers if answer is not None and "error" in answer]
        if wrong or None in answers:
            self.stop()
            raise AssertionError(wrong[0] if wrong else f"{check} did not end: {answers}")
        return [answer["result"] for answer in answers]

    def _read_answer(self, answers: list[Any], rank: int) -> None:
        stream = self.workers[rank].stdout
        assert stream is not None
        for line in stream:
            if line.startswith("crew: "):
                answers[rank] = json.loads(line.removeprefix("crew: "))
                return

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        for listener in self.listeners:
            listener.join()
        for worker in self.workers:
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        self.workers = []


def main() -> None:
    rank, size, rendezvous = os.environ["CREW"].split()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size), timeout=timedelta(seconds=600)
    )
    for line in sys.stdin:
        request = json.loads(line)
        module, name = request["check"].split(":")
        try:
            answer = {"result": getattr(importlib.import_module(module), name)(*request["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(f"crew: {json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
