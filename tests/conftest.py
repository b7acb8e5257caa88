"""Each test process uses one thread by default, because several run in parallel and results depend on how sums are split.

With HEADWISE_TEST_SHIFT=8 every weight starts 8 bytes after a multiple of 64, as a memory-mapped weight may. Only tests of
addresses may depend on it. `make test-cpus` runs with it.
"""

import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HEADWISE_MATMUL", "torch")  # a product chosen by its time may differ from run to run

import pytest
import torch

if TYPE_CHECKING:
    from tests.distributed.process_fixtures import WorkerGroup

SHIFT = int(os.environ.get("HEADWISE_TEST_SHIFT", "0"))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with equal strides to an address SHIFT bytes after a multiple of 64."""
    room = torch.empty(tensor.nbytes + SHIFT, dtype=torch.uint8)[SHIFT:].view(tensor.dtype)
    return room.as_strided(tensor.shape, torch.empty_like(tensor).stride()).copy_(tensor)


def shift(param: torch.nn.Parameter | None) -> None:
    if param is not None and param.device.type == "cpu" and param.data_ptr() % 64 != SHIFT:
        param.data = shifted(param.data)


if SHIFT:  # wherever a weight comes into a module, changes its type or is copied
    Module, Parameter = torch.nn.Module, torch.nn.Parameter
    register, apply, copy = Module.register_parameter, Module._apply, Parameter.__deepcopy__

    def register_shifted(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        shift(param)

    def apply_shifted(self: torch.nn.Module, *arguments: Any, **kwargs: Any) -> torch.nn.Module:
        module = apply(self, *arguments, **kwargs)
        for param in module.parameters():
            shift(param)
        return module

    def copy_shifted(self: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        parameter: Any = copy(self, memo)
        shift(parameter)
        return parameter

    Module.register_parameter, Module._apply, Parameter.__deepcopy__ = register_shifted, apply_shifted, copy_shifted


STORES = Path(tempfile.gettempdir()) / f"headwise-test-results-{os.getpid()}"


@pytest.fixture(autouse=True)
def empty_result_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a result store of its own, whose folder does not exist yet."""
    monkeypatch.setenv("HEADWISE_STORE", str(STORES / uuid.uuid4().hex))


@pytest.fixture(autouse=True)
def closed_hooks() -> Iterator[None]:
    """Start each test without edits and listeners, and fail a test that leaves one open."""
    from headwise.heads.hook_point import HOOKS, set_open_hooks

    set_open_hooks(HOOKS)
    yield
    after = HOOKS.now
    set_open_hooks(HOOKS)
    assert after is HOOKS, "the test left an edit or a listener open"


def pytest_unconfigure() -> None:
    shutil.rmtree(STORES, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Freeze the collected tests, so that the garbage collector does not scan them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def lab_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of trained models for all test processes, to be used under its lock: who comes second trains nothing."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "lab"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def two() -> Iterator["WorkerGroup"]:
    """Two processes that know of each other, started by the first test that needs them."""
    from tests.distributed.process_fixtures import WorkerGroup

    group = WorkerGroup(2)
    yield group
    group.stop()


@pytest.fixture
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile on 24 documents, for tests that do not depend on the numbers."""
    from headwise.analysis.recording import tokenized_corpus
    from headwise.text.annotated_document import Document
    from headwise.text.corpus import Corpus

    original = tokenized_corpus.default_corpus

    def subset(model: Any) -> Corpus:
        texts = [item if isinstance(item, Document) else item.text for item in original(model).items()]
        return Corpus.of(
            texts[:: max(1, len(texts) // tokenized_corpus.DEFAULT_DOCUMENTS)][: tokenized_corpus.DEFAULT_DOCUMENTS]
        )

    monkeypatch.setattr(tokenized_corpus, "DEFAULT_DOCUMENTS", 24)
    monkeypatch.setattr(tokenized_corpus, "default_corpus", subset)


@pytest.fixture
def straight() -> None:
    """For tests that ask where weights lie."""
    if SHIFT:
        pytest.skip("weights are shifted on purpose")
