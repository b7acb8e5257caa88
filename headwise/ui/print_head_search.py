"""Terminal tables of `headwise find`: the heads, the best head of each layer, and the comparison with another model."""

import math
from collections.abc import Iterator, Sequence

from headwise.analysis.finding.head_search_result import COLUMNS, BeforeAfterScoreDifference, HeadSearchResult
from headwise.ui.terminal_table import TextTable, make_table

MAX_LAYERS = 16  # layers that are listed one by one


def head_search_tables(
    result: HeadSearchResult, changes: Sequence[BeforeAfterScoreDifference] | None = None, max_rows: int = 12
) -> Iterator[TextTable | str]:
    """Yield the tables of a result.

    Args:
        result: The result.
        changes: Comparison with another model.
        max_rows: Maximum number of heads.
    """
    rows = [
        ["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row] for row in result.table_rows()
    ]
    yield make_table(search_title(result), COLUMNS, rows[:max_rows])
    yield control_sentence(result)
    if result.metadata.get("shared_layers") and result.supported_heads:
        yield shared_weights_sentence(result)
    layers = [item for item in result.by_layer() if item.next_address]
    if 1 < len(layers) <= MAX_LAYERS:
        yield make_table(
            "Best head of each layer",
            ("layer", "head", "score", "next", "its score", "margin"),
            [
                (item.layer, item.address, item.score, item.next_address, item.next_score, item.margin)
                for item in layers
            ],
        )
    if changes is not None:
        yield make_table(
            "Changes from the other model to this one, p corrected for all heads and both signs",
            ("head", "change", "before", "after", "difference", "95% CI", "p"),
            [
                (
                    item.address, item.change, item.before, item.after, item.difference,
                    f"{item.interval[0]:.3f} to {item.interval[1]:.3f}", item.p,
                )
                for item in changes[:max_rows]
            ],
        )  # fmt: skip


def shared_weights_sentence(result: HeadSearchResult) -> str:
    """Return the head numbers that were found, for a model whose layers share their weights."""
    numbers = [address.rpartition(".")[2] for address in result.supported_heads]
    num_layers = len(result.by_layer())
    parts = [f"head {n} in {numbers.count(n)} of {num_layers} layers" for n in dict.fromkeys(numbers)]
    return f"All layers share their weights, so a head number is one head: {', '.join(parts)}."


def search_title(result: HeadSearchResult) -> str:
    """Return the number of heads that do the job, the sizes of the halves and the correction."""
    metadata = result.metadata
    count = f"{len(result.supported_heads)} of {metadata['num_heads']} heads do the job {result.job!r}"
    sizes = f"{metadata['num_inputs']} inputs, half to choose heads and half to judge them"
    skipped = f"; {metadata['skipped_pairs']} pairs left out" if metadata["skipped_pairs"] else ""
    return f"{count}: {sizes}{skipped}; p corrected for {metadata['family_size']} tests"


def control_sentence(result: HeadSearchResult) -> str:
    """Return one sentence that compares the head chosen on the selection half with random heads."""
    control = result.control
    if math.isnan(control.random_score):
        return f"Chosen on the first half: head {control.address}, {control.score:.3f} on the second."
    low, high = control.excess_interval
    return (
        f"Chosen on the first half: head {control.address}. On the second half it scores {control.score:.3f}, a random head "
        f"{control.random_score:.3f} (difference {low:.3f} to {high:.3f}, 95% CI), the median head {control.median:.3f}."
    )
