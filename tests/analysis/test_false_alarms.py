"""False positives: the number of heads of untrained models that get a role. Run with -s to see the counts."""

import json
from collections import Counter
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from headwise.analysis.roles.profile import profile
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.probe import probe_set
from headwise.text.synthetic import VOCABULARY

SEEDS, LAYERS, HEADS = range(200, 220), 3, 6
GAINS = (0.0, 1.0, 4.0)  # scale of queries: initial weights; unit gain; unit gain with larger queries


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Number tokens like SentencePiece: special tokens, then merges in the order in which they were learned, then single
    characters and punctuation."""
    texts = [document.text for document in Corpus.probe_set().items() if isinstance(document, Document)]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model_json = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model_json["merges"]]
    merged = list(dict.fromkeys("".join(pair) for pair in merges))
    single = sorted(set(model_json["vocab"]) - set(merged))
    vocab = {token: token_id for token_id, token in enumerate(("<unk>", "<s>", "</s>", *merged, *single))}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore
    return Tokenizer(backend, {"bos": 1, "eos": 2, "unk": 0})


def untrained_model(
    seed: int, gain: float, tokenizer: Tokenizer, layers: int = LAYERS, heads: int = HEADS, width: int = 48
) -> Transformer:
    """Make a model with initial weights, whose attention is nearly uniform; or with weights redrawn so that each layer
    preserves the norm of its input. Then heads have random preferences, which are sharper for larger queries."""
    torch.manual_seed(seed)
    attention = AttentionSpec(width=width, heads=heads)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=160, layers=layers, attention=attention))
    if gain:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    fan_in = 1 if "embed" in name else parameter.shape[1]
                    parameter.normal_(std=fan_in**-0.5)
            for head in model.heads:
                head.W_Q.mul_(gain)
    model.tokenizer = tokenizer
    return model


def false_alarms(seeds: range, gain: float, vocabulary: str, causal: bool = True) -> Counter[str]:
    if vocabulary == "words":
        tokenizer, texts = word_tokenizer(VOCABULARY), list(Corpus.synthetic("held-out", documents=60, seed=1).items())
    else:
        tokenizer, texts = sentencepiece_tokenizer(), list(probe_set())[::5]
    return Counter(
        f"{head.role}, {head.evidence_level}"
        for seed in seeds
        for head in profile(untrained_model(seed, gain, tokenizer), texts, seed=seed, causal=causal)
        if head.role != "unclear"
    )


def test_sentencepiece_tokenizer_single_characters_come_last() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("Ann's cat, dogs.")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "Ann's cat, dogs."
    assert all((tokenizer.backend.token_to_id(character) or 0) > len(tokenizer) / 2 for character in ",.'s")


@pytest.mark.parametrize("vocabulary", ["words", "pieces"])
def test_profile_sharp_random_heads_have_no_role(vocabulary: str) -> None:
    assert false_alarms(SEEDS[:2], 4.0, vocabulary, causal=False) == {}


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["words", "pieces"])
@pytest.mark.parametrize("gain", GAINS)
def test_profile_random_models_have_no_roles(gain: float, vocabulary: str) -> None:
    """No role is found, with ablation included."""
    alarms = false_alarms(SEEDS, gain, vocabulary)
    print(f"gain {gain:g}, {vocabulary}: {alarms.total()} of {len(SEEDS) * LAYERS * HEADS}: {dict(alarms)}")
    assert alarms == {}
