"""Models that learned nothing: how many of their heads are said to have a role. Run it with -s to see the counts."""

from collections import Counter

import pytest
import torch

from headwise.look.profile import profile
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.corpus import Corpus
from headwise.text.little import VOCABULARY
from headwise.text.make import word_tokenizer

SEEDS, LAYERS, HEADS = range(200, 220), 3, 6


def untrained(seed: int, unit_gain: bool) -> Transformer:
    """As models begin, when attention is nearly even; or redrawn so that each layer keeps the length of what it reads, when
    heads pick and choose for no reason."""
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    attention = AttentionSpec(width=48, heads=HEADS)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=160, layers=LAYERS, attention=attention))
    if unit_gain:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    among = 1 if "embed" in name else parameter.shape[1]
                    parameter.normal_(std=among**-0.5)
    model.tokenizer = tokenizer
    return model


@pytest.mark.slow
@pytest.mark.parametrize("unit_gain", [False, True])
def test_heads_that_learned_nothing(unit_gain: bool) -> None:
    """No more than one in a hundred, ablations and all."""
    texts = list(Corpus.little("held-out", documents=60, seed=1).items())
    told = Counter(
        f"{head.role}, {head.rung}"
        for seed in SEEDS
        for head in profile(untrained(seed, unit_gain), texts, seed=seed)
        if head.role != "unclear"
    )
    print(f"unit gain {unit_gain}: {told.total()} of {len(SEEDS) * LAYERS * HEADS}: {dict(told)}")
    assert told.total() <= 0.01 * len(SEEDS) * LAYERS * HEADS
