"""The words of the synthetic language as tables: class, number, gender, animacy and topic.

The kind of a noun determines the adjective of later sentences: an animal is tired, cloth is soft. So the word after
"because it is" can be predicted only from the antecedent of "it".
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Noun:
    """One form of a noun.

    Attributes:
        text: The form.
        lemma: Singular form.
        plural: Whether the form is plural.
        pronoun: he, she, it or they, by gender, number and animacy.
        kind: Kind, such as animal or cloth.
        topic: Topic, such as farm.
        index: Index of the lemma in the tables, which determines the splits.
    """

    text: str
    lemma: str
    plural: bool
    pronoun: str
    kind: str
    topic: str
    index: int


# topic: singular plural kind
_NOUNS = {
    "farm": """brother brothers man, sister sisters woman, horse horses animal, goat goats animal, barn barns building,
               cart carts vehicle, shovel shovels tool, carrot carrots food""",
    "castle": """king kings ruler-m, queen queens ruler-f, prince princes ruler-m, princess princesses ruler-f,
                 hawk hawks animal, tower towers building, sword swords tool, robe robes cloth""",
    "kitchen": """son sons child-m, daughter daughters child-f, cat cats animal, cake cakes food, plum plums food,
                  knife knives tool, towel towels cloth""",
    "sea": """uncle uncles man, aunt aunts woman, crab crabs animal, seal seals animal, boat boats vehicle,
              ship ships vehicle, pier piers building, sail sails cloth""",
    "home": """father fathers man, mother mothers woman, dog dogs animal, pillow pillows cloth, blanket blankets cloth,
               house houses building, pie pies food, hammer hammers tool""",
    "town": """boy boys child-m, girl girls child-f, pigeon pigeons animal, train trains vehicle, truck trucks vehicle,
               bridge bridges building, shop shops building, bun buns food""",
}
# label in the table: kind, and the singular pronoun
_KINDS = {
    "man": ("family", "he"), "woman": ("family", "she"),
    "child-m": ("child", "he"), "child-f": ("child", "she"),
    "ruler-m": ("ruler", "he"), "ruler-f": ("ruler", "she"),
}  # fmt: skip

# kind: the adjective that follows a pronoun for it
STATE_ADJECTIVES = {
    "family": "kind", "child": "young", "ruler": "proud", "named": "late", "animal": "tired",
    "cloth": "soft", "food": "sweet", "tool": "sharp", "vehicle": "fast", "building": "tall",
}  # fmt: skip
PEOPLE = ("family", "child", "ruler", "named")
ANIMATE = (*PEOPLE, "animal")


def _nouns() -> tuple[Noun, ...]:
    forms = []
    for topic, table in _NOUNS.items():
        for row in table.split(","):
            singular, plural, label = row.split()
            kind, pronoun = _KINDS.get(label, (label, "it"))
            index = len(forms) // 2
            forms.append(Noun(singular, singular, False, pronoun, kind, topic, index))
            forms.append(Noun(plural, singular, True, "they", kind, topic, index))
    return tuple(forms)


NOUNS = _nouns()
NOUN_BY_TEXT = {noun.text: noun for noun in NOUNS}
TOPICS = tuple(_NOUNS)

FIRST_NAMES = {
    "Tom": "he", "Alice": "she", "Jack": "he", "Mary": "she", "Peter": "he",
    "Emma": "she", "David": "he", "Lucy": "she", "Henry": "he", "Rose": "she",
    "James": "he", "Sarah": "she",
}  # fmt: skip
SURNAMES = (
    "Smith", "Jones", "Baker", "Wood", "Hill", "Stone", "Carter", "Fisher", "Reed", "Marsh", "Walker", "Cooper",
    "Bell", "Lane", "Gray", "Miller", "Turner", "Shaw", "Moore", "Clark", "Hunt", "Webb", "Cole", "Field",
)  # fmt: skip

# (singular, plural) forms of verbs
TRANSITIVE = (
    ("sees", "see"), ("likes", "like"), ("finds", "find"), ("wants", "want"), ("follows", "follow"), ("knows", "know"),
    ("draws", "draw"), ("paints", "paint"), ("hears", "hear"), ("needs", "need"), ("loves", "love"),
    ("remembers", "remember"),
)  # fmt: skip
INTRANSITIVE = (
    ("sleeps", "sleep"), ("sings", "sing"), ("waits", "wait"), ("runs", "run"), ("jumps", "jump"), ("rests", "rest"),
    ("smiles", "smile"), ("dances", "dance"),
)  # fmt: skip
SAY, DO, IS, WAS = ("says", "say"), ("does", "do"), ("is", "are"), ("was", "were")

ADJECTIVES = (
    "old", "new", "small", "big", "red", "blue", "green", "black", "clean", "strange", "quiet", "famous", "pretty",
    "little", "thin", "heavy",
)  # fmt: skip
# (agent, verb, effect)
CAUSES = (
    ("rain", "falls", "wet"), ("sun", "shines", "warm"), ("wind", "blows", "cold"),
    ("night", "comes", "dark"), ("fire", "burns", "hot"),
)  # fmt: skip
EFFECTS = tuple(effect for _, _, effect in CAUSES)

SINGULAR_DETERMINERS = ("the", "the", "a", "this", "that", "every")  # "the" is twice as frequent
PLURAL_DETERMINERS = ("the", "the", "some", "these", "those", "many")
POSSESSIVES = {"he": "his", "she": "her", "it": "its", "they": "their"}
PREPOSITIONS = ("near", "behind", "beside", "under", "with")
ADVERBS = ("here", "there", "often", "again", "quietly", "slowly")  # after a verb
PRE_ADVERBS = ("always", "never", "still")  # before a verb
TIME_ADVERBS = {"today": IS, "now": IS, "yesterday": WAS, "once": WAS}  # adverb: forms of the verb that follows
CONNECTIVES = ("because", "so", "and", "if", "then")
QUESTION_WORDS = ("where", "what", "who", "which")
ANSWER_WORDS = ("yes", "no", "not")
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))  # the last two are quotes
QUOTES = BRACKETS[3:]
CLOSING_BRACKETS = tuple(closer for _, closer in BRACKETS)
PUNCTUATION = (".", "?", ",")

WORD_CLASSES = (
    *("noun", "name", "verb", "auxiliary", "adjective", "adverb", "determiner", "pronoun", "possessive", "preposition"),
    *("conjunction", "question", "answer", "delimiter", "bracket", "quote"),
)

# Every word once, in a fixed order: the index of a word is its id.
VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys(
        [
            *PUNCTUATION, *(mark for pair in BRACKETS for mark in pair),
            *SINGULAR_DETERMINERS, "an", *PLURAL_DETERMINERS, *POSSESSIVES, *POSSESSIVES.values(), *PREPOSITIONS,
            *CONNECTIVES, *QUESTION_WORDS, *ANSWER_WORDS, *TIME_ADVERBS, *ADVERBS, *PRE_ADVERBS, *IS, *WAS, *DO, *SAY,
            *(form for verb in (*TRANSITIVE, *INTRANSITIVE) for form in verb),
            *(word for row in CAUSES for word in row), *ADJECTIVES, *STATE_ADJECTIVES.values(),
            *FIRST_NAMES, *SURNAMES, *NOUN_BY_TEXT,
        ]
    )
)  # fmt: skip
