"""One head's story in plain sentences: what it does, how sure that is and against what, where it rests, what it writes, what
the model loses without it, what it could cost less, and which heads it works with. Each sentence says which word of `words`
tells how its numbers are made."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import NamedTuple

from headwise.analysis.ablation.sensitivity import Cost
from headwise.analysis.attribution.direct_effect import DirectEffect
from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.long_offsets import BEYOND, KEEPS
from headwise.analysis.metrics.row_shape import RELATIVE, RESTING, SHARE
from headwise.analysis.roles.effects import Effect
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.analysis.roles.prompt_roles import STREAMS, could_stream
from headwise.analysis.roles.roles import HELD, LEAD, Support
from headwise.compression.streaming_cost import BOUND
from headwise.model import AnyModel
from headwise.ui.glossary import WORDS, how
from headwise.ui.head_facts import LENGTH, Facts, Kin, Less, Missed, Wrote, ask
from headwise.ui.role_descriptions import describe_role

# idle pattern: its name, the metric it is read off, and a sentence about the value of the metric
IDLE_PATTERNS = {
    "sink": ("attention sink", RESTING.name, "on average {} of its weight lies on the first token"),
    "special token": ("special-token sink", SPECIAL, "on average {} of its weight lies on special tokens"),
    "broad": ("diffuse", RELATIVE.name, "its entropy is {} of the largest possible"),
    "idle": ("inactive", SHARE.name, "it writes {} of what its layer writes"),
}
SURE = {
    "selective": "Whether it changes what the head writes was not shown (selective).",
    "effective": "It stands as well when each look counts by the length of what it fetches; whether answers hang on it "
    "was not shown (effective).",
    "causal": "And the role's answers hang on it, more than the same answers do where they are reached another way (causal).",
}
ONE_SET = "It stands as well when each look counts by the length of what it fetches."
LED = "And the lead of the name due over the other name hangs on it (causal)."
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
        *_beyond(head),
        *_writes(known.wrote),
        *_without(known.loss),
        *_less(known),
        *_streams(profile, head, known.less),
        *_with(known),
    ]


def _does(profile: Profile, head: HeadProfile) -> Iterator[Sentence]:
    pictures = bool(profile.about.get("pictures"))
    if not head.roles:
        yield Sentence(
            "unclear",
            f"Head {head.address}: nothing found. On {profile.about['texts']:,} {'pictures' if pictures else 'texts'} no "
            "role of it stood above its baseline by the margin of the role, with p < 0.05; "
            f"{profile.family:,} tests were made over all heads and roles. Models with random weights throughout give this "
            "answer for all heads; a trained model with random attention need not, because tests are over texts and not over "
            "draws of weights.",
        )
        return
    yield Sentence("role", f"Head {head.address} {describe_role(head.roles[0], pictures=pictures)}.")
    yield Sentence(
        "evidence", f"{_sure(head.roles[0], profile.family)} {_level(head.roles[0])}{_effects(head.roles[0])}"
    )
    for one in head.roles[1 : 1 + MORE]:
        described = describe_role(one, pictures=pictures)
        yield Sentence(
            "role", f"It also {described} ({one.evidence_level}; {_ends(one)}; baseline {_share(one.null)})."
        )
    yield from _further_roles(head.roles[: 1 + MORE], head.roles[1 + MORE :])
    if head.evidence:
        hits = sum(one.hit for one in head.evidence)
        first = next((one for one in head.evidence if one.hit), head.evidence[0])
        yield Sentence(
            "hit",
            f"For example ([x] looks, *y* is looked at hardest): {first.text} ({first.weight:.2f}). Of {len(head.evidence)} "
            f"held-out cases kept as examples {hits} {'is a hit' if hits == 1 else 'are hits'}.",
        )


def _further_roles(described: Sequence[Support], further: Sequence[Support]) -> Iterator[Sentence]:
    """One sentence per evidence level. Roles of one level passed the same tests and differ in how far they are above their
    baselines."""
    for level, group in groupby(further, key=lambda one: one.rung):
        roles = list(group)
        same_level = [one.gain for one in described if one.rung == level]
        p = f"p up to {max(one.p for one in roles):.2g}"
        where = f"at the same evidence level ({level}, {p})" if same_level else f"at the evidence level {level} ({p})"
        if same_level and max(one.gain for one in roles) < min(same_level):
            where += ", less far above their baselines"
        labels = [f"{one.role} {one.detail}".rstrip() for one in roles]
        scores = [f"{_share(one.score)} (baseline {_share(one.null)})" for one in roles]
        listed = ", ".join(f"{label} {score}" for label, score in zip(labels, scores, strict=True))
        yield Sentence("role", f"Further roles {where}: {listed}.")


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


def _beyond(head: HeadProfile) -> Iterator[Sentence]:
    value = head.measures.get(BEYOND.name, math.nan)
    if math.isfinite(value):
        yield Sentence(
            "beyond",
            f"{_small_share(value)} of its attention falls outside {KEEPS.first} sink tokens and a window of {KEEPS.last} "
            f"tokens (on {BEYOND.on}).",
        )


def _rests(head: HeadProfile) -> Sentence:
    if not head.rest:
        first = head.measures.get(RESTING.name, math.nan)
        value = f"; {IDLE_PATTERNS['sink'][2].format(_share(first))}" if math.isfinite(first) else ""
        return Sentence("rests", f"Idle pattern: none{value}.")
    patterns = []
    for name in head.rest:
        pattern, metric, sentence = IDLE_PATTERNS[name]
        value = head.measures.get(metric, math.nan)
        patterns.append(f"{pattern}, {sentence.format(_share(value))}" if math.isfinite(value) else pattern)
    return Sentence("rests", f"Idle pattern: {'; '.join(patterns)}.")


def _writes(wrote: Wrote | None) -> Iterator[Sentence]:
    if wrote is None:
        return
    if wrote.effect is not None:
        yield Sentence("direct effect", _attended_logit(wrote.effect))
    if wrote.words:
        one = wrote.words[0]
        yield Sentence(
            "writes",
            f"Looking at {one.token!r} it makes {_words(one.promotes)} likelier, {_words(one.suppresses)} less likely.",
        )


def _attended_logit(effect: DirectEffect) -> str:
    """How a head changes the logit of the token it attends to most."""
    size = f"95% CI {effect.low:+.2f} to {effect.high:+.2f}"
    claim = (
        f"Its output does not measurably change the logit of the token it attends to most ({effect.mean:+.2f}; {size})"
    )
    if effect.sign:
        verb = "raises" if effect.sign > 0 else "lowers"
        claim = f"Its output {verb} the logit of the token it attends to most by {abs(effect.mean):.2f} ({size})"
    return (
        f"{claim}, relative to the mean over the vocabulary: direct effect at {effect.queries:,} query positions of "
        f"{effect.texts:,} texts, {100 * effect.share:.2g}% of all; at the others it attends most to the first token or to a "
        "special token."
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
    yield Sentence("worth", f"{text}; {told} on {loss.texts:,} texts. Later heads may take over a part of its work.")


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


def _streams(profile: Profile, head: HeadProfile, less: Less | None) -> Iterator[Sentence]:
    """Measured loss with the KV head streaming; a recommendation only if attention and every kind of text allow it."""
    if less is None or less.streamed is None or not less.streamed.costs:
        return
    test, local = less.streamed, could_stream(profile.tally)
    costs = "; ".join(
        f"{cost.kind} {cost.full:.2f} {cost.more.mean:+.2g} (95% CI {cost.more.low:+.2g} to {cost.more.high:+.2g}; "
        f"{cost.texts:,} texts)"
        for cost in test.costs
    )
    text = (
        f"Loss in nats per token, and its increase with KV head {less.key} at {test.policy.first} sink tokens and a window "
        f"of {test.policy.last}: {costs}."
    )
    if test.passed and local is not None and local[profile.addresses.index(head.address)]:
        text += (
            f" KV head {less.key} can stream: every increase is below {BOUND:g} (upper end of the CI), and less than "
            f"{STREAMS:.0%} of the head's attention falls outside."
        )
    yield Sentence("streaming", text)


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


def _small_share(value: float) -> str:
    return "Less than 0.01%" if 0 < value < 1e-4 else f"{100 * value:.2g}%"


def _and(heads: tuple[str, ...]) -> str:
    return heads[0] if len(heads) == 1 else f"{', '.join(heads[:-1])} and {heads[-1]}"
