"""A GGUF file in stock llama.cpp, in a process of its own: a file it cannot take would end this one.

python -m headwise.deploy.llama_cpp FILE    reads JSON from standard input, a list of prompts, and answers in JSON
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError

SECONDS = 600.0


@dataclass(frozen=True)
class Step:
    """One token that llama.cpp wrote, and the likeliest ones with their log-probabilities."""

    id: int
    top: dict[int, float]  # empty where llama.cpp does not tell


def is_there() -> bool:
    """Whether llama.cpp is installed, as xllamacpp."""
    return find_spec("xllamacpp") is not None


def write_on(
    file: Path, prompts: Sequence[Sequence[int]], tokens: int, top: int = 5, threads: int = 1
) -> tuple[list[list[Step]], float]:
    """What llama.cpp writes behind some prompts of ids, always the likeliest token; and its tokens a second."""
    if not is_there():
        raise HeadwiseError("llama.cpp comes with xllamacpp; pip install 'headwise[deploy]'.")
    longest = max(map(len, prompts)) + tokens + 8
    asked = {
        "prompts": [list(ids) for ids in prompts],
        "tokens": tokens,
        "top": top,
        "context": longest,
        "threads": threads,
    }
    command = [sys.executable, "-m", "headwise.deploy.llama_cpp", str(file)]
    try:
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise HeadwiseError(f"llama.cpp did not answer within {SECONDS:.0f} s on {file}.") from None
    told = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    if done.returncode or not told:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise HeadwiseError(f"llama.cpp could not run {file} (it ended with {done.returncode}): {last}")
    made = json.loads(told[0])
    answers = [[Step(one["id"], {int(i): p for i, p in one["top"]}) for one in answer] for answer in made["answers"]]
    return answers, made["speed"]


def _serve(file: str) -> None:
    """In that process."""
    from importlib import import_module

    xllamacpp: Any = import_module("xllamacpp")
    asked = json.load(sys.stdin)
    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = (
        file,
        asked["context"],
        1,
        False,
        0,
    )
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.port = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # as ours; by itself it keeps 16 bits
    params.flash_attn_type = (
        xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )  # which rounds to 16 bits, too
    server = xllamacpp.Server(params)
    answers, speeds = [], []
    for prompt in asked["prompts"]:
        body = {
            "prompt": prompt, "n_predict": asked["tokens"], "n_probs": asked["top"], "temperature": 0, "cache_prompt": False,
            "ignore_eos": True, "return_tokens": True, "samplers": ["temperature"],
        }  # fmt: skip
        told = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/completion", told, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            made = json.load(answer)
        answers.append(_steps(made["tokens"], made.get("completion_probabilities", [])))
        speeds.append(made["timings"]["predicted_per_second"])
    print(json.dumps({"answers": answers, "speed": sum(speeds) / len(speeds)}), flush=True)
    os._exit(0)  # the server does not end by itself


def _steps(tokens: list[int], told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every token with its candidates; of one that ends inside a character the server tells none."""
    left, steps = iter([*told, None]), []
    known = next(left)
    for token in tokens:
        if known is not None and known["id"] == token:
            steps.append({"id": token, "top": [(one["id"], one["logprob"]) for one in known["top_logprobs"]]})
            known = next(left)
        else:
            steps.append({"id": token, "top": []})
    return steps


if __name__ == "__main__":
    _serve(sys.argv[1])
