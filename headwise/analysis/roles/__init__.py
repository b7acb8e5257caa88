"""Profiles: metrics and roles of every head over a corpus, with their evidence; saving, merging and training history."""
