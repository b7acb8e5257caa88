"""Pruned models in plain transformers, with a modeling file if they need it, in a process without Headwise."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from tests.attached.models import CASES, VOCAB

transformers: Any = pytest.importorskip("transformers")
ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
WITHOUT_HEADWISE = """
import json, sys
sys.modules["headwise"] = None  # importing it raises an error
import torch, transformers
transformers.logging.set_verbosity_error()
jobs = json.loads(sys.stdin.read())
ids = torch.tensor(jobs["ids"])
for folder, auto_class, dtype in jobs["models"]:
    auto = getattr(transformers, auto_class)
    model, info = auto.from_pretrained(
        folder, trust_remote_code=True, dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model.eval()
    with torch.no_grad():
        output = model(ids)[0]
    size = sum(parameter.numel() for parameter in model.parameters())
    result = {"name": type(model).__name__, "output": output.float().tolist(), "size": size}
    if model.can_generate():
        result["generated"] = model.generate(ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    print(json.dumps(result))
assert sys.modules["headwise"] is None
"""


def build(name: str, **overrides: Any) -> Any:
    case = next(case for case in CASES if case.name == name)
    return replace(case, sizes=case.sizes | overrides).build()


def run_without_headwise(models: list[tuple[Path, str, str]], cache: Path) -> list[dict[str, Any]]:
    jobs = {"ids": ids.tolist(), "models": [[str(folder), auto, dtype] for folder, auto, dtype in models]}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEADWISE], input=json.dumps(jobs), capture_output=True, text=True,
        env={"HF_HOME": str(cache), "OMP_NUM_THREADS": "1", "PATH": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


AUTO = {"bert": "AutoModelForMaskedLM", "modernbert": "AutoModelForMaskedLM"}
FAST, SLOW = ("llama", "phi3", "gpt2", "bert"), ("mistral", "qwen2", "qwen3", "gemma3", "opt", "gpt_neox")


@pytest.mark.parametrize("families", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_remote_code_loads_without_headwise(families: tuple[str, ...], tmp_path: Path) -> None:
    """Uneven KV groups, a layer without heads and a folded bias, in ten families; llama in bfloat16, too."""
    models, expected = [], []
    for name in families:
        for dtype in ("float32", "bfloat16") if name == "llama" else ("float32",):
            model = build(name)
            for weight in model.parameters():  # not buffers: rotary frequencies stay in float32, as in from_pretrained
                weight.data = weight.data.to(getattr(torch, dtype))
            attached = hw.attach(model)
            width = attached.spec.width
            pruned = attached.prune(
                "0.1,1.*,2.3", {attached.attention_layers()[0].hook_point.address: torch.ones(width) / 9}
            )
            folder = tmp_path / f"{name}-{dtype}"
            pruned.save(folder, remote_code=True)
            assert "headwise" not in (folder / "modeling_headwise.py").read_text().split('"""', 2)[2].replace(
                "headwise_pruned", ""
            )
            models.append((folder, AUTO.get(name, "AutoModelForCausalLM"), dtype))
            with torch.no_grad():
                generated = None
                if pruned.spec.kind == "decoder":
                    generated = pruned.model.generate(
                        ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0
                    ).tolist()
                expected.append(
                    (pruned.model(ids)[0].float(), generated, sum(p.numel() for p in pruned.model.parameters()))
                )
            reloaded: Any = hw.load(folder, dtype=None)  # an attached model
            assert torch.equal(reloaded.model(ids)[0].float(), expected[-1][0])
            assert reloaded.spec.head_addresses == pruned.spec.head_addresses
    results = run_without_headwise(models, tmp_path / "cache")
    for (folder, *_), result, (output, generated, size) in zip(models, results, expected, strict=True):
        assert result["name"].startswith("Pruned"), folder
        torch.testing.assert_close(
            torch.tensor(result["output"]), output, rtol=1e-4, atol=1e-5, msg=lambda m, f=folder: f"{f}: {m}"
        )
        assert result["size"] == size, folder
        if generated is not None:
            assert result["generated"] == generated, folder


def test_uniformly_pruned_loads_in_plain_transformers(tmp_path: Path) -> None:
    """One head per KV group goes in each layer, so the configuration can say it; no code and no metadata is needed."""
    model = build("llama", head_dim=4)
    attached = hw.attach(model)
    pruned = attached.prune("0-2.0,0-2.3")
    pruned.save(tmp_path / "even")
    config = json.loads((tmp_path / "even" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 4)
    (result,) = run_without_headwise([(tmp_path / "even", "AutoModelForCausalLM", "float32")], tmp_path / "cache")
    assert result["name"] == "LlamaForCausalLM"
    with torch.no_grad():
        expected = pruned.model(ids)[0]
    torch.testing.assert_close(torch.tensor(result["output"]), expected, rtol=1e-5, atol=1e-5)
    loaded: Any = hw.load(tmp_path / "even")  # an attached model
    assert loaded.spec.head_addresses == pruned.spec.head_addresses, "heads keep their addresses"
    assert torch.equal(loaded.model(ids)[0], expected)


def test_uniformly_pruned_umt5_loads_with_its_own_names_of_sizes(tmp_path: Path) -> None:
    """The configuration calls the head size `d_kv`, and does not derive it from the width."""
    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCAB,
    }
    config = transformers.UMT5Config(**sizes, decoder_start_token_id=0)
    pruned = hw.attach(transformers.UMT5ForConditionalGeneration(config).eval()).prune("enc.*.1,dec.*.1,cross.*.1")
    pruned.save(tmp_path / "even")
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    with torch.no_grad():
        expected = pruned.model(**inputs)[0]
        loaded: Any = hw.load(tmp_path / "even")
        assert loaded.spec.head_addresses == pruned.spec.head_addresses
        assert torch.equal(loaded.model(**inputs)[0], expected)
        plain = transformers.UMT5ForConditionalGeneration.from_pretrained(tmp_path / "even").eval()
        assert plain.config.num_heads == 3
        torch.testing.assert_close(plain(**inputs)[0], expected, rtol=1e-5, atol=1e-5)


def test_whole_kv_groups_pruned_load_in_plain_transformers(tmp_path: Path) -> None:
    pruned = hw.attach(build("qwen3")).prune("0-2.0-2")
    pruned.save(tmp_path / "even")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "even").eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, pruned.model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "heads"), [("llama", "0.1"), ("gpt2", "0-2.1"), ("bert", "0-2.1"), ("llama", "0.0,0.3,1.0,1.3")]
)
def test_other_shapes_keep_the_full_configuration(
    name: str, heads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attached = hw.attach(build(name))
    before = attached.model.config.num_attention_heads
    pruned = attached.prune(heads)
    pruned.save(tmp_path / "m")
    loaded: Any = hw.load(tmp_path / "m")  # an attached model
    assert loaded.model.config.num_attention_heads == before
    assert "remote_code=True" in capsys.readouterr().err


@pytest.mark.parametrize("value", [{"num_attention_heads": "6"}, {"vocab_size": 5}, [], {"num_attention_heads": -1}])
def test_hostile_full_config_raises(value: Any, tmp_path: Path) -> None:
    hw.attach(build("llama")).prune("0-2.0,0-2.3").save(tmp_path / "m")
    file = tmp_path / "m" / "headwise.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"full_config": value}))
    with pytest.raises(hw.HeadwiseError):
        hw.load(tmp_path / "m")


def test_remote_code_unsupported_model_raises_and_writes_nothing(tmp_path: Path) -> None:
    small = hw.quantize(hw.attach(build("llama")), 4)
    with pytest.raises(hw.HeadwiseError, match="remote_code=True"):
        small.save(tmp_path / "m", remote_code=True)
    assert not (tmp_path / "m").exists()
