"""One head's story in plain sentences: what it does, how sure that is and against what, where it rests, what it writes, what
the model loses without it, what it could cost less, and which heads it works with. Each sentence says which word of `words`
tells how its numbers are made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from headwise.look.measure.far import BEYOND, KEEPS
from headwise.look.measure.questions import SETS
from headwise.look.measure.scene import SPECIAL
from headwise.look.measure.shape import RELATIVE, RESTING, SHARE
from headwise.look.profile.effects import Effect
from headwise.look.profile.prompted import could_stream
from headwise.look.profile.result import HeadProfile, Profile
from headwise.look.profile.roles import HELD, LEAD, ROLE_OF, Support
from headwise.look.worth.sensitivity import Cost
from headwise.model import AnyModel
from headwise.show.known import LENGTH, Facts, Kin, Missed, Wrote, ask
from headwise.show.words import WORDS, how

# What a role means, as the end of "it ...". A relation that is not here is named as it is.
MEANS = {
    "previous token": "looks at the token before", "next token": "looks at the token after",
    "self": "looks at the token itself", "local": "looks at tokens within three of its own",
    "fixed offset": "looks at the token a fixed number of places away",
    "delimiter": "looks at punctuation", "capitalised": "looks at capitalised words", "digit": "looks at digits",
    "long range": "looks far back", "induction": "finds what came after the same token before",
    "duplicate token": "finds the same token before", "same phrase": "looks inside the same phrase",
    "part of speech": "looks at words of the same class", "semantic": "joins words of related meaning",
    "coreference": "joins a pronoun and what it stands for", "possessive": "joins an owner and what is owned",
    "bracket": "joins the two brackets of a pair", "quote": "joins the two quotation marks of a pair",
    "copy": "finds the word that is said again", "if-then": "joins if and its then",
    "cause-effect": "joins a cause and its effect", "subject-verb": "joins a verb and its subject",
    "verb-object": "joins a verb and its object", "adjective-noun": "joins an adjective and its noun",
    "determiner-noun": "joins a determiner and its noun",
    "question-answer": "joins a question and its answer", "sentence end": "joins a full stop and the one before",
    "successor": "writes what comes next in a list", "name mover": "looks at the name that is due and writes it",
    "name suppression": "looks at the name that is not due and writes against it",
    "copy suppression": "looks at the token about to be said again and writes against it",
    "query focus": "looks from a question at the document it is about",
    "retrieval": "finds the token that is being copied from far back",
    "far offset": "looks at the token a fixed number of places away, far off",
    "fixed place": "looks at one place of the text, from far away",
}  # fmt: skip
PICTURED = {  # what a role means where tokens are patches
    "local": "looks at the eight patches around its own", "row": "looks along its row of patches",
    "column": "looks along its column of patches", "global": "looks beyond half of the picture",
    "class token": "looks at the class token", "register": "looks at registers",
    "sink": "looks at one patch, whatever patch looks",
}  # fmt: skip
RESTS = {
    "sink": ("on the first token", RESTING.name), "special token": ("on special tokens", SPECIAL),
    "broad": ("nowhere: it looks everywhere nearly alike", RELATIVE.name),
    "idle": ("by writing next to nothing", SHARE.name),
}  # fmt: skip
SURE = {
    "selective": "Whether it changes what the head writes was not shown (selective).",
    "effective": "It stands as well when each look counts by the length of what it fetches; whether answers hang on it "
    "was not shown (effective).",
    "causal": "And the role's answers hang on it, more than the same answers do where they are reached another way (causal).",
}
ONE_SET = "It stands as well when each look counts by the length of what it fetches."
LED = "And the lead of the name due over the other name hangs on it (causal)."
WRITTEN = ("successor",)  # roles whose score is a share of cases in which something is written
MASSES = {ROLE_OF.get(name, name) for name in SETS}  # relations whose score is a share of weight, not of cases
PARTS = {"qk": "W_Q and W_K", "vo": "W_V and W_O", "keys": "its cached keys", "values": "its cached values"}
COSINE = "1 − cosine"  # of a model without output
MORE = 2  # roles told in full beside the first


class Sentence(NamedTuple):
    """One sentence, and the word that says how its numbers are made."""

    about: str
    text: str


@dataclass(frozen=True)
class Story:
    """All that is told of one head: as text, or in a notebook with a pointer behind each sentence."""

    lines: tuple[Sentence, ...]

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def _repr_html_(self) -> str:
        told = (
            f'<li>{escape(line.text)} <small title="{escape(WORDS[line.about].meaning)}">'
            f"<code>{escape(how(line.about))}</code></small></li>"
            for line in self.lines
        )
        return f"<ul>{''.join(told)}</ul>"


def tell_story(profile: Profile, head: HeadProfile, model: AnyModel | None = None) -> Story:
    """The story of a head; with its model all that can be asked of it in a minute or so."""
    return Story(tuple(story(profile, head, None if model is None else ask(model, head))))


def story(profile: Profile, head: HeadProfile, known: Facts | None = None) -> list[Sentence]:
    """The sentences, in the order of the questions people ask."""
    known = known or Facts()
    return [
        *_does(profile, head),
        _rests(head),
        *_beyond(profile, head),
        *_writes(known.wrote),
        *_without(known.loss),
        *_less(known),
        *_with(known),
    ]


def _does(profile: Profile, head: HeadProfile) -> Iterator[Sentence]:
    pictures = bool(profile.about.get("pictures"))
    if not head.roles:
        yield Sentence(
            "unclear",
            f"Head {head.address}: nothing found. On {profile.about['texts']:,} {'pictures' if pictures else 'texts'} no "
            f"role of it stood above its baseline; {profile.family:,} tests were made over all heads and roles. Models "
            "with random weights throughout give this answer for all heads; a trained model with random attention need not, "
            "because tests are over texts and not over draws of weights.",
        )
        return
    yield Sentence("role", f"Head {head.address} {_role(head.roles[0], pictures)}.")
    yield Sentence(
        "evidence", f"{_sure(head.roles[0], profile.family)} {_level(head.roles[0])}{_effects(head.roles[0])}"
    )
    for one in head.roles[1 : 1 + MORE]:
        yield Sentence(
            "role", f"It also {_role(one, pictures)} ({one.evidence_level}; {_ends(one)}; baseline {_share(one.null)})."
        )
    others = [f"{one.role} {_share(one.score)}" for one in head.roles[1 + MORE :]]
    if others:
        yield Sentence("role", f"Further roles, with weaker evidence: {', '.join(others)}.")
    if head.evidence:
        hits = sum(one.hit for one in head.evidence)
        first = next((one for one in head.evidence if one.hit), head.evidence[0])
        yield Sentence(
            "hit",
            f"For example ([x] looks, *y* is looked at hardest): {first.text} ({first.weight:.2f}). Of {len(head.evidence)} "
            f"held-out cases kept as examples {hits} {'is a hit' if hits == 1 else 'are hits'}.",
        )


def _role(one: Support, pictures: bool) -> str:
    means = (PICTURED if pictures else MEANS).get(one.role, f"follows {one.role}")
    name = f" ({one.role}{f' {one.detail}' if one.detail else ''})"
    if one.relation and one.role not in MASSES:
        return f"{means}{name}: in {_share(one.score)} of the cases it looks hardest at the right word"
    if one.role in WRITTEN:
        return f"{means}{name}: so it does in {_share(one.score)} of the cases"
    return f"{means}{name}: {_share(one.score)} of its weight goes there"


def _sure(one: Support, family: int) -> str:
    on = f" ({one.on})" if one.on else ""
    return (
        f"Measured on {one.rows:,} held-out cases{on}: {_ends(one)}; its baseline has {_share(one.null)}; p = {one.p:.2g} "
        f"after correction for {one.family or family:,} tests."
    )


def _ends(one: Support) -> str:
    return f"95 % CI {_share(one.interval[0])} to {_share(one.interval[1])}"


def _level(one: Support) -> str:
    """Evidence level in a sentence; a causal level names the token sets or prompts of its test."""
    if not one.causal_on:
        return SURE[one.rung]
    sets = " and ".join(one.causal_on)
    if one.rung != "causal":
        return f"{ONE_SET} Answers hang on it on {sets} alone ({one.evidence_level})."
    return f"{LED if one.probe == LEAD else SURE[one.rung]} It was tested on {sets}."


def _effects(one: Support) -> str:
    """Costs of ablating the head on each token set, so far as they were asked for."""
    return "".join(_effect(one, effect) for effect in one.effects)


def _effect(one: Support, effect: Effect) -> str:
    moves = {HELD: "what it holds back gains", LEAD: "the lead of the name due loses"}
    told = (
        f" On {effect.on}, without what it says of a case {moves.get(one.probe or '', 'the test of its role loses')} "
    )
    told += f"{effect.cost:+.3f} nats an answer"
    if effect.control is None:
        return f"{told}; nowhere were the same answers found reached another way."
    told += f", and {effect.control:+.3f} where the same answers are reached another way"
    if effect.single is not None:
        told += f" and {effect.single:+.3f} in sentences that name one person"
    if effect.more is None or effect.interval is None:
        return f"{told}."
    low, high = effect.interval
    return f"{told}; {effect.more:+.3f} more than without others of its layer (95 % CI {low:+.3f} to {high:+.3f})."


def _beyond(profile: Profile, head: HeadProfile) -> Iterator[Sentence]:
    streams, value = could_stream(profile.tally), head.measures.get(BEYOND.name, math.nan)
    if streams is not None and math.isfinite(value):
        could = "Looking alone, it could stream" if streams[profile.addresses.index(head.address)] else "It needs more"
        yield Sentence(
            "beyond",
            f"{could}: on {BEYOND.on} {_share(value)} of its weight lies on what a cache of the first {KEEPS.first} and the "
            f"last {KEEPS.last} tokens would forget.",
        )


def _rests(head: HeadProfile) -> Sentence:
    if not head.rest:
        first = head.measures.get(RESTING.name, math.nan)
        seen = f": {_share(first)} of its weight lies on the first token" if math.isfinite(first) else ""
        return Sentence("rests", f"When it does nothing it has no resting place of its own{seen}.")
    told = []
    for rest in head.rest:
        where, measure = RESTS[rest]
        value = head.measures.get(measure, math.nan)
        unit = {"broad": "of the highest entropy", "idle": "of what its layer writes"}.get(
            rest, "of its weight, on average"
        )
        told.append(f"{where} ({_share(value)} {unit})" if math.isfinite(value) else where)
    return Sentence("rests", f"When it does nothing it rests {' and '.join(told)}.")


def _writes(wrote: Wrote | None) -> Iterator[Sentence]:
    if wrote is None:
        return
    if not math.isfinite(wrote.copying):
        yield Sentence("copying", "It writes nothing at all.")
        return
    random = f"copying {wrote.copying:+.2f}; random weights spread by {wrote.spread:.2f}"
    if abs(wrote.copying) < 2 * wrote.spread:
        yield Sentence("copying", f"It writes neither what it reads nor its opposite ({random}).")
    else:
        yield Sentence(
            "copying", f"It writes {'what it reads' if wrote.copying > 0 else 'against what it reads'} ({random})."
        )
    if wrote.words:
        one = wrote.words[0]
        yield Sentence(
            "writes",
            f"Looking at {one.token!r} it makes {_words(one.promotes)} likelier, {_words(one.suppresses)} less likely.",
        )


def _words(scored: list[tuple[str, float]]) -> str:
    return ", ".join(repr(word) for word, _ in scored[:3])


def _without(loss: Missed | None) -> Iterator[Sentence]:
    if loss is None:
        return
    one, told = loss.worth, f"{loss.how} ablation" if loss.by == "ablation" else loss.by
    nothing = ", not told apart from nothing" if one.low <= 0 <= one.high else ""
    lost = f"the model loses {one.worth:.2g} {loss.unit}"
    if loss.unit == COSINE:
        lost = f"what the model gives of a text turns by {one.worth:.2g}, in {COSINE}"
    text = f"Without it {lost} (95 % CI {one.low:.2g} to {one.high:.2g}{nothing})"
    if math.isfinite(one.above_layer):
        text += f", {one.above_layer:+.2g} beside an average other head of its layer"
    yield Sentence(
        "worth", f"{text}; {told} on {loss.texts:,} texts. Later heads may take over: this is the least it does."
    )


def _less(known: Facts) -> Iterator[Sentence]:
    less = known.less
    if less is None:
        return
    shared = f", with {_and(known.shares)}, which share its keys" if known.shares else ""
    if less.costs:
        told = ", ".join(f"{PARTS[one.part]} {_cost(one)}" for one in less.costs if one.bits == less.costs[0].bits)
        yield Sentence(
            "bits",
            f"Stored at {less.costs[0].bits} bits{shared}, the loss changes by: {told} ({less.unit}, {less.texts:,} texts).",
        )
    if less.cache:
        yield Sentence(
            "cache",
            f"Its key head {less.key} keeps {less.cache / 1e6:.1f} MB of keys and values at {LENGTH:,} tokens{shared}.",
        )

    if less.streamed is not None:
        one, more = less.streamed, less.streamed.more
        yield Sentence(
            "streaming",
            f"If that key head kept the first {one.keeps.first} and the last {one.keeps.last} tokens alone, later tokens "
            f"would cost {more.mean:+.2g} nats (95 % CI {more.low:+.2g} to {more.high:+.2g}; {one.texts:,} texts of "
            f"{one.longest:,} tokens).",
        )


def _cost(one: Cost) -> str:
    return f"{one.more:+.2g} (95 % CI {one.low:+.2g} to {one.high:+.2g})"


def _with(known: Facts) -> Iterator[Sentence]:
    told = []
    if known.shares:
        told.append(f"It shares keys and values with {_and(known.shares)}.")
    if known.before is not None:
        told.append(f"Of what earlier heads write it reads {_partner(known.before)} most.")
    if known.behind is not None:
        told.append(f"Of later heads {_partner(known.behind)} reads it most.")
    if known.alike:
        told.append(f"It looks most like {known.alike[0][0]} ({known.alike[0][1]:.2g} nats apart).")
    if told:
        yield Sentence("partners", " ".join(told))


def _partner(one: Kin) -> str:
    return f"{one.head} (V-composition {one.score:.2f}, random weights {one.chance:.2f})"


def _share(part: float) -> str:
    return f"{100 * part:.0f} %"


def _and(heads: tuple[str, ...]) -> str:
    return heads[0] if len(heads) == 1 else f"{', '.join(heads[:-1])} and {heads[-1]}"
