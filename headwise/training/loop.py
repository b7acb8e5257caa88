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

from headwise.distributed.parallel_strategy import TeamLayout, clip, counted_rows, settle
from headwise.distributed.process_group import join_team
from headwise.errors import HeadwiseError
from headwise.heads.dropout import tell_progress
from headwise.kernels.collectives import explaining_lost_peers
from headwise.kernels.gradients import gradients_enabled
from headwise.model import Transformer, quiet
from headwise.progress import Progress
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.training.batches import Hide, TokenRows, in_order, make_rows, masked
from headwise.training.checkpoint import Checkpoints, check
from headwise.training.evaluate import evaluate
from headwise.training.loss import LanguageLoss, Losses, MakeLoss
from headwise.training.optimizer import make_optimizer
from headwise.training.progress import Clock, Watch
from headwise.training.recipe import Recipe
from headwise.training.request import TrainRequest
from headwise.training.result import Trained, finite
from headwise.training.run_folder import Metrics, note
from headwise.training.setup import Prepared, cutter, prepare, recall
from headwise.training.sharded_checkpoint import PieceCheckpoints
from headwise.training.signals import interruptible
from headwise.weights.load import save_as_whole

Call = Callable[[Transformer, int], object]


class Diverged(HeadwiseError):  # noqa: N818 (what happened, not another kind of error)
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
    call: Call | None = None,
    every: int | None = 100,
    progress: Progress | bool = True,
) -> Trained:
    """Train a new model from a spec, or go on with one that is there, on a text.

    `corpus` is a text, a list of texts, a path or a Corpus; none is the little language. `out` is a folder for checkpoints,
    metrics and the model: run the same again and a stopped run goes on, to the same bits. `tokenizer` is one that was
    loaded or made, or "byte", "character", "word" (the little language), "bpe:4096"; a new model's vocabulary is set to it.
    `call(model, step)` is called before the first step, after every `every` steps (None: at each evaluation) and after the
    last. `loss` makes of the model what it learns from (`headwise.training.loss.Loss`); what is held out is always judged by
    its text alone. `progress(what, done, of)` is called with how far the run is; True shows it on standard error.

    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> made = train(spec, "to be or not to be " * 50, Recipe(steps=20, batch=4, warmup=2, rate=0.01), progress=False)
    >>> made.step, made.loss < 5, made.stopped
    (20, True, 'finished')
    """
    request = TrainRequest(model, corpus, recipe, out=out, valid=valid, tokenizer=tokenizer, loss=loss)
    return start(request, device=device, call=call, every=every, progress=progress)


def start(
    request: TrainRequest,
    *,
    device: str | torch.device | None = None,
    call: Call | None = None,
    every: int | None = 100,
    progress: Progress | bool = True,
) -> Trained:
    """Start a run, or go on with it where its folder holds a part of it already; `train` in one object.

    >>> from headwise.spec import preset
    >>> small = preset("little").resized(layers=1, width=16, heads=2)
    >>> made = start(TrainRequest(small, recipe=Recipe(steps=2, batch=4, warmup=1)), progress=False)
    >>> made.step, made.model.tokenizer.encode("the dog", special=False) != [made.model.tokenizer.unk] * 2
    (2, True)
    """
    if every is not None and every < 1:
        raise HeadwiseError(f"every must be at least 1, got {every}.")
    out = request.out
    trained = None if isinstance(request.model, ModelSpec) else request.model
    with (
        gradients_enabled(trained),
        join_team(device) as team,
        tempfile.TemporaryDirectory() as scratch,
        torch.random.fork_rng(),
    ):
        folder, how = Path(scratch) if out is None else Path(out), request.how
        if out is None and team.size > 1:
            raise HeadwiseError("several processes need a folder they share; give out=…")
        layout = TeamLayout.of(how.parallel, team, how.head_processes)
        return _run(prepare(request, folder, layout), how, folder, out is not None, call, every, progress)


def resume(
    folder: str | Path,
    *,
    loss: MakeLoss = LanguageLoss,
    device: str | torch.device | None = None,
    call: Call | None = None,
    every: int | None = 100,
    progress: Progress | bool = True,
) -> Trained:
    """Go on with a run from its folder alone, to the bits it would have had; a finished one is given as it ended.

    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = train(spec, "to be or not to be " * 50, Recipe(steps=2, warmup=1), out=folder, progress=False)
    ...     resume(folder, progress=False).loss == made.loss
    True
    """
    folder = Path(folder)
    with gradients_enabled(), join_team(device) as team, torch.random.fork_rng():
        start, recipe = recall(folder, loss, team)
        return _run(start, recipe, folder, True, call, every, progress)


def _run(
    start: Prepared,
    recipe: Recipe,
    folder: Path,
    kept: bool,
    call: Call | None,
    every: int | None,
    progress: Progress | bool,
) -> Trained:
    threads = torch.get_num_threads()
    loop = Loop(start, recipe, folder if kept else None, progress)
    if loop.team.leads:
        note(folder, start.noted)  # from here on the folder is this run's
        if recipe.warmup >= recipe.steps:
            loop.watch.say(
                f"the warm-up of {recipe.warmup} steps is not shorter than the run of {recipe.steps}: the rate never reaches "
                f"{recipe.rate:g}. A tenth of the steps is usual."
            )
    try:
        with explaining_lost_peers():
            return loop.run(call, recipe.evaluate_every if every is None else every)
    finally:
        torch.set_num_threads(threads)


class Loop:
    """One run: `run` goes from wherever the last checkpoint is to the end."""

    def __init__(self, start: Prepared, recipe: Recipe, folder: Path | None, progress: Progress | bool) -> None:
        self.layout, self.recipe, self.folder = start.layout, recipe, folder
        self.team = team = start.layout.team
        self.model, self.tokens, self.context = start.model, start.tokens, start.context
        self.mask = start.tokenizer.mask if start.objective == "masked" else None
        self.cut = cutter(start, recipe)
        self.windows = self.cut(self.tokens.train)
        if recipe.holdout > 0 and len(self.tokens.valid) < 2:
            raise HeadwiseError("too little text is held out to evaluate on; give more text, or holdout=0.")
        self.layout.cut(self.model)
        self.learns_from, learning = start.loss, start.loss.learning()
        self.optimizer, self.trained = make_optimizer(learning, recipe), list(learning.values())
        self.counted = counted_rows(self.model, self.trained)
        self.step, self.seen, self.loss, self.valid_loss = 0, 0, float("nan"), None  # seen: tokens
        self.parts: dict[str, float] = {}  # of the loss, where it has several
        self.best, self.best_step, self.worse = float("inf"), 0, 0
        self.stopped = "finished"
        self.precision = precision_of(recipe, team.device)
        self.scaler = torch.amp.GradScaler(team.device.type, enabled=self.precision == torch.float16)
        self.watch = Watch(recipe.steps, 0, progress if team.leads else False)
        say = self.watch.say if team.leads else (lambda text: None)
        kept = None if folder is None else (folder / "checkpoints", recipe.keep, say)
        in_pieces = recipe.parallel != "ddp"  # whatever the number of processes, so that another can go on
        self.checkpoints = None if kept is None else PieceCheckpoints(*kept, team) if in_pieces else Checkpoints(*kept)
        self.best_weights: dict[str, Tensor] | None = None  # kept in memory where there is no folder
        self._resume(say)
        self.metrics = Metrics(folder if team.leads else None, self.step)

    def run(self, call: Call | None, every: int) -> Trained:
        """All steps that are left."""
        recipe, clock = self.recipe, Clock()
        self.model.train()
        self.model.checkpointing, before = recipe.checkpointing, self.model.checkpointing
        if recipe.compile:
            self.learns_from.compile()
        module = self.layout.wrap(self.learns_from, unused=self.model.spec.pooler)
        try:
            with interruptible() as interrupted:
                if call is not None and self.step == 0:
                    self._call(call)
                while self.step < recipe.steps and self.stopped == "finished":
                    before_step = self.seen
                    norm = self._step(module)
                    clock.tokens += self.seen - before_step
                    if self.step % recipe.log_every == 0 or self.step == recipe.steps:
                        self._log(norm, clock)
                    last = self.step == recipe.steps
                    improved = (last or self.step % recipe.evaluate_every == 0) and self._evaluate(clock)
                    if call is not None and (self.step % every == 0 or last):
                        self._call(call)
                    if recipe.patience and self.worse >= recipe.patience:
                        self.stopped = "early"
                    if self._must_stop(interrupted):
                        self.stopped = "interrupted"
                    if last or improved or self.step % recipe.save_every == 0 or self.stopped != "finished":
                        self._save()
            self._finish()
        finally:
            self.watch.close()
            self.model.checkpointing = before
            self.model.eval()
        return Trained(
            self.model, recipe, self.step, self.seen, self.loss, self.valid_loss, self.best_step, self.stopped, clock.seconds,
            self.metrics.rows, self.folder,
        )  # fmt: skip

    def _step(self, module: nn.Module) -> float:
        """One step: gradients of all parts, clipped, applied. Returns the length of the gradient."""
        recipe, team, step = self.recipe, self.team, self.step
        self.optimizer.zero_grad(set_to_none=True)  # whoever looked may have left gradients
        torch.manual_seed(_mix(recipe.seed, step, team.rank))  # so that a resumed run draws what an unbroken one would
        tell_progress(self.model, step / recipe.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        read = self._read(step)
        parts, losses = recipe.accumulate, Losses(team)
        rows, asked = recipe.batch // parts // team.size, read.target_count
        for part in range(parts):
            mine = slice((part * team.size + team.rank) * rows, (part * team.size + team.rank + 1) * rows)
            alone = part < parts - 1 and team.size > 1 and not self.layout.cuts
            with module.no_sync() if alone else nullcontext():  # pyright: ignore[reportCallIssue]
                with torch.autocast(team.device.type, self.precision, enabled=self.precision != torch.float32):
                    made = losses.add(module(*read.part(mine, team.device), total=asked))
                self.scaler.scale(made).backward()
        self.scaler.unscale_(self.optimizer)
        if self.layout.cuts:
            norm = torch.tensor(self.layout.length(self.trained, self.counted))
        else:
            norm = nn.utils.get_total_norm([value.grad for value in self.trained if value.grad is not None])
        length = float(norm)
        if not length < float("inf") and self.precision != torch.float16:  # there the scaler leaves such a step out
            raise Diverged(
                f"the gradient is {length} at step {step + 1}; lower the rate ({recipe.rate}) or lengthen the warm-up. "
                f"The last checkpoint is as it was."
            )
        if recipe.clip and not length <= recipe.clip:
            clip(self.trained, recipe.clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        if self.step % recipe.log_every == 0 or self.step == recipe.steps:
            self.loss, self.parts = losses.mean()
        return length

    def _read(self, step: int) -> TokenRows:
        """All rows of a step."""
        first = step * self.recipe.batch
        read = self.windows.rows(first, self.recipe.batch)  # (batch, ≤ context + 1), −1 where there is none
        texts, sources = read if isinstance(read, tuple) else (read, None)
        self.seen += int((texts[:, :-1] >= 0).sum()) + (0 if sources is None else int((sources >= 0).sum()))
        return make_rows(texts, sources, self._hiding([self.recipe.seed]), first)

    def _hiding(self, seed: list[int]) -> Hide | None:
        """How tokens are hidden from an encoder that is asked for them."""
        if self.mask is None:
            return None
        return partial(masked, share=self.recipe.mask_share, mask=self.mask, vocab=self.model.spec.vocab, seed=seed)

    def _log(self, norm: float, clock: Clock) -> None:
        if self.team.leads:
            speed = clock.speed()
            row = {
                "step": self.step, "tokens": self.seen, "loss": self.loss,
                "rate": self.recipe.rate_at(self.step - 1), "gradient": norm, "tokens_per_second": round(speed),
                **{f"loss {name}": value for name, value in self.parts.items()},
            }  # fmt: skip
            self.metrics.add({name: value for name, value in row.items() if math.isfinite(value)})
            self.watch.step(self.step, self.loss, speed)

    def _evaluate(self, clock: Clock) -> bool:
        """Look up from the book: the loss on what was held out. True if it is the best so far."""
        valid, most = self.tokens.valid, self.recipe.evaluate_tokens
        if len(valid) < 2:
            return False
        with torch.autocast(self.team.device.type, self.precision, enabled=self.precision != torch.float32):
            loss = self.valid_loss = self._loss_on(valid, most)
            if self.step == self.recipe.steps and len(valid) > most:  # the last word is on all of it
                self.valid_loss = self._loss_on(valid, None)
        settle(self.model)
        if self.team.leads:
            self.metrics.add({"step": self.step, "valid_loss": self.valid_loss})
            self.watch.evaluation(self.step, self.loss, self.valid_loss, clock.seconds)
        improved = loss < self.best
        self.worse = 0 if improved else self.worse + 1
        if improved:
            self.best, self.best_step = loss, self.step
            if self.checkpoints is None and self.recipe.patience:
                self.best_weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return improved

    def _loss_on(self, tokens: np.ndarray, most: int | None) -> float:
        """The loss on held-out tokens, on all of them or at most so many."""
        if self.recipe.rows != "texts" and self.model.spec.kind != "encoder-decoder":
            texts, sources = list(in_order(tokens, self.context, most)), []
        else:
            read = list(self.cut(tokens).in_order(most))
            texts, sources = zip(*read, strict=True) if isinstance(read[0], tuple) else (read, [])
        hide, cuts = self._hiding([self.recipe.seed, 1]), self.layout.cuts
        return evaluate(self.model, texts, sources, self.recipe.batch, hide, self.team, cuts)

    def _call(self, call: Call) -> None:
        """Let the caller look at the model as it is; what is drawn or switched there changes nothing here."""
        with quiet(self.model), torch.random.fork_rng():
            call(self.model, self.step)
        settle(self.model)

    def _must_stop(self, interrupted: list[int]) -> bool:
        everyone = self.team.everyone
        if everyone.size == 1:
            return bool(interrupted)
        if self.step % self.recipe.log_every:  # all must agree, and agreeing takes time
            return False
        return everyone.total(float(bool(interrupted)))[0] > 0

    # Checkpoints.

    def _save(self) -> None:
        if self.checkpoints is not None and (self.team.leads or self.checkpoints.together):
            state = {
                "step": self.step, "seen": self.seen, "loss": finite(self.loss), "valid_loss": self.valid_loss,
                "best": finite(self.best), "best_step": self.best_step, "worse": self.worse,
                "scaler": self.scaler.state_dict(), "threads": torch.get_num_threads(),
                "processes": self.team.everyone.size,
            }  # fmt: skip
            self.checkpoints.save(self.learns_from, self.optimizer, state, self.step, self.best_step)
        self.team.wait()

    def _resume(self, say: Callable[[str], None]) -> None:
        if self.checkpoints is None:
            return
        newest = self.checkpoints.newest() if self.team.leads else None
        found = int(self.team.everyone.total(float(newest or 0))[0])
        if not found:
            return
        state = self.checkpoints.restore(found, self.learns_from, self.optimizer)
        self.step, self.seen, self.valid_loss = state["step"], state["seen"], state["valid_loss"]
        self.loss = float("nan") if state["loss"] is None else state["loss"]
        self.best = float("inf") if state["best"] is None else state["best"]
        self.best_step, self.worse = state["best_step"], state["worse"]
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.recipe.patience and self.worse >= self.recipe.patience:
            self.stopped = "early"
        if state["threads"] != torch.get_num_threads():  # sums are shared out over threads: other threads, other bits
            say(f"using {state['threads']} threads, as before")
            torch.set_num_threads(state["threads"])
        now, before = self.team.everyone.size, state.get("processes")
        how = f", with {now} processes, not {before}" if before not in (None, now) else ""
        say(f"going on from step {self.step} of {self.recipe.steps}{how}")

    def _finish(self) -> None:
        """The end: the best weights if it stopped early, and the model in its folder."""
        if self.stopped == "early" and self.best_step:
            if self.checkpoints is not None:
                wrong = check(self.checkpoints.path(self.best_step))
                if wrong is not None:
                    raise HeadwiseError(
                        f"the best checkpoint, of step {self.best_step}, is damaged ({wrong}); the newest is "
                        f"{self.checkpoints.path(self.step)}."
                    )
                self.checkpoints.restore(self.best_step, self.learns_from, None)
            elif self.best_weights is not None:
                self.model.load_state_dict(self.best_weights)
        if self.folder is not None and self.stopped != "interrupted" and self.team.leads:
            if self.checkpoints is not None and self.layout.cuts:
                last = self.best_step if self.stopped == "early" and self.best_step else self.step
                save_as_whole(self.checkpoints.path(last), self.folder / "model")
            else:
                self.model.save(self.folder / "model")
        self.team.wait()


def precision_of(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The numbers products are computed in."""
    if recipe.precision != "auto":
        return getattr(torch, recipe.precision)
    has = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has else torch.float32


def _mix(seed: int, step: int, rank: int) -> int:
    """One number from three, far apart for neighbours."""
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % (1 << 63)
