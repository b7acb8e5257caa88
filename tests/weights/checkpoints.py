"""Writers of checkpoints in other layouts than Hugging Face's: Meta's, and GGUF as converted by llama.cpp."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from headwise.model import ModelProtocol
from tests.parity.cases import VOCAB, randomize

Kind = gguf.GGMLQuantizationType

WIDTH, HEADS, KV_HEADS, LAYERS, MLP_WIDTH, CONTEXT = 96, 6, 3, 2, 64, 48  # multiples of 32, for quantized weights


def make_llama(model: str = "LlamaForCausalLM", **config: Any) -> Any:
    """Return a small random transformers model."""
    kind = getattr(transformers, model)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    sizes |= {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    sizes |= {"intermediate_size": MLP_WIDTH, "bos_token_id": 0, "eos_token_id": 0, "rms_norm_eps": 1e-5}
    model_instance = kind(kind.config_class(**(sizes | config)))
    randomize(model_instance)
    return model_instance.eval()


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k from the half-split to the interleaved rotary layout, as llama.cpp's converter does."""
    d = len(rows) // heads
    return rows.reshape(heads, 2, d // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows: Tensor, heads: int) -> Tensor:
    """Invert `interleave`."""
    d = len(rows) // heads
    return rows.reshape(heads, d // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


TENSOR_NAMES = {
    "model.embed_tokens.": ("tok_embeddings.", "token_embd."),
    "lm_head.": ("output.", "output."),
    "model.norm.": ("norm.", "output_norm."),
    "model.layers.": ("layers.", "blk."),
    "input_layernorm.": ("attention_norm.", "attn_norm."),
    "self_attn.q_proj.": ("attention.wq.", "attn_q."),
    "self_attn.k_proj.": ("attention.wk.", "attn_k."),
    "self_attn.v_proj.": ("attention.wv.", "attn_v."),
    "self_attn.o_proj.": ("attention.wo.", "attn_output."),
    "post_attention_layernorm.": ("ffn_norm.", "ffn_norm."),
    "mlp.gate_proj.": ("feed_forward.w1.", "ffn_gate."),
    "mlp.up_proj.": ("feed_forward.w3.", "ffn_up."),
    "mlp.down_proj.": ("feed_forward.w2.", "ffn_down."),
}


def rename_tensor(name: str, layout: int) -> str:
    """Return a tensor's name in Meta's layout (0) or in GGUF (1)."""
    for hf_name, other_names in TENSOR_NAMES.items():
        name = name.replace(hf_name, other_names[layout])
    return name


def heads_of(name: str, config: Any) -> int:
    return config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads


def is_rotary(name: str) -> bool:
    return ".q_proj." in name or ".k_proj." in name


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, with tied outputs only once."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def write_meta(model: Any, folder: Path, suffix: str = ".pth", **params: Any) -> Path:
    """Write Meta's layout: params.json and one consolidated file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    tensors = {}
    for name, tensor in weights_of(model).items():
        converted = interleave(tensor, heads_of(name, config)) if is_rotary(name) else tensor
        tensors[rename_tensor(name, 0)] = converted.contiguous()
    tensors["rope.freqs"] = torch.ones(4)
    meta_params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
    }
    meta_params |= {"n_kv_heads": config.num_key_value_heads, "norm_eps": config.rms_norm_eps, "vocab_size": -1}
    meta_params |= {"rope_theta": config.rope_parameters["rope_theta"], "multiple_of": 256}
    (folder / "params.json").write_text(json.dumps(meta_params | params))
    if suffix == ".pth":
        torch.save(tensors, folder / "consolidated.00.pth")
    else:
        save_file(tensors, folder / "consolidated.00.safetensors")
    return folder


def random_blocks(kind: Kind) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return raw bytes of K-quantized weights. Any bits are valid, but the half-precision scales must be small."""
    scales = {Kind.Q2_K: (80, 82), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q3_K: (108,)}[kind]
    rng = np.random.default_rng(0)

    def make(shape: tuple[int, ...]) -> np.ndarray:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // per_block, size), dtype=np.uint8)
        for offset in scales:
            small = rng.uniform(1e-4, 3e-4, raw.shape[:-1]).astype(np.float16)
            raw[..., offset : offset + 2] = small[..., None].view(np.uint8)
        return raw.reshape(*shape[:-1], -1)

    return make


def write_gguf(model: Any, file: Path, kind: Kind = Kind.F32, arch: str = "llama", **fields: Any) -> dict[str, Tensor]:
    """Write a model as llama.cpp's converter does, and set its weights to the dequantized values.

    Returns the names of the extra tensors, and the dequantized tensors by name.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            is_interleaved = is_rotary(name) and arch == "llama"
            rows = interleave(tensor, heads_of(name, config)) if is_interleaved else tensor
            dequantized = _add_tensor(writer, rename_tensor(name, 1), rows.float().numpy(), kind)
            stored[rename_tensor(name, 1)] = dequantized
            tensor.copy_(deinterleave(dequantized, heads_of(name, config)) if is_interleaved else dequantized)
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: Kind) -> Tensor:
    """Add a tensor in the given type, vectors in float32. Returns its dequantized values."""
    if values.ndim == 1 or kind == Kind.F32:
        writer.add_tensor(name, values)
        return torch.from_numpy(values)
    if kind == Kind.F16:
        writer.add_tensor(name, values.astype(np.float16))
        return torch.from_numpy(values.astype(np.float16).astype(np.float32))
    raw = random_blocks(kind)(values.shape) if kind.name.endswith("_K") else gguf.quants.quantize(values, kind)
    writer.add_tensor(name, raw, raw_dtype=kind)
    return torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(values.shape).copy())


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return the divisor of each frequency, as llama.cpp's converter computes it."""
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for channel in range(0, head_dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (channel / head_dim)
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(factor)
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def assert_same_logits(model: ModelProtocol, hf_model: Any, atol: float = 1e-4, length: int = 31) -> None:
    ids = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), hf_model(ids).logits, rtol=0, atol=atol)


def copy_to_own_memory(model: Any) -> Any:
    """Copy the weights to memory of torch: alignment and memory layout affect the last bits of outputs."""
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return copy


def assert_same_model(actual: ModelProtocol, expected: ModelProtocol) -> None:
    """Compare spec, tensors and dtypes bit by bit."""
    assert actual.spec == expected.spec
    actual_state, expected_state = actual.state_dict(), expected.state_dict()
    assert actual_state.keys() == expected_state.keys()
    for name, tensor in actual_state.items():
        assert tensor.dtype == expected_state[name].dtype
        assert torch.equal(tensor, expected_state[name]), name
