"""Declared versions of the code that determines trained models and statistics.

Increase a number in the same commit that makes the same settings produce different results. Cached models and statistics of
the old version are then computed again. Moving, renaming or reformatting code does not change a version. Each claim has a
version of its own for its measurements (`Claim.version`).
"""

from importlib.metadata import version

VERSIONS = {
    "texts": 2,  # documents of the synthetic language for a seed, and tokenization
    "training": 2,  # the model and the training step, given a spec, a recipe and rows
    "metrics": 2,  # measurements on a trained model: evaluations, maps, importance, pruning
}


def version_string(*kinds: str) -> str:
    """Return the versions of these kinds and of torch as one string.

    >>> version_string("texts", "training").rpartition(", torch")[0]
    'texts 2, training 2'
    """
    return ", ".join([*(f"{kind} {VERSIONS[kind]}" for kind in kinds), f"torch {version('torch')}"])
