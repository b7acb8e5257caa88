"""Cache of teacher logits on disk: the k largest logits per token and the log-probability of all other tokens."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from headwise.errors import FileFormatError
from headwise.io.atomic_write import write_atomic

METADATA_FILE = "teacher.json"
FORMAT = 2  # of the cache folder


class TopLogits(NamedTuple):
    """The k largest logits of n tokens, as log-probabilities at a temperature.

    Attributes:
        log_probs: Log-probabilities of the k largest logits, (n, k).
        ids: Their token ids, (n, k).
        rest_log_prob: Log-probability of all other tokens together, (n,). −inf if k is the vocabulary size.
    """

    log_probs: Tensor
    ids: Tensor
    rest_log_prob: Tensor


class TeacherLogitsCache:
    """Folder of teacher logits with one file per batch. It is valid for one teacher, one k and one temperature."""

    def __init__(self, folder: Path, k: int, temperature: float, teacher: str) -> None:
        self.folder, self.k, self.temperature = folder, k, temperature
        metadata = {"format": FORMAT, "teacher": teacher, "top_k": k, "temperature": temperature}
        metadata_path = folder / METADATA_FILE
        if metadata_path.is_file():
            stored = json.loads(metadata_path.read_text(encoding="utf-8"))
            if stored.get("format", 1) != FORMAT:
                raise FileFormatError(
                    f"{folder}: teacher logits of format {stored.get('format', 1)}. This version reads format {FORMAT}. "
                    "Store them again in another folder: headwise distill … --logits-folder FOLDER."
                )
            if stored != metadata:
                raise FileFormatError(
                    f"{folder}: this folder has logits of another teacher, top_k or temperature. "
                    f"This run uses top_k={k} and temperature={temperature}. Use another folder."
                )
        elif folder.exists() and any(folder.iterdir()):
            raise FileFormatError(f"{folder}: it exists and has no teacher logits. Use an empty or a new folder.")
        else:
            write_atomic(metadata_path, json.dumps(metadata, indent=2).encode())

    def get_or_compute(self, batch: Iterable[Tensor], compute_logits: Callable[[], Tensor]) -> TopLogits:
        """Return the cached logits of a batch. If there are none, run the teacher and cache its logits."""
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
    """Return the k largest logits of each token: (n, V) → (n, k).

    >>> top_logits = top_k_log_probs(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), k=2, temperature=1.0)
    >>> top_logits.log_probs.exp().tolist(), round(float(top_logits.rest_log_prob.exp()), 3)
    ([[0.25, 0.25]], 0.5)
    """
    log_probs = logits.div(temperature).log_softmax(-1)
    top_log_probs, ids = log_probs.topk(min(k, log_probs.shape[-1]), -1)
    masked_log_probs = log_probs.scatter(-1, ids, -torch.inf)
    return TopLogits(top_log_probs, ids, masked_log_probs.logsumexp(-1))
