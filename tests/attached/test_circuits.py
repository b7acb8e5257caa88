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


@torch.no_grad()
def test_all_nodes_replaced_in_attached_model_gives_the_corrupted_prompt() -> None:
    attached = hw.attach(BY_NAME["llama"].build().double())
    evaluator = NodeEvaluator(attached, nodes := ModelNodes.of(attached), random_prompts())
    everything_replaced = evaluator.evaluate(np.zeros((1, len(nodes)), bool))[0]
    for prompt, value in zip(random_prompts(), everything_replaced, strict=True):
        logits = attached(torch.tensor(prompt.corrupted_rows))[0, -1]
        assert value == pytest.approx(float(logits[4] - logits[9]), abs=1e-6)
