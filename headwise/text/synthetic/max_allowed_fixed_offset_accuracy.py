"""Maximum accuracy of a fixed offset for each relation of the synthetic language.

A relation that one offset solves ("the previous word") says nothing about a head. So the most frequent offset from source to
target may cover at most this fraction of the arcs of a relation. The limits were fixed before the grammar was written.
`headwise corpus` prints them with the measured fractions.
"""

FIXED_OFFSET_ACCURACY_LIMITS: dict[str, float] = {
    "determiner-noun": 0.60,  # the → dog
    "adjective-noun": 0.60,  # old → dog
    "subject-verb": 0.60,  # dog → sees
    "verb-object": 0.60,  # object → verb: cat → sees
    "pronoun-antecedent": 0.40,  # it → dog
    "possessive": 0.50,  # his → boy
    "cause-effect": 0.40,  # effect → cause, whichever comes first
    "bracket": 0.40,  # closer → opener
    "quote": 0.40,  # closer → opener
    "if-then": 0.40,  # if → then
    "question-answer": 0.50,  # the question word → the answer
    "copy": 0.20,  # a surname → its first occurrence
    "related": 0.30,  # a noun → the nearest earlier noun of its topic
    "delimiter": 0.30,  # the end of a sentence → the end of the one before
}
