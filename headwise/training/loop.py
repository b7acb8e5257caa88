"""The loop: read, predict, correct; look up now and then, and write down where we are."""

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

from headwise.distributed.parallel_strategy import ParallelStrategy, clip_gradients, reshard, unique_row_mask
from headwise.distributed.process_group import explain_peer_errors, open_process_group
from headwise.errors import HeadwiseError
from headwise.heads.head_dropout import set_training_progress
from headwise.kernels.enable_grad import gradients_enabled
from headwise.model import Transformer, eval_mode
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
from headwise.training.optimizer import make_optimizer
from headwise.training.recipe import Recipe
from headwise.training.run_folder import MetricsLog, write_run_json_if_missing
from headwise.training.run_setup import RunSetup, load_setup, prepare_run, sampler_factory
from headwise.training.stop_signals import interruptible
from headwise.training.train_loss import LanguageLoss, LossAccumulator, MakeLoss
from headwise.training.train_progress_display import ProgressDisplay, ThroughputTimer
from headwise.training.train_request import TrainRequest
from headwise.training.train_result import TrainResult, nonfinite_to_none
from headwise.weights.load import merge_sharded_checkpoint

TrainCallback = Callable[[Transformer, int], object]


class DivergenceError(HeadwiseError):
    """Training ran away: a gradient is no longer a number."""


def train(
    model: ModelSpec | Transformer,
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
    """Train a new model from a spec, or go on with one that is there, on a text.

    `corpus` is a text, a list of texts, a path or a Corpus; none is the synthetic language. `out` is a folder for
    checkpoints, metrics and the model: run the same again and a stopped run goes on, to the same bits. `tokenizer` is one
    that was loaded or made, or "byte", "character", "word" (the synthetic language), "bpe:4096"; a new model's vocabulary
    is set to it.
    `callback(model, step)` is called before the first step, after every `callback_every` steps (None: at each evaluation) and
    after the last. `loss` makes of the model what it learns from (a `TrainLoss`); what is held out is always
    judged by its text alone. `progress(what, done, of)` is called with how far the run is; True shows it on standard error.

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
    """Start a run, or go on with it where its folder holds a part of it already; `train` in one object.

    >>> from headwise.spec import preset
    >>> small = preset("synthetic").resized(layers=1, width=16, heads=2)
    >>> result = run_request(TrainRequest(small, recipe=Recipe(steps=2, batch_size=4, warmup=1)), progress=False)
    >>> tokenizer = result.model.tokenizer
    >>> result.step, tokenizer.encode("the dog", add_special_tokens=False) != [tokenizer.unk] * 2
    (2, True)
    """
    if callback_every is not None and callback_every < 1:
        raise HeadwiseError(f"callback_every must be at least 1, got {callback_every}.")
    out = request.out
    trained = None if isinstance(request.model, ModelSpec) else request.model
    with (
        gradients_enabled(trained),
        open_process_group(device) as process_group,
        tempfile.TemporaryDirectory() as scratch,
        torch.random.fork_rng(),
    ):
        folder, recipe = Path(scratch) if out is None else Path(out), request.resolved_recipe
        if out is None and process_group.size > 1:
            raise HeadwiseError("several processes need a folder they share; give out=…")
        layout = ParallelStrategy.of(recipe.parallel, process_group, recipe.head_processes)
        return _run(
            prepare_run(request, folder, layout), recipe, folder, out is not None, callback, callback_every, progress
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
    """Go on with a run from its folder alone, to the bits it would have had; a finished one is given as it ended.

    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(spec, "to be or not to be " * 50, Recipe(steps=2, warmup=1), out=folder, progress=False)
    ...     resume(folder, progress=False).loss == result.loss
    True
    """
    folder = Path(folder)
    with gradients_enabled(), open_process_group(device) as process_group, torch.random.fork_rng():
        setup, recipe = load_setup(folder, loss, process_group)
        return _run(setup, recipe, folder, True, callback, callback_every, progress)


def _run(
    setup: RunSetup,
    recipe: Recipe,
    folder: Path,
    keep_folder: bool,
    callback: TrainCallback | None,
    callback_every: int | None,
    progress: Progress | bool,
) -> TrainResult:
    threads = torch.get_num_threads()
    loop = TrainLoop(setup, recipe, folder if keep_folder else None, progress)
    if loop.process_group.is_rank_zero:
        write_run_json_if_missing(folder, setup.run_record)  # from here on the folder is this run's
        if recipe.warmup >= recipe.steps:
            loop.display.log(
                f"the warm-up of {recipe.warmup} steps is not shorter than the run of {recipe.steps}: the rate never reaches "
                f"{recipe.learning_rate:g}. A tenth of the steps is usual."
            )
    try:
        with explain_peer_errors():
            return loop.run(callback, recipe.evaluate_every if callback_every is None else callback_every)
    finally:
        torch.set_num_threads(threads)


class TrainLoop:
    """One run: `run` goes from wherever the last checkpoint is to the end."""

    def __init__(self, setup: RunSetup, recipe: Recipe, folder: Path | None, progress: Progress | bool) -> None:
        self.layout, self.recipe, self.folder = setup.layout, recipe, folder
        self.process_group = process_group = setup.layout.process_group
        self.model, self.tokens, self.context = setup.model, setup.tokens, setup.context
        self.mask_id = setup.tokenizer.mask if setup.objective == "masked" else None
        self.make_sampler = sampler_factory(setup, recipe)
        self.sampler = self.make_sampler(self.tokens.train)
        if recipe.holdout > 0 and len(self.tokens.valid) < 2:
            raise HeadwiseError("too little text is held out to evaluate on; give more text, or holdout=0.")
        self.layout.apply_fsdp(self.model)
        self.loss_module, parameters = setup.loss, setup.loss.trainable_parameters()
        self.optimizer, self.parameters = make_optimizer(parameters, recipe), list(parameters.values())
        self.counted = unique_row_mask(self.model, self.parameters)
        self.step, self.tokens_seen, self.loss, self.valid_loss = 0, 0, float("nan"), None
        self.loss_terms: dict[str, float] = {}  # of the loss, where it has several
        self.best_loss, self.best_step, self.evaluations_without_improvement = float("inf"), 0, 0
        self.stop_reason = "finished"
        self.autocast_dtype = resolve_precision(recipe, process_group.device)
        self.scaler = torch.amp.GradScaler(process_group.device.type, enabled=self.autocast_dtype == torch.float16)
        self.display = ProgressDisplay(recipe.steps, 0, progress if process_group.is_rank_zero else False)
        log = self.display.log if process_group.is_rank_zero else (lambda text: None)
        checkpoint_args = None if folder is None else (folder / "checkpoints", recipe.keep_checkpoints, log)
        is_sharded = recipe.parallel != "ddp"  # whatever the number of processes, so that another can go on
        self.checkpoints = (
            None
            if checkpoint_args is None
            else ShardedCheckpointFolder(*checkpoint_args, process_group)
            if is_sharded
            else CheckpointFolder(*checkpoint_args)
        )
        self.best_weights: dict[str, Tensor] | None = None  # kept in memory where there is no folder
        self._resume(log)
        self.metrics = MetricsLog(folder if process_group.is_rank_zero else None, self.step)

    def run(self, callback: TrainCallback | None, callback_every: int) -> TrainResult:
        """All steps that are left."""
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
            self.model.checkpointing = previous_checkpointing
            self.model.eval()
        return TrainResult(
            self.model, recipe, self.step, self.tokens_seen, self.loss, self.valid_loss, self.best_step, self.stop_reason,
            clock.seconds, self.metrics.rows, self.folder,
        )  # fmt: skip

    def _train_step(self, module: nn.Module) -> float:
        """One step: gradients of all parts, clipped, applied. Returns the length of the gradient."""
        recipe, process_group, step = self.recipe, self.process_group, self.step
        self.optimizer.zero_grad(set_to_none=True)  # whoever looked may have left gradients
        # so that a resumed run draws what an unbroken one would
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
            norm = torch.tensor(self.layout.grad_norm(self.parameters, self.counted))
        else:
            norm = nn.utils.get_total_norm([value.grad for value in self.parameters if value.grad is not None])
        grad_norm = float(norm)
        if (
            not grad_norm < float("inf") and self.autocast_dtype != torch.float16
        ):  # there the scaler leaves such a step out
            raise DivergenceError(
                f"the gradient is {grad_norm} at step {step + 1}; lower the learning rate ({recipe.learning_rate}) or "
                f"lengthen the warm-up. The last checkpoint is as it was."
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
        """All rows of a step."""
        first = step * self.recipe.batch_size
        windows = self.sampler.training_rows(
            first, self.recipe.batch_size
        )  # (batch, ≤ context + 1), −1 where there is none
        texts, sources = windows if isinstance(windows, tuple) else (windows, None)
        self.tokens_seen += int((texts[:, :-1] >= 0).sum()) + (0 if sources is None else int((sources >= 0).sum()))
        return make_train_batch(texts, sources, self._masking([self.recipe.seed]), first)

    def _masking(self, seed: list[int]) -> MaskTokens | None:
        """How tokens are hidden from an encoder that is asked for them."""
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
        """Look up from the book: the loss on what was held out. True if it is the best so far."""
        valid, max_tokens = self.tokens.valid, self.recipe.evaluate_tokens
        if len(valid) < 2:
            return False
        with torch.autocast(
            self.process_group.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32
        ):
            loss = self.valid_loss = self._evaluate_tokens(valid, max_tokens)
            if self.step == self.recipe.steps and len(valid) > max_tokens:  # the last word is on all of it
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
        """The loss on held-out tokens, on all of them or at most so many."""
        if self.recipe.rows != "texts" and self.model.spec.kind != "encoder-decoder":
            texts, sources = list(sequential_windows(tokens, self.context, max_tokens)), []
        else:
            samples = list(self.make_sampler(tokens).evaluation_rows(max_tokens))
            texts, sources = zip(*samples, strict=True) if isinstance(samples[0], tuple) else (samples, [])
        mask_tokens, is_sharded = self._masking([self.recipe.seed, 1]), self.layout.is_sharded
        return evaluate(self.model, texts, sources, self.recipe.batch_size, mask_tokens, self.process_group, is_sharded)

    def _run_callback(self, callback: TrainCallback) -> None:
        """Let the caller look at the model as it is; what is drawn or switched there changes nothing here."""
        with eval_mode(self.model), torch.random.fork_rng():
            callback(self.model, self.step)
        reshard(self.model)

    def _must_stop(self, interrupted: list[int]) -> bool:
        world = self.process_group.all_processes
        if world.size == 1:
            return bool(interrupted)
        if self.step % self.recipe.log_every:  # all must agree, and agreeing takes time
            return False
        return world.all_reduce_values(float(bool(interrupted)))[0] > 0

    # Checkpoints.

    def _save(self) -> None:
        if self.checkpoints is not None and (self.process_group.is_rank_zero or self.checkpoints.is_collective):
            state = {
                "step": self.step, "tokens_seen": self.tokens_seen, "loss": nonfinite_to_none(self.loss),
                "valid_loss": self.valid_loss, "best_loss": nonfinite_to_none(self.best_loss), "best_step": self.best_step,
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
        if state["threads"] != torch.get_num_threads():  # sums are shared out over threads: other threads, other bits
            log(f"using {state['threads']} threads, as before")
            torch.set_num_threads(state["threads"])
        num_processes, previous_processes = self.process_group.all_processes.size, state.get("processes")
        processes_note = (
            f", with {num_processes} processes, not {previous_processes}"
            if previous_processes not in (None, num_processes)
            else ""
        )
        log(f"going on from step {self.step} of {self.recipe.steps}{processes_note}")

    def _finish(self) -> None:
        """The end: the best weights if it stopped early, and the model in its folder."""
        if self.stop_reason == "early" and self.best_step:
            if self.checkpoints is not None:
                problem = checkpoint_problem(self.checkpoints.path(self.best_step))
                if problem is not None:
                    raise HeadwiseError(
                        f"the best checkpoint, of step {self.best_step}, is damaged ({problem}); the newest is "
                        f"{self.checkpoints.path(self.step)}."
                    )
                self.checkpoints.restore(self.best_step, self.loss_module, None)
            elif self.best_weights is not None:
                self.model.load_state_dict(self.best_weights)
        if self.folder is not None and self.stop_reason != "interrupted" and self.process_group.is_rank_zero:
            if self.checkpoints is not None and self.layout.is_sharded:
                final_step = self.best_step if self.stop_reason == "early" and self.best_step else self.step
                merge_sharded_checkpoint(self.checkpoints.path(final_step), self.folder / "model")
            else:
                self.model.save(self.folder / "model")
        self.process_group.barrier()


def resolve_precision(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The numbers products are computed in."""
    if recipe.precision != "auto":
        return getattr(torch, recipe.precision)
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def _mix_seed(seed: int, step: int, rank: int) -> int:
    """One number from three, far apart for neighbours."""
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % (1 << 63)
