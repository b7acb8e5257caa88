"""Transformers is the reference here, offline and without progress bars."""

from tests.parity.silence_logging import quiet_transformers

quiet_transformers()
