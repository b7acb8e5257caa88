"""Checkpoints of transformers, converted with the tensor name map of the `gguf` package, as llama.cpp's converter does.

The files do not come from Headwise's exporter: names are those of the package, settings and splits those of the converter.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from tests.parity.cases import CASES as DECODERS
from tests.parity.cases import VOCAB, randomize
from tests.weights.test_t5 import SIZES

gguf = pytest.importorskip("gguf")
T5_SETTINGS = {
    "context_length": 512, "embedding_length": 24, "feed_forward_length": 40, "block_count": 3, "decoder_block_count": 2,
    "attention.head_count": 4, "attention.key_length": 5, "attention.value_length": 5, "attention.relative_buckets_count": 8,
    "attention.layer_norm_epsilon": 1e-6, "attention.layer_norm_rms_epsilon": 1e-6, "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5, tied": ("T5ForConditionalGeneration", {}),
    "flan-t5": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


def write_file(
    path: Path, architecture: str, settings: dict[str, Any], tensors: dict[str, Tensor], blocks: int
) -> None:
    """Write settings and tensors of a state dict under the names of the `gguf` package."""
    writer: Any = gguf.GGUFWriter(path, architecture)
    for name, value in settings.items():
        add = {float: writer.add_float32, str: writer.add_string}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{name}", value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, blocks)
    for name, tensor in tensors.items():
        external = names.get_name(name, try_suffixes=(".weight",))
        assert external is not None, name
        writer.add_tensor(external, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_load_gguf_t5_of_converter_equals_transformers(name: str, tmp_path: Path) -> None:
    class_name, changes = MODELS[name]
    kind = getattr(transformers, class_name)
    model = kind(kind.config_class(**SIZES | {"relative_attention_max_distance": 128} | changes)).eval()
    if changes:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.config.tie_word_embeddings = False  # UMT5 sets it, and then scales its own output
    randomize(model)
    state = {key: value for key, value in model.state_dict().items() if "embed_tokens" not in key}
    if not changes:
        del state["lm_head.weight"]  # the checkpoint of a tied model does not contain it
    write_file(tmp_path / "m.gguf", "t5", T5_SETTINGS, state, 3)
    native: Any = hw.load(tmp_path / "m.gguf")
    ids, source = (torch.randint(VOCAB, (2, length)) for length in (150, 140))
    expected = model(input_ids=source, decoder_input_ids=ids).logits
    torch.testing.assert_close(native(ids, source=source), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek-v2, direct queries", "deepseek-v2, yarn, equal mscale, query rank"])
@torch.no_grad()
def test_load_gguf_deepseek_of_converter_equals_transformers(name: str, tmp_path: Path) -> None:
    case = next(case for case in DECODERS if case.name == name)
    model = case.oracle(case.save(tmp_path / "theirs"))
    config, state = model.config, dict(model.state_dict())
    for key in [key for key in state if "kv_b_proj" in key]:  # the converter splits it and transposes the keys
        rows = state.pop(key).unflatten(0, (4, -1))
        keys, values = rows.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        state |= {key.replace("kv_b", "k_b"): keys.mT, key.replace("kv_b", "v_b"): values}
    rope = config.rope_parameters
    settings: dict[str, Any] = {
        "context_length": 48, "embedding_length": 24, "feed_forward_length": config.intermediate_size, "block_count": 3,
        "attention.head_count": 4, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": 10, "attention.key_length": 14, "attention.value_length": 10, "vocab_size": VOCAB,
        "attention.key_length_mla": 10, "attention.value_length_mla": 5, "rope.dimension_count": 4,
        "rope.freq_base": float(rope["rope_theta"]), "leading_dense_block_count": 3, "expert_feed_forward_length": 8,
        "expert_shared_count": 2,
    }  # fmt: skip
    if config.q_lora_rank:
        settings["attention.q_lora_rank"] = config.q_lora_rank
    if rope["rope_type"] == "yarn":
        settings |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }  # fmt: skip
    write_file(tmp_path / "m.gguf", "deepseek2", settings, state, 3)
    native: Any = hw.load(tmp_path / "m.gguf")
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(native(ids), model(ids).logits, rtol=0, atol=1e-4)
