"""Training speed in tokens per second, eager and compiled, compared with other libraries, and memory of a step.

    python -m bench.train              all sizes, 31 rounds per size
    python -m bench.train --rounds 3   faster

Headwise runs its own training step (`headwise.training`), with seeding, data loading and gradient clipping. The others run a
minimal loop over the same windows of the same tokens. Headwise and GPT-2 start from the same weights.
"""

import argparse
import ctypes
import importlib.util
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import headwise as hw
from bench.measure import BenchmarkReport, add_json_option, interleaved_timing, machine, process_peak_memory
from headwise.distributed.parallel_strategies import ParallelStrategy
from headwise.distributed.process_group import ProcessGroup
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from headwise.training.batch_samplers import ShuffledWindowSampler, causal_inputs_and_targets
from headwise.training.loop import TrainLoop
from headwise.training.model_with_loss import LanguageLoss
from headwise.training.recipe import Recipe
from headwise.training.run_setup import RunSetup
from headwise.training.token_file import TokenFiles

BASE, GPT2 = "headwise", "transformers GPT-2"
FORMS = ("eager", "compiled")


@dataclass(frozen=True)
class Size:
    """Sizes of a model and a batch, and the speed goal."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    vocab: int
    goal: float  # time of the others / time of Headwise
    steps: int  # per round

    def __str__(self) -> str:
        return (
            f"width {self.width}, {self.layers} layers, {self.heads} heads, "
            f"batch {self.batch} × {self.context} tokens, vocabulary {self.vocab}"
        )


SIZES = {
    "128/4": Size(128, 4, 4, 64, 12, 65, goal=1.2, steps=10),  # setting of nanoGPT for a CPU
    "384/6": Size(384, 6, 6, 256, 8, 257, goal=1.0, steps=1),
}
RECIPE = Recipe(steps=1_000_000, holdout=0.0)


@dataclass(frozen=True)
class TrainingCandidate:
    """A model of one library and its training step."""

    model: nn.Module
    step: Callable[[], object]

    @property
    def parameters(self) -> int:
        """Return the number of parameters, tied ones counted once."""
        return sum(value.numel() for value in self.model.parameters())


class PlainLoss(nn.Module):
    """A model of another library with its loss, so that both are compiled together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """(B, T), (B, T) → ()"""
        output = self.model(ids)
        logits = output if isinstance(output, Tensor) else output.logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_tokens(size: Size) -> np.ndarray:
    return np.random.default_rng(0).integers(size.vocab, size=200_000, dtype=np.uint16)


def make_gpt2(size: Size, activation: str = "gelu_new") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=size.vocab, n_positions=size.context, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        activation_function=activation, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def headwise_training(size: Size, compiled: bool) -> TrainingCandidate:
    shape = hw.preset("gpt2").resized(layers=size.layers, width=size.width, heads=size.heads, context=size.context)
    model = hw.Transformer(replace(shape, vocab=size.vocab))
    with tempfile.TemporaryDirectory() as folder:
        make_gpt2(size).save_pretrained(folder)
        model.load_state_dict(hw.load(folder).state_dict())
    tokens = TokenFiles(random_tokens(size), np.empty(0, np.uint16), "random")
    tokenizer = make_tokenizer("byte", Corpus.of("not read"))
    layout = ParallelStrategy("ddp", ProcessGroup(0, 1, torch.device("cpu")))
    start = RunSetup(LanguageLoss(model), tokenizer, tokens, size.context, "causal", {}, layout)
    recipe = replace(RECIPE, batch_size=size.batch, compile=compiled)
    loop = TrainLoop(start, recipe, None, progress=False)
    module = LanguageLoss(model.train())
    if compiled:
        module.compile()
    return TrainingCandidate(model, lambda: loop._train_step(module))


def plain_training(model: nn.Module, size: Size, compiled: bool) -> TrainingCandidate:
    """Return a minimal training step."""
    module = PlainLoss(model.train())
    if compiled:
        module.compile()
    betas = (RECIPE.beta1, RECIPE.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), RECIPE.learning_rate, betas, weight_decay=RECIPE.weight_decay, fused=True
    )
    windows = ShuffledWindowSampler(random_tokens(size), size.context, RECIPE.seed)
    done = 0

    def step() -> float:
        nonlocal done
        ids, targets = causal_inputs_and_targets(torch.from_numpy(windows.training_rows(done * size.batch, size.batch)))
        loss = module(ids, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), RECIPE.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        return float(norm)

    return TrainingCandidate(model, step)


def gpt2_training(size: Size, compiled: bool, activation: str = "gelu_new") -> TrainingCandidate:
    return plain_training(make_gpt2(size, activation), size, compiled)


def x_transformers_training(size: Size, compiled: bool) -> TrainingCandidate:
    from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    layers = Decoder(
        dim=size.width, depth=size.layers, heads=size.heads, attn_dim_head=size.width // size.heads, attn_flash=True
    )
    model = TransformerWrapper(num_tokens=size.vocab, max_seq_len=size.context, attn_layers=layers, tie_embedding=True)
    return plain_training(model, size, compiled)


BUILDERS: dict[str, Callable[[Size, bool], TrainingCandidate]] = {
    BASE: headwise_training,
    GPT2: gpt2_training,
    "the same, GELU in one piece": partial(gpt2_training, activation="gelu_pytorch_tanh"),
}
if importlib.util.find_spec("x_transformers"):
    BUILDERS["x-transformers"] = x_transformers_training


def check_same(candidates: dict[str, TrainingCandidate]) -> None:
    """Check that two candidates have equal parameters and an equal norm of the first gradient."""
    native, reference = candidates[BASE], candidates[GPT2]
    assert native.parameters == reference.parameters, f"{native.parameters:,} and {reference.parameters:,} parameters"
    norms = [float(candidate.step()) for candidate in (native, reference)]  # pyright: ignore[reportArgumentType]
    assert math.isclose(*norms, rel_tol=1e-3), f"first gradients of lengths {norms}"


def repeat_step(step: Callable[[], object], times: int) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(times):
            step()

    return turn


def time_training(name: str, form: str, rounds: int, report: BenchmarkReport) -> None:
    size = SIZES[name]
    candidates = {label: build(size, form == "compiled") for label, build in BUILDERS.items()}
    check_same(candidates)
    for candidate in candidates.values():
        repeat_step(candidate.step, 3)()  # compilation and optimizer state
    turns = {label: repeat_step(candidate.step, size.steps) for label, candidate in candidates.items()}
    timings = interleaved_timing(turns, BASE, rounds)
    tokens = size.steps * size.batch * size.context
    rows = []
    for label, t in timings.items():
        memory = process_peak_memory("bench.train", "--memory-of", label, name, form)
        goal = "" if label == BASE else f"≥ {size.goal} {'✓' if 1 / t.speed >= size.goal else '✗'}"
        spread = "" if label == BASE else f"{1 / t.high:.2f} – {1 / t.low:.2f}"
        rows.append(
            [label, candidates[label].parameters, round(tokens / t.best), round(tokens / t.median), 1 / t.speed, spread,
             goal, round(memory, 1)]
        )  # fmt: skip
    columns = ["who", "parameters", "tokens/s best", "median", "times ours", "quartiles", "goal", "step MB"]
    report.add(f"{name} {form}", f"{form}, {size} ({rounds} rounds of {size.steps} steps)", columns, rows)


def memory_of(label: str, name: str, form: str) -> float:
    """Return the peak memory of a step above weights and optimizer state, after returning freed memory."""
    candidate = BUILDERS[label](SIZES[name], form == "compiled")
    repeat_step(candidate.step, 3)()
    rises = []
    for _ in range(3):
        ctypes.CDLL(None).malloc_trim(0)
        rises.append(peak_memory(candidate.step))
    return statistics.median(rises)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=31)
    arguments.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    arguments.add_argument("--memory-of", nargs=3, metavar=("WHO", "SIZE", "FORM"), help=argparse.SUPPRESS)
    add_json_option(arguments)
    args = arguments.parse_args()
    logging.disable_progress_bar()
    if args.memory_of:
        print(memory_of(*args.memory_of))
        return
    report = BenchmarkReport("train", args.json)
    report.console.print(f"{machine()}. 'times ours' above 1: slower than Headwise.")
    for name in args.sizes:
        for form in args.forms:
            time_training(name, form, args.rounds, report)
    report.write()


if __name__ == "__main__":
    main()
