"""Scores shared out among pairs of parts: they add up, a built circuit is named, and what is no sum is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.score_attribution import why
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, preset
from tests.analysis.constructed_heads import FILLERS, decoder
from tests.attached.models import BY_NAME
from tests.contract.layers import MODELS, fill, token_ids

DECODERS = [
    name for name, spec in MODELS.items() if spec.kind == "decoder" and spec.form != "post" and spec.output == "lm"
]


def filled(name: str) -> Transformer:
    model = Transformer(MODELS[name]).double().eval()
    fill(model)
    return model


@pytest.mark.parametrize("name", DECODERS)
def test_pairs_add_up_to_the_score_that_the_model_computed(name: str) -> None:
    model, T = filled(name), 7
    ids = token_ids(1, T)
    for address in (model.spec.addresses[0], model.spec.addresses[-1]):
        with hw.record(model, address) as recording:
            model(ids)
        call = recording[address].only
        weights = call.map()[0]
        for lead in (False, True):
            made = why(model, ids, address, at=T - 1, lead=lead)
            to = int(weights[T - 1].argmax())
            assert made.weight == pytest.approx(float(weights[T - 1, to]), abs=1e-6)
            assert made.error <= 1e-9, (address, lead)
            assert sum(pair.score for pair in made.pairs) == pytest.approx(made.score, abs=1e-8)
            assert sum(abs(pair.share) for pair in made.pairs) == pytest.approx(1.0)
        # Differences of scores are differences of log-weights, whatever the model does with them.
        others = [j for j in range(T) if j != to and weights[T - 1, j] > 0]
        if others:
            one, two = why(model, ids, address, at=T - 1), why(model, ids, address, at=T - 1, to=others[0])
            apart = (weights[T - 1, to].log() - weights[T - 1, others[0]].log()).item()
            assert one.total - two.total == pytest.approx(apart, abs=1e-8)


def test_a_part_is_what_is_lost_when_it_is_taken_out_of_the_stream_and_the_norm_keeps_its_scale() -> None:
    """By hand: one head's write taken out at the key, root mean squares as they were, keys turned by the formula."""
    model, ids, i, j = filled("decoder, rotary"), token_ids(1, 7), 5, 2
    with hw.record(model, "0.*,1.2") as recording, torch.no_grad():
        streams = []
        hook = model.blocks[1].register_forward_pre_hook(lambda part, given: streams.append(given[0][0]))
        model(ids)
        hook.remove()
    stream, head = streams[0], model.heads[Address.parse("1.2")]  # (T, D)
    norm: Any = model.blocks[1].norm_attention
    scale = (stream[j].square().mean() + norm.eps).rsqrt()
    taken = recording["0.3"].write[0, j] * scale * norm.weight.detach() @ head.W_K.detach()  # (d,)
    angles = j * 10000.0 ** (-torch.arange(0, 6, 2).double() / 6)
    one, two = taken[:3], taken[3:]
    taken = torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()))
    lost = float(recording["1.2"].q[0, i] @ taken) / 6**0.5
    made = why(model, ids, "1.2", at=i, to=j)
    assert dict(made.side("key"))["0.3"] == pytest.approx(lost, rel=1e-6)
    assert sum(dict(made.side("query")).values()) == pytest.approx(made.total, abs=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3", "gemma3", "phi3", "opt", "gpt_neox"])
def test_pairs_add_up_in_models_of_others(name: str) -> None:
    """Norms of queries and keys, partial rotary positions, scaled queries, norms behind attention: read off the call."""
    theirs = hw.attach(BY_NAME[name].build().double())
    ids = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(5))
    last = theirs.spec.addresses[-1]
    with hw.record(theirs, last) as recording:
        theirs(ids)
    weights = recording[last].only.map()[0]
    one, two = (why(theirs, ids, last, at=8, to=to) for to in (8, 6))
    assert max(one.error, two.error) <= 1e-6
    assert one.total - two.total == pytest.approx(float((weights[8, 8] / weights[8, 6]).log()), abs=1e-5)
    assert why(theirs, ids, last, at=8, lead=True).error <= 1e-6


def test_a_built_induction_circuit_is_named() -> None:
    """Head 1.0 asks for tokens behind its own; head 0.0 wrote there what stood before."""
    model = decoder()
    text = " ".join([*FILLERS[:9], *FILLERS[:9]])
    made = why(model, text, "1.0", at=f"{FILLERS[3]}#2")
    assert made.to == f"{FILLERS[4]}#1"
    assert made.complete
    assert (made.pairs[0].query, made.pairs[0].key) == ("embedding", "0.0")
    assert made.rank("embedding", "0.0") == 1
    key = [link for link in made.chain if link.side == "key"]
    assert [(link.part, link.token, link.looks_at) for link in key] == [
        ("0.0", f"{FILLERS[4]}#1", f"{FILLERS[3]}#1"),
        ("embedding", f"{FILLERS[3]}#1", None),
    ]
    assert key[0].weight == pytest.approx(1.0, abs=1e-3)
    assert key[0].brought == pytest.approx(key[0].score, rel=1e-3)
    assert key[1].score == pytest.approx(key[0].score, rel=1e-3)


def test_every_link_of_a_chain_carries_no_more_than_what_is_left_of_it() -> None:
    model = filled("decoder, rotary")
    made = why(model, token_ids(1, 7), model.spec.addresses[-1], at=-1, to=1)
    best = made.pairs[0]
    for side in ("query", "key"):
        links = [link for link in made.chain if link.side == side]
        assert links[0].part == getattr(best, side)
        assert links[0].score == pytest.approx(best.score, rel=1e-9)
        assert links[-1].looks_at is None


def test_words_are_found_and_wrong_ones_told() -> None:
    model = decoder()
    text = " ".join([*FILLERS[:5], *FILLERS[:5]])
    with pytest.raises(HeadwiseError, match="2 times"):
        why(model, text, "1.0", at=FILLERS[0])
    with pytest.raises(HeadwiseError, match="cannot see"):
        why(model, text, "1.0", at=1, to=3)
    with pytest.raises(HeadwiseError, match="not there"):
        why(model, text, "1.0", at="nowhere")
    with pytest.raises(HeadwiseError, match=r"9\.9"):
        why(model, text, "9.9", at=1)


def test_capped_scores_are_no_sum() -> None:
    spec = preset("nano")
    model = Transformer(replace(spec, attention=replace(spec.attention, softcap=5.0)))
    with pytest.raises(HeadwiseError, match="capped"):
        why(model, [1, 2, 3], "2.1", at=2)


def test_streams_that_are_no_sum_are_refused() -> None:
    for spec in (replace(preset("nano"), form="post"), replace(preset("nano"), kind="encoder", output="none")):
        with pytest.raises(HeadwiseError):
            why(Transformer(spec), [1, 2, 3], "2.1", at=2)


def test_looking_for_reasons_changes_nothing() -> None:
    model = Transformer(preset("nano")).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model.eval()(ids)
        model.train()
        why(model, ids, "3.2", at=3)
        assert model.training
        assert torch.equal(model.eval()(ids), before)
