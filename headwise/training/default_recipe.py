"""The default run: a small decoder learns the little language, within three million tokens."""

from headwise.text.corpus import Corpus
from headwise.training.recipe import Recipe

LITTLE = Recipe(steps=3500, batch=16, rate=2e-3, floor=0.05, rows="texts")


def little_texts(recipe: Recipe) -> tuple[Corpus, Corpus]:
    """A document for every row of a run, so that none is read twice; and others, of held-out word pairs, to evaluate on."""
    documents = recipe.steps * recipe.batch
    return Corpus.little(documents=documents, seed=recipe.seed), Corpus.little(
        "held-out", documents=1000, seed=recipe.seed
    )
