"""Several processes at work on one thing."""
