"""The fast ablation sweep over heads, compared with a full forward pass per head on one text at a time; and its cost
estimate."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from headwise.analysis.ablation.ablate import ablated, make_replacement_fn, mean_of_outputs, record_z
from headwise.analysis.ablation.ablation_sweep import ablation_sweep, sweep_cost
from headwise.analysis.ablation.eval_targets import TargetBatch, make_target_batch
from headwise.analysis.ablation.importance import importance
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.model.block import Block
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.spec import ModelSpec
from tests.analysis.models import TEXTS, character_model, encode_texts, text_loss
from tests.contract.layers import MODELS, assert_equal, make_model, token_ids

DECODERS = [name for name in MODELS if name.startswith("decoder")]
ENCODER = MODELS["encoder"]
HEADLESS = replace(ENCODER, output="none", norm_placement="pre")


# Running the blocks by hand equals forward.


@pytest.mark.parametrize("name", [name for name in MODELS if name != "encoder-decoder"])
def test_block_parts_equal_forward_pass(name: str) -> None:
    model, ids, attention_mask = make_model(MODELS[name]), token_ids(2, 7), torch.ones(2, 7, dtype=torch.bool)
    attention_mask[1, 4:] = False
    x, context = model.begin_forward(ids, attention_mask=attention_mask)
    rows = torch.tensor([1, 3])
    for block in model.blocks:
        assert isinstance(block, Block)
        attention_input = block.attention_input(x)
        attention_output = block.attend(attention_input, context)
        subset = block.finish(x[:, rows], attention_input[:, rows], attention_output[:, rows], context)
        x = block.finish(x, attention_input, attention_output, context)
        assert_equal(subset, x[:, rows])
    x = x if model.norm is None else model.norm(x)
    assert torch.equal(x, model(ids, attention_mask=attention_mask, hidden=True))


# The fast sweep equals the naive loop.


@pytest.mark.parametrize("metric", ["loss", "last"])
@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
@pytest.mark.parametrize("name", DECODERS)
def test_ablation_sweep_decoder_equals_naive_loop(name: str, method: Any, metric: Any) -> None:
    model = character_model(MODELS[name])
    texts, last = encode_texts(model), metric == "last"
    inputs = [ids[:, :-1] for ids in texts]  # inputs: the last token is only a target
    means = mean_of_outputs(record_z(model, ids) for ids in inputs)
    tokens = len(texts) if last else sum(ids.shape[1] for ids in inputs)
    result = importance(model, TEXTS, ablation=method, metric=metric, batch_tokens=120)
    with torch.no_grad():
        clean = [text_loss(model, ids, last) for ids in texts]
        for head in model.heads:
            lost = 0.0
            for index, ids in enumerate(texts):
                other = record_z(model, inputs[(index + 1) % len(texts)])
                with ablated(model, head.address, method, means=means, other=other):
                    lost += float(text_loss(model, ids, last) - clean[index])
            assert result[head.address].importance == pytest.approx(lost / tokens, abs=1e-9)
    assert result.clean_loss == pytest.approx(float(sum(clean)) / tokens, abs=1e-9)
    assert result.addresses == model.spec.head_addresses
    assert result.texts == len(texts)


@pytest.mark.parametrize("method", ["zero", "resample"])
def test_ablation_sweep_masked_encoder_equals_naive_loop(method: Any) -> None:
    model = character_model(ENCODER)
    samples = list(TokenizedCorpus.of(model, TEXTS, 64))
    batches = [make_target_batch(model, make_batch([sample])) for sample in samples]  # each text alone: no padding
    result = importance(model, TEXTS, ablation=method, batch_tokens=100)
    for head in model.heads:
        lost, num_targets = 0.0, 0
        for index, batch in enumerate(batches):
            assert batch.targets is not None
            where = batch.targets[0] != IGNORE_INDEX
            assert bool((batch.ids[0, where] == model.tokenizer.mask).all())  # pyright: ignore
            other = record_z(model, batches[(index + 1) % len(batches)].ids)
            losses = []
            for context in (ablated(model, head.address, method, other=other), torch.no_grad()):
                with torch.no_grad(), context:
                    losses.append(F.cross_entropy(model(batch.ids)[0, where], batch.targets[0, where], reduction="sum"))
            lost, num_targets = lost + float(losses[0] - losses[1]), num_targets + int(where.sum())
        assert result[head.address].importance == pytest.approx(lost / num_targets, abs=1e-9)


@pytest.mark.parametrize("spec", [HEADLESS, replace(MODELS["decoder"], output="none")], ids=["encoder", "decoder"])
def test_ablation_sweep_without_lm_head_uses_mean_state(spec: ModelSpec) -> None:
    model = character_model(spec)
    result = importance(model, TEXTS, ablation="zero", batch_tokens=100)
    with torch.no_grad():
        for head in model.heads:
            moved = []
            for ids in encode_texts(model):
                clean = model(ids).mean(1)
                with head.silenced():
                    moved.append(1 - F.cosine_similarity(model(ids).mean(1), clean))
            assert result[head.address].importance == pytest.approx(float(torch.cat(moved).mean()), abs=1e-9)


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "encoder"])
def test_ablation_sweep_float32_with_padding_equals_single_texts(name: str) -> None:
    model = make_model(MODELS[name]).float()
    ids, attention_mask = token_ids(3, 11), torch.ones(3, 11, dtype=torch.bool)
    attention_mask[0, :4], attention_mask[2, 6:] = False, False
    targets = torch.full_like(ids, IGNORE_INDEX)
    targets[attention_mask] = token_ids(1, int(attention_mask.sum()), seed=5)[0]
    heads = model.spec.head_addresses
    lost, _ = ablation_sweep(
        model,
        TargetBatch(ids, attention_mask, targets, attention_mask),
        heads,
        lambda s, c: make_replacement_fn(s, c, "zero"),
        batch_tokens=80,
    )
    with torch.no_grad():
        for row in range(3):
            alone, labels = ids[row : row + 1, attention_mask[row]], targets[row, attention_mask[row]]
            clean = F.cross_entropy(model(alone)[0], labels, reduction="sum")
            for head_index, head in enumerate(model.heads):
                with head.silenced():
                    want = F.cross_entropy(model(alone)[0], labels, reduction="sum") - clean
                assert float(lost[head_index, row]) == pytest.approx(
                    float(want), abs=1e-4, rel=1e-5
                )  # sums over 11 tokens


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut", "decoder, parallel"])
def test_sweep_cost_equals_counted_flops(name: str, rows: int | None) -> None:
    spec = replace(MODELS[name], layers=3, tied=False)
    model = make_model(spec, backend="batched")
    T = 13
    ids = token_ids(1, T)
    targets = ids.clone()
    if rows is not None:
        targets[:, :-1] = IGNORE_INDEX
    batch = TargetBatch(ids, torch.ones(1, T).bool(), targets, None)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ablation_sweep(model, batch, spec.head_addresses, lambda s, c: make_replacement_fn(s, c, "zero"))
    cost = sweep_cost(spec, T, rows)
    assert counter.get_total_flops() == cost.sweep_flops
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.output(model(ids, hidden=True)[:, -(rows or T) :])  # pyright: ignore
    assert counter.get_total_flops() * len(spec.head_addresses) == cost.naive_flops
    assert cost.ratio < 1
