"""Streaming KV heads: cache plans, ranking methods compared with explicit computations, and pass keys."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.compression import PruneRequest, StreamingRequest
from headwise.compression.passkey_test import KEY_DIGITS, PasskeyCase, PasskeyResults, make_passkey_cases, run_passkeys
from headwise.compression.plan_report import ModelSizeAndFlops, apply_random_compression, report
from headwise.compression.streaming_selection import STREAM_RANKERS
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.simulated_streaming_forward import streaming
from headwise.spec import CachePolicy, Plan
from headwise.text.build_tokenizers import character_tokenizer
from headwise.text.tokenizer import Tokenizer
from tests.analysis.models import character_model
from tests.contract.layers import MODELS, assert_equal, make_model, token_ids

LONG = ["the cat sat there " * 3, "a mat at the cat " * 3]
SMALL_POLICY = CachePolicy(sink_tokens=1, window=3)
SMALL_WINDOW: Any = {"sink_tokens": 1, "window": 3}


def make_reader(name: str = "decoder, rotary") -> Transformer:
    return character_model(MODELS[name], layers=3)


# Plans.


def test_plan_cache_policies_save_load_apply(tmp_path: Path) -> None:
    model, ids = make_reader().float(), token_ids(2, 16)
    plan = hw.plan_pruning(model, cache={"0.*": SMALL_POLICY, "2.1": 8})
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    changed = hw.apply(loaded, model)
    assert changed.spec == model.spec.with_cache({"0.*": SMALL_POLICY, "2.1": 8})
    assert model.spec.cache == ()
    reloaded = hw.load(changed.save(tmp_path / "m"))
    assert reloaded.spec == changed.spec
    assert torch.equal(reloaded(ids), changed(ids))
    by_plan, by_spec = model.cache(plan), changed.cache()
    with torch.no_grad():
        for piece in ids.split([9, 1, 6], 1):
            assert torch.equal(model(piece, cache=by_plan), changed(piece, cache=by_spec))
    assert by_plan.nbytes == by_spec.nbytes
    assert str(plan).splitlines() == [
        "3 of 6 KV heads cache less, named by hand.", "  streaming 1 + 3: 0.0 0.1", "  8 bits: 2.1",
    ]  # fmt: skip


def test_plan_prunes_heads_and_streams_kv_heads() -> None:
    model, ids = make_reader(), token_ids(2, 16)
    plan = hw.plan_pruning(
        model, PruneRequest(heads="0.0,0.1,1.3", fold_mean=False), cache={"0.*": SMALL_POLICY, "1.0": 8}
    )
    small = hw.apply(plan, model)
    assert [(rule.heads, rule.policy) for rule in small.spec.cache] == [
        (("0.1",), SMALL_POLICY),
        (("1.0",), CachePolicy(bits=8)),
    ]
    with (
        torch.no_grad(),
        model.heads["0.0,0.1,1.3"].silenced(),
        streaming(model, model.spec.cached_kv_head_addresses[1:2], SMALL_POLICY),
        streaming(model, model.spec.cached_kv_head_addresses[2:3], CachePolicy(bits=8)),
    ):
        assert_equal(small(ids), model(ids), 1e-9)
    with pytest.raises(HeadwiseError, match=r"Use hw\.apply\(plan, model\)\.cache\(\)"):
        model.cache(plan)
    assert "3 of 12 heads are pruned" in str(plan)
    assert "3 of 6 KV heads cache less" in str(plan)


def test_plan_second_cache_plan_keeps_first() -> None:
    model = make_reader()
    once = hw.apply(hw.plan_pruning(model, cache={"0.0": 8}), model)
    twice = hw.apply(hw.plan_pruning(once, cache={"1.0": 4}), once)
    assert [rule.heads for rule in twice.spec.cache] == [("0.0",), ("1.0",)]
    assert (
        hw.apply(hw.plan_pruning(once, PruneRequest(heads="2.0", fold_mean=False)), once).spec.cache == once.spec.cache
    )


def test_plan_cache_invalid_arguments_raise() -> None:
    model = make_reader()
    plan = hw.plan_pruning(model, cache={"0.0": SMALL_POLICY})
    for other, message in (
        (make_model(replace(model.spec, layers=2)), "made for another model"),
        (make_model(model.spec, seed=5), "other weights"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            hw.apply(plan, other)
        with pytest.raises(HeadwiseError, match=message):
            other.cache(plan)
    with pytest.raises(HeadwiseError, match="kind=3"):
        model.cache(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="which heads to prune"):
        hw.plan_pruning(model)
    with pytest.raises(HeadwiseError, match="no KV cache, because an encoder"):
        hw.plan_pruning(character_model(MODELS["encoder"]), cache={"0.0": SMALL_POLICY})
    with pytest.raises(HeadwiseError, match="bits=3"):
        hw.plan_pruning(model, cache={"0.0": 3})
    text = json.loads(plan.to_json())
    for damaged, message in (
        ({"cache": [{"heads": ["7.7"], "policy": {"bits": 8}}]}, "no such head"),
        ({"cache": [{"heads": ["0.0"], "policy": {"bits": 5}}]}, "bits=5"),
        ({"cache_scores": [1.0]}, "1 scores for 6 heads"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            Plan.from_json(json.dumps(text | damaged))


# Ranking methods.


@pytest.mark.parametrize("ranking", [name for name in STREAM_RANKERS if name != "pattern"])
@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, cut"])
def test_plan_streaming_every_ranking_selects_fraction(ranking: str, name: str) -> None:
    model = make_reader(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = hw.plan_streaming(
        model, StreamingRequest(0.5, **SMALL_WINDOW, ranking=ranking, corpus=LONG, max_length=30, gate_steps=3)
    )
    heads = model.spec.cached_kv_head_addresses
    assert sum(len(rule.heads) for rule in plan.cache) == round(0.5 * len(heads))
    assert [rule.policy for rule in plan.cache] == [SMALL_POLICY]
    assert len(plan.cache_scores) == len(heads)
    scores = dict(zip(map(str, heads), plan.cache_scores, strict=True))
    assert max(scores[head] for head in plan.cache[0].heads) <= min(
        score for head, score in scores.items() if head not in plan.cache[0].heads
    )
    assert plan == Plan.from_json(plan.to_json())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.spec.cache == ()
    assert all(layer.spec.cache == () for layer in model.attention_layers())


@torch.no_grad()
def test_plan_streaming_attention_equals_attention_outside_window() -> None:
    """Over all rows after the first eviction, from full attention maps."""
    model, text = make_reader(), LONG[0]
    plan = hw.plan_streaming(model, StreamingRequest(0.5, **SMALL_WINDOW, ranking="attention", corpus=[text]))
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(text)])
    expected, maps = list[Tensor](), list[Tensor]()
    with ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(lambda call: maps.append(call.maps()[0])))  # (H, T, T)
        model(ids)
    for layer in maps:
        rows = [layer[:, i, 1 : i - 2].sum(-1) for i in range(4, ids.shape[1])]
        mass = torch.stack(rows).mean(0)  # (H,)
        expected += [mass[:2].max(), mass[2:].max()]  # maximum over the query heads of a KV head
    assert plan.cache_scores == pytest.approx(torch.stack(expected).tolist(), abs=1e-6)


@torch.no_grad()
def test_plan_streaming_output_equals_output_change() -> None:
    """Layer by layer on the residual stream of the full model, with layers of models in which one KV head streams."""
    model, text = make_reader(), LONG[0]
    plan = hw.plan_streaming(model, StreamingRequest(0.5, **SMALL_WINDOW, ranking="output", corpus=[text]))
    assert model.tokenizer is not None
    x, context = model.begin_forward(torch.tensor([model.tokenizer.encode(text)]))
    streams = []
    for block in model.blocks:
        streams.append(x)
        x = block(x, context)
    for head, score in zip(model.spec.cached_kv_head_addresses, plan.cache_scores, strict=True):
        x, other = streams[head.layer], hw.apply(hw.plan_pruning(model, cache={str(head): SMALL_POLICY}), model)
        block_full, block_streaming = (candidate.blocks[head.layer] for candidate in (model, other))
        full_output = block_full.attend(block_full.attention_input(x), context)  # pyright: ignore
        streaming_output = block_streaming.attend(block_streaming.attention_input(x), context)  # pyright: ignore
        output_change = full_output - streaming_output
        relative_change = output_change.square().sum(-1) / x.square().sum(-1)  # (1, T)
        assert score == pytest.approx(relative_change[0, 4:].mean().item(), abs=1e-6)


@torch.no_grad()
def test_plan_streaming_second_round_ranks_with_first_streaming() -> None:
    """Scores of the second round equal those of models in which the heads of the first round and one more stream."""
    model, text = make_reader(), LONG[0]
    once, twice = (
        hw.plan_streaming(
            model, StreamingRequest(fraction, **SMALL_WINDOW, ranking="output", corpus=[text], rounds=rounds)
        )
        for fraction, rounds in ((0.5, 1), (1.0, 2))
    )
    first_heads = once.cache[0].heads  # the first of two rounds selects half of the streaming heads
    scores = dict(zip(map(str, model.spec.cached_kv_head_addresses), twice.cache_scores, strict=True))
    first = dict(zip(map(str, model.spec.cached_kv_head_addresses), once.cache_scores, strict=True))
    assert {head: scores[head] for head in first_heads} == {head: first[head] for head in first_heads}
    assert max(scores[head] for head in first_heads) < min(scores[head] for head in scores if head not in first_heads)
    assert model.tokenizer is not None
    base = hw.apply(hw.plan_pruning(model, cache={",".join(first_heads): SMALL_POLICY}), model)
    x, context = base.begin_forward(torch.tensor([model.tokenizer.encode(text)]))
    streams = []
    for block in base.blocks:
        streams.append(x)
        x = block(x, context)
    for head in (head for head in model.spec.cached_kv_head_addresses if str(head) not in first_heads):
        x, other = (
            streams[head.layer],
            hw.apply(hw.plan_pruning(model, cache={",".join((*first_heads, str(head))): SMALL_POLICY}), model),
        )
        block_base, block_streaming = (candidate.blocks[head.layer] for candidate in (base, other))
        base_output = block_base.attend(block_base.attention_input(x), context)  # pyright: ignore
        streaming_output = block_streaming.attend(block_streaming.attention_input(x), context)  # pyright: ignore
        output_change = base_output - streaming_output
        fraction = (output_change.square().sum(-1) / x.square().sum(-1))[0, 4:].mean().item()
        assert scores[str(head)] == pytest.approx(max(fraction, max(first[head] for head in first_heads)), abs=1e-6)


@torch.no_grad()
def test_plan_streaming_protected_retrieval_heads_stay_full() -> None:
    """The best heads by role keep their full cache, although they have the lowest scores by output change."""
    model, text = make_reader(), "to be or not to be that is the question " * 4
    roles = hw.plan_streaming(model, StreamingRequest(0.0, **SMALL_WINDOW, ranking="role"))
    heads = model.spec.cached_kv_head_addresses
    best = sorted(heads, key=lambda head: roles.cache_scores[heads.index(head)], reverse=True)[: len(heads) // 2]
    unprotected = {str(head) for head in heads if head not in best}
    plan = hw.plan_streaming(
        model, StreamingRequest(0.5, **SMALL_WINDOW, ranking="output", corpus=[text], rounds=2, protected_fraction=0.5)
    )
    assert {head for rule in plan.cache for head in rule.heads} == unprotected
    unprotected_plan = hw.plan_streaming(model, StreamingRequest(1.0, **SMALL_WINDOW, ranking="output", corpus=[text]))
    assert {head for rule in unprotected_plan.cache for head in rule.heads} == {str(head) for head in heads}


def test_plan_streaming_loss_equals_loss_increase() -> None:
    """From applied plans of one head each. Nothing can differ before the fifth token."""
    model, text = make_reader(), LONG[0]
    plan = hw.plan_streaming(model, StreamingRequest(0.5, **SMALL_WINDOW, ranking="loss", corpus=[text]))
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(text)])

    def token_nll(candidate: Transformer) -> Tensor:
        return torch.nn.functional.cross_entropy(candidate(ids)[0, :-1], ids[0, 1:], reduction="none")

    for head, score in zip(model.spec.cached_kv_head_addresses, plan.cache_scores, strict=True):
        increase = token_nll(hw.apply(hw.plan_pruning(model, cache={str(head): SMALL_POLICY}), model)) - token_nll(
            model
        )
        assert torch.equal(increase[:4], torch.zeros(4, dtype=torch.float64))
        assert score == pytest.approx(increase[4:].mean().item(), abs=1e-6)


def test_plan_streaming_long_range_head_stays_full() -> None:
    """Heads ignore content and attend to near tokens by the ALiBi slopes alone: 1/4, 1/16, 1/64 and 1/256."""
    model = character_model(MODELS["decoder, parallel"], layers=1)
    with torch.no_grad():
        for head in model.heads:
            assert head.b_Q is not None
            head.W_Q.zero_()
            head.b_Q.zero_()
    plan = hw.plan_streaming(model, StreamingRequest(0.75, sink_tokens=0, window=8, ranking="attention", corpus=LONG))
    assert plan.cache[0].heads == ("0.0", "0.1", "0.2")


def test_plan_streaming_invalid_arguments_raise() -> None:
    model = make_reader()
    for options, message in (
        ({"ranking": "luck"}, "unknown method. Got 'luck'"),
        ({"corpus": None}, r"needs texts"),
        ({"fraction": 1.5}, "from 0 to 1. Got 1.5"),
        ({"max_length": 4}, "no token is evicted. Increase max_length"),
        ({"corpus": ["at"]}, "no text is longer than the 4 tokens"),
        ({"ranking": "gates", "gate_steps": 0}, "gate_steps: must be at least 1. Got 0"),
        ({"rounds": 0}, "rounds: must be an integer of at least 1. Got 0"),
        ({"protected_fraction": 0.75}, "the fraction of KV heads that never"),
        ({"ranking": "role", "rounds": 2}, r"Use rounds=1, or ranking=attention \| output \| loss"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            hw.plan_streaming(model, StreamingRequest(**{"corpus": LONG, **SMALL_WINDOW} | options))  # pyright: ignore
    with pytest.raises(HeadwiseError, match="a reduced cache already"):
        hw.plan_streaming(
            hw.apply(hw.plan_pruning(model, cache={"0.0": 8}), model), StreamingRequest(corpus=LONG, **SMALL_WINDOW)
        )
    with pytest.raises(HeadwiseError, match="only in decoders"):
        hw.plan_streaming(character_model(MODELS["encoder"]), StreamingRequest(corpus=LONG, **SMALL_WINDOW))


# Reports.


def test_report_streaming_compared_with_random_plans() -> None:
    model = make_reader()
    changed = hw.apply(
        hw.plan_pruning(model, PruneRequest(heads="2.3", fold_mean=False), cache={"0.*,1.0": SMALL_POLICY, "2.0": 8}),
        model,
    )
    result = report(model, changed, LONG, seeds=2, max_length=30, repeats=1, length=20)
    assert len(result.random) == 2
    assert result.increase_over_random is not None
    random_specs = [apply_random_compression(model, changed.spec, None, seed).spec for seed in range(6)]
    assert all(sorted(len(rule.heads) for rule in spec.cache) == [1, 3] for spec in random_specs)
    assert all(len(spec.head_addresses) == 11 for spec in random_specs)
    assert len({spec.cache for spec in random_specs}) > 2
    # 20 tokens of 6 + 6 numbers of 8 bytes; streaming KV heads cache 4 tokens; 2 · (6 + 4) bytes per token at 8 bits
    assert result.before.cache_bytes_per_token == 6 * 12 * 8
    assert result.after.cache_bytes_per_token == round((3 * 4 * 96 + 20 * 20 + 2 * 20 * 96) / 20)


def test_footprint_streaming_heads_cache_bytes() -> None:
    spec = hw.preset("smollm2-135m")
    half = spec.with_cache(
        {str(head): CachePolicy(sink_tokens=4, window=128) for head in spec.cached_kv_head_addresses[::2]}
    )
    assert ModelSizeAndFlops.of(half, 4096).cache_bytes_per_token == round(45 * 512 * (4096 + 132) / 4096)


# Pass keys.


def test_make_cases_have_length_and_hidden_key() -> None:
    model = make_reader()
    model.tokenizer = tokenizer = _letter_tokenizer()
    cases = make_passkey_cases(model, ["some long text " * 60], 300, count=4, seed=1)
    assert [len(case.ids) for case in cases] == [300] * 4
    assert [case.depth for case in cases] == [0.125, 0.375, 0.625, 0.875]
    for case in cases:
        text = tokenizer.decode(list(case.ids))
        assert text.count(case.key) == 2
        assert len(case.key) == KEY_DIGITS
        assert text.endswith("What is the pass key? The pass key is")
        assert abs(text.index("The pass key is") / (300 - 115) - case.depth) < 0.1
    with pytest.raises(HeadwiseError, match="a text of 10 tokens"):
        make_passkey_cases(model, ["some words"], 300)


def test_run_passkeys_generated_key_counts_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_reader()
    model.tokenizer = tokenizer = _letter_tokenizer()
    cases = make_passkey_cases(model, ["some long text " * 60], 200, count=3)
    answers = iter([f" {cases[0].key}.", "12", f" {cases[2].key}"])

    def generate(self: Transformer, prompt: Tensor, max_new_tokens: int, cache: object) -> Tensor:
        answer_ids = torch.tensor([tokenizer.encode(next(answers))])
        return torch.cat((prompt, answer_ids), 1)

    monkeypatch.setattr(Transformer, "generate", generate)
    results = run_passkeys(model, cases)
    assert results.correct == (True, False, True)
    assert str(results) == "2 of 3 pass keys found"
    full_results = PasskeyResults(cases, (True, True, False))
    assert results.count_retained(full_results) == (1, 2)
    with pytest.raises(HeadwiseError, match="the same cases"):
        results.count_retained(PasskeyResults((PasskeyCase((1,), "1", 0.5),), (True,)))


def _letter_tokenizer() -> Tokenizer:
    return character_tokenizer("some long text The pass key is Remember it. What is the ?0123456789\n")
