"""Experiments. Sweeps over head counts, and the claims guides make about heads, each put to the test."""
