"""Evaluation of models on tasks of the lm-evaluation-harness and on local tasks."""
