"""Published torch models, rebuilt here around their weights: anarcii (antibody numbering) and SCEPTR (T-cell receptors).

Only the files with weights are read, and never as pickled code. The code of the packages is not imported.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


def read_weights(package: str, file: str) -> dict[str, Tensor]:
    """Read a file with weights of an installed package. Skips the test if the package is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        version = {"anarcii": "2.0.8", "sceptr": "1.2.0"}[package]
        pytest.skip(f"needs the weights in {package}: pip install --no-deps {package}=={version}")
    path = Path(spec.submodule_search_locations[0]) / file
    return torch.load(path, weights_only=True, map_location="cpu")


class Wrapped(nn.Module):
    """An `nn.MultiheadAttention` under the name that anarcii gives it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.multihead_attn = nn.MultiheadAttention(width, heads, batch_first=True)


class FeedForward(nn.Module):
    """Two linear layers with ReLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers."""
        return self.fc_2(self.fc_1(x).relu())


class EncoderBlock(nn.Module):
    """Post-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.ff_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention, self.positionwise_feedforward = Wrapped(width, heads), FeedForward(width, 4 * width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Run the block: (B, S, D) → (B, S, D)."""
        attended, _ = self.self_attention.multihead_attn(x, x, x, key_padding_mask=padding)
        x = self.self_attn_layer_norm(x + attended)
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class DecoderBlock(EncoderBlock):
    """Post-norm block with cross-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.enc_attn_layer_norm, self.encoder_attention = nn.LayerNorm(width), Wrapped(width, heads)

    def forward(self, x: Tensor, memory: Tensor, source_padding: Tensor, padding: Tensor) -> Tensor:  # pyright: ignore
        """Run the block: (B, T, D) → (B, T, D)."""
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        attended, _ = self.self_attention.multihead_attn(x, x, x, padding, attn_mask=causal, is_causal=True)
        x = self.self_attn_layer_norm(x + attended)
        attended, _ = self.encoder_attention.multihead_attn(x, memory, memory, source_padding)
        x = self.enc_attn_layer_norm(x + attended)
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class Side(nn.Module):
    """Embeddings and blocks of the encoder or of the decoder."""

    def __init__(self, vocab: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tok_embedding, self.pos_embedding = nn.Embedding(vocab, width), nn.Embedding(210, width)
        self.layers = nn.ModuleList(blocks)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed tokens, scaled, and positions."""
        width = self.tok_embedding.embedding_dim
        return self.tok_embedding(ids) * width**0.5 + self.pos_embedding(torch.arange(ids.shape[1]))


class Anarcii(nn.Module):
    """Encoder-decoder that numbers the residues of antibodies: 2 + 2 layers with 4 heads of width 32."""

    def __init__(self) -> None:
        super().__init__()
        width, heads, count = 128, 4, 2
        self.encoder = Side(25, width, [EncoderBlock(width, heads) for _ in range(count)])
        self.decoder = Side(136, width, [DecoderBlock(width, heads) for _ in range(count)])
        self.decoder.fc_out = nn.Linear(width, 136)
        self.load_state_dict(read_weights("anarcii", "models/antibody/antibody_4_2_128_512.pt"))
        self.eval()

    def forward(self, source: Tensor, target: Tensor, pad: int = 0) -> Tensor:
        """Compute logits: (B, S), (B, T) → (B, T, 136)."""
        source_padding, memory = source == pad, self.encoder.embed(source)
        for block in self.encoder.layers:
            memory = block(memory, source_padding)
        x = self.decoder.embed(target)
        for block in self.decoder.layers:
            x = block(x, memory, source_padding, target == pad)
        return self.decoder.fc_out(x)  # pyright: ignore


class Sceptr(nn.Module):
    """Encoder of T-cell receptors: 3 layers of torch with 8 heads of width 8, and a head for masked residues."""

    def __init__(self, variant: str = "SCEPTR") -> None:
        super().__init__()
        weights = read_weights("sceptr", f"_model_saves/{variant}/state_dict.pt")
        self.tokens = nn.Embedding.from_pretrained(
            weights["_token_embedder._find_token_embedding_module._token_embeddings"]
        )
        self.compartments = nn.Embedding.from_pretrained(
            weights["_token_embedder._compartment_embedding._token_embeddings"]
        )
        self.project = nn.Linear(29, 64, bias=False)
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 256, batch_first=True), 3)
        self.residues = nn.Linear(64, 20)
        prefix = "_self_attention_stack._standard_stack._self_attention_stack."
        stack = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        self.stack.load_state_dict(stack)
        self.project.load_state_dict({"weight": weights["_self_attention_stack._initial_projector.weight"]})
        head = "_mlm_token_prediction_projector.projector."
        self.residues.load_state_dict({name: weights[head + name] for name in ("weight", "bias")})
        self.eval()

    def forward(self, tokens: Tensor, compartments: Tensor, padding: Tensor) -> Tensor:
        """Compute logits over the 20 amino acids: (B, T) → (B, T, 20)."""
        position = torch.linspace(0, 1, tokens.shape[1], dtype=self.project.weight.dtype).expand(len(tokens), -1)[
            ..., None
        ]
        x = self.project(torch.cat((self.tokens(tokens), self.compartments(compartments), position), -1))
        # Called as the package does: without nn.Module.__call__, so that forward hooks of the encoder would not run.
        return self.residues(self.stack.forward(x, src_key_padding_mask=padding))
