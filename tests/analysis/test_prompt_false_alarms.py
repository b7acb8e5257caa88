"""Models that learned nothing, asked on prompts as if they got every one right: none of their heads has a role. Run it with
-s to see the counts."""

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics import copy_suppression, name_movers, name_suppression, successor
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.name_movers import NAMES, SINGLES, TEMPLATES
from headwise.analysis.metrics.prompts import DuePrompt, Looks, ask_prompts
from headwise.analysis.metrics.query_focus import FACTS
from headwise.analysis.metrics.successor import CLASSES
from headwise.analysis.roles.prompt_roles import PROMPTED, prompted_measures
from headwise.analysis.roles.roles import judge, make_cases
from headwise.model import AnyModel, Wiring
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer, word_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.test_false_alarms import GAINS, untrained

SEEDS = range(300, 312)
SIZES = ((3, 6, 48), (2, 16, 64))  # layers, heads, width


def said() -> list[str]:
    """Whatever prompts may say, and the probe set."""
    people = [template.format(one, other, one) for template in TEMPLATES for one, other in pairwise(NAMES)]
    people += [template.format(name) for template in SINGLES for name in NAMES]
    lists = [", ".join(f" {word}" for word in some) for some in CLASSES]
    facts = [text for pair in FACTS for text in pair]
    probe = [item.text for item in Corpus.probe().items()]
    return [*people, *lists, *facts, *probe]


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Words apart by spaces; or byte pairs, in which each word of the prompts has become one token."""
    texts = said()
    if kind == "pairs":
        return bpe_tokenizer([*texts, *texts, *texts], size=2500)
    words = dict.fromkeys(word for text in texts for word in text.split())
    bare = dict.fromkeys(word for some in CLASSES for word in some)
    return word_tokenizer([*{**words, **bare, **{f"{word},": None for word in bare}}])


def as_if_right(model: AnyModel, prompts: list[DuePrompt], wiring: Wiring, name: str) -> Looks:
    looks = ask_prompts(model, prompts, wiring, name)
    return looks._replace(right=np.ones_like(looks.right))


def alarms(seeds: range, gain: float, kind: str, size: tuple[int, int, int], patch: pytest.MonkeyPatch) -> Counter[str]:
    for module in (name_movers, name_suppression, successor, copy_suppression):
        patch.setattr(module, "ask_prompts", as_if_right)
    found: Counter[str] = Counter()
    for seed in seeds:
        model = untrained(seed, gain, tokenizer(kind), *size)
        tally = Tally(len(model.spec.addresses))
        with torch.no_grad():
            assert [task.run(model, tally, seed) for task in prompted_measures()[:-1]] == [""] * 5  # far.py has its own
        supports, family = judge(make_cases(tally, None, roles=PROMPTED), tally.heads)
        assert family == 0, "they are a family of their own"
        found.update(f"{one.role}, {one.rung}" for some in supports for one in some if one.stands)
    return found


@pytest.mark.slow
def test_attached_models_are_asked_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers model, attached, and the same loaded as ours: every number of every head."""
    transformers = pytest.importorskip("transformers")
    for module in (name_movers, name_suppression, successor, copy_suppression):
        monkeypatch.setattr(module, "ask_prompts", as_if_right)
    words = tokenizer("pairs")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    words.save(tmp_path)
    attached = hw.attach(theirs)
    attached.tokenizer = words
    tallies = []
    for model in (attached, hw.load(tmp_path)):
        tallies.append(Tally(8))
        with torch.no_grad():
            assert [task.run(model, tallies[-1], 0) for task in prompted_measures()] == [""] * 6
    assert len(tallies[0].fields) == 3 * 7 + 1
    for name in tallies[0].fields:
        np.testing.assert_allclose(tallies[0].mean(name), tallies[1].mean(name), atol=1e-6)


@pytest.mark.parametrize("kind", ["words", "pairs"])
def test_sharp_heads_that_learned_nothing_have_no_role(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alarms(SEEDS[:1], 4.0, kind, SIZES[0], monkeypatch) == {}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["words", "pairs"])
@pytest.mark.parametrize("gain", GAINS)
def test_heads_that_learned_nothing(
    gain: float, kind: str, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = alarms(SEEDS, gain, kind, size, monkeypatch)
    print(f"gain {gain:g}, {kind}, {size}: {told.total()} of {len(SEEDS) * size[0] * size[1]}: {dict(told)}")
    assert told == {}
