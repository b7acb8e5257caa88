"""Local tasks of the lm-evaluation-harness: minimal pairs that come with the package, and the perplexity of a text file."""

import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError

MINIMAL_PAIRS = "minimal_pairs"
# A level-1 heading of WikiText: a line " = Title = ".
WIKITEXT_HEADING = re.compile(r"^ = [^=].* = $", re.MULTILINE)


def minimal_pairs() -> list[dict[str, str]]:
    """Return the minimal pairs: a phenomenon, a grammatical sentence, and the same sentence with an error.

    >>> minimal_pairs()[0]["good"]
    'The baker sells fresh bread every morning.'
    """
    text = (files("headwise.analysis.evaluation") / "minimal_pairs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def local_task(task: str) -> dict[str, Any] | None:
    """Return the configuration of a local task. None if the name belongs to the harness.

    Args:
        task: `minimal_pairs`, or the path of a text file (.txt).
    """
    if task == MINIMAL_PAIRS:
        return _task_config(
            MINIMAL_PAIRS, minimal_pairs(), output_type="multiple_choice", doc_to_text="", doc_to_target=0,
            doc_to_choice="{{[good, bad]}}", target_delimiter="",
            metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        )  # fmt: skip
    if not task.endswith(".txt"):
        return None
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    pages, is_wikitext = read_articles(task)
    return _task_config(
        Path(task).stem, [{"page": page} for page in pages], output_type="loglikelihood_rolling", doc_to_text="",
        doc_to_target=wikitext_detokenizer if is_wikitext else "{{page}}", process_results=process_results,
        metric_list=[{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    )  # fmt: skip


def read_articles(path: str | Path) -> tuple[list[str], bool]:
    """Read the documents of a text file: the articles of a file in WikiText format, otherwise the paragraphs.

    Args:
        path: The file. Paragraphs are separated by blank lines.

    Returns:
        The documents, and whether the file is in WikiText format.

    Raises:
        ArgumentError: If the file cannot be read or is empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"tasks: {path} could not be read ({error}). Pass a text file in UTF-8.") from None
    starts = [match.start() for match in WIKITEXT_HEADING.finditer(text)]
    if starts:
        ends = [*starts[1:], len(text)]
        documents = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    else:
        documents = re.split(r"\n\s*\n", text)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ArgumentError(f"tasks: {path} has no text. Pass a file with text.")
    return documents, bool(starts)


def _task_config(name: str, rows: Iterable[dict[str, Any]], **config: Any) -> dict[str, Any]:
    """Return the configuration of a task on rows in memory."""
    from datasets import Dataset, DatasetDict

    data = DatasetDict({"test": Dataset.from_list(list(rows))})
    return {"task": name, "custom_dataset": lambda **_: data, "test_split": "test", "num_fewshot": 0, **config}
