"""Writing on: with every cache what full forward passes give by hand, one prompt or many, greedy or drawn."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels import window
from headwise.model import Sampling, Transformer
from headwise.model.generate import How, stream
from tests.contract.layers import MODELS, assert_equal, fill, make_lively_model, token_ids

DECODERS = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut"]
PROMPT = [3, 1, 4, 1, 5]
RAGGED = [[3, 1, 4, 1, 5], [9], [2, 6]]
TOKENS = 12

each_decoder = pytest.mark.parametrize("name", DECODERS)


@torch.no_grad()
def by_hand(model: Transformer, prompt: list[int], tokens: int = TOKENS, **options: Any) -> list[int]:
    """Greedy, without a cache: every step reads the whole text again."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(model(torch.tensor([text]), **options)[0, -1].argmax()))
    return text


# Greedy: what full forward passes give.


@each_decoder
def test_these_models_have_something_to_say(name: str) -> None:
    """A model that repeats one token for ever would pass most tests below."""
    model = make_lively_model(MODELS[name])
    made = [by_hand(model, prompt)[len(prompt) :] for prompt in RAGGED]
    assert len({token for text in made for token in text}) >= 4, made
    assert len({tuple(text) for text in made}) == len(RAGGED), "and not the same to every prompt"


@each_decoder
@pytest.mark.parametrize(("kind", "size"), [("growing", None), ("fixed", None), ("fixed", 16), ("sliding", 30)])
def test_a_cache_changes_nothing(name: str, kind: str, size: int | None) -> None:
    model = make_lively_model(MODELS[name])
    assert model.generate(PROMPT, TOKENS, cache=model.cache(kind, size)) == by_hand(model, PROMPT)


@each_decoder
def test_many_prompts_are_each_alone(name: str) -> None:
    model = make_lively_model(MODELS[name])
    assert model.generate(RAGGED, TOKENS) == [by_hand(model, prompt) for prompt in RAGGED]


@pytest.mark.parametrize(("kind", "size"), [("growing", None), ("fixed", 16), ("sliding", 4)])
def test_many_prompts_are_each_alone_with_every_cache(kind: str, size: int | None) -> None:
    model = make_lively_model(MODELS["decoder, windows"])
    together = model.generate(RAGGED, TOKENS, cache=model.cache(kind, size))
    assert together == [model.generate(prompt, TOKENS, cache=model.cache(kind, size)) for prompt in RAGGED]


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows"])
@pytest.mark.parametrize("size", [1, 2, 4])
@torch.no_grad()
def test_a_sliding_cache_is_a_window(name: str, size: int) -> None:
    """Token by token, so that no prompt is read beyond the window, with logits as well as tokens."""
    model, cache = make_lively_model(MODELS[name]), make_lively_model(MODELS[name]).cache("sliding", size)
    ids = token_ids(2, 13)
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(13)], 1)
    assert_equal(steps, model(ids, mask=window(size)))


@each_decoder
def test_windows_of_a_model_are_those_of_its_cache(name: str) -> None:
    model = make_lively_model(replace(MODELS[name], windows=(3,)))
    assert model.generate(RAGGED, TOKENS) == [by_hand(model, prompt) for prompt in RAGGED]


@each_decoder
@torch.no_grad()
def test_a_text_in_pieces_is_the_whole_text(name: str) -> None:
    model, ids = make_lively_model(MODELS[name]), token_ids(3, 13)
    real = torch.arange(13) >= torch.tensor([[0], [2], [6]])  # padded on the left, the third beyond the first piece
    cache, pieces = model.cache(), []
    for start, stop in ((0, 4), (4, 5), (5, 13)):
        pieces.append(model(ids[:, start:stop], padding=real[:, start:stop], cache=cache))
    got, want = torch.cat(pieces, 1), model(ids, padding=real)
    assert_equal(got[real], want[real])


@torch.no_grad()
def test_rows_of_a_models_cache_are_reordered() -> None:
    model, ids, rows = make_lively_model(MODELS["decoder, rotary"]), token_ids(3, 7), torch.tensor([2, 0, 2])
    real = torch.arange(7) >= torch.tensor([[0], [2], [3]])
    cache = model.cache()
    model(ids[:, :6], padding=real[:, :6], cache=cache)
    cache.reorder(rows)
    got = model(ids[rows, 6:], cache=cache)
    assert_equal(got, model(ids, padding=real)[rows, 6:])


@torch.no_grad()
def test_rows_of_an_encoder_decoders_cache_are_reordered_with_their_sources() -> None:
    model = make_lively_model(next(spec for spec in MODELS.values() if spec.kind == "encoder-decoder"))
    ids, source, rows = token_ids(3, 7), token_ids(3, 5), torch.tensor([2, 0, 2])
    there = torch.arange(5) < torch.tensor([[5], [3], [4]])
    cache = model.cache()
    model(ids[:, :6], source=source, source_padding=there, cache=cache)
    cache.reorder(rows)
    got = model(ids[rows, 6:], cache=cache)
    assert_equal(got, model(ids[rows], source=source[rows], source_padding=there[rows])[:, 6:])


def test_a_cache_holds_as_much_as_it_says() -> None:
    model = make_lively_model(MODELS["decoder, windows"])  # two key/value heads of 6 + 6 channels; windows none and 3
    cache = model.cache("fixed", 10)
    model.generate(PROMPT, 4, cache=cache)
    assert cache.bytes == (10 + 2) * 2 * (6 + 6) * 8


@torch.no_grad()
def test_a_cache_filled_by_generate_can_be_read_on() -> None:
    model = make_lively_model(MODELS["decoder"])
    cache = model.cache()
    text = model.generate(PROMPT, 4, cache=cache)
    got = model(torch.tensor([[text[-1]]]), cache=cache)
    assert_equal(got, model(torch.tensor([text]))[:, -1:])


@torch.no_grad()
def test_a_refused_step_leaves_the_cache_as_it_was() -> None:
    model = make_lively_model(MODELS["decoder"])
    cache, ids = model.cache("fixed", 6), token_ids(1, 7)
    model(ids[:, :5], cache=cache)
    with pytest.raises(HeadwiseError, match="the cache is full"):
        model(ids[:, 5:], cache=cache)
    assert_equal(model(ids[:, 5:6], cache=cache), model(ids[:, :6])[:, 5:])


def test_gates_hold_for_every_step() -> None:
    model = make_lively_model(MODELS["decoder"])
    gates: dict[str, float | Tensor] = {"0.1": 0.0, "1.*": 0.3}
    gated = model.generate(RAGGED, TOKENS, gates=gates)
    assert gated == [by_hand(model, prompt, gates=gates) for prompt in RAGGED]
    with model.heads["0.1"].silenced(), model.heads["1.*"].scaled(0.3):
        assert model.generate(RAGGED, TOKENS) == gated
    assert gated != model.generate(RAGGED, TOKENS)


# With a source.


@pytest.mark.parametrize("seed", [1, 10])
def test_an_encoder_decoder_writes_what_it_reads(seed: int) -> None:
    model, source = make_lively_model(MODELS["encoder-decoder"], seed), token_ids(2, 7, seed=5)
    real = torch.arange(7) < torch.tensor([[7], [3]])
    for kind in ("growing", "fixed"):
        got = model.generate([[1], [2, 3]], TOKENS, source=source, source_padding=real, cache=model.cache(kind))
        assert got[0] == by_hand(model, [1], source=source[:1])
        assert got[1] == by_hand(model, [2, 3], source=source[1:, :3])


@torch.no_grad()
def test_a_cached_source_keeps_its_padding() -> None:
    """What was read is remembered by the cache, and so is which of it was real."""
    model, ids, source = make_lively_model(MODELS["encoder-decoder"]), token_ids(2, 5), token_ids(2, 7, seed=5)
    real = torch.arange(7) < torch.tensor([[7], [3]])
    cache = model.cache()
    first = model(ids[:, :4], source=source, source_padding=real, cache=cache)
    second = model(ids[:, 4:], cache=cache)
    want = model(ids, source=source, source_padding=real)
    assert_equal(torch.cat((first, second), 1), want)


# What comes back is of the kind that went in.


def test_tensors_lists_and_lists_of_lists_come_back_as_such() -> None:
    model = make_lively_model(MODELS["decoder"])
    one = model.generate(PROMPT, 4)
    assert isinstance(one, list)
    assert model.generate([PROMPT, PROMPT], 4) == [one, one]
    assert torch.equal(model.generate(torch.tensor([PROMPT, PROMPT]), 4), torch.tensor([one, one]))
    assert model.generate(PROMPT, 0) == PROMPT
    assert not model.generate(torch.tensor([PROMPT]), 4).is_inference()


def test_a_padded_tensor_is_its_real_tokens() -> None:
    model = make_lively_model(MODELS["decoder, rotary"])
    ids, real = torch.tensor([[3, 1, 4], [0, 0, 9]]), torch.tensor([[True] * 3, [False, False, True]])
    made = model.generate(ids, TOKENS, padding=real)[:, 3:].tolist()
    assert made == [by_hand(model, [3, 1, 4])[3:], by_hand(model, [9])[1:]]


@pytest.mark.parametrize("seed", range(4))
def test_padding_on_the_right_is_refused_or_right(seed: int) -> None:
    """The next token must never be taken from behind padding."""
    model = make_lively_model(MODELS["decoder, rotary"], seed)
    ids, real = torch.tensor([[3, 1, 4], [9, 2, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    try:
        made = model.generate(ids, TOKENS, padding=real)[:, 3:].tolist()
    except HeadwiseError:
        return
    assert made == [by_hand(model, [3, 1, 4])[3:], by_hand(model, [9, 2])[2:]]


# Stopping.


def test_a_text_ends_at_its_stop_and_is_filled_up() -> None:
    model = make_lively_model(MODELS["decoder"])
    free = [text[len(prompt) :] for text, prompt in zip(model.generate(RAGGED, TOKENS), RAGGED, strict=True)]
    stop = free[0][2]
    ends = [made.index(stop) + 1 if stop in made else TOKENS for made in free]
    stopped = model.generate(RAGGED, TOKENS, stop=stop)
    assert stopped == [prompt + made[:end] for prompt, made, end in zip(RAGGED, free, ends, strict=True)]

    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    free = model.generate(ids, TOKENS)[:, 5:]
    stop = int(free[0, 1])
    made = model.generate(ids, TOKENS, stop=[stop], pad=16)[:, 5:]
    for row in range(2):
        end = free[row].tolist().index(stop) + 1 if stop in free[row] else made.shape[1]
        assert torch.equal(made[row, :end], free[row, :end])
        assert bool((made[row, end:] == 16).all())


def test_a_sequence_stops_only_where_it_is_whole() -> None:
    model = make_lively_model(MODELS["decoder"])
    made = model.generate(PROMPT, TOKENS)[len(PROMPT) :]
    pair = made[3:5]
    end = next(i for i in range(TOKENS) if made[i : i + 2] == pair) + 2
    assert model.generate(PROMPT, TOKENS, stop=[pair]) == PROMPT + made[:end]
    assert model.generate(PROMPT, TOKENS, stop=[[99, 98], pair, 97]) == PROMPT + made[:end]
    backwards = [PROMPT[-1], made[0]]
    assert model.generate(PROMPT, 1, stop=[backwards]) == [*PROMPT, made[0]]
    assert len(model.generate(PROMPT, TOKENS, stop=[backwards])) > len(PROMPT) + 1, "the prompt is no part of a stop"


# Streaming.


def test_a_stream_yields_the_same_tokens() -> None:
    model = make_lively_model(MODELS["decoder"])
    steps = list(model.stream(torch.tensor([PROMPT, PROMPT[::-1]]), TOKENS))
    assert all(step.shape == (2,) for step in steps)
    assert torch.equal(torch.stack(steps, 1), model.generate(torch.tensor([PROMPT, PROMPT[::-1]]), TOKENS)[:, 5:])


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_also_when_a_stream_is_closed_early_or_fails(training: bool) -> None:
    model = make_lively_model(MODELS["decoder"]).train(training)
    model.generate(PROMPT, 2)
    assert model.training is training
    steps = model.stream(PROMPT, TOKENS)
    next(steps)
    steps.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert model.training is training
    with pytest.raises(HeadwiseError):
        model.generate(PROMPT, 4, cache=model.cache("fixed", 2))
    assert model.training is training
    assert torch.is_grad_enabled()


def test_training_has_no_part_in_generating() -> None:
    spec = replace(MODELS["decoder"], dropout=0.5)
    model = make_lively_model(spec)
    want = model.generate(PROMPT, TOKENS)
    assert model.train().generate(PROMPT, TOKENS) == want


def test_how_lists_exactly_the_settings_of_stream() -> None:
    keywords = {name for name, p in inspect.signature(stream).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(How.__annotations__) == keywords


# Drawing.


def chances(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """By hand: the k best, then of those as few of the best as hold a share of p, then in proportion."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weight = {i: torch.tensor(logits[i] / temperature, dtype=torch.float64).exp().item() for i in order}
    total, held, kept = sum(weight.values()), 0.0, []
    for i in order:
        if top_p is None or held < top_p:
            kept.append(i)
        held += weight[i] / total
    share = sum(weight[i] for i in kept)
    return torch.tensor([weight[i] / share if i in kept else 0.0 for i in range(len(logits))])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 50])
@pytest.mark.parametrize("top_p", [None, 0.001, 0.3, 0.9, 1.0])
def test_chances_are_those_of_the_formula(temperature: float, top_k: int | None, top_p: float | None) -> None:
    rows = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
    got = Sampling(temperature, top_k, top_p).probabilities(rows)
    want = torch.stack([chances(row, temperature, top_k, top_p) for row in rows.tolist()])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_draws_follow_the_chances() -> None:
    """Each count lies within 5 standard errors of what the chances say."""
    logits, n = torch.tensor([[0.0, 1.0, 2.0, -1.0]]), 20_000
    how = Sampling(0.8, top_k=3)
    drawn = how.pick(logits.expand(n, -1), torch.Generator().manual_seed(0)).bincount(minlength=4) / n
    want = chances([0.0, 1.0, 2.0, -1.0], 0.8, 3, None)
    assert bool(((drawn - want).abs() <= 5 * (want * (1 - want) / n).sqrt()).all())


def test_a_seed_is_reproducible_and_leaves_the_worlds_dice_alone() -> None:
    model = make_lively_model(MODELS["decoder"])
    with torch.no_grad():
        fill(model, seed=3)
        model.embed.tokens.weight.mul_(0.1)  # flat chances
    state = torch.get_rng_state()
    one, two = (model.generate(RAGGED, TOKENS, temperature=2.0, seed=7) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one == two
    assert one != model.generate(RAGGED, TOKENS, temperature=2.0, seed=8)
    assert model.generate(PROMPT, TOKENS, temperature=2.0, top_k=1) == model.generate(PROMPT, TOKENS)


# What is refused.

REFUSED: dict[str, tuple[str, Any, str]] = {
    "empty": ("decoder", lambda m: m.generate([], 3), "prompt is empty; give at least one token"),
    "one empty": ("decoder", lambda m: m.generate([[1], []], 3), "prompt is empty; give at least one token"),
    "empty tensor": ("decoder", lambda m: m.generate(torch.zeros(1, 0).long(), 3), "the prompt is empty"),
    "too long": (
        "decoder",
        lambda m: m.generate(PROMPT, 16),
        "a prompt of 5 tokens and 16 more do not fit the 19 positions this model has learned; ask for at most 15",
    ),
    "prompt too long": ("decoder", lambda m: m.generate([1] * 25, 1), "a prompt of 25 tokens .* ask for at most 0"),
    "fewer than none": (
        "decoder",
        lambda m: m.generate(PROMPT, -1),
        "tokens must be a whole number, 0 or more; got -1",
    ),
    "text": ("decoder", lambda m: m.generate("Once", 3), "this model has no tokenizer, so it takes token ids"),
    "one axis": ("decoder", lambda m: m.generate(torch.tensor([1, 2]), 3), r"\(batch, tokens\)"),
    "encoder": ("encoder", lambda m: m.generate(PROMPT, 3), "generate needs a decoder with output='lm'"),
    "no source": ("encoder-decoder", lambda m: m.generate(PROMPT, 3), "an encoder-decoder needs what it reads"),
    "temperature": ("decoder", lambda m: m.generate(PROMPT, 3, temperature=-1.0), "temperature must be 0 .* got -1.0"),
    "no draw": (
        "decoder",
        lambda m: m.generate(PROMPT, 3, top_k=5),
        "temperature 0 does not draw; give temperature=1.0",
    ),
    "top_k": ("decoder", lambda m: m.generate(PROMPT, 3, temperature=1.0, top_k=0), "top_k must be at least 1, got 0"),
    "top_p": (
        "decoder",
        lambda m: m.generate(PROMPT, 3, temperature=1.0, top_p=0.0),
        "top_p must lie above 0 and at most 1, got 0.0",
    ),
    "cache full": (
        "decoder",
        lambda m: m.generate(PROMPT, 9, cache=m.cache("fixed", 7)),
        "the cache is full: it holds 7",
    ),
}


@pytest.mark.parametrize(("name", "act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_refused(name: str, act: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        act(make_lively_model(MODELS[name]))


def test_exactly_as_many_tokens_as_fit_are_made() -> None:
    model = make_lively_model(MODELS["decoder"])
    assert len(model.generate(PROMPT, 15)) == 20, "the last one is written, never read"
    headless = make_lively_model(replace(MODELS["decoder"], output="none"))
    with pytest.raises(HeadwiseError, match="this model has no next-token output"):
        headless.generate(PROMPT, 3)
