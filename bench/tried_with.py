"""Helpers of the architecture checks: model calls, sampled heads and comparisons."""

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import set_seed

import headwise as hw
from bench.shrink import VOCAB, tiny_configs
from headwise.attached.dummy_inputs import dummy_input_candidates
from headwise.attached.prune_in_place import flatten_tensors

TOLERANCE = 2e-3  # relative to the largest number, for float32; wrong results differ by more than 0.1
MAX_PARAMETERS = 5e7
WORDS = [f"w{index}" for index in range(50)]


VERDICTS = ("right", "looking only", "refused", "wrong", "crash", "not built")  # from best to worst


@dataclass
class AttachReport:
    """Result of one architecture."""

    name: str
    model: str
    verdict: str = "right"  # one of VERDICTS
    reason: str = ""
    findings: dict[str, str] = field(default_factory=dict)  # message of each failed check


def record_failure(report: AttachReport, verdict: str, error: Exception) -> AttachReport:
    """Store the verdict and the message of an error."""
    report.verdict, report.reason = (
        verdict,
        (f"{type(error).__name__}: " if verdict != "refused" else "") + one_line(error),
    )
    return report


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:300]


class CheckFailed(Exception):  # noqa: N818 (a finding, not an error)
    """A result differs from that of another computation."""


def build(kind: Any, config_class: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a tiny model with large weights and the inputs of two texts, by the first size rule that works."""
    first: Exception | None = None
    for index, config in enumerate(tiny_configs(config_class, kind)):
        try:
            if isinstance(config, Exception):
                raise config
            return _build(kind, config, check_size_first=index > 0)
        except Exception as error:
            first = first or error
    raise first or ValueError("no rule makes it small")


def _build(kind: Any, config: Any, check_size_first: bool) -> tuple[Any, dict[str, Tensor]]:
    """Build a model. `check_size_first` checks its size before."""
    torch.manual_seed(7)
    if check_size_first:
        with torch.device("meta"):
            _check_size(kind(copy.deepcopy(config)))
    model = kind(config).eval()
    _check_size(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.requires_grad:  # sinusoids are recomputed, not saved
                noise = torch.randn_like(weight)
                weight.add_(noise * 0.1) if weight.ndim < 2 else weight.copy_(
                    noise * max(1.0, weight.numel() / max(1, len(weight))) ** -0.5
                )
    inputs, out = find_runnable_inputs(model)
    again = outputs(model, inputs)
    if not out or any(not bool(x.isfinite().all()) for x in out):
        raise ValueError("its numbers are not finite")
    if any(not torch.equal(a, b) for a, b in zip(out, again, strict=True)):
        raise ValueError("it gives other numbers when called twice")
    return model, inputs


def _check_size(model: Any) -> None:
    size = sum(weight.numel() for weight in model.parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} weights after shrinking are too many for a tiny model")


def find_runnable_inputs(model: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return inputs that the model accepts, and its outputs."""
    first: Exception = ValueError("what it reads is not known")
    for index, inputs in enumerate(dummy_input_candidates(model)):
        try:
            out = outputs(model, inputs)
            if out:
                return inputs, out
        except Exception as error:
            first = error if index == 0 else first
    raise first


def outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return flatten_tensors(model(**inputs))


def is_reached(attached: Any, model: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether a call of the full model reaches the attached submodule."""
    calls: list[Any] = []
    with ExitStack() as stack:
        for hook_point in attached.hook_points():
            stack.enter_context(hook_point.listen(calls.append))
        outputs(model, inputs)
    return bool(calls)


def sample_heads(attached: Any) -> list[hw.Head]:
    """Return the second head of the first layer and the last head of the last layer of each stack."""
    by_stack: dict[str, list[Any]] = {}
    for address in attached.heads.addresses:
        by_stack.setdefault(address.stack, []).append(address)
    chosen = []
    for addresses in by_stack.values():
        chosen += [addresses[min(1, len(addresses) - 1)], addresses[-1]]
    return [attached.heads[address] for address in dict.fromkeys(chosen)]


def check_same(actual: Tensor, expected: Tensor, label: str) -> None:
    size = float(expected.abs().max()) if expected.numel() else 0.0
    difference = float((actual - expected).abs().max()) if expected.numel() else 0.0
    if not difference <= TOLERANCE * size + 1e-6:
        raise CheckFailed(f"{label}: off by {difference / (size or 1):.0%}")


def check_same_dicts(actual: dict[str, Tensor], expected: dict[str, Tensor], label: str) -> None:
    shared = actual.keys() & expected.keys()
    size = max((float(expected[name].abs().max()) for name in shared), default=0.0)
    difference = max((float((actual[name] - expected[name]).abs().max()) for name in shared), default=0.0)
    if not difference <= 5 * TOLERANCE * size + 1e-6:
        raise CheckFailed(f"{label}: off by {difference / (size or 1):.0%}")


def gradients_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a fixed sum of outputs for some weights, without W_O, whose own gradient is halved."""
    chosen = {name: weight for name, weight in model.named_parameters() if weight.requires_grad and weight.ndim == 1}
    if not chosen:
        chosen = dict(list(model.named_parameters())[:1])
    set_seed(0)  # some models mask inputs or drop layers at random in training
    out = flatten_tensors(model(**inputs))
    loss = sum((x.float() * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum() for x in out if x.requires_grad)
    if not isinstance(loss, Tensor):
        return {}
    gradients = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(chosen, gradients, strict=True) if gradient is not None}


def disable_dropout(module: nn.Module) -> None:
    """Disable dropout, so that two passes are equal."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    for name, value in vars(module).items():
        if ("drop" in name or name == "p") and isinstance(value, float):
            setattr(module, name, 0.0)


def record_projection(model: Any, attached: Any, inputs: dict[str, Tensor], head: hw.Head, projection: str) -> Tensor:
    """Return q, k or v of the first call of a layer, (B, heads, T, d)."""
    recorded: list[Tensor] = []
    with head.layer.hook_point.listen(lambda call: recorded.append(getattr(call, projection.lower()).clone())):
        outputs(model, inputs)
    return recorded[0]


def flipped_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return other inputs of equal shapes."""
    return {name: value.flip(0) if value.ndim > 1 else value for name, value in inputs.items()}


def reads_text(part: Any) -> bool:
    return getattr(part, "main_input_name", "") == "input_ids"


def make_tokenizer() -> Any:
    backend = Tokenizer(
        models.WordLevel({word: 3 + i for i, word in enumerate(WORDS)} | {"[UNK]": 1}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return hw.Tokenizer(backend, {"mask": 2, "unk": 1})


def state_of(model: Any) -> Any:
    """Return the state of a model without its weights: attributes, hooks and attention implementation."""
    parts = [
        (name, sorted(part.__dict__), len(part._forward_pre_hooks), len(part._forward_hooks))
        for name, part in model.named_modules()
    ]
    return parts, str(model.config._attn_implementation), str(model.config.to_dict()), model.training


assert len(WORDS) + 3 < VOCAB
