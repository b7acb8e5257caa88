"""The numbers of a training run as plain data. They are saved with the run."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from headwise.errors import ArgumentError
from headwise.spec.attention import check_non_negative_int, check_type
from headwise.spec.json_spec import JSONSpec

ALLOWED_VALUES = {
    "rows": ("windows", "random", "texts"),
    "objective": ("auto", "causal", "masked"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "parallel": ("ddp", "fsdp", "heads", "fsdp+heads"),
}


def _option(default: Any, help_text: str) -> Any:
    """Return a field that is also a command-line option, with its help text."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Recipe(JSONSpec):
    """Numbers of a training run. A step processes `batch_size` rows of `context` tokens, over all processes.

    Attributes:
        steps: Number of optimizer steps.
        batch_size: Rows per step.
        accumulation_steps: Micro-batches per step. More save memory; the gradient is the same.
        context: Tokens per row. 0: the context of the model.
        rows: "windows" (the corpus in windows, each token once per epoch), "random" (windows at random positions) or "texts"
            (one text per row, padded, with the BOS/EOS template of the tokenizer; a new model without a template gets the end
            token before each text). An encoder-decoder always uses one pair per row.
        objective: "causal" (next token), "masked" (masked tokens) or "auto": masked for an encoder, otherwise causal.
        mask_fraction: Fraction of tokens that are targets of the masked objective.
        learning_rate: Maximum learning rate.
        warmup: Steps of linear warmup.
        final_lr_fraction: Final learning rate of the cosine schedule, as a fraction of `learning_rate`. 1: constant.
        weight_decay: Weight decay of matrices and embeddings.
        beta1: First coefficient of AdamW.
        beta2: Second coefficient of AdamW.
        max_grad_norm: Gradients with a larger norm are clipped. 0: no clipping.
        precision: "float32", "bfloat16", "float16" or "auto": bfloat16 on a GPU that supports it, otherwise float32.
        compile: Use torch.compile.
        parallel: Distribution over processes: "ddp" (rows), "fsdp" (rows and weights), "heads" (head parallelism) or
            "fsdp+heads". See docs/distributed.md.
        head_processes: Number of processes that share the heads with "fsdp+heads".
        checkpointing: Recompute activations in the backward pass to save memory.
        holdout: Fraction of the corpus that is held out for evaluation if no `valid` is given. 0: no evaluation.
        evaluate_every: Steps between evaluations.
        evaluate_tokens: Maximum number of held-out tokens per evaluation, evenly spaced. The last evaluation uses all.
        patience: Evaluations without improvement before early stopping. 0: never stop early.
        save_every: Steps between checkpoints.
        keep_checkpoints: Number of newest checkpoints to keep, in addition to the best.
        log_every: Steps between logged metrics.
        seed: Seed of initialization, data order and dropout.

    >>> recipe = Recipe(steps=101, warmup=10, learning_rate=1e-3, final_lr_fraction=0.1)
    >>> [round(recipe.learning_rate_at(step), 6) for step in (0, 10, 55, 100)]
    [9.1e-05, 0.001, 0.00055, 0.0001]
    """

    steps: int = _option(2000, "Number of optimizer steps.")
    batch_size: int = _option(32, "Rows per step.")
    accumulation_steps: int = _option(1, "Micro-batches per step. More save memory.")
    context: int = _option(0, "Tokens per row.")
    rows: Literal["windows", "random", "texts"] = "windows"
    objective: Literal["auto", "causal", "masked"] = "auto"
    mask_fraction: float = 0.15
    learning_rate: float = _option(1e-3, "Maximum learning rate.")
    warmup: int = _option(100, "Steps of linear warmup.")
    final_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0
    precision: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "float32, bfloat16, float16, or auto (bfloat16 on a GPU that supports it)."
    )
    compile: bool = _option(False, "Use torch.compile: slow to start, then faster.")
    parallel: Literal["ddp", "fsdp", "heads", "fsdp+heads"] = _option(
        "ddp", "Distribution over processes: ddp (rows), fsdp (rows and weights), heads or fsdp+heads."
    )
    head_processes: int = 2
    checkpointing: bool = _option(False, "Recompute activations in the backward pass: less memory, more time.")
    holdout: float = 0.1
    evaluate_every: int = _option(250, "Steps between evaluations.")
    evaluate_tokens: int = 200_000
    patience: int = _option(0, "Evaluations without improvement before early stopping. 0: never.")
    save_every: int = _option(250, "Steps between checkpoints.")
    keep_checkpoints: int = 2
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
            raise ArgumentError(
                f"seed: must be an integer from 0 to 2³¹ − 1. Got {self.seed!r}. Use seed=0, for example."
            )
        for name in integer_fields:
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}: must be at least 1. Got {getattr(self, name)}. Increase it.")
        for name, allowed in ALLOWED_VALUES.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name}: unknown value. Got {getattr(self, name)!r}. Use {', '.join(allowed)}.")
        for name, low, high in (
            ("mask_fraction", 0, 1),
            ("final_lr_fraction", 0, 1),
            ("holdout", 0, 0.9),
            ("beta1", 0, 0.9999),
            ("beta2", 0, 0.99999),
        ):
            if not low <= getattr(self, name) <= high:
                raise ArgumentError(f"{name}: must be from {low} to {high}. Got {getattr(self, name)}.")
        if not (
            0 < self.learning_rate < math.inf
            and 0 <= self.max_grad_norm < math.inf
            and 0 <= self.weight_decay < math.inf
        ):
            raise ArgumentError(
                "learning_rate, max_grad_norm, weight_decay: must be finite, learning_rate above 0, the others at least 0. "
                f"Got {self.learning_rate}, {self.max_grad_norm} and {self.weight_decay}. Use the defaults 1e-3, 1.0 and 0.1."
            )
        if self.batch_size % self.accumulation_steps:
            raise ArgumentError(
                f"accumulation_steps: batch_size={self.batch_size} is not divisible by it. Got {self.accumulation_steps}. "
                "Use a divisor of batch_size."
            )

        if self.parallel != "ddp" and (self.compile or self.precision == "float16"):
            setting = "compile=True" if self.compile else "precision='float16'"
            advice = "omit compile" if self.compile else "use precision='bfloat16'"
            raise ArgumentError(
                f"{setting}: supported only with parallel='ddp'. Got parallel={self.parallel!r}. "
                f"Use parallel='ddp', or {advice}."
            )

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step: linear warmup, then cosine decay (https://arxiv.org/abs/1608.03983)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / (self.warmup + 1)
        decay_progress = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.learning_rate * (
            self.final_lr_fraction
            + (1 - self.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, decay_progress)))
        )
