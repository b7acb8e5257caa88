"""Models with hand-built heads. Tokens and positions are unit vectors, so the behavior of each head is known exactly."""

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
FOLLOWER_OF = dict(zip(FILLERS[::2], FILLERS[1::2], strict=True))  # every other filler is followed by a fixed word
WORDS = (*DIGITS, *FILLERS, *OPENERS, *CLOSERS)
V, P = len(WORDS) + 2, 80
TOKEN, POSITION, PREVIOUS, SCRATCH, OUT = 0, V, V + P, 2 * V + P, 3 * V + P  # channels of the residual stream
WIDTH, BETA = 4 * V + P, 90.0


def documents(count: int = 60, seed: int = 0) -> list[Document]:
    """Make random words. Some words open a pair that a later word closes, at any distance. The first word is a filler. A
    filler with a follower is always followed by it."""
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
    """Build one head. The attention score is a sum of terms."""

    layer: MultiHeadAttention
    head_index: int

    def __post_init__(self) -> None:
        self.W_Q, self.W_K = torch.zeros(WIDTH, V + P), torch.zeros(WIDTH, V + P)
        self.W_K[POSITION : POSITION + P, V:] = torch.eye(P)

    def attend_offsets(self, *offsets: int) -> "HeadBuilder":
        """Attend to tokens at fixed offsets back, equally if there are several."""
        for offset in offsets:
            self.W_Q[POSITION : POSITION + P, V:] += BETA * torch.eye(P).roll(-offset, 1) * rows_with_target(offset)
        return self

    def attend_first(self, score_fraction: float = 0.5) -> "HeadBuilder":
        """Attend to the first token if no other key has a higher score."""
        self.W_Q[POSITION : POSITION + P, V] += score_fraction * BETA
        return self

    def attend_tokens(self, pairs: Tensor, key_part: int = TOKEN) -> "HeadBuilder":
        """Attend from one token to another, (V, V). With `key_part=PREVIOUS` attend to the tokens after it."""
        self.W_Q[:V, :V] += BETA * pairs
        self.W_K[key_part : key_part + V, :V] = torch.eye(V)
        return self

    def attend_self(self, score_fraction: float = 0.5) -> "HeadBuilder":
        """Attend to the own position if no other key has a higher score."""
        self.W_Q[POSITION : POSITION + P, V:] += score_fraction * BETA * torch.eye(P)
        return self

    def avoid_self(self) -> "HeadBuilder":
        """Do not attend to the own position."""
        self.W_Q[POSITION : POSITION + P, V:] -= 3 * BETA * torch.eye(P)
        return self

    def write(self, part: int = SCRATCH, size: float = 0.5) -> None:
        """Copy the attended token to some channels of the residual stream."""
        head = self.layer.heads[self.head_index]
        with torch.no_grad():
            head.W_Q.copy_(self.W_Q)
            head.W_K.copy_(self.W_K)
            head.W_V.zero_()[:V] = torch.eye(V) * (2 / WIDTH) ** 0.5  # undo the scale of the norm
            head.W_O.zero_()[:, part : part + V] = size * torch.eye(V)


def rows_with_target(offset: int) -> Tensor:
    """Return the rows whose target exists, (P, 1)."""
    target = torch.arange(P) - offset
    return ((target >= 0) & (target < P))[:, None].float()


def blank_model(heads: int, layers: int, kind: str = "decoder") -> Transformer:
    """Make a model without effect: one unit vector per token and position, no MLP, heads with uniform attention and zero
    output."""
    # ‖x‖² is 2 at the input (token and position), so that a score is BETA.
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
    """Return scores of 1 from each word to its partner."""
    pairs = torch.zeros(V, V)
    for source, target in zip(sources, targets, strict=True):
        pairs[WORDS.index(source), WORDS.index(target)] = 1
    return pairs


def digit_scores() -> Tensor:
    """Return scores of 1 from every token to every digit."""
    pairs = torch.zeros(V, V)
    pairs[:, : len(DIGITS)] = 1
    return pairs


# head: its role and the expected evidence level; None: the probe needs a word that this model does not predict
DECODER = {
    "0.0": ("previous token", "causal"), "0.1": ("unclear", "none"), "0.2": ("duplicate token", "value-weighted"),
    "0.3": ("bracket", None), "0.4": ("unclear", "none"), "0.5": ("unclear", "none"),
    "1.0": ("induction", "causal"), "1.1": ("fixed offset", "value-weighted"), "1.2": ("self", "value-weighted"),
    "1.3": ("digit", "value-weighted"), "1.4": ("unclear", "none"), "1.5": ("unclear", "none"),
}  # fmt: skip


def add_follower_logits(model: Transformer, part: int = TOKEN, size: float = 1.0) -> Transformer:
    """Make the model predict the follower of the word in some channels of the residual stream, without a head."""
    assert model.output is not None
    with torch.no_grad():
        for word, follower in FOLLOWER_OF.items():
            model.output.vocabulary.weight[WORDS.index(follower), part + WORDS.index(word)] = size
    return model


def decoder() -> Transformer:
    """Make a model of two layers with six heads, and followers without a head. See DECODER."""
    model = add_follower_logits(blank_model(heads=6, layers=2))
    first, second = model.attention_layers()
    HeadBuilder(first, 0).attend_offsets(1).write(PREVIOUS, 1.0)
    HeadBuilder(first, 1).attend_first(1.0).write()
    HeadBuilder(first, 2).attend_tokens(torch.eye(V)).avoid_self().attend_first().write()
    HeadBuilder(first, 3).attend_tokens(pair_scores(CLOSERS, OPENERS)).attend_first().write()
    HeadBuilder(first, 4).write()  # uniform attention
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
    """Make an encoder of one layer with five heads. See ENCODER."""
    model = blank_model(heads=5, layers=1, kind="encoder")
    (layer,) = model.attention_layers()
    HeadBuilder(layer, 0).attend_offsets(-1).write()
    HeadBuilder(layer, 1).attend_offsets(1).write()
    HeadBuilder(layer, 2).attend_offsets(-3, -2, -1, 1, 2, 3).write()
    HeadBuilder(layer, 3).attend_tokens(pair_scores(OPENERS, CLOSERS)).attend_first().write()
    HeadBuilder(layer, 4).write()
    return model
