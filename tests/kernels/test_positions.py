"""Positions against their closed formulas, complex numbers, transformers and the ALiBi paper."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels import Alibi, Angles, alibi_slopes, sinusoidal
from headwise.kernels.positions import rotary_frequencies
from headwise.spec import Rotary, RotaryScaling

B, H, T, d = 2, 3, 7, 10
each_layout = pytest.mark.parametrize("layout", ["half", "interleaved"])


def random_heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# Sinusoids: https://arxiv.org/abs/1706.03762, section 3.5.


@pytest.mark.parametrize("width", [2, 13, 64])
def test_sinusoids_follow_the_formula(width: int) -> None:
    places = [0, 1, 2, 17, 4096]
    table = sinusoidal(torch.tensor(places), width)
    assert table.shape == (len(places), width)
    for row, place in enumerate(places):
        for channel in range(width):
            angle = place / 10000 ** (2 * (channel // 2) / width)
            want = math.cos(angle) if channel % 2 else math.sin(angle)
            assert table[row, channel].item() == pytest.approx(want, abs=1e-6)


def test_sinusoids_keep_leading_axes() -> None:
    places = torch.tensor([[0, 1, 2], [5, 6, 7]])
    assert torch.equal(sinusoidal(places, 6)[1], sinusoidal(places[1], 6))


# Rotary: https://arxiv.org/abs/2104.09864. A pair of channels is a complex number, turned by its place times its speed.


def turn_as_complex(x: Tensor, places: Tensor, rotary: Rotary) -> np.ndarray:
    """Rotate (B, H, T, dims) by multiplying complex numbers; `places` is (B, T)."""
    dims, numbers = x.shape[-1], x.numpy()
    half = dims // 2
    first, second = (
        (slice(0, half), slice(half, None)) if rotary.layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    )
    speed = rotary.theta ** (-2 * np.arange(half) / dims)
    pairs = numbers[..., first] + 1j * numbers[..., second]
    pairs = pairs * np.exp(1j * places.numpy()[:, None, :, None] * speed)
    turned = np.empty_like(numbers)
    turned[..., first], turned[..., second] = pairs.real, pairs.imag
    return turned


@each_layout
@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rotary_is_complex_multiplication(layout, theta: float) -> None:
    rotary, x = Rotary(theta=theta, layout=layout), random_heads(B, H, T, d)
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 9, 4, 31, 2, 100]])  # each batch row may stand elsewhere
    got = Angles.at(places, rotary, d, torch.float64).turn(x)
    # The angles are made in float32, as in the models they have to equal: 100 radians are known to 4e-6.
    np.testing.assert_allclose(got.numpy(), turn_as_complex(x, places, rotary), atol=2e-5)


@each_layout
def test_one_run_of_places_serves_the_whole_batch(layout) -> None:
    rotary, x = Rotary(layout=layout), random_heads(B, H, T, d)
    run = torch.arange(3, 3 + T)
    together = Angles.at(run, rotary, d, torch.float64).turn(x)
    apart = Angles.at(run.expand(B, T), rotary, d, torch.float64).turn(x)
    assert torch.equal(together, apart)


@each_layout
def test_scores_depend_on_the_distance_only(layout) -> None:
    """The same query and key at every place: the scores are constant along each diagonal."""
    query, key = random_heads(2, 1, 1, 1, d).expand(2, 1, 1, T, d)
    angles = Angles.at(torch.arange(5, 5 + T), Rotary(layout=layout), d, torch.float64)
    scores = (angles.turn(query) @ angles.turn(key).mT)[0, 0]  # (T, T)
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-5, rtol=0)
    assert (scores[0, 0] - scores[3, 0]).abs() > 1e-2, "and they do depend on it"


@each_layout
def test_channels_beyond_dims_pass_through(layout) -> None:
    x = random_heads(B, H, T, d)
    places = torch.arange(T)
    turned = Angles.at(places, Rotary(layout=layout, dims=6), d, torch.float64).turn(x)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    # Those that turn do so as if the head had no others.
    alone = Angles.at(places, Rotary(layout=layout), 6, torch.float64).turn(x[..., :6])
    assert torch.equal(turned[..., :6], alone)


def test_angles_are_float32_unless_asked() -> None:
    assert Angles.at(torch.arange(T), Rotary(), d).cos.dtype == torch.float32
    assert Angles.at(torch.arange(T), Rotary(), d, torch.bfloat16).sin.dtype == torch.bfloat16


SCALINGS = {
    "linear": RotaryScaling("linear", factor=4.0),
    "Llama 3.1": RotaryScaling("llama3", factor=8.0),
    "Llama 3.2": RotaryScaling("llama3", factor=32.0),
    "another blend": RotaryScaling(
        "llama3", factor=3.0, low_freq_factor=2.0, high_freq_factor=7.0, original_context=512
    ),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaled_frequencies_equal_those_of_transformers(scaling: RotaryScaling, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": scaling.kind,
            "rope_theta": 500000.0,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        },
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    assert attention_factor == 1.0
    ours = rotary_frequencies(Rotary(theta=500000.0, scaling=scaling), head_dim)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


# ALiBi: https://arxiv.org/abs/2108.12409. For 8 heads the paper prints 1/2 … 1/256; for 12 its published code takes
# those of 8 and then every other one of 16.

PUBLISHED_SLOPES = {
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
    16: [2 ** (-(n + 1) / 2) for n in range(16)],
    1: [1 / 256],
}


@pytest.mark.parametrize("heads", PUBLISHED_SLOPES)
def test_alibi_slopes_are_the_published_ones(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(PUBLISHED_SLOPES[heads]), rtol=1e-6, atol=0)


def test_alibi_needs_a_head() -> None:
    with pytest.raises(HeadwiseError, match="ALiBi needs at least one head, got 0"):
        alibi_slopes(0)


@pytest.mark.parametrize("S", [7, 11, 5])
def test_alibi_leans_away_from_what_is_far(S: int) -> None:
    """The last query stands at the last key, as with a cache; distance counts in both directions."""
    slopes = alibi_slopes(H)
    whole = Alibi(slopes).block(range(T), range(S), T, S)
    assert whole.shape == (1, H, T, S)
    for head, query, key in np.ndindex(H, T, S):
        want = -slopes[head].item() * abs(query + S - T - key)
        assert whole[0, head, query, key].item() == pytest.approx(want)


def test_an_alibi_block_is_a_slice_of_the_whole() -> None:
    alibi = Alibi(alibi_slopes(H))
    whole = alibi.block(range(T), range(11), T, 11)
    assert torch.equal(alibi.block(range(2, 5), range(3, 10), T, 11), whole[:, :, 2:5, 3:10])
