"""Causal test of a single head, after a profile without causal tests. It costs a fraction of the tests of all heads."""

from dataclasses import replace
from typing import Any

import torch

from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.causal_test import causal_test
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_sums import (
    CollectOptions,
    RetainedTextCollector,
    ignore_progress,
    select_relation_corpus,
)
from headwise.analysis.roles.roles import RoleEvidence
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec import Address


def run_head_causal_test(
    model: ModelProtocol, profile: Profile, head: Address, corpus: Any = None, progress: Progress | None = None
) -> tuple[RoleEvidence, ...]:
    """Return the evidence for the roles of one head, with its causal tests.

    The p-values are multiplied by the number of tests of all heads (Bonferroni), so that they are never smaller than in a
    profile with causal tests, which corrects by Holm.

    Args:
        model: The model of the profile.
        profile: Profile of the model without causal tests, with default settings.
        head: Head to test.
        corpus: Corpus of the profile.
        progress: Called with stage, done and total.
    """
    options = CollectOptions(keep_texts=True)
    index, retained = profile.addresses.index(head), RetainedTextCollector(keep_for_causal_test=True)
    texts = TokenizedCorpus.of(model, corpus, options.max_length)
    documents = select_relation_corpus(model, texts, options)
    for sample in texts:
        retained.add_text(sample)
    for sample in documents or ():
        retained.add_document(sample)
    with eval_mode(model), torch.no_grad():
        evidence = causal_test(
            model, profile.addresses, profile.evidence, retained.relation_documents.samples.values(),
            retained.first_samples, int(profile.metadata["seed"]) + 1, progress or ignore_progress, only=index,
        )  # fmt: skip
    return tuple(evidence[index])


def with_head_evidence(profile: Profile, head: Address, evidence: tuple[RoleEvidence, ...]) -> Profile:
    """Return a profile with other evidence for one head."""
    index = profile.addresses.index(head)
    changed = [evidence if i == index else entries for i, entries in enumerate(profile.evidence)]
    return replace(profile, evidence=tuple(changed))
