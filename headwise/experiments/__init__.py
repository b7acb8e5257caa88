"""Experiments: sweeps over head counts, and tests of claims about heads."""

from headwise.experiments.head_count_sweep import head_sweep
from headwise.experiments.run_claims import claims

__all__ = ["claims", "head_sweep"]
