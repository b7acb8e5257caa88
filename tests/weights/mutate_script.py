"""Damage files byte by byte and load them, in a separate process. Each load must succeed or raise a HeadwiseError.

python -m tests.weights.mutate_script FOLDER COUNT SEED

Prints a line of JSON: the number of successful loads, the number of errors, and unexpected errors. The calling process
detects a crash of this process, a hang (ended by an alarm), and code in a file (stopped by an audit hook).
"""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from tests.weights.checkpoints import make_llama, write_gguf

SECONDS = 60  # limit for one load on a busy machine
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
    "os.remove",
)


def make_files(folder: Path) -> dict[Path, Path]:
    """Write small valid models. Returns the source to load, by the file to damage."""
    torch.manual_seed(0)
    spec = hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))
    hw.Transformer(spec).save(folder / "own")
    hw.quantize(hw.Transformer(spec), weights=4).save(folder / "packed")
    make_llama().save_pretrained(folder / "llama")
    write_gguf(make_llama(), folder / "m.gguf")
    damaged = {folder / "m.gguf": folder / "m.gguf"}
    for name in ("own", "packed", "llama"):
        saved_files = sorted((folder / name).iterdir())
        damaged |= {file: folder / name for file in saved_files if file.suffix in (".json", ".safetensors")}
    return damaged


def mutate(original: bytes, rng: random.Random) -> bytes:
    """Return a copy with bytes changed, removed or inserted, mostly near the beginning, where headers are."""
    data = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        end = len(data) if rng.random() < 0.3 else min(len(data), 600)
        at = rng.randrange(max(1, end))
        mutation = rng.randrange(6)
        if mutation == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif mutation == 1 and data:
            data[at] = rng.choice((0, 1, 9, 0x22, 0x2D, 0x39, 0x5B, 0x7B, 0x7D, 0x7F, 0x80, 0xFF))
        elif mutation == 2:
            del data[at : at + rng.choice((1, 2, 8, 64))]
        elif mutation == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 64)))
        elif mutation == 4:
            data[at : at + 8] = rng.choice((2**63 - 1, 2**64 - 1, 2**31, 0, 2**40)).to_bytes(8, "little")
        else:
            del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def main() -> None:
    """Damage files, load them and count the results."""
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    damaged = make_files(folder)
    for source in set(damaged.values()):
        hw.load(source)  # complete all lazy imports before the audit hook is active
    problems: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(FORBIDDEN):
            problems.append(f"{event} {args!r}"[:200])

    def too_long(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS} s")

    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, too_long)
    rng, files, loaded, refused = random.Random(seed), sorted(damaged), 0, 0
    for trial in range(count):
        file = files[trial % len(files)]
        original = file.read_bytes()
        other = mutate(original, rng)
        file.write_bytes(other)
        (folder / "now.bin").write_bytes(other)  # stays on disk if the load crashes
        signal.alarm(SECONDS)
        try:
            hw.load(damaged[file])
            loaded += 1
        except hw.HeadwiseError as error:
            refused += 1
            if not str(error).strip():
                problems.append(f"{trial} {file.name}: an empty refusal")
        except BaseException as error:
            problems.append(f"{trial} {file.name}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.alarm(0)
            file.write_bytes(original)
    print(json.dumps({"loaded": loaded, "refused": refused, "wrong": problems}))
    sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
