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

SECONDS = 1800.0
PARALLEL = 16  # prompts at a time


@dataclass(frozen=True)
class EngineToken:
    """One token that an engine wrote, and the likeliest ones with their log-probabilities."""

    id: int
    top: dict[int, float]  # empty where the engine does not tell


def is_there() -> bool:
    """Whether llama.cpp is installed, as xllamacpp."""
    return find_spec("xllamacpp") is not None


def write_on(
    file: Path, prompts: Sequence[Sequence[int]], tokens: int, top: int = 5, threads: int = 1
) -> list[list[EngineToken]]:
    """What llama.cpp writes behind some prompts of ids, always the likeliest token."""
    longest = max(map(len, prompts)) + tokens + 8
    asked = {"prompts": [list(ids) for ids in prompts], "tokens": tokens, "top": top}
    made = _ask([file], {**asked, "do": "write", "context": longest, "threads": threads})
    return [[EngineToken(one["id"], {int(i): p for i, p in one["top"]}) for one in answer] for answer in made]


def race(files: Sequence[Path], prompt: Sequence[int], tokens: int, rounds: int, threads: int = 1) -> list[list[float]]:
    """Tokens per second of processor time, a row for each file, a number for each round; they take turns in one process."""
    asked = {"prompts": [list(prompt)] * rounds, "tokens": tokens, "context": len(prompt) + tokens + 8}
    return _ask(files, {**asked, "do": "race", "threads": threads})


def states(file: Path, prompts: Sequence[Sequence[int]], threads: int = 1) -> list[list[list[float]]]:
    """What an encoder makes of every token of some texts of ids."""
    asked = {"prompts": [list(ids) for ids in prompts], "context": max(map(len, prompts)) + 8, "threads": threads}
    return _ask([file], {**asked, "do": "states"})


def vectors(file: Path, texts: Sequence[str], context: int, threads: int = 1) -> list[list[float]]:
    """One vector for each text, cut by the file's own tokenizer and pooled as the file says."""
    asked = {"prompts": list(texts), "context": context, "threads": threads}
    return _ask([file], {**asked, "do": "vectors"})


def cut_texts(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of some texts, as the file's own tokenizer cuts them."""
    return _ask([file], {"prompts": list(texts), "context": 8, "threads": 1, "do": "cut"})


def _ask(files: Sequence[Path], request: dict[str, Any]) -> Any:
    if not is_there():
        raise HeadwiseError("llama.cpp comes with xllamacpp; pip install 'headwise[deploy]'.")
    command = [sys.executable, "-m", "headwise.exporters.llama_cpp", *map(str, files)]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise HeadwiseError(f"llama.cpp did not answer within {SECONDS:.0f} s on {files[0]}.") from None
    told = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    if done.returncode or not told:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        why = [line for line in said if "GGML_ASSERT" in line or "error" in line.lower()] or said[-1:]
        raise HeadwiseError(f"llama.cpp could not run {files[0]} (it ended with {done.returncode}): {why[0]}")
    return json.loads(told[0])["answers"]


def _answer_all(files: list[str]) -> None:
    """In that process."""
    asked = json.load(sys.stdin)
    asked["rows"] = min(PARALLEL, len(asked["prompts"])) if asked["do"] == "write" else 1
    servers = [_server(file, asked) for file in files]  # held, for a server that nobody holds ends
    addresses = [server.listening_address for server in servers]
    if asked["do"] == "race":
        rounds = [[_speed(address, asked, prompt) for address in addresses] for prompt in asked["prompts"]]
        answers: list[Any] = [list(row) for row in zip(*rounds, strict=True)]
    else:
        with ThreadPoolExecutor(asked["rows"]) as pool:
            answers = list(pool.map(lambda prompt: _answer(addresses[0], asked, prompt), asked["prompts"]))
    print(json.dumps({"answers": answers}), flush=True)
    os._exit(0)  # servers do not end by themselves


def _server(file: str, request: dict[str, Any]) -> Any:
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
    if request["do"] in ("states", "vectors"):
        params.embedding, params.n_batch, params.n_ubatch = True, request["context"], request["context"]
        if request["do"] == "states":
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    return xllamacpp.Server(params)


def _answer(address: str, request: dict[str, Any], prompt: Any) -> Any:
    if request["do"] == "cut":
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return _post(f"{address}/tokenize", body)["tokens"]
    if request["do"] in ("states", "vectors"):
        found = _post(f"{address}/embedding", {"content": prompt, "embd_normalize": -1})[0]["embedding"]
        return found if request["do"] == "states" else found[0]
    made = _post(f"{address}/completion", _body(prompt, request["tokens"]) | {"n_probs": request["top"]})
    return _steps(made["tokens"], made.get("completion_probabilities", []))


def _speed(address: str, request: dict[str, Any], prompt: Any) -> float:
    """Tokens per second of this process's processor time; the server lives in it."""
    began = time.process_time()
    made = _post(f"{address}/completion", _body(prompt, request["tokens"]))
    return len(made["tokens"]) / (time.process_time() - began)


def _body(prompt: Any, tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True,
        "return_tokens": True, "samplers": ["temperature"],
    }  # fmt: skip


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def _steps(tokens: list[int], reported: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every token with its candidates; of one that ends inside a character the server tells none."""
    left, steps = iter([*reported, None]), []
    known = next(left)
    for token in tokens:
        if known is not None and known["id"] == token:
            steps.append({"id": token, "top": [(one["id"], one["logprob"]) for one in known["top_logprobs"]]})
            known = next(left)
        else:
            steps.append({"id": token, "top": []})
    return steps


if __name__ == "__main__":
    _answer_all(sys.argv[1:])
