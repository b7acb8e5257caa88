"""Generation with every cache equals full forward passes, for one or many prompts, greedy or sampled."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels import window
from headwise.model import Sampling, Transformer
from headwise.model.generate import GenerateOptions, prepare_generation
from tests.contract.layers import MODELS, assert_equal, make_varied_model, randomize, token_ids

DECODERS = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut"]
PROMPT = [3, 1, 4, 1, 5]
RAGGED = [[3, 1, 4, 1, 5], [9], [2, 6]]
NEW_TOKENS = 12

each_decoder = pytest.mark.parametrize("name", DECODERS)


@torch.no_grad()
def greedy_without_cache(model: Transformer, prompt: list[int], tokens: int = NEW_TOKENS, **options: Any) -> list[int]:
    """Generate greedily without a cache: every step runs the full text."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(model(torch.tensor([text]), **options)[0, -1].argmax()))
    return text


# Greedy generation against full forward passes.


@each_decoder
def test_varied_models_greedy_text_is_not_constant(name: str) -> None:
    """A model that repeats one token would pass most tests below."""
    model = make_varied_model(MODELS[name])
    texts = [greedy_without_cache(model, prompt)[len(prompt) :] for prompt in RAGGED]
    assert len({token for text in texts for token in text}) >= 4, texts
    assert len({tuple(text) for text in texts}) == len(RAGGED), "and not the same to every prompt"


@each_decoder
@pytest.mark.parametrize(("kind", "size"), [("dynamic", None), ("static", None), ("static", 16), ("sliding", 30)])
def test_generate_any_cache_equals_full_passes(name: str, kind: str, size: int | None) -> None:
    model = make_varied_model(MODELS[name])
    assert model.generate(PROMPT, NEW_TOKENS, cache=model.cache(kind, size)) == greedy_without_cache(model, PROMPT)


@each_decoder
def test_generate_ragged_batch_equals_single_prompts(name: str) -> None:
    model = make_varied_model(MODELS[name])
    assert model.generate(RAGGED, NEW_TOKENS) == [greedy_without_cache(model, prompt) for prompt in RAGGED]


@pytest.mark.parametrize(("kind", "size"), [("dynamic", None), ("static", 16), ("sliding", 4)])
def test_generate_ragged_batch_any_cache_equals_single_prompts(kind: str, size: int | None) -> None:
    model = make_varied_model(MODELS["decoder, windows"])
    batched = model.generate(RAGGED, NEW_TOKENS, cache=model.cache(kind, size))
    assert batched == [model.generate(prompt, NEW_TOKENS, cache=model.cache(kind, size)) for prompt in RAGGED]


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows"])
@pytest.mark.parametrize("size", [1, 2, 4])
@torch.no_grad()
def test_sliding_cache_model_equals_window_mask(name: str, size: int) -> None:
    """Compares tokens and logits token by token, so that no prompt is longer than the window."""
    model, cache = make_varied_model(MODELS[name]), make_varied_model(MODELS[name]).cache("sliding", size)
    ids = token_ids(2, 13)
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(13)], 1)
    assert_equal(steps, model(ids, mask=window(size)))


@each_decoder
def test_generate_windowed_model_equals_full_passes(name: str) -> None:
    model = make_varied_model(replace(MODELS[name], windows=(3,)))
    assert model.generate(RAGGED, NEW_TOKENS) == [greedy_without_cache(model, prompt) for prompt in RAGGED]


@each_decoder
@torch.no_grad()
def test_forward_chunks_with_cache_equal_full_text(name: str) -> None:
    model, ids = make_varied_model(MODELS[name]), token_ids(3, 13)
    real = torch.arange(13) >= torch.tensor(
        [[0], [2], [6]]
    )  # padded on the left; the third row starts after the first piece
    cache, pieces = model.cache(), []
    for start, stop in ((0, 4), (4, 5), (5, 13)):
        pieces.append(model(ids[:, start:stop], attention_mask=real[:, start:stop], cache=cache))
    got, want = torch.cat(pieces, 1), model(ids, attention_mask=real)
    assert_equal(got[real], want[real])


@torch.no_grad()
def test_model_cache_reorder_selects_rows() -> None:
    model, ids, rows = make_varied_model(MODELS["decoder, rotary"]), token_ids(3, 7), torch.tensor([2, 0, 2])
    real = torch.arange(7) >= torch.tensor([[0], [2], [3]])
    cache = model.cache()
    model(ids[:, :6], attention_mask=real[:, :6], cache=cache)
    cache.reorder(rows)
    got = model(ids[rows, 6:], cache=cache)
    assert_equal(got, model(ids, attention_mask=real)[rows, 6:])


@torch.no_grad()
def test_model_cache_reorder_encoder_decoder_keeps_sources() -> None:
    model = make_varied_model(next(spec for spec in MODELS.values() if spec.kind == "encoder-decoder"))
    ids, source, rows = token_ids(3, 7), token_ids(3, 5), torch.tensor([2, 0, 2])
    source_mask = torch.arange(5) < torch.tensor([[5], [3], [4]])
    cache = model.cache()
    model(ids[:, :6], source=source, source_attention_mask=source_mask, cache=cache)
    cache.reorder(rows)
    got = model(ids[rows, 6:], cache=cache)
    assert_equal(got, model(ids[rows], source=source[rows], source_attention_mask=source_mask[rows])[:, 6:])


def test_model_cache_nbytes_equals_hand_count() -> None:
    model = make_varied_model(
        MODELS["decoder, windows"]
    )  # two KV heads with 6 + 6 channels; no window and a window of 3
    cache = model.cache("static", 10)
    model.generate(PROMPT, 4, cache=cache)
    assert cache.nbytes == (10 + 2) * 2 * (6 + 6) * 8


@torch.no_grad()
def test_model_cache_after_generate_continues_text() -> None:
    model = make_varied_model(MODELS["decoder"])
    cache = model.cache()
    text = model.generate(PROMPT, 4, cache=cache)
    got = model(torch.tensor([[text[-1]]]), cache=cache)
    assert_equal(got, model(torch.tensor([text]))[:, -1:])


@torch.no_grad()
def test_forward_failed_step_restores_cache() -> None:
    model = make_varied_model(MODELS["decoder"])
    cache, ids = model.cache("static", 6), token_ids(1, 7)
    model(ids[:, :5], cache=cache)
    with pytest.raises(HeadwiseError, match="it is full"):
        model(ids[:, 5:], cache=cache)
    assert_equal(model(ids[:, 5:6], cache=cache), model(ids[:, :6])[:, 5:])


def test_generate_gates_apply_to_every_step() -> None:
    model = make_varied_model(MODELS["decoder"])
    gates: dict[str, float | Tensor] = {"0.1": 0.0, "1.*": 0.3}
    gated = model.generate(RAGGED, NEW_TOKENS, gates=gates)
    assert gated == [greedy_without_cache(model, prompt, gates=gates) for prompt in RAGGED]
    with model.heads["0.1"].silenced(), model.heads["1.*"].scaled(0.3):
        assert model.generate(RAGGED, NEW_TOKENS) == gated
    assert gated != model.generate(RAGGED, NEW_TOKENS)


# Encoder-decoders.


@pytest.mark.parametrize("seed", [1, 10])
def test_generate_encoder_decoder_equals_full_passes(seed: int) -> None:
    model, source = make_varied_model(MODELS["encoder-decoder"], seed), token_ids(2, 7, seed=5)
    real = torch.arange(7) < torch.tensor([[7], [3]])
    for kind in ("dynamic", "static"):
        got = model.generate(
            [[1], [2, 3]], NEW_TOKENS, source=source, source_attention_mask=real, cache=model.cache(kind)
        )
        assert got[0] == greedy_without_cache(model, [1], source=source[:1])
        assert got[1] == greedy_without_cache(model, [2, 3], source=source[1:, :3])


@torch.no_grad()
def test_model_cache_source_keeps_its_mask() -> None:
    """The cache stores the encoded source and its attention mask."""
    model, ids, source = make_varied_model(MODELS["encoder-decoder"]), token_ids(2, 5), token_ids(2, 7, seed=5)
    real = torch.arange(7) < torch.tensor([[7], [3]])
    cache = model.cache()
    first = model(ids[:, :4], source=source, source_attention_mask=real, cache=cache)
    second = model(ids[:, 4:], cache=cache)
    want = model(ids, source=source, source_attention_mask=real)
    assert_equal(torch.cat((first, second), 1), want)


# The result has the type of the prompt.


def test_generate_returns_type_of_prompt() -> None:
    model = make_varied_model(MODELS["decoder"])
    single = model.generate(PROMPT, 4)
    assert isinstance(single, list)
    assert model.generate([PROMPT, PROMPT], 4) == [single, single]
    assert torch.equal(model.generate(torch.tensor([PROMPT, PROMPT]), 4), torch.tensor([single, single]))
    assert model.generate(PROMPT, 0) == PROMPT
    assert not model.generate(torch.tensor([PROMPT]), 4).is_inference()


def test_generate_padded_tensor_uses_real_tokens() -> None:
    model = make_varied_model(MODELS["decoder, rotary"])
    ids, real = torch.tensor([[3, 1, 4], [0, 0, 9]]), torch.tensor([[True] * 3, [False, False, True]])
    generated = model.generate(ids, NEW_TOKENS, attention_mask=real)[:, 3:].tolist()
    assert generated == [greedy_without_cache(model, [3, 1, 4])[3:], greedy_without_cache(model, [9])[1:]]


@pytest.mark.parametrize("seed", range(4))
def test_generate_right_padding_raises_or_is_correct(seed: int) -> None:
    """The next token must never be computed from padding."""
    model = make_varied_model(MODELS["decoder, rotary"], seed)
    ids, real = torch.tensor([[3, 1, 4], [9, 2, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    try:
        generated = model.generate(ids, NEW_TOKENS, attention_mask=real)[:, 3:].tolist()
    except HeadwiseError:
        return
    assert generated == [greedy_without_cache(model, [3, 1, 4])[3:], greedy_without_cache(model, [9, 2])[2:]]


# Stop tokens.


def test_generate_stop_token_ends_and_pads() -> None:
    model = make_varied_model(MODELS["decoder"])
    free = [text[len(prompt) :] for text, prompt in zip(model.generate(RAGGED, NEW_TOKENS), RAGGED, strict=True)]
    stop = free[0][2]
    ends = [generated.index(stop) + 1 if stop in generated else NEW_TOKENS for generated in free]
    stopped = model.generate(RAGGED, NEW_TOKENS, stop=stop)
    assert stopped == [prompt + generated[:end] for prompt, generated, end in zip(RAGGED, free, ends, strict=True)]

    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    free = model.generate(ids, NEW_TOKENS)[:, 5:]
    stop = int(free[0, 1])
    generated = model.generate(ids, NEW_TOKENS, stop=[stop], pad=16)[:, 5:]
    for row in range(2):
        end = free[row].tolist().index(stop) + 1 if stop in free[row] else generated.shape[1]
        assert torch.equal(generated[row, :end], free[row, :end])
        assert bool((generated[row, end:] == 16).all())


def test_generate_stop_sequence_needs_all_tokens() -> None:
    model = make_varied_model(MODELS["decoder"])
    generated = model.generate(PROMPT, NEW_TOKENS)[len(PROMPT) :]
    pair = generated[3:5]
    end = next(i for i in range(NEW_TOKENS) if generated[i : i + 2] == pair) + 2
    assert model.generate(PROMPT, NEW_TOKENS, stop=[pair]) == PROMPT + generated[:end]
    assert model.generate(PROMPT, NEW_TOKENS, stop=[[99, 98], pair, 97]) == PROMPT + generated[:end]
    backwards = [PROMPT[-1], generated[0]]
    assert model.generate(PROMPT, 1, stop=[backwards]) == [*PROMPT, generated[0]]
    assert len(model.generate(PROMPT, NEW_TOKENS, stop=[backwards])) > len(PROMPT) + 1, (
        "the prompt is no part of a stop"
    )


# Streaming.


def test_stream_yields_same_tokens_as_generate() -> None:
    model = make_varied_model(MODELS["decoder"])
    steps = list(model.stream(torch.tensor([PROMPT, PROMPT[::-1]]), NEW_TOKENS))
    assert all(step.shape == (2,) for step in steps)
    assert torch.equal(torch.stack(steps, 1), model.generate(torch.tensor([PROMPT, PROMPT[::-1]]), NEW_TOKENS)[:, 5:])


@pytest.mark.parametrize("training", [True, False])
def test_stream_closed_or_failed_restores_mode(training: bool) -> None:
    model = make_varied_model(MODELS["decoder"]).train(training)
    model.generate(PROMPT, 2)
    assert model.training is training
    steps = model.stream(PROMPT, NEW_TOKENS)
    next(steps)
    steps.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert model.training is training
    with pytest.raises(HeadwiseError):
        model.generate(PROMPT, 4, cache=model.cache("static", 2))
    assert model.training is training
    assert torch.is_grad_enabled()


def test_generate_training_mode_applies_no_dropout() -> None:
    spec = replace(MODELS["decoder"], dropout=0.5)
    model = make_varied_model(spec)
    want = model.generate(PROMPT, NEW_TOKENS)
    assert model.train().generate(PROMPT, NEW_TOKENS) == want


def test_generate_options_match_prepared_keywords() -> None:
    parameters = inspect.signature(prepare_generation).parameters
    keywords = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(GenerateOptions.__annotations__) == keywords


# Sampling.


def expected_probabilities(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Compute the probabilities of top-k and then top-p sampling by hand."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weight = {i: torch.tensor(logits[i] / temperature, dtype=torch.float64).exp().item() for i in order}
    total, cumulative, selected = sum(weight.values()), 0.0, []
    for i in order:
        if top_p is None or cumulative < top_p:
            selected.append(i)
        cumulative += weight[i] / total
    selected_total = sum(weight[i] for i in selected)
    return torch.tensor([weight[i] / selected_total if i in selected else 0.0 for i in range(len(logits))])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 50])
@pytest.mark.parametrize("top_p", [None, 0.001, 0.3, 0.9, 1.0])
def test_sampling_probabilities_equal_formula(temperature: float, top_k: int | None, top_p: float | None) -> None:
    rows = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
    got = Sampling(temperature, top_k, top_p).probabilities(rows)
    want = torch.stack([expected_probabilities(row, temperature, top_k, top_p) for row in rows.tolist()])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_sampling_pick_follows_probabilities() -> None:
    """Each count is within 5 standard errors of its expected value."""
    logits, n = torch.tensor([[0.0, 1.0, 2.0, -1.0]]), 20_000
    sampling = Sampling(0.8, top_k=3)
    frequencies = sampling.pick(logits.expand(n, -1), torch.Generator().manual_seed(0)).bincount(minlength=4) / n
    want = expected_probabilities([0.0, 1.0, 2.0, -1.0], 0.8, 3, None)
    assert bool(((frequencies - want).abs() <= 5 * (want * (1 - want) / n).sqrt()).all())


def test_generate_same_seed_reproduces_and_keeps_rng_state() -> None:
    model = make_varied_model(MODELS["decoder"])
    with torch.no_grad():
        randomize(model, seed=3)
        model.embed.tokens.weight.mul_(0.1)  # a flat distribution
    state = torch.get_rng_state()
    first, second = (model.generate(RAGGED, NEW_TOKENS, temperature=2.0, seed=7) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == second
    assert first != model.generate(RAGGED, NEW_TOKENS, temperature=2.0, seed=8)
    assert model.generate(PROMPT, NEW_TOKENS, temperature=2.0, top_k=1) == model.generate(PROMPT, NEW_TOKENS)


# Errors.

ERRORS: dict[str, tuple[str, Any, str]] = {
    "empty": ("decoder", lambda m: m.generate([], 3), r"empty\. Pass at least one token"),
    "one empty": ("decoder", lambda m: m.generate([[1], []], 3), r"empty\. Pass at least one token"),
    "empty tensor": ("decoder", lambda m: m.generate(torch.zeros(1, 0).long(), 3), "it is empty"),
    "too long": (
        "decoder",
        lambda m: m.generate(PROMPT, 16),
        "max_new_tokens=16: with a prompt of 5 tokens this exceeds the 19 learned positions .*max_new_tokens=15",
    ),
    "prompt too long": ("decoder", lambda m: m.generate([1] * 25, 1), "prompt of 25 tokens .*max_new_tokens=0"),
    "fewer than none": (
        "decoder",
        lambda m: m.generate(PROMPT, -1),
        "max_new_tokens=-1",
    ),
    "text": ("decoder", lambda m: m.generate("Once", 3), "has no tokenizer"),
    "one axis": ("decoder", lambda m: m.generate(torch.tensor([1, 2]), 3), r"\(batch, tokens\)"),
    "encoder": ("encoder", lambda m: m.generate(PROMPT, 3), "Use a decoder with output='lm'"),
    "no source": ("encoder-decoder", lambda m: m.generate(PROMPT, 3), "source=source_ids"),
    "temperature": ("decoder", lambda m: m.generate(PROMPT, 3, temperature=-1.0), "temperature=-1.0"),
    "no draw": (
        "decoder",
        lambda m: m.generate(PROMPT, 3, top_k=5),
        "Set temperature=1.0",
    ),
    "top_k": ("decoder", lambda m: m.generate(PROMPT, 3, temperature=1.0, top_k=0), "top_k=0"),
    "top_p": (
        "decoder",
        lambda m: m.generate(PROMPT, 3, temperature=1.0, top_p=0.0),
        "top_p=0.0",
    ),
    "cache full": (
        "decoder",
        lambda m: m.generate(PROMPT, 9, cache=m.cache("static", 7)),
        "Its size is 7",
    ),
}


@pytest.mark.parametrize(("name", "act", "message"), ERRORS.values(), ids=ERRORS)
def test_generate_invalid_argument_raises(name: str, act: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        act(make_varied_model(MODELS[name]))


def test_generate_context_limit_allows_last_token() -> None:
    model = make_varied_model(MODELS["decoder"])
    assert len(model.generate(PROMPT, 15)) == 20, "the last one is written, never read"
    headless = make_varied_model(replace(MODELS["decoder"], output="none"))
    with pytest.raises(HeadwiseError, match="this model has no next-token output"):
        headless.generate(PROMPT, 3)
