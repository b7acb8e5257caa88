"""The experiments: sweeps over head counts, tasks, and one file a claim."""
