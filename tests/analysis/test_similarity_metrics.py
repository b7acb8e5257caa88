"""Similarity metrics of heads: closed forms, scipy, dense matrices, and random weights."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from headwise.analysis.similarity.attention_similarity import cka, cka_matrix, js_sums, permuted_cka_threshold
from headwise.analysis.similarity.weight_similarity import (
    composition_score,
    effective_rank,
    orthonormal_bases,
    ov_copying,
    pairwise_product_squared_norms,
    subspace_overlap,
)
from headwise.errors import HeadwiseError
from headwise.heads.head import Circuit


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=make_generator(seed), dtype=torch.float64)


# Divergence.


def js_divergence(*rows: Sequence[float]) -> float:
    return float(js_sums(torch.tensor(rows, dtype=torch.float64))[0, 1])


def test_js_divergence_matches_closed_forms() -> None:
    n = 64
    uniform, one_hot = [1 / n] * n, [1.0] + [0.0] * (n - 1)
    assert js_divergence(uniform, uniform) == 0
    assert js_divergence(one_hot, [0.0, 1.0] + [0.0] * (n - 2)) == pytest.approx(math.log(2))
    assert js_divergence(one_hot, uniform) == pytest.approx(0.6528, abs=5e-5)


def test_js_sums_equal_squared_scipy_distance() -> None:
    P = torch.softmax(randn(4, 7, 13), -1)
    P[:, 2, 5:] = 0
    P[:, 2] /= P[:, 2].sum(-1, keepdim=True)
    divergences = js_sums(P.flatten(1))
    for a in range(4):
        for b in range(4):
            rows = [jensenshannon(p, q) ** 2 for p, q in zip(P[a].numpy(), P[b].numpy(), strict=True)]
            assert divergences[a, b] == pytest.approx(sum(rows), abs=1e-12)
    single = js_sums(P.float().flatten(1))
    np.testing.assert_allclose(single, divergences, atol=1e-5)


# CKA.


def test_cka_is_invariant_to_rotation_and_scale() -> None:
    X = randn(90, 11)
    rotation, _ = torch.linalg.qr(randn(11, 11, seed=1))
    for debiased in (True, False):
        assert cka(X, 3 * X @ rotation + 5, debiased=debiased) == pytest.approx(1)
    assert cka(X, X @ torch.diag(torch.tensor([1.0] + [0.0] * 10, dtype=torch.float64))) < 0.6


def test_cka_independent_data_is_zero_if_debiased() -> None:
    n, p = 60, 30
    biased, debiased = [], []
    for seed in range(40):
        X, Y = randn(n, p, seed=seed), randn(n, p, seed=1000 + seed)
        biased.append(cka(X, Y, debiased=False))
        debiased.append(cka(X, Y))
    assert np.mean(biased) == pytest.approx(p / (n - 1 + p), abs=0.01)
    assert np.mean(debiased) == pytest.approx(0, abs=0.015)


def unbiased_hsic(K: np.ndarray, L: np.ndarray) -> float:
    """The estimator of https://www.jmlr.org/papers/v13/song12a.html with its n×n matrices."""
    n = len(K)
    K, L = K - np.diag(np.diag(K)), L - np.diag(np.diag(L))
    ones = np.ones(n)
    outer = (ones @ K @ ones) * (ones @ L @ ones) / (n - 1) / (n - 2)
    return float(np.trace(K @ L) + outer - 2 / (n - 2) * ones @ K @ L @ ones)


def test_cka_matrix_equals_gram_matrix_estimator() -> None:
    X = randn(3, 17, 5) + 4
    grams = [(x @ x.T).numpy() for x in X]
    similarity = cka_matrix(X)
    for a in range(3):
        for b in range(3):
            sizes = unbiased_hsic(grams[a], grams[a]) * unbiased_hsic(grams[b], grams[b])
            assert similarity[a, b] == pytest.approx(unbiased_hsic(grams[a], grams[b]) / math.sqrt(sizes))
    assert abs(float(permuted_cka_threshold(randn(6, 400, 5), seed=0))) < 0.03
    assert np.isnan(cka_matrix(torch.ones(2, 9, 3))).all()  # a constant has no variance
    assert np.isnan(cka_matrix(randn(2, 3, 3))).all()


# Weights: one head.


def test_ov_copying_matches_closed_forms() -> None:
    P, _ = torch.linalg.qr(randn(9, 4))
    theta = 0.7
    rotation = torch.tensor(
        [[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]], dtype=torch.float64
    )
    assert ov_copying(Circuit(P, 3 * P.T)) == pytest.approx(1)
    assert ov_copying(Circuit(P, -P.T)) == pytest.approx(-1)
    assert ov_copying(Circuit(P[:, :2], rotation @ P[:, :2].T)) == pytest.approx(math.cos(theta))
    assert math.isnan(ov_copying(Circuit(0 * P, P.T)))


def test_ov_copying_random_weights_has_known_spread() -> None:
    d = 16
    scores = [ov_copying(Circuit(randn(256, d, seed=s), randn(d, 256, seed=999 + s))) for s in range(200)]
    assert np.mean(scores) == pytest.approx(0, abs=0.02)
    assert np.std(scores) == pytest.approx(1.5 / d, rel=0.2)


def test_effective_rank_matches_closed_forms() -> None:
    Q, _ = torch.linalg.qr(randn(11, 5))
    assert effective_rank(7 * Q) == pytest.approx(5)
    assert effective_rank(Circuit(Q, 2 * Q.T)) == pytest.approx(5)
    assert effective_rank(randn(11, 1) @ randn(1, 8)) == pytest.approx(1)
    fractions = np.array([9.0, 4, 1]) / 14
    assert effective_rank(torch.diag(torch.tensor([3.0, 2, 1]))) == pytest.approx(
        math.exp(-(fractions * np.log(fractions)).sum())
    )


# Weights: two heads.


def test_subspace_overlap_equals_principal_angles() -> None:
    A, B = randn(19, 5), torch.cat((randn(19, 3, seed=1), randn(19, 2) + 0.3 * randn(19, 2, seed=2)), 1)
    angles = scipy.linalg.subspace_angles(A.numpy(), B.numpy())
    assert subspace_overlap(A, B) == pytest.approx((np.cos(angles) ** 2).mean())
    assert subspace_overlap(A, A @ randn(5, 5, seed=4)) == pytest.approx(1)
    Q, _ = torch.linalg.qr(randn(19, 10))
    assert subspace_overlap(Q[:, :5], Q[:, 5:]) == pytest.approx(0, abs=1e-12)
    with pytest.raises(HeadwiseError, match="same number of rows"):
        subspace_overlap(A, B.T)


def test_subspace_overlap_ignores_dependent_columns() -> None:
    A = randn(19, 2) @ randn(2, 5)  # five columns of rank two
    assert subspace_overlap(A, A[:, :2]) == pytest.approx(1)
    assert subspace_overlap(A, torch.cat((A[:, :1], randn(19, 1, seed=8)), 1)) < 0.8
    assert orthonormal_bases(A[None]).square().sum() == pytest.approx(2)
    assert math.isnan(subspace_overlap(0 * A, A))


def test_subspace_overlap_random_subspaces_match_expectation() -> None:
    overlaps = [subspace_overlap(randn(31, 4, seed=s), randn(31, 4, seed=500 + s)) for s in range(200)]
    assert np.mean(overlaps) == pytest.approx(4 / 31, rel=0.06)


def test_composition_equals_dense_norm_ratio() -> None:
    D, d = 23, 5
    A, B = (Circuit(randn(D, d, seed=s), randn(d, D, seed=s + 10)) for s in (1, 2))
    expected = (A.dense() @ B.dense()).norm() / A.dense().norm() / B.dense().norm()
    assert composition_score(A, B) == pytest.approx(float(expected))
    Q, _ = torch.linalg.qr(randn(D, 2 * d))
    same, other = Circuit(Q[:, :d], Q[:, :d].T), Circuit(Q[:, d:], Q[:, d:].T)
    assert composition_score(same, same) == pytest.approx(1 / math.sqrt(d))
    assert composition_score(same, other) == pytest.approx(0, abs=1e-12)


def test_composition_is_directional() -> None:
    e = torch.eye(4, dtype=torch.float64)
    first, second = Circuit(e[:, :1], e[1:2]), Circuit(e[:, 1:2], e[2:3])
    assert composition_score(first, second) == 1
    assert composition_score(second, first) == 0


def test_composition_random_circuits_match_expectation() -> None:
    D, d = 47, 4
    squared = [
        composition_score(*(Circuit(randn(D, d, seed=k + s), randn(d, D, seed=k + 5000 + s)) for k in (0, 900))) ** 2
        for s in range(300)
    ]
    assert np.mean(squared) == pytest.approx(1 / D, rel=0.06)


def test_product_norms_equal_dense_products() -> None:
    left, right = randn(3, 2, 7), randn(4, 7, 5)
    expected = torch.stack([torch.stack([(a @ b).square().sum() for b in right]) for a in left])
    np.testing.assert_allclose(pairwise_product_squared_norms(left, right), expected.numpy())
