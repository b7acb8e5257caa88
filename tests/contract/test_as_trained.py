"""Measured as trained: what stood before a text in training stands before it wherever the model reads one.

Heard is what reaches the embedding, of whatever model: the given one, a cut copy, a twin of random weights.
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
from headwise.analysis.ablation.head_outputs import mean_activations
from headwise.analysis.attribution.linear_probes import decodable
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.attribution.ov_analysis import value_weighted, vocabulary, write_share
from headwise.analysis.metrics.variability import variability
from headwise.compression.curve import curve
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.l0_gates import learn_gates
from headwise.compression.recovery import heal
from headwise.experiments.claims.ensemble import average_loss
from headwise.model import Transformer
from headwise.model.layers import Embedding
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Corpus, Tokenizer
from headwise.text.build_tokenizers import add_frame, add_mask, byte_tokenizer, word_tokenizer
from headwise.training import Recipe, train
from headwise.training.synthetic_eval import exam
from headwise.ui.live_session import Live
from headwise.ui.sentence_view import make_sentence
from headwise.weights import load
from tests.runner import headwise
from tests.training.tiny import broken, run, same_weights

SPEC = ModelSpec(vocab=1, context=128, layers=2, attention=AttentionSpec(width=16, heads=2))
ENCODER = replace(SPEC, kind="encoder", output="mlm")
TEXTS = Recipe(steps=3, batch=4, warmup=1, rows="texts", evaluate_every=3)
DOCUMENTS = list(Corpus.little("held-out", documents=8, seed=4).items())
PLAIN = [document.text for document in DOCUMENTS]
TEXT = min(PLAIN, key=len)


@contextmanager
def heard() -> Iterator[set[tuple[int, ...]]]:
    """The first two ids of every text that is read, whoever reads it: those at position 0 and 1."""
    began: set[tuple[int, ...]] = set()
    usual = Embedding.forward

    def listening(self: Embedding, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        for row, places in zip(ids.tolist(), positions.expand(len(ids), -1).tolist(), strict=True):
            if 0 in places:  # else the text goes on from a cache
                first = len(places) - 1 - places[::-1].index(0)  # behind the padding on its left, which is at 0 too
                began.add(tuple(row[first : first + 2]))
        return usual(self, ids, positions, types)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "forward", listening)
        yield began


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "little"
    with heard() as began:
        train(SPEC, Corpus.little(documents=12), TEXTS, out=out, valid=Corpus.of(PLAIN), progress=False)
    assert {first for first, *_ in began} == {Tokenizer.load(out / "tokens").eos}
    return out / "model"


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


def words_of(model: Any) -> Tokenizer:
    assert isinstance(model.tokenizer, Tokenizer)
    return model.tokenizer


def recorded(model: Any) -> None:
    with hw.record(model, "0.*"):
        model(torch.tensor([model.tokenizer.encode(TEXT)]))


def without(model: Any) -> None:
    with hw.ablated(model, "0.1", means=mean_activations(model, PLAIN)):
        model(torch.tensor([model.tokenizer.encode(TEXT)]))


VERBS: dict[str, Callable[[Any], object]] = {
    "profile": lambda model: hw.profile(model, DOCUMENTS),
    "profile of plain text": lambda model: hw.profile(model, PLAIN, causal=False),
    "profile beside random weights": lambda model: hw.profile(model, DOCUMENTS, control="random-init", causal=False),
    "profile of shuffled text": lambda model: hw.profile(model, DOCUMENTS, control="shuffled", causal=False),
    "importance": lambda model: hw.importance(model, PLAIN),
    "importance by gradient": lambda model: hw.importance(model, PLAIN, by="gradient"),
    "importance by attribution": lambda model: hw.importance(model, PLAIN, by="attribution"),
    "ablated": without,
    "record": recorded,
    "between": lambda model: hw.compare(model, DOCUMENTS, rows=64),
    "attend": lambda model: hw.attend(model, TEXT),
    "value_weighted": lambda model: value_weighted(model, TEXT, "1.0"),
    "write_share": lambda model: write_share(model, PLAIN),
    "vocabulary": lambda model: vocabulary(model, "1.0", "dog", typical=True, corpus=["the dog ."]),
    "logit_attribution": lambda model: logit_attribution(model, TEXT, "dog"),
    "variability": lambda model: variability(model, PLAIN),
    "decodable": lambda model: decodable(model, DOCUMENTS),
    "history": lambda model: hw.HeadHistory()(model, 0),
    "prune": lambda model: hw.prune(model, keep=0.5, on=PLAIN),
    "gates": lambda model: learn_gates(model, PLAIN, keep=0.5, steps=2),
    "curve": lambda model: curve(model, PLAIN[:4], PLAIN[4:], keeps=(0.5,), seeds=1, bys=("ablation", "random")),
    "heal": lambda model: heal(model, PLAIN, steps=1, batch=4, rows="texts", holdout=0.5, progress=False),
    "generate": lambda model: model.generate(TEXT, tokens=3),
    "generate from nothing": lambda model: model.generate("", tokens=3),
    "generate from several": lambda model: model.generate([TEXT, "the dog"], tokens=3),
    "exam": lambda model: exam(model, documents=4),
    "average_loss": lambda model: average_loss([model], DOCUMENTS),
    "a sentence of the page": lambda model: make_sentence(model, TEXT),
    "the live view, sentence": lambda model: Live(model).sentence(TEXT),
    "the live view, predict": lambda model: Live(model).predict(TEXT, ["0.1"]),
    "the live view, step": lambda model: Live(model).step(TEXT),
}  # fmt: skip


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_reads_texts_behind_what_stood_before_them_in_training(verb: str, model: Any) -> None:
    end = words_of(model).eos
    with heard() as began:
        VERBS[verb](model)
    assert began
    assert {first for first, *_ in began} == {end}
    assert not [pair for pair in began if pair[1:] == (end,)], "and it stands there once"


def test_the_command_line_writes_on_behind_it(folder: Path) -> None:
    with heard() as began:
        done = headwise("generate", folder, "", "--tokens", 3, "--json")
    assert began == {(Tokenizer.load(folder).eos,)}
    assert '"new_tokens"' in done.told


@pytest.mark.usefixtures("few_documents")
def test_an_encoder_reads_a_text_as_it_learned_to() -> None:
    """A frame before and behind, in training as in every verb; here by every text that training reads, and its mask."""
    rows: set[tuple[int, ...]] = set()
    usual = Embedding.forward

    def listening(self: Embedding, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        rows.update(tuple(row) for row in ids.tolist())
        return usual(self, ids, positions, types)

    texts = ["the dog", "the cat saw the dog", "the cats saw a dog"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "forward", listening)
        made = train(ENCODER, texts, replace(TEXTS, mask_share=0.2, holdout=0.0), tokenizer="word", progress=False)
    tokenizer = words_of(made.model)
    end = tokenizer.eos
    assert tokenizer.around == ((end,), (end,))
    lengths = {len(tokenizer.encode(text)) for text in texts}
    assert lengths == {4, 7}
    assert {len(row) for row in rows} == {7}, "the longest is read to its end"
    with heard() as began:
        vectors = hw.embed(made.model, texts)
        hw.profile(made.model, texts, causal=False)
        hw.importance(made.model, texts)
    assert {first for first, *_ in began} == {end}
    ids = torch.tensor([[end, *tokenizer.encode(texts[1], special=False), end]])
    mean = F.normalize(made.model(ids, hidden=True).mean(1), dim=-1)  # (1, D)
    assert torch.allclose(vectors[1:2], mean, atol=1e-6)


def test_the_loss_told_while_training_is_the_loss_measured_afterwards(folder: Path) -> None:
    """Evaluation asks for the end of a text too, so texts are cut at the context: then both ask for the same words."""
    spec = replace(SPEC, context=12)
    made = train(spec, PLAIN, replace(TEXTS, holdout=0.0), valid=PLAIN, tokenizer="word", progress=False)
    tokenizer = words_of(made.model)
    cut = [" ".join(text.split()[:12]) for text in PLAIN]
    assert made.valid_loss == pytest.approx(average_loss([made.model], cut), abs=1e-6)
    begun = [[tokenizer.eos, *tokenizer.encode(text, special=False)] for text in cut]  # 13 tokens each, by hand
    ids = torch.tensor(begun)
    by_hand = F.cross_entropy(made.model(ids[:, :-1]).mT, ids[:, 1:]).item()
    assert made.valid_loss == pytest.approx(by_hand, abs=1e-6)
    longer = replace(SPEC, context=13)  # the same weights, if positions were learned for one more place
    roomy = Transformer(replace(longer, vocab=len(tokenizer)))
    state = made.model.state_dict()
    state["embed.positions.weight"] = F.pad(state["embed.positions.weight"], (0, 0, 0, 1))
    roomy.load_state_dict(state)
    roomy.tokenizer = tokenizer
    trial = PairedEvaluation.of(roomy, cut)
    assert trial.estimate(trial.full).mean == pytest.approx(by_hand, abs=1e-6)
    assert hw.importance(roomy, cut, heads="0.0").clean == pytest.approx(by_hand, abs=1e-6)


def test_what_stands_before_a_text_is_a_special_token(model: Any) -> None:
    end, aligned = words_of(model).eos, words_of(model).align("the dog", ["the", "dog"])
    assert aligned.ids[0] == end
    assert aligned.spans[0] == (0, 0)
    assert aligned.words_of_token == ((), (0,), (1,))
    assert aligned.tokens_of_word == ((1,), (2,))
    seen = hw.attend(model, "the dog", "0.0")
    assert seen.words == ("<end>", "the", "dog")
    assert make_sentence(model, "the dog")["special"] == [True, False, False]
    assert words_of(model).decode(words_of(model).encode("the dog")) == "the dog"
    assert model.generate("the dog", tokens=0) == "the dog"
    for head in hw.profile(model, DOCUMENTS, causal=False):
        for context in head.hardest:
            assert context.row > 0, "it looks at nothing, so it is nobody's evidence"


def test_it_is_saved_and_transformers_reads_it_too(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT) == [ours.eos, *ours.encode(TEXT, special=False)]


def test_windows_have_nothing_before_a_text() -> None:
    for rows in ("windows", "random"):
        made = run(replace(SPEC, context=8), replace(TEXTS, rows=rows))
        assert words_of(made.model).around == ((), ())
        with heard() as began:
            hw.importance(made.model, ["to be"])
        assert began == {tuple(b"to")}


def templated(template: str) -> Tokenizer:
    """Bytes, and a start token of its own that a user's tokenizer puts before a text."""
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
def test_a_tokenizer_with_a_start_of_its_own_gets_no_second(template: str, around: tuple[tuple[int, ...], ...]) -> None:
    with heard() as began:
        made = run(SPEC, replace(TEXTS, holdout=0.0), text=["to be", "or not", "to see"], tokenizer=templated(template))
    assert words_of(made.model).around == around
    start = around[0][0]
    assert began == {(start, ord("t")), (start, ord("o"))}
    with heard() as began:
        hw.importance(made.model, ["to be", "or not"], heads="0.0")
    assert began == {(start, ord("t")), (start, ord("o"))}


def test_a_model_trained_further_keeps_what_it_had(model: Any) -> None:
    before = words_of(model).backend.to_str()
    for rows in ("texts", "windows"):
        train(model, PLAIN, replace(TEXTS, rows=rows, holdout=0.5), progress=False)
        assert words_of(model).backend.to_str() == before
    bare = Transformer(replace(SPEC, vocab=257))
    bare.tokenizer = byte_tokenizer()
    with heard() as began:
        run(bare, replace(TEXTS, holdout=0.0), text=["to be", "or not", "to see"])
    assert words_of(bare).around == ((), ())
    assert began == {tuple(b"to"), tuple(b"or")}, "nothing stands before a text where the model reads it so"


def test_the_rows_of_a_run_are_those_it_had_before_it_was_stopped(tmp_path: Path) -> None:
    whole = run(SPEC, replace(TEXTS, save_every=1), tmp_path / "whole", text=PLAIN, tokenizer="word")
    broken(SPEC, replace(TEXTS, save_every=1), tmp_path / "stopped", at=2, text=PLAIN, tokenizer="word")
    with heard() as began:
        again = run(SPEC, replace(TEXTS, save_every=1), tmp_path / "stopped", text=PLAIN, tokenizer="word")
    assert {first for first, *_ in began} == {words_of(again.model).eos}
    assert same_weights(whole.model, again.model)
    assert words_of(again.model).backend.to_str() == words_of(whole.model).backend.to_str()


def test_a_run_of_texts_begun_without_it_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(SPEC, TEXTS, out, text=PLAIN, tokenizer="word")
    noted = (out / "run.json").read_text()
    (out / "run.json").write_text(noted.replace('"framed": true,', ""))
    with pytest.raises(hw.HeadwiseError, match="framed was None, now True"):
        run(SPEC, TEXTS, out, text=PLAIN, tokenizer="word")


def test_pairs_keep_their_own_way() -> None:
    spec = replace(SPEC, kind="encoder-decoder", context=24)
    made = run(spec, TEXTS, text=[("to be", "eb ot"), ("or not", "ton ro")] * 4)
    assert words_of(made.model).around == ((), ())


def test_a_model_saved_without_it_is_read_as_it_was_saved(folder: Path, tmp_path: Path) -> None:
    """No guess is made: its texts have nothing before them, in the exam as everywhere, until its tokenizer says so."""
    shutil.copytree(folder, tmp_path / "old")
    word_tokenizer_of(folder).save(tmp_path / "old")
    old: Any = load(tmp_path / "old")
    with heard() as began:
        marks = exam(old, documents=4)
        hw.importance(old, PLAIN)
    assert words_of(old).eos not in {first for first, *_ in began}
    assert marks
    old.tokenizer = add_frame(words_of(old))
    with heard() as began:
        hw.importance(old, PLAIN)
    assert {first for first, *_ in began} == {words_of(old).eos}


def word_tokenizer_of(folder: Path) -> Tokenizer:
    """The model's words without a frame."""
    backend = Tokenizer.load(folder).backend
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore  # which puts nothing
    return Tokenizer(backend, Tokenizer.load(folder).special)


def test_a_frame_keeps_what_a_tokenizer_does_besides() -> None:
    framed = add_frame(add_mask(word_tokenizer(["the", "cat"])))
    assert framed.encode("the <mask>") == [framed.eos, 0, framed.mask]
    assert add_frame(framed) is framed
    assert np.array_equal(add_frame(byte_tokenizer(), behind=True).encode("a"), [256, 97, 256])
    assert add_frame(byte_tokenizer()).encode("") == [256]
    nothing = Tokenizer(byte_tokenizer().backend, {})
    with pytest.raises(hw.HeadwiseError, match="no end token"):
        add_frame(nothing)
