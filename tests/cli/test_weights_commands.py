"""info, generate and export as a person uses them."""

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
from tests.runner import Done, headwise
from tests.weights.checkpoints import make_llama

quiet_transformers()


def one_line(done: Done, *said: str) -> None:
    """An error a person can put right: one line on standard error, nothing on standard output, exit code 2."""
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.err.startswith("headwise: ")
    assert done.err.count("\n") == 1
    assert all(part in done.err for part in said), done.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model that has a tokenizer: sixty-one words, one per token."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    make_llama().save_pretrained(folder)
    words = [f"{a}{b}" for a in "bdfgklmn" for b in ("a", "e", "i", "o", "u", "ar", "er")]
    hw.Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]).save(folder)
    return str(folder)


# info


def test_info_of_a_bundle() -> None:
    facts = json.loads(headwise("info", "smollm2", "--json").out)
    assert facts["source"] == "smollm2"
    assert (facts["family"], facts["kind"], facts["layers"]) == ("llama", "decoder", 30)
    assert (facts["heads"], facts["heads_by_layer"], facts["kv_heads"]) == (270, "9", 90)
    assert (facts["width"], facts["head_dim"], facts["context"], facts["vocab"]) == (576, 64, 8192, 49152)
    assert facts["parameters"] == 134_515_008
    assert facts["float32_megabytes"] == pytest.approx(538.06, abs=0.01)
    assert facts["kv_cache_kilobytes_per_token"] == pytest.approx(30 * 3 * 128 * 4 / 1000)
    assert facts["tokenizer"] == "49,152 tokens"


def test_info_as_a_table() -> None:
    done = headwise("info", "minilm")
    assert done.code == 0, done.err
    assert done.err == ""
    for part in ("bert", "encoder", "384", "30,522 tokens", "22,713,216"):
        assert part in done.out, part


def test_info_of_a_folder_and_of_a_pruned_model(folder: Path, tmp_path: Path) -> None:
    facts = json.loads(headwise("info", str(folder), "--json").out)
    loaded = hw.load(folder)
    assert facts["parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
    assert facts["tokenizer"] == "none"
    hw.Transformer(loaded.spec.without("0.1,1.0-1")).save(tmp_path / "pruned")
    facts = json.loads(headwise("info", str(tmp_path / "pruned"), "--json").out)
    assert (facts["family"], facts["heads"], facts["heads_by_layer"], facts["kv_heads"]) == ("headwise", 9, "4 to 5", 5)


def test_info_of_a_preset() -> None:
    facts = json.loads(headwise("info", "gpt2", "--json").out)
    assert (facts["family"], facts["parameters"]) == ("preset", 124_439_808)
    assert facts["tokenizer"].startswith("none")


def test_info_of_nothing(tmp_path: Path) -> None:
    one_line(headwise("info", "smolm2"), "'smolm2'", "did you mean smollm2?")
    one_line(headwise("info", str(tmp_path)), "holds no model")


def test_info_does_not_read_weights(folder: Path) -> None:
    """Numbers that are none would be refused by loading."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    assert headwise("info", str(folder)).code == 0
    one_line(headwise("generate", str(folder), "hi"), "NaN or infinite")


# generate


@pytest.mark.slow
def test_generate_appears_as_it_is_written() -> None:
    """A process of its own, with its standard output as a pipe: the text comes in pieces, in order."""
    folder = str(smollm2_folder())  # as transformers writes it: quicker to load than the bundle
    command = [sys.executable, "-m", "headwise", "generate", folder, "The capital of France is", "--tokens", "6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    said = []
    while piece := os.read(process.stdout.fileno(), 4096):
        said.append(piece)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert len(said) > 2  # not all at once
    assert said[0].startswith(b"The capital of France is")
    text = b"".join(said).decode()
    assert text == hw.load(folder).generate("The capital of France is", 6) + "\n"
    assert "Paris" in text
    assert stderr.startswith(b"6 tokens: as many as asked for (--tokens); ")
    assert stderr.count(b"\n") == 1


def test_generate_with_heads_silenced() -> None:
    folder = str(smollm2_folder())
    done = headwise("generate", folder, "One two three", "--tokens", "5", "--json", "--silence", "0-9.*")
    silenced = json.loads(done.out)
    model = hw.load(folder)
    with model.heads["0-9.*"].silenced():
        assert silenced["text"] == model.generate("One two three", 5)
    assert silenced["text"] != model.generate("One two three", 5)


def test_generate_as_json(talker: str) -> None:
    done = headwise("generate", talker, "ba de", "--tokens", "5", "--json")
    assert done.err == ""
    told = json.loads(done.out)
    model = hw.load(talker)
    assert model.tokenizer is not None
    assert set(told) == {"prompt", "text", "ids", "new_tokens", "seconds", "stopped"}
    assert (told["prompt"], told["new_tokens"]) == ("ba de", 5)
    assert told["ids"][:-5] == model.tokenizer.encode("ba de")
    assert told["text"] == model.tokenizer.decode(told["ids"]) == model.generate("ba de", 5)
    assert told["seconds"] > 0
    assert headwise("generate", talker, "ba de", "--tokens", "5").out == told["text"] + "\n"


def test_generate_with_a_seed_is_repeatable(talker: str) -> None:
    draw = ("generate", talker, "ba", "--tokens", "9", "--temperature", "1.2", "--top-k", "50", "--json")
    first, again, other = (json.loads(headwise(*draw, "--seed", seed).out)["ids"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_generate_nothing(talker: str) -> None:
    done = headwise("generate", talker, "ba", "--tokens", "0")
    assert (done.code, done.out) == (0, "ba\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hi", "--silence", "77.1"), "names no head here"),
        (("hi", "--silence", "what"), "does not name heads"),
        (("hi", "--tokens", "-1"), "0 or more"),
        (("hi", "--temperature", "-1"), "temperature"),
        (("hi", "--temperature", "1", "--top-p", "7"), "top_p"),
    ],
)
def test_generate_that_cannot_be(arguments: tuple[str, ...], said: str, talker: str) -> None:
    done = headwise("generate", talker, *arguments)
    assert done.code == 2, done.err
    assert said in done.err
    assert done.err.count("\n") == 1


def test_generate_with_a_model_that_cannot() -> None:
    one_line(headwise("generate", "smolm2", "hi"), "did you mean smollm2?")
    one_line(headwise("generate", "minilm", "hi"), "no next-token output")
    one_line(headwise("generate", str(smollm2_folder()), ""), "empty")


def test_generate_without_a_tokenizer(folder: Path) -> None:
    one_line(headwise("generate", str(folder), "hi"), "has no tokenizer")


# export


def test_export_of_a_folder(folder: Path, tmp_path: Path) -> None:
    done = headwise("export", str(folder), str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert done.out == f"{tmp_path / 'out'}: config.json, headwise-export.json, model.safetensors\n"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        torch.testing.assert_close(hw.load(folder)(ids), theirs(ids).logits, rtol=0, atol=1e-4)


def test_export_as_json_of_a_bundle(tmp_path: Path) -> None:
    done = headwise("export", "minilm", str(tmp_path / "out"), "--family", "bert", "--json")
    told = json.loads(done.out)
    assert told["folder"] == str(tmp_path / "out")
    assert told["files"] == [
        "config.json",
        "headwise-export.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("Hello").input_ids == [101, 7592, 102]


def test_export_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    one_line(headwise("export", str(folder), str(tmp_path / "out"), "--family", "gpt2"), "cannot hold rotary positions")
    one_line(headwise("export", str(folder), str(tmp_path / "out"), "--family", "lama"), "did you mean llama?")
    one_line(headwise("export", "nothing-here", str(tmp_path / "out")), "neither a file or folder")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    one_line(headwise("export", str(folder), str(tmp_path / "papers")), "holds something else")
    assert not (tmp_path / "out").exists()


def test_a_prompt_is_tokenised_once(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, usual = [], hw.Tokenizer.encode
    monkeypatch.setattr(
        hw.Tokenizer, "encode", lambda self, text, *a, **b: (asked.append(text), usual(self, text, *a, **b))[1]
    )
    wanted = hw.load(talker).generate("ba do", 4)
    assert asked.count("ba do") == 1
    asked.clear()
    assert json.loads(headwise("generate", talker, "ba do", "--tokens", "4", "--json").out)["text"] == wanted
    assert asked.count("ba do") == 1


def test_a_model_of_the_hub_is_fetched_once(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, asked = pytest.importorskip("huggingface_hub"), []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: (asked.append(name), talker)[1])
    hw.load("someone/talker")
    assert asked == ["someone/talker"]
    headwise("info", "someone/talker")
    assert len(asked) == 2
