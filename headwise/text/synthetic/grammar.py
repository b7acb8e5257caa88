"""Sentences of the synthetic language. Each function generates one kind of sentence with its relations.

All other nouns near a pronoun differ from its antecedent in pronoun *and* kind: exactly one noun fits, although another one
may be nearer.
"""

from collections.abc import Callable

from headwise.text.synthetic import vocabulary as v
from headwise.text.synthetic.annotated_fragment import AnnotatedFragment, Word, join_fragments
from headwise.text.synthetic.phrases import (
    DocumentState,
    bracketed_clause,
    inflect,
    intransitive_clause,
    make_noun_phrase,
    make_prepositional_phrase,
    optional_pre_adverb,
    parenthetical,
    random_adverb,
    transitive_clause,
)
from headwise.text.synthetic.vocabulary import Noun
from headwise.text.synthetic.word_pair_splits import allowed_partners


def punctuation_word(mark: str = ".") -> Word:
    """A full stop, a question mark or a comma."""
    return Word(mark, "delimiter")


def pronoun_for(noun: Noun, antecedent: Word) -> AnnotatedFragment:
    """Return the pronoun of a noun, with an arc to its antecedent."""
    word = Word(noun.pronoun, "pronoun", noun)
    return join_fragments(word).add_relation("pronoun-antecedent", word, antecedent)


def transitive_sentence(doc: DocumentState) -> AnnotatedFragment:
    """The dog ( … ) sees the cat near the barn ."""
    noun = doc.sample_noun(animate=True)
    subject = make_noun_phrase(doc, noun, tail_probability=0.5)
    if doc.bernoulli(0.35):
        subject = join_fragments(subject, parenthetical(doc))
    object = make_noun_phrase(doc, doc.sample_noun(), tail_probability=0.3)
    if doc.bernoulli(0.35):
        object = join_fragments(object, parenthetical(doc))
    return join_fragments(transitive_clause(doc, subject, noun, object), punctuation_word())


def pronoun_sentence(doc: DocumentState) -> AnnotatedFragment:
    """The dogs like the pillow because it is soft: the antecedent of "it" determines the last word."""
    refers_to_subject = doc.bernoulli(0.5)
    antecedent = doc.sample_noun(
        animate=refers_to_subject, name_probability=0.15
    )  # rare, so that "late" is not the best guess
    other = doc.sample_noun(animate=not refers_to_subject, distinct_from=antecedent)
    tail_probability = 0.3
    if refers_to_subject:
        actor, subject = (
            antecedent,
            make_noun_phrase(doc, antecedent, distinct_from=antecedent, tail_probability=tail_probability),
        )
        object = make_noun_phrase(doc, other, distinct_from=antecedent, tail_probability=tail_probability)
    else:
        actor, subject = (
            other,
            make_noun_phrase(doc, other, distinct_from=antecedent, tail_probability=tail_probability),
        )
        object = make_noun_phrase(doc, antecedent, distinct_from=antecedent, tail_probability=tail_probability)
    event = transitive_clause(doc, subject, actor, object)
    pronoun = pronoun_for(antecedent, (subject if refers_to_subject else object).head)
    verb, state = inflect(v.IS, antecedent), Word(v.STATE_ADJECTIVES[antecedent.kind], "adjective")
    remark = join_fragments(pronoun, verb, state, head=state).add_relation("subject-verb", pronoun.head, verb)
    connective = doc.choice(("because", "because", "so", "."))
    if connective == ".":
        return join_fragments(event, punctuation_word(), remark, punctuation_word())
    sentence = join_fragments(event, Word(connective, "conjunction"), remark, punctuation_word())
    effect, cause = (event.head, state) if connective == "because" else (state, event.head)
    return sentence.add_relation("cause-effect", effect, cause)


def two_person_sentence(doc: DocumentState) -> AnnotatedFragment:
    """Alice Smith sees the old barn near Tom Reed ."""
    if len(doc.people) < 2:
        return transitive_sentence(doc)
    actor = doc.choice(doc.people)
    other = doc.choice([person for person in doc.people if person != actor])
    doc.mentioned.update((actor, other))
    thing, preposition = make_noun_phrase(doc, doc.sample_noun()), Word(doc.choice(v.PREPOSITIONS), "preposition")
    object = join_fragments(thing, preposition, make_noun_phrase(doc, other))
    return join_fragments(transitive_clause(doc, make_noun_phrase(doc, actor), actor, object), punctuation_word())


def make_possessive_sentence(doc: DocumentState) -> AnnotatedFragment:
    """The boy near the horses sees his dog . / The boy sees the horses near his house ."""
    owner = doc.sample_noun(animate=True)
    subject = make_noun_phrase(doc, owner, distinct_from=owner, tail_probability=0.35)
    possessive = Word(v.POSSESSIVES[owner.pronoun], "possessive")
    owned = make_noun_phrase(doc, _common_noun(doc, owner), determiner=possessive)
    if doc.bernoulli(0.5):
        object = owned
    else:
        thing = make_noun_phrase(doc, doc.sample_noun(distinct_from=owner))
        object = join_fragments(thing, Word(doc.choice(v.PREPOSITIONS), "preposition"), owned)
    sentence = join_fragments(transitive_clause(doc, subject, owner, object), punctuation_word())
    return sentence.add_relation("possessive", possessive, subject.head)


def _common_noun(doc: DocumentState, distinct_from: Noun) -> Noun:
    """Return a noun that is not a named person, because Alice Smith cannot be owned."""
    while (noun := doc.sample_noun(distinct_from=distinct_from)).kind == "named":
        pass
    return noun


def cause_sentence(doc: DocumentState) -> AnnotatedFragment:
    """The barn near the trees is wet because the rain falls . / The rain falls here so the barn is wet ."""
    noun = doc.sample_noun()
    effect = doc.choice(allowed_partners(doc.split, noun.index, v.EFFECTS))
    agent, agent_verb, _ = next(row for row in v.CAUSES if row[2] == effect)
    subject = make_noun_phrase(doc, noun, tail_probability=0.4)
    verb, state = inflect(v.IS, noun), Word(effect, "adjective")
    result = join_fragments(subject, verb, state, head=state)
    result.add_relation("subject-verb", subject.head, verb).add_relation("adjective-noun", state, subject.head)
    the, cause, act = Word("the", "determiner"), Word(agent, "noun"), Word(agent_verb, "verb")
    event = join_fragments(the, cause, act, *([random_adverb(doc)] if doc.bernoulli(0.5) else []), head=act)
    event.add_relation("determiner-noun", the, cause).add_relation("subject-verb", cause, act)
    if doc.bernoulli(0.5):
        sentence = join_fragments(result, Word("because", "conjunction"), event, punctuation_word())
    else:
        sentence = join_fragments(event, Word("so", "conjunction"), result, punctuation_word())
    return sentence.add_relation("cause-effect", state, act)


def agreement_sentence(doc: DocumentState) -> AnnotatedFragment:
    """Today the dogs near the barn are old . / The dogs , which the boy near the barn sees , are old ."""
    noun = doc.sample_noun()
    if noun.kind != "named" and doc.bernoulli(0.5):
        opener, verb_forms = [], v.IS
        subject = make_noun_phrase(doc, noun)
        subject = join_fragments(subject, relative_clause(doc, subject.head, noun))
    else:
        opener = [Word(doc.choice(tuple(v.TIME_ADVERBS)), "adverb")]
        verb_forms = v.TIME_ADVERBS[opener[0].text]
        subject = make_noun_phrase(doc, noun, tail_probability=0.8)
        if doc.bernoulli(0.25):
            subject = join_fragments(subject, parenthetical(doc))
    verb, quality = inflect(verb_forms, noun), Word(doc.sample_adjective(noun), "adjective")
    sentence = join_fragments(*opener, subject, verb, quality, punctuation_word(), head=verb)
    return sentence.add_relation("subject-verb", subject.head, verb).add_relation(
        "adjective-noun", quality, subject.head
    )


def relative_clause(doc: DocumentState, head: Word, noun: Noun) -> AnnotatedFragment:
    """, which the boy near the barn sees ,"""
    relative_pronoun = Word("who" if noun.kind in v.PEOPLE else "which", "pronoun")
    actor = doc.sample_noun(animate=True)
    subject = make_noun_phrase(doc, actor, tail_probability=0.3)
    verb = inflect(doc.sample_verb(v.TRANSITIVE, actor), actor)
    clause = join_fragments(
        punctuation_word(","), relative_pronoun, subject, *optional_pre_adverb(doc), verb, punctuation_word(",")
    )
    clause.add_relation("subject-verb", subject.head, verb).add_relation("verb-object", head, verb)
    return clause


def quote_sentence(doc: DocumentState) -> AnnotatedFragment:
    """The king says , " the queen waits here " ."""
    noun = doc.sample_noun(animate=True)
    subject = make_noun_phrase(doc, noun, tail_probability=0.3)
    verb = inflect(v.SAY, noun)
    sentence = join_fragments(
        subject,
        *optional_pre_adverb(doc),
        verb,
        punctuation_word(","),
        bracketed_clause(doc, doc.choice((3, 4))),
        punctuation_word(),
        head=verb,
    )
    return sentence.add_relation("subject-verb", subject.head, verb)


def conditional_sentence(doc: DocumentState) -> AnnotatedFragment:
    """If the dog near the barn sleeps here , then it sees the cat ."""
    noun = doc.sample_noun(animate=True)
    first = make_noun_phrase(doc, noun, distinct_from=noun, tail_probability=0.4)
    if doc.bernoulli(0.4):
        condition = join_fragments(intransitive_clause(doc, first, noun), random_adverb(doc))
    else:
        thing = make_noun_phrase(doc, doc.sample_noun(distinct_from=noun), distinct_from=noun, tail_probability=0.3)
        condition = transitive_clause(doc, first, noun, thing)
    actor, second = noun, pronoun_for(noun, first.head)
    if doc.bernoulli(0.5):
        actor = doc.sample_noun(animate=True)
        second = make_noun_phrase(doc, actor, tail_probability=0.3)
    consequence = transitive_clause(doc, second, actor, make_noun_phrase(doc, doc.sample_noun()))
    if_, then = Word("if", "conjunction"), Word("then", "conjunction")
    sentence = join_fragments(
        if_, condition, punctuation_word(","), then, consequence, punctuation_word(), head=consequence.head
    )
    return sentence.add_relation("if-then", if_, then)


def question_answer(doc: DocumentState) -> AnnotatedFragment:
    """Return one of four kinds of questions, with its answer."""
    return doc.choice((where_question, what_question, who_question, yes_no_question))(doc)


def where_question(doc: DocumentState) -> AnnotatedFragment:
    """Where are the old dogs ? they are near the barn ."""
    noun = doc.sample_noun()
    question_word, verb, answer_verb = Word("where", "question"), inflect(v.IS, noun), inflect(v.IS, noun)
    subject = make_noun_phrase(doc, noun, distinct_from=noun, tail_probability=0.2)
    pronoun, location = pronoun_for(noun, subject.head), make_prepositional_phrase(doc, None)
    sentence = join_fragments(
        question_word,
        verb,
        subject,
        punctuation_word("?"),
        pronoun,
        answer_verb,
        location,
        punctuation_word(),
        head=verb,
    )
    sentence.add_relation("subject-verb", subject.head, verb).add_relation("subject-verb", pronoun.head, answer_verb)
    return sentence.add_relation("question-answer", question_word, location.head)


def what_question(doc: DocumentState) -> AnnotatedFragment:
    """Return a question about an object, with its answer: `what does the old dog see ? it sees a cake .`"""
    noun = doc.sample_noun(animate=True)
    subject = make_noun_phrase(doc, noun, distinct_from=noun, tail_probability=0.3)
    question_word, do, verb = Word("what", "question"), inflect(v.DO, noun), doc.sample_verb(v.TRANSITIVE, noun)
    pronoun, answer_verb = pronoun_for(noun, subject.head), inflect(verb, noun)
    object = make_noun_phrase(doc, doc.sample_noun())
    sentence = join_fragments(
        question_word,
        do,
        subject,
        Word(verb[1], "verb"),
        punctuation_word("?"),
        pronoun,
        *optional_pre_adverb(doc),
        answer_verb,
        object,
        punctuation_word(),
        head=do,
    )
    sentence.add_relation("subject-verb", subject.head, do).add_relation("subject-verb", pronoun.head, answer_verb)
    return sentence.add_relation("verb-object", object.head, answer_verb).add_relation(
        "question-answer", question_word, object.head
    )


def who_question(doc: DocumentState) -> AnnotatedFragment:
    """Who sees the old dog ? the king does ."""
    while (noun := doc.sample_noun(animate=True)).kind not in v.PEOPLE:
        pass
    question_word, verb = Word("who", "question"), Word(doc.sample_verb(v.TRANSITIVE, noun)[0], "verb")
    object = make_noun_phrase(doc, doc.sample_noun(), tail_probability=0.4)
    person, do = make_noun_phrase(doc, noun), inflect(v.DO, noun)
    sentence = join_fragments(
        question_word, verb, object, punctuation_word("?"), person, do, punctuation_word(), head=verb
    )
    sentence.add_relation("subject-verb", person.head, do).add_relation("verb-object", object.head, verb)
    return sentence.add_relation("question-answer", question_word, person.head)


def yes_no_question(doc: DocumentState) -> AnnotatedFragment:
    """Does the dog see the cats ? yes , it does ."""
    noun = doc.sample_noun(animate=True)
    subject = make_noun_phrase(doc, noun, distinct_from=noun, tail_probability=0.3)
    do, answer_auxiliary, verb = (
        inflect(v.DO, noun),
        inflect(v.DO, noun),
        Word(doc.sample_verb(v.TRANSITIVE, noun)[1], "verb"),
    )
    object = make_noun_phrase(doc, doc.sample_noun(distinct_from=noun))
    answer, pronoun = Word(doc.choice(("yes", "no")), "answer"), pronoun_for(noun, subject.head)
    denial = [Word("not", "answer")] if answer.text == "no" else []
    sentence = join_fragments(
        do,
        subject,
        verb,
        object,
        punctuation_word("?"),
        answer,
        punctuation_word(","),
        pronoun,
        answer_auxiliary,
        *denial,
        punctuation_word(),
    )
    sentence.add_relation("subject-verb", subject.head, do).add_relation("subject-verb", pronoun.head, answer_auxiliary)
    return sentence.add_relation("verb-object", object.head, verb).add_relation("question-answer", do, answer)


# Relative frequency of each kind of sentence.
SENTENCE_WEIGHTS: dict[Callable[[DocumentState], AnnotatedFragment], int] = {
    pronoun_sentence: 5, agreement_sentence: 3, transitive_sentence: 4, two_person_sentence: 2, quote_sentence: 3,
    make_possessive_sentence: 2, cause_sentence: 2, conditional_sentence: 2, question_answer: 3,
}  # fmt: skip
