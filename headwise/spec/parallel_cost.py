"""What each of several processes holds and sends, by how a model is laid out over them: counted from the spec, without torch.

A sum over p processes of n bytes is counted as a ring makes it: each sends 2 (p − 1) / p · n. Putting together n bytes, of
which each has a part, and adding up what each then keeps a part of, are half of that (https://arxiv.org/abs/1802.05799).
"""

from collections.abc import Callable
from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.spec.attention import AttentionSpec
from headwise.spec.cache_policy import Keeps, bytes_of_a_row
from headwise.spec.model import ModelSpec
from headwise.spec.partition import share_out

SINGLE = 4  # bytes of a number while training: weights, gradients and AdamW's two moments
STATES = 4  # as many such numbers for each parameter
LOSS = 3  # numbers that processes exchange for each token, where the vocabulary is shared out


@dataclass(frozen=True)
class Layout:
    """One way to lay a model out over processes; bytes of the process that has most. `refused` says why it cannot be."""

    name: str
    processes: int
    axes: str  # how many share texts, and how many share heads
    weights: int = 0
    cache: int = 0  # keys and values of the texts that it reads
    training: int = 0  # weights, gradients and the optimiser's two moments, in float32
    gathered: int = (
        0  # whole weights that it holds for a while in training: of the largest block, and of what is in none
    )
    forward: int = 0  # bytes it sends while a batch is read, up to the last states
    step: int = 0  # and in a step of training, in float32
    refused: str = ""


def layout(
    spec: ModelSpec,
    processes: int,
    context: int | None = None,
    *,
    batch: int = 1,
    element: int = 2,
    head_processes: int = 2,
) -> tuple[Layout, ...]:
    """Memory and traffic of each process under each layout: `heads` (whole heads each), `fsdp` (a part of every weight, put
    together block by block), `ddp` (the whole model each), and `fsdp+heads` (a grid of both, `head_processes` wide).

    Texts have `context` tokens (None: the model's own), `batch` of them are read at once by whoever reads the same texts, and
    a number has `element` bytes, but training is counted in float32. A source is as long as its target.

    >>> from headwise.spec.presets import preset
    >>> for one in layout(preset("llama2-70b"), 8, 32768):
    ...     print(one.name, one.axes, one.weights >> 30, one.cache >> 30, one.forward >> 30)
    heads 1 × 8 16 1 140
    fsdp 8 × 1 16 10 112
    ddp 8 × 1 128 10 0
    fsdp+heads 4 × 2 16 5 128
    """
    context = spec.context if context is None else context
    given = {"processes": processes, "context": context, "batch": batch, "element": element}
    for name, number in {**given, "head_processes": head_processes}.items():
        if type(number) is not int or number < 1:
            raise HeadwiseError(f"{name} is a whole number of at least 1, got {number!r}.")

    def grid() -> Layout:
        if processes % head_processes or head_processes in (1, processes):
            raise HeadwiseError(
                f"{processes} processes are no grid of {head_processes} that share heads; use heads or fsdp alone."
            )
        return _count("fsdp+heads", spec, processes // head_processes, head_processes, context, batch, element)

    def row(name: str, texts: int, heads: int) -> Callable[[], Layout]:
        return lambda: _count(name, spec, texts, heads, context, batch, element)

    ways = {"heads": row("heads", 1, processes), "fsdp": row("fsdp", processes, 1), "ddp": row("ddp", processes, 1)}
    return tuple(_in_words(name, processes, count) for name, count in {**ways, "fsdp+heads": grid}.items())


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


def cache_bytes(spec: ModelSpec, length: int, bytes_per_number: int = 4) -> int:
    """What a cache of a text takes: each key head's own tokens, at its bits; cross-attention's source is not counted.

    >>> from headwise.spec import preset
    >>> cache_bytes(preset("smollm2-135m"), 1000), cache_bytes(preset("smollm2-135m").caching({"*": 8}), 1000)
    (46080000, 12960000)
    """
    sites = [site for site in spec.sites if site.stack in ("", "dec") and spec.kind != "encoder"]
    layers = [spec.attention_at(site) for site in sites]
    return sum(held_bytes(layer, keeps, length, bytes_per_number) for layer in layers for keeps in layer.keeps)


def held_bytes(layer: AttentionSpec, keeps: Keeps, length: int, bytes_per_number: int = 4) -> int:
    """Bytes that one key head holds of a text: what it keeps, and no more than its window will see again."""
    sizes, tokens = (layer.head_dim, layer.value_dim), keeps.tokens(length)
    if layer.window is not None and keeps.tokens(layer.window) == layer.window:
        tokens = min(length, layer.window - (not layer.cache))  # a cache by head has room for the newest token too
    return tokens * sum(bytes_of_a_row(size, keeps.bits, bytes_per_number) for size in sizes)


def _in_words(name: str, processes: int, count: Callable[[], Layout]) -> Layout:
    try:
        return count()
    except HeadwiseError as error:
        return Layout(name, processes, "", refused=str(error))


def _count(name: str, spec: ModelSpec, texts: int, heads: int, context: int, batch: int, element: int) -> Layout:
    """The largest of what a process has."""
    parts = [share.of(spec) for share in share_out(spec, heads)]
    part, weights = max(parts, key=lambda one: one.parameters), max(one.weight_bytes(element) for one in parts)
    shared = texts if name.startswith("fsdp") else 1
    trained, blocks = SINGLE * part.parameters, [SINGLE * size for size in _blocks(part)]
    rest = trained - sum(blocks)  # in no block: put together at the start of a step, and kept until its end
    read, back = _sums(spec, parts, context * batch)
    if name == "ddp":
        forward, step = 0, _summed(trained, texts)
    else:
        forward = _summed(element * read, heads) + _summed(weights, shared) // 2
        step = _summed(SINGLE * (read + back), heads) + _summed(3 * trained - rest, shared) // 2
    return Layout(
        name, texts * heads, f"{texts} × {heads}", -(-weights // shared),
        batch * max(_cache(one, context, element) for one in parts), STATES * -(-trained // shared),
        rest + max(blocks, default=0) if shared > 1 else 0, forward, step,
    )  # fmt: skip


def _summed(size: int, processes: int) -> int:
    return 2 * (processes - 1) * size // processes


def _sums(spec: ModelSpec, parts: list[ModelSpec], tokens: int) -> tuple[int, int]:
    """Numbers that are summed over those who share heads: while texts are read, and on the way back."""
    stream, stacks = tokens * spec.width, 1 + (spec.kind == "encoder-decoder")
    written = len(spec.sites) + spec.layers + spec.encoder_layers  # by attention and MLPs
    crossing = sum(site.stack == "cross" for site in spec.sites)  # what was read of the source comes back as well
    asked = spec.output != "none"
    back = stream * (written + crossing + asked) + LOSS * tokens * asked
    for site in spec.sites:
        whole, held = spec.attention_at(site), sum(len(part.attention_at(site).kv_ids) for part in parts)
        if held > len(whole.kv_ids):  # keys that several hold learn alike
            inputs = whole.kv_width // (whole.heads if whole.input == "slice" else 1) + whole.bias
            back += len(whole.kv_ids) * (whole.head_dim + whole.value_dim) * inputs
    return stream * (written + stacks), back


def _blocks(spec: ModelSpec) -> list[int]:
    """Parameters of each block."""
    norm = spec.width * (2 if spec.norm == "layer" else 1)
    up, down = spec.hidden * (spec.width + spec.mlp_bias), spec.width * (spec.hidden + spec.mlp_bias)
    mlp = up * (2 if spec.activation == "swiglu" else 1) + down + norm * (spec.form != "parallel")
    sizes: dict[tuple[bool, int], int] = {}
    for site in spec.sites:
        key = (site.stack == "enc", site.layer)
        sizes[key] = sizes.get(key, mlp) + spec.attention_at(site).parameters + norm
    return list(sizes.values())


def _cache(spec: ModelSpec, context: int, element: int) -> int:
    """Keys and values of one text, and of its source."""
    source = [spec.attention_at(site) for site in spec.sites if site.stack == "cross"]
    keys = sum(len(layer.kv_ids) * (layer.head_dim + layer.value_dim) for layer in source)
    return cache_bytes(spec, context, element) + keys * context * element
