"""Script of each process of a group: `python -m tests.analysis.team_script FOLDER CORPUS`. A single process does all the
work."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from headwise.analysis.roles.profile import profile
from headwise.text.corpus import Corpus
from tests.analysis.constructed_heads import decoder, documents
from tests.analysis.test_merge import untrained_model

TEXTS = [document.text for document in Corpus.synthetic(documents=31, seed=2).items()]


def make_profile(kind: str) -> Any:
    """Profile documents with relations, texts and documents, or too few texts."""
    if kind == "documents":
        return profile(decoder(), documents(41))
    if kind == "texts":
        return profile(
            untrained_model(), TEXTS, relations=Corpus.synthetic("held-out", documents=9, seed=5), batch_tokens=700
        )
    return profile(untrained_model(), TEXTS[:1])


def save_profile(folder: str, kind: str) -> None:
    """Profile a model and write the result to a folder, named by the rank of the process."""
    result = make_profile(kind)
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    result.save(Path(folder) / f"{rank}.npz")
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps(result.to_dict()), encoding="utf-8"
    )  # a pipe shared by two processes would interleave their output


if __name__ == "__main__":
    save_profile(*sys.argv[1:])
