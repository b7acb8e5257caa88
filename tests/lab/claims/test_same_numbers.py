import torch

from headwise.heads import MultiHeadAttention
from headwise.lab.claims.same_numbers import furthest

CASES = {
    "holds": [("relative difference", "batched", 1e-7), ("relative difference", "fused", 2e-7),
              ("relative difference", "blockwise", 2e-7)],
    "depends": [("relative difference", "batched", 1e-7), ("relative difference", "fused", 2e-3),
                ("relative difference", "blockwise", 2e-7)],
    "does not hold": [("relative difference", form, 0.1) for form in ("batched", "fused", "blockwise")],
}  # fmt: skip


def test_a_form_that_is_told_apart():
    layer = MultiHeadAttention(width=12, heads=3)
    found = furthest(layer, torch.randn(2, 7, 12))
    assert set(found) == {"batched", "fused", "blockwise"}
    assert max(found.values()) < 1e-5
    assert layer.backend == "auto"
