"""What a fresh process runs: python -m tests.analysis.stream_script SMALL LARGE. Profiles SMALL, then LARGE under a real limit of
memory, and prints what it read and by how much memory rose. Each is a file of words, a treebank, or a number: so many
documents of the little language, with relations."""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.analysis.recording import tokenized_corpus
from headwise.experiments.engine.memory import STATUS, rise
from headwise.model import Transformer
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY

WORDS = [f"w{number}" for number in range(200)]
ARCS = ("nsubj", "obj", "det", "amod")
ROOM = 64 << 20  # bytes a process may take beyond what it holds after the small file


def write(path: Path, tokens: int) -> Path:
    """So many random words, 40 a line."""
    with open(path, "w") as file:
        drawn = torch.Generator().manual_seed(tokens)
        for start in range(0, tokens, 40):
            line = torch.randint(len(WORDS), (min(40, tokens - start),), generator=drawn).tolist()
            file.write(" ".join(WORDS[number] for number in line) + "\n")
    return path


def write_treebank(path: Path, sentences: int) -> Path:
    """So many sentences of 8 to 15 random words in CoNLL-U, each word a dependent of an earlier one."""
    drawn = torch.Generator().manual_seed(sentences)
    with open(path, "w") as file:
        for _ in range(sentences):
            length = int(torch.randint(8, 16, (1,), generator=drawn))
            words = torch.randint(len(WORDS), (length,), generator=drawn).tolist()
            heads = (torch.rand(length, generator=drawn) * torch.arange(length)).long().tolist()
            for place, (word, head) in enumerate(zip(words, heads, strict=True)):
                arc = (str(head + 1), ARCS[word % len(ARCS)]) if place else ("0", "root")
                file.write("\t".join((str(place + 1), WORDS[word], "_", "NOUN", "_", "_", *arc, "_", "_")) + "\n")
            file.write("\n")
    return path


def make(words: Sequence[str]) -> Transformer:
    """A decoder as small as can be that reads these words."""
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=8, heads=2)
    tokenizer = word_tokenizer(words)
    model = Transformer(hw.ModelSpec(vocab=len(tokenizer), context=256, layers=1, hidden=8, attention=attention))
    model.tokenizer = tokenizer
    return model


def main(small: str, large: str) -> None:
    torch.set_num_threads(1)
    tokens = 2048
    if large.endswith(".conllu"):  # little at a time, so that a small treebank streams too
        tokens, tokenized_corpus.KEPT = 256, 1 << 12
    made: list[dict[str, Any]] = []
    model = make(VOCABULARY if large.isdigit() else WORDS)

    def look(given: str) -> None:
        corpus = hw.Corpus.little(documents=int(given)) if given.isdigit() else Path(given)
        made.append(hw.profile(model, corpus, tokens=tokens).about)

    def work() -> None:
        if STATUS.is_file():
            held = int(next(line for line in STATUS.read_text().splitlines() if line.startswith("VmData")).split()[1])
            resource.setrlimit(resource.RLIMIT_DATA, ((held << 10) + ROOM, (held << 10) + ROOM))
        look(large)

    start = time.perf_counter()
    rose = rise(work, lambda: look(small))
    print(f"{made[-1]['tokens']} tokens: {rose:.1f} MB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
