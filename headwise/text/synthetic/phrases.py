"""Noun phrases, clauses and parentheticals: the parts of sentences. Each function returns words with their relations."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from headwise.text.synthetic import vocabulary as v
from headwise.text.synthetic.annotated_fragment import AnnotatedFragment, Word, join_fragments
from headwise.text.synthetic.vocabulary import Noun
from headwise.text.synthetic.word_pair_splits import allowed_bracket_nestings, allowed_partners, is_held_out

Item = TypeVar("Item")

_FIRST_NAMES = tuple(v.FIRST_NAMES.items())
_BY_TOPIC = {topic: tuple(noun for noun in v.NOUNS if noun.topic == topic) for topic in v.TOPICS}
_ANIMATE_BY_TOPIC = {t: tuple(noun for noun in nouns if noun.kind in v.ANIMATE) for t, nouns in _BY_TOPIC.items()}


class DocumentState:
    """State of one document: its topics, its named people and the RNG.

    Only `random()` of the RNG is used, because Python guarantees its sequence across versions.
    """

    def __init__(self, random: Callable[[], float], split: str) -> None:
        self.random = random
        self.split = split
        first = self.choice(v.TOPICS)
        self.topics = (first, self.choice([topic for topic in v.TOPICS if topic != first]))
        self.topic = first  # of the current sentence
        self.people = self._sample_people()
        self.mentioned: set[Noun] = set()  # in the current sentence

    def start_sentence(self) -> None:
        """Begin a sentence with one of the two topics."""
        self.topic = self.choice(self.topics)
        self.mentioned.clear()

    def choice(self, options: Sequence[Item]) -> Item:
        """Return a random option."""
        return options[int(self.random() * len(options))]

    def bernoulli(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random() < probability

    def sample_noun(
        self, *, animate: bool = False, distinct_from: Noun | None = None, name_probability: float | None = None
    ) -> Noun:
        """Return a random noun. It differs from `distinct_from` in pronoun and kind.

        `name_probability` is the probability of a named person, if the document has any.
        """
        name_probability = (0.6 if animate else 0.4) if name_probability is None else name_probability
        while True:
            if self.people and self.bernoulli(name_probability):
                noun = self.choice(self.people)
                if noun in self.mentioned:
                    continue  # a person is named at most once per sentence
            else:
                topic = self.topic if self.bernoulli(0.75) else self.choice(self.topics)
                noun = self.choice((_ANIMATE_BY_TOPIC if animate else _BY_TOPIC)[topic])
            if distinct_from is None or (noun.pronoun != distinct_from.pronoun and noun.kind != distinct_from.kind):
                if noun.kind == "named":
                    self.mentioned.add(noun)
                return noun

    def sample_verb(self, table: tuple[tuple[str, str], ...], subject: Noun) -> tuple[str, str]:
        """Return a verb that the subject may have in this split, as (singular, plural)."""
        return self.choice(allowed_partners(self.split, subject.index, table))

    def sample_adjective(self, noun: Noun, other: str = "") -> str:
        """Return an adjective that the noun may have in this split, other than `other`."""
        while (adjective := self.choice(allowed_partners(self.split, noun.index, v.ADJECTIVES))) == other:
            pass
        return adjective

    def _sample_people(self) -> tuple[Noun, ...]:
        """Return one named person, or sometimes two with different surnames who may occur together in this split."""
        people: list[Noun] = []
        num_people = self.choice((1, 1, 1, 1, 1, 1, 1, 2))
        while len(people) < num_people:
            candidates = [
                index
                for index in range(len(_FIRST_NAMES))
                if all(self._may_meet(index, person.index) for person in people)
            ]
            if not candidates:
                break
            index = self.choice(candidates)
            first, pronoun = _FIRST_NAMES[index]
            surname = self.choice([name for name in v.SURNAMES if name not in [person.text for person in people]])
            people.append(Noun(surname, first, False, pronoun, "named", "", index))
        return tuple(people)

    def _may_meet(self, first: int, second: int) -> bool:
        """Return whether two people, by the indices of their first names, may occur in one document of this split."""
        return first != second and is_held_out(first, second) == (self.split == "held-out")


def inflect(verb: tuple[str, str], subject: Noun) -> Word:
    """Return the form of a verb that agrees with its subject."""
    auxiliary = verb in (v.IS, v.WAS, v.DO)
    return Word(verb[subject.plural], "auxiliary" if auxiliary else "verb")


def make_noun_phrase(
    doc: DocumentState,
    noun: Noun,
    *,
    distinct_from: Noun | None = None,
    tail_probability: float = 0.0,
    determiner: Word | None = None,
) -> AnnotatedFragment:
    """[the] [old and quiet] dog [near the barn]: the noun is the head.

    `tail_probability` is the probability of a prepositional phrase.
    """
    head = Word(noun.text, "name" if noun.kind == "named" else "noun", noun)
    if noun.kind == "named":
        phrase = join_fragments(Word(noun.lemma, "name"), head, head=head)
    else:
        adjectives = adjective_phrase(doc, noun, head)
        follower = adjectives.words[0].text if adjectives else noun.text
        if determiner is None:
            determiner = Word(doc.choice(v.PLURAL_DETERMINERS if noun.plural else v.SINGULAR_DETERMINERS), "determiner")
            if determiner.text == "a" and follower[0] in "aeiou":
                determiner.text = "an"
        phrase = join_fragments(determiner, *([adjectives] if adjectives else []), head, head=head)
        phrase.add_relation("determiner-noun", determiner, head)
    if tail_probability and doc.bernoulli(tail_probability):
        phrase = join_fragments(phrase, make_prepositional_phrase(doc, distinct_from))
    phrase.phrases.append((phrase.words[0], phrase.words[-1]))
    return phrase


def adjective_phrase(doc: DocumentState, noun: Noun, head: Word) -> AnnotatedFragment | None:
    """Empty, old, old quiet, or old and quiet."""
    u = doc.random()
    if u < 0.5:
        return None
    first = Word(doc.sample_adjective(noun), "adjective")
    if u < 0.7:
        return join_fragments(first).add_relation("adjective-noun", first, head)
    second = Word(doc.sample_adjective(noun, first.text), "adjective")
    between = [Word("and", "conjunction")] if u < 0.85 else []
    phrase = join_fragments(first, *between, second)
    return phrase.add_relation("adjective-noun", first, head).add_relation("adjective-noun", second, head)


def make_prepositional_phrase(doc: DocumentState, distinct_from: Noun | None) -> AnnotatedFragment:
    """Near the old barn."""
    preposition = Word(doc.choice(v.PREPOSITIONS), "preposition")
    location = make_noun_phrase(doc, doc.sample_noun(distinct_from=distinct_from), distinct_from=distinct_from)
    return join_fragments(preposition, location, head=location.head)


def intransitive_clause(doc: DocumentState, subject: AnnotatedFragment, noun: Noun) -> AnnotatedFragment:
    """The dog sleeps: a subject phrase and its intransitive verb, which is the head."""
    verb = inflect(doc.sample_verb(v.INTRANSITIVE, noun), noun)
    return join_fragments(subject, *optional_pre_adverb(doc), verb, head=verb).add_relation(
        "subject-verb", subject.head, verb
    )


def transitive_clause(
    doc: DocumentState, subject: AnnotatedFragment, noun: Noun, object: AnnotatedFragment
) -> AnnotatedFragment:
    """The dog sees the cat: subject, transitive verb, object; the verb is the head."""
    verb = inflect(doc.sample_verb(v.TRANSITIVE, noun), noun)
    clause = join_fragments(subject, *optional_pre_adverb(doc), verb, object, head=verb).add_relation(
        "subject-verb", subject.head, verb
    )
    return clause.add_relation("verb-object", object.head, verb)


def optional_pre_adverb(doc: DocumentState) -> list[Word]:
    """Always, never, still, or empty."""
    return [Word(doc.choice(v.PRE_ADVERBS), "adverb")] if doc.bernoulli(0.3) else []


def random_adverb(doc: DocumentState) -> Word:
    """Here, often, slowly."""
    return Word(doc.choice(v.ADVERBS), "adverb")


def bracketed_clause(
    doc: DocumentState, shape: int, distinct_from: Noun | None = None, *, nest_probability: float = 0.35
) -> AnnotatedFragment:
    """( the boy sings [ a dog waits here ] often ): the clause ends with an adverb, so that the position of the closing
    bracket is predictable, and its kind must be remembered."""
    kind = "quote" if v.BRACKETS[shape] in v.QUOTES else "bracket"
    opener, closer = (Word(mark, kind) for mark in v.BRACKETS[shape])
    noun = doc.sample_noun(animate=True, distinct_from=distinct_from)
    tail_probability = 0.2 if nest_probability else 0.0
    content = intransitive_clause(
        doc, make_noun_phrase(doc, noun, distinct_from=distinct_from, tail_probability=tail_probability), noun
    )
    if doc.bernoulli(nest_probability):
        content = join_fragments(
            content,
            bracketed_clause(
                doc, doc.choice(allowed_bracket_nestings(doc.split, shape)), distinct_from, nest_probability=0.0
            ),
        )
    clause = join_fragments(opener, content, random_adverb(doc), closer, head=content.head)
    return clause.add_relation(kind, closer, opener)


def parenthetical(doc: DocumentState, distinct_from: Noun | None = None) -> AnnotatedFragment:
    """A parenthetical clause in round, square or curly brackets."""
    return bracketed_clause(doc, doc.choice((0, 1, 2)), distinct_from)
