"""The training loop: optimizer steps, evaluation, checkpoints and exact resumption."""

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.distributed.parallel_strategies import ParallelStrategy, clip_gradients, reshard, unique_row_mask
from headwise.distributed.process_group import explain_peer_errors, open_process_group
from headwise.errors import ArgumentError, FileFormatError, HeadwiseError
from headwise.heads.head_dropout import set_training_progress
from headwise.kernels.enable_grad import enable_gradients
from headwise.model import ModelProtocol, Transformer, eval_mode
from headwise.progress import Progress
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.training.batch_samplers import (
    MaskTokens,
    TrainBatch,
    make_train_batch,
    masked_targets,
    sequential_windows,
)
from headwise.training.checkpoint import CheckpointFolder, ShardedCheckpointFolder, checkpoint_problem
from headwise.training.evaluate import evaluate
from headwise.training.model_with_loss import LanguageLoss, LossAccumulator, MakeLoss
from headwise.training.optimizer import make_optimizer
from headwise.training.recipe import Recipe
from headwise.training.run_folder import MetricsLog, write_run_json_if_missing
from headwise.training.run_setup import RunSetup, load_setup, prepare_run, restore_half_precision, sampler_factory
from headwise.training.stop_signals import interruptible
from headwise.training.train_progress_display import ProgressDisplay, ThroughputTimer
from headwise.training.train_request import TrainRequest
from headwise.training.train_result import TrainResult, nonfinite_float_to_none
from headwise.weights.load import merge_sharded_checkpoint

TrainCallback = Callable[[Transformer, int], object]


class DivergenceError(HeadwiseError):
    """Training diverged: a gradient is NaN or infinite."""


def train(
    model: ModelSpec | ModelProtocol,
    corpus: Any = None,
    recipe: Recipe | None = None,
    *,
    out: str | Path | None = None,
    valid: Any = None,
    tokenizer: Tokenizer | str | None = None,
    loss: MakeLoss = LanguageLoss,
    device: str | torch.device | None = None,
    callback: TrainCallback | None = None,
    callback_every: int | None = 100,
    progress: Progress | bool = True,
) -> TrainResult:
    """Train a new model from a spec, or train an existing model further.

    Args:
        model: A spec for a new model, or a model, which is trained in place. A model in half precision is trained in float32
            and rounded at the end, because optimizer steps are smaller than half precision resolves.
        corpus: A text, a list of texts, a path or a Corpus. None: the synthetic language.
        recipe: Numbers of the training run. None: the default recipe.
        out: Run folder for checkpoints, metrics and the model. Calling `train` again with the same arguments resumes an
            interrupted run and gives bitwise equal weights. None writes nothing.
        valid: Held-out texts. None: the part of the corpus that the recipe holds out.
        tokenizer: A tokenizer, or "byte", "character", "word" (the synthetic language) or "bpe:4096". None: the tokenizer
            of the model, "word" for the synthetic language, otherwise "byte". A new model gets its vocabulary size.
        loss: Function from the model to a `ModelWithLoss`. Held-out texts are always evaluated with the language modeling
            loss.
        device: Device for training. None: the device of a model on an accelerator, otherwise "auto", the first available of
            CUDA, XPU, MPS and CPU.
        callback: Called as `callback(model, step)` before the first step, every `callback_every` steps and after the last
            step.
        callback_every: Steps between callbacks. None: at each evaluation.
        progress: True shows a progress display on standard error. A function is called as `progress(label, done, total)`.

    Returns:
        The trained model, the last losses, and the logged metrics.

    Raises:
        ArgumentError: If model, corpus and recipe do not fit together.
        FileFormatError: If `out` contains another run or other files.
        DivergenceError: If a gradient is NaN or infinite.


    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> recipe = Recipe(steps=20, batch_size=4, warmup=2, learning_rate=0.01)
    >>> result = train(spec, "to be or not to be " * 50, recipe, progress=False)
    >>> result.step, result.loss < 5, result.stop_reason
    (20, True, 'finished')
    """
    request = TrainRequest(model, corpus, recipe, out=out, valid=valid, tokenizer=tokenizer, loss=loss)
    return run_request(request, device=device, callback=callback, callback_every=callback_every, progress=progress)


def run_request(
    request: TrainRequest,
    *,
    device: str | torch.device | None = None,
    callback: TrainCallback | None = None,
    callback_every: int | None = 100,
    progress: Progress | bool = True,
) -> TrainResult:
    """Start or resume the run of a `TrainRequest`. `train` does this for separate arguments.

    Args:
        request: Model, corpus, recipe, folder and loss of the run.
        device: Device for training. None: the device of a model on an accelerator, otherwise "auto", the first available of
            CUDA, XPU, MPS and CPU.
        callback: Called as `callback(model, step)`, as in `train`.
        callback_every: Steps between callbacks. None: at each evaluation.
        progress: True shows a progress display on standard error. A function is called as `progress(label, done, total)`.

    Returns:
        The trained model, the last losses, and the logged metrics.

    >>> from headwise.spec import preset
    >>> small = preset("synthetic").resized(layers=1, width=16, heads=2)
    >>> result = run_request(TrainRequest(small, recipe=Recipe(steps=2, batch_size=4, warmup=1)), progress=False)
    >>> tokenizer = result.model.tokenizer
    >>> result.step, tokenizer.encode("the dog", add_special_tokens=False) != [tokenizer.unk] * 2
    (2, True)
    """
    if callback_every is not None and callback_every < 1:
        raise ArgumentError(
            f"callback_every: must be at least 1. Got {callback_every}. Use None for a callback at each evaluation."
        )
    out = request.out
    trained = None if isinstance(request.model, ModelSpec) else request.model
    if device is None and getattr(trained, "device", torch.device("cpu")).type != "cpu":
        device = trained.device  # pyright: ignore[reportOptionalMemberAccess]
    with (
        enable_gradients(trained),
        open_process_group(device) as process_group,
        tempfile.TemporaryDirectory() as scratch,
        torch.random.fork_rng(),
    ):
        folder, recipe = Path(scratch) if out is None else Path(out), request.resolved_recipe
        if out is None and process_group.size > 1:
            raise ArgumentError(
                f"out: {process_group.size} processes need a shared run folder. Got None. Give out=…, a folder that all "
                "processes can write."
            )
        layout = ParallelStrategy.of(recipe.parallel, process_group, recipe.head_processes)
        return _run(
            prepare_run(request, folder, layout),
            recipe,
            folder,
            keep_folder=out is not None,
            callback=callback,
            callback_every=callback_every,
            progress=progress,
        )


def resume(
    folder: str | Path,
    *,
    loss: MakeLoss = LanguageLoss,
    device: str | torch.device | None = None,
    callback: TrainCallback | None = None,
    callback_every: int | None = 100,
    progress: Progress | bool = True,
) -> TrainResult:
    """Resume a run from its folder. A finished run returns its result without training.

    Args:
        folder: Run folder of `train(…, out=folder)`.
        loss: Function from the model to its loss. It must be the loss of the run.
        device: Device for training. None is "auto": the first available of CUDA, XPU, MPS and CPU.
        callback: Called as `callback(model, step)`, as in `train`.
        callback_every: Steps between callbacks. None: at each evaluation.
        progress: True shows a progress display on standard error. A function is called as `progress(label, done, total)`.

    Returns:
        The result of the run. Weights are bitwise equal to those of an uninterrupted run.

    Raises:
        FileFormatError: If the folder has no run, or its files are damaged.

    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(spec, "to be or not to be " * 50, Recipe(steps=2, warmup=1), out=folder, progress=False)
    ...     resume(folder, progress=False).loss == result.loss
    True
    """
    folder = Path(folder)
    with enable_gradients(), open_process_group(device) as process_group, torch.random.fork_rng():
        setup, recipe = load_setup(folder, loss, process_group)
        return _run(
            setup, recipe, folder, keep_folder=True, callback=callback, callback_every=callback_every, progress=progress
        )


def _run(
    setup: RunSetup,
    recipe: Recipe,
    folder: Path,
    *,
    keep_folder: bool,
    callback: TrainCallback | None,
    callback_every: int | None,
    progress: Progress | bool,
) -> TrainResult:
    threads = torch.get_num_threads()
    loop = TrainLoop(setup, recipe, folder if keep_folder else None, progress)
    if loop.process_group.is_rank_zero:
        write_run_json_if_missing(folder, setup.run_record)  # from now on the folder belongs to this run
        if recipe.warmup >= recipe.steps:
            loop.display.log(
                f"warmup={recipe.warmup}: it is not shorter than the run of {recipe.steps} steps, so the learning rate never "
                f"reaches {recipe.learning_rate:g}. Use about a tenth of the steps."
            )
    try:
        with explain_peer_errors():
            return loop.run(callback, recipe.evaluate_every if callback_every is None else callback_every)
    finally:
        torch.set_num_threads(threads)


class TrainLoop:
    """One training run. `run` continues from the last checkpoint to the end."""

    def __init__(self, setup: RunSetup, recipe: Recipe, folder: Path | None, progress: Progress | bool) -> None:
        self.layout, self.recipe, self.folder, self.half_dtypes = setup.layout, recipe, folder, setup.half_dtypes
        self.process_group = process_group = setup.layout.process_group
        self.model, self.tokens, self.context = setup.model, setup.tokens, setup.context
        self.mask_id = setup.tokenizer.mask if setup.objective == "masked" else None
        self.make_sampler = sampler_factory(setup, recipe)
        self.sampler = self.make_sampler(self.tokens.train)
        if recipe.holdout > 0 and len(self.tokens.valid) < 2:
            raise ArgumentError(
                f"holdout={recipe.holdout}: at least 2 tokens must be held out for evaluation. "
                f"Got {len(self.tokens.valid)} tokens. Give more text, or set holdout=0 for no evaluation."
            )
        self.layout.apply_fsdp(self.model)
        self.loss_module, parameters = setup.loss, setup.loss.trainable_parameters()
        self.optimizer, self.parameters = make_optimizer(parameters, recipe), list(parameters.values())
        self.counted = unique_row_mask(self.model, self.parameters)
        self.step, self.tokens_seen, self.loss, self.valid_loss = 0, 0, float("nan"), None
        self.loss_terms: dict[str, float] = {}  # by name, if the loss has several terms
        self.best_loss, self.best_step, self.evaluations_without_improvement = float("inf"), 0, 0
        self.stop_reason = "finished"
        self.autocast_dtype = resolve_precision(recipe, process_group.device)
        self.scaler = torch.amp.GradScaler(process_group.device.type, enabled=self.autocast_dtype == torch.float16)
        self.display = ProgressDisplay(recipe.steps, 0, progress if process_group.is_rank_zero else False)
        log = self.display.log if process_group.is_rank_zero else (lambda text: None)
        checkpoint_args = None if folder is None else (folder / "checkpoints", recipe.keep_checkpoints, log)
        is_sharded = recipe.parallel != "ddp"  # even with one process, so that any number of processes can resume
        self.checkpoints = (
            None
            if checkpoint_args is None
            else ShardedCheckpointFolder(*checkpoint_args, process_group)
            if is_sharded
            else CheckpointFolder(*checkpoint_args)
        )
        self.best_weights: dict[str, Tensor] | None = None  # used without a run folder
        self._resume(log)
        self.metrics = MetricsLog(folder if process_group.is_rank_zero else None, self.step)

    def run(self, callback: TrainCallback | None, callback_every: int) -> TrainResult:
        """Run all remaining steps."""
        recipe, clock = self.recipe, ThroughputTimer()
        self.model.train()
        self.model.checkpointing, previous_checkpointing = recipe.checkpointing, self.model.checkpointing
        if recipe.compile:
            self.loss_module.compile()
        module = self.layout.wrap_ddp(self.loss_module, find_unused=self.model.spec.pooler)
        try:
            with interruptible() as interrupted:
                if callback is not None and self.step == 0:
                    self._run_callback(callback)
                while self.step < recipe.steps and self.stop_reason == "finished":
                    tokens_before = self.tokens_seen
                    grad_norm = self._train_step(module)
                    clock.tokens += self.tokens_seen - tokens_before
                    if self.step % recipe.log_every == 0 or self.step == recipe.steps:
                        self._log(grad_norm, clock)
                    is_last = self.step == recipe.steps
                    improved = (is_last or self.step % recipe.evaluate_every == 0) and self._evaluate(clock)
                    if callback is not None and (self.step % callback_every == 0 or is_last):
                        self._run_callback(callback)
                    if recipe.patience and self.evaluations_without_improvement >= recipe.patience:
                        self.stop_reason = "early"
                    if self._must_stop(interrupted):
                        self.stop_reason = "interrupted"
                    if is_last or improved or self.step % recipe.save_every == 0 or self.stop_reason != "finished":
                        self._save()
            self._finish()
        finally:
            self.display.close()
            self._restore_half_precision()
            self.model.checkpointing = previous_checkpointing
            self.model.eval()
        return TrainResult(
            self.model, recipe, self.step, self.tokens_seen, self.loss, self.valid_loss, self.best_step, self.stop_reason,
            clock.seconds, self.metrics.rows, self.folder,
        )  # fmt: skip

    def _train_step(self, module: nn.Module) -> float:
        """Run one optimizer step over all micro-batches. Return the gradient norm before clipping."""
        recipe, process_group, step = self.recipe, self.process_group, self.step
        self.optimizer.zero_grad(set_to_none=True)  # a callback may have left gradients
        # The RNG depends only on seed, step and rank, so that a resumed run equals an uninterrupted one.
        torch.manual_seed(_mix_seed(recipe.seed, step, process_group.rank))
        set_training_progress(self.model, step / recipe.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        batch = self._load_batch(step)
        num_micro_batches, losses = recipe.accumulation_steps, LossAccumulator(process_group)
        rows_per_process, num_targets = recipe.batch_size // num_micro_batches // process_group.size, batch.num_targets
        for micro_batch in range(num_micro_batches):
            own_rows = slice(
                (micro_batch * process_group.size + process_group.rank) * rows_per_process,
                (micro_batch * process_group.size + process_group.rank + 1) * rows_per_process,
            )
            skip_sync = micro_batch < num_micro_batches - 1 and process_group.size > 1 and not self.layout.is_sharded
            with module.no_sync() if skip_sync else nullcontext():  # pyright: ignore[reportCallIssue]
                with torch.autocast(
                    process_group.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32
                ):
                    loss = losses.add_and_scale(
                        module(*batch.select_rows(own_rows, process_group.device), total=num_targets)
                    )
                self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if self.layout.is_sharded:
            norm = torch.tensor(self.layout.grad_norm(self.parameters, self.counted), dtype=torch.float32)
        else:
            norm = nn.utils.get_total_norm([value.grad for value in self.parameters if value.grad is not None])
        grad_norm = float(norm)
        if (
            not grad_norm < float("inf") and self.autocast_dtype != torch.float16
        ):  # with float16 the scaler skips such a step
            raise DivergenceError(
                f"gradient: its norm is {grad_norm} at step {step + 1}. Lower the learning rate (now {recipe.learning_rate}) "
                f"or use a longer warmup (now {recipe.warmup} steps). The last checkpoint is not affected."
            )
        if recipe.max_grad_norm and not grad_norm <= recipe.max_grad_norm:
            clip_gradients(self.parameters, recipe.max_grad_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        if self.step % recipe.log_every == 0 or self.step == recipe.steps:
            self.loss, self.loss_terms = losses.all_reduce_mean()
        return grad_norm

    def _load_batch(self, step: int) -> TrainBatch:
        """Return all rows of a step."""
        first = step * self.recipe.batch_size
        windows = self.sampler.training_rows(first, self.recipe.batch_size)  # (batch, ≤ context + 1), −1 at padding
        texts, sources = windows if isinstance(windows, tuple) else (windows, None)
        self.tokens_seen += int((texts[:, :-1] >= 0).sum()) + (0 if sources is None else int((sources >= 0).sum()))
        return make_train_batch(texts, sources, self._masking([self.recipe.seed]), first)

    def _masking(self, seed: list[int]) -> MaskTokens | None:
        """Return the function that masks tokens for the masked objective."""
        if self.mask_id is None:
            return None
        return partial(
            masked_targets,
            fraction=self.recipe.mask_fraction,
            mask_id=self.mask_id,
            vocab=self.model.spec.vocab,
            seed=seed,
        )

    def _log(self, grad_norm: float, clock: ThroughputTimer) -> None:
        if self.process_group.is_rank_zero:
            speed = clock.pop_tokens_per_second()
            row = {
                "step": self.step, "tokens": self.tokens_seen, "loss": self.loss,
                "learning_rate": self.recipe.learning_rate_at(self.step - 1), "grad_norm": grad_norm,
                "tokens_per_second": round(speed),
                **{f"loss {name}": value for name, value in self.loss_terms.items()},
            }  # fmt: skip
            self.metrics.add({name: value for name, value in row.items() if math.isfinite(value)})
            self.display.log_step(self.step, self.loss, speed)

    def _evaluate(self, clock: ThroughputTimer) -> bool:
        """Compute the held-out loss. Return whether it is the best so far."""
        valid, max_tokens = self.tokens.valid, self.recipe.evaluate_tokens
        if len(valid) < 2:
            return False
        with torch.autocast(
            self.process_group.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32
        ):
            loss = self.valid_loss = self._evaluate_tokens(valid, max_tokens)
            if self.step == self.recipe.steps and len(valid) > max_tokens:  # the last evaluation uses all tokens
                self.valid_loss = self._evaluate_tokens(valid, None)
        reshard(self.model)
        if self.process_group.is_rank_zero:
            self.metrics.add({"step": self.step, "valid_loss": self.valid_loss})
            self.display.log_evaluation(self.step, self.loss, self.valid_loss, clock.seconds)
        improved = loss < self.best_loss
        self.evaluations_without_improvement = 0 if improved else self.evaluations_without_improvement + 1
        if improved:
            self.best_loss, self.best_step = loss, self.step
            if self.checkpoints is None and self.recipe.patience:
                self.best_weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return improved

    def _evaluate_tokens(self, tokens: np.ndarray, max_tokens: int | None) -> float:
        """Return the loss on all held-out tokens, or on at most `max_tokens` of them."""
        if self.recipe.rows != "texts" and self.model.spec.kind != "encoder-decoder":
            texts, sources = list(sequential_windows(tokens, self.context, max_tokens)), []
        else:
            samples = list(self.make_sampler(tokens).evaluation_rows(max_tokens))
            texts, sources = zip(*samples, strict=True) if isinstance(samples[0], tuple) else (samples, [])
        mask_tokens, is_sharded = self._masking([self.recipe.seed, 1]), self.layout.is_sharded
        return evaluate(self.model, texts, sources, self.recipe.batch_size, mask_tokens, self.process_group, is_sharded)

    def _run_callback(self, callback: TrainCallback) -> None:
        """Call the callback in eval mode, without side effects on RNG state and training mode."""
        with eval_mode(self.model), torch.random.fork_rng():
            callback(self.model, self.step)
        reshard(self.model)

    def _must_stop(self, interrupted: list[int]) -> bool:
        world = self.process_group.all_processes
        if world.size == 1:
            return bool(interrupted)
        if self.step % self.recipe.log_every:  # all processes must agree, and the all-reduce takes time
            return False
        return world.all_reduce_values(float(bool(interrupted)))[0] > 0

    # Checkpoints.

    def _save(self) -> None:
        if self.checkpoints is not None and (self.process_group.is_rank_zero or self.checkpoints.is_collective):
            state = {
                "step": self.step, "tokens_seen": self.tokens_seen, "loss": nonfinite_float_to_none(self.loss),
                "valid_loss": self.valid_loss, "best_loss": nonfinite_float_to_none(self.best_loss),
                "best_step": self.best_step,
                "evaluations_without_improvement": self.evaluations_without_improvement,
                "scaler": self.scaler.state_dict(), "threads": torch.get_num_threads(),
                "processes": self.process_group.all_processes.size,
            }  # fmt: skip
            self.checkpoints.save(self.loss_module, self.optimizer, state, self.step, self.best_step)
        self.process_group.barrier()

    def _resume(self, log: Callable[[str], None]) -> None:
        if self.checkpoints is None:
            return
        newest = self.checkpoints.newest_valid_step() if self.process_group.is_rank_zero else None
        latest_step = int(self.process_group.all_processes.all_reduce_values(float(newest or 0))[0])
        if not latest_step:
            return
        state = self.checkpoints.restore(latest_step, self.loss_module, self.optimizer)
        self.step, self.tokens_seen, self.valid_loss = state["step"], state["tokens_seen"], state["valid_loss"]
        self.loss = float("nan") if state["loss"] is None else state["loss"]
        self.best_loss = float("inf") if state["best_loss"] is None else state["best_loss"]
        self.best_step, self.evaluations_without_improvement = (
            state["best_step"],
            state["evaluations_without_improvement"],
        )
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.recipe.patience and self.evaluations_without_improvement >= self.recipe.patience:
            self.stop_reason = "early"
        if state["threads"] != torch.get_num_threads():  # the number of threads changes the order of summation
            log(f"using {state['threads']} threads, as in the interrupted run")
            torch.set_num_threads(state["threads"])
        num_processes, previous_processes = self.process_group.all_processes.size, state.get("processes")
        processes_note = (
            f", with {num_processes} processes, not {previous_processes}"
            if previous_processes not in (None, num_processes)
            else ""
        )
        log(f"resuming from step {self.step} of {self.recipe.steps}{processes_note}")

    def _finish(self) -> None:
        """Restore the best weights after early stopping, and save the final model."""
        if self.stop_reason == "early" and self.best_step:
            if self.checkpoints is not None:
                problem = checkpoint_problem(self.checkpoints.path(self.best_step))
                if problem is not None:
                    raise FileFormatError(
                        f"{self.checkpoints.path(self.best_step)}: the best checkpoint is damaged ({problem}). Use the "
                        f"newest one: {self.checkpoints.path(self.step)}."
                    )
                self.checkpoints.restore(self.best_step, self.loss_module, None)
            elif self.best_weights is not None:
                self.model.load_state_dict(self.best_weights)
        self._restore_half_precision()
        if self.folder is not None and self.stop_reason != "interrupted" and self.process_group.is_rank_zero:
            if self.checkpoints is not None and self.layout.is_sharded:
                final_step = self.best_step if self.stop_reason == "early" and self.best_step else self.step
                merge_sharded_checkpoint(self.checkpoints.path(final_step), self.folder / "model")
            else:
                self.model.save(self.folder / "model")
        self.process_group.barrier()

    def _restore_half_precision(self) -> None:
        """Round weights that were in half precision before the run. Sharded weights stay in float32."""
        if not self.layout.is_sharded:
            restore_half_precision(self.model, self.half_dtypes)


def resolve_precision(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products."""
    if recipe.precision != "auto":
        return getattr(torch, recipe.precision)
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def _mix_seed(seed: int, step: int, rank: int) -> int:
    """Combine three numbers into one seed. Neighboring numbers give distant seeds."""
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % (1 << 63)
