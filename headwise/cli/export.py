"""headwise export: a model for another engine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import JsonOption, ModelArgument


def run(
    model: ModelArgument,
    path: Annotated[str, typer.Argument(help="Where to write it: a folder, or a file for gguf and torch.")],
    to: Annotated[str, typer.Option(help="transformers, gguf (llama.cpp), onnx or torch.")] = "transformers",
    family: Annotated[
        str | None, typer.Option(help="For transformers: gpt2, gpt-neo, bert or llama; left out: the one it came from.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="For gguf: f32, f16, q8_0 or q4_0.")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="For gguf, of an encoder: how a text becomes one vector; mean, cls or none.")
    ] = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="For gguf: with its tokenizer, or with ids as numbers.")
    ] = True,
    int8: Annotated[bool, typer.Option("--int8", help="For onnx: weights at 8 bits, by onnxruntime.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Run it in its real engine and compare.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model, cut or not, for an engine that people run; what it cannot hold is refused, or told."""
    from headwise.exporters import export
    from headwise.weights import load

    arguments = {
        "dtype": dtype,
        "pooling": pooling,
        "tokenizer": None if tokenizer else False,
        "int8": True if int8 else None,
    }
    options: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    result = export(load(model), path, family, to=to, check=check, **options)
    output_path = Path(path)
    files = sorted(entry.name for entry in output_path.iterdir()) if output_path.is_dir() else [output_path.name]
    if as_json:
        print(json.dumps({**result.to_dict(), "folder": path, "files": files}))
        return
    print(f"{path}: {', '.join(files)}" if output_path.is_dir() else f"{path}: {output_path.stat().st_size:,} bytes")
    for note in (*result.notes, *([str(result.parity)] if result.parity is not None else [])):
        print(f"  {note}")
