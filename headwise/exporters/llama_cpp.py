"""A GGUF file in stock llama.cpp, in a process of its own: a file it cannot take would end this one.

python -m headwise.exporters.llama_cpp FILE …    reads JSON from standard input, what is asked, and answers in JSON
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError

TIMEOUT_SECONDS = 1800.0
MAX_PARALLEL_PROMPTS = 16  # prompts at a time


@dataclass(frozen=True)
class EngineToken:
    """One token that an engine wrote, and the likeliest ones with their log-probabilities."""

    id: int
    top_log_probs: dict[int, float]  # empty where the engine does not tell


def is_available() -> bool:
    """Whether llama.cpp is installed, as xllamacpp."""
    return find_spec("xllamacpp") is not None


def generate(
    file: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, top_k: int = 5, threads: int = 1
) -> list[list[EngineToken]]:
    """What llama.cpp writes behind some prompts of ids, always the likeliest token."""
    context = max(map(len, prompts)) + max_new_tokens + 8
    request = {"prompts": [list(ids) for ids in prompts], "tokens": max_new_tokens, "top": top_k}
    answers = _run_engine([file], {**request, "do": "generate", "context": context, "threads": threads})
    return [[EngineToken(token["id"], {int(i): p for i, p in token["top"]}) for token in answer] for answer in answers]


def benchmark(
    files: Sequence[Path], prompt: Sequence[int], max_new_tokens: int, rounds: int, threads: int = 1
) -> list[list[float]]:
    """Tokens per second of processor time, a row for each file, a number for each round; they take turns in one process."""
    request = {
        "prompts": [list(prompt)] * rounds,
        "tokens": max_new_tokens,
        "context": len(prompt) + max_new_tokens + 8,
    }
    return _run_engine(files, {**request, "do": "benchmark", "threads": threads})


def hidden_states(file: Path, prompts: Sequence[Sequence[int]], threads: int = 1) -> list[list[list[float]]]:
    """What an encoder makes of every token of some texts of ids."""
    request = {"prompts": [list(ids) for ids in prompts], "context": max(map(len, prompts)) + 8, "threads": threads}
    return _run_engine([file], {**request, "do": "hidden_states"})


def embeddings(file: Path, texts: Sequence[str], context: int, threads: int = 1) -> list[list[float]]:
    """One vector for each text, cut by the file's own tokenizer and pooled as the file says."""
    request = {"prompts": list(texts), "context": context, "threads": threads}
    return _run_engine([file], {**request, "do": "embeddings"})


def tokenize(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of some texts, as the file's own tokenizer cuts them."""
    return _run_engine([file], {"prompts": list(texts), "context": 8, "threads": 1, "do": "tokenize"})


def _run_engine(files: Sequence[Path], request: dict[str, Any]) -> Any:
    if not is_available():
        raise HeadwiseError("llama.cpp comes with xllamacpp; pip install 'headwise[deploy]'.")
    command = [sys.executable, "-m", "headwise.exporters.llama_cpp", *map(str, files)]
    try:
        process = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise HeadwiseError(f"llama.cpp did not answer within {TIMEOUT_SECONDS:.0f} s on {files[0]}.") from None
    result_lines = [line for line in process.stdout.splitlines() if line.startswith('{"answers"')]
    if process.returncode or not result_lines:
        stderr_lines = process.stderr.strip().splitlines() or ["it said nothing"]
        errors = [line for line in stderr_lines if "GGML_ASSERT" in line or "error" in line.lower()] or stderr_lines[
            -1:
        ]
        raise HeadwiseError(f"llama.cpp could not run {files[0]} (it ended with {process.returncode}): {errors[0]}")
    return json.loads(result_lines[0])["answers"]


def _serve_requests(files: list[str]) -> None:
    """In that process."""
    request = json.load(sys.stdin)
    request["rows"] = min(MAX_PARALLEL_PROMPTS, len(request["prompts"])) if request["do"] == "generate" else 1
    servers = [_start_server(file, request) for file in files]  # held, for a server that nobody holds ends
    addresses = [server.listening_address for server in servers]
    if request["do"] == "benchmark":
        rounds = [
            [_tokens_per_second(address, request, prompt) for address in addresses] for prompt in request["prompts"]
        ]
        answers: list[Any] = [list(row) for row in zip(*rounds, strict=True)]
    else:
        with ThreadPoolExecutor(request["rows"]) as pool:
            answers = list(pool.map(lambda prompt: _answer_prompt(addresses[0], request, prompt), request["prompts"]))
    print(json.dumps({"answers": answers}), flush=True)
    os._exit(0)  # servers do not end by themselves


def _start_server(file: str, request: dict[str, Any]) -> Any:
    """With numbers as ours: by itself it keeps keys and values at 16 bits, and its flash attention rounds to them."""
    from importlib import import_module

    xllamacpp: Any = import_module("xllamacpp")
    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = (
        file,
        request["rows"],
        request["rows"] * max(request["context"], 256),
    )
    params.n_gpu_layers, params.port, params.warmup = 0, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if request["do"] in ("hidden_states", "embeddings"):
        params.embedding, params.n_batch, params.n_ubatch = True, request["context"], request["context"]
        if request["do"] == "hidden_states":
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    return xllamacpp.Server(params)


def _answer_prompt(address: str, request: dict[str, Any], prompt: Any) -> Any:
    if request["do"] == "tokenize":
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return _post(f"{address}/tokenize", body)["tokens"]
    if request["do"] in ("hidden_states", "embeddings"):
        embedding = _post(f"{address}/embedding", {"content": prompt, "embd_normalize": -1})[0]["embedding"]
        return embedding if request["do"] == "hidden_states" else embedding[0]
    completion = _post(
        f"{address}/completion", _completion_body(prompt, request["tokens"]) | {"n_probs": request["top"]}
    )
    return _token_steps(completion["tokens"], completion.get("completion_probabilities", []))


def _tokens_per_second(address: str, request: dict[str, Any], prompt: Any) -> float:
    """Tokens per second of this process's processor time; the server lives in it."""
    start = time.process_time()
    completion = _post(f"{address}/completion", _completion_body(prompt, request["tokens"]))
    return len(completion["tokens"]) / (time.process_time() - start)


def _completion_body(prompt: Any, max_new_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True,
        "return_tokens": True, "samplers": ["temperature"],
    }  # fmt: skip


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def _token_steps(tokens: list[int], reported: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every token with its candidates; of one that ends inside a character the server tells none."""
    remaining, steps = iter([*reported, None]), []
    entry = next(remaining)
    for token in tokens:
        if entry is not None and entry["id"] == token:
            steps.append(
                {"id": token, "top": [(candidate["id"], candidate["logprob"]) for candidate in entry["top_logprobs"]]}
            )
            entry = next(remaining)
        else:
            steps.append({"id": token, "top": []})
    return steps


if __name__ == "__main__":
    _serve_requests(sys.argv[1:])
