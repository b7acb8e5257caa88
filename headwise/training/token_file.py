"""A tokenized corpus as one memory-mapped file of token ids, of any size."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwise.errors import ArgumentError, FileFormatError, HeadwiseError
from headwise.io.atomic_write import atomic_folder
from headwise.text import Tokenizer
from headwise.text.corpus import Corpus

INDEX_FILE = "tokens.json"


@dataclass(frozen=True)
class TokenFiles:
    """Token ids for training and evaluation.

    Attributes:
        train: Token ids for training.
        valid: Held-out token ids.
        fingerprint: Digest of the index file.
    """

    train: np.ndarray
    valid: np.ndarray
    fingerprint: str


def write_tokens(folder: Path, train: Corpus, valid: Corpus | None, tokenizer: Tokenizer, holdout: float) -> TokenFiles:
    """Tokenize a corpus into a folder, atomically. Without `valid`, the end of the corpus is held out."""
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    with atomic_folder(folder, (INDEX_FILE,)) as new_folder:
        index: dict[str, object] = {"dtype": dtype.str, "holdout": holdout if valid is None else 0.0}
        if train.paired:
            index["pair_end_id"] = tokenizer.end_id
        for name, corpus in (("train", train), ("valid", valid)):
            if corpus is not None:
                count, digest = _write_ids(new_folder / f"{name}.bin", corpus, tokenizer, dtype)
                index[name] = {"tokens": count, "sha256": digest}
        tokenizer.save(new_folder)
        (new_folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return read_tokens(folder)


def read_tokens(folder: Path) -> TokenFiles:
    """Memory-map a folder of tokens. Raise if a file has changed."""
    try:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        dtype = np.dtype(index["dtype"])
        arrays = {
            name: _memory_map(folder / f"{name}.bin", dtype, index[name])
            for name in ("train", "valid")
            if name in index
        }
        fingerprint = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
        num_held_out = int(len(arrays["train"]) * index["holdout"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise FileFormatError(
            f"{folder}: the tokens cannot be read ({error}). Delete this folder; the next run writes it again."
        ) from None
    if "valid" in arrays:
        return TokenFiles(arrays["train"], arrays["valid"], fingerprint)
    split_at = len(arrays["train"]) - num_held_out
    if index.get("pair_end_id") is not None:  # do not split a pair
        ends = np.flatnonzero(arrays["train"] == index["pair_end_id"])[1::2] + 1
        last = len(ends) - (2 if num_held_out and len(ends) > 1 else 1)  # hold out at least one pair
        split_at = int(ends[min(int(np.searchsorted(ends, split_at)), last)])
    return TokenFiles(arrays["train"][:split_at], arrays["train"][split_at:], fingerprint)


def iter_encoded_chunks(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the ids of a corpus in chunks, with an end token after each text if the tokenizer has one."""
    end = [] if tokenizer.end_id is None else [tokenizer.end_id]
    for batch in _batch_chunks(corpus.chunks(), 256):
        encoded = tokenizer.encode_without_special_tokens([chunk.text for chunk in batch])
        for chunk, ids in zip(batch, encoded, strict=True):
            if corpus.paired and tokenizer.end_id in ids:
                raise ArgumentError(
                    f"corpus: a text of a pair contains the end token, which separates pairs. Got {chunk.text[:60]!r}…. "
                    "Remove the end token from the text."
                )
            yield [*ids, *end] if chunk.ends_text else ids


def _batch_chunks(chunks: Iterable, max_chunks: int) -> Iterator[list]:
    """Batch up to `max_chunks` chunks or about one million characters: tokenizing many short texts at once is faster."""
    batch, size = [], 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if len(batch) >= max_chunks or size >= 1 << 20:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_ids(path: Path, corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype) -> tuple[int, str]:
    count, digest = 0, hashlib.sha256()
    with open(path, "wb") as file:
        for ids in iter_encoded_chunks(corpus, tokenizer):
            data = np.asarray(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            count += len(ids)
    return count, digest.hexdigest()


def _memory_map(path: Path, dtype: np.dtype, entry: dict) -> np.ndarray:
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise FileFormatError(
                f"{path}: the file is damaged, because its checksum differs from the recorded one. "
                f"Delete the folder {path.parent}; the next run writes it again."
            )
    if entry["tokens"] == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
