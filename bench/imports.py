"""Startup time of `import headwise` and `headwise --help`, compared with Python alone and with importing torch.

python -m bench.imports
"""

import argparse
import subprocess
import sys

from bench.measure import BenchmarkReport, add_json_option, interleaved_timing

COMMANDS = {
    "python, nothing": ["-c", "pass"],
    "import headwise": ["-c", "import headwise"],
    "headwise --help": ["-m", "headwise", "--help"],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    report = BenchmarkReport("imports", parser.parse_args().json)

    def start(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    candidates = {name: lambda command=command: start(command) for name, command in COMMANDS.items()}
    timings = interleaved_timing(candidates, "python, nothing", 9)
    rows = [[name, 1e3 * t.best, 1e3 * t.median] for name, t in timings.items()]
    report.add("start", "Starting up", ["command", "best ms", "median ms"], rows)
    report.write()


if __name__ == "__main__":
    main()
