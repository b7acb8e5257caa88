"""Glossary of the words shown about heads: meaning, and the docs section that explains how the number is computed.

One table serves the page, the terminal and notebooks. docs/page-words.md has a copy, kept equal by a test.
"""

from typing import NamedTuple


class GlossaryEntry(NamedTuple):
    """Meaning of a word, and the page and heading of docs/ that explain its measurement."""

    meaning: str
    docs: str


EVIDENCE_DOCS, OUTPUT_DOCS, COMPARISON_DOCS = (
    "analysis/roles.md#roles-and-their-evidence",
    "analysis.md#head-output",
    "analysis.md#compare-heads",
)
METRIC_DOCS, IMPORTANCE_DOCS = "analysis.md#profile-a-corpus", "analysis.md#head-importance"
PROMPT_ROLE_DOCS = "analysis/prompt-roles.md#roles-on-prompts-of-their-own"
QUANTIZATION_DOCS, CACHE_DOCS = (
    "compression/quantization.md#quantization-cost-per-head",
    "compression/caches.md",
)

GLOSSARY = {
    "head": GlossaryEntry("one attention head; 5.1 is head 1 of layer 5, both counted from 0", "spec.md"),
    "layer": GlossaryEntry(
        "one attention layer; its heads run in parallel and the sum of their outputs is added to the residual stream",
        "guide/05-joining-the-heads.md",
    ),
    "role": GlossaryEntry("a behavior of a head whose score exceeds its baseline on held-out texts", EVIDENCE_DOCS),
    "unclear": GlossaryEntry(
        "no role exceeded its baseline on held-out texts; every head of a model with random weights gets this result",
        EVIDENCE_DOCS,
    ),
    "score": GlossaryEntry(
        "share of the attention weight, or of the cases, that matches the role, on held-out texts",
        EVIDENCE_DOCS,
    ),
    "baseline": GlossaryEntry(
        "the score expected without the role: the highest of the best fixed offset, unrelated pairs, and "
        "uniform attention to the visible tokens",
        EVIDENCE_DOCS,
    ),
    "95% CI": GlossaryEntry("95% confidence interval, bootstrapped over texts", EVIDENCE_DOCS),
    "p": GlossaryEntry(
        "family-wise p-value: probability that chance alone gives such a score to any head and role (max-T test)",
        EVIDENCE_DOCS,
    ),
    "held-out": GlossaryEntry(
        "texts that were not used for selection: roles, offsets and baselines are selected on one half of the "
        "texts, numbers are reported on the other half",
        EVIDENCE_DOCS,
    ),
    "evidence": GlossaryEntry(
        "evidence level of a role: none, attention, value-weighted or causal; each level requires the one "
        "before it. Roles of the same level passed the same tests and are sorted by their distance to the "
        "baseline",
        EVIDENCE_DOCS,
    ),
    "attention": GlossaryEntry(
        "evidence level: the score exceeds its baseline on held-out texts, corrected for all tests",
        EVIDENCE_DOCS,
    ),
    "value-weighted": GlossaryEntry(
        "evidence level: the score also exceeds its baseline if each attention weight is multiplied by the "
        "norm of the value it moves (after W_O)",
        EVIDENCE_DOCS,
    ),
    "causal": GlossaryEntry(
        "evidence level: ablating the head costs more on the role's answers than on the same answers in "
        "control cases, and more than ablating other heads of its layer; on every token set tested, corrected "
        "for all heads and sets",
        EVIDENCE_DOCS,
    ),
    "causal on": GlossaryEntry("token sets or prompts on which the causal test passed", EVIDENCE_DOCS),
    "coverage": GlossaryEntry("share of rows on which the role can be evaluated", EVIDENCE_DOCS),
    "effect": GlossaryEntry(
        "cost of ablating the head on the role's answers, minus the mean cost of the other heads of its "
        "layer, in nats per answer",
        EVIDENCE_DOCS,
    ),
    "cost": GlossaryEntry(
        "loss increase on the role's answers if the head is ablated, in nats per answer; for suppression "
        "roles, the increase in log-probability of the suppressed tokens",
        EVIDENCE_DOCS,
    ),
    "control": GlossaryEntry(
        "cost of ablating the head on the same answers in control cases, in which they can be predicted "
        "without the role; in nats per answer",
        EVIDENCE_DOCS,
    ),
    "hit": GlossaryEntry(
        "a case in which the target of the role gets the largest weight; all other cases are misses",
        EVIDENCE_DOCS,
    ),
    "idle pattern": GlossaryEntry(
        "attention that does not count as a role, averaged over all tokens: attention sink, special-token "
        "sink, diffuse or inactive",
        EVIDENCE_DOCS,
    ),
    "sink": GlossaryEntry(
        "attention sink: more than 30% of the attention is on the first token, averaged over all tokens",
        EVIDENCE_DOCS,
    ),
    "special token": GlossaryEntry(
        "special-token sink: more than 30% of the attention is on special tokens such as [CLS] and [SEP], and "
        "at most 30% on the first token",
        EVIDENCE_DOCS,
    ),
    "broad": GlossaryEntry("diffuse: the entropy is above 90% of its maximum, averaged over all tokens", EVIDENCE_DOCS),
    "idle": GlossaryEntry("inactive: the output norm is below one fifth of an equal share of its layer", EVIDENCE_DOCS),
    "abstention": GlossaryEntry("weight on a learned sink in the softmax, which moves no value", METRIC_DOCS),
    "entropy": GlossaryEntry("entropy of an attention row in nats; 0 if all weight is on one token", METRIC_DOCS),
    "confidence": GlossaryEntry(
        "largest weight of an attention row, excluding special tokens, averaged over rows",
        METRIC_DOCS,
    ),
    "distance": GlossaryEntry("mean distance between query and key, in tokens", METRIC_DOCS),
    "first": GlossaryEntry("mean attention weight on the first token", METRIC_DOCS),
    "output share": GlossaryEntry("share of the head in the output of its layer, by norm", METRIC_DOCS),
    "name mover": GlossaryEntry(
        "in sentences with two names, attends to the correct next name and promotes it over the other name",
        PROMPT_ROLE_DOCS,
    ),
    "name suppression": GlossaryEntry(
        "in sentences with two names, attends to the incorrect name and suppresses it relative to names that "
        "are not in the sentence",
        PROMPT_ROLE_DOCS,
    ),
    "copy suppression": GlossaryEntry(
        "attends to the token that the model is about to repeat and suppresses it relative to the other "
        "tokens of the text",
        PROMPT_ROLE_DOCS,
    ),
    "successor": GlossaryEntry(
        "given a day, month, number or letter, promotes the next one over all others of its class",
        PROMPT_ROLE_DOCS,
    ),
    "query focus": GlossaryEntry(
        "the tokens of a question attend to the document that the question is about, more than the tokens of "
        "another question do",
        PROMPT_ROLE_DOCS,
    ),
    "far offset": GlossaryEntry("attends to the token at a fixed offset of 32 or more", PROMPT_ROLE_DOCS),
    "fixed position": GlossaryEntry(
        "attends to the same position in every text, from 32 or more tokens away",
        PROMPT_ROLE_DOCS,
    ),
    "outside window": GlossaryEntry(
        "share of the attention outside 4 sink tokens and a window of 32 tokens, on running text; a small "
        "share alone does not mean that the head can stream",
        PROMPT_ROLE_DOCS,
    ),
    "direct effect": GlossaryEntry(
        "change of the logit of the most attended token by the head's output, relative to the mean over the "
        "vocabulary, with the scale of the final norm frozen; effects through later layers are not included",
        OUTPUT_DOCS,
    ),
    "OV eigenvalue score": GlossaryEntry(
        "real part of the sum of the eigenvalues of W_V W_O, divided by the sum of their absolute values: "
        "from −1 to 1, in the basis of the residual stream; it does not describe the effect on the attended "
        "token's logit",
        OUTPUT_DOCS,
    ),
    "output": GlossaryEntry(
        "the head's addition to the residual stream, z W_O; promoted and suppressed tokens are computed from "
        "token embeddings alone, which is less reliable in later layers",
        OUTPUT_DOCS,
    ),
    "importance": GlossaryEntry(
        "loss increase if the head is replaced by its mean output; compensation by later heads is not included",
        IMPORTANCE_DOCS,
    ),
    "bits": GlossaryEntry("loss increase if only this head is quantized", QUANTIZATION_DOCS),
    "KL divergence": GlossaryEntry(
        "KL divergence between the predictions of the original and the changed model, in nats per token",
        QUANTIZATION_DOCS,
    ),
    "cache": GlossaryEntry(
        "keys and values stored for earlier tokens; heads with the same KV head share them",
        CACHE_DOCS,
    ),
    "streaming": GlossaryEntry(
        "a KV head that caches a few sink tokens and a window; recommended only if the loss on running text, "
        "repeated lists and facts to recall rises by less than 0.05 nats per token (upper end of the 95% CI)",
        CACHE_DOCS,
    ),
    "partners": GlossaryEntry(
        "heads with the same KV head; the earlier and the later head with the strongest V-composition, if it "
        "is above twice the 1/√width of random weights; and the head with the most similar attention "
        "(Jensen–Shannon divergence)",
        COMPARISON_DOCS,
    ),
}


def docs_anchor(term: str) -> str:
    """Return the docs section that explains how the number is computed.

    >>> docs_anchor("direct effect")
    'docs/analysis.md#head-output'
    """
    return f"docs/{GLOSSARY[term].docs}"
