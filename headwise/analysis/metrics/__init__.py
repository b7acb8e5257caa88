"""Metrics of heads: the base classes, the built-in metrics, and the runner that computes them during forward passes."""
