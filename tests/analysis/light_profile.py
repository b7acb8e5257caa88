"""A profile with `detail="light"`, which `hw.profile` does not offer. It uses the fused kernel and computes no map."""

from typing import Any

import torch

from headwise.analysis.roles.profile_result import Profile, build_profile
from headwise.analysis.roles.profile_sums import CollectOptions, collect, select_metrics
from headwise.analysis.roles.roles import assess, score
from headwise.distributed.process_group import ProcessGroup
from headwise.model import ModelProtocol, eval_mode


def light_profile(model: ModelProtocol, corpus: Any, relations: Any = None) -> Profile:
    """Profile a model without a causal test."""
    options = CollectOptions(relations=relations, detail="light")
    with eval_mode(model), torch.no_grad():
        selection = select_metrics(model, detail="light")
        sums, _ = collect(model, corpus, selection, options, ProcessGroup(0, 1, torch.device(model.device)))
    scores = score(sums.accumulator, sums.relation_metric)
    return build_profile(sums, *assess(scores, len(sums.addresses), sums.metadata))
