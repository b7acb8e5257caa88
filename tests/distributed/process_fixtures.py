"""Processes that stay: started once, they run one check after the other, so that a check costs what it does and no more.

As a script: one of them. It reads lines, {"check": "tests.distributed.checks:forward", "given": [...]}, and answers each with one.
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
PATIENCE = 180  # seconds for a check; a busy machine takes long


class Crew:
    """So many processes that know of each other."""

    def __init__(self, size: int) -> None:
        self.size, self.members, self.listeners = size, list[subprocess.Popen[str]](), list[Thread]()

    def start(self) -> None:
        self.stop()
        meeting = tempfile.mktemp(prefix="crew-")
        for rank in range(self.size):
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "CREW": f"{rank} {self.size} {meeting}", "PYTHONWARNINGS": "default",
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.distributed.process_fixtures"]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.members.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))

    def run(self, check: str, *given: Any, patience: float = PATIENCE) -> list[Any]:
        """What each process found; what one of them could not bear is raised here, and the crew is started anew."""
        if not self.members:
            self.start()
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(json.dumps({"check": check, "given": given}) + "\n")
            member.stdin.flush()
        told: list[Any] = [None] * self.size
        self.listeners = listeners = [
            Thread(target=self._hear, args=(told, rank), daemon=True) for rank in range(self.size)
        ]
        for listener in listeners:
            listener.start()
        deadline = time.monotonic() + patience
        while any(listener.is_alive() for listener in listeners) and time.monotonic() < deadline:
            if any(answer is not None and "error" in answer for answer in told):
                deadline = min(deadline, time.monotonic() + 2)  # the others may wait for it in vain
            time.sleep(0.01)
        wrong = [answer["error"] for answer in told if answer is not None and "error" in answer]
        if wrong or None in told:
            self.stop()
            raise AssertionError(wrong[0] if wrong else f"{check} did not end: {told}")
        return [answer["found"] for answer in told]

    def _hear(self, told: list[Any], rank: int) -> None:
        stream = self.members[rank].stdout
        assert stream is not None
        for line in stream:
            if line.startswith("crew: "):
                told[rank] = json.loads(line.removeprefix("crew: "))
                return

    def stop(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()
        for listener in self.listeners:
            listener.join()
        for member in self.members:
            for stream in (member.stdin, member.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        self.members = []


def main() -> None:
    rank, size, meeting = os.environ["CREW"].split()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(size), timeout=timedelta(seconds=120)
    )
    for line in sys.stdin:
        asked = json.loads(line)
        module, name = asked["check"].split(":")
        try:
            answer = {"found": getattr(importlib.import_module(module), name)(*asked["given"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(f"crew: {json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
