"""Models whose heads are built by hand: tokens and places are unit vectors, so what a head does is known for sure."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.documents import Document, Relation

DIGITS = tuple(str(i) for i in range(1, 7))
FILLERS = tuple(f"w{i}x" for i in range(34))
OPENERS, CLOSERS = (tuple(f"{letter}{i}x" for i in range(12)) for letter in "ab")
FOLLOWS = dict(zip(FILLERS[::2], FILLERS[1::2], strict=True))  # every other filler is followed by one of its own
WORDS = (*DIGITS, *FILLERS, *OPENERS, *CLOSERS)
V, P = len(WORDS) + 2, 80
TOKEN, PLACE, BEFORE, SCRATCH, OUT = 0, V, V + P, 2 * V + P, 3 * V + P  # parts of the stream
WIDTH, BETA = 4 * V + P, 90.0


def documents(count: int = 60, seed: int = 0) -> list[Document]:
    """Random words; some open something that a word behind them closes, at any distance. The first word is a filler. A filler
    behind one that has a follower is that follower."""
    draw, made = np.random.default_rng(seed), []
    for _ in range(count):
        n = int(draw.integers(24, 44))
        words = [str(word) for word in draw.choice((*DIGITS[:2], *FILLERS), n)]
        words[0] = str(draw.choice(FILLERS))
        places = np.sort(draw.choice(np.arange(1, n), 8, replace=False))
        arcs = []
        for opens, k in zip(places[:4], draw.choice(12, 4, replace=False), strict=True):
            closes = int(draw.choice([p for p in places[4:] if words[p] not in CLOSERS]))
            words[opens], words[closes] = OPENERS[k], CLOSERS[k]
            arcs.append(Relation("bracket", closes, int(opens)))
        for place, word in enumerate(words[1:], 1):
            if word in FILLERS:
                words[place] = FOLLOWS.get(words[place - 1], word)
        made.append(Document.of(words, arcs))
    return made


@dataclass
class Built:
    """One head in the making; what it looks for is a sum of parts."""

    layer: MultiHeadAttention
    number: int

    def __post_init__(self) -> None:
        self.W_Q, self.W_K = torch.zeros(WIDTH, V + P), torch.zeros(WIDTH, V + P)
        self.W_K[PLACE : PLACE + P, V:] = torch.eye(P)

    def places(self, *offsets: int) -> "Built":
        """Look so many places back; all alike if several."""
        for offset in offsets:
            self.W_Q[PLACE : PLACE + P, V:] += BETA * torch.eye(P).roll(-offset, 1) * within(offset)
        return self

    def rest(self, level: float = 0.5) -> "Built":
        """Look at the first token, if there is nothing better."""
        self.W_Q[PLACE : PLACE + P, V] += level * BETA
        return self

    def tokens(self, pairs: Tensor, at: int = TOKEN) -> "Built":
        """From one token to another, (V, V); `at` BEFORE: to tokens behind it."""
        self.W_Q[:V, :V] += BETA * pairs
        self.W_K[at : at + V, :V] = torch.eye(V)
        return self

    def itself(self, level: float = 0.5) -> "Built":
        """Look at its own place, if there is nothing better."""
        self.W_Q[PLACE : PLACE + P, V:] += level * BETA * torch.eye(P)
        return self

    def never_itself(self) -> "Built":
        """Not at its own place."""
        self.W_Q[PLACE : PLACE + P, V:] -= 3 * BETA * torch.eye(P)
        return self

    def writes(self, part: int = SCRATCH, size: float = 0.5) -> None:
        """Copy the token it looks at into a part of the stream."""
        head = self.layer.heads[self.number]
        with torch.no_grad():
            head.W_Q.copy_(self.W_Q)
            head.W_K.copy_(self.W_K)
            head.W_V.zero_()[:V] = torch.eye(V) * (2 / WIDTH) ** 0.5  # norms made unit vectors this much longer
            head.W_O.zero_()[:, part : part + V] = size * torch.eye(V)


def within(offset: int) -> Tensor:
    """Rows whose target is there, (P, 1)."""
    target = torch.arange(P) - offset
    return ((target >= 0) & (target < P))[:, None].float()


def blank(heads: int, layers: int, kind: str = "decoder") -> Transformer:
    """A model that does nothing: one unit vector per token and place, no MLP, heads that see all and write nothing."""
    # ‖x‖² is 2 at first, a token and a place: there a score is BETA.
    attention = AttentionSpec(width=WIDTH, heads=heads, head_dim=V + P, value_dim=V, scale=2.0 / WIDTH)
    spec = ModelSpec(
        vocab=V, context=P, layers=layers, attention=attention, hidden=3, norm="rms", tied=False, mlp_bias=False,
        kind=kind, output="lm" if kind == "decoder" else "none",  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    model = Transformer(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        model.embed.tokens.weight[:, :V] = torch.eye(V)
        assert model.embed.positions is not None
        model.embed.positions.weight[:, PLACE : PLACE + P] = torch.eye(P)
        if model.output is not None:
            model.output.vocabulary.weight[:, OUT : OUT + V] = torch.eye(V)
    model.tokenizer = word_tokenizer(WORDS)
    return model.eval()


def matching(sources: tuple[str, ...], targets: tuple[str, ...]) -> Tensor:
    """1 from each word to its partner."""
    pairs = torch.zeros(V, V)
    for source, target in zip(sources, targets, strict=True):
        pairs[WORDS.index(source), WORDS.index(target)] = 1
    return pairs


def digits() -> Tensor:
    """1 from every token to every digit."""
    pairs = torch.zeros(V, V)
    pairs[:, : len(DIGITS)] = 1
    return pairs


# head: its role, the rung it must reach; None: the probe asks for a word that this model does not foretell
DECODER = {
    "0.0": ("previous token", "causal"), "0.1": ("unclear", "unclear"), "0.2": ("duplicate token", "effective"),
    "0.3": ("bracket", None), "0.4": ("unclear", "unclear"), "0.5": ("unclear", "unclear"),
    "1.0": ("induction", "causal"), "1.1": ("fixed offset", "effective"), "1.2": ("self", "effective"),
    "1.3": ("digit", "effective"), "1.4": ("unclear", "unclear"), "1.5": ("unclear", "unclear"),
}  # fmt: skip


def foresee(model: Transformer, part: int = TOKEN, size: float = 1.0) -> Transformer:
    """Let the model say the follower of the word that stands in a part of the stream, no head needed."""
    assert model.output is not None
    with torch.no_grad():
        for word, follower in FOLLOWS.items():
            model.output.vocabulary.weight[WORDS.index(follower), part + WORDS.index(word)] = size
    return model


def decoder() -> Transformer:
    """Two layers of six heads, and followers without any head; see DECODER."""
    model = foresee(blank(heads=6, layers=2))
    one, two = model.attention_layers()
    Built(one, 0).places(1).writes(BEFORE, 1.0)
    Built(one, 1).rest(1.0).writes()
    Built(one, 2).tokens(torch.eye(V)).never_itself().rest().writes()
    Built(one, 3).tokens(matching(CLOSERS, OPENERS)).rest().writes()
    Built(one, 4).writes()  # looks everywhere alike
    Built(two, 0).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 2.0)
    Built(two, 1).places(3).writes()
    Built(two, 2).places(0).writes()
    Built(two, 3).tokens(digits()).rest().writes()
    Built(two, 4).writes()
    return model


ENCODER = {
    "0.0": ("next token", ""), "0.1": ("previous token", ""), "0.2": ("local", "within 3"), "0.3": ("bracket", "<"),
    "0.4": ("unclear", ""),
}  # fmt: skip


def encoder() -> Transformer:
    """One layer of five heads; see ENCODER."""
    model = blank(heads=5, layers=1, kind="encoder")
    (layer,) = model.attention_layers()
    Built(layer, 0).places(-1).writes()
    Built(layer, 1).places(1).writes()
    Built(layer, 2).places(-3, -2, -1, 1, 2, 3).writes()
    Built(layer, 3).tokens(matching(OPENERS, CLOSERS)).rest().writes()
    Built(layer, 4).writes()
    return model
