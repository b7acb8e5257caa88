"""Every verb that writes, called on a tiny model: what is typed, and the files and folders that come of it."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import headwise as hw
from headwise.text.build_tokenizers import byte_tokenizer


class Call(NamedTuple):
    """What is typed, split at blanks; OUT is the folder that is written into. `goes_on` where the same again goes on."""

    typed: str
    made: tuple[str, ...]
    goes_on: bool = False

    def words(self, out: Path) -> list[str]:
        """As the command line gets them."""
        return [word.replace("OUT", str(out)) for word in self.typed.split()]


RUN = "--steps 6 --batch 2 --context 8 --warmup 1"
WRITES = {
    "export": Call("export model OUT/folder --family gpt2", ("folder",)),
    "export gguf": Call("export model OUT/model.gguf --to gguf --no-tokenizer", ("model.gguf",)),
    "export onnx": Call("export model OUT/folder --to onnx", ("folder",)),
    "export torch": Call("export model OUT/model.pt2 --to torch", ("model.pt2",)),
    "heads": Call("heads model text.txt --no-causal --save OUT/p.npz --report OUT/heads.html", ("p.npz", "heads.html")),
    "heads --out": Call("heads model text.txt --no-causal --out OUT/shards --shard 300", ("shards",), goes_on=True),
    "plot": Call("plot roles model text.txt --out OUT/roles.svg", ("roles.svg",)),
    "prune": Call("prune model text.txt --keep 0.5 --out OUT/small --plan OUT/plan.json", ("small", "plan.json")),
    "quantise": Call("quantise model --weights 8 --limit 0 --out OUT/eight --plot OUT/bits.svg", ("eight", "bits.svg")),
    "cache": Call(
        "cache model text.txt --heads 0.1 --last 4 --length 32 --out OUT/less --plan OUT/c.json", ("less", "c.json")
    ),
    "sensitivity": Call("sensitivity model text.txt --out OUT/bits.jsonl --length 32", ("bits.jsonl",), goes_on=True),
    "train": Call(f"train text.txt {RUN} --tokenizer byte --out OUT/run", ("run/model",), goes_on=True),
    "distil": Call(f"distil model text.txt --layers 1 {RUN} --out OUT/taught", ("taught/model",), goes_on=True),
}


def make_place(folder: Path) -> Path:
    """A model of two heads that reads bytes, and a text, in a folder that everybody may read."""
    torch.manual_seed(0)
    model = hw.Transformer(replace(hw.preset("gpt2").resized(layers=1, width=8, heads=2), vocab=257, context=64))
    model.tokenizer = byte_tokenizer()
    model.save(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(f"{n} to be or not to be, {n + 1} times." for n in range(12)))
    folder.chmod(0o755)
    return folder


def contents(out: Path, call: Call) -> dict[str, bytes]:
    """Every byte that a call has made; what is hidden is nobody's result: a process that was killed may leave it behind."""
    files = [
        file for name in call.made for file in ((out / name).rglob("*") if (out / name).is_dir() else [out / name])
    ]
    seen = {str(file.relative_to(out)): file for file in sorted(files) if file.is_file()}
    return {
        name: file.read_bytes() for name, file in seen.items() if not any(part[0] == "." for part in Path(name).parts)
    }
