"""Image models: positions of patches and metrics of heads, compared with maps from the eager attention of transformers."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.image_patches import AttentionToPatches, patch_offsets
from headwise.analysis.roles.profile_result import Profile
from headwise.attached import AttachedModel
from headwise.errors import HeadwiseError
from headwise.io.images import ImagePreprocessor, to_png
from headwise.spec.patch_grid import PatchGrid
from headwise.ui.head_summary import summarize_head
from headwise.ui.live_session import LiveSession

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SIZES |= {"image_size": (20, 28), "patch_size": 4}


def grid_of(attached: AttachedModel) -> PatchGrid:
    assert attached.image_input is not None
    return attached.image_input.token_patch_grid


def make_vision_model(seed: int = 0, gain: float = 1.0, kind: str = "ViT", **sizes):
    """Make a random model. `gain` scales queries and keys, so that attention is less uniform."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and any(fragment in name for fragment in ("query", "key", "q_proj", "k_proj")):
                weight.copy_(torch.randn_like(weight) * gain * weight.shape[1] ** -0.5)
    return model


def eager_maps(model, pixels: torch.Tensor) -> torch.Tensor:
    """Return every map from eager attention, (layers, B, H, T, T)."""
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
def test_patch_grid_maps_tokens_to_patches(kind, before) -> None:
    sizes = {} if kind in ("ViT", "DeiT") else {"image_size": 16}
    with hw.attach(make_vision_model(kind=kind, **sizes)) as attached:
        grid = grid_of(attached)
        rows, columns = (4, 4) if sizes else (5, 7)
        assert (grid.rows, grid.columns) == (rows, columns)
        assert grid.patch_of_token == (*[-1] * before, *range(rows * columns))
        if kind == "Dinov2WithRegisters":
            assert grid.token_names[:6] == ("[CLS]", "[REG1]", "[REG2]", "[REG3]", "[REG4]", "0,0")


def test_patch_grid_masked_autoencoder_raises() -> None:
    with (
        hw.attach(make_vision_model(kind="ViTMAE", image_size=16)) as attached,
        pytest.raises(HeadwiseError, match="more than one patch"),
    ):
        grid_of(attached)


@pytest.mark.parametrize("size", [(50, 70), (33, 20), (9, 9)])
@pytest.mark.parametrize("name", ["ViTImageProcessorPil", "CLIPImageProcessorPil"])
def test_image_preprocessor_equals_transformers_processor(name, size) -> None:
    small = {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}}
    processor = getattr(transformers, name)(**(small if "CLIP" in name else {"size": {"height": 20, "width": 28}}))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    actual = ImagePreprocessor.from_config(processor.to_dict()).to_tensor(image, 3)
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) < 1e-5
    again = ImagePreprocessor.from_config(json.loads(json.dumps(processor.to_dict())))
    assert torch.equal(again.to_tensor(image, 3), actual)


def test_attention_maps_of_image_equal_eager_maps(tmp_path: Path) -> None:
    model = make_vision_model(gain=3.0)
    processor = transformers.ViTImageProcessorPil(size={"height": 20, "width": 28})
    data = np.random.default_rng(1).integers(0, 255, (31, 44, 3), dtype=np.uint8)
    file = tmp_path / "one.png"
    file.write_bytes(to_png(data))
    image = Image.open(file)
    assert np.array_equal(np.asarray(image), data)
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        before = model(pixels).last_hidden_state
    maps = eager_maps(model, pixels)
    with hw.attach(model, processor) as attached:
        for image_input in (file, str(file), image, pixels[0], pixels):
            view = hw.attention_maps(attached, image_input)
            torch.testing.assert_close(view.map("1.3"), maps[1, 0, 3], atol=1e-5, rtol=0)
            torch.testing.assert_close(
                view.image_map("1.3", (2, 5)).flatten(), maps[1, 0, 3, 1 + 2 * 7 + 5, 1:], atol=1e-5, rtol=0
            )
            assert view.attention_from_word("2,5", "1.3")[0][0] in grid_of(attached).token_names
            torch.testing.assert_close(
                view.image_map("0.0").flatten(), maps[0, 0, 0, 1:, 1:].mean(0), atol=1e-5, rtol=0
            )
        attached.save(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(model(pixels).last_hidden_state, before)
    back = hw.load(tmp_path / "saved")
    assert isinstance(back, AttachedModel)
    with back:  # the loaded model can preprocess images
        torch.testing.assert_close(hw.attention_maps(back, file).map("1.3"), maps[1, 0, 3], atol=1e-5, rtol=0)


def naive_patch_metrics(maps: torch.Tensor, grid: PatchGrid) -> dict[str, np.ndarray]:
    """Compute every patch metric with loops over a dense map (B, T, T) of one head."""
    coordinates = [divmod(cell, grid.columns) if cell >= 0 else None for cell in grid.patch_of_token]
    collected: dict[str, list[float]] = {}

    def add(name, value):
        collected.setdefault(name, []).append(value)

    for p in maps.double().numpy():
        column_sums = np.zeros((2, len(coordinates)))
        for i, query_cell in enumerate(coordinates):
            if query_cell is None:
                continue
            column_sums[sum(query_cell) % 2] += p[i]
            others = [(j, key_cell) for j, key_cell in enumerate(coordinates) if key_cell is not None]
            far = {j: np.hypot(key_cell[0] - query_cell[0], key_cell[1] - query_cell[1]) for j, key_cell in others}
            add("distance", sum(p[i, j] * far[j] for j in far) / sum(p[i, j] for j in far))
            add("near patches", sum(p[i, j] for j in far if 0 < far[j] < 1.5))
            add("far patches", sum(p[i, j] for j in far if far[j] > max(grid.rows, grid.columns) / 2))
            for axis, name in ((0, "same row"), (1, "same column")):
                same_line = [j for j, key_cell in others if key_cell[axis] == query_cell[axis] and j != i]
                add(name, sum(p[i, j] for j in same_line))
                same_distance = {j: [k for k in far if abs(far[k] - far[j]) < 1e-9] for j in far}
                add(
                    f"{name} baseline",
                    sum(p[i, j] * len(set(same_distance[j]) & set(same_line)) / len(same_distance[j]) for j in far),
                )
            add("class token", sum(p[i, j] for j, kind in enumerate(grid.kinds) if kind == "class"))
        patches = [j for j, key_cell in enumerate(coordinates) if key_cell is not None]
        rows = [
            sum(key_cell is not None and sum(key_cell) % 2 == parity for key_cell in coordinates) for parity in (0, 1)
        ]
        best = [patches[int(column_sums[parity][patches].argmax())] for parity in (0, 1)]
        add("one patch", (column_sums[1][best[0]] + column_sums[0][best[1]]) / sum(rows))
    return {name: np.asarray(np.mean(values)) for name, values in collected.items()}


def test_image_profile_metrics_equal_dense_maps() -> None:
    model, pixels = (
        make_vision_model(3, gain=6.0),
        torch.randn(5, 3, 20, 28, generator=torch.Generator().manual_seed(0)),
    )
    maps = eager_maps(model, pixels)
    with hw.attach(model) as attached:
        profiled, grid = hw.profile(attached, pixels), grid_of(attached)
    for head in profiled:
        expected = naive_patch_metrics(maps[head.address.layer, :, head.address.head], grid)
        for name, value in expected.items():
            assert abs(profiled.metric(name)[profiled.addresses.index(head.address)] - value) < 1e-5, (
                head.address,
                name,
            )


def test_image_profile_merges_and_saves(tmp_path: Path) -> None:
    pixels = torch.randn(11, 3, 20, 28, generator=torch.Generator().manual_seed(0))
    with hw.attach(make_vision_model(3, gain=6.0)) as attached:
        full = hw.profile(attached, pixels)
        merged = hw.profile(attached, pixels[:4]).merge(hw.profile(attached, list(pixels[4:]), batch_tokens=40))
        for name in full.metric_specs:
            np.testing.assert_allclose(merged.metric(name), full.metric(name), atol=1e-5)
        assert Profile.load(full.save(tmp_path / "p.npz")).to_dict() == full.to_dict()
        assert full["0.1"].top_contexts[0].text.startswith("image ")
        assert len(full.table()[0]) > 10


def constructed_vit():
    """Make heads for known roles: row, column, local, global, and class token in a second layer."""
    rows = columns = 5
    cells, width = rows * columns, 160
    model = make_vision_model(
        hidden_size=width, num_hidden_layers=1, num_attention_heads=5, intermediate_size=8, image_size=20
    )
    patch_grid = PatchGrid.of(rows, columns, ["class"])
    grid = (down, across) = patch_offsets(patch_grid)
    steps = torch.maximum(down.abs(), across.abs())
    patterns = [down == 0, across == 0, (steps == 1), (down**2 + across**2).sqrt() > 2.5]
    patterns = [mask.float()[1:, 1:] for mask in patterns] + [torch.zeros(cells, cells)]
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
        for head, pattern in enumerate(patterns):
            rows_ = slice(head * 32, (head + 1) * 32)
            q, k = torch.zeros(32, width), torch.zeros(32, width)
            q[:cells, :cells] = pattern.T * 0.6  # keys that a query attends to, by grid cell
            k[:cells, :cells] = torch.eye(cells)
            if head == 4:
                q[cells, :cells] = 0.6
                k[cells, cells] = 1.0
            q[-1, -32:] = 0.02  # some of the pixels, so that tokens differ
            k[-1, -32:] = 0.02
            layer.attention.q_proj.weight[rows_], layer.attention.k_proj.weight[rows_] = q, k
            layer.attention.v_proj.weight[rows_] = torch.randn(32, width) * 0.1
        layer.attention.o_proj.weight.copy_(torch.randn(width, width) * 0.1)
    return model


def test_image_profile_constructed_heads_get_their_roles() -> None:
    pixels = torch.randn(40, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    with hw.attach(constructed_vit()) as attached:
        profiled = hw.profile(attached, pixels)
    assert [profiled[f"0.{head}"].role for head in range(5)] == ["row", "column", "local", "global", "class token"]
    assert all(profiled[f"0.{head}"].evidence_level == "value-weighted" for head in range(5))
    assert {role.role for role in profiled["0.0"].roles} <= {"row"}  # no other role
    assert {role.role for role in profiled["0.1"].roles} <= {"column"}
    for head, words in enumerate(
        (
            "in its row",
            "attends to patches in its column more",
            "eight patches around",
            "attends to patches farther away than",
            "class token",
        )
    ):
        assert words in str(summarize_head(profiled, profiled[f"0.{head}"])), "a story speaks of patches"


@pytest.mark.parametrize("gain", [0.3, 1.0, 4.0])
def test_image_profile_random_models_have_no_roles(gain) -> None:
    pixels = torch.randn(48, 3, 20, 20, generator=torch.Generator().manual_seed(5))
    for seed in range(3):
        with hw.attach(make_vision_model(seed, gain, kind="Dinov2WithRegisters", image_size=20)) as attached:
            assert hw.profile(attached, pixels).heads_by_role() == {}


def test_image_profile_custom_metrics_equal_dense_maps() -> None:
    left = AttentionToPatches(
        "left", lambda grid: ((patch_offsets(grid)[0] == 0) & (patch_offsets(grid)[1] == -1)).float()
    )
    corner = hw.AttentionToTokens("corner", lambda text: [name == "0,0" for name in text.token_texts])
    pixels = torch.randn(6, 3, 20, 28)
    model = make_vision_model(gain=3.0)
    maps = eager_maps(model, pixels)
    with hw.attach(model) as attached:
        profiled = hw.profile(attached, pixels, metrics=[left, corner], roles=[hw.Role("left", left.score_spec, 0.3)])
    weights = [maps[0, :, 0, i, i - 1].mean() for i in range(1, 36) if (i - 1) % 7]
    assert abs(profiled["0.0"].metrics["left"] - float(torch.stack(weights).mean())) < 1e-5
    assert abs(profiled["0.0"].metrics["corner"] - float(maps[0, :, 0, :, 1].mean())) < 1e-5


def test_image_input_invalid_images_raise(tmp_path: Path) -> None:
    with hw.attach(make_vision_model()) as attached:
        (tmp_path / "empty").mkdir()
        (tmp_path / "not.png").write_bytes(b"no picture")
        for image, words in (
            (tmp_path / "not.png", "processor"), (torch.zeros(3, 8, 8), "channels, height, width"),
            (torch.zeros(3, 20, 28).long(), "preprocessed float tensor"),
        ):  # fmt: skip
            with pytest.raises(HeadwiseError, match=words):
                hw.attention_maps(attached, image)
        for image, words in ((None, "needs images"), (tmp_path / "empty", "contains no images"), ([], "empty")):
            with pytest.raises(HeadwiseError, match=words):
                hw.profile(attached, image)
        with pytest.raises(HeadwiseError, match="does not exist"):
            hw.attention_maps(attached, torch.zeros(3, 20, 28)).image_map("0.0", (5, 0))
        for ask in (lambda: hw.importance(attached, ["a text"]), lambda: LiveSession(attached).predict("a text")):
            with pytest.raises(HeadwiseError, match="reads images"):
                ask()
    processor = transformers.ViTImageProcessorPil(size={"height": 20, "width": 28})
    with hw.attach(make_vision_model(), processor) as attached:
        for image, words in (
            (tmp_path / "not.png", "not a readable image"),
            (tmp_path / "gone.png", "image not found"),
            (tmp_path, "this is a folder"),
            (3, "a path"),
        ):
            with pytest.raises(HeadwiseError, match=words):
                hw.attention_maps(attached, image)
