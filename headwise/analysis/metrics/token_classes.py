"""Classes of tokens (punctuation, special, capitalized, digits) as features of vocabulary entries."""

import re
from functools import lru_cache

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.metric import AttentionToTokens, Metric, MetricSpec, RoleTarget
from headwise.text import Tokenizer

CLASSES = ("delimiter", SPECIAL, "capitalized", "digit")
_DELIMITER = re.compile(r"[.,;:!?()\[\]{}\"'`\-–—…/]+\Z|\n+\Z")
_LABELS = {"delimiter": "punctuation", SPECIAL: "special tokens", "capitalized": "capitalized words", "digit": "digits"}


CLASS_SPECS = {
    name: MetricSpec(name, f"weight on {_LABELS[name]}", target=RoleTarget("feature", name)).with_variants()[0]
    for name in CLASSES
}


def token_class_metrics(flags: Tensor) -> list[Metric]:
    """Return a metric for the weight on each class. `flags` (V, 4) is the result of `token_class_flags`.

    For special tokens, which serve as attention sinks, all rows count.
    """
    return [
        AttentionToTokens(
            name, flags[:, column], label=CLASS_SPECS[name].label, in_table=False, all_rows=name == SPECIAL
        )
        for column, name in enumerate(CLASSES)
    ]


@lru_cache(maxsize=8)
def token_class_flags(tokenizer: Tokenizer, vocab: int) -> Tensor:
    """Return the classes of each token id, (V, 4) of 0 and 1, in the order of CLASSES."""
    special = {i for i in tokenizer.special.values() if i is not None}
    special |= {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    flags = {name: [0.0] * vocab for name in CLASSES}
    for i in range(min(vocab, len(tokenizer))):
        text = tokenizer.backend.decode([i], skip_special_tokens=False).strip(" ")
        stripped = text.removeprefix("##")
        if i in special:
            flags[SPECIAL][i] = 1.0
            continue
        flags["delimiter"][i] = float(bool(_DELIMITER.match(stripped)))
        flags["capitalized"][i] = float(stripped[:1].isupper())
        flags["digit"][i] = float(stripped.isdigit())
    return torch.tensor([flags[name] for name in CLASSES], device="cpu").T.contiguous()
