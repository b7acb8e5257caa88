"""The first gate: two seconds, one pass through every room."""

import torch

import headwise as hw


def test_a_model_runs_and_its_heads_can_be_silenced() -> None:
    torch.manual_seed(0)
    spec = hw.ModelSpec(
        vocab=17, context=16, layers=2, attention=hw.AttentionSpec(width=12, heads=3, rotary=hw.Rotary())
    )
    model = hw.Transformer(spec).eval()
    ids = torch.randint(0, 17, (2, 7))
    plain = model(ids)
    assert plain.shape == (2, 7, 17)

    calls = []
    with model.sites()[0].listen(calls.append):
        assert torch.equal(model(ids), plain)
    assert calls[0].z.shape == (2, 3, 7, 4)

    with model.heads["1.2"].silenced():
        silent = model(ids)
    assert not torch.equal(silent, plain)
    assert torch.equal(silent, model(ids, gates={"1.2": 0.0}))
    assert model.generate(ids, tokens=4).shape == (2, 11)


def test_kernels_agree() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    outs = [hw.attention(q, k, v, mask=hw.causal(), backend=b) for b in ("reference", "batched", "fused", "blockwise")]
    assert all(torch.allclose(out, outs[0], atol=1e-12) for out in outs)
