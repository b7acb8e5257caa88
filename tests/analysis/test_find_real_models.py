"""`find_heads` against gold that does not come from the model: rdkit, a compiler, and synthesized speech.

`make truth` installs the packages. A test whose package is missing is skipped.
"""

import ctypes.util
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import headwise as hw

NPM = Path(__file__).parents[2] / ".venv" / "npm"  # unpacked npm packages of Whisper
pytestmark = pytest.mark.slow


@pytest.mark.skipif(find_spec("rdkit") is None, reason="needs rdkit: make truth")
def test_atom_maps_by_common_substructure_name_head_five() -> None:
    from bench.atom_maps import common_substructure_example, common_substructure_examples

    example = common_substructure_example("CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1")
    assert dict(map(tuple, example["pairs"][:4])) == {19: [0], 20: [1], 23: [4], 25: [8]}
    result = hw.find_heads(hw.load("rxnmapper"), common_substructure_examples())
    assert {head.split(".")[1] for head in result.supported_heads} == {"5"}
    assert result["10.5"].interval[0] > 0.8


@pytest.mark.skipif(
    find_spec("torchwright") is None or find_spec("ortools") is None, reason="needs torchwright: make truth"
)
def test_compiled_program_all_heads_and_components_are_named(tmp_path: Path) -> None:
    from bench.compiled_programs import compile_program, find_accuracy

    totals = find_accuracy(compile_program(8100, tmp_path / "program"), 8100)
    assert totals["find_heads"] == (3, 3, 3)
    assert totals["explain"] == (12, 12, 12)
    assert totals["roles"][0] == totals["roles"][2]


@pytest.mark.skipif(not (NPM / "whisper").is_dir(), reason="needs the npm packages of Whisper: make truth")
@pytest.mark.skipif(ctypes.util.find_library("espeak-ng") is None, reason="needs espeak-ng: make truth")
def test_whisper_heads_follow_synthesized_speech(tmp_path: Path) -> None:
    from bench.whisper_alignment import prepare_folder, spoken_sentences
    from headwise.attached.whisper_io import audio_example

    model: Any = hw.load(prepare_folder(NPM / "whisper", NPM / "tokenizer", tmp_path))
    rows = [audio_example(model, *item) for item in spoken_sentences()[:24]]
    result = hw.find_heads(model, rows, job="alignment")
    assert {"cross.3.1", "cross.2.5"} <= set(result.supported_heads)
    assert result.control.excess_interval[0] > 0.3
