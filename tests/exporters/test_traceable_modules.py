"""ONNX and torch.export files of pruned models: equal outputs in onnxruntime and without Headwise installed."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.exporters.engine_parity import ParityReport
from headwise.exporters.onnx_export import _session
from headwise.exporters.traceable_modules import DecodeStepModule, PrefillModule, bypass_empty_layers, cached_layers
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.spec.weight_bits import WEIGHT_BITS
from tests.exporters.llamas import SPEC, make_llama, without_heads

BERT = ModelSpec(
    vocab=40, context=32, layers=2, kind="encoder", norm_placement="post", output="none", token_types=2, embed_norm=True,
    attention=AttentionSpec(width=16, heads=4, bias=True, out_bias=True),
)  # fmt: skip
GPT2 = ModelSpec(
    vocab=40, context=32, layers=2, activation="gelu_tanh",
    attention=AttentionSpec(width=16, heads=4, bias=True, out_bias=True),
)  # fmt: skip
NEO = replace(GPT2, attention=replace(GPT2.attention, bias=False, scale=1.0), windows=(None, 4))
FAMILIES = {"llama": replace(SPEC, layers=2), "gpt2": GPT2, "gpt-neo": NEO, "bert": BERT}
PRUNINGS = {"full": None, "uneven": "0.1,1.0,1.2", "emptied": "1.*"}
needs_onnx = pytest.mark.skipif(
    not all(__import__("importlib.util").util.find_spec(name) for name in ("onnxruntime", "onnxscript")),
    reason="needs onnxruntime and onnxscript",
)


def make_model(spec: ModelSpec, heads: str | None, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(spec).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.ndim > 1 else None
    return model if heads is None else hw.prune(model, heads=heads, fold_mean=False)


@pytest.mark.parametrize("pruning", PRUNINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_traceable_modules_prefill_and_decode_equal_model(family: str, pruning: str) -> None:
    model = make_model(FAMILIES[family], PRUNINGS[pruning])
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with bypass_empty_layers(model):
        logits, *kv = PrefillModule(model)(ids[:, :6])
        torch.testing.assert_close(logits, model(ids[:, :6]))
        for i in range(6, 9):
            logits, *kv = DecodeStepModule(model)(ids[:, i : i + 1], *kv)
            torch.testing.assert_close(logits, model(ids[:, : i + 1])[:, -1:], atol=1e-5, rtol=1e-4)
    assert "forward" not in vars(next(iter(model.attention_layers()))), "nothing stays changed"


SLOW_CASES = [
    (family, pruning) for family in FAMILIES for pruning in PRUNINGS if (family, pruning) != ("gpt-neo", "emptied")
]
assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=0.0)


@needs_onnx
@pytest.mark.parametrize(
    ("family", "pruning"),
    [("gpt-neo", "emptied"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_export_onnx_matches_model(family: str, pruning: str, tmp_path: Path) -> None:
    import onnx

    model = make_model(FAMILIES[family], PRUNINGS[pruning])
    exported = hw.export(model, tmp_path / "out", to="onnx", check=True)
    assert exported.parity is not None
    assert exported.parity.max_difference < 1e-4
    with_heads = len(cached_layers(model.spec))
    for path in (tmp_path / "out").glob("*.onnx"):
        graph = onnx.load(path)
        assert [case.version for case in graph.opset_import if case.domain == ""] == [23]
        assert sum(node.op_type == "Attention" for node in graph.graph.node) == with_heads
    if family == "bert":
        check_encoder_shapes(model, tmp_path / "out")
    else:
        assert isinstance(exported.parity, ParityReport)
        assert exported.parity.diverged == 0, "token for token, through the cache"
        check_decoder_shapes(model, tmp_path / "out")


def check_encoder_shapes(model: Transformer, folder: Path) -> None:
    session = _session(folder / "encoder.onnx")
    for batch, length in ((3, 7), (1, 1), (2, 31)):
        ids, attention_mask = torch.randint(0, 40, (batch, length)), torch.ones(batch, length, dtype=torch.bool)
        attention_mask[batch // 2, (length + 1) // 2 :] = False
        (states,) = session.run(None, {"ids": ids.numpy(), "attention_mask": attention_mask.numpy()})
        assert_close(
            torch.from_numpy(states)[attention_mask], model(ids, attention_mask=attention_mask).detach()[attention_mask]
        )


def check_decoder_shapes(model: Transformer, folder: Path) -> None:
    prefill, step = (_session(folder / f"{name}.onnx") for name in ("prefill", "step"))
    for batch, length in ((3, 7), (1, 1), (2, 30)):
        ids = torch.randint(0, 40, (batch, length + 1))
        logits, *kv = prefill.run(None, {"ids": ids[:, :length].numpy()})
        assert_close(torch.from_numpy(logits), model(ids[:, :length]).detach())
        names = [graph_input.name for graph_input in step.get_inputs()][1:]
        logits, *_ = step.run(None, {"ids": ids[:, length:].numpy(), **dict(zip(names, kv, strict=True))})
        assert_close(torch.from_numpy(logits), model(ids).detach()[:, -1:])


@needs_onnx
@pytest.mark.parametrize(
    "bits", [pytest.param(bits, marks=() if bits in (4, 2) else pytest.mark.slow) for bits in WEIGHT_BITS]
)
def test_onnx_of_quantized_encoder_equals_ours(bits: int, tmp_path: Path) -> None:
    model = hw.quantize(make_model(replace(BERT, layers=1), None), bits)
    hw.export(model, tmp_path / "out", to="onnx")
    check_encoder_shapes(model, tmp_path / "out")


@needs_onnx
@pytest.mark.slow
def test_onnx_of_decoder_with_mixed_bits_equals_ours(tmp_path: Path) -> None:
    bits = {"*": 4, "0.1": 2, "0.2:qk": 3, "0.3:vo": 8, "mlp": 2, "vocabulary": 16}
    model = hw.quantize(make_model(replace(GPT2, layers=1), None), bits, group_size=5)
    hw.export(model, tmp_path / "out", to="onnx")
    check_decoder_shapes(model, tmp_path / "out")


@needs_onnx
@pytest.mark.slow
def test_export_onnx_int8_is_smaller_and_close(tmp_path: Path) -> None:
    model = make_llama(layers=1)
    full = hw.export(model, tmp_path / "whole", to="onnx")
    quantized = hw.export(model, tmp_path / "small", to="onnx", int8=True, check=True)
    sizes = [(result.path / "step.onnx").stat().st_size for result in (full, quantized)]
    assert sizes[1] < sizes[0]
    assert quantized.parity is not None
    assert quantized.parity.max_difference < 1.0


STANDALONE_SCRIPT = """
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


def test_export_torch_loads_without_headwise(tmp_path: Path) -> None:
    model = without_heads(make_llama(layers=2), "0.1,1.*")
    hw.export(model, tmp_path / "m.pt2", to="torch")
    ids = torch.randint(0, 200, (3, 11))
    torch.save([ids, model(ids).detach()], tmp_path / "want.pt")
    done = subprocess.run(
        [sys.executable, "-c", STANDALONE_SCRIPT, tmp_path / "m.pt2", tmp_path / "want.pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "the same", done.stderr


def test_export_graph_unsupported_model_or_path_raises(tmp_path: Path) -> None:
    encoder_decoder = Transformer(replace(GPT2, kind="encoder-decoder"))
    for to, name in (("onnx", "out"), ("torch", "out.pt2")):
        with pytest.raises(hw.HeadwiseError, match="an encoder-decoder cannot be exported"):
            hw.export(encoder_decoder, tmp_path / name, to=to)
    with pytest.raises(hw.HeadwiseError, match=r"must end in \.pt2"):
        hw.export(make_llama(), tmp_path / "model.pt", to="torch")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(hw.HeadwiseError, match="not written by Headwise"):
        hw.export(make_llama(), tmp_path / "mine", to="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
