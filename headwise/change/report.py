"""What cutting brought and what it cost: sizes, speed, and the loss beside that of random cuts of the same size."""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise.change.cut import cut, fold
from headwise.change.rank import rank, worst
from headwise.change.trial import Figure, Trial, finite
from headwise.errors import HeadwiseError
from headwise.look.inputs import read
from headwise.look.profile import Note
from headwise.look.runs import Means, mean_activations
from headwise.look.sweep import pass_cost
from headwise.model import AnyModel, quiet
from headwise.spec import ModelSpec

LENGTH = 512  # tokens of the text that operations are counted for and speed is measured on


@dataclass(frozen=True)
class Size:
    """What a model takes. Operations are those of matrix products in one pass over a text, hidden pairs left out."""

    heads: int
    kv_heads: int
    layers_without_heads: int
    parameters: int
    cache_bytes_per_token: int
    operations: int

    @staticmethod
    def of(spec: ModelSpec, length: int = LENGTH, bytes_per_number: int = 4) -> "Size":
        """Count, without building anything.

        >>> from headwise.spec import preset
        >>> Size.of(preset("smollm2-135m")).cache_bytes_per_token  # 30 layers, 3 heads, a key and a value of 64 numbers
        46080
        """
        layers = {site: spec.attention_at(site) for site in spec.sites}
        cached = [layer for site, layer in layers.items() if site.stack in ("", "dec") and spec.kind != "encoder"]
        numbers = sum(len(layer.kv_ids) * (layer.head_dim + layer.value_dim) for layer in cached)
        return Size(
            heads=len(spec.addresses),
            kv_heads=sum(len(layer.kv_ids) for layer in layers.values()),
            layers_without_heads=sum(not layer.head_ids for layer in layers.values()),
            parameters=spec.parameters,
            cache_bytes_per_token=numbers * bytes_per_number,
            operations=pass_cost(spec, length, causal=True).whole(rows=length),
        )


@dataclass(frozen=True)
class Report:
    """Two models side by side; losses with 95 % intervals over texts, differences paired text by text."""

    before: Size
    after: Size
    length: int  # of the text that operations and speed are told for
    seconds: tuple[float, float]  # of a pass over it, before and after: medians
    speed: float  # how many times quicker
    metric: str
    texts: int
    loss_before: Figure
    loss_after: Figure
    more: Figure  # loss after − before
    random: tuple[float, ...] = ()  # the loss of random cuts of the same size, a seed each
    more_than_random: Figure | None = None  # loss after − their mean

    def rows(self) -> list[list[str | int | float]]:
        """Figure, before, after, and after as a share of before."""
        made: list[list[str | int | float]] = []
        for name, value in asdict(self.before).items():
            now = getattr(self.after, name)
            made.append([name.replace("_", " "), value, now, now / value if value else float("nan")])
        made.append([f"seconds, {self.length} tokens", *self.seconds, 1 / self.speed])
        return made

    def losses(self) -> list[list[str | float]]:
        """What, mean, low, high."""
        named = {"before": self.loss_before, "after": self.loss_after, "after − before": self.more}
        made: list[list[str | float]] = [[name, *asdict(figure).values()] for name, figure in named.items()]
        if self.more_than_random is not None:
            spread = (float(np.mean(self.random)), min(self.random), max(self.random))
            made.append([f"random cuts, {len(self.random)} seeds: mean, least, most", *spread])
            made.append(["after − random", *asdict(self.more_than_random).values()])
        return made

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        return asdict(self, dict_factory=finite)


def report(
    before: AnyModel,
    after: AnyModel,
    on: Any,
    *,
    folded_on: Any = None,
    seeds: int = 3,
    length: int | None = None,
    turns: int = 5,
    note: Note | None = None,
) -> Report:
    """Measure a smaller model beside the one it came from, on a corpus, best one that heads were not chosen on.

    Random cuts take as many heads, once for each of `seeds`; their means over `folded_on` are folded in, where it is given.
    Speed is measured on a text of `length` tokens (None: 512, or the model's context), both models in turn, `turns` times.
    """
    gone = set(before.spec.addresses) - set(after.spec.addresses)
    if not set(after.spec.addresses) <= set(before.spec.addresses) or before.spec.vocab != after.spec.vocab:
        raise HeadwiseError(
            "the second model has heads the first has not; give the full model first, then the cut one."
        )
    trial = Trial.of(before, on)
    seeds = seeds if gone else 0
    means = mean_activations(before, folded_on) if folded_on is not None and seeds else None
    measured = []
    for number in range(1 + seeds):
        measured.append(trial.losses(random_cut(before, len(gone), means, number - 1) if number else after))
        if note is not None:
            note("measuring models", number + 1, 1 + seeds)
    losses, *others = measured
    length = min(LENGTH, before.spec.context) if length is None else length
    seconds = _take_turns((before, after), length, turns)  # (turns, 2)
    return Report(
        before=_size(before, length),
        after=_size(after, length),
        length=length,
        seconds=(statistics.median(pair[0] for pair in seconds), statistics.median(pair[1] for pair in seconds)),
        speed=statistics.median(one / other for one, other in seconds),
        metric=trial.metric,
        texts=len(trial.counts),
        loss_before=trial.figure(trial.full),
        loss_after=trial.figure(losses),
        more=trial.difference(losses, trial.full),
        random=tuple(float(other.sum() / trial.counts.sum()) for other in others),
        more_than_random=trial.difference(losses, np.mean(others, 0)) if others else None,
    )


def _size(model: AnyModel, length: int) -> Size:
    """What a model takes, its parameters counted one by one: a spec of somebody else's model does not tell them all."""
    size = Size.of(model.spec, length, next(model.parameters()).element_size())
    return replace(size, parameters=sum(value.numel() for value in model.parameters()))


def random_cut(model: AnyModel, count: int, means: Means | None, seed: int) -> AnyModel:
    """The model without so many heads drawn by chance, their means folded in where they are given."""
    gone = worst(model.spec.addresses, rank(model, None, "random", seed=seed), count)
    return cut(model, gone, None if means is None else fold(model, gone, means))


@torch.no_grad()
def _take_turns(models: tuple[AnyModel, AnyModel], length: int, turns: int) -> list[tuple[float, float]]:
    """Seconds of a pass of both models over a random text, one after the other, turn by turn."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(models[0].spec.vocab, (1, length), generator=draws).to(models[0].device)  # (1, T)
    with quiet(models[0]), quiet(models[1]):
        for model in models:
            read(model, ids, hidden=False)  # the first call also warms up
        return [(_seconds(models[0], ids), _seconds(models[1], ids)) for _ in range(turns)]


def _seconds(model: AnyModel, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    read(model, ids, hidden=False)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
