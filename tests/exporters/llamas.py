"""Small Llama models with a tokenizer that llama.cpp supports, pruned in many ways."""

import json
import random
from dataclasses import replace
from functools import cache

import torch
from tokenizers import AddedToken, models, normalizers, trainers
from tokenizers import Tokenizer as Backend

from headwise.analysis.ablation.recorded_head_outputs import mean_activations
from headwise.compression.select_heads import compute_folded_biases
from headwise.model import Transformer
from headwise.model.prune import heads_to_prune
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer
from headwise.text.gguf_tokenizer import tokenizer_from_gguf

TEXTS = ["the cat sat on the mat", "a dog saw the cat and ran", "heads look at words", "it rained all day on the mat"]
SPEC = ModelSpec(
    vocab=300, context=64, layers=3, mlp_width=64, norm="rms", activation="swiglu", mlp_bias=False, positions="none",
    attention=AttentionSpec(width=32, heads=6, head_dim=8, kv_heads=3, rotary=Rotary()),
)  # fmt: skip


@cache
def tokenizer() -> Tokenizer:
    return bpe_tokenizer(TEXTS * 20, vocab_size=SPEC.vocab)


def make_llama(seed: int = 0, **fields) -> Transformer:
    torch.manual_seed(seed)
    bpe = tokenizer()
    model = Transformer(replace(SPEC, **fields, vocab=len(bpe)))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0) if weight.ndim > 1 else None  # so that outputs depend on the tokens
        partial_ids = [
            i for i in range(len(bpe)) if "\ufffd" in bpe.decode([i])
        ]  # llama.cpp reports no candidates for them
        model.embed.tokens.weight[partial_ids] *= 0.01
        if not model.spec.tied:
            assert model.output is not None
            model.output.vocabulary.weight[partial_ids] *= 0.01
    model.tokenizer = bpe
    return model.eval()


def without_heads(model: Transformer, heads: str, folded: bool = True) -> Transformer:
    """Prune heads and fold their mean output into the bias."""
    pruned_heads = heads_to_prune(model.spec, heads)
    means = compute_folded_biases(model, pruned_heads, mean_activations(model, TEXTS)) if folded else None
    return model.prune(pruned_heads, means)


def prune_random_heads(model: Transformer, seed: int) -> Transformer:
    """Prune random heads, possibly all heads of a layer, but not all heads."""
    rng = random.Random(seed)
    heads = list(model.spec.head_addresses)
    pruned_heads = [head for head in heads if rng.random() < rng.choice((0.2, 0.5, 0.8))]
    if rng.random() < 0.5:
        layer = rng.randrange(model.spec.layers)
        pruned_heads = sorted({*pruned_heads, *(head for head in heads if head.layer == layer)})
    pruned_heads = pruned_heads[:-1] if len(pruned_heads) == len(heads) else pruned_heads or heads[:1]
    return without_heads(model, ",".join(map(str, pruned_heads)), folded=rng.random() < 0.5)


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's: ▁ for spaces, a space prefix, byte fallback, BOS, and one added token."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # pyright: ignore
    space_normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
    backend.normalizer = space_normalizer  # pyright: ignore
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)  # pyright: ignore
    backend.train_from_iterator([document.text for document in Corpus.probe_set().items()], trainer)
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    merged = ["".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    ranks = {token: float(-rank) for rank, token in enumerate(merged)}
    fields = {
        "model": "llama", "tokens": tokens, "scores": [ranks.get(token, 0.0) for token in tokens], "unknown_token_id": 0,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    result = tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    result.backend.add_tokens([AddedToken("<|user|>", normalized=False)])
    return result
