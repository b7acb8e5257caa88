"""Calls of all writing commands on a tiny model, with their output files and folders."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import headwise as hw
from headwise.text.build_tokenizers import byte_tokenizer


class CommandCall(NamedTuple):
    """A command line, split at spaces, with OUT as the output folder. `resumes`: the same call can be resumed."""

    template: str
    outputs: tuple[str, ...]
    resumes: bool = False

    def arguments(self, out: Path) -> list[str]:
        """Return the arguments with the output folder inserted."""
        return [word.replace("OUT", str(out)) for word in self.template.split()]


RUN = "--steps 6 --batch-size 2 --context 8 --warmup 1"
WRITING_COMMANDS = {
    "export": CommandCall("export model OUT/folder --family gpt2", ("folder",)),
    "export gguf": CommandCall("export model OUT/model.gguf --to gguf --no-tokenizer", ("model.gguf",)),
    "export onnx": CommandCall("export model OUT/folder --to onnx", ("folder",)),
    "export torch": CommandCall("export model OUT/model.pt2 --to torch", ("model.pt2",)),
    "profile": CommandCall(
        "profile model text.txt --no-causal --save OUT/p.npz --report OUT/heads.html", ("p.npz", "heads.html")
    ),
    "profile --out": CommandCall(
        "profile model text.txt --no-causal --out OUT/shards --shard-characters 300", ("shards",), resumes=True
    ),
    "plot": CommandCall("plot roles model text.txt --out OUT/roles.svg", ("roles.svg",)),
    "prune": CommandCall(
        "prune model text.txt --keep 0.5 --out OUT/small --save-plan OUT/plan.json", ("small", "plan.json")
    ),
    "quantize": CommandCall(
        "quantize model --weights 8 --max-texts 0 --out OUT/eight --plot OUT/bits.svg", ("eight", "bits.svg")
    ),
    "cache": CommandCall(
        "cache model text.txt --heads 0.1 --window 4 --max-length 32 --out OUT/less --save-plan OUT/c.json",
        ("less", "c.json"),
    ),
    "sensitivity": CommandCall(
        "sensitivity model text.txt --out OUT/bits.jsonl --max-length 32", ("bits.jsonl",), resumes=True
    ),
    "train": CommandCall(f"train text.txt {RUN} --tokenizer byte --out OUT/run", ("run/model",), resumes=True),
    "distill": CommandCall(
        f"distill model text.txt --layers 1 {RUN} --out OUT/taught", ("taught/model",), resumes=True
    ),
}


def make_workdir(folder: Path) -> Path:
    """Create a model with two heads and a byte tokenizer, and a text, in a folder readable by all users."""
    torch.manual_seed(0)
    model = hw.Transformer(replace(hw.preset("gpt2").resized(layers=1, width=8, heads=2), vocab=257, context=64))
    model.tokenizer = byte_tokenizer()
    model.save(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(f"{n} to be or not to be, {n + 1} times." for n in range(12)))
    folder.chmod(0o755)
    return folder


def read_outputs(out: Path, call: CommandCall) -> dict[str, bytes]:
    """Return the contents of all output files. Hidden files are skipped: a killed process may leave them."""
    files = [
        file for name in call.outputs for file in ((out / name).rglob("*") if (out / name).is_dir() else [out / name])
    ]
    files_by_name = {str(file.relative_to(out)): file for file in sorted(files) if file.is_file()}
    return {
        name: file.read_bytes()
        for name, file in files_by_name.items()
        if not any(part[0] == "." for part in Path(name).parts)
    }
