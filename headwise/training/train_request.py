"""What is asked of a run, in one object: the model, the texts, the recipe, and the folder it is kept in."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headwise.model import Transformer
from headwise.spec import ModelSpec, preset
from headwise.text import Tokenizer
from headwise.text.corpus import Corpus
from headwise.training.default_synthetic_run import DEFAULT_RECIPE, default_corpora
from headwise.training.recipe import Recipe
from headwise.training.train_loss import LanguageLoss, MakeLoss


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A run that can be started, and started again: `headwise train` builds one, and `train` takes its fields.

    Left empty it is the default run: a small decoder learns the synthetic language, a document for every row.

    >>> TrainRequest().resolved_recipe.steps, TrainRequest().train_corpus.name
    (3500, 'the synthetic language (train, 56000 documents, seed 0)')
    >>> TrainRequest(corpus="to be or not to be").resolved_recipe.steps
    2000
    """

    model: ModelSpec | Transformer = preset("synthetic")  # noqa: RUF009 (frozen); a model that is there is trained further
    corpus: Any = None  # a text, a list of texts, a path, a Corpus; none: the synthetic language
    recipe: Recipe | None = None
    out: str | Path | None = None  # a folder for checkpoints, metrics and the model
    valid: Any = None  # to evaluate on; none: what the recipe holds out of the corpus
    tokenizer: Tokenizer | str | None = None
    loss: MakeLoss = LanguageLoss  # what the model learns from

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The recipe; where none is given, the usual one, or that of the synthetic language."""
        return self.recipe or (DEFAULT_RECIPE if self.corpus is None else Recipe())

    @cached_property
    def train_corpus(self) -> Corpus:
        """What is read."""
        return default_corpora(self.resolved_recipe)[0] if self.corpus is None else Corpus.of(self.corpus)

    @cached_property
    def valid_corpus(self) -> Corpus | None:
        """What is evaluated on, where it is not a part of what is read."""
        if self.valid is not None:
            return Corpus.of(self.valid)
        return default_corpora(self.resolved_recipe)[1] if self.corpus is None else None
