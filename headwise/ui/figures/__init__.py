"""Figures for people and papers: each is a `Drawing`, a picture and the numbers it shows."""
