"""Texts get the same BOS/EOS template in every function as in training.

The tests capture the token ids that reach the embedding of any model: the given one, a pruned copy, or a copy with random
weights.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import mean_activations
from headwise.analysis.attribution.head_output_scores import output_shares, token_effects, value_weighted_map
from headwise.analysis.attribution.linear_probes import linear_probe
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.metrics.variability import variability
from headwise.compression.l0_gates import learn_gates
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.pruning_curve import pruning_curve
from headwise.compression.recovery_finetune import recover
from headwise.experiments.claim_tests.ensemble import ensemble_loss
from headwise.model import Transformer
from headwise.model.non_attention_layers import Embedding
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import add_bos_eos, add_mask_token, byte_tokenizer, word_tokenizer
from headwise.training import Recipe, train
from headwise.training.synthetic_evaluation import synthetic_eval
from headwise.ui.live_session import LiveSession
from headwise.ui.sentence_page_data import make_sentence_data
from headwise.weights import load
from tests.runner import run_command
from tests.training.tiny import run, run_interrupted, same_weights

SPEC = ModelSpec(vocab=1, context=128, layers=2, attention=AttentionSpec(width=16, heads=2))
ENCODER = replace(SPEC, kind="encoder", output="mlm")
TEXTS = Recipe(steps=3, batch_size=4, warmup=1, rows="texts", evaluate_every=3)
DOCUMENTS = list(Corpus.synthetic("held-out", documents=8, seed=4).items())
PLAIN = [document.text for document in DOCUMENTS]
TEXT = min(PLAIN, key=len)


@contextmanager
def captured_starts() -> Iterator[set[tuple[int, ...]]]:
    """Record the ids at positions 0 and 1 of every text that reaches the embedding."""
    starts: set[tuple[int, ...]] = set()
    original = Embedding.forward

    def recording_forward(self: Embedding, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        for row, row_positions in zip(ids.tolist(), positions.expand(len(ids), -1).tolist(), strict=True):
            if 0 in row_positions:  # otherwise the text continues from a cache
                # after left padding, whose positions are 0 too
                first = len(row_positions) - 1 - row_positions[::-1].index(0)
                starts.add(tuple(row[first : first + 2]))
        return original(self, ids, positions, types)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "forward", recording_forward)
        yield starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "synthetic"
    with captured_starts() as began:
        train(SPEC, Corpus.synthetic(documents=12), TEXTS, out=out, valid=Corpus.of(PLAIN), progress=False)
    assert {first for first, *_ in began} == {Tokenizer.load(out / "tokens").eos}
    return out / "model"


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


def tokenizer_of(model: Any) -> Tokenizer:
    assert isinstance(model.tokenizer, Tokenizer)
    return model.tokenizer


def run_recorded(model: Any) -> None:
    with hw.record(model, "0.*"):
        model(torch.tensor([model.tokenizer.encode(TEXT)]))


def run_ablated(model: Any) -> None:
    with hw.ablated(model, "0.1", means=mean_activations(model, PLAIN)):
        model(torch.tensor([model.tokenizer.encode(TEXT)]))


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "profile": lambda model: hw.profile(model, DOCUMENTS),
    "profile of plain text": lambda model: hw.profile(model, PLAIN, causal=False),
    "profile beside random weights": lambda model: hw.profile(model, DOCUMENTS, control="random-init", causal=False),
    "profile of shuffled text": lambda model: hw.profile(model, DOCUMENTS, control="shuffled", causal=False),
    "importance": lambda model: hw.importance(model, PLAIN),
    "importance by gradient": lambda model: hw.importance(model, PLAIN, ranking="gradient"),
    "importance by attribution": lambda model: hw.importance(model, PLAIN, ranking="attribution"),
    "ablated": run_ablated,
    "record": run_recorded,
    "compare_heads": lambda model: hw.compare_heads(model, DOCUMENTS, rows=64),
    "attention_maps": lambda model: hw.attention_maps(model, TEXT),
    "value_weighted_map": lambda model: value_weighted_map(model, TEXT, "1.0"),
    "output_shares": lambda model: output_shares(model, PLAIN),
    "token_effects": lambda model: token_effects(model, "1.0", "dog", typical=True, corpus=["the dog ."]),
    "logit_attribution": lambda model: logit_attribution(model, TEXT, "dog"),
    "variability": lambda model: variability(model, PLAIN),
    "linear_probe": lambda model: linear_probe(model, DOCUMENTS),
    "history": lambda model: hw.HeadHistory()(model, 0),
    "prune": lambda model: hw.prune(model, keep=0.5, corpus=PLAIN),
    "gates": lambda model: learn_gates(model, PLAIN, keep=0.5, steps=2),
    "curve": lambda model: pruning_curve(
        model, PLAIN[:4], PLAIN[4:], keep_fractions=(0.5,), seeds=1, rankings=("ablation", "random")
    ),
    "recover": lambda model: recover(model, PLAIN, steps=1, batch_size=4, rows="texts", holdout=0.5, progress=False),
    "generate": lambda model: model.generate(TEXT, max_new_tokens=3),
    "generate from nothing": lambda model: model.generate("", max_new_tokens=3),
    "generate from several": lambda model: model.generate([TEXT, "the dog"], max_new_tokens=3),
    "synthetic_eval": lambda model: synthetic_eval(model, documents=4),
    "ensemble_loss": lambda model: ensemble_loss([model], DOCUMENTS),
    "a sentence of the page": lambda model: make_sentence_data(model, TEXT),
    "the live view, sentence": lambda model: LiveSession(model).sentence_data(TEXT),
    "the live view, predict": lambda model: LiveSession(model).predict(TEXT, ["0.1"]),
    "the live view, step": lambda model: LiveSession(model).generate_next_token(TEXT),
}  # fmt: skip


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("verb", FUNCTIONS)
def test_functions_any_text_is_read_with_training_template(verb: str, model: Any) -> None:
    end = tokenizer_of(model).eos
    with captured_starts() as began:
        FUNCTIONS[verb](model)
    assert began
    assert {first for first, *_ in began} == {end}
    assert not [pair for pair in began if pair[1:] == (end,)], "and it stands there once"


def test_generate_command_empty_prompt_starts_with_eos(folder: Path) -> None:
    with captured_starts() as began:
        done = run_command("generate", folder, "", "--max-new-tokens", 3, "--json")
    assert began == {(Tokenizer.load(folder).eos,)}
    assert '"new_tokens"' in done.output


@pytest.mark.usefixtures("few_documents")
def test_encoder_trained_on_texts_reads_same_template() -> None:
    """Training and every function add the BOS/EOS template to every text, and set its attention mask."""
    rows: set[tuple[int, ...]] = set()
    original = Embedding.forward

    def recording_forward(self: Embedding, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        rows.update(tuple(row) for row in ids.tolist())
        return original(self, ids, positions, types)

    texts = ["the dog", "the cat saw the dog", "the cats saw a dog"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "forward", recording_forward)
        result = train(ENCODER, texts, replace(TEXTS, mask_fraction=0.2, holdout=0.0), tokenizer="word", progress=False)
    tokenizer = tokenizer_of(result.model)
    end = tokenizer.eos
    assert tokenizer.template_ids == ((end,), (end,))
    lengths = {len(tokenizer.encode(text)) for text in texts}
    assert lengths == {4, 7}
    assert {len(row) for row in rows} == {7}, "the longest is read to its end"
    with captured_starts() as began:
        vectors = hw.embed(result.model, texts)
        hw.profile(result.model, texts, causal=False)
        hw.importance(result.model, texts)
    assert {first for first, *_ in began} == {end}
    ids = torch.tensor([[end, *tokenizer.encode(texts[1], add_special_tokens=False), end]])
    mean = F.normalize(result.model(ids, hidden=True).mean(1), dim=-1)  # (1, D)
    assert torch.allclose(vectors[1:2], mean, atol=1e-6)


def test_train_valid_loss_equals_loss_measured_afterwards(folder: Path) -> None:
    """Evaluation predicts the end token too, so texts are truncated to the context. Then both losses use the same targets."""
    spec = replace(SPEC, context=12)
    result = train(spec, PLAIN, replace(TEXTS, holdout=0.0), valid=PLAIN, tokenizer="word", progress=False)
    tokenizer = tokenizer_of(result.model)
    truncated = [" ".join(text.split()[:12]) for text in PLAIN]
    assert result.valid_loss == pytest.approx(ensemble_loss([result.model], truncated), abs=1e-6)
    # 13 tokens each, counted by hand
    token_rows = [[tokenizer.eos, *tokenizer.encode(text, add_special_tokens=False)] for text in truncated]
    ids = torch.tensor(token_rows)
    by_hand = F.cross_entropy(result.model(ids[:, :-1]).mT, ids[:, 1:]).item()
    assert result.valid_loss == pytest.approx(by_hand, abs=1e-6)
    longer = replace(SPEC, context=13)  # the same weights with one more position
    longer_model = Transformer(replace(longer, vocab=len(tokenizer)))
    state = result.model.state_dict()
    state["embed.positions.weight"] = F.pad(state["embed.positions.weight"], (0, 0, 0, 1))
    longer_model.load_state_dict(state)
    longer_model.tokenizer = tokenizer
    evaluation = PairedEvaluator.of(longer_model, truncated)
    assert evaluation.mean_loss(evaluation.full_losses_per_text).mean == pytest.approx(by_hand, abs=1e-6)
    assert hw.importance(longer_model, truncated, heads="0.0").clean_loss == pytest.approx(by_hand, abs=1e-6)


def test_tokenizer_template_start_is_special_token(model: Any) -> None:
    end, aligned = tokenizer_of(model).eos, tokenizer_of(model).align("the dog", ["the", "dog"])
    assert aligned.ids[0] == end
    assert aligned.spans[0] == (0, 0)
    assert aligned.words_of_token == ((), (0,), (1,))
    assert aligned.tokens_of_word == ((1,), (2,))
    view = hw.attention_maps(model, "the dog", "0.0")
    assert view.words == ("<end>", "the", "dog")
    assert make_sentence_data(model, "the dog")["special"] == [True, False, False]
    assert tokenizer_of(model).decode(tokenizer_of(model).encode("the dog")) == "the dog"
    assert model.generate("the dog", max_new_tokens=0) == "the dog"
    for head in hw.profile(model, DOCUMENTS, causal=False):
        for context in head.top_contexts:
            assert context.row > 0, "it looks at nothing, so it is nobody's evidence"


def test_tokenizer_saved_template_is_read_by_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    native = Tokenizer.load(folder)
    hf_tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert (
        hf_tokenizer(TEXT)["input_ids"]
        == native.encode(TEXT)
        == [native.eos, *native.encode(TEXT, add_special_tokens=False)]
    )


def test_train_window_rows_add_no_template() -> None:
    for rows in ("windows", "random"):
        result = run(replace(SPEC, context=8), replace(TEXTS, rows=rows))
        assert tokenizer_of(result.model).template_ids == ((), ())
        with captured_starts() as began:
            hw.importance(result.model, ["to be"])
        assert began == {tuple(b"to")}


def template_tokenizer(template: str) -> Tokenizer:
    """Byte tokenizer with a start token that it adds before a text."""
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(template, None, [("<s>", 257), ("<end>", 256)])  # pyright: ignore
    return Tokenizer(backend, {"bos": 257, "eos": 256})


@pytest.mark.parametrize(
    ("template", "around"),
    [
        ("<s> $A", ((257,), ())),
        ("<s> $A <end>", ((257,), (256,))),
        ("$A <end>", ((256,), (256,))),
        ("$A", ((256,), ())),
    ],
)
def test_train_tokenizer_with_own_template_is_unchanged(template: str, around: tuple[tuple[int, ...], ...]) -> None:
    with captured_starts() as began:
        result = run(
            SPEC,
            replace(TEXTS, holdout=0.0),
            text=["to be", "or not", "to see"],
            tokenizer=template_tokenizer(template),
        )
    assert tokenizer_of(result.model).template_ids == around
    start = around[0][0]
    assert began == {(start, ord("t")), (start, ord("o"))}
    with captured_starts() as began:
        hw.importance(result.model, ["to be", "or not"], heads="0.0")
    assert began == {(start, ord("t")), (start, ord("o"))}


def test_train_existing_model_keeps_its_template(model: Any) -> None:
    before = tokenizer_of(model).backend.to_str()
    for rows in ("texts", "windows"):
        train(model, PLAIN, replace(TEXTS, rows=rows, holdout=0.5), progress=False)
        assert tokenizer_of(model).backend.to_str() == before
    bare = Transformer(replace(SPEC, vocab=257))
    bare.tokenizer = byte_tokenizer()
    with captured_starts() as began:
        run(bare, replace(TEXTS, holdout=0.0), text=["to be", "or not", "to see"])
    assert tokenizer_of(bare).template_ids == ((), ())
    assert began == {tuple(b"to"), tuple(b"or")}, "nothing stands before a text where the model reads it so"


def test_train_resumed_run_reads_same_rows(tmp_path: Path) -> None:
    full = run(SPEC, replace(TEXTS, save_every=1), tmp_path / "whole", text=PLAIN, tokenizer="word")
    run_interrupted(SPEC, replace(TEXTS, save_every=1), tmp_path / "stopped", stop_step=2, text=PLAIN, tokenizer="word")
    with captured_starts() as began:
        again = run(SPEC, replace(TEXTS, save_every=1), tmp_path / "stopped", text=PLAIN, tokenizer="word")
    assert {first for first, *_ in began} == {tokenizer_of(again.model).eos}
    assert same_weights(full.model, again.model)
    assert tokenizer_of(again.model).backend.to_str() == tokenizer_of(full.model).backend.to_str()


def test_train_resume_without_template_raises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(SPEC, TEXTS, out, text=PLAIN, tokenizer="word")
    noted = (out / "run.json").read_text()
    (out / "run.json").write_text(noted.replace('"add_template": true,', ""))
    with pytest.raises(hw.HeadwiseError, match="add_template was None, now True"):
        run(SPEC, TEXTS, out, text=PLAIN, tokenizer="word")


def test_train_pairs_add_no_template() -> None:
    spec = replace(SPEC, kind="encoder-decoder", context=24)
    result = run(spec, TEXTS, text=[("to be", "eb ot"), ("or not", "ton ro")] * 4)
    assert tokenizer_of(result.model).template_ids == ((), ())


def test_load_model_without_template_adds_none(folder: Path, tmp_path: Path) -> None:
    """A model without a template gets none in any function until its tokenizer defines one."""
    shutil.copytree(folder, tmp_path / "old")
    plain_tokenizer_of(folder).save(tmp_path / "old")
    old: Any = load(tmp_path / "old")
    with captured_starts() as began:
        marks = synthetic_eval(old, documents=4)
        hw.importance(old, PLAIN)
    assert tokenizer_of(old).eos not in {first for first, *_ in began}
    assert marks
    old.tokenizer = add_bos_eos(tokenizer_of(old))
    with captured_starts() as began:
        hw.importance(old, PLAIN)
    assert {first for first, *_ in began} == {tokenizer_of(old).eos}


def plain_tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model without its template."""
    backend = Tokenizer.load(folder).backend
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore  # which puts nothing
    return Tokenizer(backend, Tokenizer.load(folder).special)


def test_add_template_keeps_other_tokenizer_steps() -> None:
    framed = add_bos_eos(add_mask_token(word_tokenizer(["the", "cat"])))
    assert framed.encode("the <mask>") == [framed.eos, 0, framed.mask]
    assert add_bos_eos(framed) is framed
    assert np.array_equal(add_bos_eos(byte_tokenizer(), add_eos=True).encode("a"), [256, 97, 256])
    assert add_bos_eos(byte_tokenizer()).encode("") == [256]
    nothing = Tokenizer(byte_tokenizer().backend, {})
    with pytest.raises(hw.HeadwiseError, match="no end token"):
        add_bos_eos(nothing)
