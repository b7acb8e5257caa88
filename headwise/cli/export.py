"""headwise export: convert a model for another engine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import DeviceOption, JsonOption, ModelArgument
from headwise.cli.shell.steering_options import SteeringOption, StrengthOption, fold_steerings


def run(
    model: ModelArgument,
    path: Annotated[str, typer.Argument(help="Output folder; for gguf and torch, output file.")],
    to: Annotated[
        str, typer.Option(help="Target format: transformers, gguf (llama.cpp), onnx or torch.")
    ] = "transformers",
    family: Annotated[
        str | None,
        typer.Option(
            help="For transformers: gpt2, gpt-neo, bert or llama. Default: the family the model was loaded from."
        ),
    ] = None,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of the exported weights: float32, bfloat16, float16 or float64; for gguf f32, f16, q8_0 or q4_0. "
            "Default: that of the file; f32 for gguf."
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(help="For gguf encoders: pooling of the token states into one vector, mean, cls or none."),
    ] = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="For gguf: include the tokenizer, or only token ids.")
    ] = True,
    int8: Annotated[
        bool, typer.Option("--int8", help="For onnx: quantize the weights to 8 bits with onnxruntime.")
    ] = False,
    steering: SteeringOption = None,
    strength: StrengthOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the exported model in its engine and compare the outputs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a model, pruned or not, for another engine. Parts that the engine does not support raise an error or a note."""
    from headwise.exporters import export
    from headwise.weights import load

    arguments = {
        "dtype": dtype if to == "gguf" else None,
        "pooling": pooling,
        "tokenizer": None if tokenizer else False,
        "int8": True if int8 else None,
    }
    options: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    loaded = load(model, device=device, dtype="float32" if to == "gguf" else dtype)
    loaded = fold_steerings(loaded, steering, strength)
    result = export(loaded, path, family, to=to, check=check, **options)
    output_path = Path(path)
    files = sorted(entry.name for entry in output_path.iterdir()) if output_path.is_dir() else [output_path.name]
    if as_json:
        print(json.dumps({**result.to_dict(), "folder": path, "files": files}))
        return
    print(f"{path}: {', '.join(files)}" if output_path.is_dir() else f"{path}: {output_path.stat().st_size:,} bytes")
    for note in (*result.notes, *([str(result.parity)] if result.parity is not None else [])):
        print(f"  {note}")
