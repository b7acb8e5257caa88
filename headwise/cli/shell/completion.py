"""Shell completion of models, heads and roles. Install it with headwise --install-completion."""

from collections.abc import Iterable
from pathlib import Path

import typer

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".npz")
MODEL_FILES = ("spec.json", "config.json", "run.json")  # a folder with one of these is a model or a run


def complete_models(incomplete: str) -> list[str]:
    """Complete bundles, folders with a model, weight files and saved profiles."""
    from headwise.io.resolve_path import BUNDLES

    start = Path(incomplete)
    folder = start if incomplete.endswith("/") else start.parent
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    candidates = [
        str(path) + "/" * path.is_dir() for path in paths if path.suffix in WEIGHT_SUFFIXES or _may_contain_model(path)
    ]
    return _matching([*BUNDLES, *candidates], incomplete)


def complete_heads(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the heads of the given model and the patterns of its layers. After a comma, complete the next one."""
    from headwise.errors import HeadwiseError

    prefix, comma, partial = incomplete.rpartition(",")
    try:
        addresses = _addresses(str(context.params.get("model") or ""))
    except (HeadwiseError, OSError):  # no candidates for an unreadable model
        return []
    candidates = dict.fromkeys(f"{address.layer_address}.*" for address in addresses) | dict.fromkeys(
        map(str, addresses)
    )
    return [prefix + comma + candidate for candidate in _matching(candidates, partial)]


def complete_roles(incomplete: str) -> list[str]:
    """Complete role names, including the relations of the embedded probe set."""
    from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES
    from headwise.analysis.roles.roles import role_names
    from headwise.text.annotated_document import Document
    from headwise.text.corpus import Corpus

    documents = (item for item in Corpus.probe_set().items() if isinstance(item, Document))
    return _matching(sorted(role_names(documents) | {role.name for role in PROMPT_ROLES}), incomplete)


def _addresses(model: str) -> Iterable:
    """Return the heads of a model, read from file headers without loading weights."""
    if model.endswith(".npz"):
        from headwise.analysis.roles.profile_result import Profile

        return Profile.load(model).addresses
    from headwise.weights.load import open_checkpoint

    return open_checkpoint(model).spec.head_addresses


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _may_contain_model(path: Path) -> bool:
    """Whether a folder is a model or has subfolders that may be."""
    if not path.is_dir() or path.name.startswith("."):
        return False
    return any((path / name).is_file() for name in MODEL_FILES) or any(child.is_dir() for child in path.iterdir())
