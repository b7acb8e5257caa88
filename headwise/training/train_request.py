"""The arguments of a training run in one object: model, texts, recipe and folder."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headwise.model import ModelProtocol
from headwise.spec import ModelSpec, preset
from headwise.text import Tokenizer
from headwise.text.corpus import Corpus
from headwise.training.default_synthetic_run import DEFAULT_RECIPE, default_corpora
from headwise.training.model_with_loss import LanguageLoss, MakeLoss
from headwise.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """Arguments of a run that can be started and resumed. `headwise train` builds one, and `train` has the same arguments.

    Without arguments it is the default run: a small decoder learns the synthetic language, one document per row.

    Attributes:
        model: A spec for a new model, or a model to train further.
        corpus: A text, a list of texts, a path or a Corpus. None: the synthetic language.
        recipe: Numbers of the run. None: the default recipe.
        out: Run folder for checkpoints, metrics and the model. None writes nothing.
        valid: Held-out texts. None: the part of the corpus that the recipe holds out.
        tokenizer: A tokenizer, or "byte", "character", "word" or "bpe:4096". None: as in `train`.
        loss: Function from the model to its loss.

    >>> TrainRequest().resolved_recipe.steps, TrainRequest().train_corpus.name
    (3500, 'the synthetic language (train, 56000 documents, seed 0)')
    >>> TrainRequest(corpus="to be or not to be").resolved_recipe.steps
    2000
    """

    model: ModelSpec | ModelProtocol = preset("synthetic")  # noqa: RUF009 (frozen)
    corpus: Any = None
    recipe: Recipe | None = None
    out: str | Path | None = None
    valid: Any = None
    tokenizer: Tokenizer | str | None = None
    loss: MakeLoss = LanguageLoss

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The given recipe, or the default one for the corpus."""
        return self.recipe or (DEFAULT_RECIPE if self.corpus is None else Recipe())

    @cached_property
    def train_corpus(self) -> Corpus:
        """Texts for training."""
        return default_corpora(self.resolved_recipe)[0] if self.corpus is None else Corpus.of(self.corpus)

    @cached_property
    def valid_corpus(self) -> Corpus | None:
        """Texts for evaluation. None if a part of the training corpus is held out."""
        if self.valid is not None:
            return Corpus.of(self.valid)
        return default_corpora(self.resolved_recipe)[1] if self.corpus is None else None
