"""Words that are shown of heads, each with what it means and where it is told how its number is made: one table for the
page, the terminal and notebooks."""

from typing import NamedTuple


class GlossaryEntry(NamedTuple):
    """What a word means, and the page and heading of docs/ that say how it is measured."""

    meaning: str
    docs: str


EVIDENCE_DOCS, OUTPUT_DOCS, COMPARISON_DOCS = (
    "analysis.md#roles-and-the-ladder",
    "analysis.md#what-it-writes",
    "analysis.md#between-heads",
)
METRIC_DOCS, IMPORTANCE_DOCS = "analysis.md#a-profile-every-head-over-a-corpus", "analysis.md#what-a-head-is-worth"
PROMPT_ROLE_DOCS = "analysis.md#roles-on-prompts-of-their-own"
QUANTIZATION_DOCS, CACHE_DOCS = "compression.md#what-few-bits-cost-head-by-head", "compression.md#caches-by-head"

GLOSSARY = {
    "head": GlossaryEntry(
        "one of the parallel parts of a layer; 5.1 is head 1 of layer 5, both counted from 0", "spec.md"
    ),
    "layer": GlossaryEntry(
        "one step of the model; its heads work side by side and add up, the next reads the sum", "guide.md"
    ),
    "role": GlossaryEntry(
        "what a head may be said to do, because its score stands above its baseline on texts it was not chosen on",
        EVIDENCE_DOCS,
    ),
    "unclear": GlossaryEntry(
        "no role stood above its baseline on held-out texts; in models with random weights throughout, all heads are so",
        EVIDENCE_DOCS,
    ),
    "score": GlossaryEntry(
        "the share of its weight, or of its cases, that goes where the role says, on held-out texts", EVIDENCE_DOCS
    ),
    "baseline": GlossaryEntry(
        "what the same score would be without the role: of the best fixed offset, of unrelated pairs, or of what is visible; "
        "whichever is highest",
        EVIDENCE_DOCS,
    ),
    "95 % CI": GlossaryEntry(
        "the confidence interval: drawn by bootstrap over texts, 95 % of the draws lie in it", EVIDENCE_DOCS
    ),
    "p": GlossaryEntry(
        "how often chance alone would give so large a score anywhere among all heads and roles (max-T)", EVIDENCE_DOCS
    ),
    "held-out": GlossaryEntry(
        "texts nothing was chosen on: choices are made on one half, figures told of the other", EVIDENCE_DOCS
    ),
    "evidence": GlossaryEntry(
        "how strong the evidence is, in levels: attention, value-weighted, causal; each asks for more than the one before. "
        "Roles of one level passed the same tests, and are ordered by how far they are above their baselines",
        EVIDENCE_DOCS,
    ),
    "attention": GlossaryEntry(
        "the role stands above its baseline on held-out texts, corrected for all tests made", EVIDENCE_DOCS
    ),
    "value-weighted": GlossaryEntry(
        "it also stands when each look counts by the length of what it fetches", EVIDENCE_DOCS
    ),
    "causal": GlossaryEntry(
        "and the role's answers hang on it: without the head they lose more than the same answers reached another way, and "
        "more than without others of its layer, on every token set tried, corrected for all heads and sets",
        EVIDENCE_DOCS,
    ),
    "causal on": GlossaryEntry("the token sets or prompts on which the causal test of a role holds", EVIDENCE_DOCS),
    "coverage": GlossaryEntry("the share of rows in which the role could be seen at all", EVIDENCE_DOCS),
    "effect": GlossaryEntry(
        "what taking the head away costs its role's own test, beyond others of its layer, in nats an answer",
        EVIDENCE_DOCS,
    ),
    "cost": GlossaryEntry(
        "what taking the head away costs its role's own test by itself, in nats an answer; of copy suppression what it gains",
        EVIDENCE_DOCS,
    ),
    "control": GlossaryEntry(
        "what taking the head away costs the same answers where they are reached another way, in nats an answer",
        EVIDENCE_DOCS,
    ),
    "hit": GlossaryEntry(
        "a case in which the target of the role gets the largest weight of all words; the others are misses",
        EVIDENCE_DOCS,
    ),
    "idle pattern": GlossaryEntry(
        "its idle pattern: where its weight lies, averaged over all tokens, if that is no role: a softmax cannot attend "
        "to nothing",
        EVIDENCE_DOCS,
    ),
    "sink": GlossaryEntry(
        "attention sink: more than 30 % of its weight lies on the first token, averaged over all tokens", EVIDENCE_DOCS
    ),
    "special token": GlossaryEntry(
        "special-token sink: more than 30 % of its weight lies on tokens such as [CLS] and [SEP], and no more than that "
        "on the first",
        EVIDENCE_DOCS,
    ),
    "broad": GlossaryEntry(
        "diffuse: its entropy is above 90 % of the largest possible, averaged over all tokens", EVIDENCE_DOCS
    ),
    "idle": GlossaryEntry(
        "inactive: it writes less than a fifth of an equal share of what its layer writes", EVIDENCE_DOCS
    ),
    "abstention": GlossaryEntry(
        "the weight a learned sink in the softmax takes: so much of it looks nowhere", METRIC_DOCS
    ),
    "entropy": GlossaryEntry("how spread out a row of weights is, in nats: 0 looks at one token only", METRIC_DOCS),
    "confidence": GlossaryEntry("the largest weight of a row, special tokens left out, on average", METRIC_DOCS),
    "distance": GlossaryEntry("how many tokens away it looks, on average", METRIC_DOCS),
    "first": GlossaryEntry("the weight on the first token, on average", METRIC_DOCS),
    "output share": GlossaryEntry("the head's share in what its layer writes, by length", METRIC_DOCS),
    "name mover": GlossaryEntry(
        "where one of two names is due it attends to that one, and writes more for it than for the other",
        PROMPT_ROLE_DOCS,
    ),
    "name suppression": GlossaryEntry(
        "where one of two names is due it attends to the other one, and writes less for that name than for names that are "
        "not in the sentence",
        PROMPT_ROLE_DOCS,
    ),
    "copy suppression": GlossaryEntry(
        "it attends to the token the model is about to repeat, and writes less for it than for the other tokens of the "
        "text on average",
        PROMPT_ROLE_DOCS,
    ),
    "successor": GlossaryEntry(
        "for a day, month, number or letter it writes more for the next than for any other of its class",
        PROMPT_ROLE_DOCS,
    ),
    "query focus": GlossaryEntry(
        "the tokens of a question attend to the document it is about, more than the tokens of another question do",
        PROMPT_ROLE_DOCS,
    ),
    "far offset": GlossaryEntry("it attends to the token at a fixed offset of 32 or more", PROMPT_ROLE_DOCS),
    "fixed position": GlossaryEntry(
        "it attends to the same position of every text, from 32 tokens away or more", PROMPT_ROLE_DOCS
    ),
    "outside window": GlossaryEntry(
        "the attention outside 4 sink tokens and a window of 32, on running text; a small share alone does not mean that a "
        "head can stream",
        PROMPT_ROLE_DOCS,
    ),
    "weighted by what is fetched": GlossaryEntry(
        "each weight counts by the length of what it brings in: a hard look at a word that brings nothing is worth nothing",
        OUTPUT_DOCS,
    ),
    "direct effect": GlossaryEntry(
        "how much the head's output raises the logit of the token it attends to most, relative to the mean over the "
        "vocabulary, with the final norm's scale frozen; effects through later layers are not included",
        OUTPUT_DOCS,
    ),
    "OV eigenvalue score": GlossaryEntry(
        "real part of the sum of the eigenvalues of W_V W_O, over the sum of their sizes: from −1 to 1, in the residual "
        "stream's own basis; it does not say what is written for the attended token",
        OUTPUT_DOCS,
    ),
    "output": GlossaryEntry(
        "what the head adds to the stream, z W_O; words it makes likelier are read off bare embeddings, which says less the "
        "later the layer",
        OUTPUT_DOCS,
    ),
    "importance": GlossaryEntry(
        "what the model loses when the head is replaced by its mean; later heads may take over a part of its work, "
        "which this does not count",
        IMPORTANCE_DOCS,
    ),
    "bits": GlossaryEntry(
        "what the loss gains when this head alone is stored at so few bits, everything else untouched",
        QUANTIZATION_DOCS,
    ),
    "KL divergence": GlossaryEntry(
        "how far the model's predictions move from the untouched model's: KL divergence, nats a token",
        QUANTIZATION_DOCS,
    ),
    "cache": GlossaryEntry("keys and values kept for tokens read before; heads that share keys share them", CACHE_DOCS),
    "streaming": GlossaryEntry(
        "a KV head that keeps a few sink tokens and a window; recommended only if the loss on running text, repeated lists "
        "and facts asked for later rises by less than 0.05 nats per token (upper end of the 95% CI)",
        CACHE_DOCS,
    ),
    "partners": GlossaryEntry(
        "heads it shares keys with; heads whose writes it reads or that read its own, by weights (V-composition, told "
        "from twice the 1/√width of random weights on); and the head that looks most like it (Jensen–Shannon divergence)",
        COMPARISON_DOCS,
    ),
}


def docs_anchor(term: str) -> str:
    """Where it is told how a number is made.

    >>> docs_anchor("direct effect")
    'docs/analysis.md#what-it-writes'
    """
    return f"docs/{GLOSSARY[term].docs}"
