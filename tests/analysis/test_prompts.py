"""Roles on prompts: hand-built heads match their closed forms."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.copy_suppression import CUE, LENGTH, CopySuppressionMetric, make_repeat_prompts
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.name_movers import NAMES, SINGLES, TEMPLATES, NameMoverMetric, make_name_prompts
from headwise.analysis.metrics.prompt_metric import ExpectedToken, PromptWithTargets, run_prompts, single_token_of_word
from headwise.analysis.metrics.query_focused_retrieval import FACTS, QueryFocusMetric, make_query_prompts
from headwise.analysis.metrics.successor import CLASSES, CYCLIC, SuccessorMetric, list_prompt, single_token_words
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.recording import batching
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, word_tokenizer
from headwise.ui.print_profile import show_profile
from tests.analysis.constructed_heads import OUT, PREVIOUS, HeadBuilder, blank_model, documents
from tests.analysis.constructed_heads import V as BUILT
from tests.analysis.constructed_word_models import BETA, P, WordModel, scores_to_offset, scores_to_position
from tests.contract.layers import make_model

TEMPLATE_WORDS = sorted(
    {
        word
        for t in (*TEMPLATES, *SINGLES)
        for word in t.replace("{", " {").replace("}", "} ").split()
        if "{" not in word
    }
)


def run_metric(model: Transformer, metric: TaskMetric) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return score, baseline and value-weighted score of every head, and the counts of every sample."""
    accumulator = Accumulator(len(model.spec.head_addresses))
    with torch.no_grad():
        assert metric.run(model, accumulator).skip_reason == ""
    score, baseline, value_weighted = (accumulator.mean(name) for name in metric.names)
    return score, baseline, value_weighted, accumulator.bucket_sums_and_counts(metric.names[0])[1][:, 0]


def name_mover_model(heads: int = 4, parts: int = 3) -> WordModel:
    """Three layers: the first finds repeated names, the second moves the wrong name to every row, the third attends to the
    remaining names."""
    built = WordModel((*TEMPLATE_WORDS, *NAMES), heads=heads, layers=3, parts=parts)
    V, eye = built.V, torch.eye(built.V)
    names = torch.zeros(V, 1)
    names[built.ids(NAMES)] = 1
    repeated_part, avoided_part, output_part = 0, 1, parts - 1
    built.set_head(
        "0.0",
        position_scores=scores_to_position(0, BETA / 2) - 3 * BETA * torch.eye(P),
        token_scores=BETA * eye,
        output_map=eye,
        output_part=repeated_part,
    )
    any_name = BETA * torch.ones(V, 1) @ names.T  # from any word to names
    built.set_head(
        "1.0",
        token_scores=20 * any_name,
        key_part=repeated_part,
        value_part=repeated_part,
        output_map=eye * names,
        output_part=avoided_part,
    )
    built.set_head("2.0", token_scores=20 * any_name, output_map=4 * eye, output_part=output_part)
    with torch.no_grad():
        built.model.heads[Address.parse("2.0")].W_Q[built.part_slice(avoided_part), :V] = -200 * BETA * eye
        for index in (1, 2, 3):
            head, same = built.model.heads[Address.parse(f"2.{index}")], built.model.heads[Address.parse("2.0")]
            for weight_name in ("W_Q", "W_K", "W_V"):
                getattr(head, weight_name).copy_(getattr(same, weight_name))
        # attends to the correct name and writes against it
        built.model.heads[Address.parse("2.1")].W_O[:, built.part_slice(output_part)] = -eye
    return built


def test_name_mover_constructed_head_scores_one() -> None:
    score, baseline, value_weighted, counts = run_metric(name_mover_model().model, NameMoverMetric())
    names = [str(address) for address in name_mover_model().model.spec.head_addresses]
    assert (score[names.index("2.0")], value_weighted[names.index("2.0")]) == (pytest.approx(1, abs=1e-5),) * 2
    assert baseline[names.index("2.0")] == pytest.approx(0, abs=1e-5)
    assert score[names.index("2.1")] == pytest.approx(0, abs=1e-5), "it writes against the name"
    assert score[names.index("2.2")] == 0, "it writes nothing"
    assert set(counts.tolist()) == {0.0, 2.0}
    assert (counts > 0).sum() == 64, "the model gets all of them right"
    profiled = profile(name_mover_model().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    assert [str(address) for address in profiled.heads_by_role()["name mover"]] == ["2.0"]
    name_mover = next(role_evidence for role_evidence in profiled["2.0"].roles if role_evidence.role == "name mover")
    assert (name_mover.role, name_mover.evidence_level, name_mover.corpus_label) == (
        "name mover",
        "value-weighted",
        "sentences about two people",
    )
    assert name_mover.family_size > 0


@pytest.mark.parametrize("beta", [2.0, 5.0])
def test_name_mover_first_name_head_scores_baseline(beta: float) -> None:
    """Together with the circuit that makes the model correct. The weight is e^β / (e^β + n − 1), both where the first name is
    the answer, which is every other time, and where it is not."""
    built = name_mover_model()
    eye = torch.eye(built.V)
    built.set_head("0.1", position_scores=scores_to_position(1, beta), output_map=1e-3 * eye, output_part=2)
    built.set_head("0.2", output_map=1e-3 * eye, output_part=2)  # uniform attention: the repeated name is written most
    built.set_head("0.3", output_map=-1e-3 * eye, output_part=2)
    lengths = np.array([len(prompt.ids) for prompt in make_name_prompts(tokenizer_of(built.model))[::2]])
    weights = np.exp(beta) / (np.exp(beta) + lengths - 1)
    weight = weights.mean()
    score, baseline, value_weighted, _ = run_metric(built.model, NameMoverMetric())
    assert score[1] == pytest.approx(weight / 2, abs=1e-6)
    # weight on the answer if it is not the first name, and is written less
    other_weight = np.mean((1 - weights) / (lengths - 1))
    assert baseline[1] == pytest.approx((weight + other_weight) / 2, abs=1e-6)
    assert value_weighted[1] == pytest.approx(weight / 2, abs=1e-6)
    assert (score[2], baseline[2]) == (0, pytest.approx(np.mean(2 / lengths), abs=1e-6))
    assert (score[3], baseline[3]) == (pytest.approx(np.mean(1 / lengths), abs=1e-6), 0)


def test_make_name_prompts_pairs_differ_in_one_name() -> None:
    tokenizer = tokenizer_of(name_mover_model().model)
    prompts = make_name_prompts(tokenizer)
    for first, second in zip(prompts[::2], prompts[1::2], strict=True):
        differ = [i for i, (a, b) in enumerate(zip(first.ids, second.ids, strict=True)) if a != b]
        assert len(differ) == 1, "who is named again"
        (target, twin), (other_target, other_twin) = first.targets, second.targets
        assert (target.position, target.answer) == (other_twin.position, other_twin.answer), (
            "the baseline is of the same name"
        )
        assert (twin.position, twin.answer) == (other_target.position, other_target.answer)
        assert first.ids[differ[0]] == twin.answer
        assert first.ids[target.position] == target.answer
        assert first.ids.count(target.answer) == 1
    assert prompts == make_name_prompts(tokenizer)
    assert prompts != make_name_prompts(tokenizer, seed=1)


LIST_WORDS = [word for words in CLASSES for word in words]


def successor_map(built: WordModel) -> torch.Tensor:
    """Map each word, with and without a comma, to its successor: (V, V)."""
    mapping, index_of = torch.zeros(built.V, built.V), list(built.words).index
    for word_class in CLASSES:
        for word, successor in zip(word_class, (*word_class[1:], word_class[0]), strict=True):
            mapping[index_of(word), index_of(successor)] = mapping[index_of(f"{word},"), index_of(successor)] = 1
    return mapping


def successor_model(heads: int = 5) -> WordModel:
    built = WordModel(("The", *dict.fromkeys((*LIST_WORDS, *(f"{word}," for word in LIST_WORDS)))), heads=heads)
    built.set_head("0.0", position_scores=scores_to_offset(0), output_map=successor_map(built))
    return built


def test_successor_metric_constructed_head_scores_one() -> None:
    built = successor_model()
    V, members = built.V, single_token_words(tokenizer_of(built.model))
    assert len(members) == sum(
        len(word_class) if word_class in CYCLIC else len(word_class) - 3 for word_class in CLASSES
    )
    friday = torch.zeros(V, V).index_fill_(1, torch.tensor(built.ids(["Friday"])), 1e-3)
    built.set_head("0.1", position_scores=scores_to_offset(0), output_map=1e-3 * torch.eye(V))  # copies the word
    built.set_head("0.2", position_scores=scores_to_offset(0), output_map=friday)  # always writes the same word
    # would write the successor, but never attends to the word
    built.set_head("0.3", position_scores=scores_to_position(0), output_map=1e-3 * successor_map(built))
    built.set_head("0.4", position_scores=scores_to_offset(0), output_map=-1e-3 * successor_map(built))
    score, baseline, value_weighted, counts = run_metric(built.model, SuccessorMetric())
    others = np.array([len(member.others) for member in members])
    assert counts.sum() == len(members), "the model goes on with every list"
    assert score[0] == value_weighted[0] == 1
    assert baseline[0] == pytest.approx(np.mean(1 / others))
    assert (score[1], baseline[1]) == (0, 0)
    # The head is right on Thursday, copies on Friday, and is wrong on five days. In other classes all words are tied.
    elsewhere = np.sum(1 / (others[others != 6] + 1))
    assert score[2] == pytest.approx(1 / len(members))
    assert baseline[2] == pytest.approx((6 / 6 + elsewhere) / len(members))
    assert (score[3], value_weighted[3]) == (0, 0)
    assert score[4] == 0
    profiled = profile(built.model, ["The one two three"] * 4, relations=False, prompts=True, causal=False)
    levels = {
        str(address): member.evidence_level
        for address in profiled.addresses
        for member in profiled[address].roles
        if member.role == "successor"
    }
    assert levels == {"0.0": "value-weighted"}


def test_profile_prompts_do_not_change_other_roles(tmp_path: Path) -> None:
    """The scores and their order are equal. A profile with prompts can be saved, loaded and merged."""
    texts = ["The one two three four five six", "The a b c d", "The Monday Tuesday Friday"]
    built = successor_model(2)
    built.set_head("0.1", position_scores=scores_to_offset(1), output_map=1e-3 * torch.eye(built.V))
    plain = profile(built.model, texts * 4, relations=False)
    prompted = profile(built.model, texts * 4, relations=False, prompts=True)
    assert [
        [role_evidence for role_evidence in head_evidence if not role_evidence.family_size]
        for head_evidence in prompted.evidence
    ] == [list(head_evidence) for head_evidence in plain.evidence]
    assert plain.family_size == prompted.family_size
    assert any(role_evidence.family_size for head_evidence in prompted.evidence for role_evidence in head_evidence)
    prompted.save(tmp_path / "more.npz")
    loaded = Profile.load(tmp_path / "more.npz")
    assert loaded.evidence == prompted.evidence
    merged = prompted.merge(profile(built.model, ["The ten nine"], relations=False, prompts=True))
    assert merged.heads_by_role()["successor"] == prompted.heads_by_role()["successor"]
    np.testing.assert_array_equal(merged.metric("successor"), prompted.metric("successor"))


def test_profile_prompts_weak_model_reports_reason() -> None:
    built = successor_model(1)
    with torch.no_grad():
        built.model.heads[Address.parse("0.0")].W_O.zero_()
    profiled = profile(built.model, ["The one two three"] * 4, relations=False, prompts=True, causal=False)
    assert "too weak for this task: it continues 0 of 89 lists" in profiled.metadata["skipped"]["successor"]
    assert "single tokens" in profiled.metadata["skipped"]["name mover"]
    assert np.isnan(profiled.metric("successor")).all()
    console = Console(file=StringIO(), width=200)
    show_profile(profiled, {"0.0"}, console)
    assert "the model is too weak for this task" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert not {role.name for role in PROMPT_ROLES} & {*profiled.heads_by_role()}


def test_profile_prompts_short_context_uses_prompts_that_fit() -> None:
    """Lists of four words fit into ten positions, and so do the lists of the causal test. Sentences about people do not."""
    num_positions = 10
    built = WordModel(
        ("The", *dict.fromkeys((*LIST_WORDS, *(f"{word}," for word in LIST_WORDS)))), heads=2, positions=num_positions
    )
    built.set_head(
        "0.0", position_scores=scores_to_offset(0, num_positions=num_positions), output_map=successor_map(built)
    )
    profiled = profile(built.model, ["The one two three"] * 4, relations=False, prompts=True)
    assert {str(address) for address in profiled.heads_by_role()["successor"]} == {"0.0"}
    assert (
        next(role_evidence for role_evidence in profiled["0.0"].roles if role_evidence.role == "successor").cost
        is not None
    )
    model = WordModel((*TEMPLATE_WORDS, *NAMES), heads=1, positions=num_positions).model
    profiled = profile(model, ["Then we met. "] * 4, relations=False, prompts=True)
    assert "10 positions" in profiled.metadata["skipped"]["name mover"]


def test_list_prompt_target_position_is_last_member() -> None:
    """The comma can be a token of its own or part of the word's token."""
    bpe = bpe_tokenizer([f"The {word}," for word in LIST_WORDS] * 2, vocab_size=800)
    for tokenizer, back_from_the_end in ((bpe, 2), (tokenizer_of(successor_model().model), 1)):
        members = single_token_words(tokenizer)
        assert len(members) > 50
        for member in members:
            prompt = list_prompt(tokenizer, member)
            assert prompt.targets[0].position == len(prompt.ids) - back_from_the_end


def test_profile_prompts_with_shuffled_control_raises() -> None:
    with pytest.raises(HeadwiseError, match="not supported with control='shuffled'"):
        profile(successor_model(1).model, ["The one two"], prompts=True, control="shuffled")


def test_next_token_skips_words_of_several_tokens() -> None:
    model = Transformer(ModelSpec(vocab=257, context=64, layers=1, attention=AttentionSpec(width=12, heads=2)))
    model.tokenizer = byte_tokenizer()
    assert single_token_of_word(tokenizer_of(model), "Then", "Mary") is None
    with pytest.raises(HeadwiseError, match="only 0 of 24 names are single tokens"):
        make_name_prompts(tokenizer_of(model))
    assert single_token_words(tokenizer_of(model)) == []


def test_copy_suppression_constructed_head_scores_one() -> None:
    """Together with an induction head that makes the model predict the copy; a head that attends to the same positions in
    every text; and a head that attends there and writes for every other token."""
    model, texts = blank_model(heads=6, layers=2), documents(120)
    first_layer, second_layer = model.attention_layers()
    HeadBuilder(first_layer, 0).attend_offsets(1).write(PREVIOUS, 1.0)
    HeadBuilder(first_layer, 1).attend_first(1.0).write()
    HeadBuilder(second_layer, 0).attend_tokens(torch.eye(BUILT), key_part=PREVIOUS).attend_first().write(OUT, 2.0)
    HeadBuilder(second_layer, 4).attend_tokens(torch.eye(BUILT), key_part=PREVIOUS).attend_first().write(OUT, -0.5)
    HeadBuilder(second_layer, 1).attend_offsets(LENGTH - 1).write(OUT, -0.1)
    half = torch.eye(BUILT) * (torch.arange(BUILT) % 2 == 0)  # writes for every other token, against the others
    HeadBuilder(second_layer, 5).attend_tokens(torch.eye(BUILT), key_part=PREVIOUS).attend_first().write(OUT, 0.1)
    with torch.no_grad():
        second_layer.heads[5].W_O[:, OUT : OUT + BUILT] = 0.1 * (2 * half - torch.eye(BUILT))
    prompts = make_repeat_prompts(model, texts)
    score, baseline, value_weighted, counts = run_metric(model, CopySuppressionMetric(texts))
    at = [str(address) for address in model.spec.head_addresses].index
    assert counts.sum() == (LENGTH - CUE) * len(prompts) / 2, "the model says all of it again"
    assert (score[at("1.4")], value_weighted[at("1.4")]) == (pytest.approx(1, abs=1e-5),) * 2
    assert baseline[at("1.4")] == pytest.approx(0, abs=1e-5)
    assert (score[at("1.0")], baseline[at("1.0")]) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    assert score[at("1.1")] == pytest.approx(baseline[at("1.1")], abs=1e-5), "it looks there whatever is said"
    assert score[at("1.1")] == pytest.approx(1, abs=1e-5)
    targets = [target for prompt in prompts[::2] for target in prompt.targets]
    fraction = np.mean([target.answer % 2 for target in targets])
    assert score[at("1.5")] == pytest.approx(fraction, abs=1e-5), "against every other token"
    assert baseline[at("1.5")] == pytest.approx(1 - fraction, abs=1e-5)
    assert score[at("0.1")] == pytest.approx(0, abs=1e-5), "a sink"


def test_make_repeat_prompts_pairs_share_targets() -> None:
    model, texts = blank_model(heads=1, layers=1), documents(120)
    prompts = make_repeat_prompts(model, texts)
    for repeated, control in zip(prompts[::2], prompts[1::2], strict=True):
        assert [(target.row, target.position, target.answer) for target in repeated.targets] == [
            (target.row, target.position, target.answer) for target in control.targets
        ]
        for target in repeated.targets:
            assert repeated.ids[target.position] == control.ids[target.position] == target.answer
            assert target.answer not in control.ids[LENGTH:], "it is not foretold there"
            assert target.answer not in target.distractors
            assert target.row < len(repeated.ids)
        assert all(repeated.ids[target.row + 1] == target.answer for target in repeated.targets[:-1])


FACT_WORDS = sorted({word for pair in FACTS for text in pair for word in text.split()})


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_query_focus_constructed_head_finds_document(kind: str) -> None:
    """The other rows attend to the first token. For a head with uniform attention every token has the same weight."""
    built = WordModel(FACT_WORDS, heads=3, kind=kind)
    token_scores = torch.zeros(built.V, built.V)
    common = {word for text, _ in FACTS for word in text.split() if sum(word in t.split() for t, _ in FACTS) > 1}
    common |= {text.split()[0] for text, _ in FACTS}  # it may be the first token, which is never a target
    for text, question in FACTS:
        for word in {*text.split()} - common:
            token_scores[built.ids([question.split()[-1]])[0], built.ids([word])[0]] = BETA
    built.set_head(
        "0.0", token_scores=token_scores, position_scores=scores_to_position(0, BETA / 2), output_map=torch.eye(built.V)
    )
    built.set_head("0.1", output_map=torch.eye(built.V))
    built.set_head("0.2", position_scores=scores_to_position(0), output_map=torch.eye(built.V))
    score, baseline, value_weighted, counts = run_metric(built.model, QueryFocusMetric())
    pairs = make_query_prompts(tokenizer_of(built.model))
    rows = [[i for i, asks in enumerate(query.is_question) if asks] for query, _ in pairs]
    assert (counts > 0).sum() == len(pairs)
    assert [len(query_rows) for query_rows in rows] == counts[: len(rows)].tolist()
    distinctive, even = [], []
    for (query, _), query_rows in zip(pairs, rows, strict=True):
        gold = [i for i, inside in enumerate(query.gold) if inside and i > 0]
        distinctive.append(any(built.words[query.ids[i]] not in common for i in gold))
        even += [len(gold) / (row + 1 if kind == "decoder" else len(query.ids)) for row in query_rows]
    assert all(distinctive)
    assert score[0] == pytest.approx(len(pairs) / counts.sum(), abs=1e-5)
    assert baseline[0] == pytest.approx(0, abs=1e-5)
    assert value_weighted[0] == pytest.approx(score[0], abs=1e-5)
    assert score[1] == pytest.approx(np.mean(even), abs=1e-5)
    assert (score[2], baseline[2]) == (pytest.approx(0, abs=1e-5),) * 2


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_query_focus_examples_do_not_depend_on_padding_side(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, pad_ids = WordModel(FACT_WORDS, heads=2, kind=kind), batching._pad_ids
    built.set_head("0.0", position_scores=scores_to_offset(3, 2.0), output_map=torch.eye(built.V))
    arrays = []
    for side in ("right", "left"):
        monkeypatch.setattr(batching, "_pad_ids", lambda rows, _="", side=side: pad_ids(rows, side))
        with torch.no_grad():
            result = QueryFocusMetric().run(built.model, Accumulator(len(built.model.spec.head_addresses)))
        assert result.examples is not None
        arrays.append(result.examples.arrays)
    assert arrays[0]["recorded"].all()
    for name, array in arrays[0].items():
        np.testing.assert_allclose(arrays[1][name], array, atol=1e-6, err_msg=name)


def test_facts_questions_share_no_word_with_documents() -> None:
    small = {
        "the",
        "a",
        "was",
        "in",
        "to",
        "at",
        "is",
        "did",
        "of",
        "his",
        "her",
        "my",
        "its",
        "two",
        "over",
        "him",
        "from",
    }
    for text, question in FACTS:
        words, asks = ({word.strip(".?").lower() for word in sentence.split()} for sentence in (text, question))
        assert not (words & asks) - small, (text, question)


@torch.no_grad()
def test_run_prompts_equals_dense_maps_and_logits() -> None:
    """A grouped-query rotary model with LayerNorm: weights equal those of its maps and direct effects those of its logits, by
    head."""
    attention = AttentionSpec(width=20, heads=4, kv_heads=2, head_dim=6, rotary=Rotary(), bias=True)
    model = make_model(ModelSpec(vocab=23, context=16, layers=2, attention=attention, positions="none", norm="layer"))
    model.tokenizer = word_tokenizer([f"w{i}" for i in range(21)])
    rng = np.random.default_rng(0)
    prompts = [
        PromptWithTargets(
            tuple(rng.integers(0, 21, n).tolist()),
            (ExpectedToken(n - 2, 3, 5, (7, 2)), ExpectedToken(n - 1, 1, 4, (6, 9))),
        )
        for n in (7, 7, 9, 7)
    ]
    responses, residual = run_prompts(model, prompts, model.residual_stream()), model.residual_stream()
    for index, prompt in enumerate(prompts):
        calls = []
        with listen_at_hook_points(model.hook_points(), lambda call, _, calls=calls: calls.append(call)):
            logits = model(torch.tensor([prompt.ids]))[0]
        for d, target in enumerate(prompt.targets):
            row = 2 * index + d
            for layer, call in enumerate(calls):
                p = call.maps()[0, :, target.row]  # (H, S)
                np.testing.assert_allclose(
                    responses.weight[row, 4 * layer : 4 * layer + 4], p[:, target.position], atol=1e-6
                )
                for head in range(4):
                    output = call.z[0, head, target.row] @ call.hook_point.W_O[head]
                    scores = residual.unembed(residual.norm.center_and_apply_gain(output))
                    difference = scores[target.answer] - scores[list(target.distractors)].mean()
                    assert responses.logit_difference[row, 4 * layer + head] == pytest.approx(
                        float(difference), abs=1e-5
                    )
                    assert bool(responses.wins[row, 4 * layer + head]) == bool(
                        scores[target.answer] > scores[list(target.distractors)].max()
                    )
                    v = call.v[0, call.params.kv_of_head[head]] @ call.hook_point.W_O[head]  # (S, D)
                    contributions = p[head] * v.norm(dim=-1)
                    want = float(contributions[target.position] / contributions.sum())
                    assert responses.value_weighted[row, 4 * layer + head] == pytest.approx(want, abs=1e-5)
            assert responses.correct[row] == (int(logits[target.row].argmax()) == target.answer)
