"""Half precision, in a separate process, because the library computes wrong results with some CPU instructions."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from tests.training.tiny import MASKED, NOISY, PLAIN, SHORT, assert_same_run, checkpoint_folder
from tests.training.tiny import max_weight_difference, run, run_interrupted
def result(kind, folder):
    recipe = replace(SHORT, precision=kind)
    uninterrupted = run(NOISY, recipe, folder / "whole")
    run_interrupted(NOISY, recipe, folder / "broken", 6)
    run_interrupted(NOISY, recipe, folder / "broken", 15)
    again = run(NOISY, recipe, folder / "broken")
    assert_same_run(uninterrupted, again)
    folders = [checkpoint_folder(folder / name, 20) for name in ("whole", "broken")]
    states = [json.loads((path / "training.json").read_text()) for path in folders]
    still = run(PLAIN, recipe)
    full = run(PLAIN, replace(recipe, precision="float32"))
    hidden = run(MASKED, recipe)
    return {
        "loss": [still.loss, full.loss, hidden.loss], "valid": [still.valid_loss, full.valid_loss],
        "scalers": [state["scaler"] for state in states], "difference": max_weight_difference(still.model, full.model),
        "types": sorted({str(value.dtype) for value in still.model.parameters()}),
    }
print(json.dumps({kind: result(kind, Path(sys.argv[1]) / kind) for kind in ("bfloat16", "float16")}))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("runs"))],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_train_half_precision_close_to_float32_and_resumes(kind: str, results: dict[str, Any]) -> None:
    result = results[kind]
    half, full, hidden = result["loss"]
    assert half == pytest.approx(full, rel=0.03)
    assert 0 < hidden < 6
    assert result["valid"][0] == pytest.approx(result["valid"][1], rel=0.03)
    assert result["difference"] > 0  # half precision was used
    assert result["types"] == ["torch.float32"]  # weights stay in float32
    scaler, resumed_scaler = result["scalers"]
    assert scaler == resumed_scaler
    if kind == "float16":
        assert scaler["scale"] > 1
        assert scaler["_growth_tracker"] > 8  # continued from before the interruption
    else:
        assert scaler == {}
