"""What each process of a team runs: python -m tests.analysis.team_script FOLDER CORPUS; alone it does all the work."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from headwise.analysis.roles.profile import profile
from headwise.text.corpus import Corpus
from tests.analysis.constructed_heads import decoder, documents
from tests.analysis.test_merge import untrained

TEXTS = [document.text for document in Corpus.little(documents=31, seed=2).items()]


def make(which: str) -> Any:
    """A profile of documents with relations, of texts beside documents, or of too few texts."""
    if which == "documents":
        return profile(decoder(), documents(41))
    if which == "texts":
        return profile(untrained(), TEXTS, relations=Corpus.little("held-out", documents=9, seed=5), tokens=700)
    return profile(untrained(), TEXTS[:1])


def keep(folder: str, which: str) -> None:
    """Make it and write it into a folder, each process under its number."""
    made = make(which)
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    made.save(Path(folder) / f"{rank}.npz")
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps(made.to_dict()), encoding="utf-8"
    )  # a pipe of two would mix them


if __name__ == "__main__":
    keep(*sys.argv[1:])
