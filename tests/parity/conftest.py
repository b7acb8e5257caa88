"""Silences the progress bars of transformers."""

from tests.parity.silence_logging import quiet_transformers

quiet_transformers()
