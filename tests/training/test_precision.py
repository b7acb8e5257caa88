"""Half precision, in a process of its own: some processors have instructions for it that the library gets wrong."""

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
from tests.training.tiny import NOISY, MASKED, PLAIN, SHORT, broken, checkpoint, run, same_run, there, distance
def told(kind, folder):
    recipe = replace(SHORT, precision=kind)
    whole = run(NOISY, recipe, folder / "whole")
    broken(NOISY, recipe, folder / "broken", 6)
    broken(NOISY, recipe, folder / "broken", 15)
    again = run(NOISY, recipe, folder / "broken")
    same_run(whole, again)
    states = [json.loads((checkpoint(folder / name, 20) / "training.json").read_text()) for name in ("whole", "broken")]
    still = run(PLAIN, recipe)
    full = run(PLAIN, replace(recipe, precision="float32"))
    hidden = run(MASKED, recipe)
    return {
        "loss": [still.loss, full.loss, hidden.loss], "valid": [still.valid_loss, full.valid_loss],
        "scalers": [state["scaler"] for state in states], "apart": distance(still.model, full.model),
        "types": sorted({str(value.dtype) for value in still.model.parameters()}),
    }
print(json.dumps({kind: told(kind, Path(sys.argv[1]) / kind) for kind in ("bfloat16", "float16")}))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
def test_half_precision_learns_the_same_and_resumes(kind: str, both: dict[str, Any]) -> None:
    told = both[kind]
    half, full, hidden = told["loss"]
    assert half == pytest.approx(full, rel=0.03)
    assert 0 < hidden < 6
    assert told["valid"][0] == pytest.approx(told["valid"][1], rel=0.03)
    assert told["apart"] > 0  # it was half precision indeed
    assert told["types"] == ["torch.float32"]  # weights stay whole
    one, other = told["scalers"]
    assert one == other
    if kind == "float16":
        assert one["scale"] > 1
        assert one["_growth_tracker"] > 8  # counted on from before the stop
    else:
        assert one == {}
