"""headwise demo: real models first, then heads being born."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import JsonOption

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.spec import Plan
    from headwise.ui.demo_pretrained import Demo
    from headwise.ui.demo_training import DemoTrainResult

TRAINING_MINUTES = 4  # of the training, on two idle cores


def run(
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("headwise-demo"),
    train: Annotated[bool, typer.Option("--train", help="Only the second half: train, and watch heads being born.")] = (
        False
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Little of everything: to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="The seed of the training.", min=0, max=2**31 - 1)] = 0,
    as_json: JsonOption = False,
) -> None:
    """See real models write, look and lose heads, three minutes; then train one and watch its heads being born."""
    from rich.console import Console

    console, result = Console(quiet=as_json), {}
    if not train:
        result |= _pretrained_demo(console, out, quick)
    try:
        result |= _training_demo(console, out, quick, seed)
    except KeyboardInterrupt:
        console.print("The training was left out; nothing else is lost. Later: headwise demo --train", highlight=False)
        result |= {"training": None}
    if as_json:
        print(json.dumps(result, indent=2))


def _pretrained_demo(console: "Console", out: Path, quick: bool) -> dict[str, Any]:
    """SmolLM2 writes on and is seen doing it; MiniLM's heads; heads cut from SmolLM2."""
    from headwise.errors import HeadwiseError
    from headwise.io.resolve_path import install_commands
    from headwise.ui.demo_pretrained import DECODER, ENCODER, PROMPT, SENTENCE, WORD, Demo
    from headwise.ui.head_tables import show_profile, show_summary
    from headwise.ui.progress import show_progress
    from headwise.ui.prune_tables import show_prune_plan, show_prune_report
    from headwise.ui.terminal_table import make_table

    commands = install_commands((DECODER, ENCODER))
    if commands:
        raise HeadwiseError(
            f"the demo shows real models, which are packages of their own; run {' && '.join(commands)}, or leave them out: "
            "headwise demo --train"
        )
    demo, result = Demo(out, quick), {}
    timer = _StageTimer(console)
    timer.print_stage(1, f"{DECODER}, a model of 135 million parameters, writes on from {PROMPT!r}")
    result["text"] = demo.generate(
        lambda piece: console.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
    )
    console.print()
    timer.print_stage(2, f"where {WORD!r} looks in: {SENTENCE}")
    edges = demo.attention_view().top_edges(6, WORD)
    rows = [(edge.head, edge.attended, edge.weight) for edge in edges]
    console.print(make_table("Of 270 heads, those that look hardest", ["head", "looks at", "weight"], rows))
    result["edges"] = [edge._asdict() for edge in edges]
    timer.print_stage(3, f"what each of the heads of {ENCODER} does, and how sure that is")
    with show_progress() as progress:
        profile, best_head = demo.profile_encoder(progress)
    show_profile(profile, {str(address) for address in profile.addresses}, console)
    show_summary(profile, best_head, console=console)
    report = demo.folder / ENCODER / "report.html"
    console.print(f"The report, to open in a browser: {report}", highlight=False, soft_wrap=True)
    _open_in_browser(report)
    result |= {
        "roles": {role: [str(head) for head in heads] for role, heads in profile.heads_by_role().items()},
        "report": str(report),
    }
    timer.print_stage(
        4, f"heads cut from {DECODER}: those that are worth least, beside as many drawn by chance; then healed"
    )
    with show_progress() as progress:
        pruned = demo.prune(progress)
    show_prune_plan(pruned.plan, console)
    show_prune_report(pruned.report, console)
    apply_command = f"headwise prune {DECODER} --plan {pruned.plan_path} --out smaller"
    console.print(f"The plan is in {pruned.plan_path}: {apply_command}", highlight=False, soft_wrap=True)
    result |= _cost_demo(timer, demo, pruned.plan)
    return result | {
        "pruned_heads": list(pruned.plan.pruned_heads),
        "cost": pruned.report.to_dict(),
        "seconds": timer.elapsed(),
    }


def _cost_demo(timer: "_StageTimer", demo: "Demo", plan: "Plan") -> dict[str, Any]:
    """What single heads would cost at few bits, and the cut model in llama.cpp."""
    from headwise.ui.demo_pretrained import (
        BITS,
        DECODER,
        MISSING_MESSAGE,
        PROMPT,
        compare_with_llama_cpp,
        demo_head_cache_rows,
        measure_demo_head_sensitivity,
    )
    from headwise.ui.progress import show_progress
    from headwise.ui.terminal_table import make_table

    console = timer.console
    timer.print_stage(5, f"what two heads of {DECODER} cost, and would cost at {BITS[0]} bits, each alone")
    with show_progress() as progress:
        sensitivity = measure_demo_head_sensitivity(demo.decoder, min(8, demo.options.texts), progress)
    rows = [
        [cost.heads, cost.part, cost.loss_increase, f"{cost.low:.4f} to {cost.high:.4f}", cost.kl_divergence]
        for cost in sensitivity
    ]
    columns = ["heads", "part", "loss gained", "95 % CI", "drift"]
    console.print(
        make_table(f"At {BITS[0]} bits, {sensitivity.metric}, {len(sensitivity.counts)} texts", columns, rows)
    )
    cache_table = [[*row[:3], f"{row[3]:.1f}"] for row in demo_head_cache_rows(demo.decoder)]
    console.print(make_table("Keys and values of 4,096 tokens", ["head", "key head", "shared with", "MB"], cache_table))
    timer.print_stage(6, "the cut model in another engine, llama.cpp, at 8 bits")
    sample = compare_with_llama_cpp(demo.decoder, plan, demo.folder / "elsewhere", PROMPT, demo.options.max_new_tokens)
    if sample is None:
        console.print(MISSING_MESSAGE, highlight=False, soft_wrap=True)
        return {"llama_cpp": None}
    console.print(f"llama.cpp: {sample.engine_text}", highlight=False, markup=False)
    console.print(f"here:      {sample.native_text}", highlight=False, markup=False)
    size = sample.file.stat().st_size / 1e6
    console.print(
        f"The first {sample.num_equal_tokens} tokens are the same; {sample.file} has {size:.0f} MB.",
        highlight=False,
        soft_wrap=True,
    )
    return {
        "llama_cpp": {"file": str(sample.file), "text": sample.engine_text, "num_equal_tokens": sample.num_equal_tokens}
    }


def _training_demo(console: "Console", out: Path, quick: bool, seed: int) -> dict[str, Any]:
    """The second half."""
    from headwise.ui.demo_training import run_train_prune_demo
    from headwise.ui.progress import show_progress

    console.print()
    console.print(
        f"Next: a decoder of four layers learns a small language while its heads are watched; about "
        f"{TRAINING_MINUTES} minutes. "
        "Ctrl-C leaves it out, and nothing is lost.",
        highlight=False,
    )
    with show_progress() as progress:
        result = run_train_prune_demo(out / "trained", quick=quick, seed=seed, progress=progress)
    _show_training(console, result)
    return {"training": result.to_dict()}


def _show_training(console: "Console", result: "DemoTrainResult") -> None:
    from headwise.ui.head_tables import show_profile
    from headwise.ui.prune_tables import show_prune_plan, show_prune_report
    from headwise.ui.terminal_table import make_table

    title = f"Trained {result.trained.step:,} steps in {result.trained.seconds:.0f} s; what it knows of held-out texts:"
    console.print(make_table(title, ["probe", "questions", "right", "chance", "bigram"], result.probe_scores))
    console.print(make_table("Heads being born", ["step", "head", "what it does", "share"], result.emergence()))
    show_profile(result.profile, {str(address) for address in result.profile.addresses}, console)
    show_prune_plan(result.plan, console)
    show_prune_report(result.report, console)
    folder = result.folder
    for line in (
        f"Written: {', '.join(result.files)}", f"Open {folder / 'report.html'} in a browser.",
        f"To type sentences and switch heads off: headwise view {folder / 'model'} --profile {folder / 'profile.npz'}",
    ):  # fmt: skip
        console.print(line, highlight=False, soft_wrap=True)
    _open_in_browser(folder / "report.html")


class _StageTimer:
    """Headings with the time that has passed."""

    def __init__(self, console: "Console") -> None:
        self.console, self.start = console, time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def print_stage(self, stage: int, title: str) -> None:
        """What comes now."""
        self.console.print(
            f"\n{stage} of 6, after {self.elapsed():.0f} s: {title}", style="bold", highlight=False, markup=False
        )


def _open_in_browser(page: Path) -> None:
    """Show a page to a person who sits in front of this machine."""
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_display and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
