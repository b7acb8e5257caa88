"""Ground truth: programs that torchwright compiles into Phi-3 checkpoints, in which the job of every head is known.

    pip install --no-deps torchwright==0.2.0 && pip install ortools pydantic
    python -m bench.compiled_programs

Rule, fixed before the run: 12 programs with seeds 8000 to 8011. Each has four attention operations: the most recent token of
a class (twice, two classes), the token that a table assigns to the query, and the token at a fixed offset. `find_heads` gets
40 texts of one operation at a time; the gold heads are those of the compiler's schedule. The offset is not tested with
`find_heads`, whose baseline is the best fixed offset: its head, and the heads with which the compiler copies and clears
columns of the same token (role `self`), are compared with the positional roles of a profile. `explain` is right if the
largest part of a score is between the components that write the query and the key of the operation.

A trial on seed 8100, before seeds 8000 to 8011 ran, changed the gold heads of the roles: the compiler's heads that copy and
clear columns of the same token attend to their own position, and count as gold heads of the role `self` since then. The
statistics, the thresholds and the gold heads of `find_heads` and `explain` remained as they were.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise as hw
from headwise.model import ModelProtocol
from headwise.text.build_tokenizers import word_tokenizer

SEEDS, NUM_TEXTS, LENGTH, NUM_WORDS = range(8000, 8012), 40, 20, 16
WORDS = [f"w{i}" for i in range(NUM_WORDS)]
VOCAB = ["<bos>", "<eos>", *WORDS]
D, D_HEAD, MAX_POSITIONS = 512, 64, 64


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A compiled program, attached, with its operations.

    Attributes:
        model: The attached model.
        heads: Heads of each operation, by name.
        writers: Components that write the query and the key of each operation, by name.
        classes: Words of the two classes.
        table: Word that the table assigns to each word.
        offset: Offset of the last operation.
    """

    model: ModelProtocol
    heads: dict[str, set[str]]
    writers: dict[str, tuple[set[str], set[str]]]
    classes: tuple[frozenset[int], frozenset[int]]
    table: tuple[int, ...]
    offset: int


def compile_program(seed: int, folder: Path) -> CompiledProgram:
    """Compile the program of a seed into a folder and attach it."""
    from torchwright.compiler import compile_hf_bundle  # pyright: ignore[reportMissingImports]
    from torchwright.graph import Add, Linear  # pyright: ignore[reportMissingImports]
    from torchwright.ops.attention_ops import attend_argmax_dot, attend_to_offset, get_prev_value  # pyright: ignore[reportMissingImports]
    from torchwright.ops.inout_nodes import create_onehot_embedding, create_rope_config  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(NUM_WORDS).tolist()
    classes = (frozenset(shuffled[:3]), frozenset(shuffled[3:6]))
    table, offset = tuple(np.roll(shuffled, 1)[np.argsort(shuffled)].tolist()), int(rng.integers(1, 5))
    embedding, rope = create_onehot_embedding(VOCAB), create_rope_config(d_head=D_HEAD, max_positions=MAX_POSITIONS)

    def linear(matrix: torch.Tensor) -> Any:
        return Linear(embedding, matrix, torch.zeros(matrix.shape[1]))

    def membership(words: frozenset[int]) -> Any:
        return linear(torch.tensor([[1.0 if i - 2 in words else -1.0] for i in range(len(VOCAB))]))

    lookup = torch.zeros(len(VOCAB), len(VOCAB))
    for word, answer in enumerate(table):
        lookup[word + 2, answer + 2] = 1.0
    operations = {
        "recent A": get_prev_value(rope, embedding, membership(classes[0])),
        "recent B": get_prev_value(rope, embedding, membership(classes[1])),
        "table": attend_argmax_dot(rope, linear(lookup), linear(torch.eye(len(VOCAB))), embedding),
        "offset": attend_to_offset(rope, embedding, -offset),
    }
    first, second, third, fourth = operations.values()
    output = Add(Add(first, second), Add(third, fourth))
    compile_hf_bundle(  # pyright: ignore[reportCallIssue]
        output, embedding, folder, d=D, d_head=D_HEAD, max_seq_len=MAX_POSITIONS, bos_token="<bos>", eos_token="<eos>"
    )
    model = hw.load(folder)
    model.tokenizer = word_tokenizer([*VOCAB, "<unk>"])
    heads, writers = _scheduled_heads(folder, list(operations))
    return CompiledProgram(model, heads, writers, classes, table, offset)


def _scheduled_heads(
    folder: Path, names: list[str]
) -> tuple[dict[str, set[str]], dict[str, tuple[set[str], set[str]]]]:
    """Read the heads of each operation from the compiler's schedule, and the components that write their queries and keys.

    The output adds the operations in the order of `names`, so they are the leaves of its two levels of additions.
    """
    schedule = json.loads((folder / "torchwright_schematic.json").read_text())
    nodes = {node["id"]: node for node in schedule["graphs"]["lowered"]["nodes"]}
    used = {name for node in nodes.values() for name in node["inputs"]}
    root = next(node for node in nodes.values() if node["op"] == "Add" and node["id"] not in used)
    leaves = [leaf for side in root["inputs"] for leaf in nodes[side]["inputs"]]
    name_of_node = dict(zip(leaves, names, strict=True))
    writer_of_column: dict[int, str] = {}
    heads: dict[str, set[str]] = {}
    writers: dict[str, tuple[set[str], set[str]]] = {}
    for layer in schedule["schedule"]["layers"]:
        index = layer["index"]
        for operation in layer["attention_operations"]:
            start, count = operation["heads"]
            own = {f"{index}.{head}" for head in range(start, start + count)}
            if operation["node"] in name_of_node and operation["type"] == "compute_attn":
                name = name_of_node[operation["node"]]
                heads[name] = own
                query, key = (
                    {
                        writer_of_column.get(column, "embedding")
                        for column in _columns(operation[f"{side}_source_columns"])
                    }
                    for side in ("query", "key")
                )
                writers[name] = (query, key)
        for operation in layer["attention_operations"]:
            start, count = operation["heads"]
            if operation["type"] != "compute_attn":
                heads.setdefault("self", set()).update(f"{index}.{head}" for head in range(start, start + count))
            if operation["type"] != "cancel":
                label = f"{index}.{start}"
                writer_of_column |= dict.fromkeys(_columns(operation["target_columns"]), label)
        for operation in layer["mlp_operations"]:
            writer_of_column |= dict.fromkeys(_columns(operation.get("target_columns")), f"mlp.{index}")
    return heads, writers


def _columns(ranges: Any) -> list[int]:
    return [column for start, count in ranges or () for column in range(start, start + count)]


def texts_of_operation(program: CompiledProgram, operation: str, seed: int) -> list[dict[str, Any]]:
    """Return texts with the queries of one operation and the keys that it reads."""
    rng, rows = np.random.default_rng(seed), []
    while len(rows) < NUM_TEXTS:
        ids = rng.integers(0, NUM_WORDS, LENGTH).tolist()
        pairs = []
        for query in range(1, LENGTH):
            if operation == "table":
                keys = [i for i in range(query + 1) if ids[i] == program.table[ids[query]]]
                gold = keys if len(keys) == 1 else []
            else:
                words = program.classes[operation == "recent B"]
                gold = [i for i in range(query + 1) if ids[i] in words][-1:]
            pairs += [[query + 1, gold[0] + 1]] if gold and gold[0] != query else []
        if len(pairs) >= 3:
            chosen = sorted(rng.permutation(len(pairs))[:4].tolist())
            text = " ".join(["<bos>", *(WORDS[i] for i in ids)])
            rows.append({"text": text, "unit": "token", "pairs": [pairs[i] for i in chosen]})
    return rows


def find_accuracy(program: CompiledProgram, seed: int) -> dict[str, tuple[int, int, int]]:
    """Return hits, found heads and gold heads of `find_heads`, of the roles of a profile and of `explain`."""
    totals = {"find_heads": (0, 0, 0), "roles": (0, 0, 0), "explain": (0, 0, 0)}

    def count(name: str, reported: set[str], gold: set[str]) -> None:
        hits, num_reported, num_gold = totals[name]
        totals[name] = (hits + len(reported & gold), num_reported + len(reported), num_gold + len(gold))

    for operation in ("recent A", "recent B", "table"):
        rows = texts_of_operation(program, operation, seed)
        result = hw.find_heads(program.model, rows, seed=seed)
        count("find_heads", set(result.supported_heads), program.heads[operation])
        explained = {f"{i}" for i, row in enumerate(rows[:4]) if _explained_components(program, operation, row)}
        count("explain", explained, {f"{i}" for i in range(4)})
    texts = [row["text"] for row in texts_of_operation(program, "table", seed + 1)]
    profile = hw.profile(program.model, texts, relations=False, causal=False, seed=seed)
    role, detail = ("previous token", "") if program.offset == 1 else ("fixed offset", f"-{program.offset}")
    positional = {
        (str(head.address), item.role, item.detail)
        for head, evidence in zip(profile, profile.evidence, strict=True)
        for item in evidence
        if item.is_supported and item.role in ("previous token", "fixed offset", "self", "next token")
    }
    gold = {(head, role, detail) for head in program.heads["offset"]}
    gold |= {(head, "self", "") for head in program.heads.get("self", ())}
    count("roles", {" ".join(item) for item in positional}, {" ".join(item) for item in gold})
    return totals


def _explained_components(program: CompiledProgram, operation: str, row: dict[str, Any]) -> bool:
    """Return whether the largest part of a score is between components that write the query and the key of the operation."""
    (query, key), *_ = row["pairs"]
    (head,) = program.heads[operation]
    explanation = hw.explain(program.model, row["text"], head, query, key, words=False)
    largest = max(explanation.pairs, key=lambda pair: abs(pair.score))
    query_writers, key_writers = program.writers[operation]
    return largest.query in query_writers and largest.key in key_writers


def main() -> int:
    """Compile all programs, search their heads and print precision and recall."""
    sums: dict[str, np.ndarray] = dict.fromkeys(("find_heads", "roles", "explain"), np.zeros(3, int))
    with tempfile.TemporaryDirectory() as name:
        for seed in SEEDS:
            program = compile_program(seed, Path(name) / str(seed))
            totals = find_accuracy(program, seed)
            sums = {key: sums[key] + np.array(totals[key]) for key in sums}
            print(
                f"program {seed}, offset {program.offset}, {len(program.model.spec.head_addresses)} heads: {totals}",
                flush=True,
            )
    for key, (hits, num_reported, num_gold) in sums.items():
        print(f"{key}: precision {hits}/{num_reported}, recall {hits}/{num_gold}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
