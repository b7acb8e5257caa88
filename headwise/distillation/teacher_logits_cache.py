"""A teacher's logits on disk: the largest of each token and what the rest has, so that a second run need not ask again."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_file

NOTE = "teacher.json"


class Kept(NamedTuple):
    """Of n tokens the largest logits, divided by the temperature and normed, their ids, and the log of what the rest has."""

    logs: Tensor  # (n, k)
    ids: Tensor  # (n, k)
    rest: Tensor  # (n,), −inf where nothing is left


class KeptLogits:
    """A folder of them, a file for every batch of ids; it belongs to one teacher, one k and one temperature."""

    def __init__(self, folder: Path, k: int, temperature: float, teacher: str) -> None:
        self.folder, self.k, self.temperature = folder, k, temperature
        about = {"teacher": teacher, "k": k, "temperature": temperature}
        note = folder / NOTE
        if note.is_file():
            if json.loads(note.read_text(encoding="utf-8")) != about:
                raise HeadwiseError(
                    f"{folder} keeps the logits of another teacher, k or temperature; choose another folder."
                )
        elif folder.exists() and any(folder.iterdir()):
            raise HeadwiseError(f"{folder} is there already and holds something else; choose another folder.")
        else:
            whole_file(note, json.dumps(about, indent=2).encode())

    def take(self, batch: Iterable[Tensor], ask: Callable[[], Tensor]) -> Kept:
        """What is known of a batch, all that the teacher reads; it is asked, and its answer kept, where nothing is."""
        key = hashlib.blake2b(digest_size=16)
        parts = list(batch)
        for part in parts:
            key.update(str(tuple(part.shape)).encode())
            key.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
        path = self.folder / f"{key.hexdigest()}.safetensors"
        if path.is_file():
            read = {name: value.to(parts[0].device) for name, value in load_file(path).items()}
            return Kept(read["logs"], read["ids"].long(), read["rest"])
        made = top(ask(), self.k, self.temperature)
        whole_file(path, save({"logs": made.logs.cpu(), "ids": made.ids.int().cpu(), "rest": made.rest.cpu()}))
        return made


def top(logits: Tensor, k: int, temperature: float) -> Kept:
    """(n, V) → the k largest of each token.

    >>> kept = top(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), k=2, temperature=1.0)
    >>> kept.logs.exp().tolist(), round(float(kept.rest.exp()), 3)
    ([[0.25, 0.25]], 0.5)
    """
    logs = logits.div(temperature).log_softmax(-1)
    largest, ids = logs.topk(min(k, logs.shape[-1]), -1)
    others = logs.scatter(-1, ids, -torch.inf)
    return Kept(largest, ids, others.logsumexp(-1))
