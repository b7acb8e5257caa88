"""Role descriptions: the attention pattern that a role's score measures, as the end of the sentence "Head 5.1 …".

A relation is measured on gold arcs, each from a first word to a second. Direction `>` is attention from the first word to the
second, `<` is attention from the second to the first. docs/gold-sets.md lists the arcs of every gold set with their counts.
"""

from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.roles.roles import RoleEvidence

FIRST_TO_SECOND, SECOND_TO_FIRST = ">", "<"

# role: direction `>`, direction `<`
RELATION_ROLES = {
    "possessive": (
        "attends from a possessive pronoun to its owner",
        "attends from an owner to a possessive pronoun that refers to it",
    ),
    "coreference": (
        "attends from a pronoun to the noun or name it refers to",
        "attends from a noun or name to a pronoun that refers to it",
    ),
    "bracket": (
        "attends from a closing bracket to the bracket that opened the pair",
        "attends from an opening bracket to the bracket that closes the pair",
    ),
    "quote": (
        "attends from a closing quotation mark to the mark that opened the pair",
        "attends from an opening quotation mark to the mark that closes the pair",
    ),
    "if-then": (
        'attends from "if" to its "then"',
        'attends from "then" to its "if"',
    ),
    "cause-effect": (
        "attends from the predicate of an effect to the predicate of its cause",
        "attends from the predicate of a cause to the predicate of its effect",
    ),
    "subject-verb": ("attends from a subject to its verb", "attends from a verb to its subject"),
    "verb-object": ("attends from an object to its verb", "attends from a verb to its object"),
    "adjective-noun": (
        "attends from an adjective to the word it describes",
        "attends from a word to an adjective that describes it",
    ),
    "determiner-noun": ("attends from a determiner to its noun", "attends from a noun to its determiner"),
    "question-answer": (
        "attends from the word or mark that asks a question to the answer",
        "attends from the answer to the word or mark that asks the question",
    ),
    "semantic": (
        "attends from a word to an earlier word of related meaning",
        "attends from a word to a later word of related meaning",
    ),
    "copy": (
        "attends from a repeated surname to its first mention",
        "attends from the first mention of a surname to a repetition",
    ),
    "sentence end": (
        "attends from the end of a sentence to the end of the previous sentence",
        "attends from the end of a sentence to the end of the next sentence",
    ),
    "same phrase": (
        "attends from a word to later words of the same phrase",
        "attends from a word to earlier words of the same phrase",
    ),
    "part of speech": (
        "attends from a word to later words of the same part of speech",
        "attends from a word to earlier words of the same part of speech",
    ),
}
TOKEN_ROLES = {
    "previous token": "attends to the previous token",
    "next token": "attends to the next token",
    "self": "attends to the token itself",
    "local": "attends to tokens at most 3 away, excluding the token itself",
    "fixed offset": "attends to the token at a fixed offset",
    "delimiter": "attends to punctuation marks and line breaks",
    "capitalized": "attends to tokens that begin with a capital letter",
    "digit": "attends to tokens that consist of digits",
    "long range": f"attends to tokens {WINDOW} or more away, excluding the first token and repeated tokens",
    "induction": "attends from the second copy of a random token to the token after the first copy",
    "duplicate token": "attends from the second copy of a random token to the first copy",
    "successor": "promotes the next day, month, number or letter over all others of its class",
    "name mover": "attends to the correct name and promotes it over the other name",
    "name suppression": "attends to the incorrect name and suppresses it relative to names outside the sentence",
    "copy suppression": "attends to the token about to be repeated and suppresses it relative to other tokens of the text",
    "query focus": "attends from the tokens of a question to the document the question is about",
    "retrieval": "attends to the token that is being copied from a longer text",
    "far offset": f"attends to the token at a fixed offset of {WINDOW} or more",
    "fixed position": f"attends to the same position in every text, from {WINDOW} or more tokens away",
}
PATCH_ROLES = {
    "local": "attends to the eight patches around its own",
    "row": "attends to patches in its row more than to other patches at the same distance",
    "column": "attends to patches in its column more than to other patches at the same distance",
    "global": "attends to patches farther away than half the longer side of the image",
    "class token": "attends to the class token",
    "register": "attends to register tokens",
    "sink": "attends to the same patch from all patches",
}
OUTPUT_ROLES = ("successor",)  # the score is the share of cases in which the output has the described effect
# the score is the mean attention weight, counted as 0 in cases in which the output does not have the described effect
OUTPUT_CONDITIONED_ROLES = ("name mover", "name suppression", "copy suppression")


def describe_role(support: RoleEvidence, *, pictures: bool = False) -> str:
    """Describe the attention pattern of a role, with the score on held-out texts."""
    label = f"{support.role} {support.detail}".rstrip()
    if not support.is_relation and support.role not in (PATCH_ROLES if pictures else TOKEN_ROLES):
        return f"has the role {label}: {_score_sentence(support, 'its score is {}')}"
    return f"{_pattern(support, pictures=pictures)} ({label}): {_score_sentence(support)}"


def describe_role_name(role: str, *, is_relation: bool = False, pictures: bool = False) -> str:
    """Describe a role in both directions, for a list of roles.

    >>> describe_role_name("determiner-noun")
    '> attends from a determiner to its noun; < attends from a noun to its determiner'
    >>> describe_role_name("delimiter")
    'attends to punctuation marks and line breaks'
    """
    if pictures and role in PATCH_ROLES:
        return PATCH_ROLES[role]
    if role in TOKEN_ROLES:
        return TOKEN_ROLES[role]
    if not is_relation and role not in RELATION_ROLES:
        return f"has the role {role}"
    forward, backward = RELATION_ROLES.get(role) or _describe_arc_directions(role)
    return f"{FIRST_TO_SECOND} {forward}; {SECOND_TO_FIRST} {backward}"


def _pattern(support: RoleEvidence, *, pictures: bool) -> str:
    if not support.is_relation:
        return describe_role_name(support.role, pictures=pictures)
    patterns = RELATION_ROLES.get(support.role) or _describe_arc_directions(support.role)
    return patterns[support.detail == SECOND_TO_FIRST]


def _describe_arc_directions(relation: str) -> tuple[str, str]:
    """Describe a relation of a treebank or of the user's documents, which has no entry in `RELATION_ROLES`."""
    return (
        f"attends from the first word of gold arcs {relation!r} to the second",
        f"attends from the second word of gold arcs {relation!r} to the first",
    )


def _score_sentence(support: RoleEvidence, weight: str = "on average {} of its attention goes there") -> str:
    share = f"{100 * support.score:.0f}%"
    if support.hits and support.is_relation:
        return f"in {share} of the cases, the target word gets the largest weight of all words"
    if support.hits:
        return f"in {share} of the cases, the target token gets its largest weight"
    if support.role in OUTPUT_ROLES:
        return f"in {share} of the cases"
    if support.role in OUTPUT_CONDITIONED_ROLES:
        return (
            f"on average {share} of its attention goes there (0 in cases in which its output does not have this effect)"
        )
    return weight.format(share)
