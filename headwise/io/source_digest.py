"""Digest of the files of a model, to recognize a model without loading it."""

import hashlib
from pathlib import Path

from headwise.io.resolve_path import resolve_model_path


def source_digest(source: str | Path) -> str:
    """Return a digest of the content of all files of a model.

    Args:
        source: Bundle name, folder, file or hub id. For a weight file, the JSON and text files next to it count too, because
            they hold its configuration and tokenizer.
    """
    path = resolve_model_path(source)
    if path.is_file():
        siblings = [
            file for file in path.parent.iterdir() if file.suffix in (".json", ".txt", ".model") and file.is_file()
        ]
        root, files = path.parent, [path, *siblings]
    else:
        root, files = path, [file for file in path.rglob("*") if file.is_file()]
    hasher = hashlib.sha256()
    for file in sorted(set(files)):
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        hasher.update(f"{file.relative_to(root)}:{digest}\n".encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()
