"""Recovery fine-tuning and distillation of attached models, compared with the same run of their native copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.cli import app
from headwise.compression.recovery_finetune import recover
from headwise.text.build_tokenizers import add_mask_token, byte_tokenizer
from headwise.text.corpus import Corpus
from headwise.training import Recipe, resume

transformers: Any = pytest.importorskip("transformers")
TEXT = "to be or not to be, that is the question: whether tis nobler in the mind to suffer\n" * 40
PAIRS = Corpus.pairs(["to be or", "that is"] * 40, ["not to be", "the question"] * 40)
ALL_LOSSES = ("logits", "hidden", "maps", "qkv")
RECIPE: dict[str, Any] = {"steps": 4, "batch_size": 4, "context": 32, "progress": False}


def make_attached(model_class: str = "Llama", seed: int = 0, layers: int = 3, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 24, "num_hidden_layers": layers, "num_attention_heads": 6, "intermediate_size": 40}
    sizes |= {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64}
    if model_class == "T5":
        sizes = {"d_model": 24, "d_kv": 4, "num_heads": 6, "num_layers": 2, "d_ff": 40, "vocab_size": 257}
        sizes |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        return hw.attach(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval(), tokenizer)
    if model_class == "Bert":
        tokenizer = add_mask_token(tokenizer)
        sizes |= {"vocab_size": len(tokenizer), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hw.attach(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval(), tokenizer)
    sizes |= {"num_key_value_heads": 2, "head_dim": 4} | overrides
    config = getattr(transformers, f"{model_class}Config")(**sizes)
    return hw.attach(getattr(transformers, f"{model_class}ForCausalLM")(config).eval(), tokenizer)


@pytest.mark.parametrize("losses", [None, "logits", ALL_LOSSES], ids=["text", "logits", "all"])
def test_recover_attached_equals_native(losses: Any) -> None:
    full = make_attached()
    pruned = full.prune("0.1,1.*,2.3")
    native, native_full = hw.to_native(pruned), hw.to_native(full)
    teacher, native_teacher = (full, native_full) if losses else (None, None)
    attached_run = recover(pruned, TEXT, teacher=teacher, losses=losses, **RECIPE)
    reference = recover(native, TEXT, teacher=native_teacher, losses=losses, **RECIPE)
    assert attached_run.model is pruned
    assert attached_run.loss == pytest.approx(reference.loss, rel=1e-4)
    assert attached_run.valid_loss == pytest.approx(reference.valid_loss, rel=1e-4)
    assert pruned.spec.head_addresses == native.spec.head_addresses
    assert not pruned.training


def test_recover_attached_lowers_loss_and_reloads(tmp_path: Path) -> None:
    full = make_attached()
    recover(full, TEXT, **RECIPE | {"steps": 40, "learning_rate": 3e-3})
    pruned = hw.prune(full, heads="0.1,1.*,2.3", corpus=TEXT)
    before = hw.importance(pruned, TEXT, heads="0.0").clean_loss
    result = recover(pruned, TEXT, teacher=full, **RECIPE | {"steps": 30, "learning_rate": 3e-3}, out=tmp_path / "run")
    assert hw.importance(pruned, TEXT, heads="0.0").clean_loss < before
    loaded = hw.load(tmp_path / "run" / "model")
    ids = torch.tensor([[5, 7, 11, 13]])
    assert torch.equal(loaded(ids), pruned(ids))
    assert result.step == 30


@pytest.mark.parametrize("model_class", ["Bert", "T5", "Qwen3"])
def test_recover_other_attached_models_lowers_loss(model_class: str) -> None:
    attached = make_attached(model_class)
    heads = {"T5": "enc.0.1,dec.1.2,cross.0.0"}.get(model_class, "0.1,1.2")
    pruned = attached.prune(heads) if model_class != "T5" else attached
    corpus: Any = PAIRS if model_class == "T5" else TEXT
    losses = [recover(pruned, corpus, **RECIPE | {"steps": steps, "learning_rate": 3e-3}).loss for steps in (2, 20)]
    assert losses[1] < losses[0]


def test_recover_attached_bfloat16_keeps_dtype() -> None:
    full = make_attached()
    full.model.to(torch.bfloat16)
    pruned = full.prune("0.1,1.*")
    result = recover(pruned, TEXT, teacher=full, **RECIPE | {"steps": 10, "learning_rate": 3e-3})
    assert result.loss < 20
    assert {weight.dtype for weight in pruned.model.parameters()} == {torch.bfloat16}


def test_distill_attached_student_equals_native() -> None:
    teacher, student = make_attached(), make_attached(seed=1, layers=2).prune("0.2,1.5")
    native_teacher, native_student = hw.to_native(teacher), hw.to_native(student)
    recipe = Recipe(steps=4, batch_size=4, warmup=1, context=32)
    attached_run = hw.distill(student, teacher, TEXT, recipe, losses=ALL_LOSSES, progress=False)
    native_run = hw.distill(native_student, native_teacher, TEXT, recipe, losses=ALL_LOSSES, progress=False)
    assert attached_run.loss == pytest.approx(native_run.loss, rel=1e-4)
    mixed = hw.distill(make_attached(seed=1, layers=2).prune("0.2,1.5"), native_teacher, TEXT, recipe, losses=ALL_LOSSES,
                       progress=False)  # fmt: skip
    assert mixed.loss == pytest.approx(native_run.loss, rel=1e-4)


@pytest.mark.parametrize("mode", ["resume", "the same call"])
def test_recover_attached_interrupted_run_continues_bitwise(mode: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=6, batch_size=4, warmup=1, context=32, save_every=2)
    full_run = hw.train(make_attached().prune("0.1,1.*"), TEXT, recipe, out=tmp_path / "full", progress=False)

    def stop(model: Any, step: int) -> None:
        if step == 3:
            raise KeyError(step)

    with pytest.raises(KeyError):
        hw.train(make_attached().prune("0.1,1.*"), TEXT, recipe, out=tmp_path / "parts", progress=False, callback=stop,
                 callback_every=1)  # fmt: skip
    if mode == "resume":
        result = resume(tmp_path / "parts", progress=False)
    else:
        result = hw.train(make_attached().prune("0.1,1.*"), TEXT, recipe, out=tmp_path / "parts", progress=False)
    assert result.step == 6
    expected = full_run.model.state_dict()
    assert result.model.spec.head_addresses == full_run.model.spec.head_addresses
    assert all(torch.equal(value, expected[name]) for name, value in result.model.state_dict().items())


def test_train_quantized_attached_raises() -> None:
    small = hw.quantize(make_attached(), 4)
    with pytest.raises(hw.HeadwiseError, match=r"hw\.dequantize"):
        recover(small, TEXT, **RECIPE)
    assert recover(hw.dequantize(small), TEXT, **RECIPE).step == 4  # the advice


def test_commands_prune_and_distill_take_attached_folders(tmp_path: Path) -> None:
    """Qwen3 is not native, so these folders load as attached models."""
    make_attached("Qwen3").save(tmp_path / "full")
    make_attached("Qwen3", seed=1, layers=2).save(tmp_path / "student")
    (tmp_path / "text.txt").write_text(TEXT)
    text = str(tmp_path / "text.txt")
    prune = ["prune", str(tmp_path / "full"), text, "--heads", "0.1,1.2", "--recover-steps", "2", "--seeds", "1"]
    prune += ["--max-texts", "16", "--max-length", "32", "--out", str(tmp_path / "small"), "--json"]
    distill = ["distill", str(tmp_path / "full"), text, "--student", str(tmp_path / "student"), "--steps", "2"]
    distill += ["--batch-size", "2", "--context", "32", "--out", str(tmp_path / "distilled")]
    quantize = [
        "quantize",
        str(tmp_path / "small"),
        text,
        "--weights",
        "*=4,0.0=8,mlp=8",
        "--max-texts",
        "2",
        "--max-length",
        "32",
    ]
    quantize += ["--out", str(tmp_path / "quantized"), "--json"]
    for arguments in (prune, distill, quantize):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (arguments[0], done.stderr[-2000:], done.exception)
    assert len(hw.load(tmp_path / "small").spec.head_addresses) == 16
    assert hw.load(tmp_path / "quantized").spec.weight_rules
