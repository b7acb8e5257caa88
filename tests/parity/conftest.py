"""One thread here too, and no progress bars."""

from tests.contract.conftest import one_thread as one_thread
from tests.parity.quiet import quiet_transformers

quiet_transformers()
