"""Causal tests of roles on prompts: prompts and lists with the same answers, and the heads that are causal there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import as_head_outputs
from headwise.analysis.metrics import name_suppression
from headwise.analysis.metrics.name_movers import NAMES, NameSentencePair, make_name_prompts, make_name_sentence_pairs
from headwise.analysis.metrics.prompt_metric import HeadResponses, run_prompts
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.build_causal_trials import LIST_LENGTH, TrialPrompt
from headwise.analysis.roles.causal_test import causal_test, loss_increase_by_head
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_corpus_shards import profile_shards
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_trials import _comma_tokens, _repeated_list, name_lead_trial, prompt_trial
from headwise.analysis.roles.roles import LEAD, SUPPRESSION_PROBE, RoleEvidence
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from tests.analysis.constructed_heads import OUT, PREVIOUS, HeadBuilder, V, decoder, documents
from tests.analysis.constructed_word_models import BETA, P, WordModel, scores_to_offset, scores_to_position
from tests.analysis.test_prompts import name_mover_model
from tests.parity.real import smollm2_folder


def make_evidence(role: str, probe: str, family: int = 8) -> RoleEvidence:
    corpus_label = "sentences about two people" if probe == LEAD else ""
    return RoleEvidence(
        role,
        "",
        "value-weighted",
        1.0,
        0.0,
        (0.9, 1.0),
        1.0,
        0.001,
        1.0,
        probe,
        64,
        corpus_label=corpus_label,
        family_size=family,
    )


@torch.no_grad()
def run_causal_test(
    model: Transformer, evidence_by_head: dict[str, RoleEvidence], texts: TokenizedCorpus | None = None
) -> dict[str, RoleEvidence]:
    """Run the causal test for some heads with one role each."""
    addresses = model.spec.head_addresses
    head_evidence = [
        [evidence_by_head[str(address)]] if str(address) in evidence_by_head else [] for address in addresses
    ]
    results = causal_test(model, addresses, head_evidence, [], list(texts or ()), 1, lambda stage, done, of: None)
    return {str(address): tested[0] for address, tested in zip(addresses, results, strict=True) if tested}


def name_mover_model_with_lists() -> WordModel:
    """The model of the metric tests, extended to continue lists: the word after an earlier occurrence is predicted again."""
    built = name_mover_model(parts=4, heads=6)
    eye, previous_part = torch.eye(built.V), 2
    built.set_head("0.4", position_scores=scores_to_offset(1), output_map=eye, output_part=previous_part)
    built.set_head("1.4", token_scores=20 * BETA * eye, key_part=previous_part, output_map=6 * eye, output_part=3)
    return built


@torch.no_grad()
@pytest.mark.parametrize(("role", "fraction"), [("name mover", 0.5), ("name suppression", 1.0)])
def test_lead_trial_sentences_lists_and_single_names_ask_for_the_same_lead(role: str, fraction: float) -> None:
    built = name_mover_model_with_lists()
    trial = name_lead_trial(built.model, role, seed=5)
    assert len(trial.cases) == len(trial.controls) == len(trial.single_name_prompts) == 32
    assert trial.single_name_fraction == fraction
    names = set(built.ids(NAMES))
    for case, control, single in zip(trial.cases, trial.controls, trial.single_name_prompts, strict=True):
        (answer,), (other,) = case.targets.values(), case.rivals.values()
        for row in (control, single):
            assert [*row.targets.values()] == [answer]
            assert [*row.rivals.values()] == [other]
        assert case.truncated_sample.ids.count(answer) == 1
        assert case.truncated_sample.ids.count(other) == 2, "said again, so it is not due"
        assert set(single.truncated_sample.ids) & names == {answer}, "one name alone"
        ids = control.truncated_sample.ids
        assert set(ids) < names
        first = ids.index(answer)
        assert first > 0, "nobody can foresee the first"
        assert ids[LIST_LENGTH:] == ids[:first], "said again up to the answer"
        assert not {*ids} & ({*case.truncated_sample.ids} - {answer}), "nobody else of the sentence is in the list"
    due_first = [
        case.truncated_sample.ids.index(*case.targets.values()) < case.truncated_sample.ids.index(*case.rivals.values())
        for case in trial.cases
    ]
    assert 8 < sum(due_first) < 24, "either name is due"
    assert trial.cases != name_lead_trial(built.model, role, seed=6).cases


@torch.no_grad()
def test_ablation_loss_rivals_measure_the_lead() -> None:
    """The loss of a row is the decrease of log p(answer) − log p(other name) in the patched model."""
    model = name_mover_model_with_lists().model
    rows = name_lead_trial(model, "name mover", seed=5).cases[:4]
    assert len({len(row.truncated_sample.ids) for row in rows}) == 1
    head = Address.parse("2.0")
    lost, clean = loss_increase_by_head(model, [head], rows)

    def lead(row: TrialPrompt) -> float:
        logs = model(torch.tensor([row.truncated_sample.ids]))[0, -1].log_softmax(-1)
        return float(
            sum(logs[token] for token in row.targets.values()) - sum(logs[token] for token in row.rivals.values())
        )

    for number, row in enumerate(rows):
        assert clean[number] == pytest.approx(-lead(row), abs=1e-4)
        before = lead(row)
        with hw.ablated(
            model,
            "2.0",
            "resample",
            other=as_head_outputs(model, torch.tensor([rows[number - 1].truncated_sample.ids])),
        ):
            assert lost[number, 0] == pytest.approx(before - lead(row), abs=1e-4)


def test_list_prompt_puts_commas_between_words() -> None:
    """If commas are tokens of their own: SmolLM2 does not continue names without commas."""
    words = Tokenizer.load(smollm2_folder())
    (prompt, *_), rng = make_name_prompts(words, seed=3), np.random.default_rng(0)
    comma, answer = words.encode("Then,", add_special_tokens=False)[-1], prompt.targets[0].answer
    ids = _repeated_list(prompt, [11, 12, 13, answer], LIST_LENGTH, _comma_tokens(words), rng)
    assert set(ids[1::2]) == {comma}
    assert ids[-1] == answer
    assert sorted(ids[:8:2]) == sorted([11, 12, 13, answer])
    assert ids[8::2] == ids[:8:2][: len(ids[8::2])]
    assert _comma_tokens(word_tokenizer(["Then"])) == ()


def test_causal_test_name_mover_is_judged_by_the_lead() -> None:
    """The head that continues lists is needed for lists and not for names, so it is not causal as a name mover. A name mover
    increases a single name as much as the answer among two names."""
    heads = {address: make_evidence("name mover", LEAD) for address in ("2.0", "2.2", "1.4")}
    results = run_causal_test(name_mover_model_with_lists().model, heads)
    mover, (effect,) = results["2.0"], results["2.0"].effects
    assert mover.evidence_level == "causal"
    assert effect.control_cost is not None
    assert effect.single_name_cost is not None
    assert effect.cost > 1 > effect.control_cost
    assert effect.single_name_cost > 0.5 * effect.cost
    assert results["2.2"].evidence_level == "value-weighted", "it writes nothing"
    assert results["2.2"].cost == pytest.approx(0, abs=1e-6)
    assert results["1.4"].evidence_level == "value-weighted"
    assert results["1.4"].control_cost is not None
    assert results["1.4"].control_cost > 1


def people_with_a_suppressor() -> WordModel:
    """A model that selects between two names by suppression. 2.0 attends to all names and writes them, whichever is the
    answer. 2.1 attends to the repeated name and writes against it. 2.2 attends there too and slightly writes for it. 2.3
    writes against the answer."""
    built = name_mover_model_with_lists()
    eye, avoided, out = torch.eye(built.V), 1, 3
    with torch.no_grad():
        built.model.heads[Address.parse("2.0")].W_Q[built.part_slice(avoided)] = 0
        built.model.heads[Address.parse("2.3")].W_O[:, built.part_slice(out)] = -0.1 * eye
    for address, size in (("2.1", -8.0), ("2.2", 0.1)):
        head = built.model.heads[Address.parse(address)]
        with torch.no_grad():
            for letter in ("W_Q", "W_K", "W_V", "W_O"):
                getattr(head, letter).zero_()
        rest = scores_to_position(0, 20 * BETA)
        built.set_head(
            address,
            token_scores=200 * BETA * eye,
            query_part=avoided,
            position_scores=rest,
            output_map=size * eye,
            output_part=out,
        )
    return built


def test_causal_test_head_that_lifts_any_name_is_no_name_mover() -> None:
    """The loss of the answer depends on the head, among two names and for a single name. The lead over the other name does
    not."""
    model = people_with_a_suppressor().model
    results = run_causal_test(
        model, {"2.0": make_evidence("name mover", LEAD), "2.1": make_evidence("name suppression", LEAD)}
    )
    lifter, suppressor = results["2.0"], results["2.1"]
    with torch.no_grad():
        trial = name_lead_trial(model, "name mover", seed=1)
        surprise, _ = loss_increase_by_head(
            model, [Address.parse("2.0")], [row._replace(rivals={}) for row in trial.cases]
        )
    assert surprise.mean() > 0.5, "judged by the name due alone it would be causal"
    (effect,) = lifter.effects
    assert effect.single_name_cost is not None
    assert effect.single_name_cost > 0.5
    assert effect.cost < 0.1 * effect.single_name_cost
    assert lifter.evidence_level == "value-weighted"
    (effect,) = suppressor.effects
    assert suppressor.evidence_label == "causal on sentences about two people"
    assert effect.single_name_cost is not None
    assert effect.cost > 1 > 0.2 > abs(effect.single_name_cost), "a single name is not suppressed"


def test_name_suppression_built_heads_only_the_one_that_writes_against_the_wrong_name() -> None:
    built = people_with_a_suppressor()
    profiled = profile(built.model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    assert [str(address) for address in profiled.heads_by_role()["name suppression"]] == ["2.1"]
    at = [str(address) for address in profiled.addresses].index
    score, baseline = (profiled.metric(name) for name in ("name suppression", "name suppression baseline"))
    assert (score[at("2.1")], baseline[at("2.1")]) == (pytest.approx(1, abs=1e-4), pytest.approx(0, abs=1e-4))
    assert (score[at("2.2")], baseline[at("2.2")]) == (pytest.approx(0, abs=1e-4), pytest.approx(1, abs=1e-4)), (
        "writes for it"
    )
    assert score[at("2.3")] < 0.1, "it looks at the name due"
    assert "attends to the incorrect name and suppresses it" in str(profiled.summary("2.1"))


def test_name_suppression_head_that_suppresses_the_last_name_scores_its_baseline() -> None:
    """The head attends to the last name: the wrong one among two names, and the answer in a sentence with a single name."""
    built = people_with_a_suppressor()
    V, eye = built.V, torch.eye(built.V)
    names = torch.zeros(V, 1)
    names[built.ids(NAMES)] = 1
    later = BETA * torch.arange(P)[None].expand(P, P)  # later positions have higher scores
    built.set_head(
        "0.1",
        token_scores=50 * BETA * torch.ones(V, 1) @ names.T,
        position_scores=later,
        output_map=-0.01 * eye,
        output_part=3,
    )
    profiled = profile(built.model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    at = [str(address) for address in profiled.addresses].index("0.1")
    assert profiled.metric("name suppression")[at] > 0.9
    assert profiled.metric("name suppression baseline")[at] > 0.9
    assert "name suppression" not in {evidence.role for evidence in profiled["0.1"].roles}


def test_name_suppression_shuffled_gold_gives_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other pair the sentences are swapped, so that the gold answer is the wrong name."""

    def shuffled(*args: Any) -> list[NameSentencePair]:
        pairs = []
        for index, (sentences, singles) in enumerate(make_name_sentence_pairs(*args)):
            first, second = sentences
            swapped = first._replace(ids=second.ids), second._replace(ids=first.ids)
            pairs.append(NameSentencePair(swapped if index % 4 < 2 else sentences, singles))
        return pairs

    def always_right(*args: Any) -> HeadResponses:
        responses = run_prompts(*args)
        return responses._replace(correct=np.ones_like(responses.correct))

    monkeypatch.setattr(name_suppression, "make_name_sentence_pairs", shuffled)
    monkeypatch.setattr(name_suppression, "run_prompts", always_right)
    profiled = profile(
        people_with_a_suppressor().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False
    )
    at = [str(address) for address in profiled.addresses].index("2.1")
    assert profiled.metric("name suppression")[at] == pytest.approx(0.5, abs=0.05)
    assert "name suppression" not in profiled.heads_by_role()


def test_causal_test_copy_suppression_head_is_causal() -> None:
    """An induction head, and a head that writes against its output at half the strength: without it the copy is more
    probable. Without the induction head the answers lose, so it does not suppress copies."""
    model = decoder()
    _, second_layer = model.attention_layers()
    HeadBuilder(second_layer, 4).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, -1.0)
    heads = {address: make_evidence("copy suppression", SUPPRESSION_PROBE) for address in ("1.4", "1.0")}
    results = run_causal_test(model, heads, TokenizedCorpus.of(model, documents(40)))
    assert results["1.4"].evidence_level == "causal"
    assert results["1.4"].cost is not None
    assert results["1.4"].cost > 0.5
    assert results["1.0"].evidence_level == "value-weighted"
    assert results["1.0"].cost is not None
    assert results["1.0"].cost < -0.5


@torch.no_grad()
def causal_test_induction_head(model: Transformer, extra: list[RoleEvidence]) -> list[RoleEvidence]:
    """Run the causal test for the induction head, with additional roles of the same head."""
    texts = list(TokenizedCorpus.of(model, documents(40)))
    address = model.spec.head_addresses.index(Address.parse("1.0"))
    head_evidence: list[list[RoleEvidence]] = [[] for _ in model.spec.head_addresses]
    head_evidence[address] = [make_evidence("induction", "repeats", family=0), *extra]
    return causal_test(model, model.spec.head_addresses, head_evidence, [], texts, 1, lambda stage, done, of: None)[
        address
    ]


def test_causal_test_prompt_role_does_not_change_first_role() -> None:
    model = decoder()
    _, second_layer = model.attention_layers()
    HeadBuilder(second_layer, 4).attend_tokens(torch.eye(V), key_part=PREVIOUS).attend_first().write(OUT, -1.0)
    (alone,) = causal_test_induction_head(model, [])
    first, second = causal_test_induction_head(model, [make_evidence("copy suppression", SUPPRESSION_PROBE)])
    assert alone.evidence_level == "causal"
    assert first == alone, "the same verdict and the same p"
    assert (second.role, second.evidence_level, second.causal_p) == ("copy suppression", "value-weighted", 1.0)


def test_causal_test_head_with_two_roles_is_counted_once() -> None:
    """A head is not compared with itself in its layer: an additional role does not change the result of the first."""
    model = decoder()
    (alone,) = causal_test_induction_head(model, [])
    first, second = causal_test_induction_head(model, [make_evidence("retrieval", "repeats")])
    assert first == alone
    assert (second.evidence_level, second.effect, second.cost) == ("causal", first.effect, first.cost)


def test_prompt_trial_without_prompts_is_empty() -> None:
    built = name_mover_model()
    assert prompt_trial(built.model, "query focus", seed=0).cases == ()
    built.model.tokenizer = byte_tokenizer()
    assert name_lead_trial(built.model, "name mover", seed=0).cases == ()


def test_profile_prompt_examples_equal_with_shards(tmp_path: Path) -> None:
    model, corpus = name_mover_model_with_lists().model, tmp_path / "text.txt"
    corpus.write_text("Then we met.\n\n" * 8)
    profiled = profile(model, corpus, relations=False, prompts=True)
    merged = profile_shards(model, corpus, tmp_path / "out", relations=False, prompts=True, shard_characters=60)
    assert len(list((tmp_path / "out").glob("shard-*"))) > 1
    assert merged.heads_by_role() == profiled.heads_by_role()
    assert merged["2.0"].roles == profiled["2.0"].roles
    assert merged["2.0"].examples_by_role["name mover"] == profiled["2.0"].examples_by_role["name mover"]
    assert Profile.load(tmp_path / "out" / "profile.npz")["2.0"].examples_by_role == merged["2.0"].examples_by_role
    with pytest.raises(HeadwiseError, match="has the shards of a profile with other"):
        profile_shards(model, corpus, tmp_path / "out", relations=False, shard_characters=60)
    head = profiled["2.0"]
    name_mover = next(role_evidence for role_evidence in head.roles if role_evidence.role == "name mover")
    assert name_mover.evidence_level == "causal"
    examples = head.examples_by_role["name mover"]
    assert len(examples) == 8
    assert all(case.hit and case.token == "to" and case.expected == case.attended in NAMES for case in examples)
    assert all(case.text.endswith("[to]") for case in examples)
