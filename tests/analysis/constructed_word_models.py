"""Models with words of their own, whose heads are built by hand: tokens, places and parts to write into are unit vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer

P, BETA = 40, 90.0


@dataclass
class Worded:
    """A decoder that does nothing, and how its stream is laid out: tokens, places, then parts as wide as the vocabulary, the
    last of which is what is said."""

    words: Sequence[str]
    heads: int
    layers: int = 1
    parts: int = 1
    kind: str = "decoder"
    places: int = P

    def __post_init__(self) -> None:
        tokenizer = word_tokenizer(self.words)
        self.V = V = len(tokenizer)
        N = self.places
        width = V * (1 + self.parts) + N
        # ‖x‖² is 2 at first, a token and a place: there a score is what W_Q W_Kᵀ says.
        attention = AttentionSpec(width=width, heads=self.heads, head_dim=V + N, value_dim=V, scale=2.0 / width)
        self.model = Transformer(
            ModelSpec(
                vocab=V, context=N, layers=self.layers, attention=attention, hidden=3, norm="rms",
                norm_eps=1e-12, tied=False, mlp_bias=False,
                kind=self.kind, output="lm" if self.kind == "decoder" else "none",  # pyright: ignore[reportArgumentType]
            )
        ).eval()  # fmt: skip
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.zero_()
            self.model.embed.tokens.weight[:, :V] = torch.eye(V)
            assert self.model.embed.positions is not None
            self.model.embed.positions.weight[:, V : V + N] = torch.eye(N)
            if self.model.output is not None:
                self.model.output.vocabulary.weight[:, self.part(self.parts - 1)] = torch.eye(V)
        self.model.tokenizer = tokenizer

    def part(self, number: int) -> slice:
        """Where a part stands in the stream; -1: the tokens themselves."""
        first = self.V + self.places + number * self.V if number >= 0 else 0
        return slice(first, first + self.V)

    def ids(self, words: Sequence[str]) -> list[int]:
        """Their tokens."""
        return [list(self.words).index(word) for word in words]

    @torch.no_grad()
    def head(
        self, address: str, *, places: Tensor | None = None, tokens: Tensor | None = None, at: int = -1, read: int = -1,
        write: Tensor | None = None, into: int = 0, asked: int = -1,
    ) -> None:  # fmt: skip
        """Scores by places (P, P) and by tokens (V, V), of a part of the query and a part of the key; what it fetches is a
        part of what it looks at, turned (V, V), and put into a part."""
        head, V = self.model.heads[Address.parse(address)], self.V
        if places is not None:
            there = slice(V, V + self.places)
            head.W_Q[there, V:], head.W_K[there, V:] = places, torch.eye(self.places)
        if tokens is not None:
            head.W_Q[self.part(asked), :V], head.W_K[self.part(at), :V] = tokens, torch.eye(V)
        head.W_V[self.part(read)] = torch.eye(V)
        if write is not None:
            head.W_O[:, self.part(into)] = write


def to_place(place: int, level: float = BETA, places: int = P) -> Tensor:
    """Every row looks at one place: (P, P)."""
    return torch.zeros(places, places).index_fill_(1, torch.tensor([place]), level)


def back(offset: int, level: float = BETA, places: int = P) -> Tensor:
    """Every row that can looks so many places back: (P, P)."""
    return level * torch.eye(places).roll(-offset, 1).tril()
