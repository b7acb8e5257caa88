"""Common mistakes of new users and their error messages."""

import subprocess
import sys

import pytest
import torch

import headwise as hw
from headwise.cli import COMMANDS
from headwise.cli.shell.command_examples import EXAMPLES, first_steps
from headwise.cli.shell.completion import complete_heads, complete_models, complete_roles
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from tests.runner import run_command


def make_model() -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(ModelSpec(vocab=11, context=8, layers=6, attention=AttentionSpec(width=12, heads=2)))


def test_heads_two_indices_raises_with_address() -> None:
    with pytest.raises(HeadwiseError, match=r"use the address as a string, heads"):
        make_model().heads[5, 1]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(HeadwiseError, match=r"7 is not the address of a head"):
        make_model().heads[["5.1", 7]]  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_attention_maps_and_embed_empty_text_raises(text: str) -> None:
    minilm = hw.load("minilm")
    with pytest.raises(HeadwiseError, match="the text is empty"):
        hw.attention_maps(minilm, text)
    with pytest.raises(HeadwiseError, match="text 1 of 2 is empty"):
        hw.embed(minilm, ["a cat", text])


def test_resized_indivisible_width_suggests_widths_and_heads() -> None:
    with pytest.raises(HeadwiseError, match=r"width=36: .* heads=8 with an even .* Use a width of 32 or 48, or 6 h"):
        hw.preset("synthetic").resized(width=36)
    for width, count in ((32, 8), (48, 8), (36, 6)):
        assert hw.preset("synthetic").resized(width=width, heads=count).width == width, "the advice works"
    with pytest.raises(HeadwiseError, match=r"Use a width of 32 or 48\.$"):
        hw.preset("synthetic").resized(width=33)
    with pytest.raises(
        HeadwiseError, match=r"width=770: not divisible by heads=12\. Use a width of 768 or 780, or 11 heads"
    ):
        hw.preset("gpt2").resized(width=770)


def test_load_unknown_name_suggests_hub_or_preset() -> None:
    with pytest.raises(HeadwiseError, match=r"not an existing file or folder, and not"):
        hw.load("gpt2")
    with pytest.raises(HeadwiseError, match=r"did you mean smollm2\?"):
        hw.load("smollm")


def test_commands_without_arguments_print_examples() -> None:
    done_alone = run_command()
    assert done_alone.code == 0
    assert done_alone.out.strip() == first_steps()
    names = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    assert names == set(EXAMPLES)
    for name in (
        "info",
        "generate",
        "profile",
        "describe",
        "maps",
        "importance",
        "prune",
        "diff",
        "export",
        "plot",
        "view",
    ):
        done = run_command(name)
        assert done.code == 2, name
        assert EXAMPLES[name] in done.err, name
        assert EXAMPLES[name] in run_command(name, "--help", columns=200).output


def test_completion_suggests_models_heads_and_roles(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model().save(tmp_path / "mine")
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert complete_models("") == ["smollm2", "minilm", "rxnmapper", "mine/"]
    assert complete_models("mi") == ["minilm", "mine/"]

    class Context:
        params = {"model": "mine"}  # noqa: RUF012

    context = Context()
    assert complete_heads(context, "5.") == ["5.*", "5.0", "5.1"]  # pyright: ignore[reportArgumentType]
    assert complete_heads(context, "0.1,5.1") == ["0.1,5.1"]  # pyright: ignore[reportArgumentType]
    context.params = {"model": "nowhere"}
    assert complete_heads(context, "") == []  # pyright: ignore[reportArgumentType]
    assert complete_roles("ind") == ["induction"]
    assert "coreference" in complete_roles("")


def test_completion_in_bash_suggests_models() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "info"],
        env={"_HEADWISE_COMPLETE": "complete_bash", "COMP_WORDS": "headwise info sm",
             "COMP_CWORD": "2", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "smollm2" in done.stdout
