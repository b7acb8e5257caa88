"""headwise train: train a transformer from scratch on the synthetic language or on text files."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import DeviceOption, JsonOption
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
        list[Path] | None, typer.Argument(help="Text files or folders. Default: the synthetic language.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Source texts of an encoder-decoder, one per line. CORPUS has the target texts, line by line."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/CORPUS. Run the same command again to resume.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder with its original options.")
    ] = None,
    valid: Annotated[Path | None, typer.Option(help="Validation text. Default: the end of CORPUS.")] = None,
    valid_source: Annotated[Path | None, typer.Option(help="Source texts of --valid, for an encoder-decoder.")] = None,
    preset: Annotated[str, typer.Option(help="Model configuration, one of headwise presets.")] = "synthetic",
    layers: Annotated[int | None, typer.Option(help="Number of layers. Default: that of the preset.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads per layer. Default: that of the preset.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of the residual stream. Default: that of the preset.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per sequence. Default: that of the preset.")] = None,
    head_dropout: Annotated[float, typer.Option(help="Probability that a head is silenced in a training step.")] = 0.0,
    head_dropout_schedule: Annotated[
        str, typer.Option(help="Schedule of --head-dropout over training: constant, ramp or v.")
    ] = "constant",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer: byte, character, word or bpe:SIZE. Default: word for the synthetic language, else byte."
        ),
    ] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="Train an encoder by masked language modeling instead of a decoder.")
    ] = False,
    recipe_options: dict[str, Any],
    watch_heads: Annotated[
        bool,
        typer.Option(
            "--watch-heads", help="Measure every head at each evaluation and write heads.npz to the run folder."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the initialization and the data order.")] = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Train a transformer from scratch. Models of the synthetic language are evaluated at the end. Ctrl-C saves and stops."""
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.distributed.process_group import is_rank_zero
    from headwise.errors import ArgumentError
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
        raise ArgumentError(
            "--watch-heads: requires the full model in each process. Use --parallel ddp, or remove --watch-heads."
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
        raise typer.Exit(130)  # exit code of a command stopped by Ctrl-C


def _print_result(result: Any, history: Any, out: Path, *, is_synthetic: bool, as_json: bool) -> None:
    """Print the result. A model of the synthetic language is also evaluated on cloze probes."""
    from headwise.model import Transformer
    from headwise.training.synthetic_evaluation import supports_synthetic_eval, synthetic_eval
    from headwise.ui.print_train_result import show_train_result

    is_evaluated = is_synthetic and supports_synthetic_eval(result.model) and result.stop_reason != "interrupted"
    is_sharded = result.recipe.parallel != "ddp"  # a partition cannot be evaluated alone
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
    """Raise if --resume is combined with options that the run folder already fixes."""
    from headwise.errors import ArgumentError

    allowed = {"resume", "device", "watch_heads", "as_json"}
    conflicting = [name for name in context.params if name not in allowed and _is_on_command_line(context, name)]
    if conflicting:
        names = ", ".join("CORPUS" if name == "corpus" else "--" + name.replace("_", "-") for name in conflicting)
        raise ArgumentError(f"--resume: a resumed run uses its original options. Remove {names}.")


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
