"""What few bits cost, head by head: the loss gained when one head alone is stored at b bits.

Beside the loss stands the drift, KL(untouched ‖ rounded) of what is said of the next token: the loss that would be gained if
texts were the model's own. It is never below 0 and far less a matter of which texts were read, so bits are shared out by it.

One clean walk through the blocks keeps the stream; at each layer a head's weights are rounded in place, the rest of the
network is run, and the weights are put back bitwise. Where heads share keys, the key head and all who read it are one: what
is shared can only be stored once. Each answer is kept in a file as soon as it is known, so a run that stops goes on.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.eval_targets import TargetBatch, ask, askable_units, check_askable
from headwise.analysis.ablation.head_outputs import read_on
from headwise.analysis.ablation.quantized_in_place import (
    WEIGHTS,
    AtBits,
    at_few_bits,
    check_in_place,
    check_parts,
    chosen_heads,
    questions,
)
from headwise.analysis.ablation.rerun import FromLayer, Whole
from headwise.analysis.metrics.statistics import bootstrap
from headwise.analysis.recording.batching import make_batches, read_sites
from headwise.errors import HeadwiseError, close_names
from headwise.heads.balanced_basis import Basis, Matrices, check_basis, in_basis
from headwise.heads.head import HasHeads, Pattern
from headwise.heads.hook_point import Seen
from headwise.io.atomic_write import whole_file
from headwise.io.resolve_path import read_text
from headwise.model import AnyModel, Transformer, quiet
from headwise.progress import Progress
from headwise.spec.weight_bits import GROUP, check_group
from headwise.training.setup import weights_digest

TOKENS = 2048  # run at once


@dataclass(frozen=True)
class Cost:
    """What storing one part at so many bits costs, with its 95 % interval over texts."""

    key: str
    heads: str
    part: str
    bits: int
    more: float  # loss
    low: float
    high: float
    drift: float  # KL from the untouched model, nats a token; without an output the same as the loss


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What each part of each head costs at few bits; sums by text are kept, so that intervals can be drawn."""

    about: dict[str, Any]  # what was asked, of which model, on which texts
    settings: tuple[AtBits, ...]
    sums: np.ndarray  # (questions, texts): what each text loses
    drifts: np.ndarray  # (questions, texts): how far the model has drifted on it
    counts: np.ndarray  # (texts,): tokens it was asked for

    @property
    def metric(self) -> str:
        """What is measured."""
        return self.about["metric"]

    @property
    def clean(self) -> float | None:
        """The untouched model's loss; none where a model has no output."""
        return self.about["clean"]

    @property
    def more(self) -> np.ndarray:
        """What each question costs, (questions,)."""
        return self.sums.sum(1) / self.counts.sum()

    @property
    def drift(self) -> np.ndarray:
        """How far the model drifts by each, (questions,)."""
        return self.drifts.sum(1) / self.counts.sum()

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95 % of the bootstrap over texts: low and high, (questions,)."""
        return bootstrap(self.sums.T, np.broadcast_to(self.counts[:, None], self.sums.T.shape))

    def __len__(self) -> int:
        return len(self.settings)

    def __iter__(self) -> Iterator[Cost]:
        for one, *figures in zip(self.settings, self.more, *self.interval, self.drift, strict=True):
            yield Cost(one.key, " ".join(one.heads), one.part, one.bits, *map(float, figures))

    def __getitem__(self, wanted: tuple[str, str, int]) -> Cost:
        """What one part of one key head costs at so many bits: found["5.1", "qk", 4]."""
        for cost in self:
            if (cost.key, cost.part, cost.bits) == wanted:
                return cost
        key, part, bits = wanted
        known = [f"{one.key}:{one.part} at {one.bits}" for one in self.settings]
        raise HeadwiseError(f"{key}:{part} at {bits} bits was not measured; {close_names(f'{key}:{part}', known)}")

    def rows(self) -> list[list[str | int | float]]:
        """A table, the costliest first; its columns are the fields of `Cost`."""
        return [list(asdict(cost).values()) for cost in sorted(self, key=lambda cost: -cost.more)]

    def to_dict(self) -> dict[str, Any]:
        """Everything but sums, as plain data."""
        costs = [asdict(cost) for cost in self]
        for cost in costs:
            cost |= {name: None if np.isnan(cost[name]) else cost[name] for name in ("low", "high")}
        return self.about | {"costs": costs}

    @staticmethod
    def load(path: str | Path) -> "Sensitivity":
        """Read what `sensitivity(…, out=path)` has written so far."""
        about, known = _read(Path(path))
        if about is None:
            raise HeadwiseError(f"{path} holds no sensitivities; hw.sensitivity(model, corpus, out=path) writes them.")
        return _made(about, tuple(known), known)


@torch.no_grad()
def sensitivity(
    model: AnyModel,
    on: Any = None,
    *,
    bits: Sequence[int] = (4,),
    parts: Sequence[str] = WEIGHTS,
    heads: Pattern = "*",
    group: int = GROUP,
    basis: Basis | None = None,
    longest: int | None = None,
    tokens: int = TOKENS,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """What the loss gains when one head alone is stored at few bits; the model stays as it is, bitwise.

    `parts` are qk (W_Q and W_K), vo (W_V and W_O), keys and values (those cached). Weights are rounded in their balanced
    basis (`basis`: given, balanced, random; for somebody else's model given, for its positions are not ours to know).
    `on` are texts, `longest` cuts plain text into units of so many tokens, `tokens` is how many are run at once. `out` is a
    file in which every answer is kept as soon as it is known: the same call goes on where it stopped.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> found = sensitivity(model, ["To be or not to be", "that is the question"], bits=(8, 2))
    >>> len(found), found.settings[0]
    (16, AtBits(key='0.0', heads=('0.0',), part='qk', bits=8))
    """
    check_askable(model, "loss")
    parts, bits = tuple(parts), tuple(bits)
    check_parts(parts, bits)
    check_group(group)
    basis = basis or usual_basis(model)
    check_basis(basis)
    if basis != "given" and not isinstance(model, Transformer):
        raise HeadwiseError(
            "a basis is changed in headwise's own models, whose positions are known; use basis='given'."
        )
    named = chosen_heads(heads, tuple(a for site in read_sites(model, heads) for a in site.addresses))
    layers = [layer for layer in model.attention_layers() if layer.spec.head_ids]
    wanted = {layer.site.address: questions(layer, named, parts, bits) for layer in layers}
    for layer in layers:
        if wanted[layer.site.address] and set(parts) & set(WEIGHTS):
            check_in_place(layer)
    with quiet(model):
        units = list(askable_units(model, read_on(model, on, longest)))
        batches = [ask(model, batch) for batch in make_batches(units, tokens, device=model.device)]
        walk = walked(model, batches)
        about = {
            "model": weights_digest(model), "texts": _fingerprint(batches), "group": group, "basis": basis,
            "metric": "1 − cosine" if batches[0].targets is None else "nats a token", "clean": walk.clean_loss(),
            "counts": torch.cat([asked.counts for asked in batches]).tolist(),
        }  # fmt: skip
        every = tuple(one for asked in wanted.values() for one in asked)
        known = {} if out is None else _resumed(Path(out), about)
        done = sum(one in known for one in every)
        for layer in layers:
            todo = [one for one in wanted[layer.site.address] if one not in known]
            if todo:
                base = in_basis(Matrices.of(layer), layer.spec, basis) if set(parts) & set(WEIGHTS) else None
                clean = walk.seen(layer) if any(one.part not in WEIGHTS for one in todo) else None
                walk.come_to(layer)
                for one in todo:
                    known[one] = walk.lost(partial(_changed, layer, one, base, group, clean))
                    _keep(out, one, known[one])
                    done += 1
                    if progress is not None:
                        progress("what few bits cost", done, len(every))
    return _made(about, every, known)


def _changed(
    layer: HasHeads, one: AtBits, base: Matrices | None, group: int, clean: list[Seen] | None, batch: int
) -> AbstractContextManager[None]:
    return at_few_bits(layer, one, base or Matrices.of(layer), group, None if clean is None else clean[batch])


def usual_basis(model: AnyModel) -> Basis:
    """The basis heads are rounded in unless another is asked for."""
    return "balanced" if isinstance(model, Transformer) else "given"


def walked(model: AnyModel, batches: list[TargetBatch]) -> Whole:
    """Block by block where a model is ours and of one stack, by whole passes elsewhere."""
    if isinstance(model, Transformer) and model.spec.kind != "encoder-decoder":
        return FromLayer(model, batches)
    return Whole(model, batches)


Known = dict[AtBits, list[list[float]]]


def _made(about: dict[str, Any], every: tuple[AtBits, ...], known: Known) -> Sensitivity:
    counts = np.array(about["counts"], dtype=np.float64)
    both = np.array([known[one] for one in every], dtype=np.float64).reshape(len(every), 2, len(counts))
    return Sensitivity(about, every, both[:, 0], both[:, 1], counts)


def _fingerprint(batches: list[TargetBatch]) -> str:
    made = hashlib.sha256()
    for asked in batches:
        for tensor in (asked.ids, asked.targets, asked.source):
            made.update(b"-" if tensor is None else str(tensor.tolist()).encode())
    return made.hexdigest()[:16]


# The file: a line that says what is asked, then a line for each answer.


def _read(path: Path) -> tuple[dict[str, Any] | None, Known]:
    """What a file holds; a line that was cut off when the process died is left out."""
    lines = []
    for line in read_text(path).splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not lines:
        return None, {}
    about, known = lines[0], {}
    try:
        texts = len(about["counts"])
        for told in lines[1:]:
            one = AtBits(told["key"], tuple(told["heads"]), told["part"], told["bits"])
            known[one] = [[float(value) for value in row] for row in told["lost"]]
            if [len(row) for row in known[one]] != [texts, texts]:
                raise ValueError
    except (KeyError, TypeError, ValueError):
        raise HeadwiseError(f"{path} holds something else than sensitivities; choose another file.") from None
    return about, known


def _resumed(path: Path, about: dict[str, Any]) -> Known:
    """What is known already; a new file begins with what is asked."""
    before, known = _read(path)
    same = ("model", "texts", "group", "basis", "metric", "counts")
    if before is not None and any(before.get(name) != about[name] for name in same):
        other = [name for name in same if before.get(name) != about[name]]
        raise HeadwiseError(f"{path} holds sensitivities of another run ({', '.join(other)}); choose another file.")
    lines = [about if before is None else before]
    lines += [asdict(one) | {"lost": lost} for one, lost in known.items()]
    whole_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())  # without a line that was cut off
    return known


def _keep(path: str | Path | None, one: AtBits, lost: list[list[float]]) -> None:
    """One more line, on the disk at once."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one) | {"lost": lost}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); answers that are in it are kept.") from error
