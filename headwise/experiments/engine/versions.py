"""What decides a run or a figure and is no setting: the code, as versions that are declared.

Raise a number when the same settings give other numbers than before, in the same commit: kept models and figures of the old
number are then made anew. What only moves, renames or tidies code leaves it alone, and nothing is trained again. A claim has
a number of its own for what it measures (`Claim.version`).
"""

from importlib.metadata import version

VERSIONS = {
    "texts": 1,  # what the little language says for a seed, and how texts become tokens
    "training": 1,  # the model and what a step makes of it, from a spec, a recipe and its rows
    "measures": 1,  # what is read off a trained model: exams, maps, worth, cuts
}


def declared(*kinds: str) -> str:
    """The versions of these, and of torch, in a line.

    >>> declared("texts", "training").rpartition(", torch")[0]
    'texts 1, training 1'
    """
    return ", ".join([*(f"{kind} {VERSIONS[kind]}" for kind in kinds), f"torch {version('torch')}"])
