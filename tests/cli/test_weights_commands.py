"""headwise info, generate and export on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import headwise as hw
from tests.parity.real import smollm2_folder
from tests.parity.silence_logging import quiet_transformers
from tests.runner import CommandResult, run_command
from tests.weights.checkpoints import make_llama

quiet_transformers()


def assert_one_line_error(done: CommandResult, *fragments: str) -> None:
    """Check an error of the user: one line on standard error, no standard output, exit code 2."""
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.err.startswith("headwise: ")
    assert done.err.count("\n") == 1
    assert all(fragment in done.err for fragment in fragments), done.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture(scope="module")
def tokenized_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with a tokenizer of 61 words."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    make_llama().save_pretrained(folder)
    words = [f"{a}{b}" for a in "bdfgklmn" for b in ("a", "e", "i", "o", "u", "ar", "er")]
    hw.Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]).save(folder)
    return str(folder)


# info


def test_info_bundled_model_json() -> None:
    facts = json.loads(run_command("info", "smollm2", "--json").out)
    assert facts["source"] == "smollm2"
    assert (facts["family"], facts["kind"], facts["layers"]) == ("llama", "decoder", 30)
    assert (facts["heads"], facts["heads_by_layer"], facts["kv_heads"]) == (270, "9", 90)
    assert (facts["width"], facts["head_dim"], facts["context"], facts["vocab"]) == (576, 64, 8192, 49152)
    assert facts["parameters"] == 134_515_008
    assert facts["float32_megabytes"] == pytest.approx(538.06, abs=0.01)
    assert facts["kv_cache_kilobytes_per_token"] == pytest.approx(30 * 3 * 128 * 4 / 1000)
    assert facts["tokenizer"] == "49,152 tokens"


def test_info_prints_table() -> None:
    done = run_command("info", "minilm")
    assert done.code == 0, done.err
    assert done.err == ""
    for part in ("bert", "encoder", "384", "30,522 tokens", "22,713,216"):
        assert part in done.out, part


def test_info_folder_and_pruned_model_json(folder: Path, tmp_path: Path) -> None:
    facts = json.loads(run_command("info", str(folder), "--json").out)
    loaded = hw.load(folder)
    assert facts["parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
    assert facts["tokenizer"] == "none"
    hw.Transformer(loaded.spec.without("0.1,1.0-1")).save(tmp_path / "pruned")
    facts = json.loads(run_command("info", str(tmp_path / "pruned"), "--json").out)
    assert (facts["family"], facts["heads"], facts["heads_by_layer"], facts["kv_heads"]) == ("headwise", 9, "4 to 5", 5)


def test_info_preset_json() -> None:
    facts = json.loads(run_command("info", "gpt2", "--json").out)
    assert (facts["family"], facts["parameters"]) == ("preset", 124_439_808)
    assert facts["tokenizer"].startswith("none")


def test_info_missing_model_raises(tmp_path: Path) -> None:
    assert_one_line_error(run_command("info", "smolm2"), "'smolm2'", "did you mean smollm2?")
    assert_one_line_error(run_command("info", str(tmp_path)), "contains no model")


def test_info_nan_weights_are_not_read(folder: Path) -> None:
    """`info` does not load the weights: NaN in them would raise an error."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    assert run_command("info", str(folder)).code == 0
    assert_one_line_error(run_command("generate", str(folder), "hi"), "NaN or infinite")


# generate


@pytest.mark.slow
def test_generate_subprocess_streams_text() -> None:
    """In a subprocess with a pipe as standard output, the text arrives in pieces and in order."""
    folder = str(smollm2_folder())  # transformers format, which loads faster than the bundle
    command = [
        sys.executable,
        "-m",
        "headwise",
        "generate",
        folder,
        "The capital of France is",
        "--max-new-tokens",
        "6",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    pieces = []
    while piece := os.read(process.stdout.fileno(), 4096):
        pieces.append(piece)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert len(pieces) > 2  # not all at once
    assert pieces[0].startswith(b"The capital of France is")
    text = b"".join(pieces).decode()
    assert text == hw.load(folder).generate("The capital of France is", 6) + "\n"
    assert "Paris" in text
    assert stderr.startswith(b"6 tokens: as many as asked for (--max-new-tokens); ")
    assert stderr.count(b"\n") == 1


def test_generate_silence_option_silences_heads() -> None:
    folder = str(smollm2_folder())
    done = run_command("generate", folder, "One two three", "--max-new-tokens", "5", "--json", "--silence", "0-9.*")
    silenced = json.loads(done.out)
    model = hw.load(folder)
    with model.heads["0-9.*"].silenced():
        assert silenced["text"] == model.generate("One two three", 5)
    assert silenced["text"] != model.generate("One two three", 5)


def test_generate_json_fields(tokenized_folder: str) -> None:
    done = run_command("generate", tokenized_folder, "ba de", "--max-new-tokens", "5", "--json")
    assert done.err == ""
    result = json.loads(done.out)
    model = hw.load(tokenized_folder)
    assert model.tokenizer is not None
    assert set(result) == {"prompt", "text", "ids", "new_tokens", "seconds", "stopped"}
    assert (result["prompt"], result["new_tokens"]) == ("ba de", 5)
    assert result["ids"][:-5] == model.tokenizer.encode("ba de")
    assert result["text"] == model.tokenizer.decode(result["ids"]) == model.generate("ba de", 5)
    assert result["seconds"] > 0
    assert run_command("generate", tokenized_folder, "ba de", "--max-new-tokens", "5").out == result["text"] + "\n"


def test_generate_seed_is_repeatable(tokenized_folder: str) -> None:
    command = (
        "generate",
        tokenized_folder,
        "ba",
        "--max-new-tokens",
        "9",
        "--temperature",
        "1.2",
        "--top-k",
        "50",
        "--json",
    )
    first, same, other = (json.loads(run_command(*command, "--seed", seed).out)["ids"] for seed in ("1", "1", "2"))
    assert first == same
    assert first != other


def test_generate_zero_tokens_prints_prompt(tokenized_folder: str) -> None:
    done = run_command("generate", tokenized_folder, "ba", "--max-new-tokens", "0")
    assert (done.code, done.out) == (0, "ba\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hi", "--silence", "77.1"), "no such head"),
        (("hi", "--silence", "what"), "not a valid head pattern"),
        (("hi", "--max-new-tokens", "-1"), "at least 0"),
        (("hi", "--temperature", "-1"), "temperature"),
        (("hi", "--temperature", "1", "--top-p", "7"), "top_p"),
    ],
)
def test_generate_invalid_options_raise(arguments: tuple[str, ...], message: str, tokenized_folder: str) -> None:
    done = run_command("generate", tokenized_folder, *arguments)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.count("\n") == 1


def test_generate_unsupported_model_raises() -> None:
    assert_one_line_error(run_command("generate", "smolm2", "hi"), "did you mean smollm2?")
    assert_one_line_error(run_command("generate", "minilm", "hi"), "no next-token output")
    assert_one_line_error(run_command("generate", str(smollm2_folder()), ""), "empty")


def test_generate_without_tokenizer_raises(folder: Path) -> None:
    assert_one_line_error(run_command("generate", str(folder), "hi"), "has no tokenizer")


# export


def test_export_folder_loads_in_transformers(folder: Path, tmp_path: Path) -> None:
    done = run_command("export", str(folder), str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert done.out == f"{tmp_path / 'out'}: config.json, headwise-export.json, model.safetensors\n"
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        torch.testing.assert_close(hw.load(folder)(ids), hf_model(ids).logits, rtol=0, atol=1e-4)


def test_export_bundled_model_json(tmp_path: Path) -> None:
    done = run_command("export", "minilm", str(tmp_path / "out"), "--family", "bert", "--json")
    result = json.loads(done.out)
    assert result["folder"] == str(tmp_path / "out")
    assert result["files"] == [
        "config.json",
        "headwise-export.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("Hello").input_ids == [101, 7592, 102]


def test_export_invalid_arguments_raise(folder: Path, tmp_path: Path) -> None:
    assert_one_line_error(
        run_command("export", str(folder), str(tmp_path / "out"), "--family", "gpt2"),
        "cannot represent rotary positions",
    )
    assert_one_line_error(
        run_command("export", str(folder), str(tmp_path / "out"), "--family", "lama"), "did you mean llama?"
    )
    assert_one_line_error(
        run_command("export", "nothing-here", str(tmp_path / "out")), "not an existing file or folder"
    )
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    assert_one_line_error(run_command("export", str(folder), str(tmp_path / "papers")), "not written by Headwise")
    assert not (tmp_path / "out").exists()


def test_generate_prompt_is_tokenized_once(tokenized_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, original_encode = [], hw.Tokenizer.encode
    monkeypatch.setattr(
        hw.Tokenizer,
        "encode",
        lambda self, text, *a, **b: (encoded.append(text), original_encode(self, text, *a, **b))[1],
    )
    expected = hw.load(tokenized_folder).generate("ba do", 4)
    assert encoded.count("ba do") == 1
    encoded.clear()
    assert (
        json.loads(run_command("generate", tokenized_folder, "ba do", "--max-new-tokens", "4", "--json").out)["text"]
        == expected
    )
    assert encoded.count("ba do") == 1


def test_load_hub_model_is_downloaded_once(tokenized_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, requested = pytest.importorskip("huggingface_hub"), []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: (requested.append(name), tokenized_folder)[1])
    hw.load("someone/talker")
    assert requested == ["someone/talker"]
    run_command("info", "someone/talker")
    assert len(requested) == 2
