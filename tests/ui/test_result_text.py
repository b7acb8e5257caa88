"""`repr` and `_repr_html_` of every result class: short, with the main number, and valid HTML with escaped text."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any, NamedTuple

import pytest
import torch

import headwise as hw
from headwise.analysis.roles.roles import RoleEvidence
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy
from headwise.compression.streaming_selection import StreamingRequest
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.result_text import MAX_LINES, ResultTable

TEXTS = [
    f"The {subject} saw the {object_} <b>&amp;</b>."
    for subject in ("dog", "cat", "cow")
    for object_ in ("hen", "fox", "owl")
]
VOID_ELEMENTS = {"br", "line", "rect"}


@cache
def model() -> hw.Transformer:
    torch.manual_seed(0)
    spec = hw.ModelSpec(vocab=257, context=64, layers=24, attention=hw.AttentionSpec(width=32, heads=4, kv_heads=2))
    built = hw.Transformer(spec).eval()
    built.tokenizer = byte_tokenizer()
    return built


@cache
def profile() -> hw.Profile:
    return hw.profile(model(), TEXTS, causal=False)


@cache
def profile_with_roles() -> hw.Profile:
    evidence = RoleEvidence(
        "possessive", ">", "value-weighted", 0.91, 0.18, (0.78, 1.0), 0.5, 0.009, 1.0, None, 22, is_relation=True
    )
    roles = [replace(evidence, role=f"<i>role</i> {number}") for number in range(40)]
    return replace(profile(), evidence=tuple(tuple(roles) for _ in profile().addresses))


@cache
def importance() -> Any:
    return hw.importance(model(), TEXTS)


@cache
def sensitivity() -> Any:
    return hw.sensitivity(model(), TEXTS, bits=(4, 3), heads="0-7.*")


@cache
def recording() -> Any:
    with hw.record(model()) as recorded:
        model()(torch.tensor([[72, 105, 33]]))
    return recorded


@cache
def history() -> hw.HeadHistory:
    recorded = hw.HeadHistory(TEXTS)
    recorded(model(), 0)
    recorded(model(), 300)
    return recorded


@cache
def train_result() -> Any:
    recipe = hw.Recipe(steps=2, batch_size=2, warmup=1)
    return hw.train(model().spec.resized(layers=1), " ".join(TEXTS), recipe, tokenizer="byte", progress=False)


@cache
def distill_result() -> Any:
    recipe = hw.Recipe(steps=2, batch_size=2, warmup=1)
    return hw.distill(model().spec.resized(layers=1), model(), " ".join(TEXTS * 4), recipe, progress=False)


@cache
def prune_study() -> Any:
    study = PruneStudy(PruneRequest(keep=0.5, corpus=TEXTS, ranking="gradient"), seeds=1, fractions=(0.5,))
    return hw.prune_study(model(), study)


@cache
def attached() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=24, n_head=2, n_embd=16, vocab_size=257, n_positions=64)
    return hw.attach(GPT2LMHeadModel(config).eval())


@cache
def detached() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    handle = hw.attach(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=9, n_positions=8)).eval())
    handle.detach()
    return handle


class ResultCase(NamedTuple):
    """A result, and a number that its text must contain."""

    build: Callable[[], Any]
    number: Callable[[Any], object]


CASES = {
    "Profile": ResultCase(profile, lambda result: f"0 of {len(result)} heads"),
    "Profile with roles": ResultCase(profile_with_roles, lambda result: f"{len(result)} of {len(result)} heads"),
    "HeadProfile": ResultCase(lambda: profile()["5.1"], lambda result: "5.1"),
    "HeadProfile with roles": ResultCase(lambda: profile_with_roles()["5.1"], lambda result: "0.91"),
    "RoleEvidence": ResultCase(lambda: profile_with_roles()["5.1"].roles[0], lambda result: "score 0.91 (95% CI 0.78–1.00)"),
    "HeadHistory": ResultCase(history, lambda result: "2 steps from 0 to 300"),
    "HeadHistory, empty": ResultCase(hw.HeadHistory, lambda result: "no steps"),
    "Importance": ResultCase(importance, lambda result: f"{result.mean.max():.4g}"),
    "Importance, attribution": ResultCase(
        lambda: hw.importance(model(), TEXTS, ranking="attribution", heads="0-1.*"), lambda result: f"{result.mean.max():.4g}"
    ),
    "HeadSimilarityResult": ResultCase(lambda: hw.compare_heads(model(), TEXTS, rows=16), lambda result: "96 heads"),
    "NearestHeadMatches": ResultCase(
        lambda: hw.match_heads(model(), model(), TEXTS, max_texts=8), lambda result: f"{len(result.matched)} of 96 heads"
    ),
    "SensitivityResult": ResultCase(sensitivity, lambda result: f"{result.loss_increase.max():.4g}"),
    "Plan": ResultCase(lambda: hw.plan_pruning(model(), PruneRequest(keep=0.5, ranking="random", fold_mean=False)),
                       lambda result: "48 of 96 heads pruned"),
    "Plan, cache": ResultCase(
        lambda: hw.plan_streaming(model(), StreamingRequest(fraction=0.5, ranking="random", corpus=TEXTS)),
        lambda result: "24 KV heads",
    ),
    "BitAllocation": ResultCase(
        lambda: hw.allocate_bits(model(), hw.sensitivity(model(), TEXTS[:2], bits=(8, 4)), mean_bits=6),
        lambda result: f"{result.mean_bits:.3g} bits per weight",
    ),
    "ScoreAttribution": ResultCase(
        lambda: hw.explain(model(), TEXTS[0], "5.1", 4, 1, words=False), lambda result: f"weight {result.weight:.3g}"
    ),
    "Scan": ResultCase(lambda: hw.scan(model(), TEXTS[0]), lambda result: f"loss {result.loss:.3f}"),
    "EvaluationResult": ResultCase(lambda: hw.evaluate(model(), max_items=3), lambda result: "minimal_pairs"),
    "ModelRecording": ResultCase(recording, lambda result: f"{result.nbytes / 1e6:.3g} MB"),
    "SingleHeadRecording": ResultCase(lambda: recording()["5.1"], lambda result: "1 call"),
    "HeadCall": ResultCase(lambda: recording()["5.1"].only_call, lambda result: "3 queries, 3 keys"),
    "AttentionView": ResultCase(lambda: hw.attention_maps(model(), TEXTS[0]), lambda result: f"{len(result.words)} words"),
    "TrainResult": ResultCase(train_result, lambda result: f"{result.loss:.4g}"),
    "TrainResult, distillation": ResultCase(distill_result, lambda result: f"{result.loss:.4g}"),
    "PruneStudyResult": ResultCase(prune_study, lambda result: "48 of 96 heads pruned"),
    "PlanReport": ResultCase(lambda: prune_study().report, lambda result: f"{result.loss_after.mean:.4g}"),
    "PruningCurve": ResultCase(lambda: prune_study().curve, lambda result: f"{result.full_loss.mean:.4g}"),
    "ParallelStrategyCost": ResultCase(lambda: hw.layout(hw.preset("llama2-70b"), 8)[0], lambda result: "17.2 GB"),
    "ParallelStrategyCost, error": ResultCase(lambda: hw.layout(model().spec, 7)[0], lambda result: "not possible"),
    "AttachedModel": ResultCase(attached, lambda result: "48 heads in 24 layers"),
    "AttachedModel, detached": ResultCase(detached, lambda result: "detached"),
    "Heads": ResultCase(lambda: model().heads, lambda result: "96 heads in 24 layers"),
    "Heads, some": ResultCase(lambda: model().heads["0.0-1,3.3"], lambda result: "3 heads in 2 layers"),
    "Head": ResultCase(lambda: model().heads["5.1"], lambda result: "head_dim=8"),
    "HeadSummary": ResultCase(lambda: profile_with_roles().summary("5.1"), lambda result: "91%"),
    "HeadSummary, model": ResultCase(lambda: profile().summary("5.1", model()), lambda result: "no role found"),
}  # fmt: skip
WITHOUT_HTML = {"RoleEvidence", "HeadCall"}  # one line each


class BalancedParser(HTMLParser):
    """Collect text and check that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID_ELEMENTS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", CASES)
def test_result_repr_is_short_and_has_the_main_number(name: str) -> None:
    result = CASES[name].build()
    text = repr(result)
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text) <= 4000
    assert str(CASES[name].number(result)) in text
    assert "0x" not in text


@pytest.mark.parametrize("name", sorted(set(CASES) - WITHOUT_HTML))
def test_result_html_is_balanced_and_escaped(name: str) -> None:
    parser = BalancedParser()
    parser.feed(CASES[name].build()._repr_html_())
    assert parser.open_tags == []
    assert parser.text.strip()
    assert not parser.tags & {"b", "i", "script"} - ({"b"} if name == "Head" else set())


def test_result_table_aligns_columns_and_limits_rows() -> None:
    rows = tuple((f"0.{number}", float(number), None) for number in range(100))
    lines = ResultTable("title", ("head", "score", "empty"), rows, "More: .rows").as_text().splitlines()
    assert lines[1:4] == ["head  score  empty", "0.0       0      –", "0.1       1      –"]
    assert lines[-2:] == ["… 86 more rows", "More: .rows"]


def test_result_table_long_and_multiline_cells_stay_on_one_line() -> None:
    table = ResultTable("a\nb " * 500, ("x" * 500,), (("y\n" * 500,),), "h " * 500)
    lines = table.as_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= 140
    assert "\n" not in table.as_html()
