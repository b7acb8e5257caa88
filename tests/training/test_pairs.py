"""Training on pairs: what a step reads and loses against the same by hand, one pair at a time; and that sources are read."""

import math
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.loss import IGNORE
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import byte_tokenizer, character_tokenizer
from headwise.training import Recipe, Trained
from headwise.training.batches import Pairs, make_rows, stack
from headwise.training.loss import LanguageLoss
from headwise.training.token_file import read_tokens, write_tokens
from tests.contract.variants import FIXED
from tests.training.tiny import PLAIN, broken, run, same_run, timeless

END = 256  # of bytes
# Sources and texts of very different lengths, the long source beside the short text and the other way round.
PAIRS = [
    ("ab", "to be or not"),
    ("who goes there, and when?", "I"),
    ("x", "y"),
    ("seven", "nine or ten"),
    ("?", "so it is"),
]
SPECS: dict[str, ModelSpec] = {
    "learned": replace(PLAIN, kind="encoder-decoder", context=32),
    "rotary, grouped": ModelSpec(
        vocab=257,
        context=32,
        layers=2,
        encoder_layers=1,
        attention=AttentionSpec(width=16, heads=4, kv_heads=2, rotary=Rotary()),
        kind="encoder-decoder",
        positions="none",
        norm="rms",
        activation="swiglu",
        tied=False,
    ),
    "post, sinks": ModelSpec(
        vocab=257,
        context=32,
        layers=1,
        encoder_layers=2,
        attention=AttentionSpec(width=16, heads=2, bias=True, out_bias=True, softmax="sink"),
        kind="encoder-decoder",
        form="post",
        positions="sinusoidal",
    ),
}
NOISY = replace(
    SPECS["learned"],
    dropout=0.1,
    attention=AttentionSpec(width=16, heads=4, dropout=0.1, head_dropout=0.3, head_dropout_schedule="v"),
)
ONE = Recipe(steps=1, batch=len(PAIRS), warmup=0, holdout=0, log_every=1)

each_spec = pytest.mark.parametrize("name", SPECS)


def dressed(source: str, text: str) -> tuple[Tensor, Tensor]:
    """A pair of bytes as a model reads it: the source with its end (1, S), the text between two ends (1, T)."""
    return torch.tensor([[*source.encode(), END]]), torch.tensor([[END, *text.encode(), END]])


def surprise(model: Transformer, pairs: list[tuple[str, str]], context: int = 99) -> tuple[Tensor, int]:
    """The summed −log p of all texts from all the logits, one pair at a time, and how many tokens are asked for."""
    total, count = torch.zeros(()), 0
    for pair in pairs:
        source, text = dressed(*pair)
        source, text = source[:, :context], text[:, : context + 1]
        logits = model(text[:, :-1], source=source)  # (1, T − 1, V)
        total = total + F.cross_entropy(logits[0], text[0, 1:], reduction="sum")
        count += text.shape[1] - 1
    return total, count


# The tokens: sources and texts by turns, and no pair torn apart.


def in_turns(tokens: np.ndarray, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """The pairs of a row of tokens, by a plain walk."""
    texts: list[list[int]] = [[]]
    for token in tokens.tolist():
        texts.append([]) if token == end else texts[-1].append(token)
    assert texts.pop() == [], "the row ends in the middle of a text"
    assert len(texts) % 2 == 0, "a source has lost its text"
    return zip(texts[::2], texts[1::2], strict=True)


@FIXED
@given(
    st.lists(st.tuples(*[st.integers(1, 30)] * 2), min_size=1, max_size=12),
    st.floats(0, 0.9, allow_nan=False),
)
def test_no_pair_is_torn_apart(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], holdout: float
) -> None:
    pairs = [("s" * a + str(i), "t" * b + str(i)) for i, (a, b) in enumerate(lengths)]
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"), Corpus.of(pairs), None, byte_tokenizer(), holdout)
    parts = [list(in_turns(part, END)) for part in (tokens.train, tokens.valid)]
    told = [(bytes(source).decode(), bytes(text).decode()) for part in parts for source, text in part]
    assert told == pairs
    # What is held out is every pair that lies wholly behind the cut, not more than was asked for; but one at least.
    starts = np.cumsum([0, *(len(source) + len(text) + 2 for source, text in pairs)])  # bytes, and an end behind each
    cut = starts[-1] - int(starts[-1] * holdout)
    wanted = int((starts[:-1] >= cut).sum())
    assert len(parts[1]) == (wanted or int(cut < starts[-1] and len(pairs) > 1))
    assert parts[0]


def test_pairs_held_out_by_hand_are_all_held_out(tmp_path: Path) -> None:
    made = write_tokens(tmp_path / "tokens", Corpus.of(PAIRS[:3]), Corpus.of(PAIRS[3:]), byte_tokenizer(), 0.5)
    for tokens in (made, read_tokens(tmp_path / "tokens")):
        assert [bytes(text).decode() for _, text in in_turns(tokens.train, END)] == [text for _, text in PAIRS[:3]]
        assert [bytes(text).decode() for _, text in in_turns(tokens.valid, END)] == [text for _, text in PAIRS[3:]]


# Rows: a pair each.


def pairs_of(rows: list[tuple[list[int], list[int]]], context: int = 9, seed: int = 0) -> Pairs:
    """Ids from 1 on, parted by 0; both sides end, and the text starts from 99."""
    tokens = np.array([token for pair in rows for ids in pair for token in (*ids, 0)], dtype=np.uint16)
    return Pairs(tokens, context, seed, end=0, dress=lambda s, t: ([*s, 0], [99, *t, 0]))


ROWS = [([1, 2, 3], [4]), ([5], [6, 7, 8, 9]), ([10, 11], [12, 13]), ([], [14]), ([15], [])]


def test_every_epoch_reads_every_source_with_its_text() -> None:
    pairs = pairs_of(ROWS)
    assert pairs.count == len(ROWS)
    want = sorted(([99, *text, 0], [*source, 0]) for source, text in ROWS)
    orders = []
    for epoch in range(3):
        read = [pairs.rows(5 * epoch + i, 1) for i in range(5)]
        plain = [(texts[0].tolist(), sources[0].tolist()) for texts, sources in read]
        assert sorted(plain) == want, "each pair once, by itself without padding"
        orders.append(plain)
    assert orders[0] != orders[1], "shuffled anew"
    assert pairs_of(ROWS, seed=1).rows(0, 5)[0].tolist() != pairs.rows(0, 5)[0].tolist()
    texts, sources = pairs.rows(3, 4)  # over the end of an epoch
    for i, (text, source) in enumerate([*orders[0][3:], *orders[1][:2]]):
        assert [token for token in texts[i].tolist() if token != -1] == text == texts[i, : len(text)].tolist()
        assert [token for token in sources[i].tolist() if token != -1] == source == sources[i, : len(source)].tolist()
    assert texts.shape[1] == int((texts >= 0).sum(1).max()), "no wider than its longest text"
    assert sources.shape[1] == int((sources >= 0).sum(1).max())


def test_long_pairs_are_cut_to_what_a_model_reads() -> None:
    text, source = pairs_of([([1, 2, 3, 4, 5], [6, 7, 8, 9])], context=3).pair(0)
    assert source.tolist() == [1, 2, 3]  # three are read
    assert text.tolist() == [99, 6, 7, 8]  # three are read, and each asks for the next


def test_for_evaluation_pairs_come_in_order() -> None:
    pairs = pairs_of(ROWS)
    told = [(text.tolist(), source.tolist()) for text, source in pairs.in_order()]
    assert told == [([99, *text, 0], [*source, 0]) for source, text in ROWS]
    some = [text.tolist() for text, _ in pairs.in_order(most=-(-len(pairs.tokens) // 2))]
    assert some == [text for text, _ in told[::2]], "half of the tokens: every other pair"


def test_rows_ask_for_the_text_alone() -> None:
    texts, sources = stack([np.array([99, 6, 0]), np.array([99, 0])]), stack([np.array([1, 0]), np.array([1, 2, 3, 0])])
    rows = make_rows(texts, sources, None, 0)
    assert rows.ids.tolist() == [[99, 6], [99, 0]]
    assert rows.targets.tolist() == [[6, 0], [0, IGNORE]]
    assert rows.target_count == 3
    assert rows.padding is None, "a decoder looks back alone"
    assert rows.source is not None
    assert rows.source_padding is not None
    assert rows.source_padding.tolist() == [[True, True, False, False], [True] * 4]
    assert rows.source[rows.source_padding].tolist() == [1, 0, 1, 2, 3, 0]
    part = rows.part(slice(1, 2), torch.device("cpu"))
    assert [x if x is None else x.tolist() for x in part[3:]] == [[[1, 2, 3, 0]], [[True] * 4]]
    assert make_rows(texts, stack([np.array([1, 2])] * 2), None, 0).source_padding is None


# A step, and an evaluation, by hand.


def begun(spec: ModelSpec, recipe: Recipe, pairs: Any = PAIRS, **more: Any) -> tuple[Transformer, Trained]:
    """A run, and the model as it was before the first step."""
    first: list[Transformer] = []

    def keep(model: Transformer, step: int) -> None:
        if step == 0:
            first.append(deepcopy(model).eval())

    made = run(spec, recipe, text=pairs, tokenizer="byte", call=keep, every=1, **more)
    return first[0], made


@each_spec
def test_a_step_loses_what_its_pairs_lose_one_at_a_time(name: str) -> None:
    before, made = begun(SPECS[name], ONE)
    total, count = surprise(before, PAIRS)
    assert count == sum(len(text) + 1 for _, text in PAIRS)
    assert made.loss == pytest.approx(float(total.detach()) / count, rel=1e-5)
    (total / count).backward()
    length = math.sqrt(sum(float(value.grad.square().sum()) for value in before.parameters() if value.grad is not None))
    assert made.history[0]["gradient"] == pytest.approx(length, rel=1e-4)
    read = sum(len(source) + 1 + len(text) + 2 for source, text in PAIRS)
    assert made.tokens == read - 1, (
        "sources and texts, but for the last token of the longest, behind which nothing is asked"
    )


@each_spec
def test_the_held_out_loss_is_that_of_held_out_pairs(name: str) -> None:
    made = run(
        SPECS[name], replace(ONE, steps=3, batch=2, rate=1e-2), text=PAIRS[:3], valid=PAIRS[2:], tokenizer="byte"
    )
    with torch.no_grad():
        total, count = surprise(made.model, PAIRS[2:])
    assert made.valid_loss == pytest.approx(float(total) / count, rel=1e-5)


def test_the_end_of_the_pairs_is_held_out() -> None:
    pairs = [(f"{i} and {i}", f"{2 * i}") for i in range(20)]
    made = run(SPECS["learned"], replace(ONE, holdout=0.2, steps=2, rate=1e-2), text=pairs, tokenizer="byte")
    sizes = [len(source) + len(text) + 2 for source, text in pairs]
    held = [pair for i, pair in enumerate(pairs) if sum(sizes[:i]) >= sum(sizes) - int(sum(sizes) * 0.2)]
    assert 2 <= len(held) <= 4
    with torch.no_grad():
        total, count = surprise(made.model, held)
    assert made.valid_loss == pytest.approx(float(total) / count, rel=1e-5)


def test_pairs_longer_than_the_context_are_cut() -> None:
    before, made = begun(SPECS["learned"], replace(ONE, context=5))
    total, count = surprise(before, PAIRS, context=5)
    assert count == sum(min(5, len(text) + 1) for _, text in PAIRS)
    assert made.loss == pytest.approx(float(total.detach()) / count, rel=1e-5)


@each_spec
def test_parts_and_recomputing_give_the_same_run(name: str) -> None:
    pairs, recipe = PAIRS * 3, replace(ONE, steps=6, batch=6, rate=1e-2)
    whole = run(SPECS[name], recipe, text=pairs, tokenizer="byte")
    for other in (replace(recipe, accumulate=3), replace(recipe, checkpointing=True)):
        again = run(SPECS[name], other, text=pairs, tokenizer="byte")
        assert [row["loss"] for row in again.history] == pytest.approx([row["loss"] for row in whole.history], rel=1e-4)
        assert again.tokens == whole.tokens


def test_pairs_are_read_whatever_rows_say() -> None:
    runs = [
        run(NOISY, replace(ONE, steps=4, rows=rows), text=PAIRS, tokenizer="byte") for rows in ("windows", "random")
    ]
    runs.append(run(NOISY, replace(ONE, steps=4, rows="texts"), text=PAIRS, tokenizer="byte"))
    assert timeless(runs[0].history) == timeless(runs[1].history) == timeless(runs[2].history)


def test_the_loss_reads_a_source() -> None:
    model = Transformer(SPECS["learned"]).eval()
    source, text = dressed(*PAIRS[0])
    loss = LanguageLoss(model)(text[:, :-1], text[:, 1:], source=source)
    total, count = surprise(model, PAIRS[:1])
    assert float(loss.detach()) == pytest.approx(float(total.detach()) / count, rel=1e-6)
    with pytest.raises(HeadwiseError, match="needs what it reads"):
        LanguageLoss(model)(text[:, :-1], text[:, 1:])


# Stopped and gone on with.


@pytest.mark.parametrize(("spec", "accumulate"), [(SPECS["learned"], 1), (NOISY, 2)])
def test_stopped_and_resumed_is_bitwise_the_same(spec: ModelSpec, accumulate: int, tmp_path: Path) -> None:
    pairs = [(f"{i} and {i} again"[: 3 + i % 9], str(i) * (1 + i % 3)) for i in range(30)]
    recipe = Recipe(
        steps=12,
        batch=4,
        rate=1e-2,
        warmup=2,
        save_every=4,
        log_every=3,
        evaluate_every=5,
        seed=5,
        accumulate=accumulate,
    )
    more = {"text": pairs, "tokenizer": "byte"}
    whole = run(spec, recipe, tmp_path / "whole", **more)
    for at in (2, 7, 11):  # before the first checkpoint, behind one and an evaluation, right before the end
        broken(spec, recipe, tmp_path / "broken", at, **more)
    same_run(whole, run(spec, recipe, tmp_path / "broken", **more))
    loaded = hw.load(tmp_path / "broken" / "model")
    assert loaded.generate("3 and 3", 8) == whole.model.generate("3 and 3", 8)
    with pytest.raises(HeadwiseError):  # the same folder for other pairs: a source has changed
        run(spec, recipe, tmp_path / "broken", text=[("other", pairs[0][1]), *pairs[1:]], tokenizer="byte")


# It learns, and from the source.


def reversals(count: int, seed: int) -> list[tuple[str, str]]:
    """Two to six letters out of eight, and the same backwards."""
    dice = random.Random(seed)
    drawn = ["".join(dice.choice("abcdefgh") for _ in range(dice.randint(2, 6))) for _ in range(count)]
    return [(source, source[::-1]) for source in drawn]


def test_words_are_turned_round_by_who_can_read_them() -> None:
    """Without its source a text costs 4 letters of log 8 and a length of log 5, over 5 tokens: 1.985 nats each."""
    spec = ModelSpec(vocab=1, context=12, layers=1, attention=AttentionSpec(width=32, heads=4), kind="encoder-decoder")
    recipe = Recipe(steps=200, batch=32, rate=1e-2, warmup=20, evaluate_every=200)
    pairs, valid, tokenizer = reversals(2000, 0), reversals(200, 1), character_tokenizer("abcdefgh")
    sources = [source for source, _ in pairs]
    random.Random(2).shuffle(sources)
    blind = [(source, text) for source, (_, text) in zip(sources, pairs, strict=True)]
    seeing, guessing = (
        run(spec, recipe, text=given, valid=valid, tokenizer=tokenizer).valid_loss for given in (pairs, blind)
    )
    chance = (4 * math.log(8) + math.log(5)) / 5
    assert guessing == pytest.approx(chance, abs=0.1)
    assert seeing is not None
    assert seeing < chance / 4


# What is refused.


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    both, decoder = SPECS["learned"], PLAIN
    bare = Tokenizer(byte_tokenizer().backend, {})
    for spec, corpus, more, message in (
        (both, "a text alone", {}, "needs pairs"),
        (both, ["a", "b"], {}, "needs pairs"),
        (both, None, {}, "needs pairs"),
        (both, PAIRS, {"valid": "a text alone"}, "needs pairs"),
        (decoder, PAIRS, {}, "give this decoder texts alone"),
        (decoder, "a text alone " * 9, {"valid": PAIRS}, "give this decoder texts alone"),
        (replace(decoder, kind="encoder", output="mlm"), PAIRS, {}, "give this encoder texts alone"),
        (
            both,
            [*PAIRS, ("a", "the <end> of it")],
            {},
            "holds the end token itself, so pairs cannot be told apart: 'the",
        ),
        (both, [*PAIRS, ("an <end>", "a")], {}, "holds the end token itself"),
        (both, PAIRS, {"tokenizer": bare}, "has no end token to tell texts apart; use another"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            run(spec, replace(ONE, batch=2), tmp_path / "run", text=corpus, **more)
    with pytest.raises(HeadwiseError, match="too little text is held out"):
        run(both, replace(ONE, holdout=0.1), text=PAIRS[:1])
    with pytest.raises(HeadwiseError, match="the masked objective does not suit"):
        run(both, replace(ONE, objective="masked"), text=PAIRS)
    assert run(both, ONE, tmp_path / "run", text=PAIRS).step == 1, "what was refused has not taken the folder"


def test_an_end_token_within_a_text_is_no_trouble_without_pairs() -> None:
    assert run(PLAIN, replace(ONE, steps=1, batch=2), text="the <end> of it, " * 9).step == 1
