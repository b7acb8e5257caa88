"""headwise train: a transformer from scratch, on the synthetic language or on any text."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import JsonOption
from headwise.cli.shell.field_options import field_options
from headwise.training import Recipe

HISTORY_FILE = "heads.npz"


@field_options(
    Recipe,
    "recipe_options",
    *("steps", "batch_size", "accumulation_steps", "learning_rate", "warmup", "precision", "parallel", "compile"),
    *("checkpointing", "evaluate_every", "patience", "save_every"),
)
def run(
    typer_context: typer.Context,
    *,
    corpus: Annotated[
        list[Path] | None, typer.Argument(help="Text files, or folders; none: the synthetic language.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; CORPUS has its answers, line by line.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; none: runs/ and the text's name. The same again goes on.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was asked for.")] = None,
    valid: Annotated[Path | None, typer.Option(help="A text to evaluate on; none: the end of the text.")] = None,
    valid_source: Annotated[Path | None, typer.Option(help="What belongs to --valid, for an encoder-decoder.")] = None,
    preset: Annotated[str, typer.Option(help="The model to begin from: headwise presets.")] = "synthetic",
    layers: Annotated[int | None, typer.Option(help="Blocks, if not the preset's.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads of a layer, if not the preset's.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, if not the preset's.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row, if not the preset's.")] = None,
    head_dropout: Annotated[float, typer.Option(help="How likely a head is silent in a step.")] = 0.0,
    head_dropout_schedule: Annotated[str, typer.Option(help="constant, ramp or v.")] = "constant",
    tokenizer: Annotated[str | None, typer.Option(help="byte, character, word or bpe:SIZE.")] = None,
    masked: Annotated[bool, typer.Option("--masked", help="An encoder that fills gaps, not a decoder.")] = False,
    recipe_options: dict[str, Any],
    watch_heads: Annotated[
        bool, typer.Option("--watch-heads", help="Measure every head at each evaluation, into heads.npz of the folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Another seed, another run.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a transformer; on the synthetic language, with the synthetic evaluation at the end. Ctrl-C saves and stops."""
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.distributed.process_group import is_rank_zero
    from headwise.errors import HeadwiseError
    from headwise.spec import preset as load_preset
    from headwise.text.corpus import Corpus
    from headwise.training import TrainRequest, run_request
    from headwise.training import resume as resume_training
    from headwise.training.default_synthetic_run import DEFAULT_RECIPE

    if resume is not None:
        _check_resume_options(typer_context)
    spec = load_preset(preset).resized(layers=layers, heads=num_heads, width=width, context=context)
    dropout_fields = {"head_dropout": head_dropout, "head_dropout_schedule": head_dropout_schedule}
    encoder_fields = {"kind": "encoder", "output": "mlm"} if masked else {}
    spec = replace(spec, attention=replace(spec.attention, **dropout_fields), **encoder_fields)
    out = resume or out or Path("runs") / (corpus[0].stem if corpus else "synthetic")
    request = TrainRequest(
        spec,
        corpus if source is None else Corpus.from_cli_arguments(corpus, source),
        replace(DEFAULT_RECIPE, rows="windows" if corpus else DEFAULT_RECIPE.rows, seed=seed, **recipe_options),
        out=out,
        valid=valid if valid_source is None else Corpus.from_cli_arguments([valid] if valid else None, valid_source),
        tokenizer=tokenizer,
    )
    if watch_heads and recipe_options.get("parallel", "ddp") != "ddp":
        raise HeadwiseError(
            "--watch-heads looks at the whole model in one process; leave it out, or use --parallel ddp."
        )
    leads = is_rank_zero()
    history = HeadHistory.load_or_create(out / HISTORY_FILE) if watch_heads and leads else None
    if resume is not None:
        result = resume_training(resume, device=device, callback=history, callback_every=None)
    else:
        result = run_request(request, device=device, callback=history, callback_every=None)
    if not leads:
        return
    _print_result(result, history, out, is_synthetic=not corpus, as_json=as_json)
    if result.stop_reason == "interrupted":
        raise typer.Exit(130)  # as a shell says of what Ctrl-C ended


def _print_result(result: Any, history: Any, out: Path, *, is_synthetic: bool, as_json: bool) -> None:
    """Print the run. A model of the synthetic language is also evaluated on its probes."""
    from headwise.model import Transformer
    from headwise.training.synthetic_evaluation import supports_synthetic_eval, synthetic_eval
    from headwise.ui.train_tables import show_train_result

    is_evaluated = is_synthetic and supports_synthetic_eval(result.model) and result.stop_reason != "interrupted"
    is_sharded = result.recipe.parallel != "ddp"  # a partition alone is not evaluated
    model = Transformer.reopen(out / "model") if is_evaluated and is_sharded else result.model
    probe_scores, trajectories = (
        synthetic_eval(model) if is_evaluated else (),
        [] if history is None else history.metric_emergence(),
    )
    if as_json:
        summary = {
            **result.to_dict(),
            "recipe": asdict(result.recipe),
            "synthetic_eval": [probe_score._asdict() for probe_score in probe_scores],
        }
        print(
            json.dumps(
                summary
                if history is None
                else summary | {"heads": [trajectory._asdict() for trajectory in trajectories]},
                indent=2,
            )
        )
    else:
        show_train_result(result.to_dict(), probe_scores, trajectories)


def _check_resume_options(context: typer.Context) -> None:
    """A run that is gone on with keeps what it was asked for; only where it runs and what is shown may be said anew."""
    from headwise.errors import HeadwiseError

    allowed = {"resume", "device", "watch_heads", "as_json"}
    conflicting = [name for name in context.params if name not in allowed and _is_on_command_line(context, name)]
    if conflicting:
        names = ", ".join("CORPUS" if name == "corpus" else "--" + name.replace("_", "-") for name in conflicting)
        raise HeadwiseError(f"--resume goes on with a run as it was asked for; leave out {names}.")


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
