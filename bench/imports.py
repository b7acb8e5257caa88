"""Startup time of `import headwise` and `headwise --help`, compared with Python alone and with importing torch.

python -m bench.imports
"""

import subprocess
import sys

from rich.console import Console

from bench.measure import interleaved_timing
from headwise.ui.terminal_table import make_table

COMMANDS = {
    "python, nothing": ["-c", "pass"],
    "import headwise": ["-c", "import headwise"],
    "headwise --help": ["-m", "headwise", "--help"],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    def start(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    candidates = {name: lambda command=command: start(command) for name, command in COMMANDS.items()}
    timings = interleaved_timing(candidates, "python, nothing", 9)
    rows = [[name, 1e3 * t.best, 1e3 * t.median] for name, t in timings.items()]
    Console(file=sys.stdout).print(make_table("Starting up", ["command", "best ms", "median ms"], rows))


if __name__ == "__main__":
    main()
