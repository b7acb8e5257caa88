"""Every function restores the mode of every module, also after an error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import mean_activations, record_z
from headwise.analysis.attribution.head_output_scores import output_shares, token_effects, value_weighted_map
from headwise.analysis.attribution.linear_probes import linear_probe
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.metrics.variability import variability
from headwise.analysis.roles.best_relation_heads import best_coreference_head
from headwise.compression import PruneRequest
from headwise.compression.l0_gates import learn_gates
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.plan_report import report
from headwise.compression.pruning_curve import pruning_curve
from headwise.distributed.process_group import ProcessGroup
from headwise.errors import HeadwiseError
from headwise.text.annotated_document import Document
from headwise.text.annotated_documents import GAPExample
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY
from headwise.training.evaluate import evaluate
from headwise.training.synthetic_evaluation import synthetic_eval
from headwise.ui.live_session import LiveSession

TOKENIZER = word_tokenizer(VOCABULARY)
GOLD = list(hw.Corpus.synthetic("held-out", documents=6, seed=3).items())
TEXTS = [document.text for document in GOLD]
SHORT = [" ".join(text.split()[:20]) for text in TEXTS]
IDS = torch.tensor([[5, 9, 11, 30, 7]])
PRONOUNS = [
    GAPExample(Document(text, tuple(text.split()), ()), pronoun=9, a=(1,), b=(4,), answer="AB"[i % 2])
    for i, text in enumerate(SHORT)
]


def native_model() -> hw.Transformer:
    attention = hw.AttentionSpec(width=16, heads=2, dropout=0.3)
    model = hw.Transformer(hw.ModelSpec(vocab=len(TOKENIZER), context=128, layers=3, attention=attention, dropout=0.3))
    model.tokenizer = TOKENIZER
    return model


def attached_model() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=len(TOKENIZER), **sizes)
    return hw.attach(transformers.GPT2LMHeadModel(config), TOKENIZER)


def blocks(model: Any) -> nn.ModuleList:
    return model.blocks if isinstance(model, hw.Transformer) else model.model.transformer.h


def run_evaluate(model: Any) -> None:
    evaluate(model, [np.arange(9)] * 8, [], 2, None, ProcessGroup(0, 1, torch.device("cpu")))


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "attention_maps": lambda model: hw.attention_maps(model, SHORT[0]),
    "profile": lambda model: hw.profile(model, SHORT, relations=GOLD, causal=False),
    "compare_heads": lambda model: hw.compare_heads(model, SHORT, rows=8),
    "importance": lambda model: hw.importance(model, SHORT),
    "importance, gradient": lambda model: hw.importance(model, SHORT, ranking="gradient"),
    "importance, attribution": lambda model: hw.importance(model, SHORT, ranking="attribution", check_heads=2),
    "mean_activations": lambda model: mean_activations(model, SHORT),
    "record_z": lambda model: record_z(model, IDS),
    "linear_probe": lambda model: linear_probe(model, TEXTS, targets="position"),
    "variability": lambda model: variability(model, SHORT),
    "logit_attribution": lambda model: logit_attribution(model, SHORT[0], 7),
    "token_effects": lambda model: token_effects(model, "1.1", SHORT[0], typical=True, corpus=SHORT),
    "value_weighted_map": lambda model: value_weighted_map(model, SHORT[0], "1.1"),
    "output_shares": lambda model: output_shares(model, SHORT),
    "coreference": lambda model: best_coreference_head(model, PRONOUNS),
    "HeadHistory": lambda model: hw.HeadHistory(SHORT, relations=False)(model, 0),
    "learn_gates": lambda model: learn_gates(model, SHORT, keep=0.5, steps=2),
    "plan_pruning": lambda model: hw.plan_pruning(model, PruneRequest(keep=0.5, corpus=SHORT)),
    "PairedEvaluator": lambda model: PairedEvaluator.of(model, SHORT),
    "report": lambda model: report(
        model, hw.prune(model, heads="1.0", fold_mean=False), SHORT, seeds=1, repeats=1, length=16
    ),
    "curve": lambda model: pruning_curve(model, SHORT, keep_fractions=(0.5,), rankings=("random",), seeds=1),
    "LiveSession.predict": lambda model: LiveSession(model).predict(SHORT[0]),
    "LiveSession.step": lambda model: LiveSession(model).generate_next_token(SHORT[0]),
    "LiveSession.sentence": lambda model: LiveSession(model).sentence_data(SHORT[0]),
    "generate": lambda model: model.generate(SHORT[0], max_new_tokens=3),
    "synthetic_eval": lambda model: synthetic_eval(model, documents=40),
    "evaluate": run_evaluate,
}
ATTACHED_FUNCTIONS = sorted(
    FUNCTIONS.keys() - {"HeadHistory", "synthetic_eval", "evaluate"}
)  # these functions support native models only


def set_mixed_modes(model: Any) -> dict[str, bool]:
    """Set training mode in one block, evaluation mode in the next, and only attention to training mode in the last."""
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
    return {"ours": native_model, "theirs": attached_model}[whose]()


@pytest.mark.parametrize(
    ("whose", "verb"), [*(("ours", verb) for verb in FUNCTIONS), *(("theirs", verb) for verb in ATTACHED_FUNCTIONS)]
)
def test_functions_mixed_modes_are_restored(whose: str, verb: str) -> None:
    model = build(whose)
    modes, observed = set_mixed_modes(model), []
    blocks(model)[1].register_forward_hook(
        lambda block, *_: observed.append({part.training for part in block.modules()})
    )
    FUNCTIONS[verb](model)
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert observed, "the verb ran the model"
    assert all(block_modes == {False} for block_modes in observed), "nothing is dropped out while it looks"

    def fail(*_: object) -> None:
        raise ZeroDivisionError("half-way")

    blocks(model)[2].register_forward_hook(fail)
    with pytest.raises(
        (ZeroDivisionError, HeadwiseError), match=r"half-way|could not be called"
    ):  # pruning runs test calls
        FUNCTIONS[verb](model)
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_stream_between_tokens_restores_modes(whose: str) -> None:
    model = build(whose)
    modes = set_mixed_modes(model)
    steps = model.stream(SHORT[0], 3)
    for _ in range(2):
        next(steps)
        assert {name: part.training for name, part in model.named_modules()} == modes
    steps.close()
    assert {name: part.training for name, part in model.named_modules()} == modes


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_prune_mixed_modes_are_kept(whose: str) -> None:
    model = build(whose)
    modes = set_mixed_modes(model)
    small = hw.prune(model, heads="0.1,2.0", fold_mean=False)
    assert {name: part.training for name, part in small.named_modules()} == modes


def test_embed_training_mode_applies_no_dropout() -> None:
    attention = hw.AttentionSpec(width=16, heads=2)
    spec = hw.ModelSpec(
        vocab=len(TOKENIZER), context=64, layers=3, attention=attention, dropout=0.3, kind="encoder", output="none"
    )
    model = hw.Transformer(spec)
    model.tokenizer = TOKENIZER
    still = hw.embed(model.eval(), SHORT)
    modes = set_mixed_modes(model)
    assert torch.equal(hw.embed(model, SHORT), still)
    assert {name: part.training for name, part in model.named_modules()} == modes
