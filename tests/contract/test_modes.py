"""Nothing stays changed: whatever looks, asks or writes leaves every part in the mode it was in, also when it breaks off."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis.ablation.head_outputs import mean_activations, record_z
from headwise.analysis.attribution.linear_probes import decodable
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.attribution.ov_analysis import value_weighted, vocabulary, write_share
from headwise.analysis.metrics.variability import variability
from headwise.analysis.roles.best_heads import coreference
from headwise.compression.curve import curve
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.l0_gates import learn_gates
from headwise.compression.report import report
from headwise.distributed.process_group import Team
from headwise.errors import HeadwiseError
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.documents import Document
from headwise.text.synthetic import VOCABULARY
from headwise.text.treebank import Pronoun
from headwise.training.evaluate import evaluate
from headwise.training.synthetic_eval import exam
from headwise.ui.live_session import Live

TOKENIZER = word_tokenizer(VOCABULARY)
GOLD = list(hw.Corpus.little("held-out", documents=6, seed=3).items())
TEXTS = [document.text for document in GOLD]
SHORT = [" ".join(text.split()[:20]) for text in TEXTS]
IDS = torch.tensor([[5, 9, 11, 30, 7]])
CASES = [
    Pronoun(Document(text, tuple(text.split()), ()), pronoun=9, a=(1,), b=(4,), answer="AB"[i % 2])
    for i, text in enumerate(SHORT)
]


def ours() -> hw.Transformer:
    attention = hw.AttentionSpec(width=16, heads=2, dropout=0.3)
    model = hw.Transformer(hw.ModelSpec(vocab=len(TOKENIZER), context=128, layers=3, attention=attention, dropout=0.3))
    model.tokenizer = TOKENIZER
    return model


def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=len(TOKENIZER), **sizes)
    return hw.attach(transformers.GPT2LMHeadModel(config), TOKENIZER)


def blocks(model: Any) -> nn.ModuleList:
    return model.blocks if isinstance(model, hw.Transformer) else model.model.transformer.h


def evaluated(model: Any) -> None:
    evaluate(model, [np.arange(9)] * 8, [], 2, None, Team(0, 1, torch.device("cpu")))


VERBS: dict[str, Callable[[Any], object]] = {
    "attend": lambda model: hw.attend(model, SHORT[0]),
    "profile": lambda model: hw.profile(model, SHORT, relations=GOLD, causal=False),
    "between": lambda model: hw.compare(model, SHORT, rows=8),
    "importance": lambda model: hw.importance(model, SHORT),
    "importance, gradient": lambda model: hw.importance(model, SHORT, by="gradient"),
    "importance, attribution": lambda model: hw.importance(model, SHORT, by="attribution", check=2),
    "mean_activations": lambda model: mean_activations(model, SHORT),
    "record_z": lambda model: record_z(model, IDS),
    "decodable": lambda model: decodable(model, TEXTS, what="position"),
    "variability": lambda model: variability(model, SHORT),
    "logit_attribution": lambda model: logit_attribution(model, SHORT[0], 7),
    "vocabulary": lambda model: vocabulary(model, "1.1", SHORT[0], typical=True, corpus=SHORT),
    "value_weighted": lambda model: value_weighted(model, SHORT[0], "1.1"),
    "write_share": lambda model: write_share(model, SHORT),
    "coreference": lambda model: coreference(model, CASES),
    "HeadHistory": lambda model: hw.HeadHistory(SHORT, relations=False)(model, 0),
    "learn_gates": lambda model: learn_gates(model, SHORT, keep=0.5, steps=2),
    "Plan.make": lambda model: hw.Plan.make(model, keep=0.5, on=SHORT),
    "PairedEvaluation": lambda model: PairedEvaluation.of(model, SHORT),
    "report": lambda model: report(model, hw.prune(model, heads="1.0", fold=False), SHORT, seeds=1, turns=1, length=16),
    "curve": lambda model: curve(model, SHORT, keeps=(0.5,), bys=("random",), seeds=1),
    "Live.predict": lambda model: Live(model).predict(SHORT[0]),
    "Live.step": lambda model: Live(model).step(SHORT[0]),
    "Live.sentence": lambda model: Live(model).sentence(SHORT[0]),
    "generate": lambda model: model.generate(SHORT[0], tokens=3),
    "exam": lambda model: exam(model, documents=40),
    "evaluate": evaluated,
}
ANYONES = sorted(VERBS.keys() - {"HeadHistory", "exam", "evaluate"})  # those are for our own models


def mixed(model: Any) -> dict[str, bool]:
    """One block trains, the next does not, and inside the last only its attention."""
    model.train()
    first, second, third = blocks(model)
    second.eval()
    third.eval()
    next(third.children()).train()
    modes = {name: part.training for name, part in model.named_modules()}
    assert len(set(modes.values())) == 2
    assert first.training
    return modes


def build(whose: str) -> Any:
    torch.manual_seed(0)
    return {"ours": ours, "theirs": theirs}[whose]()


@pytest.mark.parametrize(
    ("whose", "verb"), [*(("ours", verb) for verb in VERBS), *(("theirs", verb) for verb in ANYONES)]
)
def test_every_part_is_in_its_mode_again(whose: str, verb: str) -> None:
    model = build(whose)
    modes, met = mixed(model), []
    blocks(model)[1].register_forward_hook(lambda block, *_: met.append({part.training for part in block.modules()}))
    VERBS[verb](model)
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert met, "the verb ran the model"
    assert all(found == {False} for found in met), "nothing is dropped out while it looks"

    def fail(*_: object) -> None:
        raise ZeroDivisionError("half-way")

    blocks(model)[2].register_forward_hook(fail)
    with pytest.raises(
        (ZeroDivisionError, HeadwiseError), match=r"half-way|no call could be tried"
    ):  # a cut tries calls
        VERBS[verb](model)
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_between_two_tokens_the_model_is_as_it_was(whose: str) -> None:
    model = build(whose)
    modes = mixed(model)
    steps = model.stream(SHORT[0], 3)
    for _ in range(2):
        next(steps)
        assert {name: part.training for name, part in model.named_modules()} == modes
    steps.close()
    assert {name: part.training for name, part in model.named_modules()} == modes


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_cut_model_trains_where_the_whole_one_does(whose: str) -> None:
    model = build(whose)
    modes = mixed(model)
    small = hw.prune(model, heads="0.1,2.0", fold=False)
    assert {name: part.training for name, part in small.named_modules()} == modes


def test_embedding_drops_nothing_out() -> None:
    attention = hw.AttentionSpec(width=16, heads=2)
    spec = hw.ModelSpec(
        vocab=len(TOKENIZER), context=64, layers=3, attention=attention, dropout=0.3, kind="encoder", output="none"
    )
    model = hw.Transformer(spec)
    model.tokenizer = TOKENIZER
    still = hw.embed(model.eval(), SHORT)
    modes = mixed(model)
    assert torch.equal(hw.embed(model, SHORT), still)
    assert {name: part.training for name, part in model.named_modules()} == modes
