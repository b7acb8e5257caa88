"""Causal tests: causal heads, and heads that only seem causal because other heads do nothing or every answer needs them."""

import math
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import as_head_outputs, mean_of_outputs, record_z
from headwise.analysis.metrics.statistics import holm_correction
from headwise.analysis.metrics.task_metric import sample_from_ids
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.build_causal_trials import (
    LIST_LENGTH,
    MAX_LISTS,
    REPEATED_TEXT_TOKENS,
    CausalTrial,
    TrialPrompt,
    answer_nll,
    relation_trial,
    repeated_list_trial,
    repeated_text_trial,
)
from headwise.analysis.roles.causal_test import (
    CausalEffectEstimator,
    ablation_effects,
    causal_test,
    loss_increase_by_head,
)
from headwise.analysis.roles.causal_test_results import RANDOM_TOKENS, RUNNING_TEXT, CausalEffect
from headwise.analysis.roles.head_causal_test import run_head_causal_test, with_head_evidence
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import RoleEvidence
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import word_tokenizer
from headwise.ui.print_profile import show_profile
from tests.analysis.constructed_heads import (
    FOLLOWER_OF,
    OUT,
    POSITION,
    PREVIOUS,
    WORDS,
    HeadBuilder,
    P,
    V,
    add_follower_logits,
    blank_model,
    decoder,
    documents,
    pair_scores,
)


def effect_of_costs(
    *heads: float, texts: int = 20, answers: float = 4.0, clean: float = 0.0, control: float = 0.0
) -> CausalEffect:
    """Effect of the first of some heads of a layer. Each case has several answers, and each head has a cost in nats per
    answer; the first head has another cost in the control. Mean ablation costs as much as resampling."""
    lost = np.tile(answers * np.array(heads), (texts, 1))
    return effect_of_losses(lost, np.full((texts, 1), answers * control), np.full(texts, answers), clean)


def effect_of_losses(lost: np.ndarray, control: np.ndarray, counts: np.ndarray, clean: float = 0.0) -> CausalEffect:
    costs = CausalEffectEstimator(counts, clean * counts.sum())
    effect = costs.compare_with_control(lost[:, 0], control[:, 0])
    effect = costs.compare_with_layer(effect, lost[:, 0], lost[:, 1:]) if effect.is_causal else effect
    return costs.with_mean_ablation(effect, lost[:, 0]) if effect.is_causal else effect


def test_effect_fields_match_closed_form() -> None:
    effect = effect_of_costs(0.5, 0.1, 0.2, 0.3, 0.4, control=0.2)
    assert effect.cost == pytest.approx(0.5)
    assert effect.effect == pytest.approx(0.5 - 0.25)
    assert effect.effect_interval == pytest.approx((0.25, 0.25))
    assert effect.cost_threshold == pytest.approx(0.325), "three quarters of the way through .1, .2, .3, .4"
    assert effect.control_cost == pytest.approx(0.2)
    assert effect.excess_interval == pytest.approx((0.3, 0.3))
    assert effect.mean_ablation_cost == pytest.approx(0.5)
    assert effect.p == pytest.approx(1 / 65536, rel=0.01), "no flip of twenty equal signs reaches the data"
    assert effect.is_causal


def test_effect_equal_control_cost_is_not_causal() -> None:
    assert effect_of_costs(0.5, 0.1, control=0.4).is_causal
    for control in (0.5, 0.7):
        effect = effect_of_costs(0.5, 0.1, control=control)
        assert (effect.p, effect.effect) == (1, None), "it hurts any answer as much, and no more is asked"


def test_effect_one_outlier_case_is_not_causal() -> None:
    """(11/12)¹² = 35% of all bootstrap draws miss the outlier, so the interval begins at 0."""
    lost = np.tile([2.0, 0.0], (12, 1))
    lost[3, 0] = 50.0
    effect = effect_of_losses(lost, np.full((12, 1), 2.0), np.full(12, 4.0))
    assert effect.excess_interval is not None
    assert effect.excess_interval[0] == 0
    assert not effect.is_causal


def test_effect_without_control_is_not_causal() -> None:
    effect = CausalEffectEstimator(np.ones(20), 0.0).compare_with_control(np.ones(20), None)
    assert (effect.cost, effect.control_cost, effect.excess_interval) == (1, None, None)
    assert not effect.is_causal


def test_effect_without_mean_ablation_cost_is_not_causal() -> None:
    """The output of another case misleads the model, but zero output in its place costs nothing."""
    costs, effect = CausalEffectEstimator(np.full(20, 4.0), 0.0), effect_of_costs(0.7, 0.0)
    for lost, needed in ((0.6, True), (0.005, False), (-0.1, False)):
        assert costs.with_mean_ablation(effect, np.full(20, 4 * lost)).is_causal == needed


def test_effect_p_value_is_corrected_for_number_of_heads() -> None:
    """Six cases with a positive cost: one of 64 sign flips reaches the sum, so p = 1/64. Four heads are tested, so each needs
    0.05/4."""
    effect = effect_of_costs(0.5, 0.0, texts=6)
    assert effect.p == pytest.approx(1 / 64)
    assert effect.is_causal
    assert not replace(effect, p=float(holm_correction([effect.p, 1, 1, 1])[0])).is_causal


def test_effect_tiny_cost_among_idle_heads_is_not_causal() -> None:
    effect = effect_of_costs(0.004, 0, 0, 0, 0, 0)
    assert effect.excess_interval is not None
    assert effect.excess_interval[0] > 0, "it is above its control without a doubt"
    assert effect.cost_threshold == 0.01
    assert not effect.is_causal


def test_effect_threshold_grows_with_clean_loss() -> None:
    assert effect_of_costs(0.05, 0, 0, 0, clean=4.0).is_causal
    effect = effect_of_costs(0.05, 0, 0, 0, clean=6.0)
    assert effect.cost_threshold == pytest.approx(0.06)
    assert not effect.is_causal


def test_effect_below_top_heads_of_layer_is_not_causal() -> None:
    """Above the mean of a layer in which five of eight other heads do nothing, but below its top three heads."""
    effect = effect_of_costs(0.5, 1, 1, 1, 0, 0, 0, 0, 0)
    assert effect.effect == pytest.approx(0.5 - 3 / 8)
    assert effect.effect_interval is not None
    assert effect.effect_interval[0] > 0
    assert not effect.is_causal
    assert effect_of_costs(0.5, 1, 0, 0, 0, 0, 0, 0, 0).is_causal, "second of nine"


def test_effect_equaled_by_other_heads_is_not_causal() -> None:
    for heads in ((1.0, 1.0, 1.0), (0.3, 1.0), (-0.5, -1.0, -1.0)):
        assert not effect_of_costs(*heads, control=-2.0).is_causal


def test_effect_single_head_of_layer_needs_several_cases() -> None:
    effect = effect_of_costs(0.5, clean=2.0)
    assert (effect.effect, effect.cost, effect.cost_threshold) == pytest.approx((0.5, 0.5, 0.02))
    assert effect.is_causal
    assert not effect_of_costs(0.5, texts=1).is_causal, "one case gives no interval"


def test_effect_without_answers_is_not_causal() -> None:
    assert not effect_of_losses(np.zeros((8, 3)), np.zeros((8, 1)), np.zeros(8)).is_causal


# Trials.


def tokenized_documents(model: Transformer, count: int = 40) -> TokenizedCorpus:
    return TokenizedCorpus.of(model, documents(count))


@torch.no_grad()
def test_list_trial_cases_and_controls_have_same_answers() -> None:
    model = decoder()
    trial = repeated_list_trial(model, list(tokenized_documents(model)), seed=3)
    followers = {WORDS.index(word) for word in FOLLOWER_OF.values()}
    assert len(trial.cases) == len(trial.controls) == MAX_LISTS
    for case, control in zip(trial.cases, trial.controls, strict=True):
        assert sorted(case.targets.values()) == sorted(control.targets.values())
        assert {*case.targets.values()} <= followers, "what this model foresees in a text"
        first, second = case.sample.ids[:LIST_LENGTH], case.sample.ids[LIST_LENGTH:]
        assert first == second
        assert len({*first}) == LIST_LENGTH
        assert min(case.targets) > LIST_LENGTH, "nobody can foresee the first token of the second copy"
        for position, token in control.targets.items():
            assert token not in control.sample.ids[:position], "a text in which nothing is said again"
    costs = [
        cost for rows in (trial.cases, trial.controls) for losses in answer_nll(model, rows) for cost in losses.values()
    ]
    assert max(costs) <= 3


@torch.no_grad()
def test_list_trial_at_least_half_of_a_list_is_drawn_from_the_vocabulary() -> None:
    model = decoder()
    trial = repeated_list_trial(model, list(tokenized_documents(model)), seed=3)
    lists = [row.sample.ids[:LIST_LENGTH] for row in trial.cases]
    assert all(len(row.targets) <= LIST_LENGTH // 2 for row in trial.cases)
    assert {*range(len(WORDS))} == {token for ids in lists for token in ids} | {*range(len(WORDS))}, (
        "ordinary tokens alone"
    )
    rare = {WORDS.index(word) for word in WORDS[:6]}  # digits, which never occur as an answer
    assert any({*ids} & rare for ids in lists)


@torch.no_grad()
def test_text_trial_asks_second_copy_with_the_text_read_once_as_control() -> None:
    model = decoder()
    texts = list(tokenized_documents(model))
    trial = repeated_text_trial(model, texts, seed=3)
    beginnings = {sample.ids[:REPEATED_TEXT_TOKENS] for sample in texts}
    assert len(trial.cases) == len(trial.controls) == len(trial.matched) == MAX_LISTS
    for case, matched, control in zip(trial.cases, trial.matched, trial.controls, strict=True):
        first, second = case.sample.ids[:REPEATED_TEXT_TOKENS], case.sample.ids[REPEATED_TEXT_TOKENS:]
        assert first == second
        assert first in beginnings, "in the text's own order"
        assert matched.targets.items() <= case.targets.items()
        assert {place - REPEATED_TEXT_TOKENS: token for place, token in matched.targets.items()} == control.targets
        assert all(control.sample.ids[place] == token for place, token in control.targets.items())
        assert min(case.targets) > REPEATED_TEXT_TOKENS, "the first token of the second copy cannot be foreseen"
        assert all(token not in first[: place - REPEATED_TEXT_TOKENS] for place, token in case.targets.items())
    more = sum(
        len(case.targets) - len(matched.targets) for case, matched in zip(trial.cases, trial.matched, strict=True)
    )
    assert more > MAX_LISTS, "tokens that the text does not foretell are asked for as well"


@torch.no_grad()
def test_list_trial_depends_on_seed() -> None:
    model = decoder()
    texts = list(tokenized_documents(model))
    first, same, other = (repeated_list_trial(model, texts, seed) for seed in (3, 3, 4))
    assert [row.sample.ids for row in first.cases] == [row.sample.ids for row in same.cases]
    assert [row.sample.ids for row in first.cases] != [row.sample.ids for row in other.cases]


@torch.no_grad()
def test_list_trial_uninformed_model_has_no_controls() -> None:
    model = blank_model(heads=2, layers=1)
    trial = repeated_list_trial(model, list(tokenized_documents(model)), seed=0)
    assert trial.controls == ()
    assert len(trial.cases) == MAX_LISTS, "lists of any words: what a head costs can still be told"


def add_closer_logits(model: Transformer) -> Transformer:
    """Predict each closing word after the words `5` and `6`: one of twelve."""
    assert model.output is not None
    with torch.no_grad():
        for word in ("5", "6"):
            for closer in WORDS[-12:]:
                model.output.vocabulary.weight[WORDS.index(closer), WORDS.index(word)] = 1.0
    return model


@torch.no_grad()
def test_word_trial_controls_have_closer_without_opener() -> None:
    """Closing words after a word that predicts them, with and without their opening word in the text."""
    model = add_closer_logits(blank_model(heads=2, layers=1))
    with_pairs = [Document.of(["w1x", f"a{k}x", "w3x", "5", f"b{k}x"], [Relation("bracket", 4, 1)]) for k in range(6)]
    without = [Document.of(["w1x", f"a{(k + 1) % 12}x", "w5x", "6", f"b{k}x"], []) for k in range(6)]
    trap = [Document.of(["w1x", f"a{k}x", "w7x", "w9x", "6", f"b{k}x"], []) for k in range(6)]
    samples = list(TokenizedCorpus.of(model, [*with_pairs, *without, *trap]))
    trial = relation_trial(model, samples[:6], samples[6:], "bracket", "later word")
    assert [row.sample.ids for row in trial.cases] == [sample.ids for sample in samples[:6]]
    assert [row.sample.ids for row in trial.controls] == [sample.ids for sample in samples[6:12]], (
        "not where the opener stands"
    )
    assert trial.controls_of_case == tuple((index,) for index in range(6))
    assert relation_trial(model, samples[:6], samples[6:10], "bracket", "later word").controls == (), "four are too few"


@torch.no_grad()
def test_ablation_loss_equals_resample_and_mean_ablation() -> None:
    """The loss of the sweep equals the loss of the model with the head patched from the previous row."""
    model = decoder()
    trial = repeated_list_trial(model, list(tokenized_documents(model)), seed=3)
    heads = [Address.parse("0.0"), Address.parse("1.0")]
    lost, clean = loss_increase_by_head(model, heads, trial.cases[:5])
    means, _ = loss_increase_by_head(model, heads, trial.cases[:5], "mean")

    def answer_loss(row: TrialPrompt) -> float:
        logs = model(torch.tensor([row.truncated_sample.ids]))[0].log_softmax(-1)
        return -sum(float(logs[head_index - 1, token]) for head_index, token in row.targets.items())

    ids = [torch.tensor([row.truncated_sample.ids]) for row in trial.cases[:5]]
    over = mean_of_outputs(record_z(model, case_ids) for case_ids in ids)
    for index, row in enumerate(trial.cases[:5]):
        assert clean[index] == pytest.approx(answer_loss(row), abs=1e-5)
        for head_index, head in enumerate(heads):
            with hw.ablated(model, str(head), "resample", other=as_head_outputs(model, ids[index - 1])):
                assert lost[index, head_index] == pytest.approx(answer_loss(row) - clean[index], abs=1e-4)
            with hw.ablated(model, str(head), "mean", means=over):
                assert means[index, head_index] == pytest.approx(answer_loss(row) - clean[index], abs=1e-4)


# Hand-built heads.


def nearly_idle_model(size: float) -> Transformer:
    """One layer: a previous-token head that slightly reduces the probability of the previous token, and five heads without
    output."""
    model = blank_model(heads=6, layers=1)
    (layer,) = model.attention_layers()
    HeadBuilder(layer, 0).attend_offsets(1).write(OUT, -size)
    return model


def test_profile_idle_layer_has_no_causal_head() -> None:
    """The token of another case is suppressed instead: the answers lose almost nothing, and no control is found."""
    head = profile(nearly_idle_model(0.1), documents(40))["0.0"].evidence[0]
    assert head.role == "previous token"
    assert head.cost is not None
    assert abs(head.cost) < 2 / V
    assert head.cost_threshold == pytest.approx(0.01 * math.log(V), rel=0.02), (
        "a model that knows nothing: ln V an answer"
    )
    assert head.effect is None, "its layer is not asked"
    assert (head.control_cost, head.causal_p, head.evidence_level) == (None, None, "value-weighted")


@pytest.fixture(scope="module")
def causal_profile() -> Profile:
    return profile(decoder(), documents(40))


def first_evidence(profiled: Profile, address: str) -> RoleEvidence:
    return profiled[address].evidence[0]


def test_profile_copying_heads_are_causal(causal_profile: Profile) -> None:
    """Both heads of the copying chain are causal. The duplicate-token head is tested on the same prompts without effect."""
    for address in ("0.0", "1.0"):
        head = first_evidence(causal_profile, address)
        assert head.evidence_level == "causal"
        assert head.cost is not None
        assert head.cost_threshold is not None
        assert head.control_cost is not None
        assert head.mean_ablation_cost is not None
        assert head.cost > 1 > head.cost_threshold
        assert head.mean_ablation_cost > 1
        assert abs(head.control_cost) < 0.2, "followers are said without any head"
        assert head.causal_on == (RANDOM_TOKENS, RUNNING_TEXT)
        assert head.evidence_label == "causal on random tokens and running text"
        assert head.causal_p == pytest.approx(6 / 65536), "of three heads on two token sets the first counts six times"
    idle = first_evidence(causal_profile, "0.2")
    assert idle.evidence_level == "value-weighted"
    assert idle.cost is not None
    assert idle.cost < 0.2, "what it writes makes the stream longer, and that is all"
    assert idle.mean_ablation_cost is None, "not asked any more"
    assert causal_profile.num_causal_tests == 6, "three heads on two token sets"


@pytest.mark.parametrize("address", ["0.0", "0.2"])
def test_causal_test_of_one_head_equals_that_of_all_heads(causal_profile: Profile, address: str) -> None:
    """Costs and effects are equal. The correction is that of Bonferroni for all six tests, so p is at least that of Holm."""
    model, corpus = decoder(), documents(40)
    untested = profile(model, corpus, causal=False)
    head = causal_profile[address].address
    evidence = run_head_causal_test(model, untested, head, corpus)
    assert [(entry.role, entry.evidence_level) for entry in evidence] == [
        (entry.role, entry.evidence_level) for entry in causal_profile[address].evidence
    ]
    tested = [entry for entry in evidence if entry.effects]
    assert tested
    for entry in tested:
        expected = next(other for other in causal_profile[address].evidence if other.role == entry.role)
        for effect, other in zip(entry.effects, expected.effects, strict=True):
            assert effect.cost == pytest.approx(other.cost, abs=1e-6)
            assert effect.control_cost == pytest.approx(other.control_cost, abs=1e-6)
            assert effect.p >= other.p
    joined = with_head_evidence(untested, head, evidence)
    assert joined[address].evidence == evidence
    others = [entry.address for entry in untested if entry.address != head]
    assert all(joined[other].evidence == untested[other].evidence for other in others)


def test_profile_two_heads_sharing_work_are_both_causal() -> None:
    """Each head does half of the work: both are needed, and both are reported."""
    model = decoder()
    _, second_layer = model.attention_layers()
    HeadBuilder(second_layer, 0).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 1.0)
    HeadBuilder(second_layer, 4).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 1.0)
    profiled = profile(model, documents(40))
    for address in ("1.0", "1.4"):
        assert (profiled[address].role, profiled[address].evidence_level) == ("induction", "causal")


@torch.no_grad()
def test_profile_redundant_heads_are_not_causal() -> None:
    """Each head alone suffices. Resampling its output misleads the model, but zero output is not missed. The lists consist of
    followers only, so that only these heads are involved."""
    model = decoder()
    _, second_layer = model.attention_layers()
    for index in (0, 4):
        HeadBuilder(second_layer, index).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 1.0)
    assert model.output is not None
    model.output.vocabulary.weight.mul_(4)
    draw, followers = np.random.default_rng(0), [WORDS.index(word) for word in FOLLOWER_OF.values()]
    lists = [draw.permutation(followers)[:LIST_LENGTH].tolist() for _ in range(MAX_LISTS)]
    cases = [prompt_with_answers([*ids, *ids], range(LIST_LENGTH + 2, 2 * LIST_LENGTH)) for ids in lists]
    pairs = [
        [WORDS.index(word) for pair in list(FOLLOWER_OF.items())[i : i + 4] for word in pair] for i in range(MAX_LISTS)
    ]
    controls = [prompt_with_answers(ids[: len(ids) // 2 * 2], [1]) for ids in pairs if len(ids) > 1]
    of_case = tuple((i % len(controls),) for i in range(MAX_LISTS))
    heads = [Address.parse("1.0"), Address.parse("1.4")]
    for effect in ablation_effects(
        model, model.spec.head_addresses, heads, CausalTrial(tuple(cases), tuple(controls), of_case)
    ):
        assert 0.5 < effect.cost < 0.7, "ln 2: two answers, equally loud; 0 where the other case has the same answer"
        assert effect.mean_ablation_cost is not None
        assert effect.mean_ablation_cost < 0.01
        assert not effect.is_causal


def prompt_with_answers(ids: list[int], places: Iterable[int]) -> TrialPrompt:
    """Make a prompt of built words with the expected tokens."""
    return TrialPrompt(sample_from_ids(0, tuple(ids), word_tokenizer(WORDS)), {place: ids[place] for place in places})


def test_profile_head_writing_every_answer_is_not_causal() -> None:
    """If a token occurred before, the head attends to the token after it, otherwise to itself, and writes the follower. So it
    writes every answer of the model. Its attention pattern is induction and lists need it, but texts without repetition need
    it just as much."""
    model = blank_model(heads=6, layers=2)
    first_layer, second_layer = model.attention_layers()
    HeadBuilder(first_layer, 0).attend_offsets(1).write(PREVIOUS, 1.0)
    HeadBuilder(second_layer, 0).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_self().write(OUT, 2.0)
    with torch.no_grad():
        for word, follower in FOLLOWER_OF.items():
            second_layer.heads[0].W_V[WORDS.index(word), WORDS.index(follower)] += 2 * second_layer.heads[0].W_V[0, 0]
    head = first_evidence(profile(model, documents(40)), "1.0")
    assert head.role == "induction"
    assert head.cost is not None
    assert head.cost > 1, "by its ablation alone it would be causal"
    assert head.control_cost is not None
    assert head.control_cost > head.cost
    assert head.evidence_level == "value-weighted"


def test_profile_head_writing_constant_is_not_causal() -> None:
    """The model would predict one word everywhere, and a head with the attention pattern of induction suppresses it wherever
    it attends. Without output no answer is correct, but the output does not depend on the case, so that of another case works
    equally well."""
    model = decoder()
    _, second_layer = model.attention_layers()
    HeadBuilder(second_layer, 4).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 0.0)
    loud, target_channel = 3.0, OUT + WORDS.index("4")
    assert model.output is not None
    with torch.no_grad():
        model.output.vocabulary.weight[WORDS.index("4"), POSITION : POSITION + P] = loud
        head = second_layer.heads[4]
        head.W_V.zero_()[POSITION : POSITION + P, 0] = (2 / V) ** 0.5
        head.W_V[:V, 0] = 0.0
        head.W_O.zero_()[0, target_channel] = -loud
    evidence = first_evidence(profile(model, documents(40)), "1.4")
    assert (evidence.role, evidence.evidence_level) == ("induction", "value-weighted")
    assert evidence.cost == pytest.approx(0, abs=0.05), "but for what norms make of the rest of the stream"
    ids = torch.tensor([[WORDS.index(word) for pair in list(FOLLOWER_OF.items())[:3] for word in pair]])
    with torch.no_grad():
        full = model(ids)[0, 0].log_softmax(-1)[ids[0, 1]]
        with hw.ablated(model, "1.4", "zero"):
            without = model(ids)[0, 0].log_softmax(-1)[ids[0, 1]]
    assert full - without > 1


def test_causal_test_head_that_copies_texts_alone_names_the_set(tmp_path: Path) -> None:
    """An induction head for tokens that have a follower: texts consist of such pairs, random tokens do not. The head is
    causal on one token set. So the level is not causal, and the set is reported, saved, merged and printed."""
    model = decoder()
    _, two = model.attention_layers()
    HeadBuilder(two, 0).attend_tokens(
        pair_scores(tuple(FOLLOWER_OF), tuple(FOLLOWER_OF)), key_part=PREVIOUS
    ).attend_first().write(OUT, 2.0)
    profiled = profile(model, documents(40))
    head = first_evidence(profiled, "1.0")
    assert (head.role, head.evidence_level, head.causal_on) == ("induction", "value-weighted", (RUNNING_TEXT,))
    assert head.evidence_label == "value-weighted; causal on running text"
    lists, texts = head.effects
    assert (lists.corpus_label, lists.is_causal) == (RANDOM_TOKENS, False)
    assert (texts.corpus_label, texts.is_causal) == (RUNNING_TEXT, True)
    assert texts.control_cost is not None
    assert texts.cost > 1 > texts.control_cost
    again = Profile.load(profiled.save(tmp_path / "profile.npz"))
    assert again.evidence == profiled.evidence
    assert first_evidence(again.merge(profile(model, documents(8, seed=9), causal=False)), "1.0").causal_on == (
        RUNNING_TEXT,
    )
    row = next(row for row in profiled.table() if row["head"] == "1.0")
    assert row["causal_on"] == RUNNING_TEXT
    console = Console(file=StringIO(), width=250)
    show_profile(profiled, {"1.0"}, console)
    assert "value-weighted; causal on running text" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "running text" in str(profiled.summary("1.0"))


@pytest.mark.parametrize("seed", range(1, 3))
@torch.no_grad()
def test_causal_test_random_heads_are_not_causal(seed: int) -> None:
    """Two heads of a copying chain and 18 random heads that write everywhere. All are tested for induction."""
    model = add_follower_logits(blank_model(heads=10, layers=2))
    first_layer, second_layer = model.attention_layers()
    HeadBuilder(first_layer, 0).attend_offsets(1).write(PREVIOUS, 1.0)
    HeadBuilder(second_layer, 0).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, 2.0)
    generator = torch.Generator().manual_seed(seed)
    for layer in (first_layer, second_layer):
        for head in list(layer.heads)[1:]:
            for weight, size in ((head.W_Q, 1.0), (head.W_K, 1.0), (head.W_V, 0.1), (head.W_O, 0.001)):
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    evidence = RoleEvidence("induction", "", "value-weighted", 0.9, 0.0, (0.8, 1.0), 0.9, 0.001, 1.0, "repeats", 100)
    heads = [address for hook_point in model.gathered_hook_points() for address in hook_point.head_addresses]
    tried = causal_test(
        model,
        heads,
        [[evidence]] * len(heads),
        (),
        list(tokenized_documents(model)),
        seed,
        lambda stage, done, of: None,
    )
    assert all(head_evidence[0].causal_p is not None for head_evidence in tried)
    assert [
        str(head)
        for head, head_evidence in zip(heads, tried, strict=True)
        if head_evidence[0].evidence_level == "causal"
    ] == ["0.0", "1.0"]
    assert sum((head_evidence[0].control_cost or 0) > 0.05 for head_evidence in tried) > 5, (
        "they do change what is answered"
    )
