"""Find heads and directions that steer a model from one set of texts to another.

Directions are found on one half of the texts and judged on the other, against random heads with random directions of the same
norms and against one direction of the residual stream. Side effects on other text are part of the result. Decoders are judged
by log-probabilities of texts, encoders by sentence embeddings (embedding_scores.py).

- Mean difference of head outputs and ridge probes: inference-time intervention, https://arxiv.org/abs/2306.03341
- Function vectors of in-context examples: https://arxiv.org/abs/2310.15213
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.analysis.metrics.statistics import bootstrap_difference_interval
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus, default_corpus
from headwise.analysis.steering.contrast_texts import (
    ContrastSetText,
    change_sums_by_group,
    completion_log_probs,
    group_sums_of_mean,
    mean_outputs_per_text,
    random_directions,
    split_halves,
    tokenize_contrast_sets,
)
from headwise.analysis.steering.resumable_steps import ResumableStepRunner
from headwise.analysis.steering.steering import Steering
from headwise.analysis.steering.steering_result import MeanEstimate, SideEffects, SteeringPoint, SteeringResult
from headwise.analysis.steering.text_embedding_margin import (
    TextEmbeddingContrast,
    embedding_axis,
    embedding_distances,
    text_embeddings,
)
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol, check_model, eval_mode
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Address
from headwise.text.corpus import TextPair

Method = Literal["mean_difference", "ridge_probe", "function_vector"]
MAX_RESIDUAL_LAYERS = 6  # layers tried for the residual-stream direction, those that separate the sets best
RIDGE = 1.0  # penalty of the probe, relative to the mean variance of the features
MAX_CAUSAL_TEXTS = 12  # prompts on which each head alone is tested for a function vector


@dataclass(frozen=True, eq=False)
class SteeringSearch:
    """Checked arguments of `find_steering` and the texts of both halves. An encoder is judged along an embedding axis."""

    model: ModelProtocol
    method: Method
    halves: tuple[list[ContrastSetText], list[ContrastSetText]]
    others: tuple[TokenizedCorpus, TokenizedCorpus]
    strengths: tuple[float, ...]
    heads: tuple[Address, ...]
    seed: int
    steps: ResumableStepRunner
    axis: TextEmbeddingContrast | None
    max_divergence: float

    def text_scores(self, texts: Sequence[ContrastSetText]) -> list[float]:
        """Return the log-probability of each completion in nats, or the embedding margin of each text."""
        if self.axis is None:
            return completion_log_probs(self.model, texts)
        return self.axis.margins(text_embeddings(self.model, texts))


@dataclass(frozen=True)
class SteeringConfig:
    """Settings of a search. `find_steering` documents them."""

    method: Method
    heads: HeadPattern
    num_heads: int
    strengths: tuple[float, ...]
    max_kl: float
    max_distance: float
    corpus: Any
    max_texts: int
    max_length: int
    num_random: int
    seed: int

    def check(self) -> None:
        """Raise if a setting is out of range."""
        methods = get_args(Method)
        if self.method not in methods:
            raise ArgumentError(f"method: unknown; {suggest_names(self.method, methods)} Got {self.method!r}.")
        for name, low in (("num_heads", 1), ("num_random", 1), ("max_texts", 2), ("max_length", 2), ("seed", 0)):
            number = getattr(self, name)
            if type(number) is not int or number < low:
                raise ArgumentError(f"{name}: must be an integer of at least {low}. Got {number!r}.")
        is_number = all(isinstance(s, int | float) and 0 < s < float("inf") for s in self.strengths)
        if not self.strengths or not is_number or len(set(self.strengths)) < len(self.strengths):
            raise ArgumentError(
                f"strengths: must be different positive numbers, such as (1.0, 2.0). Got {self.strengths!r}."
            )
        for name in ("max_kl", "max_distance"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}: must be above 0. Got {getattr(self, name)!r}.")


@shows_progress
def find_steering(
    model: ModelProtocol,
    positive: Sequence[Any],
    negative: Sequence[Any],
    *,
    method: Method = "mean_difference",
    heads: HeadPattern = "*",
    num_heads: int = 16,
    strengths: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 8.0),
    max_kl: float = 0.2,
    max_distance: float = 0.1,
    corpus: Any = None,
    max_texts: int = 24,
    max_length: int = 48,
    num_random: int = 19,
    seed: int = 0,
    name: str = "",
    steps_file: str | Path | None = None,
    progress: ProgressOption = None,
) -> SteeringResult:
    """Find heads and directions that make a model prefer the positive texts, and judge them on held-out texts.

    The effect on a decoder is the change of the log-probability of positive texts minus that of negative texts, in nats per
    token; an encoder-decoder is judged by its texts given their sources. The effect on an encoder is the change of the
    embedding margin of all texts: the cosine with the mean positive text minus that with the mean negative text. Heads,
    directions and strength are chosen on one half of the texts. The other half gives the effect with its interval, the
    effects of random heads with random directions of the same norms, and the effect of a residual-stream direction whose
    norm is that of the sum of all steered heads' contributions. Side effects on other text are the loss and the KL
    divergence, or the distance between plain and steered embeddings of an encoder.

    Args:
        model: A decoder or encoder-decoder with an output layer, or an encoder, with a tokenizer, native or attached.
        positive: Texts, or pairs (prompt, completion) of which only the completion counts. For an encoder-decoder pairs
            (source, text), whose text counts. With as many negative as positive texts, they are pairs by position. For
            function vectors: prompts with in-context examples, and answers.
        negative: Texts of the opposite set. For function vectors: the prompts without correct examples, and the same answers.
        method: "mean_difference" (of head outputs), "ridge_probe" (normal of a linear probe of each head), or
            "function_vector"
            (mean difference at the last prompt token; heads are ranked by their effect on the answers of negative prompts).
        heads: Heads to choose from, by address or pattern.
        num_heads: Number of heads to steer.
        strengths: Strengths to try.
        max_kl: Maximum KL divergence on other text of the chosen strength, in nats per token. For decoders.
        max_distance: Maximum cosine distance between plain and steered embeddings of other text. For encoders.
        corpus: Other text for side effects; for an encoder-decoder pairs (source, text). None uses the embedded texts.
        max_texts: Maximum number of other texts.
        max_length: Maximum number of tokens per other text.
        num_random: Number of random baselines. The smallest possible p-value is 1 / (num_random + 1).
        seed: Seed of the halves and of the random baselines.
        name: Name of the steering.
        steps_file: File of finished steps. Repeat the call with the same file to resume an interrupted search.
        progress: Called with a label, the number of finished steps and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The steering with its held-out effect, baselines and side effects.

    Raises:
        ArgumentError: An argument is out of range, or a set has fewer than 8 different texts.
        UnsupportedModelError: The model is a decoder or encoder-decoder without an output layer, or has no tokenizer.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> good, bad = [f"{i} is good" for i in range(8)], [f"{i} is bad!" for i in range(8)]
    >>> result = find_steering(model, good, bad, num_heads=2, strengths=(1.0,), num_random=3, max_texts=4)
    >>> len(result.steering.vectors), len(result.random_effects)
    (2, 3)
    """
    progress = callback_of(progress)
    settings = SteeringConfig(
        method, heads, num_heads, tuple(strengths) if isinstance(strengths, list | tuple) else (), max_kl, max_distance,
        corpus, max_texts, max_length, num_random, seed,
    )  # fmt: skip
    search = _prepare_search(model, positive, negative, settings, steps_file, progress)
    z, streams = mean_outputs_per_text(model, search.halves[0], last_prompt_token=method == "function_vector")
    is_positive = np.array([text.is_positive for text in search.halves[0]])
    directions = {head: _head_direction(z[head], is_positive, method) for head in search.heads}
    scores = _head_scores(search, z, directions, is_positive)
    selected = sorted(search.heads, key=lambda head: -scores[head])[:num_heads]
    vectors = {str(head): torch.from_numpy(directions[head]).float() for head in selected}
    vectors = {head: vector for head, vector in vectors.items() if bool(vector.any())}
    if not vectors:
        raise ArgumentError("positive, negative: the head outputs do not differ. Pass sets that differ.")
    origin = {
        "method": method, "texts": len(positive) + len(negative), "seed": seed,
        "head_scores": {str(head): round(scores[head], 6) for head in selected},
    }  # fmt: skip
    steering = Steering(vectors, 1.0, name=name, origin=origin).for_model(model)
    points = _evaluate_strengths(search, steering)
    strength = _choose_strength(points, search.max_divergence)
    steering = steering.at_strength(strength)
    return _compare_with_baselines(search, steering, points, streams, is_positive, num_random)


def _prepare_search(
    model: ModelProtocol,
    positive: Sequence[Any],
    negative: Sequence[Any],
    settings: SteeringConfig,
    steps_file: str | Path | None,
    progress: Progress | None,
) -> SteeringSearch:
    """Check the arguments before long work, tokenize and split the texts."""
    check_model(model)
    is_encoder = model.spec.kind == "encoder"
    if model.is_sharded or not (is_encoder or model.output is not None):
        raise UnsupportedModelError(
            f"model: steering is judged by the log-probability of texts, which needs an unsharded decoder or encoder-decoder "
            f"with an output layer, or by the embeddings of an encoder. Got kind {model.spec.kind!r}, output "
            f"{model.spec.output!r}. heads[…].shifted works on every model."
        )
    settings.check()
    if model.spec.kind != "decoder" and settings.method == "function_vector":
        raise ArgumentError(
            f"method: a function vector is taken at the prompt token before an answer, which only a decoder reads. Got an "
            f"{model.spec.kind}. Use mean_difference or ridge_probe."
        )
    addresses = tuple(select_heads(settings.heads, list(model.heads.addresses)))
    for hook_point in model.gathered_hook_points():
        if set(hook_point.head_addresses) & set(addresses):
            hook_point.check_editable()
    texts = tokenize_contrast_sets(model, positive, negative)
    halves = split_halves(texts, settings.seed)
    length = min(settings.max_length, model.spec.context)
    tokenized = eval_corpus(model, _other_texts(model, settings.corpus), length).first(settings.max_texts)
    samples = list(tokenized)
    others = tokenized.subset(samples[::2]), tokenized.subset(samples[1::2])
    stored_settings = {
        "positive": [str(item) for item in positive], "negative": [str(item) for item in negative],
        "heads": [str(head) for head in addresses], "corpus": tokenized.fingerprint, "model": _weights_digest(model),
        "method": settings.method, "num_heads": settings.num_heads, "strengths": settings.strengths, "seed": settings.seed,
    }  # fmt: skip
    count = 2 + 4 * len(settings.strengths) + settings.num_random
    count += min(MAX_RESIDUAL_LAYERS, len(list(model.attention_layers()))) + 1
    count += 1 + len(addresses) if settings.method == "function_vector" else 0
    runner = ResumableStepRunner(steps_file, stored_settings, progress, count)
    strengths = tuple(sorted(settings.strengths))
    axis = embedding_axis(model, halves[0]) if is_encoder else None
    return SteeringSearch(
        model, settings.method, halves, others, strengths, addresses, settings.seed, runner, axis,
        settings.max_distance if is_encoder else settings.max_kl,
    )  # fmt: skip


def _other_texts(model: ModelProtocol, corpus: Any) -> Any:
    """Return the corpus for side effects. An encoder-decoder reads each embedded text as source and as target."""
    if corpus is not None or model.spec.kind != "encoder-decoder":
        return corpus
    return [TextPair(item.text, item.text) for item in default_corpus(model).items()]


@torch.no_grad()
def _weights_digest(model: ModelProtocol) -> str:
    """Return a short digest of the sums of all weights, to recognize the model of a file of steps."""
    sums = [
        f"{name}:{float(to_float64(value).sum()):.10g}"
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    ]
    return hashlib.blake2b("\n".join(sums).encode(), digest_size=8).hexdigest()


def _head_direction(z: np.ndarray, is_positive: np.ndarray, method: str) -> np.ndarray:
    """Return the direction of one head from its outputs, (texts, e) → (e,), from the negative to the positive mean."""
    difference = z[is_positive].mean(0) - z[~is_positive].mean(0)
    if method != "ridge_probe":
        return difference
    centered = z - z.mean(0)
    labels = np.where(is_positive, 1.0, -1.0)
    penalty = RIDGE * max(float((centered**2).mean()), 1e-12) * len(z)
    normal = np.linalg.solve(
        centered.T @ centered + penalty * np.eye(z.shape[1]), centered.T @ (labels - labels.mean())
    )
    length = np.linalg.norm(normal)
    return normal / length * float(difference @ normal / length) if length else difference


def _separation(z: np.ndarray, is_positive: np.ndarray, folds: np.ndarray, method: str) -> float:
    """Return the cross-validated distance of the two means along the direction, in pooled standard deviations."""
    distances = []
    for fold in (0, 1):
        fit, test = folds == fold, folds != fold
        direction = _head_direction(z[fit], is_positive[fit], method)
        up, down = z[test & is_positive] @ direction, z[test & ~is_positive] @ direction
        spread = np.sqrt((up.var() + down.var()) / 2)
        distances.append((up.mean() - down.mean()) / spread if spread > 0 else 0.0)
    return float(np.mean(distances))


def _head_scores(
    search: SteeringSearch, z: dict[Address, np.ndarray], directions: dict[Address, np.ndarray], is_positive: np.ndarray
) -> dict[Address, float]:
    """Return the separation of each head, or for function vectors its effect alone on answers of negative prompts."""
    if search.method != "function_vector":
        folds = _folds(search.halves[0])
        return {head: _separation(z[head], is_positive, folds, search.method) for head in search.heads}
    prompts = [text for text in search.halves[0] if not text.is_positive][:MAX_CAUSAL_TEXTS]
    plain = search.steps.run("head scores: plain", lambda: completion_log_probs(search.model, prompts))
    scores = {}
    for head in search.heads:

        def effect(head: Address = head) -> float:
            with search.model.heads[head].shifted(torch.from_numpy(directions[head])):
                return float(np.mean(np.subtract(completion_log_probs(search.model, prompts), plain)))

        scores[head] = search.steps.run(f"head scores: {head}", effect)
    return scores


def _folds(texts: Sequence[ContrastSetText]) -> np.ndarray:
    """Return 0 or 1 for each text. Texts of a group have the same fold, and each set has both."""
    folds = {group: i % 2 for i, group in enumerate(dict.fromkeys(text.group for text in texts))}
    result = np.array([folds[text.group] for text in texts])
    for is_positive in (True, False):
        rows = [i for i, text in enumerate(texts) if text.is_positive == is_positive]
        if len(set(result[rows])) < 2:
            raise ArgumentError(
                "positive, negative: too few different texts to compare heads. Pass more different texts."
            )
    return result


# Evaluation.


def _log_prob_changes(search: SteeringSearch, half: int, step: str, change: Any) -> list[float]:
    """Return the change of the score of each text of a half inside a context."""
    texts = search.halves[half]
    plain = search.steps.run(f"plain texts {half}", lambda: search.text_scores(texts))

    def compute() -> list[float]:
        with change():
            return search.text_scores(texts)

    return list(np.subtract(search.steps.run(f"{step}, texts {half}", compute), plain))


def _effect_estimate(search: SteeringSearch, half: int, changes: Sequence[float]) -> MeanEstimate:
    """Return the change of positive minus that of negative texts per token, with a 95% interval over groups.

    For an encoder it is the mean change over all texts, because a steering moves every text to the positive side.
    """
    if search.axis is not None:
        sums = group_sums_of_mean(search.halves[half], changes)
    elif search.method == "function_vector":  # steering replaces the in-context examples of the positive prompts
        texts = [t for t in search.halves[half] if not t.is_positive]
        kept_changes = [c for c, t in zip(changes, search.halves[half], strict=True) if not t.is_positive]
        sums = change_sums_by_group([replace(t, is_positive=True) for t in texts], kept_changes)
        sums = (sums[0], sums[1], np.zeros_like(sums[0]), np.ones_like(sums[1]))
    else:
        sums = change_sums_by_group(search.halves[half], changes)
    low, high = bootstrap_difference_interval(*sums)
    mean = sums[0].sum() / sums[1].sum() - sums[2].sum() / sums[3].sum()
    return MeanEstimate(float(mean), float(low), float(high))


@torch.no_grad()
def _side_effect(search: SteeringSearch, half: int, change: Any) -> list[list[float]]:
    """Return sums of loss change, KL divergence and targets for each other text of a half. For encoders: of distances."""
    model, rows = search.model, []
    if search.axis is not None:
        return embedding_distances(model, search.others[half], change)
    assert model.output is not None
    with eval_mode(model):
        for sample in search.others[half]:
            batch = make_batch([sample], device=model.device)
            ids, source = batch.ids, {} if batch.source is None else {"source": batch.source}
            if ids.shape[1] < 2:
                continue
            targets = ids[0, 1:, None]
            plain = at_least_float32(model.output(model(ids, hidden=True, **source)[0, :-1])).log_softmax(-1)
            with change():
                changed = at_least_float32(model.output(model(ids, hidden=True, **source)[0, :-1])).log_softmax(-1)
            loss_change = to_float64((plain - changed).gather(-1, targets)).sum()
            kl = to_float64(plain.exp() * (plain - changed)).sum()
            rows.append([float(loss_change), float(kl), float(len(targets))])
    return rows


def _mean_side_effect(search: SteeringSearch, rows: Sequence[Sequence[float]]) -> SideEffects:
    table = np.array(rows).reshape(-1, 3)
    zeros, ones = np.zeros(len(table)), np.ones(len(table))

    def mean_of(column: int) -> MeanEstimate:
        low, high = bootstrap_difference_interval(table[:, column], table[:, 2], zeros, ones)
        return MeanEstimate(float(table[:, column].sum() / table[:, 2].sum()), float(low), float(high))

    return SideEffects(distance=mean_of(1)) if search.axis is not None else SideEffects(mean_of(0), mean_of(1))


def _evaluate_strengths(search: SteeringSearch, steering: Steering) -> list[SteeringPoint]:
    """Evaluate each strength on both halves."""
    points = []
    for strength in search.strengths:
        change = partial(steering.applied, search.model, strength, check=False)
        effects = [
            _effect_estimate(search, half, _log_prob_changes(search, half, f"strength {strength}", change))
            for half in (0, 1)
        ]
        sides = [
            _mean_side_effect(
                search,
                search.steps.run(
                    f"strength {strength}, other texts {half}", partial(_side_effect, search, half, change)
                ),
            )
            for half in (0, 1)
        ]
        points.append(SteeringPoint(strength, effects[0], sides[0].divergence.mean, effects[1], sides[1]))
    return points


def _choose_strength(points: Sequence[SteeringPoint], max_divergence: float) -> float:
    """Return the strength with the largest effect on the selection half whose side effect is within the limit."""
    allowed = [point for point in points if point.selection_divergence <= max_divergence] or list(points[:1])
    return max(allowed, key=lambda point: point.selection_effect.mean).strength


def _compare_with_baselines(
    search: SteeringSearch,
    steering: Steering,
    points: list[SteeringPoint],
    streams: dict[str, np.ndarray],
    is_positive: np.ndarray,
    num_random: int,
) -> SteeringResult:
    """Compare the steering with its baselines on the held-out half."""
    model, strength = search.model, steering.strength
    point = next(point for point in points if point.strength == strength)
    changes = _log_prob_changes(search, 1, f"strength {strength}", partial(steering.applied, model, check=False))
    value_dims = {head.address: head.layer.spec.value_dim for head in model.heads}
    random_changes = []
    for draw in range(num_random):
        directions = random_directions(steering.vectors, search.heads, value_dims, 1 + search.seed * num_random + draw)
        random = Steering(directions, strength)
        random_changes.append(
            _log_prob_changes(search, 1, f"random {draw}", partial(random.applied, model, check=False))
        )
    effects = [_effect_estimate(search, 1, row).mean for row in random_changes]
    p = (sum(effect >= point.effect.mean for effect in effects) + 1) / (num_random + 1)
    residual, layer, residual_change = _residual_steering_effect(search, steering, streams, is_positive)
    differences = [np.subtract(changes, np.mean(random_changes, 0))]
    differences += [] if residual_change is None else [np.subtract(changes, residual_change)]
    compared = [_effect_estimate(search, 1, list(row)) for row in differences]
    return SteeringResult(
        steering=steering,
        points=tuple(points),
        effect=point.effect,
        side_effect=point.side_effect,
        random_effects=tuple(effects),
        p_value=p,
        above_random=compared[0],
        residual_effect=residual,
        residual_layer=layer,
        above_residual=compared[1] if len(compared) > 1 else None,
        num_texts=(len(search.halves[0]), len(search.halves[1])),
        max_divergence=search.max_divergence,
        unit="nats per token" if search.axis is None else "embedding margin (cosine)",
    )


def _residual_steering_effect(
    search: SteeringSearch, steering: Steering, streams: dict[str, np.ndarray], is_positive: np.ndarray
) -> tuple[MeanEstimate | None, str, list[float] | None]:
    """Return the held-out effect of the residual-stream direction chosen on the selection half, its layer and changes."""
    written: Tensor | None = None
    try:
        for head in steering.heads_of(search.model):
            term = to_float64(steering.vectors[str(head.address)]) @ to_float64(head.W_O).cpu()
            written = term if written is None else written + term
    except HeadwiseError:
        return None, "", None
    assert written is not None
    norm, folds = float((steering.strength * written.detach()).norm()), _folds(search.halves[0])
    layers = sorted(streams, key=lambda name: -_separation(streams[name], is_positive, folds, "mean_difference"))
    best: tuple[float, str, Callable[[], Any]] | None = None
    for name in layers[:MAX_RESIDUAL_LAYERS]:
        difference = torch.from_numpy(_head_direction(streams[name], is_positive, "mean_difference"))
        if not bool(difference.any()):
            continue
        change = partial(_added_to_residual_stream, search.model, name, difference / difference.norm() * norm)
        mean = _effect_estimate(search, 0, _log_prob_changes(search, 0, f"residual {name}", change)).mean
        if best is None or mean > best[0]:
            best = mean, name, change
    if best is None:
        return None, "", None
    changes = _log_prob_changes(search, 1, f"residual {best[1]}", best[2])
    return _effect_estimate(search, 1, changes), best[1], changes


@contextmanager
def _added_to_residual_stream(model: ModelProtocol, layer_address: str, direction: Tensor) -> Iterator[None]:
    """Add a vector (D,) to the residual stream at the output of one attention layer."""
    layer = next(item for item in model.attention_layers() if str(item.hook_point.address) == layer_address)

    def hook(module: Any, args: Any, output: Any) -> Any:
        return output + direction.to(output)

    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
