"""Attach to every architecture of transformers, tiny, and check every number that comes of it.

python -m bench.architectures                 all that are not in the file of results yet, then the table in docs/attach.md
python -m bench.architectures --only bert t5  these alone, told in full
python -m bench.architectures --table         the table from the results there are

Each piece of some architectures runs in a process of its own: what takes too long there is not built, and told so.
"""

import argparse
import json
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

VERDICTS = ("right", "looking only", "refused", "wrong", "crash", "not built")
RESULTS = Path(".lab/architectures.jsonl")
PAGE = Path(__file__).parent.parent / "docs" / "attach.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
SECONDS = 400  # for one architecture
PIECE = 24  # architectures of one process
# Which class stands for an architecture: with an output over words where there is one.
PREFERRED = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")


def architectures() -> dict[str, str]:
    """Every architecture that has a model class, and that class, by its name."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore

    names = [f"MODEL_FOR_{name}_MAPPING_NAMES" for name in PREFERRED] + ["MODEL_MAPPING_NAMES"]
    names += [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    found = {}
    for kind in CONFIG_MAPPING_NAMES:
        for name in names:
            there = getattr(modeling_auto, name, {}).get(kind)
            if there is not None:
                found[kind] = there if isinstance(there, str) else there[0]
                break
    return found


def run_one(name: str, built: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """One architecture, in this process; `built` is called when it is built and nothing of ours was run yet."""
    import torch
    import transformers

    from bench.tried import Tried, try_out

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    kind = architectures()[name]
    try:
        classes = getattr(transformers, kind), transformers.CONFIG_MAPPING[name]
    except Exception as error:
        return asdict(Tried(name, kind, "not built", f"{type(error).__name__}: {error}"[:200]))
    return asdict(try_out(name, *classes, built))


def _serve(door: Any) -> None:
    while (name := door.recv()) is not None:
        door.send(run_one(name, lambda: door.send("built")))


def run_all(names: list[str], file: Path) -> None:
    """Every architecture that the file lacks; each result is written when it is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {one["name"] for one in read_results(file)}
    left = [name for name in names if name not in known]
    made, spawn = architectures(), multiprocessing.get_context("spawn")
    for start in range(0, len(left), PIECE):
        process: Any = None
        door: Any = None
        for name in left[start : start + PIECE]:
            if process is None:
                door, inner = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(inner,))
                process.start()
                inner.close()
            door.send(name)
            told = {"name": name, "model": made[name], "verdict": "not built", "why": "", "told": {}}
            try:
                while (heard := door.recv() if door.poll(SECONDS) else None) == "built":
                    told["verdict"] = "crash"  # unless it ends well
                told = heard or told | {"verdict": "not built", "why": f"takes longer than {SECONDS} s"}
                failed = heard is None
            except EOFError:
                told["why"], failed = "the process ended", True
            if failed:
                process.kill()
                process = None
            with file.open("a") as out:
                out.write(json.dumps(told) + "\n")
            print(f"{name}: {told['verdict']}", flush=True)
        if process is not None:
            door.send(None)
            process.join()


def read_results(file: Path) -> list[dict[str, Any]]:
    """One line for each architecture; the last one counts."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return list({one["name"]: one for one in map(json.loads, lines)}.values())


def counts(results: list[dict[str, Any]]) -> dict[str, int]:
    """How many of each verdict."""
    found = Counter(one["verdict"] for one in results)
    return {verdict: found[verdict] for verdict in VERDICTS}


def table(results: list[dict[str, Any]]) -> str:
    """What came of all of them, in words of Markdown."""
    import transformers

    rows = [
        f"transformers {transformers.__version__}, {len(results)} of {len(architectures())} architectures tried:",
        "",
        "| | architectures |",
        "|---|---|",
    ]
    rows += [f"| {verdict} | {count} |" for verdict, count in counts(results).items()]
    cut = [one for one in results if one["verdict"] == "right" and "cut" not in one["told"]]
    whole = sum("cut layers" not in one["told"] for one in cut)
    rows += [f"| right, and heads can be cut | {len(cut)}, whole layers of {whole} |"]
    for verdict in ("right", "looking only", "wrong", "crash"):
        there = sorted(one["name"] for one in results if one["verdict"] == verdict)
        if there:
            rows += ["", f"**{verdict.capitalize()}:** {', '.join(there)}."]
    refused: dict[str, list[str]] = {}
    for one in results:
        if one["verdict"] == "refused":
            refused.setdefault(reason(one["why"]), []).append(one["name"])
    left = sorted(one["name"] for one in results if one["verdict"] == "right" and "cut" in one["told"])
    rows += ["", f"**Right, but not cut:** {', '.join(left)}."] if left else []
    rows += ["", "| refused because | architectures |", "|---|---|"]
    rows += [f"| {why} | {', '.join(sorted(names))} |" for why, names in sorted(refused.items())]
    return "\n".join(rows)


def reason(why: str) -> str:
    """The kind of a refusal."""
    kinds = {
        "not on transformers' attention interface": "its attention is not on the interface",
        "none of them can be attached": "it has several towers, and none can be attached by itself",
        "towers": "it has several towers: one of them can be attached",
        "not reached by the call": "it is not on SDPA, and was not reached by the call that was tried",
        "how many heads": "it does not say how many heads it has",
        "learned sinks": "learned sinks",
        "caps its scores": "capped scores",
        "both are attention": "several attentions in one block",
        "is cross-attention": "cross-attention to what is outside of it",
        "runs on the": "it does not run on SDPA",
    }
    return next((told for words, told in kinds.items() if words in why), why[:80].replace("|", "/"))


def write_table(results: list[dict[str, Any]]) -> None:
    """Put the table into the page, between its marks."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--only", nargs="+", default=[])
    options.add_argument("--table", action="store_true", help="only write the table")
    given = options.parse_args()
    if given.only:
        for name in given.only:
            print(json.dumps(run_one(name), indent=2), flush=True)
        return
    if not given.table:
        run_all(list(architectures()), given.results)
    results = read_results(given.results)
    write_table(results)
    print(counts(results))


if __name__ == "__main__":
    main()
