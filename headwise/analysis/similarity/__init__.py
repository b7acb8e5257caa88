"""Heads beside each other."""
