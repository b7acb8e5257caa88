"""Every summary sentence is printed for a head for which it is true, and not for heads for which it is false.

The behavior of each head is known from its constructed attention or weights. A row of the table is one template: a pattern,
the summary that contains it, and the summaries that do not. Random gold arcs are the control.
"""

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from headwise.analysis.metrics.directed_relations import CONTROL_RELATIONS
from headwise.analysis.recording.text_hash_split import bucket_of_text
from headwise.analysis.roles.roles import ROLE_OF_RELATION
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from headwise.text.probe import probe_set
from headwise.ui import head_summary, role_descriptions
from headwise.ui.head_summary import IDLE_PATTERNS
from headwise.ui.role_descriptions import PATCH_ROLES, RELATION_ROLES, TOKEN_ROLES
from tests.ui.summaries import (
    ARCS,
    follow,
    followers,
    followers_of_shuffled_gold,
    profile_of,
    summary,
    surface_heads,
    synthetic_followers,
)
from tests.ui.summaries_of_models import (
    asked_heads,
    decoder_heads,
    encoder_heads,
    patch_heads,
    prompted_heads,
    ranked_heads,
    streaming_heads,
)

Builder = Callable[[], dict[str, list[str]]]
BUILDERS: tuple[Builder, ...] = (
    followers, followers_of_shuffled_gold, synthetic_followers, surface_heads, decoder_heads, encoder_heads, prompted_heads,
    patch_heads, asked_heads, ranked_heads, streaming_heads,
)  # fmt: skip


class Template(NamedTuple):
    """A kind of sentence: a pattern, the builder of heads, the head with it, and heads without it."""

    pattern: str
    heads: Builder
    true: str
    false: tuple[str, ...]


NUMBER, PERCENT = r"[+-]?[\d.,e-]+", r"\d+%"
OPPOSITE = {">": "<", "<": ">"}


def relation_templates() -> Iterable[Template]:
    """Both directions of every relation. False for heads with the other direction or with other words."""
    for heads, names in ((followers, ARCS), (synthetic_followers, _synthetic_names())):
        for name in names:
            relation, direction = name.rsplit(" ", 1)
            if relation not in CONTROL_RELATIONS:
                role = ROLE_OF_RELATION.get(relation, relation)
                described = RELATION_ROLES.get(role) or role_descriptions._describe_arc_directions(role)
                others = ("owned", "first word") if heads is followers else ()
                pattern = re.escape(f"{described['><'.index(direction)]} ({role} {direction}): ")
                yield Template(pattern, heads, name, (f"{relation} {OPPOSITE[direction]}", *others))


def _synthetic_names() -> tuple[str, ...]:
    return tuple(
        f"{name} {direction}"
        for name in ("copy", "delimiter", "same phrase", "same class", "nsubj")
        for direction in "><"
    )


def _role(role: str) -> str:
    return re.escape(f"{TOKEN_ROLES[role]} ({role}")


WEIGHT = rf"on average {PERCENT} of its attention goes there"
WORDS = rf"in {PERCENT} of the cases, the target word gets the largest weight of all words"
TOKENS = rf"in {PERCENT} of the cases, the target token gets its largest weight"
LOSS = r"Ablating it changes the loss by (\S+) nats per token \(95% CI (\S+) to ([^),]+)"
TEMPLATES = (
    *relation_templates(),
    # roles of tokens
    Template(_role("previous token"), decoder_heads, "0.0", ("1.1", "1.2")),
    Template(_role("next token"), encoder_heads, "0.0", ("0.1", "0.2")),
    Template(_role("self"), decoder_heads, "1.2", ("0.0", "0.4")),
    Template(_role("local"), encoder_heads, "0.2", ("0.3", "0.4")),
    Template(_role("fixed offset"), decoder_heads, "1.1", ("0.0", "1.2")),
    Template(_role("delimiter"), surface_heads, "delimiter", ("before delimiter", "capitalized")),
    Template(_role("capitalized"), surface_heads, "capitalized", ("delimiter", "near")),
    Template(_role("digit"), decoder_heads, "1.3", ("0.1", "0.4")),
    Template(_role("long range"), surface_heads, "long range", ("near", "first token")),
    Template(_role("induction"), decoder_heads, "1.0", ("0.0", "0.2")),
    Template(_role("duplicate token"), decoder_heads, "0.2", ("0.0", "1.0")),
    Template(_role("retrieval"), decoder_heads, "1.0", ("0.2", "0.0")),
    Template(r"has the role three back: its score is 100%", decoder_heads, "1.1", ("0.0", "1.0")),
    # roles on prompts
    Template(_role("name mover"), prompted_heads, "name mover", ("writes against the name",)),
    Template(_role("name suppression"), prompted_heads, "name suppression", ("writes for the other name", "name mover")),
    Template(_role("copy suppression"), prompted_heads, "copy suppression", ("writes for the token",)),
    Template(_role("successor"), prompted_heads, "successor", ("repeats the word", "never attends to the word")),
    Template(_role("query focus"), prompted_heads, "query focus", ("uniform",)),
    Template(_role("far offset"), prompted_heads, "far offset", ("one back", "fixed position")),
    Template(_role("fixed position"), prompted_heads, "fixed position", ("far offset", "uniform decoder")),
    # roles of patches
    *(
        Template(re.escape(f"{means} ({role}"), patch_heads, role, ("uniform", "local" if role != "local" else "row"))
        for role, means in PATCH_ROLES.items()
    ),
    # the value of a score
    Template(WEIGHT, decoder_heads, "0.0", ("0.3", "0.1")),
    Template(WORDS, decoder_heads, "0.3", ("0.0", "0.1")),
    Template(TOKENS, decoder_heads, "1.0", ("0.0", "0.3")),
    Template(rf"\(successor\): in {PERCENT} of the cases\.", prompted_heads, "successor", ("name mover",)),
    Template(
        rf"on average {PERCENT} of its attention goes there \(0 in cases in which its output does not have this effect",
        prompted_heads, "name mover", ("query focus",),
    ),
    # evidence
    Template(r"Head \S+: no role found\. On 60 texts, no role exceeded its", decoder_heads, "0.1", ("0.0", "1.0")),
    Template(r"Head \S+: no role found\. On 40 images, no role exceeded its", patch_heads, "uniform", ("row", "sink")),
    Template(rf"Evaluated on {NUMBER} held-out cases \(.+\): {PERCENT} \(95% CI", decoder_heads, "0.0", ("0.1",)),
    Template(r"Not confirmed when attention is weighted by value norms", encoder_heads, "fetches nothing", ("0.1",)),
    Template(r"Still above the baseline when attention is weighted", encoder_heads, "0.1", ("fetches nothing",)),
    Template(r"Causal effect not tested\.", encoder_heads, "0.1", ()),
    Template(r"Causal effect not tested\.", decoder_heads, "1.2", ("0.0", "0.2", "0.3")),
    Template(r"Causal effect not confirmed\. Cost of ablating", decoder_heads, "0.2", ("0.0", "1.2")),
    Template(r"Causal effect confirmed: .* Tested on random tokens and running text\.", decoder_heads, "0.0", ("0.2", "1.2")),
    Template(r": \+\S+ nats per answer \(rise in the loss of [^)]*\), [+-]", decoder_heads, "0.0", ("1.2", "0.1")),
    Template(r": -\S+ nats per answer \(rise in the loss of [^)]*\), [+-]", decoder_heads, "0.2", ("0.0", "0.1")),
    Template(
        r"Causal effect confirmed: .* reduces the lead of .* Tested on sentences about two people\. Cost of ablating the "
        r"head on sentences about two people: \+1\.500 nats .* lead .* \+0\.250 in sentences with one name",
        ranked_heads, "lead", ("held back", "one set"),
    ),
    Template(
        r"Causal effect confirmed on running text only \(evidence level: value-weighted; causal on running text\)",
        ranked_heads, "one set", ("lead",),
    ),
    Template(r"\+\S+ nats per answer \(rise in log-probability of", ranked_heads, "held back", ("lower level",)),
    Template(r"no control cases with the same answers were found", decoder_heads, "0.3", ("0.0", "0.2")),
    Template(rf"; \+{NUMBER} relative to the other heads of its layer \(95%", decoder_heads, "0.0", ("0.2", "0.3")),
    Template(r"Example \(\[x\] is the query.* 8 of 8 stored .* are hits", decoder_heads, "0.0", ("0.1", "0.4")),
    Template(r"1 of 2 stored held-out examples is a hit", ranked_heads, "held back", ("lower level",)),
    Template(r"It also attends from a possessive pronoun", followers, "several", ("possessive <", "bracket >")),
    # further roles
    Template(
        r"Further roles at the same evidence level \(value-weighted, p up to \S+\), closer to their baselines: bracket",
        ranked_heads, "same level, less far", ("same level, farther", "lower level"),
    ),
    Template(
        r"Further roles at the same evidence level \(value-weighted, p up to \S+\): ",
        ranked_heads, "same level, farther", ("same level, less far", "lower level"),
    ),
    Template(
        r"Further roles at evidence level attention \(p up to \S+\): ",
        ranked_heads, "lower level", ("same level, less far", "same level, farther"),
    ),
    Template(r"Further roles at the same .* closer to their baselines: ", followers, "several", ("bracket >",)),
    # idle patterns
    Template(r"attention sink, on average 100% of its attention is on the first", decoder_heads, "0.1", ("0.0", "0.4")),
    Template(r"special-token sink, on average 8\d% of its attention", surface_heads, "special", ("delimiter", "first token")),
    Template(r"diffuse, its entropy is 100% of the maximum", decoder_heads, "0.4", ("0.0", "0.1")),
    Template(r"inactive, its share of its layer's output is 0%", decoder_heads, "0.5", ("0.4", "0.0")),
    Template(r"Idle pattern: none", decoder_heads, "0.0", ("0.1", "0.4", "0.5")),
    # streaming
    Template(r"^Less than 0\.01% of its attention is outside 4 sink", prompted_heads, "one back", ("far offset",)),
    Template(r"^\d+% of its attention is outside 4 sink tokens", prompted_heads, "far offset", ("one back",)),
    Template(
        r"with KV head 0\.0 at 4 sink tokens and a window of 32: running text",
        streaming_heads, "previous token", ("induction",),
    ),
    Template(
        r"KV head 0\.0 can stream: every increase is below 0\.05", streaming_heads, "previous token", ("induction",),
    ),
    Template(
        r"nouns repeated \S+ \+[^0 ]\S* \(95% CI \+[^0 ]", streaming_heads, "induction", ("previous token",),
    ),
    # direct effect on the attended token's logit
    Template(r"^Its output raises the logit of the token it attends to most by", asked_heads, "0.2", ("1.1", "1.2", "0.3")),
    Template(r"^Its output lowers the logit of the token it attends to most by", asked_heads, "1.2", ("0.2", "1.1", "0.3")),
    Template(r"^Its output does not measurably change the logit of", asked_heads, "random", ("0.2", "1.2", "0.3")),
    Template(r"Attending to .* promotes .* and suppresses .* embedding alone", asked_heads, "random", ("0.3", "not asked")),
    # loss, bits, cache, partners
    Template(rf"{LOSS}\), ", asked_heads, "0.2", ("0.3", "random", "not asked")),
    Template(r"changes the output vector of a text by \S+ in 1 − cosine", asked_heads, "encoder", ("0.2", "0.3")),
    Template(rf"{LOSS}, not significantly different from 0", asked_heads, "0.3", ("0.2", "not asked")),
    Template(r"quantized to 4 bits, together with head 1\.3 \(same KV head\):", asked_heads, "random", ("0.0", "not asked")),
    Template(r"Loss increase if one part is quantized to 4 bits: W_Q and W_K", asked_heads, "0.0", ("random", "not asked")),
    Template(r"KV cache: 0\.3 MB at 4,096 .*1\.1, shared with head 1\.3\)", asked_heads, "random", ("0.0", "not asked")),
    Template(r"KV cache: 3\.5 MB at 4,096 tokens \(KV head 0\.\d\)", asked_heads, "0.0", ("random", "not asked")),
    Template(r"It shares its KV head with head 1\.3", asked_heads, "random", ("0.0", "not asked")),
    Template(r"Strongest V-composition with an earlier head: 0\.0 \(", asked_heads, "1.0", ("0.0", "random")),
    Template(r"Strongest V-composition with a later head: 1\.0 \(", asked_heads, "0.0", ("0.2", "1.0")),
    Template(r"Most similar attention: 0\.1 \(Jensen–Shannon divergence 0 nats\)", asked_heads, "0.0", ("0.3", "1.0")),
)  # fmt: skip


def says(template: Template, sentences: Iterable[str]) -> bool:
    return any(re.search(template.pattern, sentence) for sentence in sentences)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: f"{template.true}: {template.pattern[:40]}")
def test_sentence_is_printed_for_the_head_it_is_true_of_alone(template: Template) -> None:
    built = template.heads()
    assert says(template, built[template.true])
    assert [name for name in template.false if says(template, built[name])] == []


@pytest.mark.parametrize("name", [name for name in ARCS if name.rsplit(" ", 1)[0] not in CONTROL_RELATIONS])
def test_shuffled_gold_gives_no_sentence_about_a_role(name: str) -> None:
    built = followers_of_shuffled_gold()[name]
    assert "no role found" in built[0]
    assert not any(" attends " in sentence for sentence in built)


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda value: value.__name__)
def test_every_printed_sentence_is_of_a_template(builder: Builder) -> None:
    patterns = [
        re.sub(r"\d+(\\\.\d+)?", lambda number: r"[\d.]+", template.pattern) for template in TEMPLATES
    ]  # other numbers
    for sentence in chain.from_iterable(builder().values()):
        assert any(re.search(pattern, sentence) for pattern in patterns), sentence


def test_every_role_and_idle_pattern_has_a_template() -> None:
    texts = " ".join(template.pattern.replace("\\", "") for template in TEMPLATES)
    for text in (*TOKEN_ROLES.values(), *PATCH_ROLES.values(), *chain.from_iterable(RELATION_ROLES.values())):
        assert text in texts, text
    assert all(name in texts for name, _, _ in IDLE_PATTERNS.values())


@pytest.mark.parametrize("module", [head_summary, role_descriptions], ids=lambda value: value.__name__)
def test_every_piece_of_text_in_the_source_is_printed_by_a_built_head(module: object) -> None:
    printed = " ".join(chain.from_iterable(chain.from_iterable(builder().values() for builder in BUILDERS)))
    for piece in pieces_of_text(Path(str(module.__file__)).read_text()):  # pyright: ignore[reportAttributeAccessIssue]
        assert all(part in printed for part in piece.split("{}")), piece


def pieces_of_text(source: str) -> list[str]:
    """Yield string literals of at least three words, without docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if text not in docstrings and len(text.split()) >= 3 and "<" not in text]


# Numbers.


def test_share_of_cases_is_the_share_of_held_out_arcs_the_head_follows() -> None:
    documents = sorted(probe_set("possessive"), key=lambda document: bucket_of_text(document.text))
    buckets = sorted({bucket_of_text(document.text) for document in documents})[
        1::2
    ]  # every other case is in the reporting half
    held_out = [document for document in documents if bucket_of_text(document.text) in buckets]
    rule = follow("possessive >", rate=0.7)
    right = [rule(document)[arc.source] == arc.target for document in held_out for arc in document.relations]
    built = followers()["possessive > at times"]
    assert f"in {100 * np.mean(right):.0f}% of the cases" in built[0]
    assert f"Evaluated on {len(right)} held-out cases" in built[1]


def test_direction_named_is_the_one_in_which_the_head_attends_more_often() -> None:
    documents = probe_set("possessive")
    rules = [
        lambda document, often=often, seldom=seldom: [
            max(pair)
            for pair in zip(follow(often)(document), follow(seldom, rate=0.5)(document), strict=True)
        ]
        for often, seldom in (("possessive >", "possessive <"), ("possessive <", "possessive >"))
    ]  # fmt: skip
    profile = profile_of(documents, rules)
    assert RELATION_ROLES["possessive"][0] in summary(profile, "0.0")[0]
    assert RELATION_ROLES["possessive"][1] in summary(profile, "0.1")[0]


def test_confidence_intervals_printed_contain_the_true_rate_of_most_heads() -> None:
    """Each head follows an arc with probability 0.7, drawn text by text; the printed intervals must contain 70% in 95%."""
    corpus = Corpus.synthetic("held-out", documents=150, seed=1)
    documents = [
        Document(document.text, document.words, tuple(arc for arc in document.relations if arc.name == "copy"))
        for document in corpus.items()
        if isinstance(document, Document)
    ]
    gold = follow("copy >")

    def sometimes(number: int) -> Callable[[Document], Sequence[int]]:
        return lambda document: gold(document) if _uniform(number, document) < 0.7 else [0] * len(document.words)

    profile = profile_of(documents, [sometimes(number) for number in range(40)])
    ends = [re.search(r"95% CI (\d+)–(\d+)%", summary(profile, f"0.{number}")[1]) for number in range(40)]
    inside = [int(match[1]) <= 70 <= int(match[2]) for match in ends if match is not None]
    assert len(inside) == 40
    assert np.mean(inside) >= 0.85


def _uniform(number: int, document: Document) -> float:
    return float(np.random.default_rng([number, *document.text.encode()]).random())
