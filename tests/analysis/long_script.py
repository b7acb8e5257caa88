"""Print the memory in MB of a metrics pass over one long text, in a separate process: `python -m tests.analysis.long_script
8192`."""

import sys

import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.task_metric import sample_from_ids
from headwise.analysis.recording.batching import TokenBatch, make_batch
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.model import Transformer, eval_mode
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer

TOKENIZER = word_tokenizer([f"w{number}" for number in range(64)])  # a small vocabulary, so that tokens repeat often
FLAGS = torch.zeros(len(TOKENIZER), 4)


def long_model() -> Transformer:
    """Make a model with one head that reads texts of any length."""
    attention = AttentionSpec(width=8, heads=1)
    spec = ModelSpec(vocab=len(TOKENIZER), context=32, layers=1, mlp_width=8, positions="none", attention=attention)
    return Transformer(spec).eval()


def batch_of(tokens: int) -> TokenBatch:
    """Make a batch of one text."""
    ids = torch.randint(2, 64, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return make_batch([sample_from_ids(0, tuple(ids), TOKENIZER)])


def run_metrics(model: Transformer, tokens: int) -> None:
    """Run all default metrics on one text."""
    with torch.no_grad(), eval_mode(model):
        MetricRunner(Accumulator(1), default_metrics(FLAGS)).run(model, [batch_of(tokens)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = long_model()
    print(peak_memory(lambda: run_metrics(model, int(sys.argv[1])), lambda: run_metrics(model, 512)))
