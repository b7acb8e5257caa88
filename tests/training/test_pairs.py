"""Training on pairs: batches and losses against explicit code for single pairs, and use of the sources."""

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
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import byte_tokenizer, character_tokenizer
from headwise.training import Recipe, TrainResult
from headwise.training.batch_samplers import PairSampler, make_train_batch, pad_with_minus_one
from headwise.training.model_with_loss import LanguageLoss
from headwise.training.token_file import read_tokens, write_tokens
from tests.contract.variants import FIXED_SETTINGS
from tests.training.tiny import PLAIN, assert_same_run, drop_timing, run, run_interrupted

END = 256  # end token of the byte tokenizer
# Sources and texts of very different lengths: a long source with a short text, and the reverse.
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
        norm_placement="post",
        positions="sinusoidal",
    ),
}
NOISY = replace(
    SPECS["learned"],
    dropout=0.1,
    attention=AttentionSpec(width=16, heads=4, dropout=0.1, head_dropout=0.3, head_dropout_schedule="v"),
)
ONE_STEP = Recipe(steps=1, batch_size=len(PAIRS), warmup=0, holdout=0, log_every=1)

each_spec = pytest.mark.parametrize("name", SPECS)


def encode_pair(source: str, text: str) -> tuple[Tensor, Tensor]:
    """Return a pair of bytes as model input: the source with its end token (1, S), the text between two end tokens (1, T)."""
    return torch.tensor([[*source.encode(), END]]), torch.tensor([[END, *text.encode(), END]])


def summed_nll(model: Transformer, pairs: list[tuple[str, str]], context: int = 99) -> tuple[Tensor, int]:
    """Return the summed −log p of all texts from full logits, one pair at a time, and the number of targets."""
    total, count = torch.zeros(()), 0
    for pair in pairs:
        source, text = encode_pair(*pair)
        source, text = source[:, :context], text[:, : context + 1]
        logits = model(text[:, :-1], source=source)  # (1, T − 1, V)
        total = total + F.cross_entropy(logits[0], text[0, 1:], reduction="sum")
        count += text.shape[1] - 1
    return total, count


# Token files: sources and texts alternate, and no pair is split.


def split_pairs(tokens: np.ndarray, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """Split a row of tokens into pairs."""
    texts: list[list[int]] = [[]]
    for token in tokens.tolist():
        texts.append([]) if token == end else texts[-1].append(token)
    assert texts.pop() == [], "the row ends inside a text"
    assert len(texts) % 2 == 0, "a source has no text"
    return zip(texts[::2], texts[1::2], strict=True)


@FIXED_SETTINGS
@given(
    st.lists(st.tuples(*[st.integers(1, 30)] * 2), min_size=1, max_size=12),
    st.floats(0, 0.9, allow_nan=False),
)
def test_write_tokens_holdout_never_splits_a_pair(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], holdout: float
) -> None:
    pairs = [("s" * a + str(i), "t" * b + str(i)) for i, (a, b) in enumerate(lengths)]
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"), Corpus.of(pairs), None, byte_tokenizer(), holdout)
    parts = [list(split_pairs(part, END)) for part in (tokens.train, tokens.valid)]
    decoded = [(bytes(source).decode(), bytes(text).decode()) for part in parts for source, text in part]
    assert decoded == pairs
    # Held out are all pairs that lie completely after the split position, at least one.
    starts = np.cumsum(
        [0, *(len(source) + len(text) + 2 for source, text in pairs)]
    )  # bytes, and an end token after each
    boundary = starts[-1] - int(starts[-1] * holdout)
    num_held_out = int((starts[:-1] >= boundary).sum())
    assert len(parts[1]) == (num_held_out or int(boundary < starts[-1] and len(pairs) > 1))
    assert parts[0]


def test_write_tokens_explicit_valid_pairs_are_held_out(tmp_path: Path) -> None:
    written = write_tokens(tmp_path / "tokens", Corpus.of(PAIRS[:3]), Corpus.of(PAIRS[3:]), byte_tokenizer(), 0.5)
    for tokens in (written, read_tokens(tmp_path / "tokens")):
        assert [bytes(text).decode() for _, text in split_pairs(tokens.train, END)] == [text for _, text in PAIRS[:3]]
        assert [bytes(text).decode() for _, text in split_pairs(tokens.valid, END)] == [text for _, text in PAIRS[3:]]


# Rows: one pair each.


def make_pair_sampler(rows: list[tuple[list[int], list[int]]], context: int = 9, seed: int = 0) -> PairSampler:
    """Return a sampler of ids from 1 on, separated by 0. Source and text get an end token, and the text starts with 99."""
    tokens = np.array([token for pair in rows for ids in pair for token in (*ids, 0)], dtype=np.uint16)
    return PairSampler(tokens, context, seed, end_id=0, wrap_pair=lambda s, t: ([*s, 0], [99, *t, 0]))


ROWS = [([1, 2, 3], [4]), ([5], [6, 7, 8, 9]), ([10, 11], [12, 13]), ([], [14]), ([15], [])]


def test_pair_sampler_epoch_reads_every_pair_once() -> None:
    pairs = make_pair_sampler(ROWS)
    assert pairs.rows_per_epoch == len(ROWS)
    expected = sorted(([99, *text, 0], [*source, 0]) for source, text in ROWS)
    orders = []
    for epoch in range(3):
        batches = [pairs.training_rows(5 * epoch + i, 1) for i in range(5)]
        plain = [(texts[0].tolist(), sources[0].tolist()) for texts, sources in batches]
        assert sorted(plain) == expected, "each pair once, without padding"
        orders.append(plain)
    assert orders[0] != orders[1], "epochs have different orders"
    assert make_pair_sampler(ROWS, seed=1).training_rows(0, 5)[0].tolist() != pairs.training_rows(0, 5)[0].tolist()
    texts, sources = pairs.training_rows(3, 4)  # across the end of an epoch
    for i, (text, source) in enumerate([*orders[0][3:], *orders[1][:2]]):
        assert [token for token in texts[i].tolist() if token != -1] == text == texts[i, : len(text)].tolist()
        assert [token for token in sources[i].tolist() if token != -1] == source == sources[i, : len(source)].tolist()
    assert texts.shape[1] == int((texts >= 0).sum(1).max()), "padded to the longest text"
    assert sources.shape[1] == int((sources >= 0).sum(1).max())


def test_pair_sampler_long_pairs_are_truncated() -> None:
    text, source = make_pair_sampler([([1, 2, 3, 4, 5], [6, 7, 8, 9])], context=3).target_and_source_ids(0)
    assert source.tolist() == [1, 2, 3]  # three tokens
    assert text.tolist() == [99, 6, 7, 8]  # three inputs and the last target


def test_pair_sampler_in_order_yields_pairs_sequentially() -> None:
    pairs = make_pair_sampler(ROWS)
    pairs_read = [(text.tolist(), source.tolist()) for text, source in pairs.evaluation_rows()]
    assert pairs_read == [([99, *text, 0], [*source, 0]) for source, text in ROWS]
    subset = [text.tolist() for text, _ in pairs.evaluation_rows(max_tokens=-(-len(pairs.tokens) // 2))]
    assert subset == [text for text, _ in pairs_read[::2]], "half of the tokens: every second pair"


def test_make_batch_pairs_target_only_the_text() -> None:
    texts, sources = (
        pad_with_minus_one([np.array([99, 6, 0]), np.array([99, 0])]),
        pad_with_minus_one([np.array([1, 0]), np.array([1, 2, 3, 0])]),
    )
    rows = make_train_batch(texts, sources, None, 0)
    assert rows.ids.tolist() == [[99, 6], [99, 0]]
    assert rows.targets.tolist() == [[6, 0], [0, IGNORE_INDEX]]
    assert rows.num_targets == 3
    assert rows.attention_mask is None, "a causal decoder needs no attention mask for right padding"
    assert rows.source is not None
    assert rows.source_attention_mask is not None
    assert rows.source_attention_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert rows.source[rows.source_attention_mask].tolist() == [1, 0, 1, 2, 3, 0]
    part = rows.select_rows(slice(1, 2), torch.device("cpu"))
    assert [x if x is None else x.tolist() for x in part[3:]] == [[[1, 2, 3, 0]], [[True] * 4]]
    assert make_train_batch(texts, pad_with_minus_one([np.array([1, 2])] * 2), None, 0).source_attention_mask is None


# A step and an evaluation against explicit code.


def train_and_keep_initial(
    spec: ModelSpec, recipe: Recipe, pairs: Any = PAIRS, **options: Any
) -> tuple[Transformer, TrainResult]:
    """Return the result of a run, and the model before the first step."""
    first: list[Transformer] = []

    def keep_initial(model: Transformer, step: int) -> None:
        if step == 0:
            first.append(deepcopy(model).eval())

    result = run(spec, recipe, text=pairs, tokenizer="byte", callback=keep_initial, callback_every=1, **options)
    return first[0], result


@each_spec
def test_train_pairs_step_loss_equals_single_pairs(name: str) -> None:
    before, result = train_and_keep_initial(SPECS[name], ONE_STEP)
    total, count = summed_nll(before, PAIRS)
    assert count == sum(len(text) + 1 for _, text in PAIRS)
    assert result.loss == pytest.approx(float(total.detach()) / count, rel=1e-5)
    (total / count).backward()
    grad_norm = math.sqrt(
        sum(float(value.grad.square().sum()) for value in before.parameters() if value.grad is not None)
    )
    assert result.history[0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    num_tokens = sum(len(source) + 1 + len(text) + 2 for source, text in PAIRS)
    assert result.tokens == num_tokens - 1, (
        "all source and text tokens except the last token of the longest text, which has no target"
    )


@each_spec
def test_train_pairs_valid_loss_equals_held_out_pairs(name: str) -> None:
    result = run(
        SPECS[name],
        replace(ONE_STEP, steps=3, batch_size=2, learning_rate=1e-2),
        text=PAIRS[:3],
        valid=PAIRS[2:],
        tokenizer="byte",
    )
    with torch.no_grad():
        total, count = summed_nll(result.model, PAIRS[2:])
    assert result.valid_loss == pytest.approx(float(total) / count, rel=1e-5)


def test_train_pairs_holdout_is_the_last_pairs() -> None:
    pairs = [(f"{i} and {i}", f"{2 * i}") for i in range(20)]
    result = run(
        SPECS["learned"], replace(ONE_STEP, holdout=0.2, steps=2, learning_rate=1e-2), text=pairs, tokenizer="byte"
    )
    sizes = [len(source) + len(text) + 2 for source, text in pairs]
    held_out = [pair for i, pair in enumerate(pairs) if sum(sizes[:i]) >= sum(sizes) - int(sum(sizes) * 0.2)]
    assert 2 <= len(held_out) <= 4
    with torch.no_grad():
        total, count = summed_nll(result.model, held_out)
    assert result.valid_loss == pytest.approx(float(total) / count, rel=1e-5)


def test_train_pairs_longer_than_context_are_truncated() -> None:
    before, result = train_and_keep_initial(SPECS["learned"], replace(ONE_STEP, context=5))
    total, count = summed_nll(before, PAIRS, context=5)
    assert count == sum(min(5, len(text) + 1) for _, text in PAIRS)
    assert result.loss == pytest.approx(float(total.detach()) / count, rel=1e-5)


@each_spec
def test_train_pairs_accumulation_and_checkpointing_equal_plain(name: str) -> None:
    pairs, recipe = PAIRS * 3, replace(ONE_STEP, steps=6, batch_size=6, learning_rate=1e-2)
    plain = run(SPECS[name], recipe, text=pairs, tokenizer="byte")
    for other_recipe in (replace(recipe, accumulation_steps=3), replace(recipe, checkpointing=True)):
        variant = run(SPECS[name], other_recipe, text=pairs, tokenizer="byte")
        assert [row["loss"] for row in variant.history] == pytest.approx(
            [row["loss"] for row in plain.history], rel=1e-4
        )
        assert variant.tokens == plain.tokens


def test_train_pairs_row_mode_has_no_effect() -> None:
    runs = [
        run(NOISY, replace(ONE_STEP, steps=4, rows=rows), text=PAIRS, tokenizer="byte")
        for rows in ("windows", "random")
    ]
    runs.append(run(NOISY, replace(ONE_STEP, steps=4, rows="texts"), text=PAIRS, tokenizer="byte"))
    assert drop_timing(runs[0].history) == drop_timing(runs[1].history) == drop_timing(runs[2].history)


def test_language_loss_pair_reads_source() -> None:
    model = Transformer(SPECS["learned"]).eval()
    source, text = encode_pair(*PAIRS[0])
    loss = LanguageLoss(model)(text[:, :-1], text[:, 1:], source=source)
    total, count = summed_nll(model, PAIRS[:1])
    assert float(loss.detach()) == pytest.approx(float(total.detach()) / count, rel=1e-6)
    with pytest.raises(HeadwiseError, match="source=source_ids"):
        LanguageLoss(model)(text[:, :-1], text[:, 1:])


# Interrupted and resumed runs.


@pytest.mark.parametrize(("spec", "accumulate"), [(SPECS["learned"], 1), (NOISY, 2)])
def test_train_pairs_interrupted_resumes_bitwise(spec: ModelSpec, accumulate: int, tmp_path: Path) -> None:
    pairs = [(f"{i} and {i} again"[: 3 + i % 9], str(i) * (1 + i % 3)) for i in range(30)]
    recipe = Recipe(
        steps=12,
        batch_size=4,
        learning_rate=1e-2,
        warmup=2,
        save_every=4,
        log_every=3,
        evaluate_every=5,
        seed=5,
        accumulation_steps=accumulate,
    )
    options = {"text": pairs, "tokenizer": "byte"}
    uninterrupted = run(spec, recipe, tmp_path / "whole", **options)
    for step in (2, 7, 11):  # before the first checkpoint, after a checkpoint and an evaluation, right before the end
        run_interrupted(spec, recipe, tmp_path / "broken", step, **options)
    assert_same_run(uninterrupted, run(spec, recipe, tmp_path / "broken", **options))
    loaded = hw.load(tmp_path / "broken" / "model")
    assert loaded.generate("3 and 3", 8) == uninterrupted.model.generate("3 and 3", 8)
    with pytest.raises(HeadwiseError):  # the same folder with a changed source
        run(spec, recipe, tmp_path / "broken", text=[("other", pairs[0][1]), *pairs[1:]], tokenizer="byte")


# The model learns from the source.


def reversals(count: int, seed: int) -> list[tuple[str, str]]:
    """Return words of two to six letters out of eight, and the reversed words."""
    rng = random.Random(seed)
    sources = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 6))) for _ in range(count)]
    return [(source, source[::-1]) for source in sources]


def test_train_pairs_reversal_is_learned_from_source() -> None:
    """Without its source, a text has 4 letters of log 8 and a length of log 5, over 5 tokens: 1.985 nats per token."""
    spec = ModelSpec(vocab=1, context=12, layers=1, attention=AttentionSpec(width=32, heads=4), kind="encoder-decoder")
    recipe = Recipe(steps=200, batch_size=32, learning_rate=1e-2, warmup=20, evaluate_every=200)
    pairs, valid, tokenizer = reversals(2000, 0), reversals(200, 1), character_tokenizer("abcdefgh")
    sources = [source for source, _ in pairs]
    random.Random(2).shuffle(sources)
    shuffled_pairs = [(source, text) for source, (_, text) in zip(sources, pairs, strict=True)]
    loss, shuffled_loss = (
        run(spec, recipe, text=corpus, valid=valid, tokenizer=tokenizer).valid_loss
        for corpus in (pairs, shuffled_pairs)
    )
    entropy = (4 * math.log(8) + math.log(5)) / 5
    assert shuffled_loss == pytest.approx(entropy, abs=0.1)
    assert loss is not None
    assert loss < entropy / 4


# Errors.


def test_train_pairs_invalid_corpus_raises(tmp_path: Path) -> None:
    encoder_decoder, decoder = SPECS["learned"], PLAIN
    bare = Tokenizer(byte_tokenizer().backend, {})
    for spec, corpus, options, message in (
        (encoder_decoder, "a text alone", {}, "needs pairs"),
        (encoder_decoder, ["a", "b"], {}, "needs pairs"),
        (encoder_decoder, None, {}, "needs pairs"),
        (encoder_decoder, PAIRS, {"valid": "a text alone"}, "needs pairs"),
        (decoder, PAIRS, {}, "kind decoder. Give it texts alone"),
        (decoder, "a text alone " * 9, {"valid": PAIRS}, "kind decoder. Give it texts alone"),
        (replace(decoder, kind="encoder", output="mlm"), PAIRS, {}, "kind encoder. Give it texts alone"),
        (
            encoder_decoder,
            [*PAIRS, ("a", "the <end> of it")],
            {},
            "contains the end token, which separates pairs. Got 'the",
        ),
        (encoder_decoder, [*PAIRS, ("an <end>", "a")], {}, "contains the end token"),
        (encoder_decoder, PAIRS, {"tokenizer": bare}, "has no end token.*use another"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            run(spec, replace(ONE_STEP, batch_size=2), tmp_path / "run", text=corpus, **options)
    with pytest.raises(HeadwiseError, match="held out for evaluation"):
        run(encoder_decoder, replace(ONE_STEP, holdout=0.1), text=PAIRS[:1])
    with pytest.raises(HeadwiseError, match="'masked' does not suit"):
        run(encoder_decoder, replace(ONE_STEP, objective="masked"), text=PAIRS)
    assert run(encoder_decoder, ONE_STEP, tmp_path / "run", text=PAIRS).step == 1, (
        "what was refused has not taken the folder"
    )


def test_train_end_token_inside_text_is_accepted() -> None:
    assert run(PLAIN, replace(ONE_STEP, steps=1, batch_size=2), text="the <end> of it, " * 9).step == 1
