"""headwise profile: roles of all heads, with evidence."""

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
    DeviceOption,
    DtypeOption,
    ExecutorOption,
    ModelArgument,
    NoStoreOption,
    PlanOption,
    SensitivityOption,
    drop_none,
    load_report_inputs,
)

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile
    from headwise.model import ModelProtocol
    from headwise.spec import Address


MAX_IMAGES = 6  # images in a report


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    treebank: Annotated[
        Path | None, typer.Option(help="Documents with gold relations (.conllu, .jsonl, .tsv).")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure relations on the embedded probe set instead of CORPUS.")
    ] = False,
    show_layers: Annotated[str | None, typer.Option(help="Layers to show: 0-3, or 5,7. Default: all.")] = None,
    role: Annotated[
        str | None, typer.Option(help="Show only heads with this role.", autocompletion=completion.complete_roles)
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per chunk of plain text. Default: 512, or the context of the model."
        ),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            help="Profile a control instead of the model: random-init, random-attention or shuffled (word order)."
        ),
    ] = None,
    no_causal: Annotated[
        bool, typer.Option("--no-causal", help="Skip the causal tests by ablation. This is faster.")
    ] = False,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Also test roles that have prompts of their own, such as name mover and copy suppression."
        ),
    ] = False,
    row_stride: Annotated[
        int, typer.Option(help="For long texts: measure one of every ROW_STRIDE blocks of 64 rows.")
    ] = 1,
    only_layers: Annotated[
        str | None,
        typer.Option(
            help="Measure only these layers, such as 0-7, to profile a large model by groups. Join saved groups in Python: "
            "Profile.load(a).merge(Profile.load(b)). Default: all."
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print only the expected time and memory, without causal tests.")
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(help="Limit of the expected memory, such as '8 GB'. Batches become smaller to fit.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the profile to this file (.npz).")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="For large corpora: profile shard by shard and store results in this folder. Run again to resume."
        ),
    ] = None,
    shard_characters: Annotated[int | None, typer.Option(help="With --out: characters per shard.")] = None,
    processes: Annotated[int | None, typer.Option(help="With --out: number of parallel processes.")] = None,
    executor: ExecutorOption = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained report page with every head, such as heads.html.")
    ] = None,
    sensitivity: SensitivityOption = None,
    plan: PlanOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    no_store: NoStoreOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, one record per head.")] = False,
) -> None:
    """Assign roles to all heads of a model, with evidence and examples. MODEL may be a saved profile (.npz)."""
    from headwise.analysis.roles.profile_corpus_shards import profile_shards
    from headwise.analysis.roles.profile_result import Profile
    from headwise.errors import ArgumentError
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.weights import load

    if model.endswith(".npz") and Path(model).is_file():
        exclusive_options = (
            corpus, treebank, probe, control, max_length, save, report, out, sensitivity, plan, prompts, no_causal,
            row_stride > 1, shard_characters, processes, executor, device != "cpu", dtype, estimate, memory_limit,
            only_layers,
        )  # fmt: skip
        if any(exclusive_options):
            raise ArgumentError(
                f"{model}: a saved profile is only displayed, not computed again. Use only --show-layers, --role, --csv or "
                "--json with it, or give the model instead."
            )
        _print_profile(Profile.load(model), show_layers, role, as_csv, as_json)
        return
    _check_options(
        has_corpus=bool(corpus or treebank), control=control, out=out, report=report, only_layers=only_layers,
        memory_limit=memory_limit, has_report_inputs=bool(sensitivity or plan),
        has_shard_options=bool(shard_characters or processes or executor),
    )  # fmt: skip
    loaded = load(model, device=device, dtype=dtype)
    corpus_input, relations = _select_texts(corpus, treebank, probe=probe)
    if loaded.image_input is None:
        check_filters(loaded, show_layers, role, corpus_input, relations, prompts)  # fail before the work starts
    elif out is not None or relations is not None:
        raise ArgumentError(
            f"{model}: --treebank, --probe and --out are not supported for vision models. Use a folder of images as CORPUS."
        )
    if estimate:
        _print_estimate(loaded, corpus_input, relations, max_length, row_stride, only_layers, memory_limit, as_json)
        return
    is_rank_zero = not int(os.environ.get("RANK", "0"))  # under torchrun only the first process prints
    with show_progress() if is_rank_zero else nullcontext(False) as progress:
        profile_options: dict[str, Any] = {
            "relations": relations, "max_length": max_length, "row_stride": row_stride, "causal": not no_causal,
            "prompts": prompts, "progress": progress,
        }  # fmt: skip
        shard_options = drop_none(shard_characters=shard_characters, processes=processes, executor=executor)
        if out is None:
            profile_options |= {"memory_limit": memory_limit, "only_layers": only_layers}
            result = _profile(loaded, corpus_input, control, profile_options, use_store=not no_store)
        else:
            sharded_model = model if processes or executor else loaded
            with resume_hint_on_interrupt():
                result = profile_shards(
                    sharded_model, corpus_input, out, device=device, dtype=dtype, **shard_options, **profile_options
                )
    if not is_rank_zero:
        return
    if save is not None:
        result.save(save)
    if report is not None:
        _write_report(result, report, loaded, model, corpus_input, load_report_inputs(sensitivity, plan))
    _print_profile(result, show_layers, role, as_csv, as_json)


def _select_texts(corpus: list[str] | None, treebank: Path | None, *, probe: bool) -> tuple[Any, Any]:
    """Return the corpus, and the documents with gold relations if they are others."""
    from headwise.text.corpus import Corpus

    corpus_input = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    if treebank is not None:
        return (treebank, None) if corpus_input is None else (corpus_input, treebank)
    return corpus_input, Corpus.probe_set() if probe else None


def _print_estimate(
    model: Any,
    corpus: Any,
    relations: Any,
    max_length: int | None,
    row_stride: int,
    only_layers: str | None,
    memory_limit: str | None,
    as_json: bool,
) -> None:
    """Print the expected time and memory of a profile."""
    from headwise.analysis.roles.profile_cost_estimate import estimate_profile

    result = estimate_profile(
        model, corpus, relations=relations, max_length=max_length, row_stride=row_stride, only_layers=only_layers,
        memory_limit=memory_limit,
    )  # fmt: skip
    print(json.dumps(result.to_dict()) if as_json else result)


def _profile(model: Any, corpus: Any, control: str | None, options: dict[str, Any], *, use_store: bool) -> "Profile":
    """Profile a model, with the store if all settings but prompts and causal tests are the default ones."""
    from headwise.analysis.load_or_measure import load_or_measure_profile
    from headwise.analysis.roles.profile import profile
    from headwise.io.result_store import ResultStore

    settings = {name: options[name] for name in ("prompts", "causal", "progress")}
    defaults = {"relations": None, "max_length": None, "row_stride": 1, "memory_limit": None, "only_layers": None}
    is_default = control is None and all(options[name] == default for name, default in defaults.items())
    if use_store and is_default and model.image_input is None:
        return load_or_measure_profile(model, corpus, store=ResultStore(), **settings)
    return profile(model, corpus, control=control, **options)


def _check_options(
    *,
    has_corpus: bool,
    control: str | None,
    out: Path | None,
    report: Path | None,
    has_shard_options: bool,
    has_report_inputs: bool,
    memory_limit: str | None,
    only_layers: str | None,
) -> None:
    from headwise.errors import ArgumentError

    if out is not None and memory_limit is not None:
        raise ArgumentError("--memory-limit: not supported with --out. Use smaller chunks: --max-length.")
    if out is not None and only_layers is not None:
        raise ArgumentError("--only-layers: not supported with --out. Save each group of layers with --save FILE.npz.")
    if out is None and has_shard_options:
        raise ArgumentError(
            "--shard-characters, --processes, --executor: these options require --out. Add --out FOLDER."
        )
    if out is not None and (control or not has_corpus):
        raise ArgumentError(
            "--out: requires a corpus and excludes --control. Add files or a folder, and remove --control."
        )
    if has_report_inputs and report is None:
        raise ArgumentError("--sensitivity, --plan: shown on the report page only. Add --report heads.html.")


def _write_report(
    result: "Profile", path: Path, model: Any, name: str, corpus: Any, report_inputs: dict[str, Any]
) -> None:
    """Write the report page. It shows single texts, so the page of an encoder-decoder has no sentences."""
    from headwise.analysis.recording.read_images import read_images
    from headwise.ui.report import DEFAULT_SENTENCES

    sentences: Any = () if model.spec.kind == "encoder-decoder" else DEFAULT_SENTENCES
    if model.image_input is not None:
        sentences = list(islice(read_images(model, corpus), MAX_IMAGES))
    result.report(path, model, name=Path(name).name, sentences=sentences, **report_inputs)


def _print_profile(profile: "Profile", layers: str | None, role: str | None, as_csv: bool, as_json: bool) -> None:
    """Print the selected heads of a profile."""
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
        from headwise.ui.print_profile import show_profile, show_role

        show_profile(profile, selected) if role is None else show_role(profile, role, selected)


def check_filters(
    model: "ModelProtocol", layers: str | None, role: str | None, corpus: Any, relations: Any, prompts: bool = False
) -> None:
    """Raise if the model has no such layer, or if no head can have the role."""
    from headwise.analysis.recording.batching import reachable_hook_points
    from headwise.analysis.recording.tokenized_corpus import default_corpus
    from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES
    from headwise.analysis.roles.roles import role_names
    from headwise.errors import ArgumentError, suggest_names
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
            raise ArgumentError(f"--role {role}: this role is measured on prompts of its own. Add --prompts.")
        if role not in valid_roles:
            raise ArgumentError(f"--role {role!r}: not a role; {suggest_names(role, valid_roles)}")


def selected_heads(profile: "Profile", layers: str | None, role: str | None) -> set[str]:
    """Return the addresses of the heads to show."""
    from headwise.errors import ArgumentError

    selected = {str(address) for address in heads_in_layers(layers, profile.addresses)}
    if role is not None:
        heads_by_role = profile.heads_by_role()
        if role not in heads_by_role:
            available = (
                f"Use one of: {', '.join(heads_by_role)}" if heads_by_role else "No head of this profile has a role"
            )
            raise ArgumentError(f"--role {role!r}: no head has this role. {available}.")
        selected &= {str(address) for address in heads_by_role[role]}
    return selected


def heads_in_layers(layers: str | None, addresses: "Sequence[Address]") -> "Sequence[Address]":
    """Return the heads of the given layers, such as `0-3` or `5,7`. None selects all."""
    from headwise.spec.address import select

    return addresses if layers is None else select(",".join(f"{part}.*" for part in layers.split(",")), addresses)
