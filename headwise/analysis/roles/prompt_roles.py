"""The roles that need prompts of their own, each a row of data as in `roles`; asked where a profile is made with `prompts`.

They are a family of tests of their own: the roles of every profile keep their numbers, whether these are asked or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.copy_suppression import CopySuppression
from headwise.analysis.metrics.long_offsets import BEYOND, FAR, FIXED, FarPlaces
from headwise.analysis.metrics.name_movers import NameMover
from headwise.analysis.metrics.name_suppression import NameSuppression
from headwise.analysis.metrics.query_focus import QueryFocus
from headwise.analysis.metrics.statistics import bootstrap
from headwise.analysis.metrics.successor import Successor
from headwise.analysis.metrics.tasks import TaskMeasure
from headwise.analysis.roles.roles import DUE, HELD, LEAD, Role, Support

STREAMS = 0.05  # attention condition for streaming: the largest share outside sink tokens and window


def prompted_measures() -> tuple[TaskMeasure, ...]:
    """What is asked, anew for each profile."""
    return Successor(), NameMover(), NameSuppression(), CopySuppression(), QueryFocus(), FarPlaces()


THRESHOLDS = {"successor": 0.3, "name mover": 0.1, "name suppression": 0.1, "copy suppression": 0.1, "query focus": 0.1}
ASKED = {
    "successor": DUE,
    "name mover": LEAD,
    "name suppression": LEAD,
    "copy suppression": HELD,
}  # by ablation; the others have no answers
PROMPTED = (
    *(
        Role(name, one.score, THRESHOLDS[name], ASKED.get(name), apart=True)
        for one in prompted_measures()[:-1]
        for name in (one.score.name,)
    ),
    *(Role(number.name, number, 0.3, apart=True) for number in (FAR[0], FIXED[0])),
)


def with_choices(found: Sequence[Sequence[Support]], about: Mapping[str, Any]) -> tuple[tuple[Support, ...], ...]:
    """The same with the offset or the place that was chosen for a head beside its role."""
    chosen = about.get("chosen", {})
    return tuple(
        tuple(replace(one, detail=str(chosen[one.role][head])) if one.role in chosen else one for one in some)
        for head, some in enumerate(found)
    )


def could_stream(tally: Tally) -> np.ndarray | None:
    """Heads that meet the attention condition for streaming, (heads,); None if it was not measured.

    The upper end of the 95% CI of the attention outside sink tokens and window is below STREAMS. The condition is necessary,
    not sufficient: induction heads meet it, because they attend to the first token of ordinary text. Streaming is recommended
    only if the loss with the KV head streaming was measured as well (`headwise.compression.streaming_cost`).
    """
    if BEYOND.name not in tally.fields:
        return None
    sums, counts = tally.per_bucket(BEYOND.name)
    return None if not counts.any() else bootstrap(sums, counts)[1] < STREAMS
