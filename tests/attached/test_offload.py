"""Models with weights that accelerate offloads: pruned copies and saved folders contain the real weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.compression import PruneRequest
from tests.attached.models import BY_NAME
from tests.attached.test_analysis import TEXTS, build

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder / "offload"))


def on_disk_by_block(model: Any, folder: Path) -> Any:
    """Offload with one hook per block."""
    return accelerate.disk_offload(model, str(folder / "offload"), preload_module_classes=["LlamaDecoderLayer"])


def by_device_map(model: Any, folder: Path) -> Any:
    """Offload some layers to disk, like `from_pretrained(device_map=…)`."""
    model.save_pretrained(folder / "plain")
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    parts |= {
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    }
    return type(model).from_pretrained(folder / "plain", device_map=parts, offload_folder=folder / "offload").eval()


def in_host_memory(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


OFFLOADS = (on_disk, on_disk_by_block, by_device_map, in_host_memory)
each_offload = pytest.mark.parametrize("offload", OFFLOADS, ids=lambda offload: offload.__name__)
Offload = Callable[[Any, Path], Any]


def is_on_meta(model: Any) -> bool:
    return any(weight.device.type == "meta" for weight in model.parameters())


@each_offload
@torch.no_grad()
def test_prune_of_an_offloaded_model_is_prune_of_the_model_in_memory(offload: Offload, tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    inputs, attached = case.inputs(), hw.attach(case.build())
    pruned = hw.prune(attached, heads="1.4,2.*", fold_mean=False)
    model = offload(case.build(), tmp_path)
    assert is_on_meta(model)
    before = model(**inputs).logits
    small = hw.prune(hw.attach(model), heads="1.4,2.*", fold_mean=False)
    assert not is_on_meta(small.model)
    assert torch.equal(small.model(**inputs).logits, pruned.model(**inputs).logits)
    assert is_on_meta(model)
    assert torch.equal(model(**inputs).logits, before)
    small.save_pretrained(tmp_path / "pruned")
    again: Any = hw.load(tmp_path / "pruned")
    assert torch.equal(again.model(**inputs).logits, small.model(**inputs).logits)
    assert again.plans == small.plans


@each_offload
@torch.no_grad()
def test_prune_of_an_offloaded_model_ranks_and_folds(offload: Offload, tmp_path: Path) -> None:
    model, tokenizer = build("llama")
    attached = hw.attach(model, tokenizer)
    plan = hw.plan_pruning(attached, PruneRequest(keep=0.5, ranking="gradient", corpus=TEXTS))
    pruned = hw.apply(plan, attached)
    offloaded = hw.attach(offload(build("llama")[0], tmp_path), tokenizer)
    again = hw.plan_pruning(offloaded, PruneRequest(keep=0.5, ranking="gradient", corpus=TEXTS))
    assert (again.pruned_heads, again.folded_biases, again.digest) == (
        plan.pruned_heads,
        plan.folded_biases,
        plan.digest,
    )
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(hw.apply(plan, offloaded)(ids), pruned(ids))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@each_offload
@torch.no_grad()
def test_save_of_an_offloaded_model_writes_its_weights(offload: Offload, tied: bool, tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    plain = case.build(tie_word_embeddings=tied)
    want = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    attached = hw.attach(offload(plain, tmp_path))
    attached.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved")
    assert again.state_dict().keys() == want.keys()
    assert all(torch.equal(tensor, want[name]) for name, tensor in again.state_dict().items())


@torch.no_grad()
def test_export_of_a_pruned_offloaded_model_fills_it_up(tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    inputs, pruned = case.inputs(), hw.attach(case.build()).prune("1.4,2.*", in_place=True).detach()
    want = pruned(**inputs).logits
    attached = hw.attach(on_disk(pruned, tmp_path))
    attached.save_pretrained(tmp_path / "small")
    small: Any = hw.load(tmp_path / "small")
    assert torch.equal(small.model(**inputs).logits, want)
    attached.save_pretrained(tmp_path / "whole", full_shape=True)
    full = type(pruned).from_pretrained(tmp_path / "whole").eval()
    assert (full(**inputs).logits - want).abs().max() < 1e-5


@each_offload
def test_cut_of_an_offloaded_model_in_place_raises(offload: Offload, tmp_path: Path) -> None:
    attached = hw.attach(offload(BY_NAME["llama"].build(), tmp_path))
    with pytest.raises(hw.HeadwiseError, match=r"Use hw\.prune"):
        attached.prune("1.4", in_place=True)


def test_attach_of_a_model_without_weights_raises() -> None:
    with torch.device("meta"):
        model = BY_NAME["llama"].build()
    with pytest.raises(hw.HeadwiseError, match="meta device"):
        hw.attach(model)
