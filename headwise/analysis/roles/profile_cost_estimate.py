"""Estimate time and memory of a profile before it runs, and fit its batches into a memory limit.

Time is measured: metrics run on two short pieces of the first text, and a linear and a quadratic term per text are fitted.
Memory is computed from the sizes of the model: weights, the activations of one block, the row statistics of one layer,
and the sums of all heads. Scores of relations, whose number depends on the corpus, are not included.
`hw.profile` prints the estimate first if the model is large and someone watches.
"""

import re
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric_runner import MetricRunner, points_in_layers
from headwise.analysis.recording.batching import TextSample, make_batch
from headwise.analysis.recording.model_calls import reads_calls
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile_sums import NUM_REPEATED_SEQUENCES, REPEATED_LENGTH, select_layers, select_metrics
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress, ProgressWithNotes
from headwise.spec import LayerAddress, ModelSpec

PIECES = (48, 144)  # tokens of the two timed pieces
HIDDEN_STATES, MLP_STATES = 8, 3  # tensors of one block that exist at the same time, at width and at MLP width
ROW_STATISTICS = 200  # float32 numbers per token and head of one layer
BLOCK_BYTES = 96 << 20  # blocks of attention weights, whatever the batch
MIN_BATCH_TOKENS = 64
LARGE_WEIGHTS = 2_000_000_000  # bytes of weights from which on `hw.profile` estimates first
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True)
class ProfileEstimate:
    """Expected time and memory of a profile. Causal tests, which depend on the roles found, are not included.

    Attributes:
        texts: Number of texts or chunks, those with gold relations included.
        tokens: Number of their tokens.
        batch_tokens: Tokens per batch.
        seconds: Expected time on this machine.
        weight_bytes: Memory of the weights.
        peak_bytes: Expected peak memory: weights, and working memory of one batch.
    """

    texts: int
    tokens: int
    batch_tokens: int
    seconds: float
    weight_bytes: int
    peak_bytes: int

    @property
    def working_bytes(self) -> int:
        """Expected peak memory without the weights."""
        return self.peak_bytes - self.weight_bytes

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        duration = f"{minutes} min {seconds} s" if minutes else f"{self.seconds:.1f} s"
        return (
            f"about {duration} and {self.peak_bytes / 1e9:.2f} GB ({self.weight_bytes / 1e9:.2f} GB of weights) for "
            f"{self.tokens:,} tokens in {self.texts:,} texts, {self.batch_tokens:,} tokens per batch; causal tests are not "
            f"included"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@torch.no_grad()
def estimate_profile(
    model: ModelProtocol,
    corpus: Any = None,
    *,
    relations: Any = None,
    max_length: int | None = None,
    batch_tokens: int = 2048,
    row_stride: int = 1,
    only_layers: str | None = None,
    memory_limit: str | int | None = None,
) -> ProfileEstimate:
    """Estimate time and memory of `hw.profile` with these arguments.

    Args:
        model: A headwise model or an attached model that reads text.
        corpus: Texts, as in `hw.profile`.
        relations: Documents with gold arcs, as in `hw.profile`.
        max_length: Plain text is split into chunks of this many tokens.
        batch_tokens: Maximum number of tokens per batch.
        row_stride: One of every `row_stride` blocks of 64 query rows is measured.
        only_layers: Layers to measure, as in `hw.profile`.
        memory_limit: Limit, as in `hw.profile`. The batch is made smaller to fit.

    Returns:
        The estimate.
    """
    if model.image_input is not None or reads_calls(model):
        raise UnsupportedModelError("estimate: available only for models that read text. Profile a few inputs instead.")
    selected = select_layers(model, only_layers)
    batch_tokens = fit_batch_tokens(model, batch_tokens, memory_limit, selected)
    texts = TokenizedCorpus.of(model, corpus, max_length)
    first = next(iter(texts))
    has_own_relations = relations is None and next(texts.relation_documents(), None) is not None
    is_separate = relations is not False and not has_own_relations
    documents = TokenizedCorpus.of(model, relations, max_length) if is_separate else ()
    lengths = [len(sample.ids) for sample in chain(texts, documents)]
    lengths += [2 * REPEATED_LENGTH] * NUM_REPEATED_SEQUENCES
    linear, quadratic = _fit_seconds(model, first, row_stride, selected)
    seconds = sum(linear * length + quadratic * length**2 for length in lengths)
    weights = _weight_bytes(model)
    peak = weights + _sum_bytes(model, selected) + _batch_bytes(model, min(batch_tokens, sum(lengths)))
    return ProfileEstimate(len(lengths), sum(lengths), batch_tokens, seconds, weights, peak)


def print_estimate_of_large_model(
    model: ModelProtocol, corpus: Any, progress: Progress | None, **settings: Any
) -> ProfileEstimate | None:
    """Print the estimate of a profile if the model is large and the progress display can print lines.

    Args:
        model: The model.
        corpus: Texts, as in `hw.profile`.
        progress: Progress callback of the profile.
        **settings: Arguments of `estimate_profile`.

    Returns:
        The estimate. None if nothing was printed.
    """
    if not isinstance(progress, ProgressWithNotes) or model.image_input is not None or reads_calls(model):
        return None
    if _weight_bytes(model) < LARGE_WEIGHTS:
        return None
    estimate = estimate_profile(model, corpus, **settings)
    progress.print_note(f"profile: {estimate}")
    available = _available_bytes()
    if available is not None and model.device.type == "cpu" and estimate.working_bytes > available:
        progress.print_note(
            f"profile: {estimate.working_bytes / 1e9:.2f} GB in addition to the weights exceed the free memory of "
            f"{available / 1e9:.2f} GB. Use memory_limit= (smaller batches) or only_layers= (one group of layers at a time)."
        )
    return estimate


def fit_batch_tokens(
    model: ModelProtocol,
    batch_tokens: int,
    memory_limit: str | int | None,
    layers: Container[LayerAddress] | None = None,
) -> int:
    """Return the number of tokens per batch with which a profile stays below a memory limit.

    Raises:
        ArgumentError: The limit is not a size, or the weights and the smallest batch exceed it.
    """
    if memory_limit is None:
        return batch_tokens
    limit = parse_bytes(memory_limit)
    fixed = _weight_bytes(model) + _sum_bytes(model, layers)
    room = limit - fixed - _batch_bytes(model, 0)
    per_token = _batch_bytes(model, 1) - _batch_bytes(model, 0)
    fitting = min(batch_tokens, room // per_token)
    if fitting < min(MIN_BATCH_TOKENS, batch_tokens):
        needed = fixed + _batch_bytes(model, MIN_BATCH_TOKENS)
        raise ArgumentError(
            f"memory_limit: too small. Got {memory_limit!r}. Weights, the sums of all heads and the smallest batch need "
            f"{needed / 1e9:.2f} GB. Load the model in half precision, or measure a group of layers at a time, such as "
            f"only_layers='0-7'."
        )
    return fitting


def parse_bytes(size: str | int) -> int:
    """Return a size in bytes.

    >>> parse_bytes("1.5 GB"), parse_bytes("2GiB"), parse_bytes(1000)
    (1500000000, 2147483648, 1000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip().lower())
    if match is None or match[2] not in UNITS or isinstance(size, bool):
        raise ArgumentError(f"memory_limit: must be a size in bytes, such as '8 GB'. Got {size!r}.")
    return int(float(match[1]) * UNITS[match[2]])


def _fit_seconds(
    model: ModelProtocol, sample: TextSample, row_stride: int, layers: Container[LayerAddress] | None
) -> tuple[float, float]:
    """Return seconds per token and per squared token of one text, measured on two pieces."""
    selection = select_metrics(model)
    lengths = [min(size, model.spec.context) for size in PIECES]
    seconds = []
    for length in (lengths[0], *lengths):  # the first run warms up
        ids = (sample.ids * (length // max(1, len(sample.ids)) + 1))[:length]
        batch = make_batch([replace(sample, ids=ids)], device=model.device)
        accumulator = Accumulator(_num_heads(model, layers))
        runner = MetricRunner(accumulator, selection.corpus_metrics, row_stride, layers=layers)
        start = time.perf_counter()
        with eval_mode(model):
            runner.run(model, [batch])
        seconds.append(time.perf_counter() - start)
    short, long = seconds[1:]
    if lengths[0] == lengths[1]:
        return short / lengths[0], 0.0
    quadratic = max(0.0, (long / lengths[1] - short / lengths[0]) / (lengths[1] - lengths[0]))
    return max(0.0, long / lengths[1] - quadratic * lengths[1]), quadratic


def _available_bytes() -> int | None:
    """Return the free memory of this machine. None if it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.partition(":")[0]: line.split()[1] for line in lines if line}
    return int(sizes["MemAvailable"]) << 10 if "MemAvailable" in sizes else None


def _num_heads(model: ModelProtocol, layers: Container[LayerAddress] | None) -> int:
    return sum(len(point.head_ids) for point in points_in_layers(model.gathered_hook_points(), layers))


def _sum_bytes(model: ModelProtocol, layers: Container[LayerAddress] | None) -> int:
    """Return the bytes of the sums and row counts of all scores, by head and bucket of texts."""
    num_scores = len(select_metrics(model).metric_specs)
    return 2 * 8 * BUCKETS * num_scores * _num_heads(model, layers)


def _weight_bytes(model: ModelProtocol) -> int:
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    return sum(weights.values())


def _batch_bytes(model: ModelProtocol, tokens: int) -> int:
    spec: ModelSpec = model.spec
    width = next((weight.element_size() for weight in model.parameters() if weight.is_floating_point()), 4)
    states = (HIDDEN_STATES * spec.width + MLP_STATES * spec.mlp_width) * width
    return BLOCK_BYTES + tokens * (states + ROW_STATISTICS * spec.attention.heads * 4)
