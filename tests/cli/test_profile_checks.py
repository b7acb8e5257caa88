"""headwise heads: what cannot be shown is refused before the work begins, and what was not found is told."""

from pathlib import Path

import pytest
import torch

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY
from tests.runner import headwise

GOLD = '{"words": ["the", "dog", "runs"], "relations": [["pulls", 2, 1]]}\n' * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, at = word_tokenizer(VOCABULARY), tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    attention = AttentionSpec(width=12, heads=3, head_dim=4)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=200, layers=2, attention=attention, hidden=7))
    model.tokenizer = tokenizer
    (at / "gold.jsonl").write_text(GOLD, encoding="utf-8")
    return model.save(at / "little").parent


def refused(folder: Path, *options: str) -> str:
    return headwise("heads", folder / "little", "--treebank", folder / "gold.jsonl", *options).refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--layers", "7"), "7"),
        (("--layers", "5-9"), "9"),
        (("--layers", "first"), "first"),
        (("--role", "inductoin"), "there is no role 'inductoin'; did you mean induction?"),
        (("--role", "pullz"), "there is no role 'pullz'; did you mean pulls?"),
        (("--role", "coref"), "did you mean coreference"),
    ],
)
def test_before_the_work_begins(
    options: tuple[str, ...],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("headwise.analysis.roles.profile.profile", begun)
    assert said in refused(folder, *options)


def test_a_role_nobody_has(folder: Path) -> None:
    said = refused(folder, "--no-causal", "--role", "pulls")
    assert said == "headwise: no head here has the role 'pulls'; no head here has any role."
