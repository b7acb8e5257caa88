"""Transformers is the oracle here: offline, without its progress bars."""

from tests.parity.quiet import quiet_transformers

quiet_transformers()
