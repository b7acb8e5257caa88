"""Noun phrases, clauses and asides: the pieces sentences are made of. Each returns its words with their relations."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from headwise.text.synthetic import vocabulary as v
from headwise.text.synthetic.fragments import Fragment, Word, join
from headwise.text.synthetic.splits import is_held_out, nestings, partners
from headwise.text.synthetic.vocabulary import Noun

Item = TypeVar("Item")

_FIRST = tuple(v.FIRST_NAMES.items())
_BY_TOPIC = {topic: tuple(noun for noun in v.NOUNS if noun.topic == topic) for topic in v.TOPICS}
_ANIMATE_BY_TOPIC = {t: tuple(noun for noun in nouns if noun.kind in v.ANIMATE) for t, nouns in _BY_TOPIC.items()}


class Setting:
    """What one document is about: its topics, its people with names, and the dice that decide everything.

    Only `random()` is asked of the dice: its sequence is promised to stay the same from one Python to the next.
    """

    def __init__(self, random: Callable[[], float], split: str) -> None:
        self.random = random
        self.split = split
        first = self.pick(v.TOPICS)
        self.topics = (first, self.pick([topic for topic in v.TOPICS if topic != first]))
        self.topic = first  # of the sentence under way
        self.cast = self._people()
        self.named: set[Noun] = set()  # in the sentence under way

    def turn(self) -> None:
        """Begin a sentence: it has one of the two topics, and names nobody yet."""
        self.topic = self.pick(self.topics)
        self.named.clear()

    def pick(self, options: Sequence[Item]) -> Item:
        """One of several, each as likely."""
        return options[int(self.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.random() < probability

    def noun(self, *, animate: bool = False, beside: Noun | None = None, names: float | None = None) -> Noun:
        """A noun to speak of; one that can be mistaken for `beside` neither by its pronoun nor by its kind.

        `names`: how often it is a person with a name, where there are any.
        """
        names = (0.6 if animate else 0.4) if names is None else names
        while True:
            if self.cast and self.chance(names):
                noun = self.pick(self.cast)
                if noun in self.named:
                    continue  # once in a sentence is enough
            else:
                topic = self.topic if self.chance(0.75) else self.pick(self.topics)
                noun = self.pick((_ANIMATE_BY_TOPIC if animate else _BY_TOPIC)[topic])
            if beside is None or (noun.pronoun != beside.pronoun and noun.kind != beside.kind):
                if noun.kind == "named":
                    self.named.add(noun)
                return noun

    def verb(self, table: tuple[tuple[str, str], ...], subject: Noun) -> tuple[str, str]:
        """A verb this subject may have in this split, in both its numbers."""
        return self.pick(partners(self.split, subject.index, table))

    def adjective(self, noun: Noun, other: str = "") -> str:
        """An adjective this noun may have in this split, and not that other one."""
        while (adjective := self.pick(partners(self.split, noun.index, v.ADJECTIVES))) == other:
            pass
        return adjective

    def _people(self) -> tuple[Noun, ...]:
        """One person with a name, now and then two, who share no name; and only some meet in this split."""
        people: list[Noun] = []
        wanted = self.pick((1, 1, 1, 1, 1, 1, 1, 2))
        while len(people) < wanted:
            free = [index for index in range(len(_FIRST)) if all(self._may_meet(index, one.index) for one in people)]
            if not free:
                break
            index = self.pick(free)
            first, pronoun = _FIRST[index]
            surname = self.pick([name for name in v.SURNAMES if name not in [one.text for one in people]])
            people.append(Noun(surname, first, False, pronoun, "named", "", index))
        return tuple(people)

    def _may_meet(self, first: int, second: int) -> bool:
        """Whether two people, by their first names, may be in one document of this split."""
        return first != second and is_held_out(first, second) == (self.split == "held-out")


def inflect(verb: tuple[str, str], subject: Noun) -> Word:
    """The form of a verb that agrees with its subject."""
    auxiliary = verb in (v.IS, v.WAS, v.DO)
    return Word(verb[subject.plural], "auxiliary" if auxiliary else "verb")


def noun_phrase(
    scene: Setting,
    noun: Noun,
    *,
    beside: Noun | None = None,
    tails: float = 0.0,
    determiner: Word | None = None,
) -> Fragment:
    """[the] [old and quiet] dog [near the barn]: the noun is its head. `tails`: how likely a prepositional phrase follows."""
    head = Word(noun.text, "name" if noun.kind == "named" else "noun", noun)
    if noun.kind == "named":
        whole = join(Word(noun.lemma, "name"), head, head=head)
    else:
        adjectives = adjective_row(scene, noun, head)
        follower = adjectives.words[0].text if adjectives else noun.text
        if determiner is None:
            determiner = Word(scene.pick(v.PLURAL if noun.plural else v.SINGULAR), "determiner")
            if determiner.text == "a" and follower[0] in "aeiou":
                determiner.text = "an"
        whole = join(determiner, *([adjectives] if adjectives else []), head, head=head)
        whole.relate("determiner-noun", determiner, head)
    if tails and scene.chance(tails):
        whole = join(whole, prepositional(scene, beside))
    whole.phrases.append((whole.words[0], whole.words[-1]))
    return whole


def adjective_row(scene: Setting, noun: Noun, head: Word) -> Fragment | None:
    """Nothing, old, old quiet, or old and quiet."""
    dice = scene.random()
    if dice < 0.5:
        return None
    first = Word(scene.adjective(noun), "adjective")
    if dice < 0.7:
        return join(first).relate("adjective-noun", first, head)
    second = Word(scene.adjective(noun, first.text), "adjective")
    between = [Word("and", "conjunction")] if dice < 0.85 else []
    both = join(first, *between, second)
    return both.relate("adjective-noun", first, head).relate("adjective-noun", second, head)


def prepositional(scene: Setting, beside: Noun | None) -> Fragment:
    """Near the old barn."""
    preposition = Word(scene.pick(v.PREPOSITIONS), "preposition")
    place = noun_phrase(scene, scene.noun(beside=beside), beside=beside)
    return join(preposition, place, head=place.head)


def acting(scene: Setting, subject: Fragment, noun: Noun) -> Fragment:
    """The dog sleeps: a subject, with all that belongs to it, and its intransitive verb, which is the head."""
    verb = inflect(scene.verb(v.INTRANSITIVE, noun), noun)
    return join(subject, *before_verb(scene), verb, head=verb).relate("subject-verb", subject.head, verb)


def acting_on(scene: Setting, subject: Fragment, noun: Noun, object: Fragment) -> Fragment:
    """The dog sees the cat: subject, transitive verb, object; the verb is the head."""
    verb = inflect(scene.verb(v.TRANSITIVE, noun), noun)
    clause = join(subject, *before_verb(scene), verb, object, head=verb).relate("subject-verb", subject.head, verb)
    return clause.relate("verb-object", object.head, verb)


def before_verb(scene: Setting) -> list[Word]:
    """Always, never, still, or nothing."""
    return [Word(scene.pick(v.PRE_ADVERBS), "adverb")] if scene.chance(0.3) else []


def adverb(scene: Setting) -> Word:
    """Here, often, slowly."""
    return Word(scene.pick(v.ADVERBS), "adverb")


def enclosed(scene: Setting, shape: int, beside: Noun | None = None, *, deeper: float = 0.35) -> Fragment:
    """( the boy sings [ a dog waits here ] often ): what is enclosed always ends with an adverb, so that a reader
    knows *that* it closes, and must remember *what* was opened."""
    kind = "quote" if v.BRACKETS[shape] in v.QUOTES else "bracket"
    opener, closer = (Word(mark, kind) for mark in v.BRACKETS[shape])
    noun = scene.noun(animate=True, beside=beside)
    tails = 0.2 if deeper else 0.0
    content = acting(scene, noun_phrase(scene, noun, beside=beside, tails=tails), noun)
    if scene.chance(deeper):
        content = join(content, enclosed(scene, scene.pick(nestings(scene.split, shape)), beside, deeper=0.0))
    whole = join(opener, content, adverb(scene), closer, head=content.head)
    return whole.relate(kind, closer, opener)


def aside(scene: Setting, beside: Noun | None = None) -> Fragment:
    """Something said by the way, in round, square or curly brackets."""
    return enclosed(scene, scene.pick((0, 1, 2)), beside)
