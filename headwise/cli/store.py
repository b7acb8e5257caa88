"""headwise store: results that are kept on disk."""

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import JsonOption

if TYPE_CHECKING:
    from headwise.io.result_store import StoredResultEntry


def run(
    path: Annotated[bool, typer.Option("--path", help="Print only the folder of the store.")] = False,
    prune: Annotated[
        int | None,
        typer.Option(
            help="Delete the results that were not used for the longest time until the store has at most this many "
            "megabytes. 0 deletes all.",
            min=0,
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="List or delete only results of this kind: profile, causal, importance or description."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List, locate or delete the results on disk. The folder is $HEADWISE_STORE, its size limit $HEADWISE_STORE_BYTES."""
    from headwise.io.result_store import ResultStore

    store = ResultStore()
    if path:
        print(json.dumps({"path": str(store.folder)}) if as_json else store.folder)
        return
    deleted = None if prune is None else store.prune(prune * 1_000_000, kind=kind)
    results = [result for result in store.list_entries() if kind in (None, result.kind)]
    total = sum(result.nbytes for result in results)
    if as_json:
        data: dict[str, Any] = {"path": str(store.folder), "max_bytes": store.max_bytes, "nbytes": total}
        data |= {"deleted": deleted} if deleted is not None else {}
        rows = [
            {"kind": result.kind, "key": result.key, "nbytes": result.nbytes, "used": result.used, **result.description}
            for result in results
        ]
        print(json.dumps({**data, "results": rows}, indent=2))
        return
    _print(results, deleted, f"{store.folder}: {total / 1e6:.1f} of {store.max_bytes / 1e6:,.0f} MB")


def _print(results: "list[StoredResultEntry]", deleted: int | None, title: str) -> None:
    from rich.console import Console

    from headwise.ui.terminal_table import make_table

    console = Console()
    if deleted is not None:
        console.print(f"Deleted results: {deleted}", highlight=False)
    rows = [
        (
            result.kind, str(result.description.get("model", "")), _describe_settings(result), result.nbytes,
            f"{datetime.fromtimestamp(result.used):%Y-%m-%d %H:%M}", result.key[:12],
        )
        for result in results
    ]  # fmt: skip
    if not rows:
        console.print(f"{title}. No results.", highlight=False, soft_wrap=True)
        return
    console.print(make_table(title, ["kind", "model", "settings", "bytes", "last used", "key"], rows))


def _describe_settings(result: "StoredResultEntry") -> str:
    settings = {name: value for name, value in result.description.items() if name not in ("model", "weights")}
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value not in (False, None, ""))
