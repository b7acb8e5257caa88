"""Score attribution to pairs of components: terms sum to the score, a built circuit is found, unsupported models raise an
error."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.score_attribution import explain
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, preset
from tests.analysis.constructed_heads import FILLERS, decoder
from tests.attached.models import BY_NAME
from tests.contract.layers import MODELS, randomize, token_ids

DECODERS = [
    name
    for name, spec in MODELS.items()
    if spec.kind == "decoder" and spec.norm_placement != "post" and spec.output == "lm"
]


def make_filled_model(name: str) -> Transformer:
    model = Transformer(MODELS[name]).double().eval()
    randomize(model)
    return model


@pytest.mark.parametrize("name", DECODERS)
def test_score_attribution_terms_sum_to_model_score(name: str) -> None:
    model, T = make_filled_model(name), 7
    ids = token_ids(1, T)
    for address in (model.spec.head_addresses[0], model.spec.head_addresses[-1]):
        with hw.record(model, address) as recording:
            model(ids)
        call = recording[address].only_call
        weights = call.map()[0]
        for lead in (False, True):
            attribution = explain(model, ids, address, query=T - 1, relative_to_mean=lead)
            to = int(weights[T - 1].argmax())
            assert attribution.weight == pytest.approx(float(weights[T - 1, to]), abs=1e-6)
            assert attribution.relative_error <= 1e-9, (address, lead)
            assert sum(pair.score for pair in attribution.pairs) == pytest.approx(attribution.score, abs=1e-8)
            assert sum(abs(pair.fraction) for pair in attribution.pairs) == pytest.approx(1.0)
        # Differences of scores are differences of log weights in every model.
        others = [j for j in range(T) if j != to and weights[T - 1, j] > 0]
        if others:
            first, second = (
                explain(model, ids, address, query=T - 1),
                explain(model, ids, address, query=T - 1, key=others[0]),
            )
            log_ratio = (weights[T - 1, to].log() - weights[T - 1, others[0]].log()).item()
            assert first.total - second.total == pytest.approx(log_ratio, abs=1e-8)


def test_score_attribution_part_equals_removed_write_at_fixed_scale() -> None:
    """Remove the output of one head at the key by hand, with fixed norm scales, and rotate the key by the formula."""
    model, ids, i, j = make_filled_model("decoder, rotary"), token_ids(1, 7), 5, 2
    with hw.record(model, "0.*,1.2") as recording, torch.no_grad():
        streams = []
        hook = model.blocks[1].register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0][0]))
        model(ids)
        hook.remove()
    stream, head = streams[0], model.heads[Address.parse("1.2")]  # (T, D)
    norm: Any = model.blocks[1].norm_attention
    scale = (stream[j].square().mean() + norm.eps).rsqrt()
    key_change = recording["0.3"].output[0, j] * scale * norm.weight.detach() @ head.W_K.detach()  # (d,)
    angles = j * 10000.0 ** (-torch.arange(0, 6, 2).double() / 6)
    first_half, second_half = key_change[:3], key_change[3:]
    key_change = torch.cat(
        (first_half * angles.cos() - second_half * angles.sin(), second_half * angles.cos() + first_half * angles.sin())
    )
    lost = float(recording["1.2"].q[0, i] @ key_change) / 6**0.5
    attribution = explain(model, ids, "1.2", query=i, key=j)
    assert dict(attribution.side_totals("key"))["0.3"] == pytest.approx(lost, rel=1e-6)
    assert sum(dict(attribution.side_totals("query")).values()) == pytest.approx(attribution.total, abs=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3", "gemma3", "phi3", "opt", "gpt_neox"])
def test_score_attribution_attached_models_sum_to_score(name: str) -> None:
    """Query and key norms, partial rotary embeddings, scaled queries, norms after attention: taken from the call."""
    attached = hw.attach(BY_NAME[name].build().double())
    ids = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(5))
    last = attached.spec.head_addresses[-1]
    with hw.record(attached, last) as recording:
        attached(ids)
    weights = recording[last].only_call.map()[0]
    first, second = (explain(attached, ids, last, query=8, key=to) for to in (8, 6))
    assert max(first.relative_error, second.relative_error) <= 1e-6
    assert first.total - second.total == pytest.approx(float((weights[8, 8] / weights[8, 6]).log()), abs=1e-5)
    assert explain(attached, ids, last, query=8, relative_to_mean=True).relative_error <= 1e-6


def test_score_attribution_finds_constructed_induction_circuit() -> None:
    """Head 1.0 attends to the token after an earlier occurrence. Head 0.0 wrote the previous token there."""
    model = decoder()
    text = " ".join([*FILLERS[:9], *FILLERS[:9]])
    attribution = explain(model, text, "1.0", query=f"{FILLERS[3]}#2")
    assert attribution.key_token == f"{FILLERS[4]}#1"
    assert attribution.is_complete
    assert (attribution.pairs[0].query, attribution.pairs[0].key) == ("embedding", "0.0")
    assert attribution.pair_rank("embedding", "0.0") == 1
    key = [link for link in attribution.path if link.side == "key"]
    assert [(link.part, link.token, link.source_token) for link in key] == [
        ("0.0", f"{FILLERS[4]}#1", f"{FILLERS[3]}#1"),
        ("embedding", f"{FILLERS[3]}#1", None),
    ]
    assert key[0].attention == pytest.approx(1.0, abs=1e-3)
    assert key[0].source_score == pytest.approx(key[0].score, rel=1e-3)
    assert key[1].score == pytest.approx(key[0].score, rel=1e-3)


def test_score_attribution_chain_starts_with_best_term() -> None:
    model = make_filled_model("decoder, rotary")
    attribution = explain(model, token_ids(1, 7), model.spec.head_addresses[-1], query=-1, key=1)
    best = attribution.pairs[0]
    for side in ("query", "key"):
        links = [link for link in attribution.path if link.side == side]
        assert links[0].part == getattr(best, side)
        assert links[0].score == pytest.approx(best.score, rel=1e-9)
        assert links[-1].source_token is None


def test_score_attribution_invalid_words_raise() -> None:
    model = decoder()
    text = " ".join([*FILLERS[:5], *FILLERS[:5]])
    with pytest.raises(HeadwiseError, match="2 times"):
        explain(model, text, "1.0", query=FILLERS[0])
    with pytest.raises(HeadwiseError, match="hidden from the query"):
        explain(model, text, "1.0", query=1, key=3)
    with pytest.raises(HeadwiseError, match="not in the text"):
        explain(model, text, "1.0", query="nowhere")
    with pytest.raises(HeadwiseError, match=r"9\.9"):
        explain(model, text, "9.9", query=1)


def test_score_attribution_softcap_raises() -> None:
    spec = preset("nano")
    model = Transformer(replace(spec, attention=replace(spec.attention, softcap=5.0)))
    with pytest.raises(HeadwiseError, match="capped"):
        explain(model, [1, 2, 3], "2.1", query=2)


def test_score_attribution_post_norm_or_encoder_raises() -> None:
    for spec in (
        replace(preset("nano"), norm_placement="post"),
        replace(preset("nano"), kind="encoder", output="none"),
    ):
        with pytest.raises(HeadwiseError):
            explain(Transformer(spec), [1, 2, 3], "2.1", query=2)


def test_score_attribution_leaves_model_unchanged() -> None:
    model = Transformer(preset("nano")).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model.eval()(ids)
        model.train()
        explain(model, ids, "3.2", query=3)
        assert model.training
        assert torch.equal(model.eval()(ids), before)
