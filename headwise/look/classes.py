"""Classes of tokens that attention may rest on or look for, as flags per entry of the vocabulary."""

import re
from functools import lru_cache

import torch
from torch import Tensor

from headwise.text import Tokenizer

CLASSES = ("delimiter", "special", "capitalised", "digit")
_DELIMITER = re.compile(r"[.,;:!?()\[\]{}\"'`\-–—…/]+\Z|\n+\Z")


@lru_cache(maxsize=8)
def class_flags(tokenizer: Tokenizer, vocab: int) -> Tensor:
    """Which classes each token id belongs to: (V, 4) of 0 and 1."""
    flags = torch.zeros(vocab, len(CLASSES))
    special = {i for i in tokenizer.special.values() if i is not None}
    special |= {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    for i in range(min(vocab, len(tokenizer))):
        text = tokenizer.backend.decode([i], skip_special_tokens=False).strip(" ")
        bare = text.removeprefix("##")
        if i in special:
            flags[i, 1] = 1
            continue
        flags[i, 0] = bool(_DELIMITER.match(bare))
        flags[i, 2] = bare[:1].isupper()
        flags[i, 3] = bare.isdigit()
    return flags
