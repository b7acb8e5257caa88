"""headwise profile: what every head does."""

import csv
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import (
    CorpusArgument,
    ExecutorOption,
    ModelArgument,
    PlanOption,
    SensitivityOption,
    drop_none,
    load_report_inputs,
)

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile
    from headwise.model import ModelProtocol
    from headwise.spec import Address


MAX_IMAGES = 6  # shown in a report


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    treebank: Annotated[Path | None, typer.Option(help="Documents with gold relations: .conllu, .jsonl, .tsv.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Take relations from the probe set, whatever the text.")
    ] = False,
    show_layers: Annotated[str | None, typer.Option(help="Show these layers only: 0-3, or 5,7.")] = None,
    role: Annotated[
        str | None, typer.Option(help="Show heads with this role only.", autocompletion=completion.complete_roles)
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    control: Annotated[
        str | None, typer.Option(help="random-init, random-attention or shuffled: profile this control instead.")
    ] = None,
    no_causal: Annotated[bool, typer.Option("--no-causal", help="Leave the ablations out: quicker.")] = False,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Also test roles on their own prompts: name movers, name and copy suppression, others."
        ),
    ] = False,
    row_stride: Annotated[int, typer.Option(help="For long texts: look at one block of 64 rows in so many.")] = 1,
    save: Annotated[Path | None, typer.Option(help="Write the whole profile to this file.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For large corpora: work shard by shard into this folder; run again, it goes on."),
    ] = None,
    shard_characters: Annotated[int | None, typer.Option(help="With --out: characters of a shard.")] = None,
    processes: Annotated[int | None, typer.Option(help="With --out: processes side by side.")] = None,
    executor: ExecutorOption = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page that shows every head, offline: heads.html.")
    ] = None,
    sensitivity: SensitivityOption = None,
    plan: PlanOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, a record per head.")] = False,
) -> None:
    """Say what every head of a model does, how sure that is, and what shows it. MODEL may be a saved profile, .npz."""
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.sharded_profile import profile_shards
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.weights import load

    if model.endswith(".npz") and Path(model).is_file():
        exclusive_options = (
            corpus, treebank, probe, control, max_length, save, report, out, sensitivity, plan, prompts, no_causal,
            row_stride > 1, shard_characters, processes, executor,
        )  # fmt: skip
        if any(exclusive_options):
            raise HeadwiseError(
                f"{model} is a profile that was made before; it is shown as it is, with --show-layers and --role."
            )
        _print_profile(Profile.load(model), show_layers, role, as_csv, as_json)
        return
    _check_options(
        has_corpus=bool(corpus or treebank), control=control, out=out, report=report,
        has_shard_options=bool(shard_characters or processes or executor), has_report_inputs=bool(sensitivity or plan),
    )  # fmt: skip
    loaded = load(model)
    corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    relations: Any = treebank if treebank is not None else Corpus.probe_set() if probe else None
    if treebank is not None and corpus_input is None:
        corpus_input, relations = treebank, None
    if loaded.image_input is None:
        check_filters(loaded, show_layers, role, corpus_input, relations, prompts)  # before the work begins
    elif out is not None or relations is not None:
        raise HeadwiseError(f"{model} reads pictures: give a folder of them, without relations and without --out.")
    is_rank_zero = not int(os.environ.get("RANK", "0"))  # under torchrun the first process speaks for all
    with show_progress() if is_rank_zero else nullcontext() as progress:
        profile_options: dict[str, Any] = {
            "relations": relations, "max_length": max_length, "row_stride": row_stride, "causal": not no_causal,
            "prompts": prompts,
            "progress": progress,
        }  # fmt: skip
        shard_options = drop_none(shard_characters=shard_characters, processes=processes, executor=executor)
        if out is None:
            result = profile(loaded, corpus_input, control=control, **profile_options)
        else:
            sharded_model = model if processes or executor else loaded
            with resume_hint_on_interrupt():
                result = profile_shards(sharded_model, corpus_input, out, **shard_options, **profile_options)
    if not is_rank_zero:
        return
    if save is not None:
        result.save(save)
    if report is not None:
        _write_report(result, report, loaded, model, corpus_input, load_report_inputs(sensitivity, plan))
    _print_profile(result, show_layers, role, as_csv, as_json)


def _check_options(
    *,
    has_corpus: bool,
    control: str | None,
    out: Path | None,
    report: Path | None,
    has_shard_options: bool,
    has_report_inputs: bool,
) -> None:
    from headwise.errors import HeadwiseError

    if out is None and has_shard_options:
        raise HeadwiseError(
            "--shard-characters, --processes and --executor are for work into a folder; give --out FOLDER too."
        )
    if out is not None and (control or not has_corpus):
        raise HeadwiseError("--out is for a corpus of your own, without --control; give files or a folder.")
    if has_report_inputs and report is None:
        raise HeadwiseError("--sensitivity and --plan are shown on the page; say where it goes: --report heads.html.")


def _write_report(
    result: "Profile", path: Path, model: Any, name: str, corpus: Any, report_inputs: dict[str, Any]
) -> None:
    """Write the report page. It shows one text at a time, so an encoder-decoder has no sentences."""
    from headwise.analysis.recording.input_image import read_images
    from headwise.ui.report import DEFAULT_SENTENCES

    sentences: Any = () if model.spec.kind == "encoder-decoder" else DEFAULT_SENTENCES
    if model.image_input is not None:
        sentences = list(islice(read_images(model, corpus), MAX_IMAGES))
    result.report(path, model, name=Path(name).name, sentences=sentences, **report_inputs)


def _print_profile(profile: "Profile", layers: str | None, role: str | None, as_csv: bool, as_json: bool) -> None:
    """Print some heads of a profile, or all."""
    selected = selected_heads(profile, layers, role)
    if as_json:
        heads = [head.to_dict() for head in profile if str(head.address) in selected]
        print(json.dumps({**profile.to_dict(), "heads": heads}, indent=2))
    elif as_csv:
        rows = [row for row in profile.table() if row["head"] in selected]
        writer = csv.DictWriter(sys.stdout, rows[0] if rows else ["head"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        from headwise.ui.head_tables import show_profile, show_role

        show_profile(profile, selected) if role is None else show_role(profile, role, selected)


def check_filters(
    model: "ModelProtocol", layers: str | None, role: str | None, corpus: Any, relations: Any, prompts: bool = False
) -> None:
    """Whether there are such layers, and whether there may be such a role."""
    from headwise.analysis.recording.batching import reachable_hook_points
    from headwise.analysis.recording.tokenized_corpus import default_corpus
    from headwise.analysis.roles.prompt_roles import PROMPT_ROLES
    from headwise.analysis.roles.roles import role_names
    from headwise.errors import HeadwiseError, suggest_names
    from headwise.text.annotated_document import Document
    from headwise.text.corpus import Corpus

    heads_in_layers(
        layers, [address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses]
    )
    if role is not None:
        corpora = [Corpus.of(text_source) for text_source in (corpus, relations) if text_source is not None]
        all_items = chain.from_iterable(text_source.items() for text_source in [*corpora, default_corpus(model)])
        prompted_roles = {prompted_role.name for prompted_role in PROMPT_ROLES}
        valid_roles = role_names(item for item in all_items if isinstance(item, Document)) | (
            prompted_roles if prompts else set()
        )
        if role in prompted_roles and not prompts:
            raise HeadwiseError(f"{role} is asked on prompts of its own; give --prompts too.")
        if role not in valid_roles:
            raise HeadwiseError(f"there is no role {role!r}; {suggest_names(role, valid_roles)}")


def selected_heads(profile: "Profile", layers: str | None, role: str | None) -> set[str]:
    """The heads to show."""
    from headwise.errors import HeadwiseError

    selected = {str(address) for address in heads_in_layers(layers, profile.addresses)}
    if role is not None:
        heads_by_role = profile.heads_by_role()
        if role not in heads_by_role:
            available = (
                f"roles found here: {', '.join(heads_by_role)}" if heads_by_role else "no head here has any role"
            )
            raise HeadwiseError(f"no head here has the role {role!r}; {available}.")
        selected &= {str(address) for address in heads_by_role[role]}
    return selected


def heads_in_layers(layers: str | None, addresses: "Sequence[Address]") -> "Sequence[Address]":
    """The heads of some layers, `0-3` or `5,7`; of all, if none are named."""
    from headwise.spec.address import select

    return addresses if layers is None else select(",".join(f"{part}.*" for part in layers.split(",")), addresses)
