"""`selftest`: a sample of the contract suite, run on one device of this machine and compared with the CPU.

Models are tiny and random. The expected numbers come from the reference kernel or a float64 copy of the model on the CPU.
A check fails if the device computes something else, mixes devices, or lacks an operation. Relative errors are norms:
‖result − expected‖ / ‖expected‖.
"""

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.compression import StreamingRequest
from headwise.errors import HeadwiseError
from headwise.kernels import resolve_device, resolve_dtype, rounding_bound
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.text import make_tokenizer

ROUNDINGS = 64  # roundings of one number on its way through two layers
TEXTS = [
    "the cat saw a dog and the dog saw a cat",
    "a man who ran fell over it",
    "to be or not to be",
    "one two one two",
]
ATTENTION = hw.AttentionSpec(width=24, heads=4, kv_heads=2, head_dim=6, rotary=hw.Rotary())
DECODER = hw.ModelSpec(vocab=257, context=64, layers=2, attention=ATTENTION, positions="none", mlp_width=32)
SPECS = {
    "decoder": DECODER,
    "decoder with sinks, softcap and windows": replace(
        DECODER, windows=(3, None), attention=replace(ATTENTION, softmax="sink", softcap=4.0)
    ),
    "decoder with ALiBi": replace(DECODER, attention=replace(ATTENTION, rotary=None, alibi=True)),
    "encoder": replace(DECODER, kind="encoder", output="mlm", norm_placement="post"),
    "encoder-decoder": replace(
        DECODER, kind="encoder-decoder", attention=replace(ATTENTION, rotary=None), positions="learned"
    ),
}


@dataclass(frozen=True)
class SelfTestCheck:
    """Result of one check.

    Attributes:
        name: Name of the check.
        status: "passed", "failed" or "skipped".
        error: Largest relative error. None if the check compares bits or tokens.
        bound: Bound on the error, from the rounding of the dtype.
        seconds: Duration.
        note: Reason of a failed or skipped check.
    """

    name: str
    status: str
    error: float | None
    bound: float | None
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class SelfTestReport:
    """Results of `selftest`.

    Attributes:
        device: The tested device.
        dtype: Data type of the weights.
        torch_version: Version of torch.
        checks: One result per check.
    """

    device: str
    dtype: str
    torch_version: str
    checks: tuple[SelfTestCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "failed" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"passed": self.passed}


@shows_progress
def selftest(
    device: torch.device | str = "auto",
    *,
    dtype: torch.dtype | str = "float32",
    progress: ProgressOption = None,
) -> SelfTestReport:
    """Verify an installation on one device: run a sample of the contract suite there and compare it with the CPU.

    Kernels, layers, models, caches, generation, recording, ablation, profiles, pruning, quantization, training, saving and
    attached models run on tiny random models. It takes about a minute.

    Args:
        device: Device to test. "auto": the first available of CUDA, XPU, MPS and CPU.
        dtype: Data type of the weights.
        progress: Called with a label, the number of checks done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        One result per check, with its error, the bound and the duration.

    Raises:
        ArgumentError: The device is not available, or does not compute in the dtype.

    >>> from headwise.experiments.device_selftest import CHECKS
    >>> len(CHECKS) > 15
    True
    """
    progress = callback_of(progress)
    resolved = resolve_device(device)
    weight_dtype = resolve_dtype(dtype, resolved)
    assert weight_dtype is not None
    setup, results = DeviceSetup(resolved, weight_dtype), []
    for done, (name, check) in enumerate(CHECKS.items()):
        if progress is not None:
            progress("selftest", done, len(CHECKS))
        results.append(_run_check(name, check, setup))
    name = str(weight_dtype).removeprefix("torch.")
    return SelfTestReport(str(resolved), name, torch.__version__, tuple(results))


@dataclass(frozen=True)
class DeviceSetup:
    """Device and dtype under test, with the models on the device and their float64 copies on the CPU."""

    device: torch.device
    dtype: torch.dtype

    def model(self, name: str = "decoder") -> hw.Transformer:
        """Return a model on the device. Equal names give equal weights."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = hw.Transformer(SPECS[name])
        for weight in model.parameters():
            weight.data = weight.data.double().mul(2).to(self.dtype)  # sharper attention
        model.tokenizer = make_tokenizer("byte", hw.Corpus.of(TEXTS))
        return model.to(self.device).eval()

    def reference(self, model: hw.Transformer) -> hw.Transformer:
        """Return a float64 copy of a model on the CPU."""
        return copy.deepcopy(model).cpu().double()

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normal numbers that are equal on every device, rounded to the dtype, in float64 on the CPU."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(self.dtype).double()

    def put(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor in the dtype on the device."""
        return x.to(self.dtype, copy=True).to(self.device)


@dataclass(frozen=True)
class SkipCheck(Exception):  # noqa: N818 (not an error)
    """Raised by a check that cannot run here."""

    reason: str


def _run_check(name: str, check: Callable[[DeviceSetup], float | None], setup: DeviceSetup) -> SelfTestCheck:
    start = time.perf_counter()
    bound = BOUND_FACTORS.get(name, 1.0) * rounding_bound(setup.dtype, ROUNDINGS)
    try:
        error = check(setup)
    except SkipCheck as skipped:
        return SelfTestCheck(name, "skipped", None, None, time.perf_counter() - start, skipped.reason)
    except Exception as failure:  # a device may raise anything
        lines = str(failure).strip().splitlines() or [""]
        note = f"{type(failure).__name__}: {lines[0]}"
        return SelfTestCheck(name, "failed", None, None, time.perf_counter() - start, note)
    seconds = time.perf_counter() - start
    if error is None:
        return SelfTestCheck(name, "passed", None, None, seconds)
    status = "passed" if error <= bound else "failed"  # NaN fails
    return SelfTestCheck(
        name, status, error, bound, seconds, "" if status == "passed" else "the error exceeds the bound"
    )


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return ‖result − expected‖ / ‖expected‖."""
    expected = expected.detach().cpu().double()
    return float((result.detach().cpu().double() - expected).norm() / expected.norm())


def _require(is_true: object, problem: str) -> None:
    if not is_true:
        raise HeadwiseError(problem)


# Kernels and layers.

PADDING = [[True] * 7, [False] * 2 + [True] * 5]
KERNEL_CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "all keys": lambda device: {},
    "causal": lambda device: {"mask": hw.causal()},
    "window": lambda device: {"mask": hw.causal() & hw.window(3)},
    "padding": lambda device: {"mask": hw.causal() & hw.padding_mask(torch.tensor(PADDING, device=device))},
    "sink": lambda device: {"mask": hw.causal(), "sink": 0.5},
}


def _check_kernel(setup: DeviceSetup, backend: str) -> float:
    q, k, v = setup.random(2, 4, 7, 6, seed=1), setup.random(2, 2, 7, 6, seed=2), setup.random(2, 2, 7, 6, seed=3)
    errors = []
    for make_options in KERNEL_CASES.values():
        sources = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = hw.attention(*sources, backend="reference", **make_options(torch.device("cpu")))
        expected.square().sum().backward()
        inputs = [setup.put(x).requires_grad_() for x in (q, k, v)]
        result = hw.attention(*inputs, backend=backend, **make_options(setup.device))
        result.square().sum().backward()
        errors.append(relative_error(result, expected))
        errors += [_grad_error(x, source) for x, source in zip(inputs, sources, strict=True)]
    return max(errors)


def _grad_error(result: Tensor, expected: Tensor) -> float:
    assert result.grad is not None
    assert expected.grad is not None
    return relative_error(result.grad, expected.grad)


def _check_layer(setup: DeviceSetup) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = hw.MultiHeadAttention(ATTENTION).to(setup.dtype)
    reference, x = copy.deepcopy(layer).double(), setup.random(2, 9, 24)
    layer.to(setup.device)
    result, expected = layer(setup.put(x), mask=hw.causal()), reference(x, mask=hw.causal())
    result.square().sum().backward()
    expected.square().sum().backward()
    pairs = zip(layer.parameters(), reference.parameters(), strict=True)
    return max(relative_error(result, expected), *(_grad_error(own, other) for own, other in pairs))


# Models.


def _model_inputs(name: str, device: torch.device) -> dict[str, Tensor]:
    ids = (torch.arange(22) * 37 % 250).reshape(2, 11).to(device)
    mask = torch.tensor([[False] * 3 + [True] * 8, [True] * 11]).to(device)
    return {"ids": ids, "attention_mask": mask} | ({"source": ids.flip(0)} if name == "encoder-decoder" else {})


@torch.no_grad()
def _check_model(setup: DeviceSetup, name: str) -> float:
    model = setup.model(name)
    expected = setup.reference(model)(**_model_inputs(name, torch.device("cpu")))
    result = model(**_model_inputs(name, setup.device))
    real = (
        torch.ones(2, 11, dtype=torch.bool)
        if name == "encoder-decoder"
        else _model_inputs(name, torch.device("cpu"))["attention_mask"]
    )
    return relative_error(result.cpu()[real], expected[real])


@torch.no_grad()
def _check_recording(setup: DeviceSetup) -> float:
    """Recording changes no bit of the output; the recorded maps are those of the reference."""
    model = setup.model()
    ids = _model_inputs("decoder", setup.device)["ids"]
    plain = model(ids)
    with hw.record(model) as recording:
        _require(torch.equal(model(ids), plain), "hw.record changed the output of the model")
    with model.heads["1.2"].silenced():
        _require(not torch.equal(model(ids), plain), "silencing a head had no effect")
    _require(torch.equal(model(ids), plain), "the output after silencing a head differs from that before")
    reference = setup.reference(model)
    with hw.record(reference) as expected:
        reference(ids.cpu())
    heads = map(str, model.spec.head_addresses)
    return max(relative_error(recording[head].map(), expected[head].map()) for head in heads)


@torch.no_grad()
def _check_cache(setup: DeviceSetup, kind: str) -> float:
    model, ids = setup.model(), _model_inputs("decoder", setup.device)["ids"]
    cache = model.cache(kind, None if kind == "dynamic" else 16)
    steps = [model(ids[:, :4], cache=cache), *(model(ids[:, t : t + 1], cache=cache) for t in range(4, 11))]
    return relative_error(torch.cat(steps, 1), setup.reference(model)(ids.cpu()))


def _check_streaming(setup: DeviceSetup) -> float:
    """Caches per head: the decode steps of a streaming model equal its full forward pass in float64."""
    model, ids = setup.model(), _model_inputs("decoder", setup.device)["ids"]
    plan = hw.plan_streaming(model, StreamingRequest(0.5, window=4, sink_tokens=1, ranking="random"))
    small = hw.apply(plan, model)
    with torch.no_grad():
        cache = small.cache()
        steps = [small(ids[:, t : t + 1], cache=cache) for t in range(11)]
        return relative_error(torch.cat(steps, 1), setup.reference(small)(ids.cpu()))


def _check_generation_seeds(setup: DeviceSetup) -> None:
    """Equal seeds give equal tokens, and another seed gives others."""
    model = setup.model()
    sample = partial(model.generate, "the cat", max_new_tokens=16, temperature=1.0)
    first, again, other = (str(sample(seed=seed)) for seed in (1, 1, 2))
    _require(first == again, "equal seeds gave different tokens")
    _require(first != other, "different seeds gave equal tokens")


def _check_training(setup: DeviceSetup) -> float:
    """Losses of a few steps equal those of the same run on the CPU in float32."""
    recipe = hw.Recipe(
        steps=4, batch_size=4, warmup=1, learning_rate=1e-3, context=16, precision="float32", log_every=1
    )
    losses = []
    for device in (setup.device, torch.device("cpu")):
        model = setup.model().to(device)
        result = hw.train(model, " ".join(TEXTS * 8), recipe, device=device, progress=False)
        losses.append(torch.tensor([row["loss"] for row in result.history if "loss" in row]))
    return relative_error(*losses)


def _check_save(setup: DeviceSetup) -> None:
    model = setup.model()
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        loaded = hw.load(Path(folder) / "model", device=setup.device, dtype=setup.dtype)
        assert isinstance(loaded, hw.Transformer)
        state = loaded.state_dict()
        _require(all(torch.equal(state[name], value) for name, value in model.state_dict().items()), "weights differ")


# Analysis and compression.


@torch.no_grad()
def _check_pruning(setup: DeviceSetup) -> float:
    """Pruned heads give the outputs of silenced heads."""
    model, ids = setup.model(), _model_inputs("decoder", setup.device)["ids"]
    with model.heads["0.1,1.2-3"].silenced():
        silenced = model(ids)
    return relative_error(hw.prune(model, heads="0.1,1.2-3", fold_mean=False)(ids), silenced)


@torch.no_grad()
def _check_quantization(setup: DeviceSetup) -> float:
    """The quantized model equals its dequantized weights in float64."""
    model, ids = setup.model(), _model_inputs("decoder", setup.device)["ids"]
    quantized = hw.quantize(model, 8)
    return relative_error(quantized(ids), setup.reference(hw.dequantize(quantized))(ids.cpu()))


def _check_profile(setup: DeviceSetup) -> float:
    model = setup.model()
    result, expected = (
        hw.profile(item, TEXTS, causal=False, relations=False).metric("entropy")
        for item in (model, setup.reference(model))
    )
    return relative_error(torch.as_tensor(result), torch.as_tensor(expected))


def _check_importance(setup: DeviceSetup) -> float:
    model = setup.model()
    expected = hw.importance(setup.reference(model), TEXTS, ranking="gradient")
    return relative_error(
        torch.as_tensor(hw.importance(model, TEXTS, ranking="gradient").mean), torch.as_tensor(expected.mean)
    )


def _check_maps_match_cpu(setup: DeviceSetup) -> float:
    model = setup.model()
    views = [hw.attention_maps(item, TEXTS[0]) for item in (model, setup.reference(model))]
    return max(relative_error(*(torch.as_tensor(view.map(head)) for view in views)) for head in views[0].heads)


def _check_explain(setup: DeviceSetup) -> float:
    """Contributions sum to the score of the reference."""
    model = setup.model()
    expected = hw.explain(setup.reference(model), TEXTS[0], "1.2", 5).score
    return relative_error(torch.tensor(hw.explain(model, TEXTS[0], "1.2", 5).total), torch.tensor(expected))


# Attached models.


def _check_attached(setup: DeviceSetup) -> None:
    """Attaching changes no bit; silencing has an effect; detaching restores the model."""
    if find_spec("transformers") is None:
        raise SkipCheck("transformers is not installed")
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config: Any = transformers.LlamaConfig(**sizes, intermediate_size=32, vocab_size=257, max_position_embeddings=64)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config)
        model = model.to(setup.device, setup.dtype).eval()
        model.tie_weights()
        ids = _model_inputs("decoder", setup.device)["ids"]
        before = model(ids).logits
        attached = hw.attach(model)
        _require(torch.equal(model(ids).logits, before), "attaching changed the output of the model")
        with attached.heads["1.2"].silenced():
            _require(not torch.equal(model(ids).logits, before), "silencing a head had no effect")
        pruned = attached.prune("0.1")
        with attached.heads["0.1"].silenced():
            expected = model(ids).logits
        _require(
            relative_error(pruned(ids), expected) <= rounding_bound(setup.dtype, ROUNDINGS), "a pruned model differs"
        )
        attached.detach()
        _require(torch.equal(model(ids).logits, before), "detaching did not restore the model")


CHECKS: dict[str, Callable[[DeviceSetup], float | None]] = {
    **{f"kernel {backend}": partial(_check_kernel, backend=backend) for backend in ("fused", "batched", "blockwise")},
    "layer, forward and backward": _check_layer,
    **{name: partial(_check_model, name=name) for name in SPECS},
    "recording and silencing": _check_recording,
    **{f"{kind} cache": partial(_check_cache, kind=kind) for kind in ("dynamic", "static", "sliding")},
    "streaming caches per head": _check_streaming,
    "generation with a seed": _check_generation_seeds,
    "training steps": _check_training,
    "save and load": _check_save,
    "pruning": _check_pruning,
    "quantization to 8 bits": _check_quantization,
    "attention maps": _check_maps_match_cpu,
    "profile": _check_profile,
    "importance by gradients": _check_importance,
    "explanation of a score": _check_explain,
    "attached model": _check_attached,
}
# The backward pass rounds more often. Optimizer steps divide by small gradients, which enlarges their rounding.
BOUND_FACTORS = {"layer, forward and backward": 4.0, "training steps": 100.0} | {
    name: 4.0 for name in CHECKS if name.startswith("kernel")
}
