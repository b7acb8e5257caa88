"""Script for a separate process: `python -m tests.analysis.stream_script SMALL LARGE`. It profiles SMALL, then LARGE under a
memory limit, and prints the number of tokens and the memory increase. Each argument is a file of words, a treebank, or a
number of documents of the synthetic language."""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.analysis.recording import tokenized_corpus
from headwise.experiments.engine.peak_process_memory import STATUS_FILE, peak_memory
from headwise.model import Transformer
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY

WORDS = [f"w{number}" for number in range(200)]
RELATIONS = ("nsubj", "obj", "det", "amod")
MEMORY_MARGIN = 64 << 20  # bytes that the process may use in addition to its memory after the small file


def write_words(path: Path, tokens: int) -> Path:
    """Write random words to a file, 40 per line."""
    with open(path, "w") as file:
        generator = torch.Generator().manual_seed(tokens)
        for start in range(0, tokens, 40):
            line = torch.randint(len(WORDS), (min(40, tokens - start),), generator=generator).tolist()
            file.write(" ".join(WORDS[word_id] for word_id in line) + "\n")
    return path


def write_treebank(path: Path, sentences: int) -> Path:
    """Write sentences of 8 to 15 random words in CoNLL-U. Each word depends on an earlier one."""
    generator = torch.Generator().manual_seed(sentences)
    with open(path, "w") as file:
        for _ in range(sentences):
            length = int(torch.randint(8, 16, (1,), generator=generator))
            words = torch.randint(len(WORDS), (length,), generator=generator).tolist()
            heads = (torch.rand(length, generator=generator) * torch.arange(length)).long().tolist()
            for position, (word, head) in enumerate(zip(words, heads, strict=True)):
                arc = (str(head + 1), RELATIONS[word % len(RELATIONS)]) if position else ("0", "root")
                file.write("\t".join((str(position + 1), WORDS[word], "_", "NOUN", "_", "_", *arc, "_", "_")) + "\n")
            file.write("\n")
    return path


def make_model(words: Sequence[str]) -> Transformer:
    """Make a minimal decoder for these words."""
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=8, heads=2)
    tokenizer = word_tokenizer(words)
    model = Transformer(hw.ModelSpec(vocab=len(tokenizer), context=256, layers=1, mlp_width=8, attention=attention))
    model.tokenizer = tokenizer
    return model


def main(small: str, large: str) -> None:
    torch.set_num_threads(1)
    batch_tokens = 2048
    if large.endswith(".conllu"):  # small buffers, so that a small treebank streams too
        batch_tokens, tokenized_corpus.MAX_CACHED_TOKENS = 256, 1 << 12
    summaries: list[dict[str, Any]] = []
    model = make_model(VOCABULARY if large.isdigit() else WORDS)

    def profile_corpus(argument: str) -> None:
        corpus = hw.Corpus.synthetic(documents=int(argument)) if argument.isdigit() else Path(argument)
        summaries.append(hw.profile(model, corpus, batch_tokens=batch_tokens).metadata)

    def profile_large() -> None:
        if STATUS_FILE.is_file():
            used_kb = int(
                next(line for line in STATUS_FILE.read_text().splitlines() if line.startswith("VmData")).split()[1]
            )
            resource.setrlimit(resource.RLIMIT_DATA, ((used_kb << 10) + MEMORY_MARGIN, (used_kb << 10) + MEMORY_MARGIN))
        profile_corpus(large)

    start = time.perf_counter()
    growth_mb = peak_memory(profile_large, lambda: profile_corpus(small))
    print(f"{summaries[-1]['tokens']} tokens: {growth_mb:.1f} MB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
