"""How a model is trained: plain data, saved beside the run."""

import math
from dataclasses import dataclass
from typing import Literal

from headwise.errors import HeadwiseError
from headwise.spec.attention import check_kind, check_whole
from headwise.spec.json_spec import Wire

CHOICES = {
    "rows": ("windows", "random", "texts"),
    "objective": ("auto", "causal", "masked"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "parallel": ("ddp", "fsdp", "heads", "fsdp+heads"),
}


@dataclass(frozen=True)
class Recipe(Wire):
    """Every number of a training run. A step reads `batch` rows of `context` tokens, whoever shares the work.

    >>> recipe = Recipe(steps=101, warmup=10, rate=1e-3, floor=0.1)
    >>> [round(recipe.rate_at(step), 6) for step in (0, 10, 55, 100)]
    [9.1e-05, 0.001, 0.00055, 0.0001]
    """

    steps: int = 2000
    batch: int = 32  # rows in a step
    accumulate: int = 1  # parts a step is cut into: less memory, the same gradient
    context: int = 0  # tokens in a row; 0: the model's own context
    # windows: of the whole text, each once an epoch; random: drawn anywhere; texts: one text a row, padded,
    # behind what the tokenizer puts before a text; the end token, where that is nothing and the model is new.
    # An encoder-decoder reads pairs, one a row, whatever is said here.
    rows: Literal["windows", "random", "texts"] = "windows"
    objective: Literal["auto", "causal", "masked"] = "auto"  # auto: masked for an encoder
    mask_share: float = 0.15  # of the tokens, with the masked objective
    rate: float = 1e-3
    warmup: int = 100  # steps in which the rate climbs
    floor: float = 0.1  # the share of the rate a cosine ends at; 1 keeps it constant
    weight_decay: float = 0.1  # on matrices and tables
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0  # longest gradient; 0: any
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on a GPU that has it
    compile: bool = False
    parallel: Literal["ddp", "fsdp", "heads", "fsdp+heads"] = "ddp"  # what processes share, see docs/team.md
    head_processes: int = 2  # how many share heads, with fsdp+heads
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    holdout: float = 0.1  # the share of the text kept for evaluation when no other is given; 0: none
    evaluate_every: int = 250
    evaluate_tokens: int = 200_000  # at most, spread evenly; the last evaluation reads all
    patience: int = 0  # evaluations without progress before it stops; 0: never
    save_every: int = 250
    keep: int = 2  # checkpoints, beside the best
    log_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind(self, float, "mask_share", "rate", "floor", "weight_decay", "beta1", "beta2", "clip", "holdout")
        check_kind(self, bool, "compile", "checkpointing")
        whole = (
            "steps",
            "batch",
            "accumulate",
            "head_processes",
            "keep",
            "evaluate_every",
            "evaluate_tokens",
            "save_every",
            "log_every",
        )
        check_whole(self, *whole, "context", "warmup", "patience")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise HeadwiseError(f"seed must be a whole number from 0 to 2³¹ − 1, got {self.seed!r}.")
        for name in whole:
            if getattr(self, name) < 1:
                raise HeadwiseError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise HeadwiseError(f"{name} {getattr(self, name)!r} is unknown; use {', '.join(allowed)}.")
        for name, low, high in (
            ("mask_share", 0, 1),
            ("floor", 0, 1),
            ("holdout", 0, 0.9),
            ("beta1", 0, 0.9999),
            ("beta2", 0, 0.99999),
        ):
            if not low <= getattr(self, name) <= high:
                raise HeadwiseError(f"{name} must lie between {low} and {high}, got {getattr(self, name)}.")
        if not (0 < self.rate < math.inf and 0 <= self.clip < math.inf and 0 <= self.weight_decay < math.inf):
            raise HeadwiseError(
                f"the rate must be above 0, clip and weight_decay at least 0; "
                f"got {self.rate}, {self.clip} and {self.weight_decay}."
            )
        if self.batch % self.accumulate:
            raise HeadwiseError(
                f"a batch of {self.batch} rows cannot be cut into {self.accumulate} equal parts; change accumulate."
            )

        if self.parallel != "ddp" and (self.compile or self.precision == "float16"):
            what = "compile=True" if self.compile else "precision='float16'"
            raise HeadwiseError(f"{what} goes with parallel='ddp' alone; leave it out, or use bfloat16.")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: up in a line, down in a cosine (https://arxiv.org/abs/1608.03983)."""
        if step < self.warmup:
            return self.rate * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
