"""Steering: directions of heads that change the behavior of a model, as data and from two sets of texts."""
