"""headwise describe: a summary of one head."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import (
    CorpusArgument,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    NoStoreOption,
)

if TYPE_CHECKING:
    from headwise.ui.head_summary import HeadDescription
    from headwise.ui.head_summary_printer import HeadSummaryPrinter
    from headwise.ui.stored_head_descriptions import HeadDescriptionStore


def run(
    model: ModelArgument,
    head: Annotated[
        str,
        typer.Argument(help="Address of the head, layer and number: 5.1.", autocompletion=completion.complete_heads),
    ],
    corpus: CorpusArgument = None,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Also test roles that have prompts of their own, such as name mover and copy suppression."
        ),
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also print all metrics and examples.")] = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    no_store: NoStoreOption = False,
    as_json: JsonOption = False,
) -> None:
    """Summarize one head: its roles with evidence, attention sinks, output, cost, and the heads it works with."""
    from rich.console import Console

    from headwise.io.result_store import ResultStore
    from headwise.spec import Address
    from headwise.ui.head_summary_printer import HeadSummaryPrinter
    from headwise.ui.stored_head_descriptions import HeadDescriptionStore

    corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    printer, stored = HeadSummaryPrinter(Console(quiet=as_json)), None
    if Path(model).is_file() and model.endswith(".npz"):
        description = _describe_saved_profile(model, head)
        printer.print_lines(description.lines)
    else:
        head = str(Address.parse(head))
        if not no_store:
            settings = {"prompts": prompts, "device": device, "dtype": dtype}
            stored = HeadDescriptionStore(ResultStore(), model, head, corpus_input, settings)
            known_description = None if show_all else stored.read()
            if known_description is not None:
                printer.print_lines(known_description.lines)
                printer.print_errors(known_description.errors)
                if as_json:
                    print(json.dumps(known_description.data, indent=2))
                return
        steps = partial(_iter_partial_descriptions, model, device, dtype, head, corpus_input, prompts=prompts)
        description = _measure(steps, stored, printer)
    printer.print_errors(description.errors)
    if as_json:
        print(json.dumps(_to_dict(description), indent=2))
    elif show_all:
        _show_all(description)


def _describe_saved_profile(path: str, head: str) -> "HeadDescription":
    from headwise.analysis.head_facts import HeadFacts
    from headwise.analysis.roles.profile_result import Profile
    from headwise.compression.head_compression_cost import HeadCompressionCost
    from headwise.ui.head_summary import HeadDescription

    profile = Profile.load(path)
    return HeadDescription(profile, profile[head], HeadFacts(), HeadCompressionCost())


def _iter_partial_descriptions(
    model: str, device: str, dtype: str | None, head: str, corpus: Any, *, prompts: bool, **options: Any
) -> "Iterator[HeadDescription]":
    """Load the model and measure the head."""
    from headwise.ui.head_summary import describe_steps
    from headwise.weights import load

    return describe_steps(load(model, device=device, dtype=dtype), head, corpus, prompts=prompts, **options)


def _measure(
    steps: "Callable[..., Iterator[HeadDescription]]",
    stored: "HeadDescriptionStore | None",
    printer: "HeadSummaryPrinter",
) -> "HeadDescription":
    """Measure the head and print each sentence as soon as it is known."""
    from headwise.ui.progress import show_progress
    from headwise.ui.stored_head_descriptions import StoredHeadDescription

    description = None
    with show_progress() as progress:
        for description in steps(store=None if stored is None else stored.store, progress=progress):
            printer.print_lines(description.lines)
    assert description is not None
    if stored is not None:
        stored.write(StoredHeadDescription(printer.lines, list(description.errors), _to_dict(description)))
    return description


def _to_dict(description: "HeadDescription") -> dict[str, Any]:
    """Return the description for JSON."""
    assert description.head is not None
    ov_summary = description.facts.ov_summary
    effects = () if ov_summary is None else ov_summary.token_effects
    token_effects = [item._asdict() for item in effects] or None
    copying_score = None if ov_summary is None or math.isnan(ov_summary.copying) else ov_summary.copying
    lines = [line._asdict() for line in description.lines]
    effect = None if ov_summary is None or ov_summary.effect is None else asdict(ov_summary.effect)
    more = {"summary": lines, "direct_effect": effect, "copying": copying_score, "promotes": token_effects}
    return {**description.head.to_dict(), **more}


def _show_all(description: "HeadDescription") -> None:
    from headwise.ui.print_profile import show_head

    assert description.profile is not None
    assert description.head is not None
    show_head(description.profile, description.head, description.facts)
