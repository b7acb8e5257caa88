"""Which half of a corpus a text is in, for choosing or for reporting: by a hash of the text, wherever it stands.

A unit (a sentence, a document, a piece of text) falls into one of 256 buckets. Buckets are what the bootstrap draws and what
the two halves are made of; so a corpus of any size takes the same room.
"""

import hashlib

import numpy as np

BUCKETS = 256
SELECTION, REPORTING = 0, 1  # the two halves


def bucket_of_text(text: str) -> int:
    """The bucket of a text: the same on every machine, and for a text that is said twice.

    >>> bucket_of_text("to be"), bucket_of_text("or not to be")
    (160, 224)
    """
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0]  # 256 of them


def buckets_in_half(counts: np.ndarray, half: int) -> np.ndarray:
    """Which buckets are in a half, (buckets,): those that hold anything, (buckets, heads) or (buckets,), take turns.

    So both halves have something wherever two buckets do; and of shards put together the halves are those of the whole.

    >>> buckets_in_half(np.array([0, 3, 0, 2, 1, 0]), SELECTION).tolist()
    [False, True, False, False, True, False]
    """
    filled = counts.reshape(len(counts), -1).any(1)
    return filled & ((np.cumsum(filled) - 1) % 2 == half)
