"""What is known of heads beside their profile: what they write, whom they resemble and work with, what they are worth and
could cost less."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from headwise.analysis.ablation.head_outputs import read_on
from headwise.analysis.ablation.importance import Worth, importance
from headwise.analysis.ablation.sensitivity import Cost, sensitivity
from headwise.analysis.attribution.direct_effect import DirectEffect, direct_effects
from headwise.analysis.attribution.ov_analysis import Promoted, copying, promoted
from headwise.analysis.metrics.long_offsets import BEYOND, KEEPS
from headwise.analysis.recording.batching import read_sites
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.analysis.roles.prompt_roles import STREAMS
from headwise.analysis.similarity.attention_similarity import js_sums, look, sample
from headwise.analysis.similarity.weight_similarity import fewest_columns, fewest_rows, folded_heads, product_norms
from headwise.compression.streaming_cost import StreamingEvaluation, StreamingTest
from headwise.compression.streaming_selection import streaming_now
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, Transformer, quiet
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec
from headwise.spec.cache_policy import ALL
from headwise.spec.parallel_cost import held_bytes

SAMPLE = {"rows": 64, "longest": 64}  # what heads are compared on
NEAREST = 5  # heads that look alike, of each
MOST = 2e12  # multiplications for all compositions; beyond that they are left out, for they would take minutes
LENGTH = 4096  # tokens that bytes of caches are told for
TEXTS = 32  # texts one head is taken away on
BITS, PARTS = (4,), ("qk", "vo", "keys", "values")


@dataclass(frozen=True)
class Wrote:
    """Output of one head: its OV eigenvalue score, the words it promotes, and its effect on the attended token's logit."""

    copying: float  # OV eigenvalue score
    spread: float  # its standard deviation over random weights
    words: tuple[Promoted, ...] = ()
    effect: DirectEffect | None = None  # None: not measured


@dataclass(frozen=True)
class Missed:
    """What is lost without a head, and how that was found out."""

    worth: Worth
    by: str
    how: str
    unit: str  # nats a token, or 1 − cosine
    texts: int


@dataclass(frozen=True)
class Less:
    """What a head's weights at few bits would cost, and what its cache holds."""

    costs: tuple[Cost, ...] = ()
    unit: str = ""
    texts: int = 0
    cache: int = 0  # bytes of its key head at LENGTH tokens; 0: it keeps none
    key: str = ""
    streamed: StreamingTest | None = None  # None: not measured


@dataclass(frozen=True)
class Kin:
    """An earlier head whose writes a head reads, or a later one that reads its own: V-composition, and what chance gives."""

    head: str
    score: float
    chance: float


@dataclass(frozen=True)
class Facts:
    """What is known of one head beside its profile; None: it was not asked."""

    wrote: Wrote | None = None
    loss: Missed | None = None
    less: Less | None = None
    shares: tuple[str, ...] = ()  # heads that read the same keys
    before: Kin | None = None
    behind: Kin | None = None
    alike: tuple[tuple[str, float], ...] = ()  # heads that look alike, nearest first, in nats
    refused: tuple[str, ...] = ()  # why something could not be found out


def ask(model: AnyModel, head: HeadProfile, on: Any = None, progress: Progress | None = None) -> Facts:
    """All that can be found out about one head in a minute or so: it is taken away, rounded and compared."""
    address, refused, found = head.address, [], {}
    unit = "nats a token" if model.output is not None else "1 − cosine"

    def reading() -> Reading:  # an encoder-decoder is asked about pairs, which a profile has not read: that is refused
        return read_on(model, on, None).first(TEXTS)

    def loss() -> Missed:
        made = importance(model, reading(), heads=f"{address.site}.*", progress=progress)
        return Missed(made[address], made.by, made.how, unit, made.texts)

    def less() -> Less:
        parts = PARTS if address in reads_cached(model.spec) else PARTS[:2]
        costs = sensitivity(model, reading(), heads=str(address), bits=BITS, parts=parts, progress=progress)
        held, key = cached(model.spec, address)
        # Without the attention condition streaming is not recommended, so its loss is not measured either.
        local = head.measures.get(BEYOND.name, math.nan) < STREAMS
        streaming = streamed(model, key, on) if held and local else None
        return Less(tuple(costs), costs.metric, len(costs.counts), held, key, streaming)

    for name, work in (
        ("wrote", lambda: _wrote(model, head, _effects(model, on, str(address)))),
        ("loss", loss),
        ("less", less),
    ):
        try:
            found[name] = work()
        except HeadwiseError as error:  # an encoder promotes no words, say: the rest is told all the same
            refused.append(str(error))
    before, behind = partners(model).get(str(address), (None, None))
    alike = nearest(model).get(str(address), [])
    return Facts(
        **found, shares=shares(model.spec, address), before=before, behind=behind,
        alike=tuple((str(other), float(far)) for other, far in alike), refused=tuple(dict.fromkeys(refused)),
    )  # fmt: skip


def _effects(model: AnyModel, on: Any = None, heads: str = "*") -> dict[str, DirectEffect]:
    """Direct effects of heads; none if the model has no unembedding that can be read."""
    try:
        return direct_effects(model, on, heads)
    except HeadwiseError:
        return {}


def _wrote(model: AnyModel, head: HeadProfile, effects: Mapping[str, DirectEffect]) -> Wrote:
    score = copying(model, str(head.address))[str(head.address)]
    try:
        words = tuple(promoted(model, head)) if model.output is not None else ()
    except HeadwiseError:  # its logits are no sum over heads: nothing can be read off
        words = ()
    return Wrote(score, spread(model.spec), words, effects.get(str(head.address)))


def wrote(model: AnyModel, profile: Profile) -> dict[str, Wrote]:
    """Describe the output of each head: OV eigenvalue score, direct effect, and words promoted and suppressed."""
    effects = _effects(model)
    return {str(head.address): _wrote(model, head, effects) for head in profile}


def spread(spec: ModelSpec) -> float:
    """Standard deviation of the OV eigenvalue score over random weights."""
    return 1.5 / spec.attention.value_dim


def reads_cached(spec: ModelSpec) -> tuple[Address, ...]:
    """Heads whose keys and values are kept while a model writes."""
    return tuple(address for address in spec.addresses if cached(spec, address)[0])


def cached(spec: ModelSpec, head: Address) -> tuple[int, str]:
    """Bytes that the key head of a head keeps at LENGTH tokens, and its address; 0 where nothing is kept."""
    layer = spec.attention_at(head.site)
    key = head.site.head(layer.kv_ids[layer.kv_of_head[layer.head_ids.index(head.head)]])
    return (held_bytes(layer, ALL, LENGTH), str(key)) if key in spec.key_heads else (0, str(key))


def shares(spec: ModelSpec, head: Address) -> tuple[str, ...]:
    """The other heads that read the same keys."""
    layer = spec.attention_at(head.site)
    place = layer.kv_of_head[layer.head_ids.index(head.head)]
    pairs = zip(layer.head_ids, layer.kv_of_head, strict=True)
    return tuple(str(head.site.head(n)) for n, its in pairs if its == place and n != head.head)


def streamed(model: AnyModel, key: str, on: Any = None) -> StreamingTest | None:
    """Measure the loss with this KV head streaming; None if the model has no cache per head."""
    if model.spec.kind != "decoder" or model.output is None or model.spec.cache:
        return None
    try:
        model.check_own("only headwise's own models have a cache per head")
    except HeadwiseError:
        return None
    ours = cast(Transformer, model)
    evaluation = StreamingEvaluation.of(ours, KEEPS, on)
    with streaming_now(ours, (Address.parse(key),), KEEPS):
        return evaluation.test(ours)


def nearest(model: AnyModel) -> dict[str, list[list[Any]]]:
    """The heads that look most alike, by Jensen–Shannon divergence on a few rows of the probe set: [head, nats]."""
    addresses = tuple(address for site in read_sites(model) for address in site.addresses)
    if len(addresses) < 2 or model.pictures is not None:  # heads are compared on texts
        return {}
    sums, rows = np.zeros((len(addresses),) * 2), 0
    with quiet(model), torch.no_grad():
        for units, places in sample(model, None, SAMPLE["rows"], SAMPLE["longest"], len(addresses), 0):
            some = look(model, units, places, set(addresses)).maps  # (H, rows, S + 1)
            sums += js_sums(some.flatten(1))
            rows += some.shape[1]
    far = sums / rows + np.where(np.eye(len(addresses)), np.inf, 0.0)
    order = np.argsort(far, axis=1, kind="stable")[:, : min(NEAREST, len(addresses) - 1)]
    return {str(a): [[str(addresses[j]), short(far[i, j])] for j in order[i]] for i, a in enumerate(addresses)}


def partners(model: AnyModel) -> dict[str, tuple[Kin | None, Kin | None]]:
    """For each head the earlier one whose writes it reads most, and the later one that reads its own most, by weights.

    ‖OV[a] OV[b]‖ / ‖OV[a]‖‖OV[b]‖, norms folded in; empty where norms are not known, sizes differ or the work is too much.
    """
    addresses, spec = model.spec.addresses, model.spec.attention
    if len(addresses) < 2 or model.norms() is None or len(addresses) ** 2 * spec.value_dim**2 * spec.width > MOST:
        return {}
    try:
        heads = folded_heads(model, addresses)
    except HeadwiseError:  # heads of different sizes
        return {}
    W_V, W_O = (torch.stack([head.weights[letter] for head in heads]) for letter in "vo")
    writes, reads = fewest_rows(W_V, W_O), fewest_columns(W_V, W_O)
    sizes = (x.double().square().sum((1, 2)).sqrt().cpu().numpy() for x in (writes, reads))
    left, right = sizes
    turns = [(head.streams["o"], head.streams["v"]) for head in heads]
    meets = np.array([[a[0].name == b[1].name and a[0].turn < b[1].turn for b in turns] for a in turns])
    with np.errstate(invalid="ignore", divide="ignore"):
        score = np.sqrt(product_norms(writes, reads)) / (left[:, None] * right)
    score = np.where(meets & np.isfinite(score), score, -1.0)  # (H, H): a is read by b
    chance = spec.width**-0.5

    def best(row: np.ndarray) -> Kin | None:
        place = int(np.argmax(row))
        return Kin(str(addresses[place]), float(row[place]), chance) if row[place] > 2 * chance else None

    return {str(a): (best(score[:, i]), best(score[i])) for i, a in enumerate(addresses)}


def short(value: float) -> float | None:
    """Six digits: enough to read, half the bytes."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
