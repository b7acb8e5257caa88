"""Similarity of heads within one model and between two models."""
