import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claims.input_slices import CLAIM, FULL, SLICED, WIDER, input_overlap, own_slice
from headwise.experiments.engine.statistic import Figures
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from tests.experiments.stub_experiment import told_lab

OVERLAP = "overlap of what heads read, over chance"
CASES = {
    "holds": [(OVERLAP, FULL, [1.1, 1.2, 1.3]), ("lost by slices", SLICED, 0.2), ("lost by slices", WIDER, 0.1)],
    "depends": [(OVERLAP, FULL, [1.1, 1.2, 1.3]), ("lost by slices", SLICED, 0.2), ("lost by slices", WIDER, 0.0)],
    "does not hold": [(OVERLAP, FULL, 0.1), ("lost by slices", SLICED, 0.2), ("lost by slices", WIDER, 0.1)],
}


@pytest.mark.parametrize(
    ("overlap", "sliced", "wider", "on"),
    [
        ([0.5, 1.0, 1.8], 0.2, 0.1, "on the seed: what heads read overlaps 1.10 times"),
        (1.1, 0.2, [-0.1, 0.1, 0.2], "on the seed: heads read overlapping spaces, but whether slices with wider MLPs"),
        (1.1, 0.0, [-0.1, 0.1, 0.2], "on what is asked: heads read overlapping spaces, but slices lose less"),
    ],
)
def test_an_open_question_is_not_answered(overlap, sliced, wider, on):
    figures = Figures().add(OVERLAP, FULL, overlap)
    verdict = CLAIM.judge(figures.add("lost by slices", SLICED, sliced).add("lost by slices", WIDER, wider))
    assert verdict.word == "depends"
    assert verdict.on.startswith(on)


def model(heads=6, **attention) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelSpec(9, 8, 1, AttentionSpec(width=48, heads=heads, **attention), norm="rms"))


def test_one_head_overlaps_with_none():
    assert CLAIM.on is not None
    with pytest.raises(HeadwiseError, match="two heads"):
        CLAIM.on(model(heads=1), None)


def test_sliced_heads_partition_and_random_ones_do_not():
    assert input_overlap(model(input="slice")) == pytest.approx(0, abs=1e-6)
    assert own_slice(model(input="slice")) == pytest.approx(6)
    assert input_overlap(model()) == pytest.approx(1, abs=0.1)
    assert own_slice(model()) == pytest.approx(1, abs=0.1)


@torch.no_grad()
def test_heads_that_read_the_same_overlap_wholly():
    made = model()
    for head in made.heads:
        for letter in "QKV":
            getattr(head, f"W_{letter}").copy_(getattr(made.heads[0], f"W_{letter}"))
    assert input_overlap(made) == pytest.approx(6, rel=1e-5)  # chance is d/D = 1/6


def test_keys_that_a_group_shares_are_left_out():
    assert input_overlap(model(kv_heads=1)) == pytest.approx(1, abs=0.15)


def test_measured_and_on_a_given_model(tmp_path):
    def tell(point):
        loss = 2.0 + (point.spec.attention.input == "slice") * 0.5 - (point.spec.hidden > 64) * 0.25
        return {"loss": loss, "marks": {"surname": loss / 4}}

    lab = told_lab(tmp_path, tell, models=True)
    figures = CLAIM.measure(lab)
    assert [figures["lost by slices", name].mean for name in (SLICED, WIDER)] == [0.5, 0.25]
    # LayerNorm centres what heads read: slices share a direction, whose cos² is 1/(H − 1)², of d; chance is d/D
    assert figures[OVERLAP, SLICED].mean == pytest.approx((1 / 3**2 / 4) / (4 / 16))
    assert figures["parameters", WIDER].mean == pytest.approx(figures["parameters", FULL].mean, rel=0.01)
    assert 0 < figures["maps apart (JS)", SLICED].mean < 0.7
    assert figures["right, slices", "surname"].mean == 2.5 / 4
    assert CLAIM.judge(figures).word == "holds"
    assert CLAIM.on is not None
    found = CLAIM.on(lab.made(lab.point(0, input="slice")).model(), None)
    assert CLAIM.judge(found).word == "does not hold"
    assert set(found.names) & set(CLAIM.picture.figures)
