"""Experiments: sweeps over head counts, and claims about heads put to the test."""

from headwise.experiments.head_count_sweep import head_sweep
from headwise.experiments.run_claims import claims

__all__ = ["claims", "head_sweep"]
