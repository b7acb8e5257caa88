"""headwise profile: invalid filters raise before the work starts, and a role without heads is reported."""

from pathlib import Path

import pytest
import torch

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY
from tests.runner import run_command

GOLD = '{"words": ["the", "dog", "runs"], "relations": [["pulls", 2, 1]]}\n' * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, root = word_tokenizer(VOCABULARY), tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    attention = AttentionSpec(width=12, heads=3, head_dim=4)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=200, layers=2, attention=attention, mlp_width=7))
    model.tokenizer = tokenizer
    (root / "gold.jsonl").write_text(GOLD, encoding="utf-8")
    return model.save(root / "little").parent


def profile_error(folder: Path, *options: str) -> str:
    return run_command("profile", folder / "little", "--treebank", folder / "gold.jsonl", *options).error_line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--show-layers", "7"), "7"),
        (("--show-layers", "5-9"), "9"),
        (("--show-layers", "first"), "first"),
        (("--role", "inductoin"), "did you mean induction?"),
        (("--role", "pullz"), "did you mean pulls?"),
        (("--role", "coref"), "did you mean coreference"),
    ],
)
def test_profile_invalid_option_raises_before_work(
    options: tuple[str, ...],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_if_called(*_: object, **__: object) -> None:
        raise AssertionError("the work has started")

    monkeypatch.setattr("headwise.analysis.roles.profile.profile", fail_if_called)
    assert message in profile_error(folder, *options)


def test_profile_role_without_heads_raises(folder: Path) -> None:
    error = profile_error(folder, "--no-causal", "--role", "pulls")
    assert error.startswith("headwise: --role 'pulls': no head has this role.")
