"""ONNX for onnxruntime: an encoder as one graph, a decoder as two, for the prompt and for every step behind it."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.deploy.graphs import check_traceable, traceable, traced
from headwise.deploy.llama_cpp import Step
from headwise.errors import HeadwiseError
from headwise.files.whole import whole_folder

OPSET = 23  # the first with the operator Attention
MARK = "headwise.json"


def write_onnx(model: Any, folder: Path, int8: bool = False) -> tuple[str, ...]:
    """A folder with a graph for each function, our spec and the tokenizer; `int8` by onnxruntime's own quantiser."""
    check_traceable(model)
    try:
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch.onnx
    except ImportError:
        raise HeadwiseError("ONNX is written by onnxscript; pip install 'headwise[deploy]'.") from None
    files = []
    with whole_folder(folder, (MARK,)) as new, _silent():
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
        told = {"spec": json.loads(model.spec.to_json()), "graphs": files, "int8": int8}
        (new / MARK).write_text(json.dumps(told, indent=2), encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(new)
    return (f"graphs {', '.join(files)}, opset {OPSET}", *(["weights at 8 bits by onnxruntime"] if int8 else []))


def write_on(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, top: int = 5) -> list[list[Step]]:
    """What a decoder writes behind some prompts in onnxruntime, with its cache, always the likeliest token."""
    import numpy as np

    prefill, step = (_session(folder / f"{name}.onnx") for name in ("prefill", "step"))
    answers = []
    for prompt in prompts:
        logits, *held = prefill.run(None, {"ids": np.array([prompt], dtype=np.int64)})
        steps: list[Step] = []
        for _ in range(tokens):
            row = logits[0, -1].astype(np.float64)
            logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            likely = np.argsort(-logs)[:top]
            steps.append(Step(int(likely[0]), {int(i): float(logs[i]) for i in likely}))
            names = [given.name for given in step.get_inputs()][1:]
            given = {"ids": np.array([[int(likely[0])]], dtype=np.int64), **dict(zip(names, held, strict=True))}
            logits, *held = step.run(None, given)
        answers.append(steps)
    return answers


def _session(path: Path) -> Any:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise HeadwiseError("ONNX files are run by onnxruntime; pip install 'headwise[deploy]'.") from None
    return onnxruntime.InferenceSession(str(path))


def _fewer_bits(path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic  # pyright: ignore[reportMissingImports]

    small = path.with_suffix(".int8")
    quantize_dynamic(path, small)
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
