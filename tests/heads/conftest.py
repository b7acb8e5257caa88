"""One thread here too."""

from tests.contract.conftest import one_thread as one_thread
