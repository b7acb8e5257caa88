"""Relations between words in one direction, their scores, and the control relations of some."""

from functools import cached_property

from headwise.analysis.metrics.metric import MetricSpec, RoleTarget

WORD_SETS = ("same phrase", "same class")
# Control pairs: a head that follows the words instead of the pair attends to these too (docs/analysis.md).
CONTROLS = {
    "bracket": ("another's bracket", "comma to comma"), "quote": ("another's quote", "comma to comma"),
    "if-then": ("unconditional",), "related": ("unrelated",),
}  # fmt: skip
# relations that only serve as controls
CONTROL_RELATIONS = {name for names in CONTROLS.values() for name in names}
CONTROL_SHAPES = {
    "another's bracket": {")": "(", "]": "[", "}": "{"},
    "another's quote": {'"': '"', "'": "'", "”": "“", "’": "‘", "»": "«"}, "comma to comma": {",": ","},
}  # fmt: skip
# COUNTED scores are means over all rows. COMPARED scores are means over the rows that can be compared with other pairs: the
# weight on the targets, the weight on similar pairs, and the value-weighted weight on the targets.
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
    HITS: "words with the largest weight on a target", MASS: "weight on the targets",
    MATCHED: "weight on the targets that have comparable pairs", OTHERS: "weight on comparable pairs",
}  # fmt: skip
_VARIANTS = {
    HITS: ("", VALUE_WEIGHTED_HITS),
    MASS: ("", VALUE_WEIGHTED_MASS),
    MATCHED: (OTHERS, VALUE_WEIGHTED_MATCHED),
}


class DirectedRelation(str):
    """A relation in one direction.

    `det >` is attention from the first word of an arc to the second, `det <` from the second to the first.

    Attributes:
        relation: Name of the relation, such as `det`.
        direction: `>` or `<`.

    >>> relation = DirectedRelation("det", ">")
    >>> relation == "det >", relation.relation, relation.metric_specs["hits"].name
    (True, 'det', 'det > hits')
    """

    relation: str
    direction: str

    def __new__(cls, relation: str, direction: str) -> "DirectedRelation":
        """Create the relation `det >` from `det` and `>`."""
        instance = super().__new__(cls, f"{relation} {direction}")
        instance.relation, instance.direction = relation, direction
        return instance

    def __getnewargs__(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the constructor arguments, for pickle and copy."""
        return self.relation, self.direction

    @property
    def role_target(self) -> RoleTarget:
        """Target word of the arc."""
        return RoleTarget("arc", str(self))

    @cached_property
    def metric_specs(self) -> dict[str, MetricSpec]:
        """Scores of the relation, by kind."""
        specs = {}
        for kind in KINDS:
            baseline, value_weighted = (f"{self} {other}" if other else "" for other in _VARIANTS.get(kind, ("", "")))
            specs[kind] = MetricSpec(
                f"{self} {kind}", _LABELS.get(kind, ""), baseline=baseline, value_weighted=value_weighted,
                displayed=kind in _LABELS, positional=True, series="relation", target=self.role_target,
            )  # fmt: skip
        return specs


def both_directions(relations: tuple[str, ...] | list[str]) -> tuple[DirectedRelation, ...]:
    """Return both directions of each relation."""
    return tuple(DirectedRelation(name, direction) for name in relations for direction in "><")
