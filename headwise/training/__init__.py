"""Training: recipes, the training loop, checkpoints that resume exactly."""

from headwise.training.loop import TrainResult, resume, run_request, train
from headwise.training.recipe import Recipe
from headwise.training.train_request import TrainRequest

__all__ = ["Recipe", "TrainRequest", "TrainResult", "resume", "run_request", "train"]
