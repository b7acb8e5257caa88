"""Classes of tokens that attention may rest on or look for, as marks on entries of the vocabulary."""

import re
from functools import lru_cache

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.metric import Measure, Number, Target, WeightOn
from headwise.text import Tokenizer

CLASSES = ("delimiter", SPECIAL, "capitalised", "digit")
_DELIMITER = re.compile(r"[.,;:!?()\[\]{}\"'`\-–—…/]+\Z|\n+\Z")
_LABELS = {"delimiter": "punctuation", SPECIAL: "special tokens", "capitalised": "capitalised words", "digit": "digits"}


CLASS_NUMBERS = {
    name: Number(name, f"weight on {_LABELS[name]}", target=Target("marked", name)).three()[0] for name in CLASSES
}


def class_measures(flags: Tensor) -> list[Measure]:
    """The weight on each class; `flags` (V, 4) as `class_flags` gives them. Where a head rests is asked of all rows."""
    return [
        WeightOn(name, flags[:, place], label=CLASS_NUMBERS[name].label, column=False, everywhere=name == SPECIAL)
        for place, name in enumerate(CLASSES)
    ]


@lru_cache(maxsize=8)
def class_flags(tokenizer: Tokenizer, vocab: int) -> Tensor:
    """Which classes each token id belongs to: (V, 4) of 0 and 1, in the order of CLASSES."""
    special = {i for i in tokenizer.special.values() if i is not None}
    special |= {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    made = {name: [0.0] * vocab for name in CLASSES}
    for i in range(min(vocab, len(tokenizer))):
        text = tokenizer.backend.decode([i], skip_special_tokens=False).strip(" ")
        bare = text.removeprefix("##")
        if i in special:
            made[SPECIAL][i] = 1.0
            continue
        made["delimiter"][i] = float(bool(_DELIMITER.match(bare)))
        made["capitalised"][i] = float(bare[:1].isupper())
        made["digit"][i] = float(bare.isdigit())
    return torch.tensor([made[name] for name in CLASSES]).T.contiguous()
