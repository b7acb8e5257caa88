"""The little language keeps its promises: checked on its documents, from their words, not from its own generator."""

import json
import subprocess
import sys
from collections import Counter
from itertools import combinations, islice, pairwise

import pytest

from headwise.errors import HeadwiseError
from headwise.text.documents import Document, best_offset, offsets
from headwise.text.synthetic import CLASSES, OFFSETS, VOCABULARY, LittleLanguage, describe, quizzes
from headwise.text.synthetic import vocabulary as v
from headwise.text.synthetic.cloze_probes import KINDS

NUMBER = 2000
DOCUMENTS = {split: list(islice(LittleLanguage(0, split), NUMBER)) for split in ("train", "held-out")}
BOTH = [*DOCUMENTS["train"], *DOCUMENTS["held-out"]]
PLURAL_VERBS = {many for _, many in (*v.TRANSITIVE, *v.INTRANSITIVE, v.SAY, v.DO, v.IS, v.WAS)}
LEXICAL = {form: one for one, many in (*v.TRANSITIVE, *v.INTRANSITIVE) for form in (one, many)}
WEATHER = {power for power, _, _ in v.WEATHER}
FIRST = "if James Turner paints the swords , then he still likes the sword . James Turner with every"
KIND_OF_STATE = {state: kind for kind, state in v.STATES.items()}


def arcs(document: Document, *names: str) -> list[tuple[int, int]]:
    return [(source, target) for name, source, target in document.relations if name in names]


def start_of_sentence(document: Document, place: int) -> int:
    return max((i + 1 for i in range(place) if document.words[i] in (".", "?")), default=0)


def features(document: Document, place: int) -> tuple[str, str] | None:
    """The pronoun and the kind of the noun at a place; of a person with a name, the surname stands for it."""
    word = document.words[place]
    if word in v.SURNAMES:
        return v.FIRST_NAMES[document.words[place - 1]], "named"
    if word in WEATHER:
        return "it", "weather"
    return (v.NOUN[word].pronoun, v.NOUN[word].kind) if word in v.NOUN else None


def in_scope(document: Document, pronoun: int, antecedent: int) -> list[int]:
    """The nouns from the beginning of the antecedent's sentence to the pronoun."""
    return [i for i in range(start_of_sentence(document, antecedent), pronoun) if features(document, i)]


# the same again, whenever and in whatever order


def test_a_document_depends_on_seed_split_and_number_alone() -> None:
    again = LittleLanguage(0, "train")
    for number in (7, 3, 1999, 3):
        assert again.document(number) == DOCUMENTS["train"][number]
    assert LittleLanguage(1).document(3) != again.document(3)
    assert LittleLanguage(0, "held-out").document(3) != again.document(3)


def test_the_first_document_stays_what_it_was() -> None:
    """A change of the language is a change of everything trained on it: it must be meant."""
    assert DOCUMENTS["train"][0].text.startswith(FIRST)


def test_another_process_tells_the_same() -> None:
    code = "from headwise.text.synthetic import LittleLanguage; print(LittleLanguage(5, 'held-out').document(11).text)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == LittleLanguage(5, "held-out").document(11).text


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="there is no split 'test'; it is one of train, held-out"):
        LittleLanguage(split="test")


# words


def test_the_vocabulary_is_small_and_all_of_it_is_used() -> None:
    assert 150 <= len(VOCABULARY) <= 300
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    for documents in DOCUMENTS.values():
        assert {word for document in documents for word in document.words} == set(VOCABULARY)


def test_every_word_has_a_class_and_nearly_every_word_one_class() -> None:
    classes: dict[str, set[str]] = {}
    for document in BOTH:
        assert len(document.classes) == len(document.words)
        for word, kind in zip(document.words, document.classes, strict=True):
            classes.setdefault(word, set()).add(kind)
    assert set().union(*classes.values()) == set(CLASSES)
    assert {word for word, kinds in classes.items() if len(kinds) > 1} == {"who"}  # asks, and relates


def test_documents_are_several_sentences_of_twenty_to_eighty_words() -> None:
    lengths = [len(document.words) for document in BOTH]
    assert min(lengths) >= 20
    assert max(lengths) <= 80
    assert all(document.words[-1] == "." for document in BOTH)
    assert all(document.text == " ".join(document.words) for document in BOTH)
    sentences = [sum(word in (".", "?") for word in document.words) for document in BOTH]
    assert sum(sentences) / len(sentences) > 3


# relations


@pytest.mark.parametrize("split", DOCUMENTS)
def test_no_fixed_offset_solves_a_relation(split: str) -> None:
    assert max(OFFSETS.values()) <= 0.6
    table = offsets(DOCUMENTS[split])
    assert set(table) == set(OFFSETS)
    for name, counts in table.items():
        assert counts.total() > 400, name
        offset, share = best_offset(counts)
        assert share <= OFFSETS[name], f"{name}: the offset {offset} hits {share:.3f}"


def test_arcs_join_words_of_the_right_classes() -> None:
    named = {"noun", "name"}
    ends = {
        "determiner-noun": ({"determiner", "possessive"}, {"noun"}),
        "adjective-noun": ({"adjective"}, named),
        "subject-verb": ({"noun", "name", "pronoun"}, {"verb", "auxiliary"}),
        "verb-object": (named, {"verb"}),
        "pronoun-antecedent": ({"pronoun"}, named),
        "possessive": ({"possessive"}, named),
        "cause-effect": ({"verb", "adjective"}, {"verb", "adjective"}),
        "bracket": ({"bracket"}, {"bracket"}),
        "quote": ({"quote"}, {"quote"}),
        "if-then": ({"conjunction"}, {"conjunction"}),
        "question-answer": ({"question", "auxiliary"}, {"noun", "name", "answer"}),
        "copy": ({"name"}, {"name"}),
        "related": ({"noun"}, {"noun"}),
        "delimiter": ({"delimiter"}, {"delimiter"}),
    }
    for document in BOTH:
        assert len(set(document.relations)) == len(document.relations)
        for name, source, target in document.relations:
            assert document.classes[source] in ends[name][0], (name, document.words[source], document.text)
            assert document.classes[target] in ends[name][1], (name, document.words[target], document.text)


def test_every_determiner_adjective_and_pronoun_has_its_arc() -> None:
    for document in BOTH:
        sources = Counter((name, source) for name, source, _ in document.relations)
        relatives = {i for i, word in enumerate(document.words) if word in ("who", "which")}
        for place, kind in enumerate(document.classes):
            if kind in ("determiner", "possessive"):
                assert sources["determiner-noun", place] == 1
            if kind == "possessive":
                assert sources["possessive", place] == 1
            if kind == "pronoun" and place not in relatives:
                assert sources["pronoun-antecedent", place] == 1
            if kind == "adjective" and document.words[place] not in KIND_OF_STATE:
                assert sources["adjective-noun", place] == 1


def test_every_verb_agrees_with_its_subject() -> None:
    for document in BOTH:
        for subject, verb in arcs(document, "subject-verb"):
            word = document.words[subject]
            plural = word == "they" or (word in v.NOUN and v.NOUN[word].plural)
            assert (document.words[verb] in PLURAL_VERBS) == plural, document.text


def test_every_bracket_and_quote_closes_what_was_opened_last() -> None:
    closer_of = dict(v.BRACKETS)
    for document in BOTH:
        open_now: list[int] = []
        expected = []
        for place, word in enumerate(document.words):
            if open_now and word == closer_of[document.words[open_now[-1]]]:
                expected.append((place, open_now.pop()))
            elif word in closer_of:
                open_now.append(place)
        assert not open_now
        assert sorted(arcs(document, "bracket", "quote")) == sorted(expected)


def test_one_noun_in_scope_fits_a_pronoun_and_it_is_the_antecedent() -> None:
    pronoun_of = {possessive: pronoun for pronoun, possessive in v.POSSESSIVES.items()}
    for document in BOTH:
        for source, target in arcs(document, "pronoun-antecedent", "possessive"):
            pronoun = pronoun_of.get(document.words[source], document.words[source])
            told = {i: features(document, i) for i in in_scope(document, source, target)}
            assert [i for i, (fits, _) in told.items() if fits == pronoun] == [target], document.text  # pyright: ignore


def test_the_nearest_noun_is_often_not_the_antecedent() -> None:
    pairs = [(d, s, t) for d in BOTH for s, t in arcs(d, "pronoun-antecedent")]
    nearest = sum(in_scope(document, source, target)[-1] == target for document, source, target in pairs)
    assert nearest / len(pairs) < 0.6


def test_what_is_said_fits_the_antecedent_only() -> None:
    for document in BOTH:
        antecedents = dict(arcs(document, "pronoun-antecedent"))
        for quiz in (quiz for quiz in quizzes(document) if quiz.kind == "referent"):
            pronoun = quiz.place - 2
            kind = KIND_OF_STATE[document.words[quiz.place]]
            told = {i: features(document, i) for i in in_scope(document, pronoun, antecedents[pronoun])}
            assert len(told) > 1  # there is something to be mistaken for
            assert [i for i, (_, of) in told.items() if of == kind] == [antecedents[pronoun]]  # pyright: ignore


def test_surnames_are_copied() -> None:
    for document in BOTH:
        people: dict[str, str] = {}
        first: dict[str, int] = {}
        expected = []
        for place, word in enumerate(document.words):
            if word in v.FIRST_NAMES:
                surname = document.words[place + 1]
                assert people.setdefault(word, surname) == surname
                if surname in first:
                    expected.append((place + 1, first[surname]))
                first.setdefault(surname, place + 1)
        assert len(set(people.values())) == len(people)
        assert arcs(document, "copy") == expected


def test_causes_and_effects_belong_together_whichever_comes_first() -> None:
    effect_of = {act: effect for _, act, effect in v.WEATHER}
    orders = Counter()
    for document in BOTH:
        for effect, cause in arcs(document, "cause-effect"):
            between = document.words[min(effect, cause) : max(effect, cause)]
            assert ("because" if effect < cause else "so") in between
            orders[effect < cause] += 1
            if document.words[cause] in effect_of:
                assert document.words[effect] == effect_of[document.words[cause]]
    assert 0.25 < orders[True] / orders.total() < 0.75


def test_related_nouns_share_a_topic_and_nothing_nearer_does() -> None:
    for document in BOTH:
        topics = [v.NOUN[word].topic if word in v.NOUN else "" for word in document.words]
        for source, target in arcs(document, "related"):
            lemma = v.NOUN[document.words[source]].lemma
            between = [i for i in range(target, source) if topics[i] == topics[source]]
            assert [i for i in between if v.NOUN[document.words[i]].lemma != lemma] == [target]


def test_phrases_hold_together() -> None:
    for document in BOTH:
        for first, end in document.phrases:
            assert document.classes[first] in ("determiner", "possessive", "name")
            assert document.classes[end - 1] in ("noun", "name")


# splits


def pairs_of(document: Document) -> set[tuple[str, ...]]:
    """The pairs of words that a split is made of, as their dictionary forms."""
    words, pairs = document.words, set()

    def name(place: int) -> str:
        word = words[place]
        return v.NOUN[word].lemma if word in v.NOUN else words[place - 1] if word in v.SURNAMES else ""

    for subject, verb in arcs(document, "subject-verb"):
        if name(subject) and words[verb] in LEXICAL:
            pairs.add(("verb", name(subject), LEXICAL[words[verb]]))
    pairs |= {("adjective", words[source], name(target)) for source, target in arcs(document, "adjective-noun")}
    people = sorted(set(words) & set(v.FIRST_NAMES))
    pairs |= {("meeting", one, other) for one, other in combinations(people, 2)}
    spans = arcs(document, "bracket", "quote")
    pairs |= {("nesting", words[a], words[c]) for b, a in spans for d, c in spans if a < c < d < b}
    return pairs


def test_no_pair_of_words_is_in_both_splits() -> None:
    train, held_out = (set().union(*map(pairs_of, DOCUMENTS[split])) for split in ("train", "held-out"))
    assert not train & held_out
    for pairs in (train, held_out):
        assert {pair[0] for pair in pairs} == {"verb", "adjective", "meeting", "nesting"}
    assert len(held_out) > 300


# quizzes


def test_quizzes_are_right_and_many() -> None:
    counts = Counter()
    for document in BOTH:
        for quiz in quizzes(document):
            assert document.words[quiz.place] in quiz.choices
            assert len(set(quiz.choices)) == len(quiz.choices)
            counts[quiz.kind] += 1
    assert set(counts) == set(KINDS)
    assert min(counts.values()) > 1000, counts


def test_a_bigram_model_fails_the_quizzes() -> None:
    followers: dict[str, Counter[str]] = {}
    for document in islice(LittleLanguage(0), 3000):
        for word, after in pairwise(document.words):
            followers.setdefault(word, Counter())[after] += 1
    asked, anywhere, among = Counter(), Counter(), Counter()
    for document in DOCUMENTS["held-out"]:
        for kind, place, choices in quizzes(document):
            known = followers[document.words[place - 1]]
            asked[kind] += 1
            anywhere[kind] += known.most_common(1)[0][0] == document.words[place]
            among[kind] += max(choices, key=lambda word: known[word]) == document.words[place]
    for hits in (anywhere, among):
        right = {kind: round(hits[kind] / asked[kind], 3) for kind in KINDS}
        assert max(right.values()) < 0.7, right


def test_agreement_is_asked_behind_nouns_of_either_number() -> None:
    same = Counter()
    for document in BOTH:
        subjects = {verb: subject for subject, verb in arcs(document, "subject-verb")}
        for quiz in (quiz for quiz in quizzes(document) if quiz.kind == "agreement"):
            nouns = [i for i in range(subjects[quiz.place] + 1, quiz.place) if features(document, i)]
            plural = (features(document, nouns[-1]) or ("", ""))[0] == "they"
            same[plural == (document.words[quiz.place] in PLURAL_VERBS)] += 1
    assert 0.35 < same[True] / same.total() < 0.65, same


# the verb


def test_describe_measures_every_relation() -> None:
    rows, document = describe(documents=300, split="held-out", seed=4)
    assert [row.relation for row in rows] == list(OFFSETS)
    assert document == LittleLanguage(4, "held-out").document(0)
    assert all(row.example.count("*") == 4 for row in rows)
    with pytest.raises(HeadwiseError, match="at least 1"):
        describe(documents=0)


def test_corpus_prints_the_table_without_torch() -> None:
    code = [sys.executable, "-X", "importtime", "-m", "headwise", "corpus", "--documents", "300"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in OFFSETS)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "scipy", "tokenizers"}
    told = json.loads(subprocess.run([*code, "--json"], capture_output=True, text=True, check=True).stdout)
    assert [row["relation"] for row in told["relations"]] == list(OFFSETS)
    assert told["document"] == DOCUMENTS["train"][0].text
