"""Mistakes a new user makes, and what is said about them."""

import subprocess
import sys

import pytest
import torch

import headwise as hw
from headwise.cli import VERBS
from headwise.cli.shell.completion import heads, models, roles
from headwise.cli.shell.examples import EXAMPLES, first_steps
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from tests.runner import headwise


def model() -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(ModelSpec(vocab=11, context=8, layers=6, attention=AttentionSpec(width=12, heads=2)))


def test_two_numbers_are_told_the_address() -> None:
    with pytest.raises(HeadwiseError, match=r"heads\['5.1'\], not heads\[5, 1\]"):
        model().heads[5, 1]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(HeadwiseError, match=r"7 is not the address of a head"):
        model().heads[["5.1", 7]]  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_refused(text: str) -> None:
    minilm = hw.load("minilm")
    with pytest.raises(HeadwiseError, match="the text is empty"):
        hw.attend(minilm, text)
    with pytest.raises(HeadwiseError, match="text 1 of 2 is empty"):
        hw.embed(minilm, ["a cat", text])


def test_a_width_that_does_not_divide_is_told_widths_and_heads_that_do() -> None:
    with pytest.raises(
        HeadwiseError, match=r"width of 36 cannot .* 8 heads with an even .* take a width of 32 or 48, or 6 h"
    ):
        hw.preset("little").resized(width=36)
    for width, count in ((32, 8), (48, 8), (36, 6)):
        assert hw.preset("little").resized(width=width, heads=count).width == width, "the advice works"
    with pytest.raises(HeadwiseError, match=r"take a width of 32 or 48\.$"):
        hw.preset("little").resized(width=33)
    with pytest.raises(
        HeadwiseError, match=r"a width of 770 cannot be shared by 12 heads; take a width of 768 or 780, or 11 heads"
    ):
        hw.preset("gpt2").resized(width=770)


def test_gpt2_is_told_of_the_hub_and_the_preset() -> None:
    with pytest.raises(HeadwiseError, match=r"openai-community/gpt2.*is a preset, without weights"):
        hw.load("gpt2")
    with pytest.raises(HeadwiseError, match=r"did you mean smollm2\?"):
        hw.load("smollm")


def test_headwise_alone_and_verbs_without_what_they_need_say_what_to_try() -> None:
    alone = headwise()
    assert alone.code == 0
    assert alone.out.strip() == first_steps()
    names = {verb.__name__.rpartition(".")[2] for verb in VERBS}
    assert names == set(EXAMPLES)
    for name in ("info", "generate", "heads", "head", "attend", "ablate", "prune", "diff", "export", "plot", "view"):
        done = headwise(name)
        assert done.code == 2, name
        assert EXAMPLES[name] in done.err, name
        assert EXAMPLES[name] in headwise(name, "--help", columns=200).told


def test_completion_offers_models_heads_and_roles(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model().save(tmp_path / "mine")
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert models("") == ["smollm2", "minilm", "mine/"]
    assert models("mi") == ["minilm", "mine/"]

    class Context:
        params = {"model": "mine"}  # noqa: RUF012

    asked = Context()
    assert heads(asked, "5.") == ["5.*", "5.0", "5.1"]  # pyright: ignore[reportArgumentType]
    assert heads(asked, "0.1,5.1") == ["0.1,5.1"]  # pyright: ignore[reportArgumentType]
    asked.params = {"model": "nowhere"}
    assert heads(asked, "") == []  # pyright: ignore[reportArgumentType]
    assert roles("ind") == ["induction"]
    assert "coreference" in roles("")


def test_a_shell_is_given_completions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "info"],
        env={"_HEADWISE_COMPLETE": "complete_bash", "COMP_WORDS": "headwise info sm",
             "COMP_CWORD": "2", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "smollm2" in done.stdout
