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
from headwise.io.atomic_write import write_atomic

METADATA_FILE = "teacher.json"
FORMAT = 2  # of the folder


class TopLogits(NamedTuple):
    """Of n tokens the largest logits, divided by the temperature and normed, their ids, and the log of what the rest has."""

    log_probs: Tensor  # (n, k)
    ids: Tensor  # (n, k)
    rest_log_prob: Tensor  # (n,), −inf where nothing is left


class TeacherLogitsCache:
    """A folder of them, a file for every batch of ids; it belongs to one teacher, one k and one temperature."""

    def __init__(self, folder: Path, k: int, temperature: float, teacher: str) -> None:
        self.folder, self.k, self.temperature = folder, k, temperature
        metadata = {"format": FORMAT, "teacher": teacher, "top_k": k, "temperature": temperature}
        metadata_path = folder / METADATA_FILE
        if metadata_path.is_file():
            stored = json.loads(metadata_path.read_text(encoding="utf-8"))
            if stored.get("format", 1) != FORMAT:
                raise HeadwiseError(
                    f"{folder} has logits of format {stored.get('format', 1)}, this version reads format {FORMAT}. Keep them "
                    "again in another folder: headwise distill … --logits-folder FOLDER."
                )
            if stored != metadata:
                raise HeadwiseError(
                    f"{folder} keeps the logits of another teacher, top_k or temperature; choose another folder."
                )
        elif folder.exists() and any(folder.iterdir()):
            raise HeadwiseError(f"{folder} is there already and holds something else; choose another folder.")
        else:
            write_atomic(metadata_path, json.dumps(metadata, indent=2).encode())

    def get_or_compute(self, batch: Iterable[Tensor], compute_logits: Callable[[], Tensor]) -> TopLogits:
        """What is known of a batch, all that the teacher reads; it is asked, and its answer kept, where nothing is."""
        key = hashlib.blake2b(digest_size=16)
        tensors = list(batch)
        for tensor in tensors:
            key.update(str(tuple(tensor.shape)).encode())
            key.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        path = self.folder / f"{key.hexdigest()}.safetensors"
        if path.is_file():
            stored = {name: value.to(tensors[0].device) for name, value in load_file(path).items()}
            return TopLogits(stored["log_probs"], stored["ids"].long(), stored["rest_log_prob"])
        computed = top_k_log_probs(compute_logits(), self.k, self.temperature)
        write_atomic(
            path,
            save(
                {
                    "log_probs": computed.log_probs.cpu(),
                    "ids": computed.ids.int().cpu(),
                    "rest_log_prob": computed.rest_log_prob.cpu(),
                }
            ),
        )
        return computed


def top_k_log_probs(logits: Tensor, k: int, temperature: float) -> TopLogits:
    """(n, V) → the k largest of each token.

    >>> top_logits = top_k_log_probs(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), k=2, temperature=1.0)
    >>> top_logits.log_probs.exp().tolist(), round(float(top_logits.rest_log_prob.exp()), 3)
    ([[0.25, 0.25]], 0.5)
    """
    log_probs = logits.div(temperature).log_softmax(-1)
    top_log_probs, ids = log_probs.topk(min(k, log_probs.shape[-1]), -1)
    masked_log_probs = log_probs.scatter(-1, ids, -torch.inf)
    return TopLogits(top_log_probs, ids, masked_log_probs.logsumexp(-1))
