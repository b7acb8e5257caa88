"""Properties of the synthetic language, checked on the words of its documents, not with its generator."""

import json
import subprocess
import sys
from collections import Counter
from itertools import combinations, islice, pairwise

import pytest

from headwise.errors import HeadwiseError
from headwise.text.annotated_document import Document, best_offset, count_relation_offsets
from headwise.text.synthetic import (
    FIXED_OFFSET_ACCURACY_LIMITS,
    VOCABULARY,
    WORD_CLASSES,
    SyntheticLanguage,
    cloze_probes,
    describe_language,
)
from headwise.text.synthetic import vocabulary as v
from headwise.text.synthetic.cloze_probes import PROBE_KINDS

NUM_DOCUMENTS = 2000
DOCUMENTS = {split: list(islice(SyntheticLanguage(0, split), NUM_DOCUMENTS)) for split in ("train", "held-out")}
ALL_DOCUMENTS = [*DOCUMENTS["train"], *DOCUMENTS["held-out"]]
PLURAL_VERBS = {many for _, many in (*v.TRANSITIVE, *v.INTRANSITIVE, v.SAY, v.DO, v.IS, v.WAS)}
LEXICAL = {form: verb[0] for verb in (*v.TRANSITIVE, *v.INTRANSITIVE) for form in verb}
WEATHER = {power for power, _, _ in v.CAUSES}
FIRST_DOCUMENT = "if James Turner paints the swords , then he still likes the sword . James Turner with every"
KIND_OF_STATE = {state: kind for kind, state in v.STATE_ADJECTIVES.items()}


def arcs(document: Document, *names: str) -> list[tuple[int, int]]:
    return [(source, target) for name, source, target in document.relations if name in names]


def start_of_sentence(document: Document, position: int) -> int:
    return max((i + 1 for i in range(position) if document.words[i] in (".", "?")), default=0)


def features(document: Document, position: int) -> tuple[str, str] | None:
    """Return the pronoun and the kind of the noun at a position. A surname represents a named person."""
    word = document.words[position]
    if word in v.SURNAMES:
        return v.FIRST_NAMES[document.words[position - 1]], "named"
    if word in WEATHER:
        return "it", "weather"
    return (v.NOUN_BY_TEXT[word].pronoun, v.NOUN_BY_TEXT[word].kind) if word in v.NOUN_BY_TEXT else None


def in_scope(document: Document, pronoun: int, antecedent: int) -> list[int]:
    """Return the nouns from the start of the antecedent's sentence to the pronoun."""
    return [i for i in range(start_of_sentence(document, antecedent), pronoun) if features(document, i)]


# Reproducibility.


def test_synthetic_language_document_depends_on_seed_split_and_index() -> None:
    language = SyntheticLanguage(0, "train")
    for index in (7, 3, 1999, 3):
        assert language.document(index) == DOCUMENTS["train"][index]
    assert SyntheticLanguage(1).document(3) != language.document(3)
    assert SyntheticLanguage(0, "held-out").document(3) != language.document(3)


def test_synthetic_language_first_document_is_stable() -> None:
    """A change of the language affects all models trained on it, so it must be intended."""
    assert DOCUMENTS["train"][0].text.startswith(FIRST_DOCUMENT)


def test_synthetic_language_is_equal_across_processes() -> None:
    code = "from headwise.text.synthetic import SyntheticLanguage; print(SyntheticLanguage(5, 'held-out').document(11).text)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == SyntheticLanguage(5, "held-out").document(11).text


def test_synthetic_language_unknown_split_raises() -> None:
    with pytest.raises(HeadwiseError, match="Got 'test'"):
        SyntheticLanguage(split="test")


# Words.


def test_synthetic_vocabulary_is_small_and_fully_used() -> None:
    assert 150 <= len(VOCABULARY) <= 300
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    for documents in DOCUMENTS.values():
        assert {word for document in documents for word in document.words} == set(VOCABULARY)


def test_synthetic_words_have_one_class() -> None:
    classes: dict[str, set[str]] = {}
    for document in ALL_DOCUMENTS:
        assert len(document.classes) == len(document.words)
        for word, kind in zip(document.words, document.classes, strict=True):
            classes.setdefault(word, set()).add(kind)
    assert set().union(*classes.values()) == set(WORD_CLASSES)
    assert {word for word, kinds in classes.items() if len(kinds) > 1} == {"who"}  # question word and relative pronoun


def test_synthetic_documents_have_expected_length() -> None:
    lengths = [len(document.words) for document in ALL_DOCUMENTS]
    assert min(lengths) >= 20
    assert max(lengths) <= 80
    assert all(document.words[-1] == "." for document in ALL_DOCUMENTS)
    assert all(document.text == " ".join(document.words) for document in ALL_DOCUMENTS)
    sentences = [sum(word in (".", "?") for word in document.words) for document in ALL_DOCUMENTS]
    assert sum(sentences) / len(sentences) > 3


# Relations.


@pytest.mark.parametrize("split", DOCUMENTS)
def test_synthetic_relations_exceed_no_offset_limit(split: str) -> None:
    assert max(FIXED_OFFSET_ACCURACY_LIMITS.values()) <= 0.6
    table = count_relation_offsets(DOCUMENTS[split])
    assert set(table) == set(FIXED_OFFSET_ACCURACY_LIMITS)
    for name, counts in table.items():
        assert counts.total() > 400, name
        offset, fraction = best_offset(counts)
        assert fraction <= FIXED_OFFSET_ACCURACY_LIMITS[name], f"{name}: the offset {offset} hits {fraction:.3f}"


def test_synthetic_arcs_join_words_of_expected_classes() -> None:
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
    for document in ALL_DOCUMENTS:
        assert len(set(document.relations)) == len(document.relations)
        for name, source, target in document.relations:
            assert document.classes[source] in ends[name][0], (name, document.words[source], document.text)
            assert document.classes[target] in ends[name][1], (name, document.words[target], document.text)


def test_synthetic_modifiers_and_pronouns_have_arcs() -> None:
    for document in ALL_DOCUMENTS:
        sources = Counter((name, source) for name, source, _ in document.relations)
        relatives = {i for i, word in enumerate(document.words) if word in ("who", "which")}
        for position, kind in enumerate(document.classes):
            if kind in ("determiner", "possessive"):
                assert sources["determiner-noun", position] == 1
            if kind == "possessive":
                assert sources["possessive", position] == 1
            if kind == "pronoun" and position not in relatives:
                assert sources["pronoun-antecedent", position] == 1
            if kind == "adjective" and document.words[position] not in KIND_OF_STATE:
                assert sources["adjective-noun", position] == 1


def test_synthetic_verbs_agree_with_subjects() -> None:
    for document in ALL_DOCUMENTS:
        for subject, verb in arcs(document, "subject-verb"):
            word = document.words[subject]
            plural = word == "they" or (word in v.NOUN_BY_TEXT and v.NOUN_BY_TEXT[word].plural)
            assert (document.words[verb] in PLURAL_VERBS) == plural, document.text


def test_synthetic_brackets_and_quotes_are_balanced() -> None:
    closer_of = dict(v.BRACKETS)
    for document in ALL_DOCUMENTS:
        open_now: list[int] = []
        expected = []
        for position, word in enumerate(document.words):
            if open_now and word == closer_of[document.words[open_now[-1]]]:
                expected.append((position, open_now.pop()))
            elif word in closer_of:
                open_now.append(position)
        assert not open_now
        assert sorted(arcs(document, "bracket", "quote")) == sorted(expected)


def test_synthetic_pronoun_has_one_matching_antecedent() -> None:
    pronoun_of = {possessive: pronoun for pronoun, possessive in v.POSSESSIVES.items()}
    for document in ALL_DOCUMENTS:
        for source, target in arcs(document, "pronoun-antecedent", "possessive"):
            pronoun = pronoun_of.get(document.words[source], document.words[source])
            nouns = {i: features(document, i) for i in in_scope(document, source, target)}
            assert [i for i, (fits, _) in nouns.items() if fits == pronoun] == [target], document.text  # pyright: ignore


def test_synthetic_antecedent_is_often_not_nearest_noun() -> None:
    pairs = [(d, s, t) for d in ALL_DOCUMENTS for s, t in arcs(d, "pronoun-antecedent")]
    nearest = sum(in_scope(document, source, target)[-1] == target for document, source, target in pairs)
    assert nearest / len(pairs) < 0.6


def test_synthetic_referent_probe_fits_antecedent_only() -> None:
    for document in ALL_DOCUMENTS:
        antecedents = dict(arcs(document, "pronoun-antecedent"))
        for probe in (probe for probe in cloze_probes(document) if probe.kind == "referent"):
            pronoun = probe.position - 2
            kind = KIND_OF_STATE[document.words[probe.position]]
            nouns = {i: features(document, i) for i in in_scope(document, pronoun, antecedents[pronoun])}
            assert len(nouns) > 1  # there are other candidates
            assert [i for i, (_, of) in nouns.items() if of == kind] == [antecedents[pronoun]]  # pyright: ignore


def test_synthetic_surnames_are_copied() -> None:
    for document in ALL_DOCUMENTS:
        people: dict[str, str] = {}
        first: dict[str, int] = {}
        expected = []
        for position, word in enumerate(document.words):
            if word in v.FIRST_NAMES:
                surname = document.words[position + 1]
                assert people.setdefault(word, surname) == surname
                if surname in first:
                    expected.append((position + 1, first[surname]))
                first.setdefault(surname, position + 1)
        assert len(set(people.values())) == len(people)
        assert arcs(document, "copy") == expected


def test_synthetic_cause_and_effect_match_in_both_orders() -> None:
    effect_of = {act: effect for _, act, effect in v.CAUSES}
    orders = Counter()
    for document in ALL_DOCUMENTS:
        for effect, cause in arcs(document, "cause-effect"):
            between = document.words[min(effect, cause) : max(effect, cause)]
            assert ("because" if effect < cause else "so") in between
            orders[effect < cause] += 1
            if document.words[cause] in effect_of:
                assert document.words[effect] == effect_of[document.words[cause]]
    assert 0.25 < orders[True] / orders.total() < 0.75


def test_synthetic_related_nouns_share_topic() -> None:
    for document in ALL_DOCUMENTS:
        topics = [v.NOUN_BY_TEXT[word].topic if word in v.NOUN_BY_TEXT else "" for word in document.words]
        for source, target in arcs(document, "related"):
            lemma = v.NOUN_BY_TEXT[document.words[source]].lemma
            between = [i for i in range(target, source) if topics[i] == topics[source]]
            assert [i for i in between if v.NOUN_BY_TEXT[document.words[i]].lemma != lemma] == [target]


def test_synthetic_phrases_start_and_end_with_expected_classes() -> None:
    for document in ALL_DOCUMENTS:
        for first, end in document.phrases:
            assert document.classes[first] in ("determiner", "possessive", "name")
            assert document.classes[end - 1] in ("noun", "name")


# Splits.


def pairs_of(document: Document) -> set[tuple[str, ...]]:
    """Return the word pairs that determine the split, as lemmas."""
    words, pairs = document.words, set()

    def name(position: int) -> str:
        word = words[position]
        return (
            v.NOUN_BY_TEXT[word].lemma if word in v.NOUN_BY_TEXT else words[position - 1] if word in v.SURNAMES else ""
        )

    for subject, verb in arcs(document, "subject-verb"):
        if name(subject) and words[verb] in LEXICAL:
            pairs.add(("verb", name(subject), LEXICAL[words[verb]]))
    pairs |= {("adjective", words[source], name(target)) for source, target in arcs(document, "adjective-noun")}
    people = sorted(set(words) & set(v.FIRST_NAMES))
    pairs |= {("meeting", first, second) for first, second in combinations(people, 2)}
    spans = arcs(document, "bracket", "quote")
    pairs |= {("nesting", words[a], words[c]) for b, a in spans for d, c in spans if a < c < d < b}
    return pairs


def test_synthetic_splits_share_no_word_pairs() -> None:
    train, held_out = (set().union(*map(pairs_of, DOCUMENTS[split])) for split in ("train", "held-out"))
    assert not train & held_out
    for pairs in (train, held_out):
        assert {pair[0] for pair in pairs} == {"verb", "adjective", "meeting", "nesting"}
    assert len(held_out) > 300


# Cloze probes.


def test_cloze_probes_contain_answer_and_are_many() -> None:
    counts = Counter()
    for document in ALL_DOCUMENTS:
        for probe in cloze_probes(document):
            assert document.words[probe.position] in probe.choices
            assert len(set(probe.choices)) == len(probe.choices)
            counts[probe.kind] += 1
    assert set(counts) == set(PROBE_KINDS)
    assert min(counts.values()) > 1000, counts


def test_cloze_probes_defeat_bigram_model() -> None:
    followers: dict[str, Counter[str]] = {}
    for document in islice(SyntheticLanguage(0), 3000):
        for word, after in pairwise(document.words):
            followers.setdefault(word, Counter())[after] += 1
    totals, anywhere, among = Counter(), Counter(), Counter()
    for document in DOCUMENTS["held-out"]:
        for kind, position, choices in cloze_probes(document):
            follower_counts = followers[document.words[position - 1]]
            totals[kind] += 1
            anywhere[kind] += follower_counts.most_common(1)[0][0] == document.words[position]
            among[kind] += max(choices, key=lambda word: follower_counts[word]) == document.words[position]
    for hits in (anywhere, among):
        accuracy = {kind: round(hits[kind] / totals[kind], 3) for kind in PROBE_KINDS}
        assert max(accuracy.values()) < 0.7, accuracy


def test_cloze_probes_agreement_follows_both_numbers() -> None:
    same = Counter()
    for document in ALL_DOCUMENTS:
        subjects = {verb: subject for subject, verb in arcs(document, "subject-verb")}
        for probe in (probe for probe in cloze_probes(document) if probe.kind == "agreement"):
            nouns = [i for i in range(subjects[probe.position] + 1, probe.position) if features(document, i)]
            plural = (features(document, nouns[-1]) or ("", ""))[0] == "they"
            same[plural == (document.words[probe.position] in PLURAL_VERBS)] += 1
    assert 0.35 < same[True] / same.total() < 0.65, same


# The command.


def test_describe_covers_every_relation() -> None:
    rows, document = describe_language(documents=300, split="held-out", seed=4)
    assert [row.relation for row in rows] == list(FIXED_OFFSET_ACCURACY_LIMITS)
    assert document == SyntheticLanguage(4, "held-out").document(0)
    assert all(row.example.count("*") == 4 for row in rows)
    with pytest.raises(HeadwiseError, match="at least 1"):
        describe_language(documents=0)


def test_corpus_command_does_not_import_torch() -> None:
    code = [sys.executable, "-X", "importtime", "-m", "headwise", "corpus", "--documents", "300"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in FIXED_OFFSET_ACCURACY_LIMITS)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "scipy", "tokenizers"}
    data = json.loads(subprocess.run([*code, "--json"], capture_output=True, text=True, check=True).stdout)
    assert [row["relation"] for row in data["relations"]] == list(FIXED_OFFSET_ACCURACY_LIMITS)
    assert data["document"] == DOCUMENTS["train"][0].text
