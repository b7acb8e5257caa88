"""Models with their own vocabulary and hand-built heads. Tokens, positions and output channels are unit vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer

P, BETA = 40, 90.0


@dataclass
class WordModel:
    """A decoder without effect, and the layout of its residual stream: tokens, positions, then parts as wide as the
    vocabulary. The last part determines the prediction."""

    words: Sequence[str]
    heads: int
    layers: int = 1
    parts: int = 1
    kind: str = "decoder"
    positions: int = P

    def __post_init__(self) -> None:
        tokenizer = word_tokenizer(self.words)
        self.V = V = len(tokenizer)
        N = self.positions
        width = V * (1 + self.parts) + N
        # ‖x‖² is 2 at the input (token and position), so that a score is the value in W_Q W_Kᵀ.
        attention = AttentionSpec(width=width, heads=self.heads, head_dim=V + N, value_dim=V, scale=2.0 / width)
        self.model = Transformer(
            ModelSpec(
                vocab=V, context=N, layers=self.layers, attention=attention, mlp_width=3, norm="rms",
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
                self.model.output.vocabulary.weight[:, self.part_slice(self.parts - 1)] = torch.eye(V)
        self.model.tokenizer = tokenizer

    def part_slice(self, index: int) -> slice:
        """Return the channels of a part of the residual stream. -1 selects the tokens."""
        first = self.V + self.positions + index * self.V if index >= 0 else 0
        return slice(first, first + self.V)

    def ids(self, words: Sequence[str]) -> list[int]:
        """Return the token ids of words."""
        return [list(self.words).index(word) for word in words]

    @torch.no_grad()
    def set_head(
        self, address: str, *, position_scores: Tensor | None = None, token_scores: Tensor | None = None,
        key_part: int = -1, value_part: int = -1, output_map: Tensor | None = None, output_part: int = 0,
        query_part: int = -1,
    ) -> None:  # fmt: skip
        """Set a head. Scores are given by positions (P, P) and by tokens (V, V), between a part of the query and a part of
        the key. The output is a part of the attended token, mapped by a matrix (V, V) and written to a part."""
        head, V = self.model.heads[Address.parse(address)], self.V
        if position_scores is not None:
            position_rows = slice(V, V + self.positions)
            head.W_Q[position_rows, V:], head.W_K[position_rows, V:] = position_scores, torch.eye(self.positions)
        if token_scores is not None:
            head.W_Q[self.part_slice(query_part), :V], head.W_K[self.part_slice(key_part), :V] = (
                token_scores,
                torch.eye(V),
            )
        head.W_V[self.part_slice(value_part)] = torch.eye(V)
        if output_map is not None:
            head.W_O[:, self.part_slice(output_part)] = output_map


def scores_to_position(position: int, score: float = BETA, num_positions: int = P) -> Tensor:
    """Return scores with which every row attends to one position, (P, P)."""
    return torch.zeros(num_positions, num_positions).index_fill_(1, torch.tensor([position]), score)


def scores_to_offset(offset: int, score: float = BETA, num_positions: int = P) -> Tensor:
    """Return scores with which every row attends to a fixed offset back, if it exists, (P, P)."""
    return score * torch.eye(num_positions).roll(-offset, 1).tril()
