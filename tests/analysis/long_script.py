"""Megabytes a walk over one long text takes, in a process of its own: `python -m tests.analysis.long_script 8192`."""

import sys

import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.tasks import bare_unit
from headwise.analysis.recording.batching import Batch, make_batch
from headwise.experiments.engine.memory import rise
from headwise.model import Transformer, quiet
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer

TOKENIZER = word_tokenizer([f"w{number}" for number in range(64)])  # so few that tokens are repeated all the time
FLAGS = torch.zeros(len(TOKENIZER), 4)


def long_model() -> Transformer:
    """One head, which reads texts of any length."""
    attention = AttentionSpec(width=8, heads=1)
    spec = ModelSpec(vocab=len(TOKENIZER), context=32, layers=1, hidden=8, positions="none", attention=attention)
    return Transformer(spec).eval()


def batch_of(tokens: int) -> Batch:
    """One text."""
    ids = torch.randint(2, 64, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return make_batch([bare_unit(0, tuple(ids), TOKENIZER)])


def look(model: Transformer, tokens: int) -> None:
    """Every usual measure, over one text."""
    with torch.no_grad(), quiet(model):
        Runner(Tally(1), usual_measures(FLAGS)).read(model, [batch_of(tokens)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = long_model()
    print(rise(lambda: look(model, int(sys.argv[1])), lambda: look(model, 512)))
