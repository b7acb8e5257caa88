"""What a fresh process runs: python -m tests.analysis.stream_script SMALL LARGE. Profiles SMALL, then LARGE under a real
limit of memory, and prints what it read and by how much memory rose. Each is a file of words, a treebank, or a number: so
many documents of the synthetic language, with relations."""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.analysis.recording import tokenized_corpus
from headwise.experiments.engine.peak_memory import STATUS_FILE, peak_memory
from headwise.model import Transformer
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY

WORDS = [f"w{number}" for number in range(200)]
RELATIONS = ("nsubj", "obj", "det", "amod")
MEMORY_MARGIN = 64 << 20  # bytes a process may take beyond what it holds after the small file


def write_words(path: Path, tokens: int) -> Path:
    """So many random words, 40 a line."""
    with open(path, "w") as file:
        generator = torch.Generator().manual_seed(tokens)
        for start in range(0, tokens, 40):
            line = torch.randint(len(WORDS), (min(40, tokens - start),), generator=generator).tolist()
            file.write(" ".join(WORDS[word_id] for word_id in line) + "\n")
    return path


def write_treebank(path: Path, sentences: int) -> Path:
    """So many sentences of 8 to 15 random words in CoNLL-U, each word a dependent of an earlier one."""
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
    """A decoder as small as can be that reads these words."""
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=8, heads=2)
    tokenizer = word_tokenizer(words)
    model = Transformer(hw.ModelSpec(vocab=len(tokenizer), context=256, layers=1, mlp_width=8, attention=attention))
    model.tokenizer = tokenizer
    return model


def main(small: str, large: str) -> None:
    torch.set_num_threads(1)
    batch_tokens = 2048
    if large.endswith(".conllu"):  # little at a time, so that a small treebank streams too
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
