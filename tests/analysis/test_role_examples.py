"""Examples of a role: its own positions, from the reporting half, with hits and misses in their true proportion."""

from functools import cache

import numpy as np
import pytest
import torch

from headwise.analysis.metrics import role_example_positions as module
from headwise.analysis.metrics.metric import RoleTarget
from headwise.analysis.metrics.role_example_positions import (
    ARC_EXAMPLES,
    EXAMPLES_PER_ROLE,
    ExamplePosition,
    ExampleStore,
    ObservedAttentionExample,
    render_marks,
    split_text_at_marks,
)
from headwise.analysis.recording.text_hash_split import BUCKETS, bucket_of_text, buckets_in_half
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_sums import corpus_display_name
from headwise.model import Transformer
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from tests.analysis.constructed_heads import decoder, documents


@cache
def constructed_profile() -> tuple[Transformer, tuple[Document, ...], Profile]:
    model, texts = decoder(), tuple(documents(60))
    return model, texts, profile(model, list(texts), causal=False)


def summarize_examples(examples: tuple[ObservedAttentionExample, ...]) -> list[tuple[bool, str, str, str]]:
    return [(example.hit, example.token, example.expected, example.text) for example in examples]


def test_examples_of_relation_are_its_arcs() -> None:
    """0.3 attends from closing to opening words: each example is such a pair, in a text of the reporting half."""
    _, texts, profiled = constructed_profile()
    head = profiled["0.3"]
    assert head.role == "bracket"
    assert profiled.relation_metric is not None
    filled = np.bincount([bucket_of_text(text.text) for text in texts], minlength=BUCKETS)
    reporting = buckets_in_half(filled, 1)  # every text has brackets
    pairs = {(text.words[arc.source], text.words[arc.target], text.text) for text in texts for arc in text.relations}
    assert len(head.examples) == EXAMPLES_PER_ROLE
    for example in head.examples:
        around = example.text.replace("[", "").replace("]", "").replace("*", "").split(" … ")
        matches = [
            p for p in pairs if p[:2] == (example.token, example.expected) and all(part in p[2] for part in around)
        ]
        assert matches, example.text
        assert all(reporting[bucket_of_text(text)] for _, _, text in matches)
        assert example.hit
        assert example.weight == pytest.approx(1, abs=1e-3)
        assert example.attended == example.expected


def test_examples_of_offsets_classes_and_repeats_fit_the_role() -> None:
    _, _, profiled = constructed_profile()
    for example in profiled["0.0"].examples:  # previous token: directly before the query
        assert f"*{example.attended}* [{example.token}]" in example.text
        assert example.hit
    for example in profiled["1.3"].examples:  # digits: rows that see a digit
        assert example.expected.isdigit()
    for example in profiled["1.0"].examples:  # induction: after an earlier occurrence of the token
        words = example.text.replace("…", "").split()
        assert words[words.index(f"*{example.attended}*") - 1] == example.token
    assert profiled["1.0"].corpus_label == "random tokens said twice"
    assert profiled["0.0"].corpus_label == profiled["0.3"].corpus_label == "the documents given"
    assert profiled["0.1"].examples == ()
    assert profiled["0.0"].top_contexts


def make_store(hits: int, misses: int) -> ExampleStore:
    """Make a store with one head and one relation. The text of each position is its number. All are in bucket 0, and one more
    in bucket 1."""
    positions = tuple(
        ExamplePosition("det >", key, int(key == 99), key, 0, (f"a{key}", "b", "c"), (1,))
        for key in (*range(hits + misses), 99)
    )
    store = ExampleStore(1, positions)
    for index in range(len(positions)):
        hit = index < hits
        for name, value in (
            ("hit", hit),
            ("weight", 0.75 if hit else 0.125),
            ("best", 1 if hit else 2),
            ("max_weight", 0.75),
        ):
            store.arrays[name][index, 0] = value
    store.arrays["recorded"][:] = 1
    return store


@pytest.mark.parametrize(("share", "hits"), [(1.0, 8), (0.75, 6), (0.5, 4), (0.1, 1), (0.0, 0)])
def test_examples_hits_and_misses_are_proportional(share: float, hits: int) -> None:
    half = np.zeros(BUCKETS, dtype=bool)
    half[0] = True
    examples = make_store(10, 10).examples_for_head(RoleTarget("arc", "det >"), half, 0, share)
    assert (sum(example.hit for example in examples), len(examples)) == (hits, 8)
    miss = [example for example in examples if not example.hit]
    assert all(
        (example.weight, example.attended, example.expected, example.max_weight) == (0.125, "c", "b", 0.75)
        for example in miss
    )
    assert not any("a99" in example.text for example in examples), "of the other half"


def test_examples_too_few_hits_returns_fewer() -> None:
    half = np.ones(BUCKETS, dtype=bool)
    examples = make_store(2, 10).examples_for_head(RoleTarget("arc", "det >"), half, 0, 0.5)
    assert (sum(example.hit for example in examples), len(examples)) == (2, 5), (
        "two of five is as near as two hits come"
    )
    assert make_store(2, 2).examples_for_head(RoleTarget("arc", "obj >"), half, 0, 0.5) == ()


def test_examples_do_not_depend_on_batching_order_or_merge(tmp_path) -> None:
    model, texts, profiled = constructed_profile()
    again = [
        profile(model, list(order), causal=False, batch_tokens=tokens)
        for order, tokens in ((texts, 100), (texts[::-1], 999))
    ]
    halves = [profile(model, list(subset), causal=False) for subset in (texts[:17], texts[17:])]
    for other in (*again, halves[0].merge(halves[1]), halves[1].merge(halves[0])):
        for head in profiled:
            expected, actual = head.examples_by_role, other[head.address].examples_by_role
            assert {role: summarize_examples(examples) for role, examples in expected.items()} == {
                role: summarize_examples(s) for role, s in actual.items()
            }
            for role, examples in expected.items():
                np.testing.assert_allclose([x.weight for x in examples], [x.weight for x in actual[role]], atol=1e-5)
    back = Profile.load(profiled.save(tmp_path / "made.npz"))
    assert [head.examples_by_role for head in back] == [head.examples_by_role for head in profiled]
    assert profiled["0.3"].to_dict()["examples"][0]["hit"] is True


def test_example_store_respects_limits() -> None:
    _, _, profiled = constructed_profile()
    assert len([position for position in profiled.examples.arcs if position.relation == "bracket >"]) == ARC_EXAMPLES
    assert len(profiled.examples.rows) <= module.TOKEN_EXAMPLES + 64
    assert profiled.examples.arrays["weight"].dtype == np.float32


def test_mark_text_long_text_is_shortened() -> None:
    names = [f"w{i}" for i in range(100)]
    parts = split_text_at_marks(names, {90: "token", 10: "attended", 50: "meant"})
    assert render_marks(parts) == (
        "w7 w8 w9 *w10* w11 w12 w13 … w47 w48 w49 {w50} w51 w52 w53 … w87 w88 w89 [w90] w91 w92 w93"
    )
    assert torch.tensor([len(kind) > 0 for kind, _ in parts]).sum() == 3


def test_describe_corpus_names_the_file(tmp_path) -> None:
    """The corpus is named with the role, so that the role claims no more than was tested."""
    for name, description in (
        ("gap-development.tsv", "names in GAP"),
        ("en_ewt-ud-test.conllu", "en_ewt-ud-test.conllu"),
    ):
        (tmp_path / name).write_text("x", encoding="utf-8")
        assert corpus_display_name(Corpus.of(tmp_path / name)) == description


def test_example_store_merge_drops_evicted_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two positions, of which one is selected: the shorter text has the smaller key, and the array of the longer one was
    wider."""
    monkeypatch.setitem(module.MAX_EXAMPLES, "rows", 1)
    short, long, other = (
        ExamplePosition("", key, 0, key, 1, ("w",) * length) for key, length in ((1, 3), (9, 5), (4, 4))
    )
    first, second = ExampleStore(1, (), (short, long)), ExampleStore(1, (), (other,))
    first.arrays["maps"][0, 0, :3], first.arrays["recorded"][0] = (0.5, 0.25, 0.25), 1
    for merged in (first.merge(second), second.merge(first)):
        assert merged.rows == (short,)
        assert merged.arrays["maps"].tolist() == [[[0.5, 0.25, 0.25]]]
        assert merged.arrays["recorded"].tolist() == [1]
