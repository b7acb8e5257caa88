"""Steering: z moves as in the closed form, and folding equals hooking on every family, also after pruning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.exporters.engine_parity import ParityReport
from tests.contract.attached_models import NAMES, TEXTS, new_model, sample_heads, tolerance
from tests.contract.attached_models import batch as attached_batch
from tests.contract.attached_models import cached_model as attached_model
from tests.contract.attached_models import logits as logits_of
from tests.contract.layers import MODELS, assert_equal, make_model, random_tensor, run_model

EDITS: dict[str, dict[str, Any]] = {
    "shift": {"strength": 1.7},
    "project out": {"edit": "project_out"},
    "clamp": {"edit": "clamp", "low": 0.3, "high": 0.3},
}
each_edit = pytest.mark.parametrize("edit", EDITS)
NATIVE_MODELS = list(MODELS)


def make_steering(model: Any, **options: Any) -> hw.Steering:
    """Return a steering of the last head of the first layer and the first head of the last layer of each stack."""
    vectors = {
        str(address): random_tensor(model.heads[address].layer.spec.value_dim, seed=5 + i)
        for i, address in enumerate(sample_heads(model))
    }
    return hw.Steering(vectors, **options).for_model(model)


@each_edit
@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_fold_native_equals_hook(name: str, edit: str) -> None:
    model = make_model(MODELS[name]).eval()
    steering = make_steering(model, **EDITS[edit])
    plain, folded = run_model(model), hw.fold_steering(model, steering)
    with steering.applied(model):
        hooked = run_model(model)
    assert (hooked - plain).abs().max() > 1e-3
    assert_equal(run_model(folded), hooked)
    assert_equal(run_model(model), plain, 0)


@pytest.mark.parametrize(
    ("name", "edit"),
    [*((name, "shift") for name in NAMES), ("llama", "project out"), ("gpt2", "clamp"), ("bert", "clamp")],
)
def test_fold_attached_equals_hook_or_says_why(name: str, edit: str) -> None:
    model = attached_model(name)
    steering, inputs = make_steering(model, **EDITS[edit]), attached_batch(name, "right")
    plain = logits_of(model, inputs)
    with steering.applied(model):
        hooked = logits_of(model, inputs)
    assert (hooked - plain).abs().max() > 1e-6
    assert_equal(logits_of(hw.fold_steering(model, steering).eval(), inputs), hooked, max(tolerance(name), 1e-8))


@pytest.mark.parametrize("pattern", ["0.0", "1.*"])
def test_fold_after_pruning_equals_hook(pattern: str) -> None:
    model = make_model(MODELS["decoder, rotary"]).eval().prune(pattern)
    steering = hw.Steering({"0.3": random_tensor(6), "0.2": random_tensor(6, seed=2)}, strength=2.0).for_model(model)
    folded = hw.fold_steering(model, steering)
    with steering.applied(model):
        assert_equal(run_model(folded), run_model(model))
    assert folded.heads.addresses == model.heads.addresses


def test_shift_of_layer_equals_closed_form_and_is_linear() -> None:
    layer = hw.MultiHeadAttention(width=12, heads=4, kv_heads=2).double()
    x, u, v = (random_tensor(*shape, seed=i) for i, shape in enumerate([(2, 5, 12), (3,), (3,)]))
    head, plain = layer.heads[2], layer(x)

    def shift(direction: Tensor, strength: float) -> Tensor:
        with head.shifted(direction, strength):
            return layer(x) - plain

    assert_equal(shift(v, 1.5), (1.5 * v @ head.W_O).expand_as(plain))
    assert_equal(shift(u + v, 2.0), 2 * shift(u, 1.0) + 2 * shift(v, 1.0))


def test_projected_out_and_clamped_set_component_of_one_head() -> None:
    layer = hw.MultiHeadAttention(width=12, heads=4).double()
    x, v = random_tensor(2, 5, 12), random_tensor(3)
    unit = v / v.norm()
    plain = layer.compute_z(x)
    for context, bounds in (
        (layer.heads[1].projected_out(v), (0.0, 0.0)),
        (layer.heads[1].clamped(v, -0.01, 0.02), (-0.01, 0.02)),
        (layer.heads[1].clamped(v, high=0.0), (-torch.inf, 0.0)),
    ):
        with context:
            z = layer.compute_z(x)
        assert_equal((z @ unit)[:, 1], (plain @ unit)[:, 1].clamp(*bounds))
        others = plain - (plain @ unit)[..., None] * unit
        assert_equal(z[:, 1] - (z @ unit)[:, 1, :, None] * unit, others[:, 1])
        assert torch.equal(z[:, [0, 2, 3]], plain[:, [0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "encoder", "encoder-decoder"])
def test_strength_zero_is_bitwise_plain(name: str, dtype: torch.dtype) -> None:
    model = make_model(MODELS[name]).eval().to(dtype)
    steering, plain = make_steering(model), run_model(model)
    with steering.applied(model, 0.0):
        assert torch.equal(run_model(model), plain)
    with model.heads.shifted(random_tensor(6), torch.tensor([0.0, 1.0])):
        mixed = run_model(model)
    assert torch.equal(mixed[0], plain[0])
    assert not torch.equal(mixed[1], plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fold_in_half_precision_is_within_rounding(dtype: torch.dtype) -> None:
    model = make_model(MODELS["decoder, rotary"]).eval().float()
    steering = make_steering(model, strength=0.5)
    with steering.applied(model):
        exact = run_model(model)
    cast = model.to(dtype)
    with steering.applied(cast):  # the fingerprint allows for the rounding of the weights
        hooked = run_model(cast).float()
    folded = run_model(hw.fold_steering(cast, steering)).float()
    bound = {torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype] * exact.abs().max()
    assert (hooked - exact).abs().max() <= bound
    assert (folded - hooked).abs().max() <= bound


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "llama", "gpt2"])
def test_generate_with_cache_is_steered_at_every_step(name: str) -> None:
    model = attached_model(name)
    steering = make_steering(model, strength=3.0)
    inputs = attached_batch(name)
    options: dict[str, Any] = {} if "source" not in inputs else {"source": inputs["source"][:1]}
    ids = inputs["ids"][:1, :3]
    with steering.applied(model):
        generated = model.generate(ids, 6, **options)
        greedy = ids
        for _ in range(6):
            step = model(greedy, **options)[:, -1].argmax(-1, keepdim=True)
            greedy = torch.cat((greedy, step), 1)
    length = generated.shape[1]  # shorter if the end token was generated
    assert torch.equal(generated[0, :length], greedy[0, :length])


def test_positions_edit_only_these_tokens() -> None:
    layer = hw.MultiHeadAttention(width=12, heads=4).double()
    x, v = random_tensor(2, 5, 12), random_tensor(3)
    with layer.heads[1].shifted(v, positions=[-1, 1]):
        change = layer.compute_z(x) - layer.compute_z(x).detach()
    with layer.heads[1].shifted(v, positions=[-1, 1]):
        shifted = layer.compute_z(x)
    expected = torch.zeros_like(shifted)
    expected[:, 1, [1, 4]] = v
    assert_equal(shifted - layer.compute_z(x), expected)
    assert not change.abs().any()


def test_quantized_model_folds_shifts_and_refuses_edits_of_weights() -> None:
    spec = hw.ModelSpec(vocab=17, context=19, layers=2, mlp_width=32, attention=hw.AttentionSpec(width=32, heads=4))
    model = hw.quantize(make_model(spec).eval().float(), 8)
    steering = make_steering(model, strength=2.0)
    with steering.applied(model):
        hooked = run_model(model)
    assert_equal(run_model(hw.fold_steering(model, steering)), hooked, 1e-5)
    with pytest.raises(HeadwiseError, match="quantized"):
        hw.fold_steering(model, make_steering(model, edit="project_out"))


def test_gradient_reaches_direction_and_compiled_layer_is_steered() -> None:
    layer = hw.MultiHeadAttention(width=12, heads=4).double()
    x, v = random_tensor(2, 5, 12), random_tensor(3).requires_grad_()
    with layer.heads[1].shifted(v):
        layer(x).sum().backward()
    assert v.grad is not None
    assert_equal(v.grad, 10 * layer.heads[1].W_O.sum(1))


def test_fold_layers_with_shared_weights_says_why() -> None:
    model = new_model("llama")
    first, second = (layer.info.module for layer in model.attention_layers()[:2])
    second.o_proj = first.o_proj
    tied = hw.attach(model.detach())
    with pytest.raises(HeadwiseError, match="share one output projection"):
        hw.fold_steering(tied, hw.Steering({"0.1": torch.ones(4)}))


BAD_STEERINGS: dict[str, tuple[Any, str]] = {
    "no heads": (lambda: hw.Steering({}), "vectors"),
    "pattern": (lambda: hw.Steering({"5.*": torch.ones(6)}), "5."),
    "matrix": (lambda: hw.Steering({"0.1": torch.ones(2, 6)}), "head_dim"),
    "nan": (lambda: hw.Steering({"0.1": torch.full((6,), torch.nan)}), "NaN"),
    "strength": (lambda: hw.Steering({"0.1": torch.ones(6)}, strength=float("inf")), "finite"),
    "edit": (lambda: hw.Steering({"0.1": torch.ones(6)}, edit="rotate"), "edit"),  # pyright: ignore
    "range": (lambda: hw.Steering({"0.1": torch.ones(6)}, edit="clamp", low=1, high=0), "low must not exceed"),
    "empty range": (lambda: hw.Steering({"0.1": torch.ones(6)}, edit="clamp"), "missing"),
}


@pytest.mark.parametrize(("make", "message"), BAD_STEERINGS.values(), ids=BAD_STEERINGS)
def test_steering_wrong_arguments_raise(make: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        make()


def test_steering_of_other_model_raises() -> None:
    model, other = (make_model(MODELS["decoder, rotary"], seed=seed).eval() for seed in (0, 1))
    steering = make_steering(model)
    for wrong, message in ((other, "output weights"), (model.prune("1.0"), "no head 1.0")):
        with pytest.raises(HeadwiseError, match=message), steering.applied(wrong):
            pass
        with pytest.raises(HeadwiseError, match=message):
            hw.fold_steering(wrong, steering)
    with steering.applied(other, check=False):
        run_model(other)
    with pytest.raises(HeadwiseError, match="channels"), hw.Steering({"0.1": torch.ones(5)}).applied(model):
        pass
    with pytest.raises(HeadwiseError, match="not linear"):
        hw.fold_steering(model, make_steering(model, edit="clamp", low=0.0))


def test_steering_of_native_model_fits_attached_copy_and_save_load_is_exact(tmp_path: Path) -> None:
    model = make_model(MODELS["decoder, rotary"]).eval()
    steering = make_steering(model, strength=-0.5, name="test")
    loaded = hw.Steering.load(steering.save(tmp_path / "steering"))
    assert str(loaded) == str(steering)
    assert loaded.fingerprint == dict(steering.fingerprint)
    assert all(torch.equal(loaded.vectors[head], vector) for head, vector in steering.vectors.items())
    steering.save(tmp_path / "steering")  # a steering may be replaced, another folder not
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(HeadwiseError, match="already exists"):
        steering.save(tmp_path / "other")


@pytest.mark.parametrize("damage", ["no folder", "no vectors", "json", "format", "heads", "truncated", "types"])
def test_load_damaged_steering_raises(damage: str, tmp_path: Path) -> None:
    folder = hw.Steering({"0.1": torch.ones(6)}, strength=2.0).save(tmp_path / "steering")
    text = (folder / "steering.json").read_text()
    changes = {
        "json": "{",
        "format": text.replace('"format": 1', '"format": 7'),
        "heads": text.replace('"0.1"', '"0.2"'),
        "types": text.replace('"strength": 2.0', '"strength": "much"'),
    }
    if damage == "no folder":
        folder = tmp_path / "absent"
    elif damage == "no vectors":
        (folder / "vectors.safetensors").unlink()
    elif damage == "truncated":
        data = (folder / "vectors.safetensors").read_bytes()
        (folder / "vectors.safetensors").write_bytes(data[: len(data) // 2])
    else:
        (folder / "steering.json").write_text(changes[damage])
    with pytest.raises(HeadwiseError, match="teering"):
        hw.Steering.load(folder)


def test_combined_steering_equals_both_and_rejects_conflicts() -> None:
    model = make_model(MODELS["decoder"]).eval()
    a = hw.Steering({"0.1": random_tensor(6), "1.0": random_tensor(6, seed=8)}, strength=2.0).for_model(model)
    b = hw.Steering({"0.1": random_tensor(6, seed=9)}, strength=-1.0).for_model(model)
    with a.applied(model), b.applied(model):
        stacked = run_model(model)
    with (a + b).applied(model):
        assert_equal(run_model(model), stacked)
    with pytest.raises(HeadwiseError, match="order"):
        _ = a + hw.Steering({"0.1": torch.ones(6)}, edit="project_out")
    with pytest.raises(HeadwiseError, match="another model"):
        _ = a + hw.Steering({"0.1": torch.ones(6)}).for_model(make_model(MODELS["decoder"], seed=3))


def test_attached_folded_bias_survives_save_and_export(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = new_model("llama").eval()
    steering = make_steering(model, strength=2.0)
    folded = hw.fold_steering(model, steering)
    inputs = attached_batch("llama")
    expected = logits_of(folded, inputs)
    folded.save(tmp_path / "saved")
    reopened = type(folded).reopen(tmp_path / "saved", dtype=torch.float64)
    assert_equal(logits_of(reopened, inputs), expected)
    folded.export(tmp_path / "exported")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert_equal(plain(inputs["ids"]).logits.flatten(0, 1), expected)


@pytest.mark.parametrize(
    "to", ["transformers", "gguf", *(pytest.param(to, marks=pytest.mark.slow) for to in ("onnx", "torch"))]
)
def test_folded_model_exports_without_hooks(to: str, tmp_path: Path) -> None:
    engine = {"transformers": "transformers", "gguf": "xllamacpp", "onnx": "onnxruntime", "torch": "torch"}[to]
    pytest.importorskip(engine)
    torch.manual_seed(0)
    spec = hw.preset("llama2-7b").resized(layers=2, width=32, heads=4, context=64)
    model = hw.Transformer(spec).eval()
    folded = hw.fold_steering(model, make_steering(model, strength=3.0))
    options: dict[str, Any] = {"tokenizer": False} if to == "gguf" else {}
    path = tmp_path / {"gguf": "model.gguf", "torch": "model.pt2"}.get(to, "folder")
    result = hw.export(folded, path, to=to, check=True, **options)
    assert isinstance(result.parity, ParityReport)
    assert result.parity.max_difference < 1e-3
    assert result.parity.diverged == result.parity.diverged_at_ties


def test_harness_model_sees_steering_as_folded_model() -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    model = attached_model("decoder")
    steering = make_steering(model, strength=3.0)
    folded = hw.fold_steering(model, steering).eval()
    requests = [Instance("loglikelihood", {}, (TEXTS[0], " " + TEXTS[1]), 0)]

    def score(scored_model: Any) -> float:
        return hw.HarnessModel(scored_model).loglikelihood(requests)[0][0]

    plain = score(model)
    with steering.applied(model):
        steered = score(model)
    assert steered == pytest.approx(score(folded), rel=1e-6)
    assert abs(steered - plain) > 1e-3
