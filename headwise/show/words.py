"""Words that are shown of heads, each with what it means and where it is told how its number is made: one table for the
page, the terminal and notebooks."""

from typing import NamedTuple


class Word(NamedTuple):
    """What a word means, and the page and heading of docs/ that say how it is measured."""

    meaning: str
    docs: str


LADDER, WRITES, BETWEEN = "look.md#roles-and-the-ladder", "look.md#what-it-writes", "look.md#between-heads"
MEASURES, WORTH = "look.md#a-profile-every-head-over-a-corpus", "look.md#what-a-head-is-worth"
BITS, CACHES = "change.md#what-few-bits-cost-head-by-head", "change.md#caches-by-head"

WORDS = {
    "head": Word("one of the parallel parts of an attention layer; 5.1 is head 1 of layer 5, both counted from 0", "spec.md"),
    "layer": Word("one step of the model; its heads work side by side and add up, the next layer reads the sum", "guide.md"),
    "role": Word(
        "what a head may be said to do, because its score stands above its baseline on texts it was not chosen on", LADDER
    ),
    "unclear": Word(
        "no role stood above its baseline on held-out texts; heads of random weights look the same", LADDER
    ),
    "score": Word(
        "the share of its weight, or of its cases, that goes where the role says, on held-out texts", LADDER
    ),
    "baseline": Word(
        "what the same score would be without the role: of the best fixed offset, of unrelated pairs, or of what is visible; "
        "whichever is highest",
        LADDER,
    ),
    "95 % CI": Word("the confidence interval: drawn by bootstrap over texts, 95 % of the draws lie in it", LADDER),
    "p": Word(
        "how often chance alone would give so large a score anywhere among all heads and roles (max-T)", LADDER
    ),
    "held-out": Word("texts nothing was chosen on: choices are made on one half, figures told of the other", LADDER),
    "evidence": Word(
        "how strong the evidence is, in rungs: selective, effective, causal; each asks for more than the one before", LADDER
    ),
    "selective": Word("the role stands above its baseline on held-out texts, corrected for all tests made", LADDER),
    "effective": Word("it also stands when each look counts by the length of what it fetches", LADDER),
    "causal": Word(
        "and the model needs it: without the head the role's own test gets worse, more than without others of its layer",
        LADDER,
    ),
    "coverage": Word("the share of rows in which the role could be seen at all", LADDER),
    "effect": Word(
        "what taking the head away costs its role's own test, beyond others of its layer, in nats an answer", LADDER
    ),
    "hit": Word("a case in which the head looks hardest at the word the role means; the others are misses", LADDER),
    "rests": Word(
        "where its weight goes when it does nothing: a softmax cannot say nowhere, so weight is parked", LADDER
    ),
    "sink": Word("it rests on the first token: more than 30 % of its weight lies there", LADDER),
    "special token": Word("it rests on tokens such as [CLS] and [SEP]: more than 30 % of its weight", LADDER),
    "broad": Word("it looks everywhere nearly alike: its entropy is above 90 % of the highest possible", LADDER),
    "idle": Word("it writes next to nothing: less than a fifth of an equal share of what its layer writes", LADDER),
    "abstention": Word("the weight a learned sink in the softmax takes: it writes nothing, the head looks nowhere", MEASURES),
    "entropy": Word("how spread out a row of weights is, in nats: 0 looks at one token only", MEASURES),
    "confidence": Word("the largest weight of a row, special tokens left out, on average", MEASURES),
    "distance": Word("how many tokens away it looks, on average", MEASURES),
    "first": Word("the weight on the first token, on average", MEASURES),
    "write share": Word("the head's share in what its layer writes, by length", MEASURES),
    "weighted by what is fetched": Word(
        "each weight counts by the length of what it brings in: a hard look at a word that brings nothing is worth nothing",
        WRITES,
    ),
    "copying": Word(
        "whether W_V W_O gives back what it reads: 1 it writes what it reads, −1 its opposite, 0 neither", WRITES
    ),
    "writes": Word(
        "what the head adds to the stream, z W_O; words it makes likelier are read off bare embeddings, which says less the "
        "later the layer",
        WRITES,
    ),
    "worth": Word(
        "what the model loses when the head is replaced by its mean; later heads may take over, so this is the least it does",
        WORTH,
    ),
    "bits": Word("what the loss gains when this head alone is stored at so few bits, everything else untouched", BITS),
    "drift": Word("how far the model's predictions move from the untouched model's: KL divergence, nats a token", BITS),
    "cache": Word("keys and values kept for tokens read before; heads that share keys share them", CACHES),
    "streaming": Word("a key head that keeps a few first tokens and the last ones, and forgets the rest", CACHES),
    "partners": Word(
        "heads it shares keys with; heads whose writes it reads or that read its own, by weights (V-composition, told "
        "from twice the 1/√width of random weights on); and the head that looks most like it (Jensen–Shannon divergence)",
        BETWEEN,
    ),
}  # fmt: skip


def how(word: str) -> str:
    """Where it is told how a number is made.

    >>> how("copying")
    'docs/look.md#what-it-writes'
    """
    return f"docs/{WORDS[word].docs}"
