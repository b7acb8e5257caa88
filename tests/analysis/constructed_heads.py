"""Models whose heads are built by hand: tokens and places are unit vectors, so what a head does is known for sure."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import word_tokenizer

DIGITS = tuple(str(i) for i in range(1, 7))
FILLERS = tuple(f"w{i}x" for i in range(34))
OPENERS, CLOSERS = (tuple(f"{letter}{i}x" for i in range(12)) for letter in "ab")
FOLLOWER_OF = dict(zip(FILLERS[::2], FILLERS[1::2], strict=True))  # every other filler is followed by one of its own
WORDS = (*DIGITS, *FILLERS, *OPENERS, *CLOSERS)
V, P = len(WORDS) + 2, 80
TOKEN, POSITION, PREVIOUS, SCRATCH, OUT = 0, V, V + P, 2 * V + P, 3 * V + P  # parts of the stream
WIDTH, BETA = 4 * V + P, 90.0


def documents(count: int = 60, seed: int = 0) -> list[Document]:
    """Random words; some open something that a word behind them closes, at any distance. The first word is a filler. A filler
    behind one that has a follower is that follower."""
    rng, docs = np.random.default_rng(seed), []
    for _ in range(count):
        n = int(rng.integers(24, 44))
        words = [str(word) for word in rng.choice((*DIGITS[:2], *FILLERS), n)]
        words[0] = str(rng.choice(FILLERS))
        positions = np.sort(rng.choice(np.arange(1, n), 8, replace=False))
        arcs = []
        for opener_index, k in zip(positions[:4], rng.choice(12, 4, replace=False), strict=True):
            closer_index = int(rng.choice([p for p in positions[4:] if words[p] not in CLOSERS]))
            words[opener_index], words[closer_index] = OPENERS[k], CLOSERS[k]
            arcs.append(Relation("bracket", closer_index, int(opener_index)))
        for position, word in enumerate(words[1:], 1):
            if word in FILLERS:
                words[position] = FOLLOWER_OF.get(words[position - 1], word)
        docs.append(Document.of(words, arcs))
    return docs


@dataclass
class HeadBuilder:
    """One head in the making; what it looks for is a sum of parts."""

    layer: MultiHeadAttention
    head_index: int

    def __post_init__(self) -> None:
        self.W_Q, self.W_K = torch.zeros(WIDTH, V + P), torch.zeros(WIDTH, V + P)
        self.W_K[POSITION : POSITION + P, V:] = torch.eye(P)

    def attend_offsets(self, *offsets: int) -> "HeadBuilder":
        """Look so many places back; all alike if several."""
        for offset in offsets:
            self.W_Q[POSITION : POSITION + P, V:] += BETA * torch.eye(P).roll(-offset, 1) * rows_with_target(offset)
        return self

    def attend_first(self, score_fraction: float = 0.5) -> "HeadBuilder":
        """Look at the first token, if there is nothing better."""
        self.W_Q[POSITION : POSITION + P, V] += score_fraction * BETA
        return self

    def attend_tokens(self, pairs: Tensor, key_part: int = TOKEN) -> "HeadBuilder":
        """From one token to another, (V, V); `key_part` PREVIOUS: to tokens behind it."""
        self.W_Q[:V, :V] += BETA * pairs
        self.W_K[key_part : key_part + V, :V] = torch.eye(V)
        return self

    def attend_self(self, score_fraction: float = 0.5) -> "HeadBuilder":
        """Look at its own place, if there is nothing better."""
        self.W_Q[POSITION : POSITION + P, V:] += score_fraction * BETA * torch.eye(P)
        return self

    def avoid_self(self) -> "HeadBuilder":
        """Not at its own place."""
        self.W_Q[POSITION : POSITION + P, V:] -= 3 * BETA * torch.eye(P)
        return self

    def write(self, part: int = SCRATCH, size: float = 0.5) -> None:
        """Copy the token it looks at into a part of the stream."""
        head = self.layer.heads[self.head_index]
        with torch.no_grad():
            head.W_Q.copy_(self.W_Q)
            head.W_K.copy_(self.W_K)
            head.W_V.zero_()[:V] = torch.eye(V) * (2 / WIDTH) ** 0.5  # norms made unit vectors this much longer
            head.W_O.zero_()[:, part : part + V] = size * torch.eye(V)


def rows_with_target(offset: int) -> Tensor:
    """Rows whose target is there, (P, 1)."""
    target = torch.arange(P) - offset
    return ((target >= 0) & (target < P))[:, None].float()


def blank_model(heads: int, layers: int, kind: str = "decoder") -> Transformer:
    """A model that does nothing: one unit vector per token and place, no MLP, heads that see all and write nothing."""
    # ‖x‖² is 2 at first, a token and a place: there a score is BETA.
    attention = AttentionSpec(width=WIDTH, heads=heads, head_dim=V + P, value_dim=V, scale=2.0 / WIDTH)
    spec = ModelSpec(
        vocab=V, context=P, layers=layers, attention=attention, mlp_width=3, norm="rms", tied=False, mlp_bias=False,
        kind=kind, output="lm" if kind == "decoder" else "none",  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    model = Transformer(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        model.embed.tokens.weight[:, :V] = torch.eye(V)
        assert model.embed.positions is not None
        model.embed.positions.weight[:, POSITION : POSITION + P] = torch.eye(P)
        if model.output is not None:
            model.output.vocabulary.weight[:, OUT : OUT + V] = torch.eye(V)
    model.tokenizer = word_tokenizer(WORDS)
    return model.eval()


def pair_scores(sources: tuple[str, ...], targets: tuple[str, ...]) -> Tensor:
    """1 from each word to its partner."""
    pairs = torch.zeros(V, V)
    for source, target in zip(sources, targets, strict=True):
        pairs[WORDS.index(source), WORDS.index(target)] = 1
    return pairs


def digit_scores() -> Tensor:
    """1 from every token to every digit."""
    pairs = torch.zeros(V, V)
    pairs[:, : len(DIGITS)] = 1
    return pairs


# head: its role, the evidence level it must reach; None: the probe asks for a word that this model does not foretell
DECODER = {
    "0.0": ("previous token", "causal"), "0.1": ("unclear", "none"), "0.2": ("duplicate token", "value-weighted"),
    "0.3": ("bracket", None), "0.4": ("unclear", "none"), "0.5": ("unclear", "none"),
    "1.0": ("induction", "causal"), "1.1": ("fixed offset", "value-weighted"), "1.2": ("self", "value-weighted"),
    "1.3": ("digit", "value-weighted"), "1.4": ("unclear", "none"), "1.5": ("unclear", "none"),
}  # fmt: skip


def add_follower_logits(model: Transformer, part: int = TOKEN, size: float = 1.0) -> Transformer:
    """Let the model say the follower of the word that stands in a part of the stream, no head needed."""
    assert model.output is not None
    with torch.no_grad():
        for word, follower in FOLLOWER_OF.items():
            model.output.vocabulary.weight[WORDS.index(follower), part + WORDS.index(word)] = size
    return model


def decoder() -> Transformer:
    """Two layers of six heads, and followers without any head; see DECODER."""
    model = add_follower_logits(blank_model(heads=6, layers=2))
    first, second = model.attention_layers()
    HeadBuilder(first, 0).attend_offsets(1).write(PREVIOUS, 1.0)
    HeadBuilder(first, 1).attend_first(1.0).write()
    HeadBuilder(first, 2).attend_tokens(torch.eye(V)).avoid_self().attend_first().write()
    HeadBuilder(first, 3).attend_tokens(pair_scores(CLOSERS, OPENERS)).attend_first().write()
    HeadBuilder(first, 4).write()  # looks everywhere alike
    HeadBuilder(second, 0).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 2.0)
    HeadBuilder(second, 1).attend_offsets(3).write()
    HeadBuilder(second, 2).attend_offsets(0).write()
    HeadBuilder(second, 3).attend_tokens(digit_scores()).attend_first().write()
    HeadBuilder(second, 4).write()
    return model


ENCODER = {
    "0.0": ("next token", ""), "0.1": ("previous token", ""), "0.2": ("local", "within 3"), "0.3": ("bracket", "<"),
    "0.4": ("unclear", ""),
}  # fmt: skip


def encoder() -> Transformer:
    """One layer of five heads; see ENCODER."""
    model = blank_model(heads=5, layers=1, kind="encoder")
    (layer,) = model.attention_layers()
    HeadBuilder(layer, 0).attend_offsets(-1).write()
    HeadBuilder(layer, 1).attend_offsets(1).write()
    HeadBuilder(layer, 2).attend_offsets(-3, -2, -1, 1, 2, 3).write()
    HeadBuilder(layer, 3).attend_tokens(pair_scores(OPENERS, CLOSERS)).attend_first().write()
    HeadBuilder(layer, 4).write()
    return model
