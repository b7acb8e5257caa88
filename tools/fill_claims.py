"""Write the results of the seeds from 500 into the pages of the claims: python tools/fill_claims.py [--check].

The figures are in docs/research/data/claims-seed-*.json. The summary table, the table of all claims, and a section and a
picture on the page of each claim are written. `--check` writes nothing and fails if a page differs.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from headwise.experiments.registry import all_claims
from headwise.experiments.run_claims import ClaimResult
from headwise.experiments.seed_runs import judge_seeds
from headwise.ui.figures.figure_with_data import LINE_COLORS, MUTED_COLOR, FigureWithData, make_figure, style_axes

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- seeds from 500 -->", "<!-- end of seeds from 500 -->"

# Verdicts that do not come from the seeds from 500.
EARLIER = {
    "holds": (1, 7, 10, 14, 17),
    "does not hold": (),
    "true by construction": (3, 4, 21, 25),
    "depends on a named factor": (2, 8, 19, 22),
    "undecided": (5, 6, 9, 11, 12, 13, 15, 16, 18, 20, 23, 24, 26, 27),
}

# Result of the primary quantity in one sentence. {ci} is the interval, {threshold} the threshold.
SENTENCES = {
    "one-head-blends": (".2%", "With one head, all four lookups are correct at once at {mean} of the positions"),
    "specialization": (".0%", "{mean} of the heads of a trained model have a role"),
    "input-slices": (
        ".3f",
        "At equal parameters, heads that read one slice of the embedding each cost {mean} nats per token",
    ),
    "output-mixing": (
        ".0%",
        "Without W_O, the effects of two heads deviate from their sum by {mean} of the single effects",
    ),
    "pruning": (".1%", "{mean} of the heads can be pruned for less than 1% more loss"),
    "depth": (".3f", "Models with fewer heads end {mean} nats per token above models with one layer less"),
    "gradients": (".2f", "At the end of training, the W_V W_O gradients of different heads have a cosine of {mean}"),
    "stability": (".2f", "At high learning rates, 8 heads lose {mean} nats per token less than one head"),
    "quantization": (
        ".2f",
        "The costs of quantizing one head have a standard deviation over heads of {mean} times their mean",
    ),
    "distillation": (".3f", "Students of attention maps end {mean} nats per token above students of logits"),
}

# Axis label of the primary quantity. The names in the data files are kept as they were when the seeds were measured.
LABELS = {
    "one-head-blends": "fraction of positions at which one head has all four lookups right",
    "specialization": "fraction of the heads with a role",
    "input-slices": "loss added by slices at equal parameters (nats per token)",
    "output-mixing": "deviation of two heads' effects from their sum, relative to single effects",
    "pruning": "fraction of the heads that can be pruned for less than 1% more loss",
    "depth": "loss with fewer heads − loss with one layer less (nats per token)",
    "gradients": "cosine of W_V W_O gradients of different heads, end of training",
    "stability": "loss of one head − loss of 8 heads, high learning rates (nats per token)",
    "quantization": "standard deviation of the heads' quantization costs, relative to their mean",
    "distillation": "loss of students of maps − loss of students of logits (nats per token)",
}

# Names in the data files that a verdict repeats, and their words on the pages.
READABLE = {
    "little models": "small models",
    "look-ups": "lookups",
    "different of its weights at": "different for all weights at",
    "of what it moves at": "for W_V W_O at",
    "shown: ": "shown are ",
    "open: ": "open are ",
    "undecided: ": "undecided; ",
    "depends: on": "depends on",
}


def is_final(result: ClaimResult) -> bool:
    """Return whether all planned seeds are finished."""
    assert result.claim.primary is not None
    return len(result.seeds) >= result.claim.primary.planned_seeds


def sentence_of(result: ClaimResult) -> str:
    """Return the result of the primary quantity in one sentence."""
    primary = result.claim.primary
    assert primary is not None
    number, sentence = SENTENCES[result.claim.name]
    mean, low, high = (format(x, number) for x in (result.statistics[primary.key].mean, *primary_interval(result)))
    threshold = format(primary.threshold, ".0%" if number.endswith("%") else "g")
    return f"{sentence.format(mean=mean)} (95% CI {low} to {high}; threshold {threshold})."


def primary_interval(result: ClaimResult) -> tuple[float, float]:
    """Return the 95% interval of the primary quantity."""
    primary = result.claim.primary
    assert primary is not None
    statistic = result.statistics[primary.key].at_confidence_level(0.95)
    assert statistic.low is not None
    assert statistic.high is not None
    return statistic.low, statistic.high


def seeds_text(result: ClaimResult) -> str:
    """Name the seeds as ranges: "500–511, 520"."""
    ranges: list[list[int]] = []
    for seed in result.seeds:
        if ranges and seed == ranges[-1][1] + 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges)


def stacked(values: Sequence[float]) -> list[float]:
    """Return a height for each dot, so that dots within 1.5% of the range of the picture do not hide each other."""
    width = 0.015 * (max(values) - min(values)) or 1.0
    placed: dict[int, int] = {}
    heights = []
    for value in values:
        column = round(value / width)
        heights.append(0.09 * placed.get(column, 0))
        placed[column] = placed.get(column, 0) + 1
    return heights


def draw_seeds(result: ClaimResult) -> FigureWithData:
    """Plot the primary quantity: one dot per seed, the mean with its interval, and the threshold."""
    primary = result.claim.primary
    assert primary is not None
    statistic, (low, high) = result.statistics[primary.key], primary_interval(result)
    figure = make_figure(5.2, 2.6)
    axes = figure.subplots()
    style_axes(axes)
    heights = stacked([*statistic.values, primary.threshold])[:-1]
    side = f"claim: {primary.direction} {primary.threshold:g}"
    axes.axvline(primary.threshold, color=LINE_COLORS[1], linestyle="--", label=side)
    axes.plot(statistic.values, heights, "o", color=MUTED_COLOR, alpha=0.6, markersize=4.5, label="one seed")
    axes.plot([low, high], [2, 2], color=LINE_COLORS[0], linewidth=3, label="95% CI of the mean")
    axes.plot([statistic.mean], [2], "o", color=LINE_COLORS[0], label="mean")
    axes.set_ylim(-0.4, 2.5)
    axes.set_yticks([])
    axes.set_xlabel(LABELS[result.claim.name], fontsize=9)
    preliminary = "" if is_final(result) else "preliminary: "
    axes.set_title(f"{result.claim.name}: {preliminary}{result.verdict.word}, {len(result.seeds)} seeds", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=4, columnspacing=1.2, frameon=False)
    rows = [{"seed": seed, "value": value} for seed, value in zip(result.seeds, statistic.values, strict=True)]
    return FigureWithData(figure, rows)


def page_of(result: ClaimResult) -> Path:
    """Return the page of a claim."""
    return DOCS / "research" / "claims" / f"{result.claim.number:02}-{result.claim.name}.md"


def picture_of(result: ClaimResult) -> Path:
    """Return the picture of the seeds of a claim."""
    return DOCS / "pictures" / "claims" / f"{result.claim.number:02}-{result.claim.name}-seeds.svg"


def section(result: ClaimResult) -> str:
    """Return the section of a claim's page, between the marks."""
    primary = result.claim.primary
    assert primary is not None
    if is_final(result):
        seeds = f"{len(result.seeds)} seeds, {seeds_text(result)}; planned {primary.planned_seeds}"
        verdict = f"**Verdict: {result.verdict.word}** ({seeds})."
    else:
        verdict = (
            f"**Preliminary: {result.verdict.word}** ({len(result.seeds)} of {primary.planned_seeds} planned seeds: "
            f"{seeds_text(result)}). The claim is judged once all are finished."
        )
    picture = f"../../pictures/claims/{picture_of(result).name}"
    secondary = ""
    if "Secondary quantities: " in result.verdict.detail:
        earlier = result.verdict.detail.split("Secondary quantities: ")[1]
        for name, words in READABLE.items():
            earlier = earlier.replace(name, words)
        secondary = f"The rule of the earlier run, with these seeds: {earlier}."
    parts = [BEGIN, f"{verdict} {sentence_of(result)}", f"![{result.claim.name}, seeds]({picture})", secondary, END]
    return "\n\n".join(part for part in parts if part)


def fill_page(text: str, result: ClaimResult) -> str:
    """Return the page of a claim with its section, after the statement."""
    if BEGIN in text:
        return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section(result), text, flags=re.DOTALL)
    return text.replace("\n\n**Verdict with seeds 100", f"\n\n{section(result)}\n\n**Verdict with seeds 100", 1)


def fill_summary(text: str, final: dict[int, ClaimResult]) -> str:
    """Return the summary page with the table of verdicts."""
    star = r"\*"  # a bare one would begin emphasis
    rows = ["| verdict | claims |", "|---|---|"]
    claims = {claim.number: claim for claim in all_claims()}
    for verdict, earlier in EARLIER.items():
        numbers = sorted(
            {number for number in earlier if number not in final}
            | {number for number, result in final.items() if result.verdict.word == verdict}
        )
        links = [
            f"[{n} {claims[n].name}](research/claims/{n:02}-{claims[n].name}.md){star if n in final else ''}"
            for n in numbers
        ]
        rows.append(f"| {verdict} ({len(numbers)}) | {', '.join(links)} |")
    block = "\n".join(
        [BEGIN, *rows, "", f"{star} judged with the seeds from 500, the others with seeds 100 to 103.", END]
    )
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


def fill_table(text: str, final: dict[int, ClaimResult]) -> str:
    """Return the table of all claims with the verdicts and results of the judged ones."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        match = re.match(r"\| (\d+) \| (\[.*?\]\(.*?\)) \|", line)
        if match and int(match[1]) in final:
            result = final[int(match[1])]
            lines[index] = (
                f"| {match[1]} | {match[2]} | {result.verdict.word} ({len(result.seeds)} seeds) | {sentence_of(result)} |"
            )
    return "\n".join(lines) + "\n"


def filled_pages() -> dict[Path, str]:
    """Return the pages that the tool writes, with their new text."""
    results = judge_seeds(DOCS / "research" / "data")
    final = {result.claim.number: result for result in results if is_final(result)}
    summary, table = DOCS / "claims.md", DOCS / "research" / "claims-table.md"
    pages = {page_of(result): fill_page(page_of(result).read_text(), result) for result in results}
    return pages | {
        summary: fill_summary(summary.read_text(), final),
        table: fill_table(table.read_text(), final),
    }


if __name__ == "__main__":
    pages = filled_pages()
    if "--check" in sys.argv:
        stale = [path.name for path, text in pages.items() if path.read_text() != text]
        sys.exit(f"run python tools/fill_claims.py: {', '.join(stale)} differ" if stale else 0)
    for path, text in pages.items():
        path.write_text(text)
    for result in judge_seeds(DOCS / "research" / "data"):
        draw_seeds(result).save(picture_of(result))
