"""No progress bars."""

from tests.parity.quiet import quiet_transformers

quiet_transformers()
