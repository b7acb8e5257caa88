"""Terminal tables and figures of KV caches per head: cache policies, memory and cost in loss."""

from rich.console import Console

from headwise.compression.cache_study import CacheReport, CacheStudyResult
from headwise.compression.streaming_selection import STREAM_RANKERS
from headwise.errors import ArgumentError
from headwise.spec import Plan
from headwise.ui.figures.figure_with_data import TEXT_COLOR, FigureWithData
from headwise.ui.figures.tradeoff_curves import draw_tradeoff
from headwise.ui.terminal_table import make_table

MB = 1e6


def show_cache_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the KV heads with a limited cache, a map of all layers, and the lowest and highest scores."""
    console = console or Console()
    num_limited = sum(len(rule.heads) for rule in plan.cache)
    selection = "named" if plan.cache_ranking == "named" else f"selected by {plan.cache_ranking}"
    console.print(
        f"{num_limited} of {len(plan.spec.cached_kv_head_addresses)} KV heads have a limited cache, {selection}.",
        highlight=False,
    )
    if plan.cache_corpus:
        console.print(f"  on {plan.cache_corpus}", highlight=False)
    symbols = {rule.policy: "sabcdefg"[index % 8] for index, rule in enumerate(plan.cache)}
    symbol_of_head = {head: symbols[rule.policy] for rule in plan.cache for head in rule.heads}
    for rule in plan.cache:
        console.print(f"  {symbols[rule.policy]}  {rule.policy}: {len(rule.heads)} KV heads", highlight=False)
    console.print("  ·  full cache", highlight=False)
    cells = []
    for layer_address in plan.spec.layer_addresses:
        heads = [layer_address.head_address(index) for index in plan.spec.attention_at(layer_address).kv_head_ids]
        cells.append(f"{layer_address!s:>3} {''.join(symbol_of_head.get(str(head), '·') for head in heads)}")
    console.print("Layers, one symbol per KV head:", highlight=False)
    console.print("  ".join(cell.replace(" ", "\u00a0") for cell in cells), highlight=False)
    score = STREAM_RANKERS[plan.cache_ranking].score_description if plan.cache_ranking in STREAM_RANKERS else ""
    if score and plan.cache_scores:
        ranked = sorted(
            zip(map(str, plan.spec.cached_kv_head_addresses), plan.cache_scores, strict=True), key=lambda pair: pair[1]
        )
        console.print(f"Lowest and highest scores ({score}):", highlight=False)
        for group in (ranked[:3], ranked[-3:]):
            console.print("  ".join(f"{head}\u00a0{value:.3g}" for head, value in group), highlight=False)


def show_cache_report(report: CacheReport, console: Console | None = None) -> None:
    """Print the bytes, the losses and the passkey results."""
    console = console or Console()
    sizes = f"{_format_bytes(report.bytes_before)} → {_format_bytes(report.bytes_after)}"
    message = f"Cache of {report.length} tokens: {sizes}, {report.compression_ratio:.2f}× smaller."
    console.print(message, highlight=False)
    position_note = f", tokens after position {report.skip_tokens}" if report.skip_tokens else ""
    title = f"Loss ({report.metric}) on {report.texts} texts{position_note}, with 95% CI"
    console.print(make_table(title, ["", "mean", "low", "high"], report.loss_rows()))
    if report.passkeys is not None:
        still_found, full_found = report.passkeys
        console.print(
            f"Passkeys at {report.length} tokens: {still_found} of the {full_found} that the full cache retrieves.",
            highlight=False,
        )


def show_cache_curve(result: CacheStudyResult, console: Console | None = None) -> None:
    """Print every point of the curve."""
    rows = [
        [
            p.label,
            p.streaming_heads,
            p.bits,
            round(p.cache_bytes / MB, 2),
            p.loss_increase.mean,
            p.loss_increase.low,
            p.loss_increase.high,
        ]
        for p in result.curve
    ]
    columns = ["ranking", "streaming", "bits", "MB", "loss increase", "low", "high"]
    (console or Console()).print(make_table("Cache size and loss increase, with 95% CI", columns, rows))


def _format_bytes(count: int) -> str:
    """Format a number of bytes in kB or MB."""
    return f"{count / MB:.1f} MB" if count >= MB else f"{count / 1e3:.1f} kB"


def plot_cache_curve(result: CacheStudyResult) -> FigureWithData:
    """Draw the loss increase over cache size, one line per ranking method, with 95% intervals."""
    if not result.curve:
        raise ArgumentError(
            "result: has no curve to draw. Set the fractions of streaming KV heads, for example fractions=(0.25, 0.5, 1)."
        )
    rows = [
        {"line": p.label, "x": p.cache_bytes / MB, "mean": p.loss_increase.mean, "low": p.loss_increase.low,
         "high": p.loss_increase.high,
         "streaming": p.streaming_heads, "bits": p.bits}
        for p in result.curve
    ]  # fmt: skip
    title = "bands: 95% CI over texts; for random, minimum and maximum"
    if result.report is not None:
        r = result.report
        rows.append(
            {
                "line": "full cache",
                "x": r.bytes_before / MB,
                "mean": 0.0,
                "low": 0.0,
                "high": 0.0,
                "streaming": 0,
                "bits": 32,
            }
        )
        title = f"{r.texts} texts, cache of {r.length} tokens; {title}"
    figure_result = draw_tradeoff(rows, "cache size, MB", "loss increase, nats per token", title)
    figure_result.figure.axes[0].axhline(0, color=TEXT_COLOR, linewidth=0.6)
    return figure_result
