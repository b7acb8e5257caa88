"""ONNX for onnxruntime: an encoder as one graph, a decoder as two, for the prompt and for every step behind it."""

import json
import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.exporters.export_modules import check_traceable, traceable, traced
from headwise.exporters.llama_cpp import EngineToken
from headwise.exporters.parity import write_greedily
from headwise.io.atomic_write import EXPORTED, whole_folder

OPSET = 23  # the first with the operator Attention


def write_onnx(model: Any, folder: Path, int8: bool = False) -> tuple[str, ...]:
    """A folder with a graph for each function, our spec and the tokenizer; `int8` by onnxruntime's own quantiser."""
    check_traceable(model)
    try:
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch.onnx
    except ImportError:
        raise HeadwiseError("ONNX is written by onnxscript; pip install 'headwise[deploy]'.") from None
    files = []
    with whole_folder(folder, (EXPORTED,)) as new, _silent():
        with traceable(model):
            for name, (program, inputs, outputs) in traced(model).items():
                made = torch.onnx.export(
                    program,
                    (),
                    dynamo=True,
                    opset_version=OPSET,
                    input_names=inputs,
                    output_names=outputs,
                    verbose=False,
                )
                assert made is not None
                made.save(new / f"{name}.onnx", external_data=model.spec.parameters * 4 > 1 << 30)
                files.append(name)
                if int8:
                    _fewer_bits(new / f"{name}.onnx")
        told = {"to": "onnx", "spec": json.loads(model.spec.to_json()), "graphs": files, "int8": int8}
        (new / EXPORTED).write_text(json.dumps(told, indent=2), encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(new)
    return (f"graphs {', '.join(files)}, opset {OPSET}", *(["weights at 8 bits by onnxruntime"] if int8 else []))


def write_on(
    folder: Path, prompts: Sequence[Sequence[int]], tokens: int, never: Collection[int] = ()
) -> list[list[EngineToken]]:
    """What a decoder writes behind some prompts in onnxruntime, with its cache, always the likeliest token."""
    import numpy as np

    prefill, step = (_session(folder / f"{name}.onnx") for name in ("prefill", "step"))
    names = [given.name for given in step.get_inputs()][1:]

    def answer(prompt: Sequence[int]) -> list[EngineToken]:
        held: list[Any] = []

        def feed(ids: list[int]) -> Any:
            given = {"ids": np.array([ids], dtype=np.int64)}
            engine, past = (step, dict(zip(names, held, strict=True))) if held else (prefill, {})
            logits, *held[:] = engine.run(None, given | past)
            return logits[0, -1]

        return write_greedily(prompt, tokens, feed, never)

    return [answer(prompt) for prompt in prompts]


def states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """What an encoder makes of every token in onnxruntime."""
    import numpy as np

    encoder = _session(folder / "encoder.onnx")
    rows = [np.array([list(ids)], dtype=np.int64) for ids in prompts]
    return [encoder.run(None, {"ids": ids, "padding": np.ones_like(ids, dtype=bool)})[0][0] for ids in rows]


def _session(path: Path) -> Any:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise HeadwiseError("ONNX files are run by onnxruntime; pip install 'headwise[deploy]'.") from None
    return onnxruntime.InferenceSession(str(path))


def _fewer_bits(path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic  # pyright: ignore[reportMissingImports]

    small = path.with_suffix(".int8")
    # Not all it would take: it knows an Attention of its own, not ONNX's, and would write a graph it cannot load.
    quantize_dynamic(path, small, op_types_to_quantize=["MatMul", "Gemm", "Gather"])
    small.replace(path)


@contextmanager
def _silent() -> Iterator[None]:
    """The exporter tells much that nobody asked for."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
