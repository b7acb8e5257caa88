"""headwise train: a transformer from scratch, on the little language or on any text."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headwise.cli.shell.words import Json

if TYPE_CHECKING:
    from headwise.look.profile.history import HeadHistory
    from headwise.model import Transformer

HEADS = "heads.npz"


def run(
    context_of: typer.Context,
    text: Annotated[
        list[Path] | None, typer.Argument(help="Text files, or folders; none: the little language.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; TEXT has its answers, line by line.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; none: runs/ and the text's name. The same again goes on.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was asked for.")] = None,
    valid: Annotated[Path | None, typer.Option(help="A text to evaluate on; none: the end of the text.")] = None,
    valid_source: Annotated[Path | None, typer.Option(help="What belongs to --valid, for an encoder-decoder.")] = None,
    preset: Annotated[str, typer.Option(help="The model to begin from: headwise presets.")] = "little",
    layers: Annotated[int | None, typer.Option(help="Blocks, if not the preset's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a layer, if not the preset's.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, if not the preset's.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row, if not the preset's.")] = None,
    head_dropout: Annotated[float, typer.Option(help="How likely a head is silent in a step.")] = 0.0,
    head_dropout_schedule: Annotated[str, typer.Option(help="constant, ramp or v.")] = "constant",
    tokenizer: Annotated[str | None, typer.Option(help="byte, character, word or bpe:SIZE.")] = None,
    masked: Annotated[bool, typer.Option("--masked", help="An encoder that fills gaps, not a decoder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows in a step.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts a step is cut into, to save memory.")] = None,
    rate: Annotated[float | None, typer.Option(help="The learning rate at its highest.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps in which the rate climbs.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile: slow to start, then quicker.")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations: less memory, more time.")
    ] = False,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    patience: Annotated[int | None, typer.Option(help="Evaluations without progress before it stops.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    watch_heads: Annotated[
        bool, typer.Option("--watch-heads", help="Measure every head at each evaluation, into heads.npz of the folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Another seed, another run.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    as_json: Json = False,
) -> None:
    """Train a transformer; on the little language, with an exam at the end. Ctrl-C saves and stops."""
    from headwise.spec import preset as named
    from headwise.text import Tokenizer
    from headwise.text.corpus import Corpus
    from headwise.text.little import VOCABULARY
    from headwise.train import resume as go_on
    from headwise.train import train
    from headwise.train.exam import exam
    from headwise.train.little import LITTLE, little_texts
    from headwise.train.loop import finite

    if resume is not None:
        _alone(context_of)
    spec = named(preset).resized(layers=layers, heads=heads, width=width, context=context)
    silent = {"head_dropout": head_dropout, "head_dropout_schedule": head_dropout_schedule}
    spec = replace(spec, attention=replace(spec.attention, **silent))
    if masked:
        spec = replace(spec, kind="encoder", output="mlm")
    asked = {
        "steps": steps, "batch": batch, "accumulate": accumulate, "rate": rate, "warmup": warmup, "precision": precision,
        "evaluate_every": evaluate_every, "patience": patience, "save_every": save_every,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    rows = "windows" if text else LITTLE.rows
    recipe = replace(LITTLE, **given, rows=rows, compile=compile, checkpointing=checkpointing, seed=seed)
    texts, held_out = (text, None) if text else little_texts(recipe)
    texts = texts if source is None else Corpus.named(text, source)
    held_out = valid or held_out if valid_source is None else Corpus.named([valid] if valid else None, valid_source)
    out = resume or out or Path("runs") / (text[0].stem if text else "little")
    leads = not int(os.environ.get("RANK", "0"))  # under torchrun the first process looks and speaks for all
    watched = _begin(out / HEADS) if watch_heads and leads else None

    def look(model: "Transformer", step: int) -> None:
        if watched is not None:
            watched(model, step)
            watched.save(out / HEADS)

    called, every = (None if watched is None else look), recipe.evaluate_every
    if resume is not None:
        made = go_on(resume, device=device, call=called, every=every)
    else:
        made = train(
            spec, texts, recipe, out=out, valid=held_out, tokenizer=tokenizer, device=device, call=called, every=every,
        )  # fmt: skip
    if not leads:
        return
    own = made.model.tokenizer
    little = isinstance(own, Tokenizer) and set(own.backend.get_vocab()) >= set(VOCABULARY)
    examined = little and not text and made.model.spec.kind == "decoder" and made.stopped != "interrupted"
    marks = exam(made.model) if examined else ()
    result = {
        "steps": made.step, "tokens": made.tokens, "loss": finite(made.loss), "valid_loss": made.valid_loss,
        "stopped": made.stopped, "best_step": made.best_step, "seconds": made.seconds,
        "parameters": made.model.spec.parameters, "model": str(out / "model"),
    }  # fmt: skip
    lives = [] if watched is None else summarise(watched)
    if as_json:
        told = {**result, "recipe": asdict(made.recipe), "exam": [mark._asdict() for mark in marks]}
        if watched is not None:
            told |= {"heads": [life._asdict() for life in lives]}
        print(json.dumps(told, indent=2))
    else:
        report(result, marks, lives)
    if made.stopped == "interrupted":
        raise typer.Exit(130)  # as a shell says of what Ctrl-C ended


def _alone(context: typer.Context) -> None:
    """A run that is gone on with keeps what it was asked for; only where it runs and what is shown may be said anew."""
    from headwise.errors import HeadwiseError

    free = {"resume", "device", "watch_heads", "as_json"}
    given = [name for name in context.params if name not in free and _is_given(context, name)]
    if given:
        names = ", ".join("TEXT" if name == "text" else "--" + name.replace("_", "-") for name in given)
        raise HeadwiseError(f"--resume goes on with a run as it was asked for; leave out {names}.")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class Life(NamedTuple):
    """What became of one measure: the head with most of it, beside the most any head had at the first look."""

    measure: str
    head: str
    value: float
    baseline: float  # the most of any head at the first look
    cases: int  # rows or arcs it is a mean over
    half_at: int | None  # the step at which that head first had half of it


def summarise(watched: "HeadHistory") -> list[Life]:
    """For each measure the head with most of it, how much, and the step at which it first had half of that."""
    lives = []
    for measure, cases in zip(watched.names, watched.counts, strict=True) if watched.steps else ():
        head, value = watched.best(measure)
        half = watched.born(measure, value / 2).get(head) if value > 0 else None  # half of nothing is no news
        lives.append(Life(measure, head, value, watched.baseline(measure), cases, half))
    return lives


def _begin(path: Path) -> "HeadHistory":
    """A new history, or the one a stopped run left."""
    from headwise.look.profile.history import HeadHistory

    return HeadHistory.load(path) if path.is_file() else HeadHistory()


def report(result: dict[str, Any], marks: tuple, lives: list[Life]) -> None:
    """What came of it, for a person."""
    from rich.console import Console

    from headwise.show.tables import make_table

    console = Console()
    held_out = "" if result["valid_loss"] is None else f", held out {result['valid_loss']:.4f}"
    console.print(
        f"{result['stopped']} at step {result['steps']}, {result['tokens']:,} tokens, {result['seconds']:.0f} s, "
        f"{result['parameters']:,} parameters: loss {result['loss'] or float('nan'):.4f}{held_out}",
        highlight=False,
    )
    if marks:
        columns = ["quiz", "questions", "right", "chance", "bigram"]
        console.print(make_table("The right word is the first choice, on held-out documents", columns, marks))
    if lives:
        rows = [(*life[:5], "" if life.half_at is None else life.half_at) for life in lives]
        title = "The best head of each measure; the baseline is the best of any head before the first step"
        console.print(make_table(title, ["measure", "head", "value", "baseline", "cases", "half of it at step"], rows))
    again = result["stopped"] == "interrupted"
    run = Path(result["model"]).parent
    on = result.get("again", f"headwise train --resume {run}")
    told = f"to go on: {on}" if again else f"the model is in {run}: headwise generate {run} ..."
    console.print(told, highlight=False, soft_wrap=True)
