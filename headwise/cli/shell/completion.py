"""What a shell offers when a person presses tab: models, heads and roles. Install it with headwise --install-completion."""

from collections.abc import Iterable
from pathlib import Path

import typer

WEIGHTS = (".safetensors", ".gguf", ".npz")
FOLDERS = ("spec.json", "config.json", "run.json")  # one of them makes a folder a model, or a run that has one


def models(incomplete: str) -> list[str]:
    """Bundles, and what lies here: folders with a model in them, files of weights, saved profiles."""
    from headwise.io.resolve_path import BUNDLES

    start = Path(incomplete)
    folder = start if incomplete.endswith("/") else start.parent
    here = sorted(folder.iterdir()) if folder.is_dir() else []
    offered = [str(path) + "/" * path.is_dir() for path in here if path.suffix in WEIGHTS or _may_hold(path)]
    return _fitting([*BUNDLES, *offered], incomplete)


def heads(context: typer.Context, incomplete: str) -> list[str]:
    """The heads of the model that was named, and all heads of a layer; behind a comma, one more."""
    from headwise.errors import HeadwiseError

    before, comma, last = incomplete.rpartition(",")
    try:
        addresses = _addresses(str(context.params.get("model") or ""))
    except (HeadwiseError, OSError):  # nothing can be offered for what cannot be read
        return []
    offered = dict.fromkeys(f"{address.site}.*" for address in addresses) | dict.fromkeys(map(str, addresses))
    return [before + comma + one for one in _fitting(offered, last)]


def roles(incomplete: str) -> list[str]:
    """The roles a head may have: those of the tables, and those of the embedded probe set's relations."""
    from headwise.analysis.roles.prompt_roles import PROMPTED
    from headwise.analysis.roles.roles import role_names
    from headwise.text.corpus import Corpus
    from headwise.text.documents import Document

    documents = (item for item in Corpus.probe().items() if isinstance(item, Document))
    return _fitting(sorted(role_names(documents) | {role.name for role in PROMPTED}), incomplete)


def _addresses(model: str) -> Iterable:
    """The heads of a model, from its file's own table of sizes; no weights are read."""
    if model.endswith(".npz"):
        from headwise.analysis.roles.profile_result import Profile

        return Profile.load(model).addresses
    from headwise.weights.load import open_checkpoint

    return open_checkpoint(model).spec.addresses


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _may_hold(path: Path) -> bool:
    """Whether a folder is a model, or may lead to one."""
    if not path.is_dir() or path.name.startswith("."):
        return False
    return any((path / name).is_file() for name in FOLDERS) or any(one.is_dir() for one in path.iterdir())
