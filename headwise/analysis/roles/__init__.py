"""Every head over a corpus: measures, roles with their evidence, saved, merged, and over training."""
