"""A corpus as one long row of token ids in a file, mapped into memory: any size, none of it held."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_folder
from headwise.text import Tokenizer
from headwise.text.corpus import Corpus

INDEX = "tokens.json"


@dataclass(frozen=True)
class Tokens:
    """What is trained on and what is held out: two rows of ids."""

    train: np.ndarray
    valid: np.ndarray
    fingerprint: str


def write_tokens(folder: Path, train: Corpus, valid: Corpus | None, tokenizer: Tokenizer, holdout: float) -> Tokens:
    """Tokenize into a folder, whole or not at all; without `valid`, the end of the text is held out."""
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    with whole_folder(folder, (INDEX,)) as new:
        index: dict[str, object] = {"dtype": dtype.str, "holdout": holdout if valid is None else 0.0}
        if train.paired:
            index["pairs end"] = tokenizer.end
        for name, corpus in (("train", train), ("valid", valid)):
            if corpus is not None:
                count, digest = _write(new / f"{name}.bin", corpus, tokenizer, dtype)
                index[name] = {"tokens": count, "sha256": digest}
        tokenizer.save(new)
        (new / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return read_tokens(folder)


def read_tokens(folder: Path) -> Tokens:
    """Map a folder written before; a file that changed since is refused."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        dtype = np.dtype(index["dtype"])
        rows = {name: _map(folder / f"{name}.bin", dtype, index[name]) for name in ("train", "valid") if name in index}
        fingerprint = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
        held = int(len(rows["train"]) * index["holdout"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise HeadwiseError(
            f"the tokens in {folder} cannot be read ({error}); delete that folder to make them anew."
        ) from None
    if "valid" in rows:
        return Tokens(rows["train"], rows["valid"], fingerprint)
    cut = len(rows["train"]) - held
    if index.get("pairs end") is not None:  # no pair is torn apart
        ends = np.flatnonzero(rows["train"] == index["pairs end"])[1::2] + 1
        last = len(ends) - (2 if held and len(ends) > 1 else 1)  # where any are held out, one pair is
        cut = int(ends[min(int(np.searchsorted(ends, cut)), last)])
    return Tokens(rows["train"][:cut], rows["train"][cut:], fingerprint)


def encode(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The ids of a corpus, piece by piece, an end token behind each text where the tokenizer has one."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    for some in _batched(corpus.pieces(), 256):
        encoded = tokenizer.encode_texts([piece.text for piece in some])
        for piece, ids in zip(some, encoded, strict=True):
            if corpus.paired and tokenizer.end in ids:
                raise HeadwiseError(
                    f"a text of a pair holds the end token itself, so pairs cannot be told apart: {piece.text[:60]!r}…; "
                    f"take it out."
                )
            yield [*ids, *end] if piece.ends else ids


def _batched(pieces: Iterable, most: int) -> Iterator[list]:
    """Short texts many at a time, which is quicker; long ones soon."""
    some, size = [], 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.text)
        if len(some) >= most or size >= 1 << 20:
            yield some
            some, size = [], 0
    if some:
        yield some


def _write(path: Path, corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype) -> tuple[int, str]:
    count, digest = 0, hashlib.sha256()
    with open(path, "wb") as file:
        for ids in encode(corpus, tokenizer):
            data = np.asarray(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            count += len(ids)
    return count, digest.hexdigest()


def _map(path: Path, dtype: np.dtype, noted: dict) -> np.ndarray:
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != noted["sha256"]:
            raise HeadwiseError(
                f"{path} is damaged: its checksum is not the one noted; delete its folder to make it anew."
            )
    if noted["tokens"] == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
