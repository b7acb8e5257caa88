"""How far a layer sees is what its site says, as its masks have it; on our own loading of a model too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.heads.hook_point import Seen
from tests.attached.models import BY_NAME, CASES, Case, T
from tests.attached.test_analysis import saved
from tests.contract.layers import MODELS, make_model

# As configurations say: 5 keys back, the query's own included; ModernBERT has 6 around a token, 3 to each side.
KNOWN = {
    "mistral": (5, 5, 5),
    "gemma3": (5, 5, 5),  # every sixth layer sees all
    "qwen2_windows": (None, 5, 5),
    "modernbert": (None, 4, 4),
    "gpt_oss": (5, None, 5),
    "gemma2": (5, None, 5),
    "gpt_neo": (None, 5, None),
}


def farthest(seen: Seen) -> int:
    """How many positions away the farthest key is that any query sees."""
    mask = seen.terms.mask
    n = seen.q.shape[2]
    allowed = torch.ones(1, 1, n, n, dtype=torch.bool) if mask is None else mask.dense(n, n)
    rows, columns = allowed.any(0).any(0).nonzero(as_tuple=True)
    return int((rows - columns).abs().max())


@pytest.mark.parametrize("case", [c for c in CASES if c.kind in ("decoder", "encoder")], ids=lambda case: case.name)
def test_a_site_knows_how_far_it_sees(case: Case) -> None:
    theirs = hw.attach(case.build())
    windows = tuple(site.window for site in theirs.sites())
    assert windows == KNOWN.get(case.name, (None, None, None))
    assert windows == tuple(theirs.spec.attention_at(site.address).window for site in theirs.sites())
    calls: list[Seen] = []
    for site in theirs.sites():
        with site.listen(calls.append), torch.no_grad():
            theirs(case.inputs()["input_ids"])
    assert [farthest(seen) for seen in calls] == [T - 1 if window is None else window - 1 for window in windows]


def test_sites_of_cut_and_copied_models_know_it_too(tmp_path: Path) -> None:
    theirs = hw.attach(BY_NAME["qwen2_windows"].build())
    small = hw.prune(theirs, heads="1.*,2.4", fold=False)
    assert [site.window for site in small.sites()] == [None, 5, 5]
    again: Any = hw.load(small.save_pretrained(tmp_path / "small"))
    assert [site.window for site in again.sites()] == [None, 5, 5]


def test_two_stacks_and_cross_attention_have_none() -> None:
    assert {site.window for site in hw.attach(BY_NAME["bart"].build()).sites()} == {None}


@pytest.mark.parametrize("name", ["mistral", "qwen2", "llama"])
def test_our_own_sites_say_the_same(name: str, tmp_path: Path) -> None:
    ours, theirs = hw.load(saved(name, tmp_path)), hw.attach(BY_NAME[name].build())
    assert [site.window for site in ours.sites()] == [site.window for site in theirs.sites()]


def test_a_site_of_ours_has_the_window_of_its_layer() -> None:
    model = make_model(MODELS["decoder, windows"])
    windows = [site.window for site in model.sites()]
    assert windows == [model.spec.attention_at(site.address).window for site in model.sites()]
    assert any(windows)
