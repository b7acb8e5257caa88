"""Pictures: which token is which patch, and what heads do with them, beside maps that transformers' own eager path gives."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.image_patches import WeightIn, apart
from headwise.analysis.roles.profile_result import Profile
from headwise.attached import Attached
from headwise.errors import HeadwiseError
from headwise.io.images import Pixels, to_png
from headwise.spec.patch_grid import Grid
from headwise.ui.head_summary import tell_story
from headwise.ui.live_session import Live

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SIZES |= {"image_size": (20, 28), "patch_size": 4}


def grid_of(theirs: Attached) -> Grid:
    assert theirs.pictures is not None
    return theirs.pictures.grid


def vit(seed: int = 0, gain: float = 1.0, kind: str = "ViT", **sizes):
    """A random model; `gain`: queries and keys that much larger, so that heads pick and choose."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and any(part in name for part in ("query", "key", "q_proj", "k_proj")):
                weight.copy_(torch.randn_like(weight) * gain * weight.shape[1] ** -0.5)
    return model


def dense(model, pixels: torch.Tensor) -> torch.Tensor:
    """Every map by the eager path: (layers, B, H, T, T)."""
    own = type(model)(copy.deepcopy(model.config))
    own.load_state_dict(model.state_dict())
    own.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(own.eval()(pixels, output_attentions=True).attentions)


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("ViT", 1),
        ("Dinov2WithRegisters", 5),
        ("DeiT", 2),
        ("SiglipVision", 0),
        ("CLIPVision", 1),
        ("Beit", 1),
        ("IJepa", 0),
    ],
)
def test_tokens_are_found_to_be_patches(kind, before) -> None:
    sizes = {} if kind in ("ViT", "DeiT") else {"image_size": 16}
    with hw.attach(vit(kind=kind, **sizes)) as theirs:
        grid = grid_of(theirs)
        rows, columns = (4, 4) if sizes else (5, 7)
        assert (grid.rows, grid.columns) == (rows, columns)
        assert grid.cells == (*[-1] * before, *range(rows * columns))
        if kind == "Dinov2WithRegisters":
            assert grid.names[:6] == ("[CLS]", "[REG1]", "[REG2]", "[REG3]", "[REG4]", "0,0")


def test_tokens_that_are_no_patches_are_refused() -> None:
    with (
        hw.attach(vit(kind="ViTMAE", image_size=16)) as theirs,
        pytest.raises(HeadwiseError, match="more than one patch"),
    ):
        grid_of(theirs)


@pytest.mark.parametrize("size", [(50, 70), (33, 20), (9, 9)])
@pytest.mark.parametrize("name", ["ViTImageProcessorPil", "CLIPImageProcessorPil"])
def test_pixels_are_those_of_the_image_processor(name, size) -> None:
    small = {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}}
    made = getattr(transformers, name)(**(small if "CLIP" in name else {"size": {"height": 20, "width": 28}}))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    theirs = made(picture, return_tensors="pt")["pixel_values"][0]
    ours = Pixels.of(made.to_dict()).numbers(picture, 3)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 1e-5
    again = Pixels.of(json.loads(json.dumps(made.to_dict())))
    assert torch.equal(again.numbers(picture, 3), ours)


def test_attend_over_a_picture_is_the_eager_map(tmp_path: Path) -> None:
    model = vit(gain=3.0)
    processor = transformers.ViTImageProcessorPil(size={"height": 20, "width": 28})
    data = np.random.default_rng(1).integers(0, 255, (31, 44, 3), dtype=np.uint8)
    file = tmp_path / "one.png"
    file.write_bytes(to_png(data))
    picture = Image.open(file)
    assert np.array_equal(np.asarray(picture), data)
    pixels = processor(picture, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        before = model(pixels).last_hidden_state
    maps = dense(model, pixels)
    with hw.attach(model, processor) as theirs:
        for given in (file, str(file), picture, pixels[0], pixels):
            seen = hw.attend(theirs, given)
            torch.testing.assert_close(seen.map("1.3"), maps[1, 0, 3], atol=1e-5, rtol=0)
            torch.testing.assert_close(
                seen.over("1.3", (2, 5)).flatten(), maps[1, 0, 3, 1 + 2 * 7 + 5, 1:], atol=1e-5, rtol=0
            )
            assert seen.row("2,5", "1.3")[0][0] in grid_of(theirs).names
            torch.testing.assert_close(seen.over("0.0").flatten(), maps[0, 0, 0, 1:, 1:].mean(0), atol=1e-5, rtol=0)
        theirs.save(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(model(pixels).last_hidden_state, before)
    back = hw.load(tmp_path / "saved")
    assert isinstance(back, Attached)
    with back:  # it knows how to read pictures
        torch.testing.assert_close(hw.attend(back, file).map("1.3"), maps[1, 0, 3], atol=1e-5, rtol=0)


def naive(maps: torch.Tensor, grid: Grid) -> dict[str, np.ndarray]:
    """Every measure of patches, by loops over a dense map (B, T, T) of one head."""
    places = [divmod(cell, grid.columns) if cell >= 0 else None for cell in grid.cells]
    found: dict[str, list[float]] = {}

    def note(name, value):
        found.setdefault(name, []).append(value)

    for p in maps.double().numpy():
        column = np.zeros((2, len(places)))
        for i, here in enumerate(places):
            if here is None:
                continue
            column[sum(here) % 2] += p[i]
            others = [(j, there) for j, there in enumerate(places) if there is not None]
            far = {j: np.hypot(there[0] - here[0], there[1] - here[1]) for j, there in others}
            note("distance", sum(p[i, j] * far[j] for j in far) / sum(p[i, j] for j in far))
            note("near patches", sum(p[i, j] for j in far if 0 < far[j] < 1.5))
            note("far patches", sum(p[i, j] for j in far if far[j] > max(grid.rows, grid.columns) / 2))
            for axis, name in ((0, "same row"), (1, "same column")):
                mine = [j for j, there in others if there[axis] == here[axis] and j != i]
                note(name, sum(p[i, j] for j in mine))
                by = {j: [k for k in far if abs(far[k] - far[j]) < 1e-9] for j in far}
                note(f"{name} null", sum(p[i, j] * len(set(by[j]) & set(mine)) / len(by[j]) for j in far))
            note("class token", sum(p[i, j] for j, kind in enumerate(grid.kinds) if kind == "class"))
        patches = [j for j, there in enumerate(places) if there is not None]
        rows = [sum(there is not None and sum(there) % 2 == one for there in places) for one in (0, 1)]
        best = [patches[int(column[one][patches].argmax())] for one in (0, 1)]
        note("one patch", (column[1][best[0]] + column[0][best[1]]) / sum(rows))
    return {name: np.asarray(np.mean(values)) for name, values in found.items()}


def test_measures_are_those_of_dense_maps() -> None:
    model, pixels = vit(3, gain=6.0), torch.randn(5, 3, 20, 28, generator=torch.Generator().manual_seed(0))
    maps = dense(model, pixels)
    with hw.attach(model) as theirs:
        found, grid = hw.profile(theirs, pixels), grid_of(theirs)
    for head in found:
        expected = naive(maps[head.address.layer, :, head.address.head], grid)
        for name, value in expected.items():
            assert abs(found.measure(name)[found.addresses.index(head.address)] - value) < 1e-5, (head.address, name)


def test_profiles_of_pictures_add_up_and_are_kept(tmp_path: Path) -> None:
    pixels = torch.randn(11, 3, 20, 28, generator=torch.Generator().manual_seed(0))
    with hw.attach(vit(3, gain=6.0)) as theirs:
        whole = hw.profile(theirs, pixels)
        parts = hw.profile(theirs, pixels[:4]).merge(hw.profile(theirs, list(pixels[4:]), tokens=40))
        for name in whole.numbers:
            np.testing.assert_allclose(parts.measure(name), whole.measure(name), atol=1e-5)
        assert Profile.load(whole.save(tmp_path / "p.npz")).to_dict() == whole.to_dict()
        assert whole["0.1"].hardest[0].text.startswith("picture ")
        assert len(whole.table()[0]) > 10


def planted():
    """Heads that do what they are called by construction: row, column, local, global, and, in a second layer, class token."""
    rows = columns = 5
    cells, wide = rows * columns, 160
    model = vit(hidden_size=wide, num_hidden_layers=1, num_attention_heads=5, intermediate_size=8, image_size=20)
    where = Grid.of(rows, columns, ["class"])
    grid = (down, across) = apart(where)
    steps = torch.maximum(down.abs(), across.abs())
    wanted = [down == 0, across == 0, (steps == 1), (down**2 + across**2).sqrt() > 2.5]
    wanted = [one.float()[1:, 1:] for one in wanted] + [torch.zeros(cells, cells)]
    assert len(grid) == 2
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        embeddings, layer = model.embeddings, model.layers[0]
        embeddings.position_embeddings[0, 1:, :cells] = torch.eye(cells) * 8
        embeddings.cls_token[0, 0, cells] = 8.0
        embeddings.patch_embeddings.projection.weight[-32:] = torch.randn(32, 3, 4, 4) * 0.02
        layer.layernorm_before.weight.fill_(1.0)
        layer.mlp.fc1.bias.zero_()
        for head, who in enumerate(wanted):
            rows_ = slice(head * 32, (head + 1) * 32)
            q, k = torch.zeros(32, wide), torch.zeros(32, wide)
            q[:cells, :cells] = who.T * 0.6  # what a query looks for, by cell
            k[:cells, :cells] = torch.eye(cells)
            if head == 4:
                q[cells, :cells] = 0.6
                k[cells, cells] = 1.0
            q[-1, -32:] = 0.02  # and a little of the pixels, so that tokens can be told apart
            k[-1, -32:] = 0.02
            layer.attention.q_proj.weight[rows_], layer.attention.k_proj.weight[rows_] = q, k
            layer.attention.v_proj.weight[rows_] = torch.randn(32, wide) * 0.1
        layer.attention.o_proj.weight.copy_(torch.randn(wide, wide) * 0.1)
    return model


def test_planted_heads_get_their_roles() -> None:
    pixels = torch.randn(40, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    with hw.attach(planted()) as theirs:
        found = hw.profile(theirs, pixels)
    assert [found[f"0.{head}"].role for head in range(5)] == ["row", "column", "local", "global", "class token"]
    assert all(found[f"0.{head}"].rung == "effective" for head in range(5))
    assert {one.role for one in found["0.0"].roles} <= {"row"}  # nothing besides
    assert {one.role for one in found["0.1"].roles} <= {"column"}
    for head, words in enumerate(
        ("of its row", "of its column", "eight patches around", "half of the longer side", "class token")
    ):
        assert words in str(tell_story(found, found[f"0.{head}"])), "a story speaks of patches"


@pytest.mark.parametrize("gain", [0.3, 1.0, 4.0])
def test_random_models_get_no_role(gain) -> None:
    pixels = torch.randn(48, 3, 20, 20, generator=torch.Generator().manual_seed(5))
    for seed in range(3):
        with hw.attach(vit(seed, gain, kind="Dinov2WithRegisters", image_size=20)) as theirs:
            assert hw.profile(theirs, pixels).roles() == {}


def test_measures_of_your_own() -> None:
    left = WeightIn("left", lambda grid: ((apart(grid)[0] == 0) & (apart(grid)[1] == -1)).float())
    corner = hw.WeightOn("corner", lambda text: [name == "0,0" for name in text.pieces])
    pixels = torch.randn(6, 3, 20, 28)
    model = vit(gain=3.0)
    maps = dense(model, pixels)
    with hw.attach(model) as theirs:
        found = hw.profile(theirs, pixels, measures=[left, corner], roles=[hw.Role("left", left.score, 0.3)])
    looks = [maps[0, :, 0, i, i - 1].mean() for i in range(1, 36) if (i - 1) % 7]
    assert abs(found["0.0"].measures["left"] - float(torch.stack(looks).mean())) < 1e-5
    assert abs(found["0.0"].measures["corner"] - float(maps[0, :, 0, :, 1].mean())) < 1e-5


def test_bad_pictures_are_told(tmp_path: Path) -> None:
    with hw.attach(vit()) as theirs:
        (tmp_path / "empty").mkdir()
        (tmp_path / "not.png").write_bytes(b"no picture")
        for given, words in (
            (tmp_path / "not.png", "processor"), (torch.zeros(3, 8, 8), "channels first"),
            (torch.zeros(3, 20, 28).long(), "ready"),
        ):  # fmt: skip
            with pytest.raises(HeadwiseError, match=words):
                hw.attend(theirs, given)
        for given, words in ((None, "none come along"), (tmp_path / "empty", "holds no picture"), ([], "empty")):
            with pytest.raises(HeadwiseError, match=words):
                hw.profile(theirs, given)
        with pytest.raises(HeadwiseError, match="no patch"):
            hw.attend(theirs, torch.zeros(3, 20, 28)).over("0.0", (5, 0))
        for ask in (lambda: hw.importance(theirs, ["a text"]), lambda: Live(theirs).predict("a text")):
            with pytest.raises(HeadwiseError, match="reads pictures"):
                ask()
    processor = transformers.ViTImageProcessorPil(size={"height": 20, "width": 28})
    with hw.attach(vit(), processor) as theirs:
        for given, words in (
            (tmp_path / "not.png", "no picture that"),
            (tmp_path / "gone.png", "no picture"),
            (tmp_path, "is a folder; give one of its pictures"),
            (3, "a path"),
        ):
            with pytest.raises(HeadwiseError, match=words):
                hw.attend(theirs, given)
