"""Templates and words of the shipped tasks.

They were written for Headwise and are dedicated to the public domain (CC0 1.0, https://creativecommons.org/publicdomain/zero/1.0/).
No sentence is taken from a data set.
"""

WORDS = tuple(
    """
    apple river stone music paper garden window bottle silver mountain coffee butter island market winter summer
    forest bridge castle doctor engine farmer guitar hammer jacket kitchen ladder letter lemon mirror needle ocean
    orange pencil picture planet pocket potato rabbit ribbon rocket saddle shadow sister soldier spoon square
    sugar table temple ticket tiger tower train valley village wagon water wheel yellow zebra candle camera bird
    boat book box cat chair clock cloud dog door dress fish flag flower glass gold hand horse house key king lamp
    leaf lion milk moon nose paint plant queen rain ring road roof rope rose salt sand shirt shoe snow star sword
    tree truck wall wind wood
    """.split()  # noqa: SIM905
)


NAMES = tuple(
    """
    Alice Anna Ben Carl Clara Daniel David Emma Eric Frank George Grace Henry Jack James Jane John Julia Kate
    Laura Leo Lucy Mark Martin Mary Max Nina Oscar Paul Peter Robert Rose Ruth Sam Sarah Simon Sophie Thomas Tom
    Victor
    """.split()  # noqa: SIM905
)


# Induction: opening, separator, number of words, number of repeated words before the answer.
INDUCTION = (
    ("", " ", 6, 2), ("", " ", 7, 3), ("", " ", 5, 1), ("", ", ", 5, 2), ("", ", ", 6, 3), ("", ", ", 4, 1),
    ("List:", " ", 6, 2), ("Words:", ", ", 5, 2), ("Say after me:", " ", 6, 3), ("He read aloud:", " ", 5, 2),
    ("The code was", " ", 6, 1), ("They sang", " ", 5, 2), ("Sequence:", " - ", 5, 2), ("", " - ", 5, 1),
    ("", " / ", 5, 2), ("Order:", " / ", 4, 1), ("Repeat:", " and ", 5, 2), ("", " and ", 5, 2),
    ("Note:", " then ", 4, 1), ("", " then ", 5, 2),
)  # fmt: skip

# Indirect object: {A} and {B} are the two names, {S} the name that is repeated.
INDIRECT_OBJECT = (
    "When {A} and {B} went to the market, {S} gave a basket to",
    "After {A} and {B} met at the station, {S} handed the ticket to",
    "While {A} and {B} were cooking, {S} passed the salt to",
    "Then {A} and {B} had a long talk, and {S} wrote a letter to",
    "Yesterday {A} and {B} visited the museum, where {S} showed a picture to",
    "Because {A} and {B} shared an office, {S} lent a chair to",
    "As {A} and {B} waited for the bus, {S} offered a sandwich to",
    "Once {A} and {B} had finished the game, {S} threw the ball to",
    "On Sunday {A} and {B} drove to the lake, and {S} gave the keys to",
    "Before {A} and {B} left the party, {S} brought a coat to",
    "In the library {A} and {B} sat together until {S} gave a book to",
    "At the farm {A} and {B} fed the horses, and {S} gave an apple to",
    "Since {A} and {B} were neighbours, {S} sent a parcel to",
    "During lunch {A} and {B} argued, but {S} gave a drink to",
    "The day {A} and {B} moved house, {S} gave a lamp to",
    "In the evening {A} and {B} played cards, and {S} gave a coin to",
    "Near the river {A} and {B} found a box, and {S} gave it to",
    "At school {A} and {B} studied together, so {S} gave a pencil to",
    "When {A} and {B} opened the shop, {S} gave a key to",
    "Last winter {A} and {B} built a hut, and {S} gave an axe to",
)

# Agreement: {N} is the subject in singular or plural, {M} another noun inside the clause.
AGREEMENT = (
    "The {N} that the {M} saw", "The {N} that the {M} bought last year", "The {N} which the {M} described",
    "The {N} that belonged to the {M}", "The {N} that stood near the {M}", "The {N} which fell behind the {M}",
    "The {N} that the {M} found in the garden", "The {N} which my {M} mentioned", "The {N} that came before the {M}",
    "The {N} which came from the {M}", "Yesterday the {N} that the {M} carried", "I think the {N} that the {M} chose",
    "In the morning the {N} that the {M} moved", "Clearly the {N} that the {M} liked", "The old {N} that the {M} painted",
    "The small {N} which the {M} dropped", "The {N} that she gave to the {M}", "The new {N} that he put beside the {M}",
    "The {N} that they saw with the {M}", "Today the {N} that the {M} wanted",
)  # fmt: skip
NOUNS = (
    ("key", "keys"), ("book", "books"), ("dog", "dogs"), ("car", "cars"), ("box", "boxes"), ("chair", "chairs"),
    ("picture", "pictures"), ("letter", "letters"), ("table", "tables"), ("bird", "birds"), ("flower", "flowers"),
    ("horse", "horses"), ("shoe", "shoes"), ("tree", "trees"), ("window", "windows"), ("door", "doors"),
    ("foot", "feet"), ("tooth", "teeth"), ("goose", "geese"),
)  # fmt: skip
PEOPLE = (
    ("man", "men"), ("woman", "women"), ("teacher", "teachers"), ("farmer", "farmers"), ("doctor", "doctors"),
    ("child", "children"), ("student", "students"), ("neighbor", "neighbors"), ("king", "kings"), ("friend", "friends"),
)  # fmt: skip
SINGULAR_VERBS, PLURAL_VERBS = (" is", " was", " has"), (" are", " were", " have")

# Greater-than: {Y} is the full year, {C} its century.
GREATER_THAN = (
    "The war lasted from the year {Y} to the year {C}", "The project ran from the year {Y} to the year {C}",
    "The king ruled from the year {Y} to the year {C}", "The voyage lasted from the year {Y} to the year {C}",
    "The drought went on from the year {Y} to the year {C}", "The school was open from the year {Y} to the year {C}",
    "She lived there from {Y} to {C}", "He worked at the mill from {Y} to {C}", "The mine was active from {Y} to {C}",
    "The treaty held from {Y} to {C}", "The siege lasted from {Y} until {C}", "The company existed from {Y} until {C}",
    "The exhibition ran between {Y} and {C}", "The bridge was built between {Y} and {C}",
    "The castle was restored between {Y} and {C}", "The strike began in {Y} and ended in {C}",
    "The journey began in {Y} and ended in {C}", "The plague began in {Y} and ended in {C}",
    "The reign began in {Y} and ended in {C}", "Construction started in {Y} and finished in {C}",
)  # fmt: skip

# Brackets: {O} is the open bracket; the words are drawn.
BRACKETS = (
    "x = {O}{a}, {b}, {c}", "values = {O}{a}, {b}", "for item in {O}{a}, {b}, {c}", "return {O}{a}, {b}",
    "The list {O}{a}, {b}, {c}", "f = {O}{a} + {b}", "print {O}{a} {b} {c}", "see {O}{a} and {b}",
    "They sold fruit {O}{a}, {b} and {c}", "result {O}{a} or {b}", "colors = {O}{a}, {b}, {c}, {d}", "y += {O}{a} * {b}",
    "The team {O}{a} and {b}", "names: {O}{a}, {b}", "We visited two places {O}{a} and {b}", "data = {O}{a}; {b}; {c}",
    "In the second part {O}{a}", "Our animals {O}{a}, {b}, {c}", "assert {O}{a} == {b}", "if {O}{a} and {b}",
)  # fmt: skip
BRACKET_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"))

# Key-value recall: text of one entry, separator, opening, text of the query, number of entries.
KEY_VALUE = (
    ("{k}: {v}", ", ", "", "{k}:", 3), ("{k} = {v}", "\n", "", "{k} =", 3), ("{k} has the {v}", ". ", "", "{k} has the", 3),
    ("{k} likes the {v}", ". ", "", "{k} likes the", 3), ("{k} -> {v}", ", ", "", "{k} ->", 3),
    ("{k} bought a {v}", ", ", "", "{k} bought a", 3), ("{k} drew a {v}", ". ", "", "{k} drew a", 2),
    ("{k} | {v}", "\n", "", "{k} |", 4), ("- {k}: {v}", "\n", "", "- {k}:", 3),
    ("{k} wants a {v}", "; ", "", "{k} wants a", 3),
    ("{k} found the {v}", ". ", "In the story ", "{k} found the", 2), ("{k} got {v}", ", ", "", "{k} got", 3),
    ("{k} chose {v}", ", ", "", "{k} chose", 4), ("{k} is near the {v}", ". ", "", "{k} is near the", 3),
    ("{k} keeps a {v}", ", ", "At home ", "{k} keeps a", 3), ("{k}: {v}", "; ", "Table: ", "{k}:", 4),
    ("{k} carries the {v}", ". ", "", "{k} carries the", 2), ("{k} sells {v}", ", ", "", "{k} sells", 3),
    ("{k} paints the {v}", ". ", "", "{k} paints the", 3), ("{k} => {v}", "\n", "", "{k} =>", 3),
)  # fmt: skip

# Successor: a series, and a frame. {x} is the item, {p} the item before it.
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVW")
SUCCESSOR = (
    (DAYS, "{p}, {x},"), (DAYS, "The day after {x} is"), (DAYS, "If today is {x}, tomorrow is"),
    (DAYS, "First {p}, then {x}, then"),
    (MONTHS, "{p}, {x},"), (MONTHS, "The month after {x} is"), (MONTHS, "First {p}, then {x}, then"),
    (MONTHS, "After {p} comes {x}, and after {x} comes"),
    (NUMBERS, "{p}, {x},"), (NUMBERS, "We count: {p}, {x},"), (NUMBERS, "After {p} comes {x}, and after {x} comes"),
    (NUMBERS, "The number after {x} is"), (ORDINALS, "The {p}, the {x}, the"), (ORDINALS, "{p}, {x},"),
    (ORDINALS, "He came {p}, she came {x}, and they came"), (LETTERS, "{p}, {x},"), (LETTERS, "The letter after {x} is"),
    (LETTERS, "{p} {x}"), (LETTERS, "Letters: {p}, {x},"), (DAYS, "Not {p}, not {x}, but"),
)  # fmt: skip
