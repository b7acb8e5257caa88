"""What is asked about relations: a relation in one direction, the numbers it has, and the controls that stand beside some."""

from functools import cached_property

from headwise.analysis.metrics.metric import Number, Target

SETS = ("same phrase", "same class")
# Words that come in pairs: whoever follows the words, and not the pair, looks at these as well (docs/look.md).
CONTROLS = {
    "bracket": ("another's bracket", "comma to comma"), "quote": ("another's quote", "comma to comma"),
    "if-then": ("unconditional",), "related": ("unrelated",),
}  # fmt: skip
NO_ROLE = {name for some in CONTROLS.values() for name in some}  # questions that are asked for the sake of others
SHAPES = {
    "another's bracket": {")": "(", "]": "[", "}": "{"},
    "another's quote": {'"': '"', "'": "'", "”": "“", "’": "‘", "»": "«"}, "comma to comma": {",": ","},
}  # fmt: skip
# Of all rows; and, of those that can be compared, the weight on the targets, on other pairs like them, and the valued weight.
HITS, MASS, VALUED_HITS, VALUED_MASS = COUNTED = ("hits", "mass", "valued hits", "valued mass")
MATCHED, OTHERS, VALUED_MATCHED = COMPARED = ("matched", "others", "valued matched")
VALUED = (VALUED_HITS, VALUED_MASS, VALUED_MATCHED)
KINDS = (*COUNTED, *COMPARED)
_LABELS = {
    HITS: "words that look hardest at the right one", MASS: "weight on the right words",
    MATCHED: "weight on the right words, where others are like them", OTHERS: "weight on other pairs like them",
}  # fmt: skip
_BESIDE = {HITS: ("", VALUED_HITS), MASS: ("", VALUED_MASS), MATCHED: (OTHERS, VALUED_MATCHED)}


class Question(str):
    """A relation in one direction: `det >` is attention from the first word of an arc to the second, `det <` from
    the second to the first.

    >>> asked = Question("det", ">")
    >>> asked == "det >", asked.relation, asked.numbers["hits"].name
    (True, 'det', 'det > hits')
    """

    relation: str
    way: str

    def __new__(cls, relation: str, way: str) -> "Question":
        """`det` and `>`."""
        made = super().__new__(cls, f"{relation} {way}")
        made.relation, made.way = relation, way
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What a copy is made of."""
        return self.relation, self.way

    @property
    def target(self) -> Target:
        """The word an arc leads to."""
        return Target("arc", str(self))

    @cached_property
    def numbers(self) -> dict[str, Number]:
        """Its numbers, by kind."""
        made = {}
        for kind in KINDS:
            null, valued = (f"{self} {other}" if other else "" for other in _BESIDE.get(kind, ("", "")))
            made[kind] = Number(
                f"{self} {kind}", _LABELS.get(kind, ""), null=null, valued=valued, shown=kind in _LABELS, placed=True,
                series="relation", target=self.target,
            )  # fmt: skip
        return made


def questions_of(relations: tuple[str, ...] | list[str]) -> tuple[Question, ...]:
    """Both directions of each."""
    return tuple(Question(name, way) for name in relations for way in "><")
