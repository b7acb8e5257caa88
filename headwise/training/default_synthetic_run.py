"""The default run: a small decoder learns the synthetic language from three million tokens."""

from headwise.text.corpus import Corpus
from headwise.training.recipe import Recipe

DEFAULT_RECIPE = Recipe(steps=3500, batch_size=16, learning_rate=2e-3, final_lr_fraction=0.05, rows="texts")


def default_corpora(recipe: Recipe) -> tuple[Corpus, Corpus]:
    """Return one document per training row, so that none repeats, and documents of held-out word pairs for evaluation."""
    documents = recipe.steps * recipe.batch_size
    return Corpus.synthetic(documents=documents, seed=recipe.seed), Corpus.synthetic(
        "held-out", documents=1000, seed=recipe.seed
    )
