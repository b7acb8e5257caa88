"""Position encodings against closed formulas, complex numbers, transformers and the ALiBi paper."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwise.errors import HeadwiseError
from headwise.kernels import AlibiBias, RotaryTable, alibi_slopes, sinusoidal
from headwise.kernels.positions import rotary_frequencies
from headwise.spec import AttentionSpec, Rotary, RotaryScaling

B, H, T, d = 2, 3, 7, 10
each_layout = pytest.mark.parametrize("layout", ["half", "interleaved"])


def random_heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# Sinusoids: https://arxiv.org/abs/1706.03762, section 3.5.


@pytest.mark.parametrize("width", [2, 13, 64])
def test_sinusoidal_any_width_equals_formula(width: int) -> None:
    positions = [0, 1, 2, 17, 4096]
    table = sinusoidal(torch.tensor(positions), width)
    assert table.shape == (len(positions), width)
    for row, position in enumerate(positions):
        for channel in range(width):
            angle = position / 10000 ** (2 * (channel // 2) / width)
            want = math.cos(angle) if channel % 2 else math.sin(angle)
            assert table[row, channel].item() == pytest.approx(want, abs=1e-6)


def test_sinusoidal_batched_positions_keep_leading_axes() -> None:
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    assert torch.equal(sinusoidal(positions, 6)[1], sinusoidal(positions[1], 6))


# Rotary: https://arxiv.org/abs/2104.09864. A pair of channels is a complex number, rotated by position times frequency.


def rotate_as_complex(x: Tensor, positions: Tensor, rotary: Rotary) -> np.ndarray:
    """Rotate (B, H, T, dims) by complex multiplication. `places` is (B, T)."""
    dims, values = x.shape[-1], x.numpy()
    half = dims // 2
    first, second = (
        (slice(0, half), slice(half, None)) if rotary.layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    )
    speed = rotary.theta ** (-2 * np.arange(half) / dims)
    pairs = values[..., first] + 1j * values[..., second]
    pairs = pairs * np.exp(1j * positions.numpy()[:, None, :, None] * speed)
    rotated = np.empty_like(values)
    rotated[..., first], rotated[..., second] = pairs.real, pairs.imag
    return rotated


@each_layout
@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rotary_table_rotate_equals_complex_product(layout, theta: float) -> None:
    rotary, x = Rotary(theta=theta, layout=layout), random_heads(B, H, T, d)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 9, 4, 31, 2, 100]])  # examples may have different positions
    got = RotaryTable.at(positions, rotary, d, torch.float64).rotate(x)
    # Angles are computed in float32, as in the models that they must equal: 100 radians have an error of 4e-6.
    np.testing.assert_allclose(got.numpy(), rotate_as_complex(x, positions, rotary), atol=2e-5)


@each_layout
def test_rotary_table_shared_positions_equal_per_row(layout) -> None:
    rotary, x = Rotary(layout=layout), random_heads(B, H, T, d)
    positions = torch.arange(3, 3 + T)
    shared = RotaryTable.at(positions, rotary, d, torch.float64).rotate(x)
    per_row = RotaryTable.at(positions.expand(B, T), rotary, d, torch.float64).rotate(x)
    assert torch.equal(shared, per_row)


@each_layout
def test_rotary_scores_depend_on_distance_only(layout) -> None:
    """Scores of one query and key at all positions are constant along each diagonal."""
    query, key = random_heads(2, 1, 1, 1, d).expand(2, 1, 1, T, d)
    rotary_table = RotaryTable.at(torch.arange(5, 5 + T), Rotary(layout=layout), d, torch.float64)
    scores = (rotary_table.rotate(query) @ rotary_table.rotate(key).mT)[0, 0]  # (T, T)
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-5, rtol=0)
    assert (scores[0, 0] - scores[3, 0]).abs() > 1e-2, "and they do depend on it"


@each_layout
def test_rotary_channels_beyond_dims_unchanged(layout) -> None:
    x = random_heads(B, H, T, d)
    positions = torch.arange(T)
    rotated = RotaryTable.at(positions, Rotary(layout=layout, dims=6), d, torch.float64).rotate(x)
    assert torch.equal(rotated[..., 6:], x[..., 6:])
    # Rotated channels do not depend on the other channels.
    alone = RotaryTable.at(positions, Rotary(layout=layout), 6, torch.float64).rotate(x[..., :6])
    assert torch.equal(rotated[..., :6], alone)


def test_rotary_table_default_dtype_is_float32() -> None:
    assert RotaryTable.at(torch.arange(T), Rotary(), d).cos.dtype == torch.float32
    assert RotaryTable.at(torch.arange(T), Rotary(), d, torch.bfloat16).sin.dtype == torch.bfloat16


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
def test_rotary_frequencies_scaled_equal_transformers(scaling: RotaryScaling, head_dim: int) -> None:
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
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    assert attention_factor == 1.0
    actual = rotary_frequencies(Rotary(theta=500000.0, scaling=scaling), head_dim)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


# ALiBi: https://arxiv.org/abs/2108.12409. For 8 heads the paper prints 1/2 … 1/256. For 12 heads its published code uses
# the slopes of 8 heads and then every other slope of 16 heads.

PUBLISHED_SLOPES = {
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
    16: [2 ** (-(n + 1) / 2) for n in range(16)],
    1: [1 / 256],
}


@pytest.mark.parametrize("heads", PUBLISHED_SLOPES)
def test_alibi_slopes_equal_published(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(PUBLISHED_SLOPES[heads]), rtol=1e-6, atol=0)


def test_alibi_slopes_zero_heads_raise() -> None:
    with pytest.raises(HeadwiseError, match="heads=0: ALiBi needs at least one head"):
        alibi_slopes(0)


@pytest.mark.parametrize("S", [7, 11, 5])
def test_alibi_bias_block_equals_formula(S: int) -> None:
    """The last query is at the last key, as with a cache, and the distance is absolute."""
    slopes = alibi_slopes(H)
    full = AlibiBias(slopes).block(range(T), range(S), T, S)
    assert full.shape == (1, H, T, S)
    for head, query, key in np.ndindex(H, T, S):
        want = -slopes[head].item() * abs(query + S - T - key)
        assert full[0, head, query, key].item() == pytest.approx(want)


def test_alibi_bias_block_equals_slice_of_full() -> None:
    alibi = AlibiBias(alibi_slopes(H))
    full = alibi.block(range(T), range(11), T, 11)
    assert torch.equal(alibi.block(range(2, 5), range(3, 10), T, 11), full[:, :, 2:5, 3:10])


# Scaling of rotary frequencies, against transformers.

SETTINGS: dict[str, tuple[RotaryScaling, dict[str, Any]]] = {
    "yarn": (RotaryScaling("yarn", 4.0, original_context=32), {"original_max_position_embeddings": 32}),
    "yarn, all settings": (
        RotaryScaling(
            "yarn", 6.0, original_context=64, beta_fast=8.0, beta_slow=2.0, truncate=False, attention_factor=1.7
        ),
        {
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.7,
        },
    ),
    "dynamic": (RotaryScaling("dynamic", 3.0, original_context=48), {}),
    "longrope": (
        RotaryScaling("longrope", 8.0, original_context=32, short_factors=(1.0,) * 8, long_factors=tuple(range(1, 9))),
        {
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8,
            "long_factor": [float(i) for i in range(1, 9)],
        },
    ),
}


@pytest.mark.parametrize("length", [16, 48, 100])
@pytest.mark.parametrize("name", SETTINGS)
def test_rotary_scaling_equals_transformers(name: str, length: int) -> None:
    scaling, settings = SETTINGS[name]
    parameters = {"rope_type": scaling.kind, "rope_theta": 500.0, "factor": scaling.factor, **settings}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=48, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu", seq_len=length)
    rotary = Rotary(theta=500.0, scaling=scaling)
    torch.testing.assert_close(rotary_frequencies(rotary, 16, length=length), expected, rtol=1e-6, atol=0)
    assert scaling.cos_sin_factor == pytest.approx(factor, rel=1e-12)
    table = RotaryTable.at(torch.arange(length), rotary, 16)
    want = torch.cos(torch.arange(length)[:, None].float() * expected) * factor
    torch.testing.assert_close(table.cos[0, 0, :, :8], want, rtol=1e-5, atol=1e-5)


def test_rotary_longrope_wrong_number_of_factors_raises() -> None:
    scaling = RotaryScaling("longrope", 2.0, short_factors=(1.0,), long_factors=(2.0,))
    with pytest.raises(HeadwiseError, match="one factor for each of 4 pairs"):
        AttentionSpec(width=16, heads=2, rotary=Rotary(scaling=scaling))
    with pytest.raises(HeadwiseError, match="needs one positive number"):
        RotaryScaling("longrope", 2.0)
