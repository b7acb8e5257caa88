"""Attach to a tiny model of every architecture of transformers and check all results.

python -m bench.architectures                 run all architectures without a result, then update the table of the docs
python -m bench.architectures --only bert t5  run these architectures and print their full results
python -m bench.architectures --only bert --checks quantized    run some checks only
python -m bench.architectures --table         update the table from existing results

Groups of architectures run in separate processes. An architecture that uses too much processor time counts as not built.
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
DOCS_PAGE = Path(__file__).parent.parent / "docs" / "attached" / "architectures.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
MAX_SECONDS = 400  # processor time per architecture
POLL_SECONDS = 5.0
ARCHITECTURES_PER_PROCESS = 24
# Preferred model classes of an architecture: those with a vocabulary output first.
GENERATING = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
# Columns of the table, and the checks that they show. A check without a finding passed.
COLUMNS = {
    "one head pruned": "prune", "layer pruned": "prune layers", "per-head cache": "per-head cache", "quantized": "quantized",
}  # fmt: skip
COLUMNS_BEGIN, COLUMNS_END = "<!-- columns: begin -->", "<!-- columns: end -->"
PREFERRED = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")


def architectures() -> dict[str, str]:
    """Return the name of the model class of each architecture."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore

    names = [f"MODEL_FOR_{name}_MAPPING_NAMES" for name in PREFERRED] + ["MODEL_MAPPING_NAMES"]
    names += [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    classes = {}
    for kind in CONFIG_MAPPING_NAMES:
        for name in names:
            entry = getattr(modeling_auto, name, {}).get(kind)
            if entry is not None:
                classes[kind] = entry if isinstance(entry, str) else entry[0]
                break
    return dict(sorted(classes.items(), key=lambda item: not _generates(item[0])))


def _generates(name: str) -> bool:
    """Return whether an architecture has a class that generates text. These are run first."""
    from transformers.models.auto import modeling_auto

    return any(name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in GENERATING)


def run_architecture(
    name: str, on_built: Callable[[], object] = lambda: None, checks: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Run one architecture in this process, with all checks or those named.

    `on_built` is called after the model is built and before it is attached.
    """
    import torch
    import transformers

    from bench.tried import AttachReport, check_architecture

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    kind = architectures()[name]
    try:
        classes = getattr(transformers, kind), transformers.CONFIG_MAPPING[name]
    except Exception as error:
        return asdict(AttachReport(name, kind, "not built", f"{type(error).__name__}: {error}"[:200]))
    return asdict(check_architecture(name, *classes, on_built, checks))


def _serve(connection: Any) -> None:
    while (name := connection.recv()) is not None:
        connection.send(run_architecture(name, lambda: connection.send("built")))


def _receive(connection: Any, process: Any, max_seconds: float) -> Any:
    """Return the next reply of a process. None if it uses too much processor time before it replies."""
    import psutil

    times = psutil.Process(process.pid).cpu_times
    start = sum(times()[:2])
    while not connection.poll(POLL_SECONDS):
        if process.is_alive() and sum(times()[:2]) - start > max_seconds:
            return None
    return connection.recv()


def run_all(names: list[str], file: Path, max_seconds: float) -> None:
    """Run the architectures without a result in the file, and write each result as soon as it is available."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done_names = {row["name"] for row in read_results(file)}
    remaining = [name for name in names if name not in done_names]
    class_names, spawn = architectures(), multiprocessing.get_context("spawn")
    for start in range(0, len(remaining), ARCHITECTURES_PER_PROCESS):
        process: Any = None
        connection: Any = None
        for name in remaining[start : start + ARCHITECTURES_PER_PROCESS]:
            if process is None:
                connection, child_connection = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(child_connection,))
                process.start()
                child_connection.close()
            connection.send(name)
            result = {"name": name, "model": class_names[name], "verdict": "not built", "reason": "", "findings": {}}
            try:
                while (reply := _receive(connection, process, max_seconds)) == "built":
                    result["verdict"] = "crash"  # until the process reports a result
                result = reply or result | {"verdict": "not built", "reason": f"takes more than {max_seconds:g} s"}
                failed = reply is None
            except EOFError:
                result["reason"], failed = "the process ended", True
            if failed:
                process.kill()
                process = None
            with file.open("a") as out:
                out.write(json.dumps(result) + "\n")
            print(f"{name}: {result['verdict']}", flush=True)
        if process is not None:
            connection.send(None)
            process.join()


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read the last result of each architecture."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return list({result["name"]: result for result in map(json.loads, lines)}.values())


def count_verdicts(results: list[dict[str, Any]]) -> dict[str, int]:
    """Count the verdicts."""
    counter = Counter(result["verdict"] for result in results)
    return {verdict: counter[verdict] for verdict in VERDICTS}


def markdown_table(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    import transformers

    rows = [
        f"transformers {transformers.__version__}, {len(results)} of {len(architectures())} architectures tried:",
        "",
        "| | architectures |",
        "|---|---|",
    ]
    rows += [f"| {verdict} | {count} |" for verdict, count in count_verdicts(results).items()]
    prunable = [result for result in results if result["verdict"] == "right" and "prune" not in result["findings"]]
    layer_prunable = sum("prune layers" not in result["findings"] for result in prunable)
    rows += [f"| right, and heads can be pruned | {len(prunable)}, complete layers of {layer_prunable} |"]
    for verdict in ("right", "looking only", "wrong", "crash"):
        matching = sorted(result["name"] for result in results if result["verdict"] == verdict)
        if matching:
            rows += ["", f"**{verdict.capitalize()}:** {', '.join(matching)}."]
    refused: dict[str, list[str]] = {}
    for result in results:
        if result["verdict"] == "refused":
            refused.setdefault(refusal_category(result["reason"]), []).append(result["name"])
    rows += ["", "| refused because | architectures |", "|---|---|"]
    rows += [f"| {category} | {', '.join(sorted(names))} |" for category, names in sorted(refused.items())]
    not_built: dict[str, list[str]] = {}
    for result in results:
        if result["verdict"] == "not built":
            not_built.setdefault(build_failure_category(result["reason"]), []).append(result["name"])
    rows += ["", "| not built because | architectures |", "|---|---|"]
    rows += [f"| {category} | {', '.join(sorted(names))} |" for category, names in sorted(not_built.items())]
    return "\n".join(rows)


def build_failure_category(message: str) -> str:
    """Return the reason category of an architecture of which no tiny model was built and called."""
    kinds = {
        "library but it was not found": "a library is not installed (timm, natten, torchaudio, detectron2)",
        "weights after shrinking": "the model stays too large with all rules for small sizes",
        "takes more than": "building and calling it takes too long",
        "the process ended": "building or calling it ended the process",
        "what it reads is not known": "its inputs are not known",
        "missing 1 required positional": "it needs inputs that are not made by rule",
        "missing 2 required positional": "it needs inputs that are not made by rule",
        "cannot be `None`": "it needs inputs that are not made by rule",
        "You have to specify": "it needs inputs that are not made by rule",
        "Exactly 1 of": "it needs inputs that are not made by rule",
        "You must specify": "it needs inputs that are not made by rule",
    }
    return next(
        (category for fragment, category in kinds.items() if fragment in message),
        "its configuration or inputs do not fit together after the sizes were reduced by rule",
    )


def column_table(results: list[dict[str, Any]]) -> list[str]:
    """Return one row per architecture that attaches, or that is wrong or crashes."""
    attached = [result for result in results if result["verdict"] == "right"]
    counts = [sum(column_entry(result, column) == "yes" for result in attached) for column in COLUMNS]
    totals = ", ".join(f"{column} {count}" for column, count in zip(COLUMNS, counts, strict=True))
    rows = [
        f"{len(results)} of {len(architectures())} architectures were run with these checks, those that generate text first: "
        f"{', '.join(f'{verdict} {count}' for verdict, count in count_verdicts(results).items())}. Of those that are right: "
        f"{totals}.",
        "",
    ]
    rows += [f"| architecture | attached | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for result in sorted(results, key=lambda result: result["name"]):
        if result["verdict"] in ("right", "looking only", "wrong", "crash"):
            entries = [column_entry(result, column) for column in COLUMNS]
            rows.append(f"| {result['name']} | {result['verdict']} | {' | '.join(entries)} |")
    return rows


def column_entry(result: dict[str, Any], column: str) -> str:
    """Return the entry of one architecture in one column: yes, no, wrong, a dash if it does not apply, or not run.

    Results of earlier versions name their `checks`; newer ones have run all.
    """
    if result["verdict"] not in ("right", "looking only", "wrong"):
        return "–"
    checks = ("prune", COLUMNS[column]) if column == "layer pruned" else (COLUMNS[column],)
    if COLUMNS[column] not in result.get("checks", [COLUMNS[column]]):
        return "not run"
    findings = [result["findings"].get(check, "") for check in checks]
    kind = next((finding.partition(":")[0] for finding in findings if finding), "")
    return {"": "yes", "refused": "no", "not applicable": "–"}.get(kind, kind)


def refusal_category(message: str) -> str:
    """Return the reason category of an unsupported architecture."""
    kinds = {
        "does not use transformers' attention interface": "its attention is not on the interface",
        "None of them can be attached": "it has several towers, and none can be attached by itself",
        "towers": "it has several towers: one of them can be attached",
        "the test call did not run this layer": "it is not on SDPA, and was not reached by the call that was tried",
        "the number of heads was not found": "it does not say how many heads it has",
        "learned attention sinks": "learned sinks",
        "soft-caps its attention scores": "capped scores",
        "are both attention": "several attentions in one block",
        "is cross-attention": "cross-attention to what is outside of it",
        "attaching requires SDPA": "it does not run on SDPA",
    }
    return next(
        (category for fragment, category in kinds.items() if fragment in message), message[:80].replace("|", "/")
    )


def write_table(results: list[dict[str, Any]]) -> None:
    """Write the table to the docs page, between its markers."""
    tables = {(COLUMNS_BEGIN, COLUMNS_END): "\n".join(column_table(results))}
    if len(results) == len(
        architectures()
    ):  # a walk that is not complete does not replace the counts of a complete one
        tables[BEGIN, END] = markdown_table(results)
    page = DOCS_PAGE.read_text()
    for (begin, end), table in tables.items():
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    DOCS_PAGE.write_text(page)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--only", nargs="+", default=[])
    options.add_argument("--checks", nargs="+", help="with --only: names of checks, such as quantized. Default: all")
    options.add_argument("--max-seconds", type=float, default=MAX_SECONDS, help="processor time per architecture")
    options.add_argument("--table", action="store_true", help="only update the table")
    args = options.parse_args()
    if args.only:
        for name in args.only:
            checks = None if args.checks is None else tuple(args.checks)
            print(json.dumps(run_architecture(name, checks=checks), indent=2), flush=True)
        return
    if not args.table:
        run_all(list(architectures()), args.results, args.max_seconds)
    results = read_results(args.results)
    write_table(results)
    print(count_verdicts(results))


if __name__ == "__main__":
    main()
