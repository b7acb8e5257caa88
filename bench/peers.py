"""All attention maps of SmolLM2 for one text, in Headwise and in other libraries, each in an environment of its own.

python -m bench.peers --folder D              256 tokens, 3 rounds; libraries are installed into D
python -m bench.peers --folder D --tokens 64 --only Headwise AttnRead

Each library runs in a process with one thread on the same checkpoint and the same tokens. It returns the maps of all heads,
which are compared with those of the reference, transformers with eager attention. The time is processor time, as a multiple
of the plain forward pass of the same process (fused attention, no maps), because the environments have different versions of
torch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import headwise as hw
from bench.measure import BenchmarkReport, add_json_option

REFERENCE = "transformers, eager attention"
FIRST_ID = 100  # the text: consecutive ids, as in bench.generate


@dataclass(frozen=True)
class MapsLibrary:
    """A library that returns attention maps.

    Attributes:
        packages: Requirements of its environment. Empty: the environment of this process.
        program: Defines prepare(folder, ids), which returns the plain pass and a function that returns all maps, (H, T, T).
        without_dependencies: Packages that are installed without their own requirements, because these exclude each other.
        work: Passes and attention that the maps take.
    """

    packages: tuple[str, ...]
    program: str
    without_dependencies: tuple[str, ...] = ()
    work: str = ""


PLAIN = """
import torch
from transformers import AutoModelForCausalLM
def load(folder, kind):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
"""

HEADWISE = """
import torch, headwise as hw
def prepare(folder, ids):
    model = hw.load(folder).eval()
    def maps():
        kept = []
        handles = [point.listen(lambda call: kept.append(call.maps()[0])) for point in model.hook_points()]
        with torch.no_grad():
            for handle in handles:
                handle.__enter__()
            try:
                model(ids)
            finally:
                for handle in handles:
                    handle.__exit__(None, None, None)
        return torch.cat(kept)
    return lambda: model(ids), maps
"""

EAGER = (
    PLAIN
    + """
def prepare(folder, ids):
    model, eager = load(folder, "sdpa"), load(folder, "eager")
    def maps():
        return torch.cat([layer[0] for layer in eager(ids, output_attentions=True, use_cache=False).attentions])
    return lambda: model(ids, use_cache=False), maps
"""
)

ATTNREAD = (
    PLAIN
    + """
from attnread import extract_attention
def prepare(folder, ids):
    model = load(folder, "sdpa")
    def maps():
        return torch.cat(list(extract_attention(model, {"input_ids": ids}).values()))
    return lambda: model(ids, use_cache=False), maps
"""
)

TRANSFORMER_LENS = (
    PLAIN
    + """
from transformer_lens.model_bridge import TransformerBridge
def prepare(folder, ids):
    model = load(folder, "sdpa")
    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    def maps():
        cache = bridge.run_with_cache(ids, return_type=None, names_filter=lambda name: name.endswith("hook_pattern"))[1]
        names = sorted((name for name in cache.keys()), key=lambda name: int(name.split(".")[1]))
        return torch.cat([cache[name][0] for name in names])
    return lambda: model(ids, use_cache=False), maps
"""
)

RUN = """
import json, sys, time
import numpy as np
folder, ids, rounds, out = sys.argv[1:]
torch.set_num_threads(1)
torch.set_grad_enabled(False)
plain, maps = prepare(folder, torch.tensor([json.loads(ids)]))
plain()
np.save(out, maps().numpy())
seconds = []
for number in range(int(rounds)):
    row = {}
    for name, call in (("plain", plain), ("maps", maps))[:: 1 if number % 2 else -1]:
        began = time.process_time()
        call()
        row[name] = time.process_time() - began
    seconds.append(row)
print(json.dumps(seconds))
"""

LIBRARIES = {
    REFERENCE: MapsLibrary((), EAGER, work="one pass, eager attention"),
    "Headwise": MapsLibrary((), HEADWISE, work="one pass, fused attention; maps from the same q and k"),
    "TransformerLens": MapsLibrary(
        ("transformer-lens==4.3.0", "torch==2.13.0"), TRANSFORMER_LENS, work="one pass, eager attention, all patterns cached"
    ),
    "AttnRead": MapsLibrary(  # requires torch 2.14, which is not needed for this work
        ("nnsight==0.7.0", "transformers>=5.19,<5.20", "torch==2.13.0"), ATTNREAD, ("attnread==0.1.2",),
        work="several passes per layer, fused attention",
    ),
}  # fmt: skip


def make_environment(folder: Path, name: str, library: MapsLibrary) -> Path:
    """Create the environment of a library if it is missing. Return its Python."""
    if not library.packages:
        return Path(sys.executable)
    environment = folder / name
    python = environment / "bin" / "python"
    if not (environment / "installed").is_file():
        venv.create(environment, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *library.packages], check=True)
        if library.without_dependencies:
            packages = ["--no-deps", *library.without_dependencies]
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (environment / "installed").touch()
    return python


def run_library(
    python: Path, library: MapsLibrary, checkpoint: Path, tokens: int, rounds: int, out: Path
) -> list[dict]:
    """Write the maps of all heads to a file. Return the seconds of the plain pass and of the maps, by round."""
    ids = json.dumps(list(range(FIRST_ID, FIRST_ID + tokens)))
    command = [str(python), "-c", library.program + RUN, str(checkpoint), ids, str(rounds), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".peers"), help="folder of the environments")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add_json_option(parser)
    options = parser.parse_args()
    report, rows = BenchmarkReport("peers", options.json), []
    model = hw.load("smollm2")
    assert isinstance(model, hw.Transformer)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, expected = model.export(Path(scratch) / "smollm2"), None
        for name in dict.fromkeys([REFERENCE, *options.only]):
            out, library = Path(scratch) / "maps.npy", LIBRARIES[name]
            python = make_environment(options.folder, name, library)
            seconds = run_library(python, library, checkpoint, options.tokens, options.rounds, out)
            maps = np.load(out)  # (layers · heads, T, T)
            expected = maps if expected is None else expected
            difference = float(np.abs(maps - expected).max())
            ratios = [row["maps"] / row["plain"] for row in seconds]
            plain, own = (1e3 * statistics.median(row[part] for row in seconds) for part in ("plain", "maps"))
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            rows.append([name, library.work, plain, own, spread, f"{difference:.0e}"])
            print(f"{name}: {spread}", file=sys.stderr, flush=True)
    columns = ["", "work", "plain pass, ms", "all maps, ms", "multiple of the plain pass", "largest difference"]
    title = (
        f"All {len(model.spec.head_addresses)} maps of SmolLM2, {options.tokens} tokens, processor time of one thread"
    )
    report.add("maps", title, columns, rows)
    report.write()


if __name__ == "__main__":
    main()
