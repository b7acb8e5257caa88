"""Shared helpers of kernel tests: hypothesis strategies for masks and calls, kernels by name, and a comparison."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.kernels import (
    AlibiBias,
    Mask,
    alibi_slopes,
    attention,
    blockwise,
    causal,
    document_mask,
    make_score_params,
    padding_mask,
    per_head,
    reference,
    window,
)

# Every run and worker draws equal examples, so that a failure is reproducible.
FIXED_SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

FLOATS = (torch.float64, torch.float32)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

# Batch, queries, keys and channels are distinct primes, so that a swapped axis cannot pass. 1 is an additional edge case.
BATCHES = (1, 2)
TOKENS = ((7, 11), (13, 11), (11, 11), (7, 13), (3, 7), (1, 11), (7, 1), (1, 1))
CHANNELS = ((17, 17), (17, 5), (5, 19))  # channels of q and k, channels of v

# Sharing of KV heads: (heads, KV heads, kv_of_head).
HEADS: tuple[tuple[int, int, tuple[int, ...] | None], ...] = (
    (3, 3, None),  # plain
    (6, 3, None),  # grouped-query
    (3, 1, None),  # multi-query
    (5, 3, (0, 0, 0, 1, 2)),  # uneven, as after pruning
    (5, 3, (2, 0, 0, 2, 0)),  # out of order, and one unused KV head
)


@dataclass(frozen=True)
class KernelCall:
    """Arguments of one call of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None = None
    bias: Tensor | AlibiBias | None = None
    softcap: float | None = None
    sink: Tensor | float | None = None
    kv_of_head: tuple[int, ...] | None = None
    scale: float | None = None
    dropout: float = 0.0

    @property
    def options(self) -> dict:
        """Return all arguments except q, k and v."""
        return {name: value for name, value in vars(self).items() if name not in ("q", "k", "v")}

    def to(self, dtype: torch.dtype) -> "KernelCall":
        """Return the call in another dtype."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(
            self, **{name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in tensors.items()}
        )

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Return every tensor that needs a gradient."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and x.requires_grad}


Kernel = Callable[[KernelCall], Tensor]


def backend_kernel(backend: str) -> Kernel:
    return lambda call: attention(call.q, call.k, call.v, **call.options, backend=backend)


def blockwise_kernel(row_block: int, head_block: int | None) -> Kernel:
    def kernel(call: KernelCall) -> Tensor:
        params = make_score_params(call.q, call.k, call.v, **call.options)
        return blockwise(call.q, call.k, call.v, params, row_block=row_block, head_block=head_block)

    return kernel


KERNELS: dict[str, Kernel] = {
    "batched": backend_kernel("batched"),
    "fused": backend_kernel("fused"),
    "blockwise": backend_kernel("blockwise"),
    "blockwise, 3 rows": blockwise_kernel(3, None),
    "blockwise, 3 rows, 2 heads": blockwise_kernel(3, 2),
    "auto": backend_kernel("auto"),
}


def oracle(call: KernelCall) -> Tensor:
    """The reference kernel."""
    return reference(call.q, call.k, call.v, make_score_params(call.q, call.k, call.v, **call.options))


def forward_and_backward(kernel: Kernel, call: KernelCall) -> dict[str, Tensor]:
    """Return the output of a call and its gradients for a fixed random output gradient."""
    z = kernel(call)
    output_grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(z.dtype)
    leaves = call.leaves
    grads = torch.autograd.grad(z, list(leaves.values()), output_grad, materialize_grads=True) if leaves else ()
    return {"z": z.detach()} | {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Compare relative to the largest entry, or to 1 if the largest entry is smaller."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].shape == expected.shape, f"{name}: {got[name].shape}, want {expected.shape}"
        if expected.numel():
            error = (got[name].double() - expected.double()).abs().max().item()
            assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name} is off by {error:.1e}"


# Hypothesis strategies. Random tensors come from a drawn seed, because single values are not interesting for kernels.


@st.composite
def random_bools(draw: st.DrawFn, *shape: int, share: float = 0.6) -> Tensor:
    """Return a random bool tensor."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return torch.rand(shape, generator=generator) < share


@st.composite
def dense_masks(draw: st.DrawFn, B: int, H: int, T: int, S: int) -> Mask:
    """Draw an arbitrary mask with two, three or four axes, each full or 1, sometimes with rows without visible keys."""
    full = (B, H, T, S)
    shape = draw(st.sampled_from([full, (B, T, S), (T, S), (1, H, T, S), (B, 1, 1, S), (B, H, T, 1), (1, 1, 1, 1)]))
    tensor = draw(random_bools(*shape))
    return Mask.of(tensor & draw(random_bools(*shape[:-1], 1)) if draw(st.booleans()) else tensor)


def leaf_masks(B: int, H: int, T: int, S: int) -> st.SearchStrategy[Mask]:
    """Draw a mask that is not a combination of masks."""
    offsets = st.none() | st.integers(-T - 2, S + 2)
    sizes, batches = st.integers(1, S + 2), st.sampled_from((1, B))
    documents = st.integers(0, 999).map(lambda seed: torch.Generator().manual_seed(seed))
    return st.one_of(
        st.builds(causal, offsets),
        st.builds(window, sizes, st.none() | st.integers(0, S), offsets),
        st.builds(padding_mask, batches.flatmap(lambda batch: random_bools(batch, S, share=0.7))),
        st.builds(
            lambda batch, draws: document_mask(
                torch.randint(3, (batch, S), generator=draws), torch.randint(3, (batch, T), generator=draws)
            ),
            batches,
            documents,
        ),
        dense_masks(B, H, T, S),
    )


def masks(B: int, H: int, T: int, S: int) -> st.SearchStrategy[Mask]:
    """Draw any mask: a single mask, one per head, or several combined by & and |."""
    single = leaf_masks(B, H, T, S)
    head_masks = st.builds(per_head, st.lists(leaf_masks(B, 1, T, S), min_size=H, max_size=H))
    base_mask = single | head_masks
    return st.one_of(
        base_mask,
        st.builds(lambda a, b: a & b, base_mask, base_mask),
        st.builds(lambda a, b: a | b, base_mask, base_mask),
        st.builds(lambda a, b, c: (a & b) | c, base_mask, base_mask, base_mask),
    )


@st.composite
def biases(draw: st.DrawFn, B: int, H: int, T: int, S: int) -> Tensor | AlibiBias | None:
    """Draw no bias, ALiBi, or a tensor, fixed or learned, with or without entries and full rows of −inf."""
    kind = draw(st.sampled_from(("none", "alibi", "tensor", "tensor with −inf")))
    if kind == "none":
        return None
    if kind == "alibi":
        return AlibiBias(alibi_slopes(H))
    shape = draw(st.sampled_from([(B, H, T, S), (1, H, T, S), (B, 1, 1, S), (1, 1, T, 1)]))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))), dtype=torch.float64)
    if kind == "tensor with −inf":
        bias = bias.masked_fill(~draw(random_bools(*shape, share=0.8)), -torch.inf)
        bias = bias.masked_fill(~draw(random_bools(*shape[:-1], 1, share=0.8)), -torch.inf)
    return bias.requires_grad_(draw(st.booleans()))


@st.composite
def calls(draw: st.DrawFn, capped: bool = True) -> KernelCall:
    """Draw any call in float64, with gradients of q, k, v and all learned tensors."""
    B = draw(st.sampled_from(BATCHES))
    (T, S), (d, e) = draw(st.sampled_from(TOKENS)), draw(st.sampled_from(CHANNELS))
    H, K, kv_of_head = draw(st.sampled_from(HEADS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return KernelCall(
        q=tensor(B, H, T, d),
        k=tensor(B, K, S, d),
        v=tensor(B, K, S, e),
        kv_of_head=kv_of_head,
        mask=draw(st.none() | masks(B, H, T, S)),
        bias=draw(biases(B, H, T, S)),
        softcap=draw(st.sampled_from((None, None, 0.7, 20.0))) if capped else None,
        sink=draw(st.sampled_from((None, 0.0, tensor(H)))),
        scale=draw(st.sampled_from((None, 0.31))),
    )
