"""Did fine-tuning move a job to other heads? MiniLM against sre-embedding-model, which was fine-tuned from it.

    pip download --no-deps sre-embedding-model==1.0.0      # unpack the wheel
    python -m bench.fine_tuned FOLDER_OF_SRE [TREEBANK]

Jobs from a treebank (UD English-EWT): from the object to its verb, from the determiner to its noun, from the adjective to its
noun; 120 sentences each, the first with such an arc of at most 25 words. Rule, fixed before the run: a head gained or lost a
job if its evidence level changes between `none` and another level, and the 95% interval of the paired difference excludes 0
with a corrected p below 0.05.
"""

import os
import sys
from pathlib import Path
from typing import Any

import headwise as hw
from headwise.text.annotated_documents import read_conllu

RELATIONS, NUM_SENTENCES, MAX_WORDS = ("obj", "det", "amod"), 120, 25


def arcs(treebank: Path, relation: str) -> list[dict[str, Any]]:
    """Return sentences with pairs from the dependent to its head."""
    rows = {}
    for document in read_conllu(treebank):
        pairs = [[arc.source, arc.target] for arc in document.relations if arc.name == relation]
        if pairs and len(document.words) <= MAX_WORDS and len(rows) < NUM_SENTENCES:
            rows[document.text] = {"text": document.text, "words": list(document.words), "pairs": pairs}
    return list(rows.values())


def main(arguments: list[str]) -> int:
    """Search both models and print the changes."""
    tuned = hw.load(next(Path(arguments[0]).rglob("model.safetensors")).parent)
    base = hw.load("minilm")
    data = Path(os.environ.get("HEADWISE_DATA", "."))
    treebank = Path(arguments[1]) if len(arguments) > 1 else next(data.rglob("*ewt-ud-dev.conllu"))
    for relation in RELATIONS:
        rows = arcs(treebank, relation)
        before, after = hw.find_heads(base, rows), hw.find_heads(tuned, rows)
        for name, result in (("minilm", before), ("fine-tuned", after)):
            best = result.heads[0]
            print(f"{relation}, {name}: {len(result.supported_heads)} heads {result.supported_heads[:6]}")
            print(f"  best {best.address} {best.score:.3f} ({best.interval[0]:.3f} to {best.interval[1]:.3f}), baseline "
                  f"{best.baseline:.3f}")  # fmt: skip
        for item in before.compare(after)[:5]:
            print(f"  {item.address} {item.change or 'no job'}: {item.before:.3f} to {item.after:.3f}, difference "
                  f"{item.interval[0]:.3f} to {item.interval[1]:.3f}, p {item.p:.4f}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
