"""No progress bars."""

from tests.parity.silence_logging import quiet_transformers

quiet_transformers()
