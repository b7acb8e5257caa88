"""The default run: a small decoder learns the little language, within three million tokens."""

from headwise.text.corpus import Corpus
from headwise.train.recipe import Recipe

LITTLE = Recipe(steps=2900, batch=8, rate=2e-3, floor=0.05)
WORDS = 45  # fewer than a document has on average, so that there are always enough


def little_texts(recipe: Recipe, context: int) -> tuple[Corpus, Corpus]:
    """As many documents as a run can read without reading one twice, and others, of held-out word pairs, to evaluate on."""
    documents = recipe.steps * recipe.batch * (recipe.context or context) // WORDS + 1
    return Corpus.little(documents=documents, seed=recipe.seed), Corpus.little(
        "held-out", documents=1000, seed=recipe.seed
    )
