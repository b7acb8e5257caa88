"""How a model is trained: plain data, saved beside the run."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from headwise.errors import HeadwiseError
from headwise.spec.attention import check_non_negative_int, check_type
from headwise.spec.json_spec import JSONSpec

ALLOWED_VALUES = {
    "rows": ("windows", "random", "texts"),
    "objective": ("auto", "causal", "masked"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "parallel": ("ddp", "fsdp", "heads", "fsdp+heads"),
}


def _option(default: Any, help_text: str) -> Any:
    """A field that is an option of commands, with its help."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Recipe(JSONSpec):
    """Every number of a training run. A step reads `batch_size` rows of `context` tokens, whoever shares the work.

    >>> recipe = Recipe(steps=101, warmup=10, learning_rate=1e-3, final_lr_fraction=0.1)
    >>> [round(recipe.learning_rate_at(step), 6) for step in (0, 10, 55, 100)]
    [9.1e-05, 0.001, 0.00055, 0.0001]
    """

    steps: int = _option(2000, "Steps.")
    batch_size: int = _option(32, "Rows in a step.")
    accumulation_steps: int = _option(1, "Parts a step is cut into, to save memory.")  # the gradient is the same
    context: int = _option(0, "Tokens in a row.")  # 0: the model's own context
    # windows: of the whole text, each once an epoch; random: drawn anywhere; texts: one text a row, padded,
    # behind what the tokenizer puts before a text; the end token, where that is nothing and the model is new.
    # An encoder-decoder reads pairs, one a row, whatever is said here.
    rows: Literal["windows", "random", "texts"] = "windows"
    objective: Literal["auto", "causal", "masked"] = "auto"  # auto: masked for an encoder
    mask_fraction: float = 0.15  # of the tokens, with the masked objective
    learning_rate: float = _option(1e-3, "The learning rate at its highest.")
    warmup: int = _option(100, "Steps in which the rate climbs.")
    final_lr_fraction: float = 0.1  # the share of learning_rate a cosine ends at; 1 keeps it constant
    weight_decay: float = 0.1  # on matrices and tables
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0  # longest gradient; 0: any
    precision: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "float32, bfloat16, float16 or auto."
    )  # auto: bfloat16 on a GPU that has it
    compile: bool = _option(False, "Use torch.compile: slow to start, then quicker.")
    parallel: Literal["ddp", "fsdp", "heads", "fsdp+heads"] = _option(
        "ddp", "What processes share: ddp (rows), fsdp (weights too), heads, fsdp+heads."
    )  # see docs/team.md
    head_processes: int = 2  # how many share heads, with fsdp+heads
    checkpointing: bool = _option(False, "Recompute activations: less memory, more time.")
    holdout: float = 0.1  # the share of the text kept for evaluation when no other is given; 0: none
    evaluate_every: int = _option(250, "Steps between evaluations.")
    evaluate_tokens: int = 200_000  # at most, spread evenly; the last evaluation reads all
    patience: int = _option(0, "Evaluations without progress before it stops.")  # 0: never
    save_every: int = _option(250, "Steps between checkpoints.")
    keep_checkpoints: int = 2  # checkpoints, beside the best
    log_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        float_fields = ("mask_fraction", "learning_rate", "final_lr_fraction", "weight_decay", "beta1", "beta2")
        check_type(self, float, *float_fields, "max_grad_norm", "holdout")
        check_type(self, bool, "compile", "checkpointing")
        integer_fields = (
            "steps",
            "batch_size",
            "accumulation_steps",
            "head_processes",
            "keep_checkpoints",
            "evaluate_every",
            "evaluate_tokens",
            "save_every",
            "log_every",
        )
        check_non_negative_int(self, *integer_fields, "context", "warmup", "patience")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise HeadwiseError(f"seed must be a whole number from 0 to 2³¹ − 1, got {self.seed!r}.")
        for name in integer_fields:
            if getattr(self, name) < 1:
                raise HeadwiseError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name, allowed in ALLOWED_VALUES.items():
            if getattr(self, name) not in allowed:
                raise HeadwiseError(f"{name} {getattr(self, name)!r} is unknown; use {', '.join(allowed)}.")
        for name, low, high in (
            ("mask_fraction", 0, 1),
            ("final_lr_fraction", 0, 1),
            ("holdout", 0, 0.9),
            ("beta1", 0, 0.9999),
            ("beta2", 0, 0.99999),
        ):
            if not low <= getattr(self, name) <= high:
                raise HeadwiseError(f"{name} must lie between {low} and {high}, got {getattr(self, name)}.")
        if not (
            0 < self.learning_rate < math.inf
            and 0 <= self.max_grad_norm < math.inf
            and 0 <= self.weight_decay < math.inf
        ):
            raise HeadwiseError(
                f"learning_rate must be above 0, max_grad_norm and weight_decay at least 0; "
                f"got {self.learning_rate}, {self.max_grad_norm} and {self.weight_decay}."
            )
        if self.batch_size % self.accumulation_steps:
            raise HeadwiseError(
                f"a batch of {self.batch_size} rows cannot be cut into {self.accumulation_steps} equal parts; "
                f"change accumulation_steps."
            )

        if self.parallel != "ddp" and (self.compile or self.precision == "float16"):
            setting = "compile=True" if self.compile else "precision='float16'"
            raise HeadwiseError(f"{setting} goes with parallel='ddp' alone; leave it out, or use bfloat16.")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step: up in a line, down in a cosine (https://arxiv.org/abs/1608.03983)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / (self.warmup + 1)
        decay_progress = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.learning_rate * (
            self.final_lr_fraction
            + (1 - self.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, decay_progress)))
        )
