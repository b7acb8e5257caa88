"""Words that are shown of heads, each with what it means and where it is told how its number is made: one table for the
page, the terminal and notebooks."""

from typing import NamedTuple


class Meaning(NamedTuple):
    """What a word means, and the page and heading of docs/ that say how it is measured."""

    meaning: str
    docs: str


LADDER, WRITES, BETWEEN = "look.md#roles-and-the-ladder", "look.md#what-it-writes", "look.md#between-heads"
MEASURES, WORTH = "look.md#a-profile-every-head-over-a-corpus", "look.md#what-a-head-is-worth"
PROMPTS = "look.md#roles-on-prompts-of-their-own"
BITS, CACHES = "change.md#what-few-bits-cost-head-by-head", "change.md#caches-by-head"

WORDS = {
    "head": Meaning("one of the parallel parts of a layer; 5.1 is head 1 of layer 5, both counted from 0", "spec.md"),
    "layer": Meaning("one step of the model; its heads work side by side and add up, the next reads the sum", "guide.md"),
    "role": Meaning(
        "what a head may be said to do, because its score stands above its baseline on texts it was not chosen on", LADDER
    ),
    "unclear": Meaning(
        "no role stood above its baseline on held-out texts; in models with random weights throughout, all heads are so",
        LADDER,
    ),
    "score": Meaning(
        "the share of its weight, or of its cases, that goes where the role says, on held-out texts", LADDER
    ),
    "baseline": Meaning(
        "what the same score would be without the role: of the best fixed offset, of unrelated pairs, or of what is visible; "
        "whichever is highest",
        LADDER,
    ),
    "95 % CI": Meaning("the confidence interval: drawn by bootstrap over texts, 95 % of the draws lie in it", LADDER),
    "p": Meaning(
        "how often chance alone would give so large a score anywhere among all heads and roles (max-T)", LADDER
    ),
    "held-out": Meaning("texts nothing was chosen on: choices are made on one half, figures told of the other", LADDER),
    "evidence": Meaning(
        "how strong the evidence is, in rungs: selective, effective, causal; each asks for more than the one before. Roles "
        "of one rung passed the same tests, and are ordered by how far they are above their baselines",
        LADDER,
    ),
    "selective": Meaning("the role stands above its baseline on held-out texts, corrected for all tests made", LADDER),
    "effective": Meaning("it also stands when each look counts by the length of what it fetches", LADDER),
    "causal": Meaning(
        "and the role's answers hang on it: without the head they lose more than the same answers reached another way, and "
        "more than without others of its layer, on every token set tried, corrected for all heads and sets",
        LADDER,
    ),
    "causal on": Meaning("the token sets or prompts on which the causal test of a role holds", LADDER),
    "coverage": Meaning("the share of rows in which the role could be seen at all", LADDER),
    "effect": Meaning(
        "what taking the head away costs its role's own test, beyond others of its layer, in nats an answer", LADDER
    ),
    "cost": Meaning(
        "what taking the head away costs its role's own test by itself, in nats an answer; of copy suppression what it gains",
        LADDER,
    ),
    "control": Meaning(
        "what taking the head away costs the same answers where they are reached another way, in nats an answer", LADDER
    ),
    "hit": Meaning(
        "a case in which the target of the role gets the largest weight of all words; the others are misses",
        LADDER,
    ),
    "rests": Meaning(
        "its idle pattern: where its weight lies, averaged over all tokens, if that is no role: a softmax cannot attend "
        "to nothing",
        LADDER,
    ),
    "sink": Meaning("attention sink: more than 30 % of its weight lies on the first token, averaged over all tokens", LADDER),
    "special token": Meaning(
        "special-token sink: more than 30 % of its weight lies on tokens such as [CLS] and [SEP], and no more than that "
        "on the first",
        LADDER,
    ),
    "broad": Meaning("diffuse: its entropy is above 90 % of the largest possible, averaged over all tokens", LADDER),
    "idle": Meaning("inactive: it writes less than a fifth of an equal share of what its layer writes", LADDER),
    "abstention": Meaning("the weight a learned sink in the softmax takes: so much of it looks nowhere", MEASURES),
    "entropy": Meaning("how spread out a row of weights is, in nats: 0 looks at one token only", MEASURES),
    "confidence": Meaning("the largest weight of a row, special tokens left out, on average", MEASURES),
    "distance": Meaning("how many tokens away it looks, on average", MEASURES),
    "first": Meaning("the weight on the first token, on average", MEASURES),
    "write share": Meaning("the head's share in what its layer writes, by length", MEASURES),
    "name mover": Meaning(
        "where one of two names is due it attends to that one, and writes more for it than for the other", PROMPTS
    ),
    "name suppression": Meaning(
        "where one of two names is due it attends to the other one, and writes less for that name than for names that are "
        "not in the sentence",
        PROMPTS,
    ),
    "copy suppression": Meaning(
        "it attends to the token the model is about to repeat, and writes less for it than for the other tokens of the "
        "text on average",
        PROMPTS,
    ),
    "successor": Meaning(
        "for a day, month, number or letter it writes more for the next than for any other of its class",
        PROMPTS,
    ),
    "query focus": Meaning(
        "the tokens of a question attend to the document it is about, more than the tokens of another question do",
        PROMPTS,
    ),
    "far offset": Meaning("it attends to the token at a fixed offset of 32 or more", PROMPTS),
    "fixed place": Meaning("it attends to the same position of every text, from 32 tokens away or more", PROMPTS),
    "beyond": Meaning(
        "the attention outside 4 sink tokens and a window of 32, on running text; a small share alone does not mean that a "
        "head can stream",
        PROMPTS,
    ),
    "weighted by what is fetched": Meaning(
        "each weight counts by the length of what it brings in: a hard look at a word that brings nothing is worth nothing",
        WRITES,
    ),
    "direct effect": Meaning(
        "how much the head's output raises the logit of the token it attends to most, relative to the mean over the "
        "vocabulary, with the final norm's scale frozen; effects through later layers are not included",
        WRITES,
    ),
    "OV eigenvalue score": Meaning(
        "real part of the sum of the eigenvalues of W_V W_O, over the sum of their sizes: from −1 to 1, in the residual "
        "stream's own basis; it does not say what is written for the attended token",
        WRITES,
    ),
    "writes": Meaning(
        "what the head adds to the stream, z W_O; words it makes likelier are read off bare embeddings, which says less the "
        "later the layer",
        WRITES,
    ),
    "worth": Meaning(
        "what the model loses when the head is replaced by its mean; later heads may take over a part of its work, "
        "which this does not count",
        WORTH,
    ),
    "bits": Meaning("what the loss gains when this head alone is stored at so few bits, everything else untouched", BITS),
    "drift": Meaning("how far the model's predictions move from the untouched model's: KL divergence, nats a token", BITS),
    "cache": Meaning("keys and values kept for tokens read before; heads that share keys share them", CACHES),
    "streaming": Meaning(
        "a KV head that keeps a few sink tokens and a window; recommended only if the loss on running text, repeated lists "
        "and facts asked for later rises by less than 0.05 nats per token (upper end of the 95% CI)",
        CACHES,
    ),
    "partners": Meaning(
        "heads it shares keys with; heads whose writes it reads or that read its own, by weights (V-composition, told "
        "from twice the 1/√width of random weights on); and the head that looks most like it (Jensen–Shannon divergence)",
        BETWEEN,
    ),
}  # fmt: skip


def how(word: str) -> str:
    """Where it is told how a number is made.

    >>> how("direct effect")
    'docs/look.md#what-it-writes'
    """
    return f"docs/{WORDS[word].docs}"
