"""Run a GGUF file of an encoder-decoder in llama.cpp, which the server of xllamacpp does not: it never calls llama_encode.

`python -m tests.exporters.encode_decode FILE` reads {"source": [ids], "target": [ids]} as JSON from standard input and prints
the logits of each target token as JSON. It calls the C functions of the library, so it runs in a process of its own. Exit
code 3 means that the library is another build than the offsets below.
"""

import ctypes
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PARAMS_BYTES = 1024  # more than any of the structs, which are passed and returned in memory
# Offsets in llama_context_params, with their default values: n_batch, n_ubatch, flash_attn_type, type_k, type_v.
DEFAULTS = {4: 2048, 8: 512, 48: -1, 104: 1, 108: 1}
CHANGES = {0: 256, 24: 1, 28: 1, 48: 0, 104: 0, 108: 0}  # context, threads, no flash attention, float32 caches
OTHER_BUILD = 3


class Params(ctypes.Structure):
    """A struct of parameters of unknown layout."""

    _fields_ = [("data", ctypes.c_int32 * (PARAMS_BYTES // 4))]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    ]


def logits_of_engine(file: Path, source: list[int], target: list[int]) -> list[list[float]] | None:
    """Return the logits of each target token. None if the offsets do not match the installed build."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.exporters.encode_decode", str(file)],
        input=json.dumps({"source": source, "target": target}), capture_output=True, text=True,
    )  # fmt: skip
    if process.returncode == OTHER_BUILD:
        return None
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def main() -> int:
    request = json.load(sys.stdin)
    package = find_spec("xllamacpp")
    assert package is not None
    assert package.submodule_search_locations is not None
    library: Any = ctypes.CDLL(str(next(Path(package.submodule_search_locations[0]).glob("xllamacpp*.so"))))
    library.llama_model_default_params.restype = library.llama_context_default_params.restype = Params
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    library.llama_model_load_from_file.restype = library.llama_init_from_model.restype = ctypes.c_void_p
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, Params]
    library.llama_batch_init.restype = Batch
    library.llama_batch_init.argtypes = [ctypes.c_int32] * 3
    library.llama_encode.argtypes = library.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_backend_init()
    params = library.llama_context_default_params()
    if any(params.data[offset // 4] != value for offset, value in DEFAULTS.items()):
        return OTHER_BUILD
    for offset, value in CHANGES.items():
        params.data[offset // 4] = value
    model = library.llama_model_load_from_file(sys.argv[1].encode(), library.llama_model_default_params())
    assert model
    context = library.llama_init_from_model(model, params)
    assert context
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    for ids, function in ((request["source"], library.llama_encode), (request["target"], library.llama_decode)):
        assert function(context, _batch(library, ids)) == 0
    rows = [library.llama_get_logits_ith(context, i)[:vocab] for i in range(len(request["target"]))]
    print(json.dumps(rows))
    return 0


def _batch(library: Any, ids: list[int]) -> Batch:
    """Return a batch of one sequence whose tokens all have outputs."""
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    columns = [(ctypes.c_int32 * len(ids)).from_address(getattr(batch, name)) for name in ("token", "pos", "n_seq_id")]
    outputs = (ctypes.c_int8 * len(ids)).from_address(batch.logits)
    sequences = (ctypes.c_void_p * len(ids)).from_address(batch.seq_id)
    for i, token in enumerate(ids):
        columns[0][i], columns[1][i], columns[2][i], outputs[i] = token, i, 1, 1
        ctypes.c_int32.from_address(sequences[i]).value = 0
    return batch


if __name__ == "__main__":
    sys.exit(main())
