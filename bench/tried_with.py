"""What checks of an architecture stand on: calls, heads to ask, numbers beside numbers."""

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import set_seed

import headwise as hw
from bench.shrink import VOCAB, tiny
from headwise.attached.dummy_inputs import samples
from headwise.attached.verify_prune import tensors

CLOSE = 2e-3  # beside the largest number: float32 on the way; what is wrong is off by more than a tenth
LARGEST = 5e7  # weights
WORDS = [f"w{number}" for number in range(50)]


VERDICTS = ("right", "looking only", "refused", "wrong", "crash", "not built")  # the worse the later


@dataclass
class Tried:
    """What came of one architecture."""

    name: str
    model: str
    verdict: str = "right"  # right, looking only, refused, wrong, crash, not built
    why: str = ""
    told: dict[str, str] = field(default_factory=dict)  # by check: what was refused, wrong or raised


def end(made: Tried, verdict: str, error: Exception) -> Tried:
    """What came of it, where that is an error."""
    made.verdict, made.why = verdict, (f"{type(error).__name__}: " if verdict != "refused" else "") + short(error)
    return made


def short(error: Exception) -> str:
    """The words of an error, in one line."""
    return " ".join(str(error).split())[:300]


class Wrong(Exception):  # noqa: N818 (a finding, not an error)
    """A number that is not what another way to it gives."""


def build(kind: Any, config_class: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model with weights large enough to matter, and what it is called with: two texts. The first rule that works."""
    first: Exception | None = None
    for number, config in enumerate(tiny(config_class, kind)):
        try:
            if isinstance(config, Exception):
                raise config
            return _build(kind, config, known=number > 0)
        except Exception as error:
            first = first or error
    raise first or ValueError("no rule makes it small")


def _build(kind: Any, config: Any, known: bool) -> tuple[Any, dict[str, Tensor]]:
    """A model of one configuration; `known` asks for its size before it is built."""
    torch.manual_seed(7)
    if known:
        with torch.device("meta"):
            _check_size(kind(copy.deepcopy(config)))
    model = kind(config).eval()
    _check_size(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.requires_grad:  # sinusoids are made again, not saved
                noise = torch.randn_like(weight)
                weight.add_(noise * 0.1) if weight.ndim < 2 else weight.copy_(
                    noise * max(1.0, weight.numel() / max(1, len(weight))) ** -0.5
                )
    given, out = first_that_runs(model)
    again = outputs(model, given)
    if not out or any(not bool(x.isfinite().all()) for x in out):
        raise ValueError("its numbers are not finite")
    if any(not torch.equal(a, b) for a, b in zip(out, again, strict=True)):
        raise ValueError("it gives other numbers when called twice")
    return model, given


def _check_size(model: Any) -> None:
    size = sum(weight.numel() for weight in model.parameters())
    if size > LARGEST:
        raise ValueError(f"{size} weights after shrinking are too many for a tiny model")


def first_that_runs(model: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What a model can be called with, and what it gives then."""
    first: Exception = ValueError("what it reads is not known")
    for number, given in enumerate(samples(model)):
        try:
            out = outputs(model, given)
            if out:
                return given, out
        except Exception as error:
            first = error if number == 0 else first
    raise first


def outputs(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(**given))


def is_reached(theirs: Any, model: Any, given: dict[str, Tensor]) -> bool:
    """Whether a call of the whole model reaches what is attached."""
    calls: list[Any] = []
    with ExitStack() as listening:
        for site in theirs.sites():
            listening.enter_context(site.listen(calls.append))
        outputs(model, given)
    return bool(calls)


def some_heads(theirs: Any) -> list[hw.Head]:
    """Of every stack the first layer's second head and the last layer's last."""
    by_stack: dict[str, list[Any]] = {}
    for address in theirs.heads.addresses:
        by_stack.setdefault(address.stack, []).append(address)
    chosen = []
    for there in by_stack.values():
        chosen += [there[min(1, len(there) - 1)], there[-1]]
    return [theirs.heads[address] for address in dict.fromkeys(chosen)]


def check_same(one: Tensor, other: Tensor, what: str) -> None:
    size = float(other.abs().max()) if other.numel() else 0.0
    away = float((one - other).abs().max()) if other.numel() else 0.0
    if not away <= CLOSE * size + 1e-6:
        raise Wrong(f"{what}: off by {away / (size or 1):.0%}")


def check_alike(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    shared = one.keys() & other.keys()
    size = max((float(other[name].abs().max()) for name in shared), default=0.0)
    away = max((float((one[name] - other[name]).abs().max()) for name in shared), default=0.0)
    if not away <= 5 * CLOSE * size + 1e-6:
        raise Wrong(f"{what}: off by {away / (size or 1):.0%}")


def slopes_of(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The slope of a fixed sum of outputs in some weights: not W_O itself, whose own slope is halved."""
    chosen = {name: weight for name, weight in model.named_parameters() if weight.requires_grad and weight.ndim == 1}
    if not chosen:
        chosen = dict(list(model.named_parameters())[:1])
    set_seed(0)  # in training some mask their inputs, or leave out layers, by chance
    out = tensors(model(**given))
    loss = sum((x.float() * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum() for x in out if x.requires_grad)
    if not isinstance(loss, Tensor):
        return {}
    found = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
    return {name: slope for name, slope in zip(chosen, found, strict=True) if slope is not None}


def calm_down(module: nn.Module) -> None:
    """No dropout, so that two passes are alike."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    for name, value in vars(module).items():
        if ("drop" in name or name == "p") and isinstance(value, float):
            setattr(module, name, 0.0)


def recorded_of(model: Any, theirs: Any, given: dict[str, Tensor], head: hw.Head, letter: str) -> Tensor:
    """q, k or v of a layer in its first call, (B, heads, T, d)."""
    kept: list[Tensor] = []
    with head.layer.site.listen(lambda seen: kept.append(getattr(seen, letter.lower()).clone())):
        outputs(model, given)
    return kept[0]


def other_inputs(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other inputs of the same shapes."""
    return {name: value.flip(0) if value.ndim > 1 else value for name, value in given.items()}


def reads_text(part: Any) -> bool:
    return getattr(part, "main_input_name", "") == "input_ids"


def make_tokenizer() -> Any:
    backend = Tokenizer(
        models.WordLevel({word: 3 + i for i, word in enumerate(WORDS)} | {"[UNK]": 1}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return hw.Tokenizer(backend, {"mask": 2, "unk": 1})


def state_of(model: Any) -> Any:
    """Everything a model is besides its numbers: what its parts hold, their hooks, which attention runs."""
    parts = [
        (name, sorted(part.__dict__), len(part._forward_pre_hooks), len(part._forward_hooks))
        for name, part in model.named_modules()
    ]
    return parts, str(model.config._attn_implementation), str(model.config.to_dict()), model.training


assert len(WORDS) + 3 < VOCAB
