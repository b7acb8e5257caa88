"""What each of several processes holds and sends, by how a model is laid out over them: counted from the spec, without torch.

A sum over p processes of n bytes is counted as a ring makes it: each sends 2 (p − 1) / p · n. Putting together n bytes, of
which each has a part, and adding up what each then keeps a part of, are half of that (https://arxiv.org/abs/1802.05799).
"""

from collections.abc import Callable
from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.spec.model import ModelSpec
from headwise.spec.share import share_out

SINGLE = 4  # bytes of a number while training: weights, gradients and AdamW's two moments
STATES = 4  # as many such numbers for each parameter


@dataclass(frozen=True)
class Layout:
    """One way to lay a model out over processes; bytes of the process that has most. `refused` says why it cannot be."""

    name: str
    processes: int
    axes: str  # how many share texts, and how many share heads
    weights: int = 0
    cache: int = 0  # keys and values of the texts that it reads
    training: int = 0  # weights, gradients and the optimiser's two moments, in float32
    gathered: int = 0  # weights of others that it holds for a while: the largest block's
    forward: int = 0  # bytes it sends while a batch is read
    step: int = 0  # and in a step of training
    refused: str = ""


def layout(
    spec: ModelSpec, processes: int, context: int | None = None, *, batch: int = 1, element: int = 2
) -> tuple[Layout, ...]:
    """Memory and traffic of each process under each layout: `heads` (whole heads each), `fsdp` (a part of every weight, put
    together block by block), `ddp` (the whole model each), and `fsdp+heads` (a grid of both).

    Texts have `context` tokens (None: the model's own), `batch` of them are read at once by whoever reads the same texts, and
    a number has `element` bytes, but training is counted in float32.

    >>> from headwise.spec.presets import preset
    >>> for one in layout(preset("llama2-70b"), 8, 32768):
    ...     print(one.name, one.axes, one.weights >> 30, one.cache >> 30, one.forward >> 30)
    heads 1 × 8 16 1 140
    fsdp 8 × 1 16 10 112
    ddp 8 × 1 128 10 0
    fsdp+heads 2 × 4 16 2 136
    """
    for name, number in (("processes", processes), ("batch", batch), ("element", element)):
        if type(number) is not int or number < 1:
            raise HeadwiseError(f"{name} is a whole number of at least 1, got {number!r}.")
    tokens = (spec.context if context is None else context) * batch
    if type(tokens) is not int or tokens < 1:
        raise HeadwiseError(f"a context has at least one token, got {context!r}.")
    ways: dict[str, tuple[int, int]] = {
        "heads": (1, processes), "fsdp": (processes, 1), "ddp": (processes, 1), "fsdp+heads": _grid(processes),
    }  # fmt: skip
    return tuple(
        _refusable(name, texts, heads, lambda n=name, t=texts, h=heads: _count(n, spec, t, h, tokens, element))
        for name, (texts, heads) in ways.items()
    )


def forward_flops(spec: ModelSpec, context: int | None = None) -> int:
    """Multiplications and additions for one token of a text, in the middle of it: two for each weight that is multiplied,
    and attention over half of the text (all of it in an encoder).

    >>> from headwise.spec.presets import preset
    >>> round(forward_flops(preset("llama2-70b"), 4096) / 1e9)
    143
    """
    tables = spec.vocab * spec.width * (1 if spec.tied or spec.output == "none" else 2)
    tables += spec.context * spec.width * (spec.positions == "learned")
    seen = (spec.context if context is None else context) // (1 if spec.kind == "encoder" else 2)
    attended = 0
    for site in spec.sites:
        layer = spec.attention_at(site)
        keys = seen if layer.window is None else min(seen, layer.window)
        attended += len(layer.head_ids) * (layer.head_dim + layer.value_dim) * keys
    return 2 * (spec.parameters - tables + spec.vocab * spec.width * (spec.output != "none") + attended)


def _refusable(name: str, texts: int, heads: int, count: Callable[[], Layout]) -> Layout:
    try:
        return count()
    except HeadwiseError as error:
        return Layout(name, texts * heads, f"{texts} × {heads}", refused=str(error))


def _count(name: str, spec: ModelSpec, texts: int, heads: int, tokens: int, element: int) -> Layout:
    """The largest of what a process has."""
    if name == "fsdp+heads" and 1 in (texts, heads):
        raise HeadwiseError(f"{texts * heads} processes are no grid; use heads or fsdp alone.")
    parts = [share.of(spec) for share in share_out(spec, heads)] if heads > 1 else [spec]
    shared = texts if name.startswith("fsdp") else 1
    blocks = spec.layers + spec.encoder_layers
    stream = tokens * spec.width * element
    sums = (len(spec.sites) + blocks + 1) * _summed(stream, heads)  # attention, MLPs, and the embedding
    back = (len(spec.sites) + blocks) * _summed(stream, heads)
    parameters, weights = (
        max(made) for made in zip(*((p.parameters, p.weight_bytes(element)) for p in parts), strict=True)
    )
    gathered = SINGLE * max(map(_block, parts)) if shared > 1 else 0
    trained = SINGLE * parameters
    if name == "ddp":
        forward, step = 0, _summed(trained, texts)
    else:
        forward = sums + (shared - 1) * weights // shared
        step = sums + back + 3 * (shared - 1) * trained // shared
    return Layout(
        name, texts * heads, f"{texts} × {heads}", -(-weights // shared), max(_cache(p, tokens, element) for p in parts),
        STATES * -(-trained // shared), gathered, forward, step,
    )  # fmt: skip


def _grid(processes: int) -> tuple[int, int]:
    """As square as can be, heads being the larger side."""
    texts = max(n for n in range(1, int(processes**0.5) + 1) if processes % n == 0)
    return texts, processes // texts


def _summed(size: int, processes: int) -> int:
    return 2 * (processes - 1) * size // processes


def _block(spec: ModelSpec) -> int:
    """Parameters of one block, the average: what is put together at once."""
    tables = spec.vocab * spec.width * (1 if spec.tied or spec.output == "none" else 2)
    return (spec.parameters - tables) // max(1, spec.layers + spec.encoder_layers)


def _cache(spec: ModelSpec, tokens: int, element: int) -> int:
    """Keys and values of so many tokens, all of them kept; an encoder keeps none."""
    if spec.kind == "encoder":
        return 0
    layers = [spec.attention_at(site) for site in spec.sites if site.stack != "enc"]
    return sum(len(layer.kv_ids) * (layer.head_dim + layer.value_dim) for layer in layers) * tokens * element
