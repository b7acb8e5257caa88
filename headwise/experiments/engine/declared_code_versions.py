"""What decides a run or a figure and is no setting: the code, as versions that are declared.

Raise a number when the same settings give other numbers than before, in the same commit: kept models and figures of the old
number are then made anew. What only moves, renames or tidies code leaves it alone, and nothing is trained again. A claim has
a number of its own for what it measures (`Claim.version`).
"""

from importlib.metadata import version

VERSIONS = {
    "texts": 2,  # what the synthetic language says for a seed, and how texts become tokens
    "training": 2,  # the model and what a step makes of it, from a spec, a recipe and its rows
    "metrics": 2,  # what is read off a trained model: evaluations, maps, importance, pruning
}


def version_string(*kinds: str) -> str:
    """The versions of these, and of torch, in a line.

    >>> version_string("texts", "training").rpartition(", torch")[0]
    'texts 2, training 2'
    """
    return ", ".join([*(f"{kind} {VERSIONS[kind]}" for kind in kinds), f"torch {version('torch')}"])
