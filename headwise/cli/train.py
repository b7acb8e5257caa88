"""headwise train: a transformer from scratch, on the little language or on any text."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import Json, given

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
    parallel: Annotated[
        str | None, typer.Option(help="What processes share: ddp (rows), fsdp (weights too), heads, fsdp+heads.")
    ] = None,
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
    from headwise.analysis.roles.history import HeadHistory
    from headwise.distributed.process_group import is_first
    from headwise.errors import HeadwiseError
    from headwise.model import Transformer
    from headwise.spec import preset as named
    from headwise.text.corpus import Corpus
    from headwise.training import TrainRequest, start
    from headwise.training import resume as go_on
    from headwise.training.default_recipe import LITTLE
    from headwise.training.synthetic_eval import can_sit, exam
    from headwise.ui.train_view import show_run

    if resume is not None:
        _alone(context_of)
    spec = named(preset).resized(layers=layers, heads=heads, width=width, context=context)
    silent = {"head_dropout": head_dropout, "head_dropout_schedule": head_dropout_schedule}
    kind = {"kind": "encoder", "output": "mlm"} if masked else {}
    spec = replace(spec, attention=replace(spec.attention, **silent), **kind)
    numbers = given(
        steps=steps, batch=batch, accumulate=accumulate, rate=rate, warmup=warmup, precision=precision,
        parallel=parallel, evaluate_every=evaluate_every, patience=patience, save_every=save_every,
    )  # fmt: skip
    switches = {"compile": compile, "checkpointing": checkpointing, "seed": seed}
    out = resume or out or Path("runs") / (text[0].stem if text else "little")
    request = TrainRequest(
        spec,
        text if source is None else Corpus.named(text, source),
        replace(LITTLE, rows="windows" if text else LITTLE.rows, **numbers, **switches),
        out=out,
        valid=valid if valid_source is None else Corpus.named([valid] if valid else None, valid_source),
        tokenizer=tokenizer,
    )
    if watch_heads and parallel not in (None, "ddp"):
        raise HeadwiseError(
            "--watch-heads looks at the whole model in one process; leave it out, or use --parallel ddp."
        )
    leads = is_first()
    history = HeadHistory.kept_in(out / HEADS) if watch_heads and leads else None
    if resume is not None:
        made = go_on(resume, device=device, call=history, every=None)
    else:
        made = start(request, device=device, call=history, every=None)
    if not leads:
        return
    examined = not text and can_sit(made.model) and made.stopped != "interrupted"
    parts = made.recipe.parallel != "ddp"  # a part alone sits no exam
    model = Transformer.reopen(out / "model") if examined and parts else made.model
    marks, lives = exam(model) if examined else (), [] if history is None else history.lives()
    if as_json:
        told = {**made.to_dict(), "recipe": asdict(made.recipe), "exam": [mark._asdict() for mark in marks]}
        print(json.dumps(told if history is None else told | {"heads": [life._asdict() for life in lives]}, indent=2))
    else:
        show_run(made.to_dict(), marks, lives)
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
