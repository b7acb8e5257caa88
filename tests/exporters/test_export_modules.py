"""ONNX and torch.export files of cut models: the same numbers in onnxruntime, and where there is no Headwise."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.exporters.export_modules import Next, Prefill, cached_sites, traceable
from headwise.exporters.onnx import _session
from headwise.exporters.parity import Checked
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.spec.weight_bits import WEIGHT_BITS
from tests.exporters.llamas import SPEC, llama, without

BERT = ModelSpec(
    vocab=40, context=32, layers=2, kind="encoder", form="post", output="none", token_types=2, embed_norm=True,
    attention=AttentionSpec(width=16, heads=4, bias=True, out_bias=True),
)  # fmt: skip
GPT2 = ModelSpec(
    vocab=40, context=32, layers=2, activation="gelu_tanh",
    attention=AttentionSpec(width=16, heads=4, bias=True, out_bias=True),
)  # fmt: skip
NEO = replace(GPT2, attention=replace(GPT2.attention, bias=False, scale=1.0), windows=(None, 4))
FAMILIES = {"llama": replace(SPEC, layers=2), "gpt2": GPT2, "gpt-neo": NEO, "bert": BERT}
CUTS = {"full": None, "uneven": "0.1,1.0,1.2", "emptied": "1.*"}
needs_onnx = pytest.mark.skipif(
    not all(__import__("importlib.util").util.find_spec(name) for name in ("onnxruntime", "onnxscript")),
    reason="needs onnxruntime and onnxscript",
)


def make(spec: ModelSpec, cut: str | None, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(spec).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.ndim > 1 else None
    return model if cut is None else hw.prune(model, heads=cut, fold=False)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_functions_of_tensors_say_what_the_model_says(family: str, cut: str) -> None:
    model = make(FAMILIES[family], CUTS[cut])
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with traceable(model):
        logits, *held = Prefill(model)(ids[:, :6])
        torch.testing.assert_close(logits, model(ids[:, :6]))
        for i in range(6, 9):
            logits, *held = Next(model)(ids[:, i : i + 1], *held)
            torch.testing.assert_close(logits, model(ids[:, : i + 1])[:, -1:], atol=1e-5, rtol=1e-4)
    assert "forward" not in vars(next(iter(model.attention_layers()))), "nothing stays changed"


OTHERS = [(family, cut) for family in FAMILIES for cut in CUTS if (family, cut) != ("gpt-neo", "emptied")]
close = partial(torch.testing.assert_close, atol=1e-4, rtol=0.0)


@needs_onnx
@pytest.mark.parametrize(
    ("family", "cut"), [("gpt-neo", "emptied"), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_onnxruntime_says_what_we_say(family: str, cut: str, tmp_path: Path) -> None:
    import onnx

    model = make(FAMILIES[family], CUTS[cut])
    made = hw.export(model, tmp_path / "out", to="onnx", check=True)
    assert made.checked is not None
    assert made.checked.largest < 1e-4
    with_heads = len(cached_sites(model.spec))
    for path in (tmp_path / "out").glob("*.onnx"):
        graph = onnx.load(path)
        assert [one.version for one in graph.opset_import if one.domain == ""] == [23]
        assert sum(node.op_type == "Attention" for node in graph.graph.node) == with_heads
    if family == "bert":
        any_shape_of_encoder(model, tmp_path / "out")
    else:
        assert isinstance(made.checked, Checked)
        assert made.checked.parted == 0, "token for token, through the cache"
        any_shape_of_decoder(model, tmp_path / "out")


def any_shape_of_encoder(model: Transformer, folder: Path) -> None:
    session = _session(folder / "encoder.onnx")
    for batch, length in ((3, 7), (1, 1), (2, 31)):
        ids, real = torch.randint(0, 40, (batch, length)), torch.ones(batch, length, dtype=torch.bool)
        real[batch // 2, (length + 1) // 2 :] = False
        (states,) = session.run(None, {"ids": ids.numpy(), "padding": real.numpy()})
        close(torch.from_numpy(states)[real], model(ids, padding=real).detach()[real])


def any_shape_of_decoder(model: Transformer, folder: Path) -> None:
    prefill, step = (_session(folder / f"{name}.onnx") for name in ("prefill", "step"))
    for batch, length in ((3, 7), (1, 1), (2, 30)):
        ids = torch.randint(0, 40, (batch, length + 1))
        logits, *held = prefill.run(None, {"ids": ids[:, :length].numpy()})
        close(torch.from_numpy(logits), model(ids[:, :length]).detach())
        names = [given.name for given in step.get_inputs()][1:]
        logits, *_ = step.run(None, {"ids": ids[:, length:].numpy(), **dict(zip(names, held, strict=True))})
        close(torch.from_numpy(logits), model(ids).detach()[:, -1:])


@needs_onnx
@pytest.mark.parametrize(
    "bits", [pytest.param(bits, marks=() if bits in (4, 2) else pytest.mark.slow) for bits in WEIGHT_BITS]
)
def test_onnx_of_quantized_encoder_equals_ours(bits: int, tmp_path: Path) -> None:
    model = hw.quantise(make(replace(BERT, layers=1), None), bits)
    hw.export(model, tmp_path / "out", to="onnx")
    any_shape_of_encoder(model, tmp_path / "out")


@needs_onnx
@pytest.mark.slow
def test_onnx_of_decoder_with_mixed_bits_equals_ours(tmp_path: Path) -> None:
    bits = {"*": 4, "0.1": 2, "0.2:qk": 3, "0.3:vo": 8, "mlp": 2, "vocabulary": 16}
    model = hw.quantise(make(replace(GPT2, layers=1), None), bits, group=5)
    hw.export(model, tmp_path / "out", to="onnx")
    any_shape_of_decoder(model, tmp_path / "out")


@needs_onnx
@pytest.mark.slow
def test_eight_bits_by_onnxruntime(tmp_path: Path) -> None:
    model = llama(layers=1)
    whole = hw.export(model, tmp_path / "whole", to="onnx")
    made = hw.export(model, tmp_path / "small", to="onnx", int8=True, check=True)
    sizes = [(one.path / "step.onnx").stat().st_size for one in (whole, made)]
    assert sizes[1] < sizes[0]
    assert made.checked is not None
    assert made.checked.largest < 1.0


ALONE = """
import sys, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "headwise":
            raise ImportError("there is no headwise here")
sys.meta_path.insert(0, Refuse())
ids, want = torch.load(sys.argv[2], weights_only=True)
torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(ids), want)
print("the same")
"""


def test_torch_alone(tmp_path: Path) -> None:
    model = without(llama(layers=2), "0.1,1.*")
    hw.export(model, tmp_path / "m.pt2", to="torch")
    ids = torch.randint(0, 200, (3, 11))
    torch.save([ids, model(ids).detach()], tmp_path / "want.pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path / "m.pt2", tmp_path / "want.pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "the same", done.stderr


def test_what_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    two = Transformer(replace(GPT2, kind="encoder-decoder"))
    for to, name in (("onnx", "out"), ("torch", "out.pt2")):
        with pytest.raises(hw.HeadwiseError, match="an encoder-decoder is not written this way"):
            hw.export(two, tmp_path / name, to=to)
    with pytest.raises(hw.HeadwiseError, match=r"ends in \.pt2"):
        hw.export(llama(), tmp_path / "model.pt", to="torch")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(hw.HeadwiseError, match="holds something else"):
        hw.export(llama(), tmp_path / "mine", to="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
