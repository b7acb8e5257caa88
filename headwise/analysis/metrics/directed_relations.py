"""What is asked about relations: a relation in one direction, the numbers it has, and the controls that stand beside some."""

from functools import cached_property

from headwise.analysis.metrics.metric import MetricSpec, RoleTarget

WORD_SETS = ("same phrase", "same class")
# Words that come in pairs: whoever follows the words, and not the pair, looks at these as well (docs/look.md).
CONTROLS = {
    "bracket": ("another's bracket", "comma to comma"), "quote": ("another's quote", "comma to comma"),
    "if-then": ("unconditional",), "related": ("unrelated",),
}  # fmt: skip
# questions that are asked for the sake of others
CONTROL_RELATIONS = {name for names in CONTROLS.values() for name in names}
CONTROL_SHAPES = {
    "another's bracket": {")": "(", "]": "[", "}": "{"},
    "another's quote": {'"': '"', "'": "'", "”": "“", "’": "‘", "»": "«"}, "comma to comma": {",": ","},
}  # fmt: skip
# Of all rows; and, of those that can be compared, the weight on the targets, on other pairs like them, and the
# value-weighted weight.
HITS, MASS, VALUE_WEIGHTED_HITS, VALUE_WEIGHTED_MASS = COUNTED = (
    "hits",
    "mass",
    "value-weighted hits",
    "value-weighted mass",
)
MATCHED, OTHERS, VALUE_WEIGHTED_MATCHED = COMPARED = ("matched", "others", "value-weighted matched")
VALUE_WEIGHTED = (VALUE_WEIGHTED_HITS, VALUE_WEIGHTED_MASS, VALUE_WEIGHTED_MATCHED)
KINDS = (*COUNTED, *COMPARED)
_LABELS = {
    HITS: "words that look hardest at the right one", MASS: "weight on the right words",
    MATCHED: "weight on the right words, where others are like them", OTHERS: "weight on other pairs like them",
}  # fmt: skip
_VARIANTS = {
    HITS: ("", VALUE_WEIGHTED_HITS),
    MASS: ("", VALUE_WEIGHTED_MASS),
    MATCHED: (OTHERS, VALUE_WEIGHTED_MATCHED),
}


class DirectedRelation(str):
    """A relation in one direction: `det >` is attention from the first word of an arc to the second, `det <` from
    the second to the first.

    >>> relation = DirectedRelation("det", ">")
    >>> relation == "det >", relation.relation, relation.metric_specs["hits"].name
    (True, 'det', 'det > hits')
    """

    relation: str
    direction: str

    def __new__(cls, relation: str, direction: str) -> "DirectedRelation":
        """`det` and `>`."""
        instance = super().__new__(cls, f"{relation} {direction}")
        instance.relation, instance.direction = relation, direction
        return instance

    def __getnewargs__(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What a copy is made of."""
        return self.relation, self.direction

    @property
    def role_target(self) -> RoleTarget:
        """The word an arc leads to."""
        return RoleTarget("arc", str(self))

    @cached_property
    def metric_specs(self) -> dict[str, MetricSpec]:
        """Its numbers, by kind."""
        specs = {}
        for kind in KINDS:
            baseline, value_weighted = (f"{self} {other}" if other else "" for other in _VARIANTS.get(kind, ("", "")))
            specs[kind] = MetricSpec(
                f"{self} {kind}", _LABELS.get(kind, ""), baseline=baseline, value_weighted=value_weighted,
                displayed=kind in _LABELS, positional=True, series="relation", target=self.role_target,
            )  # fmt: skip
        return specs


def both_directions(relations: tuple[str, ...] | list[str]) -> tuple[DirectedRelation, ...]:
    """Both directions of each."""
    return tuple(DirectedRelation(name, direction) for name in relations for direction in "><")
