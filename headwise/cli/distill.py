"""headwise distill: a smaller model that learns from a larger one."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import JsonOption, ModelArgument, drop_none
from headwise.cli.shell.field_options import field_options
from headwise.training import Recipe


@field_options(Recipe, "recipe_options", "steps", "batch_size", "context", "learning_rate", "warmup")
def run(
    teacher: ModelArgument,
    *,
    corpus: Annotated[
        list[Path] | None, typer.Argument(help="Text files, or folders; none: the synthetic language.")
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="A model to go on with; none: a new one of the teacher's kind.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks of a new student, if not the teacher's.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads of its layers, if not the teacher's.")] = None,
    width: Annotated[int | None, typer.Option(help="Its width, if not the teacher's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; none: runs/distill-TEACHER. The same again goes on.")
    ] = None,
    losses: Annotated[
        str, typer.Option(help="logits, hidden, maps, qkv; several: logits,maps; weighed: logits,maps=0.5.")
    ] = "logits",
    temperature: Annotated[float, typer.Option(help="Of the logits.")] = 2.0,
    alpha: Annotated[float, typer.Option(help="The share of the teacher's logits, beside the text.")] = 0.9,
    head_pairs: Annotated[
        str, typer.Option(help="Which heads belong together: order, best, or 0.0:1.1,0.1:3.2.")
    ] = "best",
    ce_weight: Annotated[
        float | None, typer.Option(help="Of the text itself; none: 1 − alpha beside logits, else 1.")
    ] = None,
    hidden_layers: Annotated[
        str | None, typer.Option(help="For hidden, student:teacher: 0:2,1:5; none: spread evenly.")
    ] = None,
    relation_layers: Annotated[
        str | None, typer.Option(help="For qkv, student:teacher: 1:5; none: the last of each.")
    ] = None,
    relation_heads: Annotated[int | None, typer.Option(help="For qkv, into how many heads channels are split.")] = None,
    logits_folder: Annotated[
        Path | None, typer.Option(help="A folder for the teacher's logits, for a second run.")
    ] = None,
    valid: Annotated[Path | None, typer.Option(help="A text to evaluate on; none: the end of the text.")] = None,
    recipe_options: dict[str, Any],
    precision: Annotated[str | None, typer.Option(help="Of training: float32, bfloat16, float16 or auto.")] = None,
    teacher_precision: Annotated[str, typer.Option(help="Of the teacher: float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Another seed, another run.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    as_json: JsonOption = False,
) -> None:
    """Distill: train a student by a teacher's logits, states, attention maps or relations. Ctrl-C saves and stops."""
    import torch

    from headwise.distillation import distill
    from headwise.errors import HeadwiseError
    from headwise.training.default_synthetic_run import DEFAULT_RECIPE
    from headwise.ui.train_tables import show_train_result
    from headwise.weights import load

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if teacher_precision not in dtypes:
        raise HeadwiseError(f"a teacher is read in float32 or bfloat16, got {teacher_precision!r}.")
    teacher_model = load(teacher, dtype=dtypes[teacher_precision])
    student_model: Any = (
        teacher_model.spec.resized(layers=layers, heads=num_heads, width=width) if student is None else load(student)
    )
    if student is not None and not layers is num_heads is width is None:
        raise HeadwiseError("--layers, --heads and --width are for a new student; leave them out, or --student.")
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
        show_train_result({**summary, "command": "headwise distill, as before"}, (), [])
    if result.stop_reason == "interrupted":
        raise typer.Exit(130)  # as a shell says of what Ctrl-C ended


def _parse_loss_weights(text: str) -> dict[str, float]:
    """`logits,maps=0.5`: what is learned from, each with its weight, 1 where none is said."""
    from headwise.errors import HeadwiseError

    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise HeadwiseError(
                f"a weight is a number, as in --losses logits,maps=0.5; got {part.strip()!r}."
            ) from None
    return weights


def _parse_head_pairs(text: str) -> str | list[tuple[str, ...]]:
    """`order`, `best`, or pairs of heads."""
    return [tuple(pair.split(":")) for pair in text.split(",")] if ":" in text else text


def _parse_layer_pairs(text: str) -> list[tuple[int, int]]:
    """`0:2,1:5`: layers of the student, each with the teacher's."""
    from headwise.errors import HeadwiseError

    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise HeadwiseError(
            f"layers are pairs of numbers, the student's and the teacher's, as in 0:2,1:5; got {text!r}."
        )
    return [(pair[0], pair[1]) for pair in pairs]


def _parse_layer_pair(text: str) -> tuple[int, int]:
    """`1:5`: one layer of each."""
    from headwise.errors import HeadwiseError

    pairs = _parse_layer_pairs(text)
    if len(pairs) > 1:
        raise HeadwiseError(f"relations are learned in one layer, as in --relation-layers 1:5; got {text!r}.")
    return pairs[0]
