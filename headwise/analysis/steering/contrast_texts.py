"""Two sets of texts that a steering is found from: tokens, halves, mean head outputs and log-probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address

BATCH_TOKENS = 1024


@dataclass(frozen=True)
class ContrastSetText:
    """A tokenized text of one of the two sets.

    Attributes:
        ids: Token ids.
        start: Index of the first token of the completion. Its tokens are scored, and their head outputs are averaged. In a
            decoder it is at least 1, because the first token is not predicted.
        is_positive: Whether the text is from the positive set.
        group: Key that copies of a text share, and the two texts of a pair. A group is never split between halves.
        source: Token ids that the encoder of an encoder-decoder reads. Empty for other models.
    """

    ids: tuple[int, ...]
    start: int
    is_positive: bool
    group: str
    source: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ContrastBatch:
    """Texts of one forward pass, padded on the right.

    Attributes:
        ids: Token ids, (B, T).
        scored: True at completion tokens, (B, T).
        real_tokens: True at real tokens, (B, T).
        source: Source ids of an encoder-decoder, (B, S), or None.
        source_real_tokens: True at real source tokens, (B, S), or None.
    """

    ids: Tensor
    scored: Tensor
    real_tokens: Tensor
    source: Tensor | None = None
    source_real_tokens: Tensor | None = None


def tokenize_contrast_sets(
    model: ModelProtocol, positive: Sequence[Any], negative: Sequence[Any]
) -> list[ContrastSetText]:
    """Tokenize both sets. Sets of equal length are pairs by position. The prompt of an encoder-decoder is its source."""
    items = {
        "positive": _as_prompt_completion_pairs("positive", positive),
        "negative": _as_prompt_completion_pairs("negative", negative),
    }
    overlap = set(items["positive"]) & set(items["negative"])
    if overlap:
        raise ArgumentError(
            f"positive, negative: a text is in both sets, {next(iter(overlap))[1]!r:.60}. Keep it in one of them."
        )
    is_paired = len(positive) == len(negative)
    groups = {name: [prompt or completion for prompt, completion in pairs] for name, pairs in items.items()}
    if is_paired:
        groups = dict.fromkeys(groups, _connected_component_keys(groups["positive"], groups["negative"]))
    texts = []
    for name, pairs in items.items():
        for (prompt, completion), group in zip(pairs, groups[name], strict=True):
            text = _tokenize(model, name, prompt, completion, group)
            length, limit = max(len(text.ids), len(text.source)), model.spec.context
            if len(text.ids) <= text.start:
                raise ArgumentError(
                    f"{name}: a text has no token to predict. Got {prompt + completion!r:.60}. Use longer texts."
                )
            if length > limit:
                raise ArgumentError(
                    f"{name}: a text has {length} tokens, more than the context of {limit}. Shorten it."
                )
            texts.append(text)
    return texts


def _tokenize(model: ModelProtocol, name: str, prompt: str, completion: str, group: str) -> ContrastSetText:
    tokenizer, is_positive = tokenizer_of(model), name == "positive"
    if model.spec.kind != "encoder-decoder":
        first = 1 if model.spec.kind == "decoder" else 0
        ids = tokenizer.encode(prompt + completion)
        start = max(first, _common_prefix(tokenizer.encode(prompt), ids) if prompt else first)
        return ContrastSetText(tuple(ids), start, is_positive, group)
    if not prompt.strip():
        raise ArgumentError(
            f"{name}: an encoder-decoder needs pairs (source, text). Got {completion!r:.60}. Pass pairs; on the command "
            "line, lines with [source, text]."
        )
    source, text = (tokenizer.encode(part, add_special_tokens=False) for part in (prompt, completion))
    source_ids, ids = tokenizer.wrap_pair(source, text, model.decoder_start_token)
    start = 1 + len(tokenizer.template_ids[0])
    return ContrastSetText(tuple(ids), start, is_positive, group, tuple(source_ids))


def _as_prompt_completion_pairs(name: str, items: Sequence[Any]) -> list[tuple[str, str]]:
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ArgumentError(f"{name}: must be a list of texts, or of pairs (prompt, completion). Got {items!r:.60}.")
    pairs = [("", item) if isinstance(item, str) else item for item in items]
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        if not is_pair or not pair[1].strip():
            raise ArgumentError(f"{name}: must be texts, or pairs (prompt, completion), not empty. Got {pair!r:.60}.")
    if len(set(map(tuple, pairs))) < 8:
        raise ArgumentError(
            f"{name}: needs at least 8 different texts, for two halves with an interval. Got {len(set(map(tuple, pairs)))}."
        )
    return [(pair[0], pair[1]) for pair in pairs]


def _connected_component_keys(first: list[str], second: list[str]) -> list[str]:
    """Return a key per pair, shared by all pairs that have a text in common."""
    parents: dict[str, str] = {}

    def root(key: str) -> str:
        while parents.setdefault(key, key) != key:
            key = parents[key]
        return key

    for a, b in zip(first, second, strict=True):
        parents[root(a)] = root(b)
    return [root(key) for key in first]


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def split_halves(texts: Sequence[ContrastSetText], seed: int) -> tuple[list[ContrastSetText], list[ContrastSetText]]:
    """Return the selection half and the held-out half. Groups are kept together, and both halves have both sets."""
    groups = list(dict.fromkeys(text.group for text in texts))
    order = np.random.default_rng(seed).permutation(len(groups))
    if len({text.group for text in texts if text.is_positive} & {text.group for text in texts if not text.is_positive}):
        selected = {groups[i] for i in order[: len(groups) // 2]}  # groups of pairs
    else:
        selected = set()
        for is_positive in (True, False):
            of_set = [
                groups[i] for i in order if any(t.group == groups[i] and t.is_positive == is_positive for t in texts)
            ]
            selected |= set(of_set[: len(of_set) // 2])
    halves = [text for text in texts if text.group in selected], [text for text in texts if text.group not in selected]
    if not all({text.is_positive for text in half} == {True, False} for half in halves):
        raise ArgumentError("positive, negative: too few different prompts for two halves. Pass more different texts.")
    return halves


def text_batches(texts: Sequence[ContrastSetText], device: torch.device) -> Iterator[tuple[list[int], ContrastBatch]]:
    """Yield indices of texts and their batch. Texts of similar lengths share a batch."""

    def length(i: int) -> int:
        return max(len(texts[i].ids), len(texts[i].source))

    order = sorted(range(len(texts)), key=length)
    group: list[int] = []
    for i in [*order, -1]:
        if i < 0 or (group and (len(group) + 1) * length(i) > BATCH_TOKENS):
            yield group, _make_batch([texts[j] for j in group], device)
            group = []
        group.append(i)


def _make_batch(texts: Sequence[ContrastSetText], device: torch.device) -> ContrastBatch:
    ids, real_tokens = _pad([text.ids for text in texts])
    scored = real_tokens.clone()
    for row, text in enumerate(texts):
        scored[row, : text.start] = False
    batch = ContrastBatch(ids.to(device), scored.to(device), real_tokens.to(device))
    if not texts[0].source:
        return batch
    sources, real_sources = _pad([text.source for text in texts])
    return replace(batch, source=sources.to(device), source_real_tokens=real_sources.to(device))


def _pad(rows: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Pad token ids on the right. Return the ids and a mask of the real tokens, (B, T) each."""
    T = max(map(len, rows))
    ids, real_tokens = torch.zeros(len(rows), T, dtype=torch.long), torch.zeros(len(rows), T, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], real_tokens[i, : len(row)] = torch.tensor(row), True
    return ids, real_tokens


@torch.no_grad()
def mean_outputs_per_text(
    model: ModelProtocol, texts: Sequence[ContrastSetText], *, last_prompt_token: bool = False
) -> tuple[dict[Address, np.ndarray], dict[str, np.ndarray]]:
    """Return the mean z of each head over each completion, (texts, e), and the mean residual stream of each layer.

    With `last_prompt_token`, z is taken at the token before the completion. The residual stream of a layer is the input of
    its norm, (texts, D), or the input of its attention if the norm comes after the residual sum. In the encoder of an
    encoder-decoder, both are means over the source.
    """
    z: dict[Address, np.ndarray] = {}
    streams: dict[str, np.ndarray] = {}
    weights: dict[bool, Tensor] = {}  # weight of each token: of the source (True), of the text (False)
    rows: list[int] = []
    has_source = model.spec.kind == "encoder-decoder"

    def store(table: dict[Any, np.ndarray], key: Any, values: Tensor) -> None:
        if key not in table:
            table[key] = np.zeros((len(texts), values.shape[-1]))
        table[key][rows] = values.cpu().double().numpy()

    def listen(call: AttentionCall) -> None:
        z_wide = at_least_float32(call.z)
        reads_source = has_source and call.hook_point.address.stack == "enc"
        means = torch.einsum("bt,bhte->bhe", weights[reads_source].to(z_wide), z_wide)  # (B, H, e)
        for i, address in enumerate(call.hook_point.head_addresses):
            store(z, address, means[:, i])

    def listen_stream(layer: str, x: Tensor) -> None:
        wide = at_least_float32(x)
        reads_source = has_source and layer.startswith("enc.")
        store(streams, layer, torch.einsum("bt,btd->bd", weights[reads_source].to(wide), wide))

    norms = model.input_norms() or {}
    layers = {str(layer.hook_point.address): layer for layer in model.attention_layers()}
    with eval_mode(model), ExitStack() as stack:
        for hook_point in model.gathered_hook_points():
            if hook_point.head_ids:
                stack.enter_context(hook_point.listen(listen))
        for layer, (norm, _) in norms.items():
            if norm is not None:
                stack.enter_context(_hooked(norm, partial(listen_stream, layer)))
            elif isinstance(layers.get(layer), nn.Module):
                stack.enter_context(_hooked(layers[layer], partial(listen_stream, layer)))  # pyright: ignore[reportArgumentType]
        for indices, batch in text_batches(texts, model.device):
            scored = batch.scored
            if last_prompt_token:
                starts = scored.long().argmax(1)
                scored = torch.zeros_like(scored).scatter(1, starts[:, None] - 1, True)
            weights[False] = _as_weights(scored)
            if batch.source_real_tokens is not None:
                weights[True] = _as_weights(batch.source_real_tokens)
            rows[:] = indices
            _hidden_states(model, batch)
    return z, streams


def _as_weights(mask: Tensor) -> Tensor:
    """Return weights that average over the tokens of a mask, (B, T)."""
    return mask.float() / mask.sum(1, keepdim=True)


def _hidden_states(model: ModelProtocol, batch: ContrastBatch) -> Tensor:
    """Return the hidden states of a batch, (B, T, D). In a causal model no real token sees the padding after it."""
    if batch.source is not None:
        return model(batch.ids, source=batch.source, source_attention_mask=batch.source_real_tokens, hidden=True)
    if model.spec.kind == "decoder":
        return model(batch.ids, hidden=True)
    return model(batch.ids, attention_mask=batch.real_tokens, hidden=True)


@contextmanager
def _hooked(module: nn.Module, listener: Any) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        listener(args[0])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def completion_log_probs(model: ModelProtocol, texts: Sequence[ContrastSetText]) -> list[float]:
    """Return the sum of the log-probabilities of the completion tokens of each text, in nats."""
    sums = [0.0] * len(texts)
    assert model.output is not None
    with eval_mode(model):
        for indices, batch in text_batches(texts, model.device):
            ids, scored = batch.ids, batch.scored
            states = _hidden_states(model, batch)[:, :-1][scored[:, 1:]]  # (rows, D)
            targets = ids[:, 1:][scored[:, 1:]]
            log_probs = at_least_float32(model.output(states)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            counts = scored[:, 1:].sum(1).tolist()
            for index, values in zip(indices, log_probs.split(counts), strict=True):
                sums[index] = float(to_float64(values).sum())
    return sums


def group_sums_of_mean(texts: Sequence[ContrastSetText], changes: Sequence[float]) -> tuple[np.ndarray, ...]:
    """Return sums and counts of all texts per group, and zeros and ones, for an interval of the mean change per text."""
    groups = {group: i for i, group in enumerate(dict.fromkeys(text.group for text in texts))}
    tables = np.zeros((2, len(groups)))
    for text, change in zip(texts, changes, strict=True):
        tables[:, groups[text.group]] += change, 1.0
    return tables[0], tables[1], np.zeros(len(groups)), np.ones(len(groups))


def change_sums_by_group(texts: Sequence[ContrastSetText], changes: Sequence[float]) -> tuple[np.ndarray, ...]:
    """Return sums and token counts of positive and of negative texts per group, for a paired interval of their difference."""
    groups = {group: i for i, group in enumerate(dict.fromkeys(text.group for text in texts))}
    tables = np.zeros((4, len(groups)))  # positive sums and counts, negative sums and counts
    for text, change in zip(texts, changes, strict=True):
        row = 0 if text.is_positive else 2
        tables[row, groups[text.group]] += change
        tables[row + 1, groups[text.group]] += len(text.ids) - text.start
    return tuple(tables)


def random_directions(
    vectors: Mapping[str, Tensor], candidates: Sequence[Address], value_dims: Mapping[Address, int], seed: int
) -> dict[str, Tensor]:
    """Return random directions of random heads, not the steered ones if there are enough, with the norms of the vectors."""
    rng = np.random.default_rng(seed)
    others = [address for address in candidates if str(address) not in vectors]
    pool = others if len(others) >= len(vectors) else list(candidates)
    directions = {}
    for pick, vector in zip(rng.permutation(len(pool))[: len(vectors)], vectors.values(), strict=True):
        direction = torch.from_numpy(rng.standard_normal(value_dims[pool[pick]]))
        directions[str(pool[pick])] = (direction / direction.norm() * vector.double().norm()).float()
    return directions
