"""Benchmarks. The docstring of each module shows how to run it."""
