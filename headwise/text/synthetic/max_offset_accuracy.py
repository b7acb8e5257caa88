"""How far a fixed offset may get with each relation. Fixed before the grammar was written, and never made easier after.

A relation that one offset solves ("the word before") says nothing about a head; so for every relation the most frequent
offset from source to target may take at most this share of its arcs. `headwise corpus` prints the measured shares beside it.
"""

MAX_OFFSET_FRACTIONS: dict[str, float] = {
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
    "question-answer": 0.50,  # the question word → what is answered
    "copy": 0.20,  # a surname → its first occurrence
    "related": 0.30,  # a noun → the nearest earlier noun of its topic
    "delimiter": 0.30,  # the end of a sentence → the end of the one before
}
