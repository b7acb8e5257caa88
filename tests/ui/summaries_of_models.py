"""Summaries of heads of constructed models: the attention and output of each head follow from its weights."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import headwise as hw
from headwise.analysis.head_facts import HeadFacts, measure_head_facts
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.copy_suppression import CopySuppressionMetric
from headwise.analysis.metrics.far_attention import LENGTH, OUTSIDE_WINDOW
from headwise.analysis.metrics.image_patches import image_metrics, patch_offsets
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.query_focused_retrieval import FACTS
from headwise.analysis.metrics.retrieval import RetrievalMetric
from headwise.analysis.metrics.role_example_positions import ExampleStore, ObservedAttentionExample
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.read_images import InputImage, image_sample
from headwise.analysis.roles.causal_test_results import CausalEffect
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.image_profile import IMAGE_ROLES
from headwise.analysis.roles.profile_result import Profile, ProfileSums, build_profile
from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES
from headwise.analysis.roles.roles import LEAD, SUPPRESSION_PROBE, RoleEvidence, assess, score
from headwise.compression.head_compression_cost import HeadCompressionCost, measure_head_compression_cost
from headwise.spec import Address
from headwise.spec.patch_grid import PatchGrid
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.head_summary import summary_lines
from tests.analysis.constructed_heads import (
    OUT,
    PREVIOUS,
    SCRATCH,
    TOKEN,
    HeadBuilder,
    V,
    blank_model,
    decoder,
    documents,
    encoder,
)
from tests.analysis.constructed_word_models import BETA, WordModel, scores_to_offset, scores_to_position
from tests.analysis.dense_reference import call_from_scores
from tests.analysis.test_custom_metrics import DISJOINT_DOCUMENTS
from tests.analysis.test_far_attention import texts
from tests.analysis.test_prompt_cases import people_with_a_suppressor
from tests.analysis.test_prompts import FACT_WORDS, name_mover_model, successor_model
from tests.analysis.test_prompts import successor_map as next_words
from tests.compression.test_streaming_loss_evaluator import build_induction
from tests.compression.test_streaming_loss_evaluator import texts as permuted_texts
from tests.ui.summaries import SHARP, summary

Summaries = dict[str, list[str]]


def summaries(profile: Profile, names: dict[str, str] | None = None) -> Summaries:
    """Return the summary of every head, or of some heads under other names."""
    named = names or {str(address): str(address) for address in profile.addresses}
    return {name: summary(profile, head) for name, head in named.items()}


@cache
def decoder_heads() -> Summaries:
    """`tests.analysis.constructed_heads.DECODER`, tested causally, and a role of retrieval."""
    retrieval = RetrievalMetric(DISJOINT_DOCUMENTS)
    role = hw.Role("retrieval", retrieval.score_spec, 0.1)
    own = hw.AttentionToPosition("three back", lambda text: [place - 3 for place in range(len(text.ids))])
    roles = [role, hw.Role("three back", own.score_spec, 0.1)]
    return summaries(hw.profile(decoder(), documents(), metrics=[retrieval, own], roles=roles))


@cache
def encoder_heads() -> Summaries:
    """`tests.analysis.constructed_heads.ENCODER` with a previous-token head that has values only at the first token."""
    encoder_summaries = summaries(hw.profile(encoder(), documents(), causal=False))
    model = decoder()
    with torch.no_grad():
        head = next(iter(model.attention_layers())).heads[0]
        head.W_V.zero_()
        head.W_V[model.tokenizer.encode("1 2")] = 1.0  # pyright: ignore[reportOptionalMemberAccess]
    return {**encoder_summaries, "fetches nothing": summary(hw.profile(model, documents(), causal=False), "0.0")}


@cache
def prompted_heads() -> Summaries:
    """Heads on prompts: each model has a head with the role and other heads with parts of the behavior."""
    named = summaries(
        hw.profile(name_mover_model().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    )
    lists = successor_model()
    lists.set_head("0.1", position_scores=scores_to_offset(0), output_map=1e-3 * torch.eye(lists.V))
    lists.set_head("0.3", position_scores=scores_to_position(0), output_map=1e-3 * next_words(lists))
    listed = summaries(hw.profile(lists.model, ["The one two three"] * 4, relations=False, prompts=True, causal=False))
    suppressed = summaries(
        hw.profile(
            people_with_a_suppressor().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False
        )
    )
    return {
        "name suppression": suppressed["2.1"], "writes for the other name": suppressed["2.2"],
        "name mover": named["2.0"], "writes against the name": named["2.1"],
        "successor": listed["0.0"], "repeats the word": listed["0.1"], "never attends to the word": listed["0.3"],
        **_suppressing(), **_focused(), **_far(),
    }  # fmt: skip


def _suppressing() -> Summaries:
    model = blank_model(heads=6, layers=2)
    first, second = model.attention_layers()
    HeadBuilder(first, 0).attend_offsets(1).write(PREVIOUS, 1.0)
    HeadBuilder(second, 0).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 2.0)
    HeadBuilder(second, 4).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, -0.5)
    metric = CopySuppressionMetric(documents(120))
    role = next(role for role in PROMPT_ROLES if role.name == "copy suppression")
    profile = hw.profile(
        model, documents(120), relations=False, metrics=[metric], roles=[replace(role, metric_spec=metric.score_spec)]
    )
    return summaries(profile, {"copy suppression": "1.4", "writes for the token": "1.0"})


def _focused() -> Summaries:
    built = WordModel(FACT_WORDS, heads=2, kind="encoder")
    scores = torch.zeros(built.V, built.V)
    common = {
        word for text, _ in FACTS for word in text.split() if sum(word in other.split() for other, _ in FACTS) > 1
    }
    for text, question in FACTS:
        for word in {*text.split()[1:]} - common:
            scores[[[i] for i in built.ids(question.split())], built.ids([word])] = BETA
    built.set_head(
        "0.0", token_scores=scores, position_scores=scores_to_position(0, BETA / 2), output_map=torch.eye(built.V)
    )
    built.set_head("0.1", output_map=torch.eye(built.V))
    profile = hw.profile(built.model, [" ".join(text for text, _ in FACTS[:3])] * 4, relations=False, prompts=True)
    return summaries(profile, {"query focus": "0.0", "uniform": "0.1"})


def _far() -> Summaries:
    words = sorted({word for text in texts() for word in text.split()})
    built = WordModel(words, heads=4, positions=LENGTH)
    eye = torch.eye(built.V)
    built.set_head("0.0", position_scores=scores_to_offset(45, num_positions=LENGTH), output_map=eye)
    built.set_head("0.1", position_scores=scores_to_position(9, num_positions=LENGTH), output_map=eye)
    built.set_head("0.2", position_scores=scores_to_offset(1, num_positions=LENGTH), output_map=eye)
    built.set_head("0.3", output_map=eye)
    profile = hw.profile(built.model, texts(), relations=False, prompts=True, causal=False)
    return summaries(
        profile, {"far offset": "0.0", "fixed position": "0.1", "one back": "0.2", "uniform decoder": "0.3"}
    )


@cache
def patch_heads() -> Summaries:
    """Heads on images of 5 by 5 patches after a class token and a register token, with constructed attention."""
    grid = PatchGrid.of(5, 5, ["class", "register"])
    down, across = (torch.nan_to_num(part, nan=99.0) for part in patch_offsets(grid))
    far, steps = (down.square() + across.square()).sqrt(), torch.maximum(down.abs(), across.abs())
    allowed = {
        "row": (down == 0) & (across != 0), "column": (across == 0) & (down != 0), "local": steps == 1,
        "global": (far > 2.5) & (far < 99), "class token": one_key(grid, 0), "register": one_key(grid, 1),
        "sink": one_key(grid, 14), "uniform": torch.ones(len(grid), len(grid), dtype=torch.bool),
    }  # fmt: skip
    accumulator, metrics = Accumulator(len(allowed)), image_metrics(grid)
    runner, scores = MetricRunner(accumulator, metrics), SHARP * torch.stack(list(allowed.values()))[None].float()
    for number in range(40):
        picture = InputImage(str(number), torch.full((1, 1, 1), float(number)), grid)
        runner.on_call(call_from_scores(scores), make_batch([image_sample(number, picture)]), 0)
    about = {"texts": 40, "layers": ["0"], "corpus": "pictures", "relations_corpus": "", "image_grid": [5, 5]}
    heads = tuple(Address.parse(f"0.{number}") for number in range(len(allowed)))
    metric_specs = {metric_spec.name: metric_spec for metric in metrics for metric_spec in metric.metric_specs}
    sums = ProfileSums(heads, accumulator, None, [[] for _ in heads], ExampleStore(len(heads)), about, metric_specs)
    evidence, family_size = assess(score(accumulator, None, IMAGE_ROLES), len(heads), about)
    profile = build_profile(sums, evidence, family_size, IMAGE_ROLES)
    return summaries(profile, {name: str(head) for name, head in zip(allowed, heads, strict=True)})


def one_key(grid: PatchGrid, key: int) -> torch.Tensor:
    """Every row attends to one token."""
    return torch.zeros(len(grid), len(grid), dtype=torch.bool).index_fill_(1, torch.tensor([key]), True)


@cache
def asked_heads() -> Summaries:
    """Heads with all facts that a profile does not have: output, ablation loss, quantization cost, partners."""
    model = blank_model(heads=4, layers=2)
    first, second = model.attention_layers()
    HeadBuilder(first, 0).attend_offsets(1).write(
        TOKEN, 0.5
    )  # copies into its input subspace, so eigenvalues are positive
    HeadBuilder(first, 1).attend_offsets(1).write(TOKEN, -0.5)
    HeadBuilder(first, 2).attend_offsets(1).write(OUT, 4.0)  # predicts the previous token
    HeadBuilder(second, 0).attend_offsets(1).write(TOKEN, 0.5)
    HeadBuilder(second, 1).attend_offsets(1).write(SCRATCH, 0.5)  # writes to a subspace it never reads
    HeadBuilder(second, 2).attend_offsets(1).write(OUT, -1.0)
    corpus = [" ".join(["w0x"] + ["w1x w2x"] * 12)] * 8
    profile = hw.profile(model, corpus, relations=False, causal=False)
    constructed = {
        name: summary(profile, name, *measure_head(model, profile[name], corpus))
        for name in ("0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2")
    }
    return {
        **constructed,
        **_random_heads(),
        **_encoder_head(),
    }


def measure_head(model: hw.Transformer, head: HeadProfile, corpus: Any) -> tuple[HeadFacts, HeadCompressionCost]:
    """Measure all facts of a head that its profile does not have."""
    return measure_head_facts(model, head, corpus), measure_head_compression_cost(model, head, corpus)


def _random_heads() -> Summaries:
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=32, heads=4, kv_heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=96, layers=2, attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    corpus = ["The dog saw the hen, and then the dog left. " * 40]
    profile = hw.profile(model, corpus, relations=False, causal=False)
    return {
        "random": summary(profile, "1.2", *measure_head(model, profile["1.2"], corpus)),
        "not asked": summary(profile, "1.2"),
    }


@cache
def ranked_heads() -> Summaries:
    """Heads with five roles each, with given evidence levels and distances from the baseline."""
    profile = hw.profile(encoder(), documents(8), relations=False, causal=False)
    head, names = profile["0.0"], ("self", "digit", "local", "bracket", "quote")
    ranks = {
        "same level, less far": [("value-weighted", gain) for gain in (0.9, 0.8, 0.7, 0.6, 0.5)],
        "same level, farther": [("value-weighted", gain) for gain in (0.9, 0.8, 0.3, 0.6, 0.5)],
        "lower level": [
            ("value-weighted", 0.9),
            ("value-weighted", 0.8),
            ("value-weighted", 0.7),
            ("attention", 0.95),
            ("attention", 0.9),
        ],
    }
    base = RoleEvidence("", "", "", 0.8, 0.1, (0.7, 0.9), 0.0, 0.0005, 1.0, None, 100)
    roles = {
        name: tuple(
            replace(base, role=role, evidence_level=level, gain=gain)
            for role, (level, gain) in zip(names, rank, strict=True)
        )
        for name, rank in ranks.items()
    }
    suppressor = replace(base, role="copy suppression", evidence_level="value-weighted", probe=SUPPRESSION_PROBE)
    suppressor = suppressor.with_effects([CausalEffect(0.125, 0.01, corpus_label="texts that repeat a token")], 1)
    example = ObservedAttentionExample(True, 0.8, "x", "y", "y", 0.8, "*y* [x]", ())
    heads = {name: replace(head, roles=ranking) for name, ranking in roles.items()}
    effect = CausalEffect(
        1.5,
        0.01,
        control_cost=0.125,
        single_name_cost=0.25,
        effect=1.25,
        effect_interval=(1.0, 1.5),
        corpus_label="sentences about two people",
    )
    lead = replace(base, role="name suppression", evidence_level="value-weighted", probe=LEAD).with_effects([effect], 1)
    lead = replace(lead, evidence_level="causal", causal_on=(effect.corpus_label,))
    one_set = replace(lead, role="induction", evidence_level="value-weighted", probe=None, causal_on=("running text",))
    heads["lead"], heads["one set"] = replace(head, roles=(lead,)), replace(head, roles=(one_set,))
    heads["held back"] = replace(head, roles=(suppressor,), examples=(example, replace(example, hit=False)))
    return {name: [line.text for line in summary_lines(profile, head)] for name, head in heads.items()}


def _encoder_head() -> Summaries:
    model = encoder()
    profile = hw.profile(model, documents(8), relations=False, causal=False)
    return {"encoder": summary(profile, "0.0", *measure_head(model, profile["0.0"], documents(8)))}


@cache
def streaming_heads() -> Summaries:
    """A previous-token head and an induction head: both attend locally on running text, only the first can stream."""
    model, corpus = build_induction().model, permuted_texts()
    profile = hw.profile(model, corpus, relations=False, prompts=True, causal=False)
    measured = replace(
        profile["1.0"], metrics={**profile["1.0"].metrics, OUTSIDE_WINDOW.name: 0.01}
    )  # as on text without repeats
    return {
        "previous token": summary(profile, "0.0", *measure_head(model, profile["0.0"], corpus)),
        "induction": summary(profile, "1.0", *measure_head(model, measured, corpus)),
    }
