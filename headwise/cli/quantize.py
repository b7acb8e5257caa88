"""headwise quantize: a model with its weights at few bits."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import CorpusArgument, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    weights: Annotated[
        str, typer.Option(help="Bits: 16, 8, 4, 3 or 2; or by head and part: '*=8,5.1=4,5.2:qk=3,mlp=8,vocabulary=8'.")
    ] = "8",
    group_size: Annotated[int, typer.Option(help="Numbers along the input that share a scale.")] = 32,
    activation_bits: Annotated[int, typer.Option(help="8: round what weights are multiplied by as well.")] = 32,
    basis: Annotated[str, typer.Option(help="given, or balanced: heads in their balanced basis.")] = "given",
    mean_bits: Annotated[
        float | None, typer.Option(help="Share out bits among heads, so many on average; needs --sensitivity.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(help="Or so many megabytes for all heads, scales counted; needs --sensitivity.")
    ] = None,
    sensitivity: Annotated[
        Path | None, typer.Option(help="What headwise sensitivity --out has kept of this model.")
    ] = None,
    choices: Annotated[str, typer.Option(help="Bits to share out, with commas between.")] = "8,4,3,2",
    seeds: Annotated[int, typer.Option(help="Random mixes of equal cost to show the shared out bits beside.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Save the new model in this folder.")] = None,
    max_texts: Annotated[int, typer.Option(help="Judge it on at most so many texts; 0: do not.")] = 16,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bits of every head: .png, .svg, .pdf; or .csv, .json")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Store weights at few bits, by head and part, and say what that saves and costs."""
    from headwise.analysis.ablation.head_outputs import eval_corpus
    from headwise.analysis.ablation.sensitivity import Sensitivity
    from headwise.compression.allocate_bits import allocate_bits, report_allocation
    from headwise.compression.quantization_report import compare_quantized
    from headwise.compression.quantize import quantize
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import show_progress
    from headwise.ui.quantization_tables import draw_bits
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    if mean_bits is not None and megabytes is not None:
        raise HeadwiseError("a budget is of --mean-bits or of --megabytes; give one of them.")
    if (mean_bits is None and megabytes is None) != (sensitivity is None):
        raise HeadwiseError(
            "--mean-bits, or --megabytes, shares out bits by what --sensitivity tells of each head; give both."
        )
    loaded: Any = load(model)
    bits, allocation, allocation_report = _parse_bits(weights), None, None
    non_head_bits: dict[str, int] = {}
    if sensitivity is not None:
        measured_costs = Sensitivity.load(sensitivity)
        allocation = allocate_bits(
            loaded, measured_costs, mean_bits=mean_bits, megabytes=megabytes, choices=_parse_choices(choices)
        )
        non_head_bits = {part: bits if isinstance(bits, int) else bits.get(part, 32) for part in ("mlp", "vocabulary")}
        bits, group_size, basis = (
            allocation.bits_by_head_and_part | non_head_bits,
            measured_costs.metadata["group_size"],
            measured_costs.metadata["basis"],
        )
    small = quantize(loaded, bits, group_size=group_size, activation_bits=activation_bits, basis=basis)  # pyright: ignore
    should_evaluate = max_texts and loaded.tokenizer is not None and (corpus or loaded.spec.kind != "encoder-decoder")
    tokenized = (
        eval_corpus(loaded, Corpus.from_cli_arguments(corpus, None), max_length).first(max_texts)
        if should_evaluate
        else None
    )
    report = compare_quantized(loaded, small, tokenized)
    if allocation is not None and tokenized is not None:
        with show_progress() as progress:
            allocation_report = report_allocation(
                loaded, allocation, tokenized, other_bits=non_head_bits,
                uniform=sorted(allocation.parts_per_bits(), reverse=True), seeds=seeds, basis=basis,  # pyright: ignore
                progress=progress,
            )  # fmt: skip
    if out is not None:
        small.save(out)
    if plot is not None:
        draw_bits(small.spec).save(plot)
    _print_result(report, allocation_report, out, as_json=as_json)


def _print_result(report: Any, allocation_report: Any, out: Path | None, *, as_json: bool) -> None:
    from headwise.ui.quantization_tables import show_allocation_losses, show_quantization

    if as_json:
        extra = {
            "out": None if out is None else str(out),
            "allocation": None if allocation_report is None else allocation_report.to_dict(),
        }
        print(json.dumps(report.to_dict() | extra, indent=2))
        return
    show_quantization(report)
    if allocation_report is not None:
        show_allocation_losses(allocation_report)
    if out is not None:
        print(f"saved in {out}; hw.load({str(out)!r}) brings it back, and every verb takes it: headwise info {out}")


def _parse_choices(text: str) -> list[int]:
    """4,3 as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise HeadwiseError(f"choices are bits with commas between, 4,3; got {text!r}.") from None


def _parse_bits(text: str) -> int | dict[str, int]:
    """4, or *=8,5.1=4 as a mapping."""
    from headwise.errors import HeadwiseError

    try:
        if "=" not in text:
            return int(text)
        pairs = [item.rpartition("=") for item in text.split(",")]
        return {part.strip(): int(bits) for part, _, bits in pairs}
    except ValueError:
        raise HeadwiseError(f"weights are bits, 4, or bits by part, '*=8,5.1=4,mlp=8'; got {text!r}.") from None
