"""Split a corpus by a hash of each text into a half for selection and a half for reporting.

A sample (a sentence, a document, a chunk of text) is assigned to one of 256 buckets, wherever it occurs. The bootstrap
resamples buckets, and each half is a set of buckets. So memory does not depend on the size of the corpus.
"""

import hashlib

import numpy as np

BUCKETS = 256
SELECTION, REPORTING = 0, 1  # the two halves


def bucket_of_text(text: str) -> int:
    """Return the bucket of a text. It is the same on every machine and for every copy of the text.

    >>> bucket_of_text("to be"), bucket_of_text("or not to be")
    (160, 224)
    """
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0]  # one byte: 256 buckets


def buckets_in_half(counts: np.ndarray, half: int) -> np.ndarray:
    """Return a mask of the buckets in one half, (buckets,).

    Buckets with a nonzero count are assigned to the halves alternately. So both halves have data if at least two buckets
    do, and merged shards have the same halves as the full corpus.

    Args:
        counts: Row counts, (buckets, heads) or (buckets,).
        half: SELECTION or REPORTING.

    >>> buckets_in_half(np.array([0, 3, 0, 2, 1, 0]), SELECTION).tolist()
    [False, True, False, False, True, False]
    """
    filled = counts.reshape(len(counts), -1).any(1)
    return filled & ((np.cumsum(filled) - 1) % 2 == half)
