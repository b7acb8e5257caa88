"""Training: recipes, the training loop, checkpoints that resume exactly."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.training.loop import DivergenceError, resume, run_request, train
    from headwise.training.model_with_loss import LanguageLoss, MakeLoss
    from headwise.training.recipe import Recipe
    from headwise.training.run_folder import last_logged_step
    from headwise.training.synthetic_evaluation import ClozeScore, synthetic_eval
    from headwise.training.train_request import TrainRequest
    from headwise.training.train_result import TrainResult

__all__ = [
    "ClozeScore",
    "DivergenceError",
    "LanguageLoss",
    "MakeLoss",
    "Recipe",
    "TrainRequest",
    "TrainResult",
    "last_logged_step",
    "resume",
    "run_request",
    "synthetic_eval",
    "train",
]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "model_with_loss": ["LanguageLoss", "MakeLoss"],
        "loop": ["DivergenceError", "resume", "run_request", "train"],
        "recipe": ["Recipe"],
        "run_folder": ["last_logged_step"],
        "synthetic_evaluation": ["ClozeScore", "synthetic_eval"],
        "train_request": ["TrainRequest"],
        "train_result": ["TrainResult"],
    },
)
