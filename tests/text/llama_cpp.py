"""Token ids of llama.cpp for every supported pre-tokenizer: `python -m tests.text.llama_cpp` writes llama_cpp.json.

It needs `xllamacpp`, which contains llama.cpp, and `gguf`. The tests need only llama_cpp.json (xllamacpp 2026.10.11549).
"""

import json
import random
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

FILE = Path(__file__).with_name("llama_cpp.json")
FRAGMENTS = [
    "a",
    "B",
    "c",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "1",
    "23",
    "456",
    "'s",
    "'S",
    "'re",
    ".",
    ",",
    "!?",
    "$",
    "+",
    "=",
    "`",
    "~",
    "(",
    ")",
    "…",
    "。",
    "中",
    "文",
    "ひ",
    "カ",
    "한",
    "é",
    "É",
    "ß",
    "é",
    "😀",
    "½",
    "٣",
    "_",
    "-",
    "/",
    "hello",
    "World",
    " the",
    "qzx",
    " qzx",
    "<tool>",
    "<",
    "e>",
    "“",
    "¿",
    "\xa0",
    "#",
    "<",
    "^",
]


def gguf_fields(pre: str, tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """Return fields of a GGUF file. The last token is an added token, the first two are BOS and EOS."""
    types = [3, 3, *[1] * (len(tokens) - 3), 4]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": types}
    values |= {"bos_token_id": 0, "eos_token_id": 1}
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def train_vocabulary(texts: list[str]) -> tuple[list[str], list[str]]:
    """Train merges on texts without pre-tokenization, so that some merges cross every possible boundary."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"[\s\S]{1,40}"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_level])  # pyright: ignore
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=560,
        special_tokens=["<s>", "<e>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return [*tokens, "qzx", "Ġqzx", "<tool>"], [" ".join(pair) for pair in model["merges"]]  # no merge gives qzx


def write_gguf_model(file: Path, tokenizer_fields: dict[str, Any]) -> None:
    """Write a minimal model with a tokenizer."""
    import gguf
    import numpy as np

    writer, width, vocab = gguf.GGUFWriter(str(file), "llama"), 32, len(tokenizer_fields["tokenizer.ggml.tokens"])
    for name, value in {
        "context_length": 64, "embedding_length": width, "block_count": 1, "feed_forward_length": 32, "head_count": 2,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 16, "vocab_size": vocab,
        "tokenizer_model": "gpt2", "tokenizer_pre": tokenizer_fields["tokenizer.ggml.pre"],
        "token_list": tokenizer_fields["tokenizer.ggml.tokens"], "token_types": tokenizer_fields["tokenizer.ggml.token_type"],
        "token_merges": tokenizer_fields["tokenizer.ggml.merges"], "bos_token_id": 0, "eos_token_id": 1,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    shapes = {
        "token_embd": (vocab, width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
    }
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, shape in (shapes | {f"blk.0.{part}": (width, width) for part in parts}).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenize_texts(file: str) -> None:
    """Print the llama.cpp ids of texts from standard input. It needs its own process, because the server does not end."""
    import os
    from importlib import import_module

    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.port, params.n_parallel = file, 64, False, 0, 1
    server = xllamacpp.Server(params)  # it runs as long as the object exists
    address = server.listening_address
    for text in json.load(sys.stdin):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            print(json.dumps(json.load(answer)["tokens"]), flush=True)
    os._exit(0)


def main() -> None:
    from headwise.text.gguf_pretokenizers import PRE_TOKENIZERS

    rng = random.Random(0)
    samples = ["".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(2, 22))) for _ in range(400)]
    texts = ["Hello World's 12345 tests!!\n\n  don't WE'RE 3.14\n", *samples[:40]]
    tokens, merges = train_vocabulary([text.replace("qzx", "").replace("<tool>", "") for text in samples])
    name_of_pre_tokenizer = {pre_tokenizer: name for name, pre_tokenizer in PRE_TOKENIZERS.items()}
    ids = {}
    for name in sorted(name_of_pre_tokenizer.values()):
        with tempfile.TemporaryDirectory() as folder:
            write_gguf_model(Path(folder, "m.gguf"), gguf_fields(name, tokens, merges))
            command = [sys.executable, "-m", "tests.text.llama_cpp", folder + "/m.gguf"]
            output = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True).stdout
        ids[name] = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    data = {"tokens": tokens, "merges": merges, "texts": texts, "ids": ids}
    FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items()) + "\n}\n")


if __name__ == "__main__":
    tokenize_texts(sys.argv[1]) if len(sys.argv) > 1 else main()
