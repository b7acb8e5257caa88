"""headwise heads: what every head does."""

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
from headwise.cli.shell.common_options import Costs, Executor, Model, Planned, Texts, given, prices

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile
    from headwise.model import AnyModel
    from headwise.spec import Address


PICTURES = 6  # shown in a report


def run(
    model: Model,
    text: Texts = None,
    treebank: Annotated[Path | None, typer.Option(help="Documents with gold relations: .conllu, .jsonl, .tsv.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Take relations from the probe set, whatever the text.")
    ] = False,
    layers: Annotated[str | None, typer.Option(help="Show these layers only: 0-3, or 5,7.")] = None,
    role: Annotated[
        str | None, typer.Option(help="Show heads with this role only.", autocompletion=completion.roles)
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
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
    every: Annotated[int, typer.Option(help="For long texts: look at one block of 64 rows in so many.")] = 1,
    save: Annotated[Path | None, typer.Option(help="Write the whole profile to this file.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For large corpora: work shard by shard into this folder; run again, it goes on."),
    ] = None,
    shard: Annotated[int | None, typer.Option(help="With --out: characters of a shard.")] = None,
    workers: Annotated[int | None, typer.Option(help="With --out: processes side by side.")] = None,
    executor: Executor = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page that shows every head, offline: heads.html.")
    ] = None,
    costs: Costs = None,
    plan: Planned = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, a record per head.")] = False,
) -> None:
    """Say what every head of a model does, how sure that is, and what shows it. MODEL may be a saved profile, .npz."""
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.shards import profile_shards
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus
    from headwise.ui.progress import going_on, show_progress
    from headwise.weights import load

    if model.endswith(".npz") and Path(model).is_file():
        asks = (text, treebank, probe, control, length, save, report, out, costs, plan, prompts, no_causal, every > 1)
        if any((*asks, shard, workers, executor)):
            raise HeadwiseError(
                f"{model} is a profile that was made before; it is shown as it is, with --layers and --role."
            )
        _tell(Profile.load(model), layers, role, as_csv, as_json)
        return
    if out is None and (shard or workers or executor):
        raise HeadwiseError("--shard, --workers and --executor are for work into a folder; give --out FOLDER too.")
    if out is not None and (control or not (text or treebank)):
        raise HeadwiseError("--out is for a corpus of your own, without --control; give files or a folder.")
    if (costs or plan) and report is None:
        raise HeadwiseError("--costs and --plan are shown on the page; say where it goes: --report heads.html.")
    loaded = load(model)
    corpus: Any = None if not text else text[0] if len(text) == 1 else [Path(one) for one in text]
    relations: Any = treebank if treebank is not None else Corpus.probe() if probe else None
    if treebank is not None and corpus is None:
        corpus, relations = treebank, None
    if loaded.pictures is None:
        check(loaded, layers, role, corpus, relations, prompts)  # before the work begins
    elif out is not None or relations is not None:
        raise HeadwiseError(f"{model} reads pictures: give a folder of them, without relations and without --out.")
    leads = not int(os.environ.get("RANK", "0"))  # under torchrun the first process speaks for all
    with show_progress() if leads else nullcontext() as progress:
        asked: dict[str, Any] = {
            "relations": relations, "longest": length, "every": every, "causal": not no_causal, "prompts": prompts,
            "progress": progress,
        }  # fmt: skip
        if out is None:
            made = profile(loaded, corpus, control=control, **asked)
        else:
            with going_on():
                apart = given(shard=shard, processes=workers, executor=executor)
                made = profile_shards(loaded if not (workers or executor) else model, corpus, out, **apart, **asked)
    if not leads:
        return
    if save is not None:
        made.save(save)
    if report is not None:
        from headwise.analysis.recording.image import read_pictures
        from headwise.ui.report import SENTENCES

        shown: Any = () if loaded.spec.kind == "encoder-decoder" else SENTENCES  # the page shows one text at a time
        shown = shown if loaded.pictures is None else list(islice(read_pictures(loaded, corpus), PICTURES))
        made.report(report, loaded, name=Path(model).name, sentences=shown, **prices(costs, plan))
    _tell(made, layers, role, as_csv, as_json)


def _tell(made: "Profile", layers: str | None, role: str | None, as_csv: bool, as_json: bool) -> None:
    """Print some heads of a profile, or all."""
    wanted = chosen(made, layers, role)
    if as_json:
        heads = [head.to_dict() for head in made if str(head.address) in wanted]
        print(json.dumps({**made.to_dict(), "heads": heads}, indent=2))
    elif as_csv:
        rows = [row for row in made.table() if row["head"] in wanted]
        writer = csv.DictWriter(sys.stdout, rows[0] if rows else ["head"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        from headwise.ui.heads_view import show_profile, show_role

        show_profile(made, wanted) if role is None else show_role(made, role, wanted)


def check(
    model: "AnyModel", layers: str | None, role: str | None, corpus: Any, relations: Any, prompts: bool = False
) -> None:
    """Whether there are such layers, and whether there may be such a role."""
    from headwise.analysis.recording.batching import read_sites
    from headwise.analysis.recording.tokenized_corpus import documents_for
    from headwise.analysis.roles.prompt_roles import PROMPTED
    from headwise.analysis.roles.roles import role_names
    from headwise.errors import HeadwiseError, close_names
    from headwise.text.corpus import Corpus
    from headwise.text.documents import Document

    in_layers(layers, [address for site in read_sites(model) for address in site.addresses])
    if role is not None:
        given = [Corpus.of(some) for some in (corpus, relations) if some is not None]
        read = chain.from_iterable(some.items() for some in [*given, documents_for(model)])
        asked = {one.name for one in PROMPTED}
        known = role_names(item for item in read if isinstance(item, Document)) | (asked if prompts else set())
        if role in asked and not prompts:
            raise HeadwiseError(f"{role} is asked on prompts of its own; give --prompts too.")
        if role not in known:
            raise HeadwiseError(f"there is no role {role!r}; {close_names(role, known)}")


def chosen(made: "Profile", layers: str | None, role: str | None) -> set[str]:
    """The heads to show."""
    from headwise.errors import HeadwiseError

    wanted = {str(address) for address in in_layers(layers, made.addresses)}
    if role is not None:
        found = made.roles()
        if role not in found:
            there = f"roles found here: {', '.join(found)}" if found else "no head here has any role"
            raise HeadwiseError(f"no head here has the role {role!r}; {there}.")
        wanted &= {str(address) for address in found[role]}
    return wanted


def in_layers(layers: str | None, addresses: "Sequence[Address]") -> "Sequence[Address]":
    """The heads of some layers, `0-3` or `5,7`; of all, if none are named."""
    from headwise.spec.address import select

    return addresses if layers is None else select(",".join(f"{part}.*" for part in layers.split(",")), addresses)
