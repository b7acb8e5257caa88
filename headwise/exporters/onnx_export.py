"""Export to ONNX for onnxruntime: one graph for an encoder; a prefill graph and a decode-step graph for a decoder."""

import json
import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import MissingDependencyError
from headwise.exporters.engine_parity import greedy_decode
from headwise.exporters.llama_cpp_runner import EngineToken
from headwise.exporters.traceable_modules import bypass_empty_layers, check_exportable, export_graphs
from headwise.io.atomic_write import EXPORT_MARKER, atomic_folder

OPSET = 23  # the first opset with the operator Attention


def write_onnx(model: Any, folder: Path, *, int8: bool = False) -> tuple[str, ...]:
    """Write a folder with the ONNX graphs, our spec and the tokenizer. `int8` quantizes weights with onnxruntime."""
    check_exportable(model)
    try:
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch.onnx
    except ImportError:
        raise MissingDependencyError(
            "onnxscript is required to export to ONNX. Run: pip install 'headwise[deploy]'"
        ) from None
    graph_names = []
    with atomic_folder(folder, (EXPORT_MARKER,)) as staging, _quiet_exporter():
        with bypass_empty_layers(model):
            for name, (program, inputs, outputs) in export_graphs(model).items():
                onnx_program = torch.onnx.export(
                    program,
                    (),
                    dynamo=True,
                    opset_version=OPSET,
                    input_names=inputs,
                    output_names=outputs,
                    verbose=False,
                )
                assert onnx_program is not None
                onnx_program.save(staging / f"{name}.onnx", external_data=model.spec.num_parameters * 4 > 1 << 30)
                graph_names.append(name)
                if int8:
                    _quantize_int8(staging / f"{name}.onnx")
        metadata = {"to": "onnx", "spec": json.loads(model.spec.to_json()), "graphs": graph_names, "int8": int8}
        (staging / EXPORT_MARKER).write_text(json.dumps(metadata, indent=2), encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(staging)
    return (f"graphs {', '.join(graph_names)}, opset {OPSET}", *(["weights in int8 by onnxruntime"] if int8 else []))


def generate(
    folder: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, banned: Collection[int] = ()
) -> list[list[EngineToken]]:
    """Continue prompts greedily in onnxruntime, with a KV cache."""
    import numpy as np

    prefill, step = (_session(folder / f"{name}.onnx") for name in ("prefill", "step"))
    names = [graph_input.name for graph_input in step.get_inputs()][1:]

    def generate_one(prompt: Sequence[int]) -> list[EngineToken]:
        past_kv: list[Any] = []

        def next_logits(ids: list[int]) -> Any:
            graph_input = {"ids": np.array([ids], dtype=np.int64)}
            session, past = (step, dict(zip(names, past_kv, strict=True))) if past_kv else (prefill, {})
            logits, *past_kv[:] = session.run(None, graph_input | past)
            return logits[0, -1]

        return greedy_decode(prompt, max_new_tokens, next_logits, banned)

    return [generate_one(prompt) for prompt in prompts]


def hidden_states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Return the hidden state of each token of an encoder in onnxruntime."""
    import numpy as np

    encoder = _session(folder / "encoder.onnx")
    rows = [np.array([list(ids)], dtype=np.int64) for ids in prompts]
    return [encoder.run(None, {"ids": ids, "attention_mask": np.ones_like(ids, dtype=bool)})[0][0] for ids in rows]


def _session(path: Path) -> Any:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingDependencyError(
            "onnxruntime is required to run ONNX files. Run: pip install 'headwise[deploy]'"
        ) from None
    return onnxruntime.InferenceSession(str(path))


def _quantize_int8(path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic  # pyright: ignore[reportMissingImports]

    quantized_path = path.with_suffix(".int8")
    # Exclude Attention: the quantizer assumes onnxruntime's own operator of that name and would write an invalid graph.
    quantize_dynamic(path, quantized_path, op_types_to_quantize=["MatMul", "Gemm", "Gather"])
    quantized_path.replace(path)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress the log messages and warnings of torch's ONNX exporter."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
