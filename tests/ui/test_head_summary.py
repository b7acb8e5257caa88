"""Head summaries: every number comes from the input, and every line links to an existing heading of the docs."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.importance import SingleHeadImportance
from headwise.analysis.ablation.quantization_sensitivity import QuantizationCost
from headwise.analysis.attribution.copy_logit_effect import CopyLogitEffect, direct_effects
from headwise.analysis.attribution.head_output_scores import TokenEffects
from headwise.analysis.head_facts import AblationSummary, ComposedHead, HeadFacts, OVSummary, measure_head_facts
from headwise.analysis.metrics.far_attention import STREAMING_POLICY
from headwise.analysis.metrics.role_example_positions import ObservedAttentionExample
from headwise.analysis.roles.causal_test_results import CausalEffect
from headwise.analysis.roles.roles import RoleEvidence
from headwise.compression.head_compression_cost import HeadCompressionCost, measure_head_compression_cost
from headwise.compression.paired_evaluation import LossEstimate
from headwise.compression.streaming_loss_evaluator import BOUND, KINDS, StreamingTestResult, TextKindStreamingCost
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.glossary import GLOSSARY
from headwise.ui.head_summary import summary_lines
from headwise.ui.role_descriptions import RELATION_ROLES, TOKEN_ROLES

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [
    f"The {subject} saw the {companion}, and then the {subject} left."
    for subject in ("dog", "cat", "cow")
    for companion in ("hen", "fox")
]


@pytest.fixture(scope="module")
def random_model():
    """An untrained model."""
    torch.manual_seed(0)
    model = hw.Transformer(hw.preset("nano").resized(layers=2, width=32, heads=4))
    model.tokenizer = byte_tokenizer()
    return model.eval()


@pytest.fixture(scope="module")
def profile(random_model):
    return hw.profile(random_model, TEXTS, causal=False)


def make_evidence(name, evidence_level, score, **fields):
    evidence = RoleEvidence(
        name, "", evidence_level, score, 0.0625, (0.5, 0.71), 0.5, 0.0004, 1.0, None, 1234, corpus_label="the probe set"
    )
    return replace(evidence, **fields)


def lines_by_term(profile, head, facts=None, cost=None):
    lines = summary_lines(profile, head, facts, cost)
    return {line.term: line.text for line in reversed(lines)}  # the first line of each term


def test_head_summary_random_model_reports_nothing_found(random_model, profile):
    for head in profile:
        summary = lines_by_term(profile, head)
        assert set(summary) == {"unclear", "idle pattern"}
        assert summary["unclear"].startswith(f"Head {head.address}: no role found. On 6 texts, no role exceeded")
        assert f"{profile.family_size:,} tests" in summary["unclear"]
    head = next(iter(profile))
    facts = measure_head_facts(random_model, head, TEXTS)
    assert facts.errors == measure_head_compression_cost(random_model, head, TEXTS).errors == ()
    summary = lines_by_term(profile, head, facts)
    assert facts.ov_summary is not None
    effect = facts.ov_summary.effect
    assert effect is not None
    assert effect == direct_effects(random_model, TEXTS, "0.0")["0.0"]
    verb = {1: "raises the", -1: "lowers the", 0: "does not measurably change the"}[effect.sign]
    assert f"Its output {verb} logit of the token it attends to most" in summary["direct effect"]
    assert f"95% CI {effect.low:+.2f} to {effect.high:+.2f}" in summary["direct effect"]
    exact = hw.importance(random_model, hw.TokenizedCorpus.of(random_model, TEXTS), heads="0.*")["0.0"]
    assert (
        f"loss by {exact.importance:+.2g} nats per token (95% CI {exact.low:+.2g} to {exact.high:+.2g}"
        in summary["importance"]
    )


def test_head_summary_contains_every_number(profile):
    head = next(iter(profile))
    cost = CausalEffect(
        0.5, 0.01, control_cost=0.0625, effect=0.25, effect_interval=(0.125, 0.375), corpus_label="random tokens"
    )
    also = replace(cost, cost=0.75, control_cost=None, corpus_label="running text")
    first = make_evidence(
        "induction", "causal", 0.61, effects=(cost, also), causal_on=("random tokens", "running text")
    )
    second = make_evidence("possessive", "value-weighted", 0.875, is_relation=True, hits=True, detail=">")
    third, fourth = (
        make_evidence("same phrase", "attention", 0.5, is_relation=True, detail="<"),
        make_evidence("digit", "attention", 0.4, gain=0.25),
    )  # fmt: skip
    example = ObservedAttentionExample(True, 0.8, "ship", "sea", "sea", 0.8, "[ship] at *sea*", (("token", "ship"),))
    head = replace(head, role="induction", evidence_level="causal",
                   roles=(first, second, third, fourth),
                   examples=(example, replace(example, hit=False)),
                   idle_pattern=("sink",), metrics={**head.metrics, "first": 0.62})  # fmt: skip
    facts = HeadFacts(
        OVSummary(-0.45, 0.02, (TokenEffects(" ship", [(" harbour", 2.0)], [(" paint", -1.0)]),),
              CopyLogitEffect(0.66, 0.47, 0.85, 1027, 0.007, 22)),
        AblationSummary(
            SingleHeadImportance("0.0", 0.031, 0.02, 0.04, 0.011, -0.01, 0.03), "ablation", "mean", "nats per token", 64
        ),
        ("0.1", "0.2"), ComposedHead("0.3", 0.19, 0.04), None, (("1.1", 0.123),),
    )  # fmt: skip
    head_cost = HeadCompressionCost(
        (QuantizationCost("0.0", "0.0 0.1", "qk", 4, 0.0012, -0.001, 0.003, 0.01),), "nats per token",
        16, 2_097_152, "0.0",
        StreamingTestResult(hw.CachePolicy(sink_tokens=4, window=128),
                      (TextKindStreamingCost("nouns repeated", 2.85, LossEstimate(3.1, 2.8, 3.4), 12),)),
    )  # fmt: skip
    summary = summary_lines(profile, head, facts, head_cost)
    text = " ".join(line.text for line in summary)
    for part in (
        "attends from the second copy of a random token to the token after the first copy (induction): on average 61% of its "
        "attention goes there",
        "Evaluated on 1,234 held-out cases (the probe set): 61% (95% CI 50–71%), baseline 6%, p = 0.0004 after",
        f"correction for {profile.family_size:,} tests", "Tested on random tokens and running text.",
        "ablating the head on random tokens: +0.500 nats per answer (rise in the loss of the role's answers), +0.062 on the "
        "same answers in control cases; +0.250 relative to the other heads of its layer (95% CI +0.125 to +0.375)",
        "ablating the head on running text: +0.750 nats per answer (rise in the loss of the role's answers); no control",
        "It also attends from a possessive pronoun to its owner (possessive >): in 88% of the cases, the target word gets "
        "the largest weight of all words (",
        "attends from a word to earlier words of the same phrase (same phrase <): on average 50% of its attention",
        "Further roles at the same evidence level (attention, p up to 0.0004), closer to their baselines: digit 40% "
        "(baseline 6%).",
        "[ship] at *sea* (weight on the target: 0.80). 1 of 2 stored held-out examples is a hit.",
        "Idle pattern: attention sink, on average 62% of its attention is on the first token.",
        "Its output raises the logit of the token it attends to most by 0.66 (95% CI +0.47 to +0.85), relative to the mean "
        "over the vocabulary: direct effect at 1,027 query positions of 22 texts, 0.7% of all;",
        "Attending to ' ship' promotes ' harbour' and suppresses ' paint'",
        "changes the loss by +0.031 nats per token (95% CI +0.02 to +0.04), +0.011 relative to the other heads",
        "mean ablation on 64 texts",
        "quantized to 4 bits, together with heads 0.1 and 0.2 (same KV head): W_Q and W_K +0.0012 (95% CI -0.001 to +0.003)",
        "increase with KV head 0.0 at 4 sink tokens and a window of 128: nouns repeated 2.85 +3.1 (95% CI +2.8 to +3.4; 12",
        "KV cache: 2.1 MB at 4,096 tokens (KV head 0.0, shared with heads 0.1 and 0.2)",
        "V-composition with an earlier head: 0.3 (0.19, random weights 0.04)",
        "Most similar attention: 1.1 (Jensen–Shannon divergence 0.12 nats)",
    ):  # fmt: skip
        assert part in text, part
    assert [line.term for line in summary] == [
        "role", "evidence", "role", "role", "role", "hit", "idle pattern", "direct effect", "output", "importance",
        "bits", "cache",
        "streaming", "partners",
    ]  # fmt: skip


@pytest.mark.parametrize("ranking", ["gradient", "attribution"])
def test_head_summary_estimated_importance_is_not_called_ablation(profile, ranking):
    importance = SingleHeadImportance("0.0", 0.031, 0.02, 0.04, 0.011, -0.01, 0.03)
    facts = HeadFacts(ablation=AblationSummary(importance, ranking, "zero", "nats per token", 64))
    text = lines_by_term(profile, next(iter(profile)), facts)["importance"]
    assert text.startswith("Importance: +0.031 (95% CI +0.02 to +0.04), +0.011 relative to the other heads")
    assert f"; {ranking} on 64 texts." in text
    assert "blat" not in text


def test_head_summary_direct_effect_sentence_follows_the_interval(profile):
    head = next(iter(profile))
    claims = {
        (0.1, 0.3): "raises the logit",
        (-0.3, -0.1): "lowers the logit",
        (-0.1, 0.3): "does not measurably change",
    }
    for (low, high), claim in claims.items():
        for score in (-0.9, 0.9, float("nan")):  # the eigenvalue score does not change the summary
            ov_summary = OVSummary(score, 0.02, (), CopyLogitEffect((low + high) / 2, low, high, 50, 0.1, 9))
            assert claim in lines_by_term(profile, head, HeadFacts(ov_summary))["direct effect"]
    assert set(lines_by_term(profile, head, HeadFacts(OVSummary(0.9, 0.02)))) == {"unclear", "idle pattern"}, (
        "no facts, no lines"
    )


def test_head_summary_encoder_has_no_direct_effect_sentence():
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=16, heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=64, layers=1, kind="encoder", attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    head = hw.profile(model, TEXTS, causal=False)["0.1"]
    ov_summary = measure_head_facts(model, head, TEXTS).ov_summary
    assert ov_summary is not None
    assert ov_summary.effect is None


def costs(**highs):
    """Return loss increases with these upper ends; the default is 0.01."""
    ends = {kind: highs.get(kind.split()[0], 0.01) for kind in KINDS}
    return tuple(TextKindStreamingCost(kind, 2.5, LossEstimate(0.0, -0.01, high), 12) for kind, high in ends.items())


@pytest.mark.parametrize(
    ("local", "measured", "recommended"),
    [
        (True, costs(), True),
        (False, costs(), False),
        (None, costs(), False),
        (True, costs(random=BOUND), False),
        (True, costs(nouns=3.4), False),
        (True, costs(facts=0.06), False),
        (True, costs(running=float("nan")), False),
        (True, costs()[:3], False),
        (True, (), False),
    ],
)
def test_head_summary_streaming_recommended_only_if_attention_and_all_losses_allow_it(
    profile, monkeypatch, local, measured, recommended
):
    flags = None if local is None else np.full(len(profile), local)
    monkeypatch.setattr("headwise.ui.head_summary.streaming_candidate_mask", lambda accumulator: flags)
    head_cost = HeadCompressionCost(kv_head="0.0", streaming_cost=StreamingTestResult(STREAMING_POLICY, measured))
    text = lines_by_term(profile, next(iter(profile)), cost=head_cost).get("streaming", "")
    assert ("can stream" in text) == recommended
    assert all(f"{cost.kind} 2.50" in text for cost in measured)


@pytest.mark.parametrize("value", [0.0, 0.012, 0.4])
def test_head_summary_attention_outside_the_window_is_a_figure_and_no_recommendation(profile, value):
    head = next(iter(profile))
    text = lines_by_term(profile, replace(head, metrics={**head.metrics, "outside window": value}))
    assert "stream" not in " ".join(text.values())
    assert text["outside window"].startswith(
        f"{100 * value:.2g}% of its attention is outside 4 sink tokens and a window of 32"
    )


def test_head_cost_measures_streaming_only_if_attention_is_local(random_model, profile):
    head = profile["0.1"]
    for beyond, measured in ((0.4, False), (float("nan"), False), (0.01, True)):
        measured_head = replace(head, metrics={**head.metrics, "outside window": beyond})
        cost = measure_head_compression_cost(random_model, measured_head, TEXTS)
        assert (cost.streaming_cost is not None) == measured


def test_head_summary_attached_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    attached = hw.attach(
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=257, n_positions=64)).eval()
    )
    attached.tokenizer = byte_tokenizer()
    head_profile = hw.profile(attached, TEXTS, causal=False)
    head = head_profile["1.1"]
    summary = lines_by_term(
        head_profile,
        head,
        measure_head_facts(attached, head, TEXTS),
        measure_head_compression_cost(attached, head, TEXTS),
    )
    assert {"unclear", "idle pattern", "direct effect", "importance", "bits", "partners"} <= set(summary)
    assert "no role found" in summary["unclear"]


def test_glossary_links_point_to_headings():
    for name, entry in GLOSSARY.items():
        page, _, anchor = entry.docs.partition("#")
        text = (DOCS / page).read_text()
        headings = [
            re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)
        ]
        assert not anchor or anchor in headings, (name, entry.docs)


def test_role_descriptions_cover_probe_set():
    from headwise.analysis.recording.tokenized_corpus import default_corpus
    from headwise.analysis.roles.roles import role_names
    from headwise.text.annotated_document import Document

    names = role_names(
        document for document in default_corpus(hw.load("minilm")).items() if isinstance(document, Document)
    )
    assert names - {*TOKEN_ROLES, *RELATION_ROLES} == set()


def test_head_summary_encoder_decoder_without_pairs():
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=16, heads=2)
    model = hw.Transformer(
        hw.ModelSpec(vocab=257, context=64, layers=1, kind="encoder-decoder", attention=attention)
    ).eval()
    model.tokenizer = byte_tokenizer()
    head_profile = hw.profile(model, TEXTS[:3], causal=False)
    for address in ("enc.0.1", "dec.0.0", "cross.0.1"):
        facts = measure_head_facts(model, head_profile[address])
        assert facts.ablation is None
        cost = measure_head_compression_cost(model, head_profile[address])
        for errors in (facts.errors, cost.errors):
            assert any("pairs" in reason for reason in errors)
        assert "no role found" in lines_by_term(head_profile, head_profile[address], facts, cost)["unclear"]
