"""The roles that need prompts of their own, each a row of data as in `roles`; asked where a profile is made with `prompts`.

They are a family of tests of their own: the roles of every profile keep their numbers, whether these are asked or not.
"""

from headwise.look.measure.names import NameMover
from headwise.look.measure.queries import QueryFocus
from headwise.look.measure.successor import Successor
from headwise.look.measure.suppression import CopySuppression
from headwise.look.measure.tasks import TaskMeasure
from headwise.look.profile.roles import Role


def prompted_measures() -> tuple[TaskMeasure, ...]:
    """What is asked, anew for each profile."""
    return Successor(), NameMover(), CopySuppression(), QueryFocus()


THRESHOLDS = {"successor": 0.3, "name mover": 0.1, "copy suppression": 0.1, "query focus": 0.1}
PROMPTED = tuple(
    Role(measure.score.name, measure.score, THRESHOLDS[measure.score.name], apart=True)
    for measure in prompted_measures()
)
