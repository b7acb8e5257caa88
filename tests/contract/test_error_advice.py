"""Advice in errors works: every call that an error advises is made on the same model, and must not raise another error."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.compression.prune_request import PruneRequest
from headwise.compression.recovery_finetune import recover
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.training import Recipe

transformers: Any = pytest.importorskip("transformers")
TEXT = "to be or not to be, that is the question: whether tis nobler in the mind to suffer\n" * 5
CALL = re.compile(r"\b((?:hw|model|attached)\.\w+\((?:[^()]|\([^()]*\))*\))")


def attach(model_class: str = "LlamaForCausalLM", **overrides: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 40,
        "vocab_size": 257,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "max_position_embeddings": 64,
    }
    family = re.split(r"For|Model", model_class)[0]
    model = getattr(transformers, model_class)(getattr(transformers, f"{family}Config")(**sizes | overrides)).eval()
    return hw.attach(model, byte_tokenizer())


def fold(model: Any) -> Any:
    return hw.prune(model, heads="0.1,1.*", corpus=TEXT)


MODELS: dict[str, Callable[[], Any]] = {
    "attached": attach,
    "attached, pruned": lambda: fold(attach()),
    "attached, quantized": lambda: hw.quantize(attach(), 4),
    "attached, pruned, quantized": lambda: hw.quantize(fold(attach()), {"*": 4, "vocabulary": 8}),
    "not native, pruned": lambda: fold(attach("Qwen3ForCausalLM")),
    "not native, quantized": lambda: hw.quantize(attach("Qwen3ForCausalLM"), 4),
    "classifier": lambda: attach("LlamaForSequenceClassification"),
    "body": lambda: attach("LlamaModel"),
    "encoder": lambda: attach("BertForMaskedLM"),
    "yarn": lambda: attach(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    "native, pruned": lambda: hw.to_native(fold(attach())),
    "native, pruned, quantized": lambda: hw.quantize(hw.to_native(fold(attach())), 4),
}
# Operations of these pages on a model; many of them are not possible for some of the models.
OPERATIONS: dict[str, Callable[[Any, Path], Any]] = {
    "gguf": lambda model, folder: hw.export(model, folder / "m.gguf", to="gguf"),
    "transformers": lambda model, folder: hw.export(model, folder / "plain"),
    "family": lambda model, folder: hw.export(model, folder / "gpt2", family="gpt2"),
    "to_native": lambda model, folder: hw.to_native(model),
    "quantize": lambda model, folder: hw.quantize(model, 8),
    "in place": lambda model, folder: hw.quantize(model, 8, in_place=True),
    "balanced": lambda model, folder: hw.quantize(model, 4, basis="balanced"),
    "quantized": lambda model, folder: hw.quantized(model, 4).__enter__(),
    "sensitivity": lambda model, folder: hw.sensitivity(model, TEXT[:200], heads="0.0"),
    "recover": lambda model, folder: recover(model, TEXT, steps=1, batch_size=2, context=16, progress=False),
    "train": lambda model, folder: hw.train(model, TEXT, Recipe(steps=1, batch_size=2, context=16), progress=False),
    "prune": lambda model, folder: hw.prune(model, heads="0.0", corpus=TEXT[:300]),
    "gradient": lambda model, folder: hw.plan_pruning(model, PruneRequest(0.5, ranking="gradient", corpus=TEXT[:300])),
    "shard": lambda model, folder: model.check_native("only headwise's own models can be sharded over processes"),
    **{
        f"save {option}": lambda model, folder, option=option: model.save(folder / option, **{option: True})
        for option in ("full_shape", "remote_code")
    },
}


def follow(advice: str, model: Any, folder: Path) -> None:
    """Make an advised call on the model. Placeholders stand for a path, the text and the bits of the caller."""
    names = {
        "hw": hw,
        "model": model,
        "attached": model,
        "folder": folder / "advised",
        "weights": 4,
        "corpus": TEXT[:200],
    }
    call = advice.replace("…", "")
    result = eval(call, names)
    if isinstance(result, hw.Transformer) or hasattr(result, "spec"):
        result.save(folder / "advised result")
        assert hw.load(folder / "advised result").spec.head_addresses == result.spec.head_addresses


FAST = ("attached, pruned, quantized", "not native, pruned", "yarn", "native, pruned, quantized")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]
)
def test_advised_calls_do_not_raise(name: str, tmp_path: Path) -> None:
    advised: dict[str, str] = {}
    for operation, run in OPERATIONS.items():
        model = MODELS[name]()
        folder = tmp_path / operation
        folder.mkdir()
        try:
            run(model, folder)
        except hw.HeadwiseError as error:
            for advice in CALL.findall(str(error)):
                advised[f"{operation}: {advice}"] = str(error)
                try:
                    follow(advice, MODELS[name](), folder)
                except hw.HeadwiseError as second:
                    pytest.fail(
                        f"{operation} of {name} advises {advice}, which raises another error.\n{error}\n{second}"
                    )
        except TypeError:
            assert operation.startswith("save "), "native models are saved in one way only"
    if "quantized" in name:
        assert any("hw.dequantize(model)" in advice for advice in advised), "the errors of this model were collected"


def test_model_without_a_tokenizer_advises_attaching_with_one_which_works() -> None:
    tokenizer = byte_tokenizer()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token="<end>")
    attached = hw.attach(attach().detach())
    with pytest.raises(hw.HeadwiseError, match=r"Attach it with one: hw\.attach\(model, tokenizer\)"):
        hw.attention_maps(attached, "to be")
    expected = hw.attention_maps(attach(), "to be").words
    assert hw.attention_maps(hw.attach(attached.model, wrapped), "to be").words == expected
    attached.tokenizer = None
    attached.tokenizer = wrapped
    assert hw.attention_maps(attached, "to be").words == expected
