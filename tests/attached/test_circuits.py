"""Circuits of attached models: metrics, exact effects and gradients equal those of native models."""

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.circuits.circuit_task import EncodedPrompt, PromptPair
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator
from headwise.analysis.circuits.node_ranking import exact_effects, gradient_effects
from headwise.model import ModelProtocol
from tests.attached.models import BY_NAME, VOCAB

LENGTHS = (5, 5, 7)


def random_prompts() -> list[EncodedPrompt]:
    rng, prompts = np.random.default_rng(0), []
    for length in LENGTHS:
        clean, corrupted = (tuple(rng.integers(3, VOCAB, length).tolist()) for _ in range(2))
        prompts.append(EncodedPrompt(PromptPair(""), length, (clean,), (corrupted,), ((4,), (9,)), 1))
    return prompts


def node_results(model: ModelProtocol) -> tuple[ModelNodes, dict[str, np.ndarray]]:
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), random_prompts())
    base = np.ones(len(nodes), bool)
    sets = np.random.default_rng(1).random((6, len(nodes))) < 0.5
    return nodes, {
        "sets": evaluator.evaluate(sets),
        "zero": evaluator.evaluate(sets, "zero"),
        "exact": exact_effects(evaluator, range(len(nodes)), base),
        "gradients": gradient_effects(evaluator, base, 3),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", pytest.param("phi3", marks=pytest.mark.slow)])
def test_circuit_values_attached_equal_native(name: str) -> None:
    attached = hw.attach(BY_NAME[name].build().double())
    native = hw.to_native(attached)
    nodes, results = node_results(attached)
    native_nodes, expected = node_results(native)
    assert nodes.names == native_nodes.names
    assert ("kv" in nodes.kinds) == (name != "gpt2")
    for key, values in results.items():
        difference = np.abs(values - expected[key]).max() / np.abs(expected[key]).max()
        assert difference < 1e-4, key  # transformers rotates in float32


def prompts_with_prefixes() -> list[EncodedPrompt]:
    """Prompts whose clean and corrupted versions share 0 to 5 first tokens. Some have answers of several tokens."""
    rng, prompts = np.random.default_rng(2), []
    for length, prefix in ((5, 0), (7, 3), (8, 3), (8, 5), (9, 5), (9, 5)):
        clean = rng.integers(3, VOCAB, length).tolist()
        corrupted = clean[:prefix] + [token - 1 for token in clean[prefix:]]
        answers = ((4,), (9,)) if length % 2 else ((4, 6, 5), (9,))
        rows = [tuple(tuple(ids) + answer[:-1] for answer in answers) for ids in (clean, corrupted)]
        rows = [row[:1] if length % 2 else row for row in rows]
        prompts.append(EncodedPrompt(PromptPair(""), length, rows[0], rows[1], answers, 1))
    return prompts


@pytest.mark.parametrize(
    ("name", "bound"),
    [("gpt2", 1e-10), ("llama", 1e-5), ("mistral", 1e-5), ("opt", 1e-10), ("bloom", 1e-5)]
    + [pytest.param(name, 1e-5, marks=pytest.mark.slow) for name in ("gemma3", "gpt_neox", "falcon", "gptj")],
)
def test_shared_prefixes_in_attached_model_equal_full_passes(name: str, bound: float) -> None:
    """Some models compute norms, rotations or biases in float32, in any dtype."""
    attached = hw.attach(BY_NAME[name].build().double())
    nodes, results = ModelNodes.of(attached), []
    sets = np.random.default_rng(1).random((6, len(nodes))) < 0.5
    base = sets[0].copy()
    base[0] = True  # without the embedding, nothing of the prompt is left
    for is_shared in (True, False):
        evaluator = NodeEvaluator(attached, nodes, prompts_with_prefixes())
        if not is_shared:
            evaluator._prefix_batches = evaluator.batches
        results.append((evaluator.evaluate(sets), exact_effects(evaluator, range(len(nodes)), base)))
        prefixes = {batch.prefix_ids.shape[1] for batch in evaluator.prefix_batches()}
        assert (max(prefixes) > 0) == is_shared, "the model does not share prefixes"
    for shared, full in zip(*results, strict=True):
        assert np.abs(shared - full).max() <= bound * np.abs(full).max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "opt"])  # the MLP of OPT flattens batch and tokens
def test_all_nodes_replaced_in_attached_model_gives_the_corrupted_prompt(name: str) -> None:
    attached = hw.attach(BY_NAME[name].build().double())
    evaluator = NodeEvaluator(attached, nodes := ModelNodes.of(attached), random_prompts())
    everything_replaced = evaluator.evaluate(np.zeros((1, len(nodes)), bool))[0]
    for prompt, value in zip(random_prompts(), everything_replaced, strict=True):
        logits = attached(torch.tensor(prompt.corrupted_rows))[0, -1]
        assert value == pytest.approx(float(logits[4] - logits[9]), abs=1e-6)
