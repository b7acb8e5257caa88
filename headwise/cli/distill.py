"""headwise distill: train a student model on the outputs of a teacher."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument, drop_none
from headwise.cli.shell.field_options import field_options
from headwise.training import Recipe


@field_options(Recipe, "recipe_options", "steps", "batch_size", "context", "learning_rate", "warmup")
def run(
    teacher: ModelArgument,
    *,
    corpus: Annotated[
        list[Path] | None, typer.Argument(help="Text files or folders. Default: the synthetic language.")
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(help="Student model to train further. Default: a new model of the kind of the teacher."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of a new student. Default: those of the teacher.")] = None,
    num_heads: Annotated[
        int | None, typer.Option(help="Heads per layer of a new student. Default: those of the teacher.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of a new student. Default: that of the teacher.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Default: runs/distill-TEACHER. Run the same command again to resume."),
    ] = None,
    losses: Annotated[
        str, typer.Option(help="Distillation losses: logits, hidden, maps, qkv. Several with weights: logits,maps=0.5.")
    ] = "logits",
    temperature: Annotated[float, typer.Option(help="Softmax temperature of the logits loss.")] = 2.0,
    alpha: Annotated[float, typer.Option(help="Weight of the logits loss; the text loss has weight 1 − alpha.")] = 0.9,
    head_pairs: Annotated[
        str,
        typer.Option(
            help="Pairs of student and teacher heads for maps: order, best, or a list such as 0.0:1.1,0.1:3.2."
        ),
    ] = "best",
    ce_weight: Annotated[
        float | None,
        typer.Option(help="Weight of the cross-entropy on the text. Default: 1 − alpha with the logits loss, else 1."),
    ] = None,
    hidden_layers: Annotated[
        str | None,
        typer.Option(help="For hidden: layer pairs student:teacher, such as 0:2,1:5. Default: evenly spaced."),
    ] = None,
    relation_layers: Annotated[
        str | None, typer.Option(help="For qkv: layer pair student:teacher, such as 1:5. Default: the last layers.")
    ] = None,
    relation_heads: Annotated[
        int | None, typer.Option(help="For qkv: number of relation heads into which the channels are split.")
    ] = None,
    logits_folder: Annotated[
        Path | None, typer.Option(help="Folder that caches the logits of the teacher for later runs.")
    ] = None,
    valid: Annotated[Path | None, typer.Option(help="Validation text. Default: the end of CORPUS.")] = None,
    recipe_options: dict[str, Any],
    precision: Annotated[
        str | None, typer.Option(help="Training precision: float32, bfloat16, float16 or auto. Default: auto.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initialization and the data order.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a student on the logits, hidden states, attention maps or relations of a teacher. Ctrl-C saves and stops."""
    from headwise.distillation import distill
    from headwise.distributed.process_group import device_of_process
    from headwise.errors import ArgumentError
    from headwise.training.default_synthetic_run import DEFAULT_RECIPE
    from headwise.ui.print_train_result import show_train_result
    from headwise.weights import load

    teacher_model = load(teacher, device=device_of_process(device), dtype=dtype)
    student_model: Any = (
        teacher_model.spec.resized(layers=layers, heads=num_heads, width=width) if student is None else load(student)
    )
    if student is not None and not layers is num_heads is width is None:
        raise ArgumentError(
            "--layers, --num-heads, --width: these options are for a new student. Remove them, or remove --student."
        )
    recipe = replace(
        Recipe() if corpus else DEFAULT_RECIPE, **recipe_options, **drop_none(precision=precision), seed=seed
    )
    folder = out or Path("runs") / f"distill-{Path(teacher).name}"
    loss_options = drop_none(
        ce_weight=ce_weight, relation_heads=relation_heads,
        layers=None if hidden_layers is None else _parse_layer_pairs(hidden_layers),
        relation_layers=None if relation_layers is None else _parse_layer_pair(relation_layers),
    )  # fmt: skip
    result = distill(
        student_model, teacher_model, corpus or None, recipe, losses=_parse_loss_weights(losses), out=folder, valid=valid,
        logits_folder=logits_folder,
        device=device, temperature=temperature, alpha=alpha, head_pairs=_parse_head_pairs(head_pairs), **loss_options,
    )  # fmt: skip
    summary = {**result.to_dict(), "losses": losses, "teacher": teacher_model.spec.num_parameters}
    if as_json:
        print(json.dumps({**summary, "recipe": asdict(result.recipe)}, indent=2))
    else:
        show_train_result({**summary, "command": "run the same headwise distill command again"}, (), [])
    if result.stop_reason == "interrupted":
        raise typer.Exit(130)  # exit code of a command stopped by Ctrl-C


def _parse_loss_weights(text: str) -> dict[str, float]:
    """Parse losses such as `logits,maps=0.5`. The default weight is 1."""
    from headwise.errors import ArgumentError

    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise ArgumentError(
                f"--losses: the weight is not a number. Got {part.strip()!r}. Use, for example, --losses logits,maps=0.5."
            ) from None
    return weights


def _parse_head_pairs(text: str) -> str | list[tuple[str, ...]]:
    """Parse `order`, `best`, or pairs of heads such as `0.0:1.1,0.1:3.2`."""
    return [tuple(pair.split(":")) for pair in text.split(",")] if ":" in text else text


def _parse_layer_pairs(text: str) -> list[tuple[int, int]]:
    """Parse layer pairs student:teacher such as `0:2,1:5`."""
    from headwise.errors import ArgumentError

    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(
            f"--hidden-layers, --relation-layers: not a list of layer pairs student:teacher. Got {text!r}. "
            "Use, for example, 0:2,1:5."
        )
    return [(pair[0], pair[1]) for pair in pairs]


def _parse_layer_pair(text: str) -> tuple[int, int]:
    """Parse one layer pair student:teacher such as `1:5`."""
    from headwise.errors import ArgumentError

    pairs = _parse_layer_pairs(text)
    if len(pairs) > 1:
        raise ArgumentError(
            f"--relation-layers: more than one layer pair. Got {text!r}. Use one pair, for example 1:5."
        )
    return pairs[0]
