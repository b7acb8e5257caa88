"""One head's story in plain sentences: what it does, how sure that is and against what, and where it looks otherwise."""

from headwise.look.profile.result import HeadProfile, Profile
from headwise.look.profile.roles import Support

# What a role means, as the end of "it ...". A relation that is not here is named as it is.
MEANS = {
    "previous token": "looks at the token before", "next token": "looks at the token after",
    "self": "looks at the token itself", "local": "looks at tokens within three of its own",
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
}  # fmt: skip
RESTS = {
    "sink": "on the first token", "special token": "on special tokens", "broad": "nowhere: it looks everywhere alike",
    "idle": "as if it were not there: it writes next to nothing",
}  # fmt: skip
SURE = {
    "selective": "This stands above its baseline on texts it was not chosen on; whether it changes what the head writes was "
    "not shown.",
    "effective": "It also stands when attention is weighted by the length of what it fetches; whether the model needs it was "
    "not shown.",
    "causal": "And the model needs it: taking the head away hurts just this, more than taking away others of its layer.",
}
MORE = 2  # roles told in full beside the first


def story(profile: Profile, head: HeadProfile) -> list[str]:
    """A few sentences about a head."""
    if not head.roles:
        told = [
            f"Head {head.address} has no role that could be shown on {profile.about['texts']:,} texts: of {profile.family:,} "
            "tests over all heads and roles none stands for it."
        ]
    else:
        told = [f"Head {head.address} {_does(head.roles[0])}", SURE[head.roles[0].rung]]
        told += [f"It also {_does(one)}" for one in head.roles[1 : 1 + MORE]]
        others = [one.role for one in head.roles[1 + MORE :]]
        told += [f"Further roles, weaker: {', '.join(others)}."] if others else []
    told += [f"Otherwise it rests {RESTS[rest]}." for rest in head.rest[:1]]
    if head.evidence:
        first = head.evidence[0]
        told.append(f"For example ([x] looks, *y* is looked at hardest): {first.text} ({first.weight:.2f})")
    return told


def _does(one: Support) -> str:
    """What it does, how often, and what would happen without it."""
    means = MEANS.get(one.role, f"follows {one.role}") + (f" ({one.detail})" if one.detail else "")
    low, high = one.interval
    return (
        f"{means}: {one.score:.0%} (95 % CI {low:.0%} to {high:.0%}), where {one.null:.0%} would be its baseline; "
        f"{one.rows:,} cases, {one.on}."
    )
