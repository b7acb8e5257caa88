"""The sentences. Each function tells one kind of sentence and returns it with its relations.

Where a pronoun stands, all other nouns the reader has in mind differ from its antecedent in pronoun *and* kind: exactly one
noun fits, though another may be nearer.
"""

from collections.abc import Callable

from headwise.text.synthetic import vocabulary as v
from headwise.text.synthetic.fragments import Fragment, Word, join
from headwise.text.synthetic.phrases import (
    Setting,
    acting,
    acting_on,
    adverb,
    aside,
    before_verb,
    enclosed,
    inflect,
    noun_phrase,
    prepositional,
)
from headwise.text.synthetic.splits import partners
from headwise.text.synthetic.vocabulary import Noun


def stop(mark: str = ".") -> Word:
    """A full stop, a question mark or a comma."""
    return Word(mark, "delimiter")


def pronoun_for(noun: Noun, antecedent: Word) -> Fragment:
    """The pronoun that stands for a noun, with its arc."""
    word = Word(noun.pronoun, "pronoun", noun)
    return join(word).relate("pronoun-antecedent", word, antecedent)


def telling(scene: Setting) -> Fragment:
    """The dog ( … ) sees the cat near the barn ."""
    noun = scene.noun(animate=True)
    subject = noun_phrase(scene, noun, tails=0.5)
    if scene.chance(0.35):
        subject = join(subject, aside(scene))
    object = noun_phrase(scene, scene.noun(), tails=0.3)
    if scene.chance(0.35):
        object = join(object, aside(scene))
    return join(acting_on(scene, subject, noun, object), stop())


def resolving(scene: Setting) -> Fragment:
    """The dogs like the pillow because it is soft: whoever knows which noun "it" is knows the last word."""
    by_subject = scene.chance(0.5)
    meant = scene.noun(animate=by_subject, names=0.15)  # or "late" would be the best guess
    other = scene.noun(animate=not by_subject, beside=meant)
    tails = 0.3
    if by_subject:
        actor, subject = meant, noun_phrase(scene, meant, beside=meant, tails=tails)
        object = noun_phrase(scene, other, beside=meant, tails=tails)
    else:
        actor, subject = other, noun_phrase(scene, other, beside=meant, tails=tails)
        object = noun_phrase(scene, meant, beside=meant, tails=tails)
    event = acting_on(scene, subject, actor, object)
    pronoun = pronoun_for(meant, (subject if by_subject else object).head)
    verb, state = inflect(v.IS, meant), Word(v.STATES[meant.kind], "adjective")
    remark = join(pronoun, verb, state, head=state).relate("subject-verb", pronoun.head, verb)
    link = scene.pick(("because", "because", "so", "."))
    if link == ".":
        return join(event, stop(), remark, stop())
    whole = join(event, Word(link, "conjunction"), remark, stop())
    effect, cause = (event.head, state) if link == "because" else (state, event.head)
    return whole.relate("cause-effect", effect, cause)


def meeting(scene: Setting) -> Fragment:
    """Alice Smith sees the old barn near Tom Reed ."""
    if len(scene.cast) < 2:
        return telling(scene)
    actor = scene.pick(scene.cast)
    other = scene.pick([person for person in scene.cast if person != actor])
    scene.named.update((actor, other))
    thing, preposition = noun_phrase(scene, scene.noun()), Word(scene.pick(v.PREPOSITIONS), "preposition")
    object = join(thing, preposition, noun_phrase(scene, other))
    return join(acting_on(scene, noun_phrase(scene, actor), actor, object), stop())


def owning(scene: Setting) -> Fragment:
    """The boy near the horses sees his dog . / The boy sees the horses near his house ."""
    owner = scene.noun(animate=True)
    subject = noun_phrase(scene, owner, beside=owner, tails=0.35)
    possessive = Word(v.POSSESSIVES[owner.pronoun], "possessive")
    owned = noun_phrase(scene, _common(scene, owner), determiner=possessive)
    if scene.chance(0.5):
        object = owned
    else:
        thing = noun_phrase(scene, scene.noun(beside=owner))
        object = join(thing, Word(scene.pick(v.PREPOSITIONS), "preposition"), owned)
    whole = join(acting_on(scene, subject, owner, object), stop())
    return whole.relate("possessive", possessive, subject.head)


def _common(scene: Setting, beside: Noun) -> Noun:
    """A noun without a name: Alice Smith is nobody's."""
    while (noun := scene.noun(beside=beside)).kind == "named":
        pass
    return noun


def causing(scene: Setting) -> Fragment:
    """The barn near the trees is wet because the rain falls . / The rain falls here so the barn is wet ."""
    noun = scene.noun()
    effect = scene.pick(partners(scene.split, noun.index, v.EFFECTS))
    power, does, _ = next(row for row in v.WEATHER if row[2] == effect)
    subject = noun_phrase(scene, noun, tails=0.4)
    verb, state = inflect(v.IS, noun), Word(effect, "adjective")
    result = join(subject, verb, state, head=state)
    result.relate("subject-verb", subject.head, verb).relate("adjective-noun", state, subject.head)
    the, cause, act = Word("the", "determiner"), Word(power, "noun"), Word(does, "verb")
    event = join(the, cause, act, *([adverb(scene)] if scene.chance(0.5) else []), head=act)
    event.relate("determiner-noun", the, cause).relate("subject-verb", cause, act)
    if scene.chance(0.5):
        whole = join(result, Word("because", "conjunction"), event, stop())
    else:
        whole = join(event, Word("so", "conjunction"), result, stop())
    return whole.relate("cause-effect", state, act)


def agreeing(scene: Setting) -> Fragment:
    """Today the dogs near the barn are old . / The dogs , which the boy near the barn sees , are old ."""
    noun = scene.noun()
    if noun.kind != "named" and scene.chance(0.5):
        opener, be = [], v.IS
        subject = noun_phrase(scene, noun)
        subject = join(subject, relative(scene, subject.head, noun))
    else:
        opener = [Word(scene.pick(tuple(v.OPENERS)), "adverb")]
        be = v.OPENERS[opener[0].text]
        subject = noun_phrase(scene, noun, tails=0.8)
        if scene.chance(0.25):
            subject = join(subject, aside(scene))
    verb, quality = inflect(be, noun), Word(scene.adjective(noun), "adjective")
    whole = join(*opener, subject, verb, quality, stop(), head=verb)
    return whole.relate("subject-verb", subject.head, verb).relate("adjective-noun", quality, subject.head)


def relative(scene: Setting, head: Word, noun: Noun) -> Fragment:
    """, which the boy near the barn sees ,"""
    which = Word("who" if noun.kind in v.PEOPLE else "which", "pronoun")
    actor = scene.noun(animate=True)
    subject = noun_phrase(scene, actor, tails=0.3)
    verb = inflect(scene.verb(v.TRANSITIVE, actor), actor)
    whole = join(stop(","), which, subject, *before_verb(scene), verb, stop(","))
    whole.relate("subject-verb", subject.head, verb).relate("verb-object", head, verb)
    return whole


def speaking(scene: Setting) -> Fragment:
    """The king says , " the queen waits here " ."""
    noun = scene.noun(animate=True)
    subject = noun_phrase(scene, noun, tails=0.3)
    verb = inflect(v.SAY, noun)
    whole = join(subject, *before_verb(scene), verb, stop(","), enclosed(scene, scene.pick((3, 4))), stop(), head=verb)
    return whole.relate("subject-verb", subject.head, verb)


def supposing(scene: Setting) -> Fragment:
    """If the dog near the barn sleeps here , then it sees the cat ."""
    noun = scene.noun(animate=True)
    first = noun_phrase(scene, noun, beside=noun, tails=0.4)
    if scene.chance(0.4):
        condition = join(acting(scene, first, noun), adverb(scene))
    else:
        thing = noun_phrase(scene, scene.noun(beside=noun), beside=noun, tails=0.3)
        condition = acting_on(scene, first, noun, thing)
    actor, second = noun, pronoun_for(noun, first.head)
    if scene.chance(0.5):
        actor = scene.noun(animate=True)
        second = noun_phrase(scene, actor, tails=0.3)
    consequence = acting_on(scene, second, actor, noun_phrase(scene, scene.noun()))
    if_, then = Word("if", "conjunction"), Word("then", "conjunction")
    whole = join(if_, condition, stop(","), then, consequence, stop(), head=consequence.head)
    return whole.relate("if-then", if_, then)


def asking(scene: Setting) -> Fragment:
    """One question of four kinds, with its answer."""
    return scene.pick((asking_where, asking_what, asking_who, asking_whether))(scene)


def asking_where(scene: Setting) -> Fragment:
    """Where are the old dogs ? they are near the barn ."""
    noun = scene.noun()
    where, verb, again = Word("where", "question"), inflect(v.IS, noun), inflect(v.IS, noun)
    subject = noun_phrase(scene, noun, beside=noun, tails=0.2)
    pronoun, place = pronoun_for(noun, subject.head), prepositional(scene, None)
    whole = join(where, verb, subject, stop("?"), pronoun, again, place, stop(), head=verb)
    whole.relate("subject-verb", subject.head, verb).relate("subject-verb", pronoun.head, again)
    return whole.relate("question-answer", where, place.head)


def asking_what(scene: Setting) -> Fragment:
    """What does the old dog see ? it sees a cake ."""
    noun = scene.noun(animate=True)
    subject = noun_phrase(scene, noun, beside=noun, tails=0.3)
    what, do, verb = Word("what", "question"), inflect(v.DO, noun), scene.verb(v.TRANSITIVE, noun)
    pronoun, again = pronoun_for(noun, subject.head), inflect(verb, noun)
    object = noun_phrase(scene, scene.noun())
    whole = join(
        what,
        do,
        subject,
        Word(verb[1], "verb"),
        stop("?"),
        pronoun,
        *before_verb(scene),
        again,
        object,
        stop(),
        head=do,
    )
    whole.relate("subject-verb", subject.head, do).relate("subject-verb", pronoun.head, again)
    return whole.relate("verb-object", object.head, again).relate("question-answer", what, object.head)


def asking_who(scene: Setting) -> Fragment:
    """Who sees the old dog ? the king does ."""
    while (noun := scene.noun(animate=True)).kind not in v.PEOPLE:
        pass
    who, verb = Word("who", "question"), Word(scene.verb(v.TRANSITIVE, noun)[0], "verb")
    object = noun_phrase(scene, scene.noun(), tails=0.4)
    person, do = noun_phrase(scene, noun), inflect(v.DO, noun)
    whole = join(who, verb, object, stop("?"), person, do, stop(), head=verb)
    whole.relate("subject-verb", person.head, do).relate("verb-object", object.head, verb)
    return whole.relate("question-answer", who, person.head)


def asking_whether(scene: Setting) -> Fragment:
    """Does the dog see the cats ? yes , it does ."""
    noun = scene.noun(animate=True)
    subject = noun_phrase(scene, noun, beside=noun, tails=0.3)
    do, again, verb = inflect(v.DO, noun), inflect(v.DO, noun), Word(scene.verb(v.TRANSITIVE, noun)[1], "verb")
    object = noun_phrase(scene, scene.noun(beside=noun))
    answer, pronoun = Word(scene.pick(("yes", "no")), "answer"), pronoun_for(noun, subject.head)
    denial = [Word("not", "answer")] if answer.text == "no" else []
    whole = join(do, subject, verb, object, stop("?"), answer, stop(","), pronoun, again, *denial, stop())
    whole.relate("subject-verb", subject.head, do).relate("subject-verb", pronoun.head, again)
    return whole.relate("verb-object", object.head, verb).relate("question-answer", do, answer)


# how often each kind of sentence is told
PATTERNS: dict[Callable[[Setting], Fragment], int] = {
    resolving: 5, agreeing: 3, telling: 4, meeting: 2, speaking: 3, owning: 2, causing: 2, supposing: 2, asking: 3,
}  # fmt: skip
