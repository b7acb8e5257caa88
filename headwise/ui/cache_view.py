"""Caches by head, in the terminal and as a picture: what key heads keep, what that saves and costs."""

from rich.console import Console

from headwise.compression.cache_study import CacheReport, CacheResult
from headwise.compression.plan import Plan
from headwise.compression.streaming_selection import STREAM_WAYS
from headwise.errors import HeadwiseError
from headwise.ui.figures.figure_io import INK, Drawing
from headwise.ui.figures.tradeoff import draw_tradeoff
from headwise.ui.tables import make_table

MB = 1e6


def show_cache_plan(plan: Plan, console: Console | None = None) -> None:
    """Print which key heads keep less, then the layers as a map: what each key head keeps, and its score."""
    console = console or Console()
    less = sum(len(rule.heads) for rule in plan.cache)
    how = "named" if plan.cache_by == "named" else f"chosen by {plan.cache_by}"
    console.print(f"{less} of {len(plan.spec.key_heads)} key heads keep less, {how}.", highlight=False)
    if plan.cache_on:
        console.print(f"  on {plan.cache_on}", highlight=False)
    signs = {rule.keeps: "sabcdefg"[number % 8] for number, rule in enumerate(plan.cache)}
    keeps = {head: signs[rule.keeps] for rule in plan.cache for head in rule.heads}
    for rule in plan.cache:
        console.print(f"  {signs[rule.keeps]}  {rule.keeps}: {len(rule.heads)} key heads", highlight=False)
    console.print("  ·  everything", highlight=False)
    cells = []
    for site in plan.spec.sites:
        heads = [site.head(number) for number in plan.spec.attention_at(site).kv_ids]
        cells.append(f"{site!s:>3} {''.join(keeps.get(str(head), '·') for head in heads)}")
    console.print("Layer by layer, a sign for each key head:", highlight=False)
    console.print("  ".join(cell.replace(" ", "\u00a0") for cell in cells), highlight=False)
    score = STREAM_WAYS[plan.cache_by].score if plan.cache_by in STREAM_WAYS else ""
    if score and plan.cache_scores:
        ranked = sorted(zip(map(str, plan.spec.key_heads), plan.cache_scores, strict=True), key=lambda one: one[1])
        console.print(f"Least and most ({score}):", highlight=False)
        for some in (ranked[:3], ranked[-3:]):
            console.print("  ".join(f"{head}\u00a0{value:.3g}" for head, value in some), highlight=False)


def show_cache_report(report: CacheReport, console: Console | None = None) -> None:
    """Print bytes, then losses, then pass keys."""
    console = console or Console()
    bytes_now = f"{_size(report.bytes_before)} → {_size(report.bytes_after)}"
    told = f"A cache of {report.length} tokens: {bytes_now}, {report.times:.2f}× fewer bytes."
    console.print(told, highlight=False)
    behind = f", tokens behind the first {report.past}" if report.past else ""
    title = f"What it costs: loss, {report.metric}, {report.texts} texts{behind}, with 95 % intervals"
    console.print(make_table(title, ["", "mean", "low", "high"], report.losses()))
    if report.passkeys is not None:
        kept, found = report.passkeys
        console.print(
            f"Pass keys at {report.length} tokens: {kept} kept of {found} the whole cache finds.", highlight=False
        )


def show_cache_curve(result: CacheResult, console: Console | None = None) -> None:
    """Print every plan of the curve."""
    rows = [
        [p.line, p.streaming, p.bits, round(p.bytes / MB, 2), p.more.mean, p.more.low, p.more.high]
        for p in result.curve
    ]
    columns = ["by", "streaming", "bits", "MB", "loss gained", "low", "high"]
    (console or Console()).print(make_table("Bytes of a cache against loss", columns, rows))


def _size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / MB:.1f} MB" if count >= MB else f"{count / 1e3:.1f} kB"


def draw_caches(result: CacheResult) -> Drawing:
    """Loss above the whole cache's against megabytes of the cache, a line for each way to choose; bands are intervals."""
    if not result.curve:
        raise HeadwiseError("there is no curve to draw; say which shares stream: shares=(0.25, 0.5, 1).")
    rows = [
        {"line": p.line, "x": p.bytes / MB, "mean": p.more.mean, "low": p.more.low, "high": p.more.high,
         "streaming": p.streaming, "bits": p.bits}
        for p in result.curve
    ]  # fmt: skip
    told = "bands: 95 % over texts; for random the least and most"
    if result.report is not None:
        r = result.report
        rows.append(
            {
                "line": "whole",
                "x": r.bytes_before / MB,
                "mean": 0.0,
                "low": 0.0,
                "high": 0.0,
                "streaming": 0,
                "bits": 32,
            }
        )
        told = f"{r.texts} texts, a cache of {r.length} tokens; {told}"
    drawn = draw_tradeoff(rows, "megabytes of the cache", "loss gained, nats a token", told)
    drawn.figure.axes[0].axhline(0, color=INK, linewidth=0.6)
    return drawn
