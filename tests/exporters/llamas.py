"""Small Llamas with a tokenizer llama.cpp knows, cut in all ways."""

import json
import random
from dataclasses import replace
from functools import cache

import torch
from tokenizers import AddedToken, models, normalizers, trainers
from tokenizers import Tokenizer as Backend

from headwise.analysis.ablation.head_outputs import mean_activations
from headwise.compression.prune_heads import cut, fold
from headwise.model import Transformer
from headwise.model.prune import heads_to_cut
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer
from headwise.text.gguf import tokenizer_from_gguf

TEXTS = ["the cat sat on the mat", "a dog saw the cat and ran", "heads look at words", "it rained all day on the mat"]
SPEC = ModelSpec(
    vocab=300, context=64, layers=3, hidden=64, norm="rms", activation="swiglu", mlp_bias=False, positions="none",
    attention=AttentionSpec(width=32, heads=6, head_dim=8, kv_heads=3, rotary=Rotary()),
)  # fmt: skip


@cache
def tokenizer() -> Tokenizer:
    return bpe_tokenizer(TEXTS * 20, size=SPEC.vocab)


def llama(seed: int = 0, **more) -> Transformer:
    torch.manual_seed(seed)
    words = tokenizer()
    model = Transformer(replace(SPEC, **more, vocab=len(words)))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0) if weight.ndim > 1 else None  # so that words matter
        parts = [i for i in range(len(words)) if "\ufffd" in words.decode([i])]  # of which llama.cpp tells nothing
        model.embed.tokens.weight[parts] *= 0.01
        if not model.spec.tied:
            assert model.output is not None
            model.output.vocabulary.weight[parts] *= 0.01
    model.tokenizer = words
    return model.eval()


def without(model: Transformer, heads: str, folded: bool = True) -> Transformer:
    """The model without some heads, what they gave on average folded in."""
    gone = heads_to_cut(model.spec, heads)
    means = fold(model, gone, mean_activations(model, TEXTS)) if folded else None
    return cut(model, gone, means)


def random_cut(model: Transformer, seed: int) -> Transformer:
    """Any heads but all of them; whole layers too."""
    dice = random.Random(seed)
    heads = list(model.spec.addresses)
    gone = [head for head in heads if dice.random() < dice.choice((0.2, 0.5, 0.8))]
    if dice.random() < 0.5:
        layer = dice.randrange(model.spec.layers)
        gone = sorted({*gone, *(head for head in heads if head.layer == layer)})
    gone = gone[:-1] if len(gone) == len(heads) else gone or heads[:1]
    return without(model, ",".join(map(str, gone)), folded=dice.random() < 0.5)


def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: spaces as ▁, one before a text, bytes for what no token holds, a start token; one added token."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # pyright: ignore
    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
    backend.normalizer = spaced  # pyright: ignore
    learn = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)  # pyright: ignore
    backend.train_from_iterator([one.text for one in Corpus.probe().items()], learn)
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    merged = ["".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    ranks = {token: float(-place) for place, token in enumerate(merged)}
    fields = {
        "model": "llama", "tokens": tokens, "scores": [ranks.get(token, 0.0) for token in tokens], "unknown_token_id": 0,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    made = tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    made.backend.add_tokens([AddedToken("<|user|>", normalized=False)])
    return made
