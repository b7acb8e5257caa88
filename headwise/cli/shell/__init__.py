"""Shared parts of all commands: common options, examples, shell completion, interrupts and output."""
