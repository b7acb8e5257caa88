"""Circuits: values of replaced nodes, rankings, statistics, errors, resuming, and models whose circuit is known."""

import csv
import json
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import record_z
from headwise.analysis.circuits.circuit_result import CircuitResult, node_kind
from headwise.analysis.circuits.circuit_statistics import (
    FaithfulnessSums,
    TemplateBootstrapSampler,
    choose_size,
    mib_areas,
    random_sets,
    stability_shares,
)
from headwise.analysis.circuits.circuit_task import (
    EncodedPrompt,
    PromptEncoder,
    PromptPair,
    split_three_ways_by_template,
)
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator, NodeMeans
from headwise.analysis.circuits.node_ranking import exact_effects, gradient_effects
from headwise.analysis.circuits.prompt_batch import make_prefix_batches, without_prefix
from headwise.analysis.circuits.shipped_tasks import SHIPPED_TASKS, make_shipped_task
from headwise.analysis.circuits.task_templates import WORDS
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from tests.analysis.constructed_heads import FILLERS, decoder

NUM_LAYERS, HEADS, KV_HEADS = 3, 4, 2
TOKENIZER = word_tokenizer(["<unk>", *WORDS])


def small_model(seed: int = 0, kv_heads: int = KV_HEADS) -> hw.Transformer:
    """Make a random model in float64, with large weights so that attention is not uniform."""
    torch.manual_seed(seed)
    attention = AttentionSpec(width=24, heads=HEADS, kv_heads=kv_heads, head_dim=6, rotary=Rotary())
    spec = ModelSpec(
        vocab=len(WORDS) + 1, context=32, layers=NUM_LAYERS, attention=attention, mlp_width=32, norm="rms",
        activation="swiglu", positions="none", mlp_bias=False,
    )  # fmt: skip
    model = hw.Transformer(spec).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.tokenizer = TOKENIZER
    return model


def word_pairs(count: int = 24, templates: int = 8, seed: int = 0, words: tuple[str, ...] = WORDS) -> list[PromptPair]:
    """Make prompts `a b c d a`, where b is right, and d is right after the words before b and d changed places."""
    rng = np.random.default_rng(seed)
    pairs = []
    for i in range(count):
        a, b, c, d = (words[int(k)] for k in rng.choice(len(words), 4, replace=False))
        extra = words[int(rng.integers(len(words)))] if i % 2 else ""
        pairs.append(
            PromptPair(
                f"{extra} {a} {b} {c} {d} {a}".strip(), f"{extra} {c} {b} {a} {d} {a}".strip(), (f" {b}",), (f" {d}",),
                f"t{i % templates}",
            )
        )  # fmt: skip
    return pairs


def encode(model: hw.Transformer, pairs: list[PromptPair]) -> list[EncodedPrompt]:
    return [PromptEncoder(TOKENIZER).encode(pair) for pair in pairs]


def metric_of_logits(prompt: EncodedPrompt, logits: Tensor) -> float:
    """Log-probability of the right answer minus that of the wrong one, at the last token of a prompt: (T, V)."""
    log_probs = logits[prompt.num_tokens - 1].detach().log_softmax(-1)
    return float(log_probs[prompt.answers[0][0]] - log_probs[prompt.answers[1][0]])


def live_row(nodes: ModelNodes, *replaced: str) -> np.ndarray:
    row = np.ones(len(nodes), bool)
    row[nodes.index(replaced)] = False
    return row


# Values of replaced nodes.


def test_nodes_of_a_grouped_query_model_are_heads_kv_heads_mlps_and_embedding() -> None:
    nodes = ModelNodes.of(small_model())
    per_layer = HEADS + KV_HEADS + 1
    assert len(nodes) == 1 + NUM_LAYERS * per_layer
    assert nodes.names[: 1 + per_layer] == ("embedding", "0.0", "0.1", "0.2", "0.3", "0.kv0", "0.kv1", "mlp.0")
    assert all(node_kind(name) == kind for name, kind in zip(nodes.names, nodes.kinds, strict=True))
    assert "kv" not in ModelNodes.of(small_model(kv_heads=HEADS)).kinds  # a KV head of one query head is part of it


def test_no_replaced_node_gives_the_model_and_all_nodes_replaced_gives_the_corrupted_prompt() -> None:
    model, pairs = small_model(), word_pairs(6)
    prompts, nodes = encode(model, pairs), ModelNodes.of(model)
    evaluator = NodeEvaluator(model, nodes, prompts)
    scores = evaluator.evaluate(np.stack([np.ones(len(nodes), bool), np.zeros(len(nodes), bool)]))
    for i, prompt in enumerate(prompts):
        clean, corrupted = (
            metric_of_logits(prompt, model(torch.tensor(rows))[0])
            for rows in (prompt.clean_rows, prompt.corrupted_rows)
        )
        assert scores[:, i] == pytest.approx([clean, corrupted], abs=1e-10)
    assert evaluator.clean_metrics() == pytest.approx(scores[0], abs=1e-12)


def test_replaced_heads_equal_patched() -> None:
    model = small_model()
    (prompt,) = encode(model, word_pairs(1))
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), [prompt])
    rows = [live_row(nodes, "0.1"), live_row(nodes, "1.0", "1.3", "2.2")]
    scores = evaluator.evaluate(np.stack(rows))
    other = record_z(model, torch.tensor(prompt.corrupted_rows))
    for score, heads in zip(scores[:, 0], ("0.1", "1.0,1.3,2.2"), strict=True):
        with hw.patched(model, heads, other):
            assert score == pytest.approx(
                metric_of_logits(prompt, model(torch.tensor(prompt.clean_rows))[0]), abs=1e-10
            )
    with hw.ablated(model, "1.0", "zero"):
        expected = metric_of_logits(prompt, model(torch.tensor(prompt.clean_rows))[0])
    assert evaluator.evaluate(live_row(nodes, "1.0")[None], "zero")[0, 0] == pytest.approx(expected, abs=1e-10)


def attention_calls(model: hw.Transformer, ids: Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(calls.append))
        model(ids)
    return calls


def test_replaced_kv_head_equals_attention_over_its_corrupted_keys_and_values() -> None:
    model = small_model()
    (prompt,) = encode(model, word_pairs(1))
    nodes = ModelNodes.of(model)
    score = NodeEvaluator(model, nodes, [prompt]).evaluate(live_row(nodes, "1.kv1")[None])[0, 0]
    clean, corrupted = (attention_calls(model, torch.tensor(r))[1] for r in (prompt.clean_rows, prompt.corrupted_rows))
    k, v = clean.k.clone(), clean.v.clone()
    k[:, 1], v[:, 1] = corrupted.k[:, 1], corrupted.v[:, 1]
    z = hw.attention(clean.q, k, v, mask=hw.causal())
    with model.hook_points()[1].replaced(z):
        expected = metric_of_logits(prompt, model(torch.tensor(prompt.clean_rows))[0])
    assert score == pytest.approx(expected, abs=1e-10)
    assert abs(score - NodeEvaluator(model, nodes, [prompt]).clean_metrics()[0]) > 1e-3


def test_replaced_mlp_equals_a_forward_hook_on_the_mlp() -> None:
    model = small_model()
    (prompt,) = encode(model, word_pairs(1))
    nodes = ModelNodes.of(model)
    score = NodeEvaluator(model, nodes, [prompt]).evaluate(live_row(nodes, "mlp.1")[None])[0, 0]
    recorded: list[Tensor] = []
    block: Any = model.blocks[1]
    mlp = block.mlp
    handle = mlp.register_forward_hook(lambda module, args, output: recorded.append(output))
    model(torch.tensor(prompt.corrupted_rows))
    handle.remove()
    handle = mlp.register_forward_hook(lambda module, args, output: recorded[0])
    expected = metric_of_logits(prompt, model(torch.tensor(prompt.clean_rows))[0])
    handle.remove()
    assert score == pytest.approx(expected, abs=1e-10)


def test_mean_ablation_takes_the_mean_at_each_position() -> None:
    model = small_model()
    prompts = encode(model, word_pairs(4)[::2])  # of equal length
    nodes = ModelNodes.of(model)
    evaluator = NodeEvaluator(model, nodes, prompts)
    scores = evaluator.evaluate(live_row(nodes, "1.2")[None], "mean", NodeMeans(evaluator))[0]
    z = torch.cat(
        [record_z(model, torch.tensor(p.corrupted_rows), "1.2").z[model.hook_points()[1].address] for p in prompts]
    )
    for score, prompt in zip(scores, prompts, strict=True):

        def edit(live: Tensor) -> Tensor:
            changed = live.clone()
            changed[:, 2] = z.mean(0)[0]
            return changed

        with model.hook_points()[1].replaced(edit):
            assert score == pytest.approx(
                metric_of_logits(prompt, model(torch.tensor(prompt.clean_rows))[0]), abs=1e-10
            )


def test_sweep_with_skipped_blocks_equals_full_passes() -> None:
    model = small_model()
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), encode(model, word_pairs(6)), copy_tokens=64)
    base = live_row(nodes, "0.1", "2.kv0")
    candidates = [int(i) for i in np.flatnonzero(base)]
    rows = np.stack([base & (np.arange(len(nodes)) != node) for node in candidates])
    assert evaluator.sweep(candidates, base)[1] == pytest.approx(evaluator.evaluate(rows), abs=1e-10)
    assert evaluator._can_skip is True


def with_prefix(pairs: list[PromptPair]) -> list[PromptPair]:
    """Put 0 to 4 equal words before the clean and the corrupted prompts."""
    words = [" ".join(WORDS[40 : 40 + i % 5]) for i in range(len(pairs))]
    return [
        replace(pair, clean=f"{word} {pair.clean}".strip(), corrupted=f"{word} {pair.corrupted}".strip())
        for word, pair in zip(words, pairs, strict=True)
    ]


SHARING_SPECS = {
    "rotary": AttentionSpec(width=24, heads=HEADS, kv_heads=KV_HEADS, head_dim=6, rotary=Rotary()),
    "window": AttentionSpec(width=24, heads=HEADS, head_dim=6, rotary=Rotary(), window=3),
    "alibi": AttentionSpec(width=24, heads=HEADS, head_dim=6, alibi=True),
    "learned positions": AttentionSpec(width=24, heads=HEADS, head_dim=6),
}


@pytest.mark.parametrize("name", SHARING_SPECS)
def test_shared_prefixes_equal_full_passes(name: str) -> None:
    torch.manual_seed(3)
    attention = SHARING_SPECS[name]
    spec = ModelSpec(
        vocab=len(WORDS) + 1, context=32, layers=NUM_LAYERS, attention=attention, mlp_width=32,
        positions="learned" if name == "learned positions" else "none",
    )  # fmt: skip
    model = hw.Transformer(spec).double().eval()
    model.tokenizer = TOKENIZER
    prompts, nodes = encode(model, with_prefix(word_pairs(12))), ModelNodes.of(model)
    base = live_row(nodes, "0.1", "2.3")
    sets = np.random.default_rng(1).random((6, len(nodes))) < 0.5
    shared, full = NodeEvaluator(model, nodes, prompts), NodeEvaluator(model, nodes, prompts)
    full._prefix_batches = full.batches
    assert shared.evaluate(sets) == pytest.approx(full.evaluate(sets), abs=1e-10)
    assert exact_effects(shared, range(len(nodes)), base) == pytest.approx(
        exact_effects(full, range(len(nodes)), base), abs=1e-10
    )
    prefixes = {batch.prefix_ids.shape[1] for batch in shared.prefix_batches()}
    assert len(prefixes) > 1
    tokens = [sum(batch.ids.numel() for batch in item.prefix_batches()) for item in (shared, full)]
    assert tokens[0] < tokens[1]
    for ablation in ("mean", "zero"):  # change the tokens of the prefix too
        values = [item.evaluate(sets, ablation, NodeMeans(item)) for item in (shared, full)]
        assert values[0] == pytest.approx(values[1], abs=1e-12)


def test_prefixes_that_change_the_metrics_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    prompts, nodes = encode(model, with_prefix(word_pairs(12))), ModelNodes.of(model)
    sets = np.random.default_rng(1).random((6, len(nodes))) < 0.5
    expected = NodeEvaluator(model, nodes, prompts).evaluate(sets)

    def ignore_prefix(model: hw.Transformer, prefix_ids: Tensor) -> Any:
        return lambda ids, copies: model(ids.repeat(copies, 1), hidden=True)

    monkeypatch.setattr(hw.Transformer, "prefix_forward", ignore_prefix)
    evaluator = NodeEvaluator(model, nodes, prompts)
    assert evaluator.evaluate(sets) == pytest.approx(expected, abs=1e-10)
    assert evaluator.prefix_batches() is evaluator.batches


def test_prefix_batches_have_all_prompts_once_and_few_tokens() -> None:
    prompts = encode(model := small_model(), with_prefix(word_pairs(40)))
    batches = make_prefix_batches(prompts, 64, model.device, None)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(40))
    for batch in batches:
        assert batch.ids.numel() <= 64
        full = without_prefix(batch)
        P = batch.prefix_ids.shape[1]
        assert torch.equal(full.ids[:, :P], batch.prefix_ids)
        assert torch.equal(full.corrupted_ids[:, :P], batch.prefix_ids)
        assert torch.equal(full.ids[:, P:], batch.ids)
        assert [(row, position - P) for row, position in full.reads] == list(batch.reads)
    rows = [(*prompt.clean_rows, *prompt.corrupted_rows) for prompt in prompts]
    needed = sum(len(a) - next(i for i in range(len(a)) if a[i] != b[i]) for a, b in rows)
    assert sum(batch.ids.numel() for batch in batches) <= 1.2 * needed


def test_answers_of_several_tokens_are_scored_by_their_log_probability() -> None:
    model = small_model()
    a, b, c, d = WORDS[:4]
    pair = PromptPair(f"{a} {b} {c}", f"{a} {d} {c}", (f" {b} {c}",), (f" {d}",), "t")
    (prompt,) = encode(model, [pair])
    assert len(prompt.clean_rows) == 2
    ids = {word: TOKENIZER.encode(word)[0] for word in WORDS[:4]}
    logits = model(torch.tensor([[ids[a], ids[b], ids[c], ids[b]]]))[0].detach()
    log_probs = logits.log_softmax(-1)
    expected = log_probs[2, ids[b]] + log_probs[3, ids[c]] - log_probs[2, ids[d]]
    short = encode(model, word_pairs(1))[0]
    evaluator = NodeEvaluator(model, ModelNodes.of(model), [short, prompt])
    assert evaluator.clean_metrics()[1] == pytest.approx(float(expected), abs=1e-10)


# Rankings.


@pytest.mark.parametrize("steps", [1, 3])
def test_gradient_effects_equal_finite_differences(steps: int) -> None:
    model = small_model()
    prompts = encode(model, word_pairs(3))
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), prompts)
    effects = gradient_effects(evaluator, np.ones(len(nodes), bool), steps)
    clean, corrupted = (
        record_z(model, torch.tensor(rows)) for rows in (prompts[0].clean_rows, prompts[0].corrupted_rows)
    )
    table = model.embed.tokens.weight
    derivative, step = 0.0, 1e-5
    for k in range(1, steps + 1):
        start, end = (table[torch.tensor(rows)] for rows in (prompts[0].corrupted_rows, prompts[0].clean_rows))
        states = start + k / steps * (end - start)
        values = []
        for sign in (1, -1):
            difference = clean.z[model.hook_points()[1].address] - corrupted.z[model.hook_points()[1].address]
            difference[:, [0, 1, 3]] = 0
            handle = model.blocks[0].register_forward_pre_hook(lambda module, args, x=states: (x, *args[1:]))
            with model.hook_points()[1].replaced(lambda z, d=difference, s=sign: z + s * step * d):
                values.append(metric_of_logits(prompts[0], model(torch.tensor(prompts[0].clean_rows))[0]))
            handle.remove()
        derivative += (values[0] - values[1]) / (2 * step) / steps
    assert effects[nodes.index(["1.2"])[0], 0] == pytest.approx(derivative, rel=1e-5, abs=1e-7)


def test_eap_ig_of_the_embedding_sums_to_the_total_effect() -> None:
    model = small_model()
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), encode(model, word_pairs(2)))
    base = np.ones(len(nodes), bool)
    total = exact_effects(evaluator, [0], base)[0]  # without the embedding nothing of the prompt is left
    empty = evaluator.evaluate(np.zeros((1, len(nodes)), bool))[0]
    assert total == pytest.approx(evaluator.clean_metrics() - empty, abs=1e-10)
    few, many = (gradient_effects(evaluator, base, steps)[0] for steps in (50, 100))
    # The error of the sum is proportional to 1 / steps, so it cancels in this difference.
    assert 2 * many - few == pytest.approx(total, abs=0.02 * np.abs(total).max())


def test_qk_fix_is_exact_if_everything_after_attention_is_linear() -> None:
    model = small_model()
    for block in model.blocks:
        block.norm_mlp = nn.Identity()
        block.mlp = nn.Identity()
    model.norm = nn.Identity()
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), encode(model, word_pairs(4)))
    base = np.ones(len(nodes), bool)
    rows = nodes.index(["2.kv0", "2.kv1"])  # nothing after them but the output layer
    exact = exact_effects(evaluator, rows, base)
    fixed, plain = (gradient_effects(evaluator, base, qk_fix=qk_fix) for qk_fix in (True, False))
    assert fixed[rows] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert np.abs(plain[rows] - exact).max() > 0.05 * np.abs(exact).max()
    heads = nodes.index(["1.0", "2.3", "embedding"])
    assert fixed[heads] == pytest.approx(plain[heads], rel=1e-12)


def test_grad_drop_equals_backward_passes_with_detached_layers() -> None:
    model = small_model()
    prompts = encode(model, word_pairs(1))
    evaluator = NodeEvaluator(model, nodes := ModelNodes.of(model), prompts)
    effects = gradient_effects(evaluator, np.ones(len(nodes), bool), grad_drop=True)[:, 0]
    clean_ids, corrupted_ids = (torch.tensor(rows) for rows in (prompts[0].clean_rows, prompts[0].corrupted_rows))
    address = model.hook_points()[0].address
    difference = record_z(model, clean_ids).z[address] - record_z(model, corrupted_ids).z[address]
    difference[:, [0, 2, 3]] = 0
    values = []
    for dropped in (None, 1, 2):
        amount = torch.zeros((), dtype=torch.float64, requires_grad=True)
        with ExitStack() as stack:
            if dropped is not None:
                block: Any = model.blocks[dropped]
                for module in (block.attention, block.mlp):
                    detach = module.register_forward_hook(lambda module, args, output: output.detach())
                    stack.callback(detach.remove)
            stack.enter_context(model.hook_points()[0].replaced(lambda z: z + amount * difference))  # noqa: B023
            log_probs = model(clean_ids)[0, prompts[0].num_tokens - 1].log_softmax(-1)
            metric = log_probs[prompts[0].answers[0][0]] - log_probs[prompts[0].answers[1][0]]
        values.append(float(torch.autograd.grad(metric, amount)[0]))
    expected = np.sign(values[0]) * (abs(values[1]) + abs(values[2])) / 2
    assert effects[nodes.index(["0.1"])[0]] == pytest.approx(expected, rel=1e-9)


# Models whose circuit is known.

GOLD = {"embedding", "0.0", "1.0"}


@pytest.fixture(scope="module")
def induction_result() -> CircuitResult:
    return hw.find_circuit(decoder(), word_pairs(32, words=FILLERS[1::2]), random_sets=99, edges=3)


def test_hand_built_induction_circuit_is_found(induction_result: CircuitResult) -> None:
    result = induction_result
    assert set(result.circuit.nodes) == GOLD  # precision and recall 1
    effect = result.circuit.effect()
    assert effect.faithfulness.value == pytest.approx(1, abs=0.02)
    assert effect.completeness.value == pytest.approx(0, abs=0.02)
    assert all(item.drop.value == pytest.approx(1, abs=0.02) for item in result.circuit.drops)
    shares = {item.node: item.stability for item in result.scores}
    assert all(shares[node] == pytest.approx(1) for node in GOLD)
    others = [item.score for item in result.scores if item.node not in GOLD]
    assert max(map(abs, others)) < 0.05 * min(item.score for item in result.scores if item.node in GOLD)
    assert result.accuracy == 1


def test_edges_of_the_hand_built_induction_circuit_are_found(induction_result: CircuitResult) -> None:
    """The values of 0.0 are the previous words, its output changes the keys of 1.0, and 1.0 writes the answer."""
    large = {(edge.sender, edge.receiver) for edge in induction_result.edges if abs(edge.effect.value) > 0.05}
    assert large == {("embedding", "0.0.v"), ("0.0", "1.0.k"), ("1.0", "logits")}  # precision and recall 1
    assert len(induction_result.edges) == 7 + 4 + 1  # q, k and v of later heads, and the logits
    first = induction_result.edges[0]
    assert first.effect.low > 0
    assert first.example in {example.clean for example in induction_result.examples}
    assert first.example_effect >= first.effect.value
    score = induction_result.scores[0]
    assert score.example_effect >= score.score > 0


def test_random_sets_and_alternative_of_the_hand_built_circuit_fail(induction_result: CircuitResult) -> None:
    result = induction_result
    test = result.circuit.random_sets
    assert test is not None
    # A set of one head of six per layer is the circuit itself in 1 of 36 draws.
    reached = sum(value > 0.5 for value in test.faithfulness)
    assert test.p_value == pytest.approx((1 + reached) / 100)
    assert reached <= 10
    assert result.alternative is not None
    assert not {"0.0", "1.0"} & set(result.alternative.nodes)
    assert result.alternative.effect().faithfulness.value < 0.1
    assert any("alternative" in note for note in result.notes)


def test_attribution_misses_saturated_attention_and_says_so() -> None:
    result = hw.find_circuit(
        decoder(), word_pairs(32, words=FILLERS[1::2]), size=3, random_sets=0, ranking="attribution", alternative=False
    )
    assert result.check is not None
    assert result.check.worst_exact > 10 * abs(result.check.worst_score)
    assert result.check.worst_node in GOLD


@pytest.mark.slow
def test_learned_gates_find_the_hand_built_circuit() -> None:
    result = hw.find_circuit(
        decoder(), word_pairs(32, words=FILLERS[1::2]), size=3, random_sets=0, ranking="gates", alternative=False
    )
    assert set(result.circuit.nodes) == GOLD
    assert result.circuit.effect().faithfulness.value == pytest.approx(1, abs=0.02)
    assert np.isnan(result.scores[0].stability)


def p_value_of_random_model(seed: int) -> float:
    torch.manual_seed(seed)
    model = hw.Transformer(replace(hw.preset("nano"), vocab=len(WORDS) + 1, layers=3)).eval()
    model.tokenizer = TOKENIZER
    result = hw.find_circuit(
        model, word_pairs(24, seed=seed), size=8, random_sets=39, min_accuracy=0, alternative=False, seed=seed
    )
    assert result.circuit.random_sets is not None
    return result.circuit.random_sets.adjusted_p


@pytest.mark.parametrize(("seeds", "limit"), [(3, 1), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_random_models_rarely_have_circuits_better_than_random_sets(seeds: int, limit: int) -> None:
    """A p-value is at most 0.05 in one of 20 models. More than `limit` are expected in less than one of 100 tests."""
    p_values = [p_value_of_random_model(seed) for seed in range(seeds)]
    assert sum(p <= 0.05 for p in p_values) <= limit


# Statistics.


def test_faithfulness_is_a_ratio_of_means_with_an_interval_over_templates() -> None:
    templates = ["a", "a", "b", "b"]
    sampler = TemplateBootstrapSampler(templates, 0)
    sums = FaithfulnessSums(np.array([4.0, 4, 4, 4]), np.zeros(4), sampler)
    estimate = sums.estimate(np.array([4.0, 4, 0, 0]))
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.0, 1.0)  # two templates: 0, 1/2 or 1
    assert sums.difference(np.array([4.0, 4, 0, 0]), np.array([2.0, 2, -2, -2])).low == 0.5
    single = FaithfulnessSums(np.ones(2), np.zeros(2), TemplateBootstrapSampler(["a", "a"], 0)).estimate(np.ones(2))
    assert np.isnan(single.low)


def test_mib_areas_of_known_curves() -> None:
    fractions = np.array([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    cpr, cmd, log_cpr, log_cmd = mib_areas(fractions)  # F equal to the fraction: ∫ x dx from 0.001 to 1
    assert cpr == pytest.approx((1 - 0.001**2) / 2)
    assert cmd == pytest.approx(0.999 - cpr)
    assert log_cmd == pytest.approx(1 - log_cpr)
    assert mib_areas(np.full(10, 1.5))[1] == pytest.approx(0.4995)  # CMD counts F above 1 as a distance


def test_choose_size_takes_the_smallest_size_that_reaches_the_target() -> None:
    assert choose_size([1, 2, 3, 4], [0.1, 0.9, 0.3, 1.0], 0.85) == (2, True)
    assert choose_size([1, 2, 3], [0.1, 0.5, 0.3], 0.85) == (2, False)


def test_random_sets_match_kind_and_layer() -> None:
    nodes = ModelNodes.of(small_model())
    members = nodes.index(["embedding", "0.1", "0.2", "1.kv0", "mlp.2"])
    rows = random_sets(nodes, members, 50, np.random.default_rng(0), excluded=nodes.index(["0.3"]))

    def profile(indices: list[int]) -> list[tuple[int, str]]:
        return sorted((nodes.layers[i], nodes.kinds[i]) for i in indices)

    assert all(profile(np.flatnonzero(row).tolist()) == profile(members) for row in rows)
    assert not rows[:, nodes.index(["0.3"])].any()
    assert len({row.tobytes() for row in rows}) > 1


def test_stability_is_the_share_of_template_resamples() -> None:
    effects = np.array([[5.0, 5.0], [3.0, 0.0], [0.0, 2.0]])  # node 1 wins if its template is drawn at least once
    shares = stability_shares(effects, ["a", "b"], 2, 0)
    assert shares[0] == pytest.approx(1)
    assert shares[1] == pytest.approx(0.75, abs=0.1)
    assert shares.sum() == pytest.approx(2)


def test_splits_share_no_template() -> None:
    pairs = word_pairs(40, templates=10)
    splits = split_three_ways_by_template(pairs, 3)
    templates = [{pairs[i].template for i in split} for split in splits]
    assert [len(names) for names in templates] == [2, 2, 6]
    assert len(set.union(*templates)) == 10
    assert sorted(i for split in splits for i in split) == list(range(40))


# Results, resuming, tasks and errors.


def test_result_survives_json_and_csv(induction_result: CircuitResult, tmp_path: Path) -> None:
    induction_result.to_json(tmp_path / "a.json")
    loaded = CircuitResult.from_json(tmp_path / "a.json")
    assert loaded.to_dict() == induction_result.to_dict()
    assert repr(loaded) == repr(induction_result)
    assert "faithfulness" in repr(loaded)
    rows = list(csv.DictReader(StringIO(induction_result.to_csv())))
    assert {row["node"] for row in rows if row["in_circuit"] == "True"} == GOLD
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(HeadwiseError, match="not a result of headwise circuit"):
        CircuitResult.from_json(tmp_path / "b.json")


def test_interrupted_search_resumes_with_equal_result(tmp_path: Path) -> None:
    model, pairs, path = small_model(), word_pairs(16), tmp_path / "steps.jsonl"
    options = {"size": 5, "random_sets": 9, "min_accuracy": 0.0}
    expected = hw.find_circuit(model, pairs, **options)

    def stop(label: str, done: int, total: int | None) -> None:
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.find_circuit(model, pairs, **options, out=path, progress=stop)
    stored = len(path.read_text().splitlines())
    result = hw.find_circuit(model, pairs, **options, out=path)
    assert result.to_dict() == expected.to_dict()
    assert 1 < stored < len(path.read_text().splitlines())
    with_edges = hw.find_circuit(model, pairs, **options, edges=2, out=path)  # added to the finished run
    assert with_edges.circuit == result.circuit
    assert with_edges.edges
    with pytest.raises(HeadwiseError, match="other model, texts or settings"):
        hw.find_circuit(model, pairs, size=6, random_sets=9, min_accuracy=0.0, out=path)


@pytest.mark.parametrize("ranking", ["exact", "attribution"])
def test_progress_ends_at_its_total(ranking: str) -> None:
    calls: list[tuple[int, int | None]] = []
    hw.find_circuit(
        small_model(), word_pairs(16), size=5, random_sets=19, min_accuracy=0.0, alternative=False, edges=2,
        ranking=ranking, progress=lambda label, done, total: calls.append((done, total)),
    )  # fmt: skip
    done, total = calls[-1]
    assert total is not None
    assert done <= total <= done + 2


def test_metric_and_resampling_partners_of_the_user() -> None:
    model = small_model()
    token = TOKENIZER.encode(WORDS[0])[0]
    prompts = [replace(pair, corrupted="", right=(), wrong=()) for pair in word_pairs(24, templates=4)]
    task = hw.CircuitTask("logit", prompts, metric=lambda logits, pairs: logits[:, token])
    result = hw.find_circuit(model, task, size=4, random_sets=9, alternative=False)
    assert result.accuracy is None
    example = result.examples[0]
    assert example.corrupted in {pair.clean for pair in prompts}
    ids = torch.tensor([TOKENIZER.encode(example.clean)])
    assert example.clean_metric == pytest.approx(float(model(ids)[0, -1, token].detach()), abs=1e-10)


@pytest.mark.parametrize("name", SHIPPED_TASKS)
def test_shipped_task_makes_pairs_of_equal_length(name: str) -> None:
    encoder = PromptEncoder(byte_tokenizer())  # answers of several tokens
    task = make_shipped_task(name, 20, encoder, 0)
    assert len({prompt.template for prompt in task.prompts}) >= 4
    for prompt in task.prompts:
        assert len(encoder.ids(prompt.clean)) == len(encoder.ids(prompt.corrupted))
        assert prompt.clean != prompt.corrupted
        assert not set(prompt.right) & set(prompt.wrong)
    again = make_shipped_task(name, 20, encoder, 0)
    assert again.prompts == task.prompts


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("inductoin", {}, "unknown task"),
        ("missing.jsonl", {}, "missing.jsonl"),
        ([], {}, "has no prompts"),
        ([{"clean": "apple"}], {}, "needs right and wrong answers"),
        ([{"clean": "apple", "right": " river", "wrong": " stone", "tmplate": "a"}], {}, "unknown field 'tmplate'"),
        (word_pairs(8, templates=3), {}, "has 3 templates"),
        (word_pairs(8), {"size": 99}, "size: must be from 1 to 22"),
        (word_pairs(8), {"ranking": "exat"}, "ranking='exat': unknown"),
        (word_pairs(8), {"min_accuracy": 1.0}, "prefers the right answer on"),
        (word_pairs(8), {"edges": -1}, "edges: must be 0 or more"),
        (word_pairs(8), {"num_prompts": 0}, "num_prompts: must be at least 1"),
    ],
)
def test_errors_say_what_to_do(task: object, options: dict, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        hw.find_circuit(small_model(), task, **options)  # pyright: ignore[reportArgumentType]


def test_pair_with_different_numbers_of_tokens_is_an_error() -> None:
    pairs = [replace(pair, corrupted=pair.corrupted + " apple") for pair in word_pairs(8)]
    with pytest.raises(HeadwiseError, match="must have the same number of tokens"):
        hw.find_circuit(small_model(), pairs)


def test_task_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(vars(pair)) for pair in word_pairs(16)))
    result = hw.find_circuit(small_model(), path, size=3, random_sets=0, min_accuracy=0, alternative=False)
    assert (result.settings.task, sum(result.settings.prompts)) == ("mine", 16)
