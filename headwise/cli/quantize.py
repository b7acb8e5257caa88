"""headwise quantize: weights stored with fewer bits, per head and part."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import CorpusArgument, DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Bits of all weights (16, 8, 4, 3 or 2), or per head and part: '*=8,5.1=4,5.2:qk=3,mlp=8,vocabulary=8'."
        ),
    ] = "8",
    group_size: Annotated[int, typer.Option(help="Weights along the input dimension that share a scale.")] = 32,
    activation_bits: Annotated[int, typer.Option(help="Bits of the activations: 32, or 8 to quantize them too.")] = 32,
    basis: Annotated[
        str, typer.Option(help="Basis of the head matrices before quantization: given or balanced.")
    ] = "given",
    mean_bits: Annotated[
        float | None,
        typer.Option(help="Allocate bits to heads with this mean number of bits per weight. Requires --sensitivity."),
    ] = None,
    megabytes: Annotated[
        float | None,
        typer.Option(
            help="Allocate bits to heads within this many megabytes, scales included. Requires --sensitivity."
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None, typer.Option(help="File written by headwise sensitivity --out for this model.")
    ] = None,
    choices: Annotated[str, typer.Option(help="Bits that the allocation may use, comma-separated.")] = "8,4,3,2",
    seeds: Annotated[int, typer.Option(help="Number of random allocations of equal size to compare with.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Save the quantized model in this folder.")] = None,
    max_texts: Annotated[int, typer.Option(help="Maximum number of texts to evaluate on. 0: no evaluation.")] = 16,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per chunk of plain text. Default: 256, or the context of the model."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a figure of the bits per head (.png, .svg, .pdf) or its data (.csv, .json)."),
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize weights, per head and part if wanted, and show the memory saved and the increase of the loss."""
    from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
    from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
    from headwise.compression.allocate_bits import allocate_bits, report_allocation
    from headwise.compression.quantize import quantize
    from headwise.compression.quantized_size_and_loss import compare_size_and_loss
    from headwise.errors import ArgumentError
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.progress import show_progress
    from headwise.ui.quantization_tables_and_figures import draw_bits
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    if mean_bits is not None and megabytes is not None:
        raise ArgumentError("--mean-bits, --megabytes: these options exclude each other. Use one of them.")
    if (mean_bits is None and megabytes is None) != (sensitivity is None):
        raise ArgumentError(
            "--sensitivity: bits are allocated from a sensitivity file and a budget. Use --sensitivity FILE together with "
            "--mean-bits or --megabytes."
        )
    loaded: Any = load(model, device=device, dtype=dtype)
    bits, allocation, allocation_report = _parse_bits(weights), None, None
    non_head_bits: dict[str, int] = {}
    if sensitivity is not None:
        measured_costs = SensitivityResult.load(sensitivity)
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
    report = compare_size_and_loss(loaded, small, tokenized)
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
    from headwise.ui.quantization_tables_and_figures import show_allocation_losses, show_quantization

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
        print(f"Saved in {out}. Load it with hw.load({str(out)!r}); every command accepts it: headwise info {out}")


def _parse_choices(text: str) -> list[int]:
    """Parse a list such as `4,3`."""
    from headwise.errors import ArgumentError

    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise ArgumentError(
            f"--choices: not a comma-separated list of integers. Got {text!r}. Use, for example, 4,3."
        ) from None


def _parse_bits(text: str) -> int | dict[str, int]:
    """Parse `4`, or a list such as `*=8,5.1=4`."""
    from headwise.errors import ArgumentError

    try:
        if "=" not in text:
            return int(text)
        pairs = [item.rpartition("=") for item in text.split(",")]
        return {part.strip(): int(bits) for part, _, bits in pairs}
    except ValueError:
        raise ArgumentError(
            f"--weights: not a number of bits. Got {text!r}. Use, for example, 4, or bits per part: '*=8,5.1=4,mlp=8'."
        ) from None
