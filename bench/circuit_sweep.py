"""Cost of the exact node sweep of `headwise circuit`: processor time, time, and peak memory above the loaded model.

python -m bench.circuit_sweep smollm2 --prompts 64 --threads 2
"""

import argparse
import sys
import time

import numpy as np
import torch

import headwise as hw
from bench.measure import machine
from headwise.analysis.circuits.circuit_task import PromptEncoder
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator
from headwise.analysis.circuits.node_ranking import exact_effects
from headwise.analysis.circuits.shipped_tasks import make_shipped_task
from headwise.analysis.recording.batching import tokenizer_of
from headwise.experiments.engine.peak_process_memory import peak_memory


def main() -> int:
    """Print time and memory for the nodes of a few late layers, and for all nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="induction")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = hw.load(options.model)
    encoder = PromptEncoder(tokenizer_of(model))
    task = make_shipped_task(options.task, options.prompts, encoder, 0)
    prompts = [encoder.encode(pair) for pair in task.prompts[: options.prompts]]
    nodes = ModelNodes.of(model)
    base = np.ones(len(nodes), bool)
    tokens = sum(len(row) for prompt in prompts for row in prompt.clean_rows)
    print(f"{machine()}; {len(prompts)} prompts, {tokens} tokens, {options.threads} threads", flush=True)
    late = [i for i, layer in enumerate(nodes.layers) if layer >= 0.9 * max(nodes.layers)]
    for candidates in (late, list(range(len(nodes)))):
        start, wall = time.process_time(), time.perf_counter()
        memory = peak_memory(lambda: exact_effects(NodeEvaluator(model, nodes, prompts), candidates, base))  # noqa: B023
        seconds, elapsed = time.process_time() - start, time.perf_counter() - wall
        print(
            f"{len(candidates)} nodes: {elapsed:.0f} s, {seconds:.0f} s of processor time, {memory:.0f} MB", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
