"""False positives on prompts: untrained models, scored as if they answered every prompt correctly, have no heads with roles.
Run with -s to see the counts."""

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics import copy_suppression, name_movers, name_suppression, successor
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.name_movers import NAMES, SINGLES, TEMPLATES
from headwise.analysis.metrics.prompt_metric import HeadResponses, PromptWithTargets, run_prompts
from headwise.analysis.metrics.query_focused_retrieval import FACTS
from headwise.analysis.metrics.successor import CLASSES
from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES, prompt_metrics
from headwise.analysis.roles.roles import assess, score
from headwise.model import ModelProtocol, ResidualStream
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer, word_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.test_false_alarms import GAINS, untrained_model

SEEDS = range(300, 312)
SIZES = ((3, 6, 48), (2, 16, 64))  # layers, heads, width


def prompt_texts() -> list[str]:
    """Return the texts of all prompts, and the probe set."""
    people = [template.format(name, other_name, name) for template in TEMPLATES for name, other_name in pairwise(NAMES)]
    people += [template.format(name) for template in SINGLES for name in NAMES]
    lists = [", ".join(f" {word}" for word in word_class) for word_class in CLASSES]
    facts = [text for pair in FACTS for text in pair]
    probe = [item.text for item in Corpus.probe_set().items()]
    return [*people, *lists, *facts, *probe]


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    """Make a tokenizer: words separated by spaces, or BPE in which each word of the prompts is one token."""
    texts = prompt_texts()
    if kind == "pairs":
        return bpe_tokenizer([*texts, *texts, *texts], vocab_size=2500)
    words = dict.fromkeys(word for text in texts for word in text.split())
    bare = dict.fromkeys(word for word_class in CLASSES for word in word_class)
    return word_tokenizer([*{**words, **bare, **{f"{word},": None for word in bare}}])


def run_prompts_as_correct(
    model: ModelProtocol, prompts: list[PromptWithTargets], residual: ResidualStream, name: str
) -> HeadResponses:
    responses = run_prompts(model, prompts, residual, name)
    return responses._replace(correct=np.ones_like(responses.correct))


def false_alarms(
    seeds: range, gain: float, kind: str, size: tuple[int, int, int], patch: pytest.MonkeyPatch
) -> Counter[str]:
    for module in (name_movers, name_suppression, successor, copy_suppression):
        patch.setattr(module, "run_prompts", run_prompts_as_correct)
    counts: Counter[str] = Counter()
    for seed in seeds:
        model = untrained_model(seed, gain, make_tokenizer(kind), *size)
        accumulator = Accumulator(len(model.spec.head_addresses))
        with torch.no_grad():
            results = [task.run(model, accumulator, seed) for task in prompt_metrics()[:-1]]
        assert [result.skip_reason for result in results] == [""] * 5
        evidence, family = assess(score(accumulator, None, roles=PROMPT_ROLES), accumulator.heads)
        assert family == 0, "they are a family of their own"
        counts.update(
            f"{role_evidence.role}, {role_evidence.evidence_level}"
            for head_evidence in evidence
            for role_evidence in head_evidence
            if role_evidence.is_supported
        )
    return counts


@pytest.mark.slow
def test_prompt_metrics_attached_model_equals_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers model, attached and loaded natively, has equal scores of every head."""
    transformers = pytest.importorskip("transformers")
    for module in (name_movers, name_suppression, successor, copy_suppression):
        monkeypatch.setattr(module, "run_prompts", run_prompts_as_correct)
    words = make_tokenizer("pairs")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    hf_model = transformers.LlamaForCausalLM(config).eval()
    hf_model.save_pretrained(tmp_path)
    words.save(tmp_path)
    attached = hw.attach(hf_model)
    attached.tokenizer = words
    accumulators = []
    for model in (attached, hw.load(tmp_path)):
        accumulators.append(Accumulator(8))
        with torch.no_grad():
            results = [task.run(model, accumulators[-1], 0) for task in prompt_metrics()]
        assert [result.skip_reason for result in results] == [""] * 6
    assert len(accumulators[0].fields) == 3 * 7 + 1
    for name in accumulators[0].fields:
        np.testing.assert_allclose(accumulators[0].mean(name), accumulators[1].mean(name), atol=1e-6)


@pytest.mark.parametrize("kind", ["words", "pairs"])
def test_prompt_roles_sharp_random_heads_have_no_role(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert false_alarms(SEEDS[:1], 4.0, kind, SIZES[0], monkeypatch) == {}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["words", "pairs"])
@pytest.mark.parametrize("gain", GAINS)
def test_prompt_roles_random_models_have_no_roles(
    gain: float, kind: str, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm_counts = false_alarms(SEEDS, gain, kind, size, monkeypatch)
    print(
        f"gain {gain:g}, {kind}, {size}: {alarm_counts.total()} of {len(SEEDS) * size[0] * size[1]}: {dict(alarm_counts)}"
    )
    assert alarm_counts == {}
