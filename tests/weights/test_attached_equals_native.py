"""One checkpoint, attached through transformers and loaded natively: equal maps, z, importance and silenced outputs.

Every `model_type` of `headwise/weights/families` needs a row in MODELS; a test fails without one. A new family adds its row.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.kernels import attention_weights
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.weights.families import FAMILIES
from tests.parity.cases import YARN_MSCALE, randomize

VOCAB, LIMIT = 300, 1e-5
TEXTS = ["to be or not to be", "that is the question"]
GROUPED = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


@dataclass(frozen=True)
class Row:
    """A tiny model of one `model_type`.

    Attributes:
        model: Class of transformers.
        config: Settings of its configuration, without the vocabulary.
        slow: Whether the row runs in the slow tests only. A sample of each kind of architecture runs always.
        shared_layers: Whether one module runs in all layers. Attached, it has one hook point, which sees the call of every
            layer; natively every layer has its own. Importance per head is then not the same quantity.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    slow: bool = True
    shared_layers: bool = False

    def save(self, folder: Path) -> Path:
        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = kind(kind.config_class(**{"vocab_size": VOCAB} | self.config))
        randomize(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.7)  # milder, so that rounding stays below the limit
        model.save_pretrained(folder)
        return folder


MODELS = {
    "gpt2": Row("GPT2LMHeadModel", {
        "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neo": Row("GPTNeoForCausalLM", {
        "hidden_size": 24, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5,
        "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}),
    "bert": Row("BertForMaskedLM", ENCODER),
    "roberta": Row("RobertaForMaskedLM", ENCODER | {"pad_token_id": 1}),
    "xlm-roberta": Row("XLMRobertaForMaskedLM", ENCODER | {"pad_token_id": 1}, slow=False),
    "distilbert": Row("DistilBertForMaskedLM", {
        "dim": 24, "n_heads": 4, "n_layers": 2, "hidden_dim": 40, "max_position_embeddings": 64}),
    "albert": Row("AlbertForMaskedLM", ENCODER | {"embedding_size": 10}, shared_layers=True),
    "llama": Row("LlamaForCausalLM", GROUPED, slow=False),
    "mistral": Row("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "qwen2": Row("Qwen2ForCausalLM", GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "deepseek_v2": Row("DeepseekV2ForCausalLM", ENCODER | {
        "first_k_dense_replace": 2, "kv_lora_rank": 10, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 5, "rope_parameters": YARN_MSCALE}, slow=False),
    "qwen3": Row("Qwen3ForCausalLM", GROUPED | {"head_dim": 6}, slow=False),
    "smollm3": Row("SmolLM3ForCausalLM", GROUPED | {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "phi3": Row("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "ministral3": Row("Ministral3ForCausalLM", GROUPED | {"head_dim": 6, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.3}}),
    "olmo2": Row("Olmo2ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "olmo3": Row("Olmo3ForCausalLM", GROUPED | {"pad_token_id": 0, "sliding_window": 5}),
    "gemma2": Row("Gemma2ForCausalLM", GROUPED | {"head_dim": 6, "sliding_window": 5}),
    "gemma3_text": Row("Gemma3ForCausalLM", GROUPED | {
        "head_dim": 6, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "modernbert": Row("ModernBertForMaskedLM", ENCODER | {"local_attention": 6, "num_hidden_layers": 3} | SPECIAL),
    "t5": Row("T5ForConditionalGeneration", T5, slow=False),
    "mt5": Row("MT5ForConditionalGeneration", T5),
}  # fmt: skip


def test_every_model_type_has_a_row() -> None:
    assert {model_type for family in FAMILIES for model_type in family.model_types} == set(MODELS)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name, marks=pytest.mark.slow if row.slow else ()) for name, row in MODELS.items()]
)
def test_attached_equals_native(row: Row, tmp_path: Path) -> None:
    folder = row.save(tmp_path)
    native: Any = hw.load(folder)
    attached: Any = hw.attach(getattr(transformers, row.model).from_pretrained(folder).eval())
    assert native.is_native
    native.tokenizer = attached.tokenizer = letter_tokenizer() if native.spec.kind == "encoder" else byte_tokenizer()
    assert row.shared_layers or attached.spec.head_addresses == native.spec.head_addresses
    inputs = {"source": random_ids(2, 9)} if native.spec.kind == "encoder-decoder" else {}
    runs = [run(model, random_ids(2, 13, seed=3), inputs, shared=row.shared_layers) for model in (native, attached)]
    for own, other in zip(*runs, strict=True):
        assert own.keys() == other.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(
                other[name], tensor, rtol=0, atol=LIMIT, msg=lambda text, at=name: f"{at}: {text}"
            )
    if row.shared_layers:
        return
    corpus = list(zip(TEXTS, TEXTS[::-1], strict=True)) if inputs else TEXTS
    for ranking in ("gradient", "attribution"):
        importance = [hw.importance(model, corpus, ranking=ranking, check_heads=0).mean for model in (native, attached)]
        torch.testing.assert_close(*map(torch.as_tensor, importance), rtol=0, atol=LIMIT)


def random_ids(rows: int, length: int, seed: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def letter_tokenizer() -> hw.Tokenizer:
    """Return a tokenizer with a mask token, whose padding id is that of the RoBERTa rows."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return hw.Tokenizer.from_wordpiece(
        ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    )


def run(model: Any, ids: Tensor, inputs: dict[str, Tensor], *, shared: bool) -> list[dict[str, Tensor]]:
    """Return maps and z by call and address, and the outputs of the model and of the model with silenced heads."""
    maps: dict[str, Tensor] = {}
    z: dict[str, Tensor] = {}

    def listen(call: Any) -> None:
        name = str(len(maps)) if shared else f"{len(maps)}: {call.hook_point.address}"
        maps[name], z[name] = attention_weights(call.q, call.k, call.params), call.z

    stacks = [""] if not inputs else ["enc.", "dec.", "cross."]
    heads = "*.1" if shared else ",".join(f"{stack}0.1,{stack}1.*" for stack in stacks)
    with ExitStack() as stack, torch.no_grad():
        for point in model.hook_points():
            stack.enter_context(point.listen(listen))
        plain = model(ids, **inputs)
    with torch.no_grad(), model.heads[heads].silenced():
        silenced = model(ids, **inputs)
    assert not torch.allclose(plain, silenced, atol=1e-3)
    return [maps, z, {"plain": plain, "silenced": silenced}]
