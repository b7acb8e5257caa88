"""Generation with SmolLM2 in other engines, one thread, batch 1, each in its own environment (bench.generate engines).

llama.cpp (PyPI xllamacpp), CTranslate2 and onnxruntime-genai are installed from PyPI into a folder, and SmolLM2 is converted
for each. The converters read the exported transformers folder with the installed torch and transformers.
"""

import json
import os
import site
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import headwise as hw
from headwise.model import Transformer


@dataclass(frozen=True)
class Engine:
    """Installation, conversion and timing program of an engine. The last two run in its own environment."""

    package: tuple[str, ...]
    dtypes: tuple[str, ...]
    convert: tuple[str, ...]  # arguments of Python, with {folder}, {out} and {kind}; empty: exported by Headwise
    program: str  # defines write(model, kind, prompt), which returns a function that generates n tokens


LLAMA_CPP = """
def write(model, kind, prompt):
    import xllamacpp
    asked = xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel = model, 1024, 1
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(asked)
    fixed = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    return lambda count: server.handle_completions({**fixed, "n_predict": count, "max_tokens": count})
"""

CTRANSLATE2 = """
def write(model, kind, prompt):
    import ctranslate2, json
    words = json.load(open(model + "/vocabulary.json"))
    tokens = [[words[number] for number in prompt]]
    made = ctranslate2.Generator(model, device="cpu", compute_type=kind, inter_threads=1, intra_threads=1)
    def some(count):
        out = made.generate_batch(
            tokens, max_length=count, min_length=count, sampling_topk=1, include_prompt_in_result=False
        )
        assert len(out[0].sequences_ids[0]) == count, len(out[0].sequences_ids[0])
    return some
"""

ONNX_GENAI = """
def write(model, kind, prompt):
    import json, onnxruntime_genai
    path = model + "/genai_config.json"
    said = json.load(open(path))
    said["model"]["decoder"].setdefault("session_options", {}).update(intra_op_num_threads=1, inter_op_num_threads=1)
    json.dump(said, open(path, "w"))
    held = onnxruntime_genai.Model(model)
    def some(count):
        asked = onnxruntime_genai.GeneratorParams(held)
        asked.set_search_options(max_length=1024, min_length=1024, do_sample=False)
        writer = onnxruntime_genai.Generator(held, asked)
        writer.append_tokens(prompt)
        for _ in range(count):
            writer.generate_next_token()
    return some
"""

RUN = """
import json, sys, time
model, kind, prompt, tokens = sys.argv[1:]
some, tokens = write(model, kind, json.loads(prompt)), int(tokens)
some(2)
spent = []
for count in (1, tokens + 1):
    began = time.process_time()
    some(count)
    spent.append(time.process_time() - began)
print(json.dumps((spent[1] - spent[0]) / tokens))
"""

ENGINES = {
    "llama.cpp": Engine(("xllamacpp",), ("f32", "f16", "q8_0", "q4_0"), (), LLAMA_CPP),
    "CTranslate2": Engine(
        ("ctranslate2",),
        ("float32", "int8"),
        ("-m", "ctranslate2.converters.transformers", "--model", "{folder}", "--output_dir", "{out}", "--force"),
        CTRANSLATE2,
    ),
    "onnxruntime-genai": Engine(
        ("onnxruntime-genai", "onnx", "onnx_ir"),
        ("fp32", "int4"),
        ("-m", "onnxruntime_genai.models.builder", "-i", "{folder}", "-m", "{folder}", "-o", "{out}",
         "-p", "{kind}", "-e", "cpu", "-c", "{out}-kept"),
        ONNX_GENAI,
    ),
}  # fmt: skip


def prepare_engines(folder: Path) -> dict[str, tuple[Path, Engine, str, Path]]:
    """Create missing environments and models. Return the Python, engine, dtype and model by name."""
    folder.mkdir(parents=True, exist_ok=True)
    model, entries = None, {}
    for name, engine in ENGINES.items():
        python = folder / name / "bin" / "python"
        if not (folder / name / "installed").is_file():
            venv.create(folder / name, clear=True, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *engine.package], check=True)
            site_packages = next((folder / name / "lib").glob("python*/site-packages"))
            (site_packages / "zz-ours.pth").write_text("\n".join(site.getsitepackages()))  # torch for the converter
            (folder / name / "installed").touch()
        for kind in engine.dtypes:
            path = folder / (f"smollm2-{kind}.gguf" if not engine.convert else f"{name}-{kind}")
            if not path.exists():
                model = hw.load("smollm2") if model is None else model
                assert isinstance(model, Transformer)
                _convert(model, engine, kind, python, path)
            entries[f"{name}, {kind}"] = (python, engine, kind, path)
    return entries


def _convert(model: Transformer, engine: Engine, kind: str, python: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        out = Path(scratch) / path.name
        if engine.convert:
            fields = {"folder": model.export(Path(scratch) / "theirs"), "out": out, "kind": kind}
            call = [str(python), *(part.format(**fields) for part in engine.convert)]
            subprocess.run(call, check=True, capture_output=True)
        else:
            hw.export(model, out, to="gguf", dtype=kind)
        out.rename(path)


def seconds_per_token(entry: tuple[Path, Engine, str, Path], prompt: list[int], tokens: int) -> float:
    """Return the seconds of CPU time per token, without the prompt."""
    python, engine, kind, path = entry
    call = [str(python), "-c", engine.program + RUN, str(path), kind, json.dumps(prompt), str(tokens)]
    done = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{path.name}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))
