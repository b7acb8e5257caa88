"""Settings that are missing, null or unsupported in config.json: read as transformers reads them, or an error."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.weights import open_checkpoint
from tests.parity.cases import (
    LAYER_TYPES,
    NESTED,
    VOCAB,
    YARN_MSCALE,
    Case,
    bert,
    deepseek,
    gpt2,
    gpt_neo,
    llama,
    modernbert,
    scaled_rope,
)

ROPE = {"rope_type": "default", "rope_theta": 77.0}
LLAMA: dict[str, Any] = {"rms_norm_eps": 1e-2, "rope_parameters": ROPE, "num_hidden_layers": 2}

# Settings differ from their defaults where shapes allow it, so that a missing setting changes the outputs.
CASES = {
    "gpt2": gpt2("", n_inner=96, layer_norm_epsilon=1e-2, scale_attn_weights=False, activation_function="relu"),
    "gpt_neo": gpt_neo(
        "", hidden_size=32, num_heads=4, intermediate_size=128, layer_norm_epsilon=1e-2, activation_function="gelu"
    ),
    "bert": bert("", "BertForMaskedLM", "logits", type_vocab_size=2, layer_norm_eps=1e-2, hidden_act="relu"),
    "llama": llama("", num_key_value_heads=6, **LLAMA),
    "mistral": llama(
        "",
        "MistralForCausalLM",
        num_attention_heads=16,
        hidden_size=64,
        num_key_value_heads=8,
        sliding_window=5,
        **LLAMA,
    ),
    "qwen2": llama(
        "",
        "Qwen2ForCausalLM",
        **{**LLAMA, "num_attention_heads": 32, "hidden_size": 64, "num_key_value_heads": 32},
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
}
YARN = scaled_rope("yarn", original_max_position_embeddings=16)
WIDE: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 4, "pad_token_id": 0}
# Families whose settings are taken out in the slow tests only.
SLOW_CASES = {
    "qwen3": llama(
        "", "Qwen3ForCausalLM", **LLAMA | WIDE | YARN, head_dim=16, use_sliding_window=True,
        sliding_window=5, max_window_layers=1, tie_word_embeddings=True,
    ),
    "smollm3": llama(
        "", "SmolLM3ForCausalLM", **LLAMA | WIDE | YARN, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5,
    ),
    "phi3": llama("", "Phi3ForCausalLM", **LLAMA | WIDE, sliding_window=5, tie_word_embeddings=True),
    "ministral3": llama(
        "", "Ministral3ForCausalLM", rms_norm_eps=1e-2, **WIDE, head_dim=16, sliding_window=5, rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3}),
    "olmo2": llama("", "Olmo2ForCausalLM", **LLAMA | WIDE, tie_word_embeddings=True),
    "olmo3": llama("", "Olmo3ForCausalLM", **WIDE, sliding_window=5, layer_types=LAYER_TYPES, rope_parameters=NESTED),
    "gemma2": llama(
        "", "Gemma2ForCausalLM", **LLAMA | WIDE, head_dim=10, sliding_window=5, query_pre_attn_scalar=7,
        attn_logit_softcapping=3.0, final_logit_softcapping=4.0, layer_types=LAYER_TYPES[1:], hidden_activation="gelu",
    ),
    "gemma3": llama(
        "", "Gemma3ForCausalLM", **WIDE, head_dim=10, sliding_window=5, layer_types=LAYER_TYPES, rope_parameters=NESTED,
        query_pre_attn_scalar=7, final_logit_softcapping=4.0, rms_norm_eps=1e-2,
    ),
    "deepseek_v2": deepseek(
        "", rope_parameters=YARN_MSCALE, q_lora_rank=7, rms_norm_eps=1e-2, hidden_size=64, num_attention_heads=32
    ),
    "modernbert": modernbert(
        "", "ModernBertForMaskedLM", norm_eps=1e-2, hidden_activation="relu", layer_types=LAYER_TYPES, rope_parameters=NESTED,
        classifier_activation="relu", num_attention_heads=6,
    ),
}  # fmt: skip
ALL_CASES = CASES | SLOW_CASES
SIZES = {"vocab_size", "hidden_size", "n_embd", "num_layers", "n_layer", "num_hidden_layers", "intermediate_size"}
# Settings that have no effect on a trained model.
IGNORED_SETTINGS = {
    *(
        "architectures",
        "dtype",
        "model_type",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "pretraining_tp",
    ),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "embed_dropout", "resid_dropout"),
    *("classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "reorder_and_upcast_attn"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *(
        "classifier_pooling",
        "deterministic_flash_attn",
        "embedding_dropout",
        "initializer_cutoff_factor",
        "mlp_dropout",
    ),
    *("sparse_pred_ignore_index", "sparse_prediction"),
    # of experts, which a dense model does not have
    *("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "output_router_logits", "routed_scaling_factor"),
}
IDS = torch.randint(VOCAB, (2, 23), generator=torch.Generator().manual_seed(3))


class _Folders(dict[str, Path]):
    """Folder of each case, saved on first use."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> Path:
        self[name] = ALL_CASES[name].save(self._factory.mktemp(name))
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _Folders(tmp_path_factory)


@cache
def config_keys(case: str) -> tuple[str, ...]:
    """Return the settings that transformers writes for a case."""
    kind = getattr(transformers, ALL_CASES[case].model).config_class
    return tuple(json.loads(kind(**ALL_CASES[case].config).to_json_string()))


def mark_slow(case: str, *values: str) -> Any:
    """Return parameters of a test, slow for the cases of SLOW_CASES."""
    return pytest.param(case, *values, marks=pytest.mark.slow if case in SLOW_CASES else ())


def write_checkpoint(folder: Path, config: dict[str, Any], to: Path) -> Path:
    (to / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", to)
    return to


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def load_logits(folder: Path) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            return hw.load(folder)(IDS)
    except hw.HeadwiseError:
        return None


def hf_logits(case: Case, folder: Path) -> torch.Tensor | None:
    """Return transformers' logits, or None if transformers raises an error or initializes weights randomly."""
    try:
        kind: Any = getattr(transformers, case.model)
        model, loading_info = kind.from_pretrained(folder, output_loading_info=True)
        if loading_info["missing_keys"] or loading_info["mismatched_keys"]:
            return None
        with torch.no_grad():
            return model.eval()(IDS).logits
    except Exception:  # any type of error
        return None


@pytest.mark.parametrize("variant", ["left out", "null"])
@pytest.mark.parametrize(
    ("case", "key"),
    [mark_slow(case, key) for case in ALL_CASES for key in config_keys(case) if key not in IGNORED_SETTINGS],
)
def test_load_missing_or_null_setting_equals_transformers(
    case: str, key: str, variant: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = read_config(folders[case])
    config.pop(key)
    folder = write_checkpoint(folders[case], config | ({key: None} if variant == "null" else {}), tmp_path)
    got = load_logits(folder)
    if key in SIZES and got is None:
        return  # we raise an error; transformers uses default sizes and initializes missing weights randomly
    want = hf_logits(ALL_CASES[case], folder)
    if want is None:
        assert got is None, f"transformers refuses {key} {variant}"
    else:
        assert got is not None, f"transformers reads {key} {variant}"
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["left out", "null"])
@pytest.mark.parametrize("key", [*YARN_MSCALE, "attention_factor"])
def test_load_deepseek_missing_or_null_yarn_setting_equals_transformers(
    key: str, variant: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = read_config(folders["deepseek_v2"])
    rope = dict(config["rope_parameters"]) | {"attention_factor": 1.3}
    rope.pop(key)
    rope |= {key: None} if variant == "null" else {}
    folder = write_checkpoint(folders["deepseek_v2"], config | {"rope_parameters": rope}, tmp_path)
    got, want = load_logits(folder), hf_logits(ALL_CASES["deepseek_v2"], folder)
    if want is None or (key == "rope_type" and variant == "left out"):
        assert got is None or key == "rope_type"  # transformers then ignores the scaling
    else:
        assert got is not None, f"transformers reads {key} {variant}"
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [mark_slow(case) for case in ALL_CASES])
def test_load_ignored_settings_do_not_change_logits(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = read_config(folders[case])
    bare = {key: value for key, value in config.items() if key not in IGNORED_SETTINGS or key == "model_type"}
    got = load_logits(write_checkpoint(folders[case], bare, tmp_path))
    assert got is not None
    torch.testing.assert_close(got, load_logits(folders[case]), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt2", "gpt_neo", "bert"])
def test_load_minimal_config_uses_transformers_defaults(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A deep model with only the required settings: tests every default, including windows of late layers."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 30, "intermediate_size": 52}
    extra = {"use_sliding_window": True} if kind == "qwen2" else {"num_hidden_layers": 24} if kind == "gpt_neo" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **extra}))
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    if kind in ("gpt2", "bert"):
        sizes["hidden_size"] = 96  # 12 heads
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **extra}))
    spec, hf_config = open_checkpoint(tmp_path).spec, transformers.AutoConfig.from_pretrained(tmp_path)
    assert spec.context == hf_config.max_position_embeddings
    assert spec.attention.heads == hf_config.num_attention_heads
    assert spec.attention.kv_heads == getattr(hf_config, "num_key_value_heads", hf_config.num_attention_heads)
    eps = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    assert spec.norm_eps == next(getattr(hf_config, name) for name in eps if hasattr(hf_config, name))
    assert spec.tied == hf_config.tie_word_embeddings
    assert spec.token_types == getattr(hf_config, "type_vocab_size", 0)
    windows = [spec.attention_at(layer_address).window for layer_address in spec.layer_addresses]
    assert windows == hf_windows(kind, hf_config)
    if kind in ("llama", "mistral", "qwen2"):
        assert spec.attention.rotary == hw.Rotary(hf_config.rope_parameters["rope_theta"])


def hf_windows(kind: str, hf_config: Any) -> list[int | None]:
    if kind == "mistral":
        return [hf_config.sliding_window] * hf_config.num_hidden_layers
    if kind == "qwen2":
        return [hf_config.sliding_window if name == "sliding_attention" else None for name in hf_config.layer_types]
    kinds = getattr(hf_config, "attention_layers", ["global"] * hf_config.num_hidden_layers)
    return [hf_config.window_size if name == "local" else None for name in kinds]


# Unusual settings: read as transformers reads them, or an error that names the problem.

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"n_ctx": 7}),
    ("gpt2", {"num_attention_heads": 6}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"sliding_window": 3, "use_sliding_window": True}),
    ("llama", {"head_dim": None, "num_key_value_heads": None}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50.0}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {}, "rope_theta": 50.0}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 50.0}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 3.0, "rope_theta": 9.0}}),
    ("llama", {"rope_parameters": None, "rope_theta": 50.0}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 24}}),
    ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 12}),
    ("llama", {"layer_types": ["full_attention"] * 2}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"layer_types": ["sliding_attention"] * 2}),
    ("qwen2", {"attention_bias": False}),
    ("qwen2", {"use_sliding_window": False, "layer_types": None}),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen2", {"layer_types": None, "max_window_layers": 0}),
]
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scores scaled by layer"),
    ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("gpt2", {"num_attention_heads": 4}, "n_head 6, num_attention_heads 4"),
    ("gpt2", {"activation_function": "gelu_fast"}, "activation 'gelu_fast' is not supported"),
    ("gpt2", {"scale_attn_weights": "no"}, "scale_attn_weights must be true or false"),
    ("gpt2", {"is_causal": False}, "is_causal false"),
    ("gpt_neo", {"attention_layers": ["global"] * 2}, "attention_layers must list global or local for each of 3 layers"),
    ("gpt_neo", {"window_size": 0}, "window_size must be an integer of at least 1"),
    ("bert", {"position_embedding_type": "relative_key"}, "relative_key positions"),
    ("bert", {"is_decoder": True}, "BERT as a decoder"),
    ("bert", {"type_vocab_size": 0}, "type_vocab_size must be an integer of at least 1"),
    ("bert", {"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
    ("llama", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": {"full_attention": ROPE}}, "differ between layers"),
    ("llama", {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rotary scaling 'ntk' is not supported"),
    ("llama", {"rope_parameters": {"type": "proportional", "factor": 2.0}}, "rotary scaling 'proportional' is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "'factor' is missing"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta is null"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("llama", {"head_dim": 0}, "head_dim must be an integer"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads must be an integer"),
    ("llama", {"is_causal": False}, "is_causal false"),
    ("llama", {"attention_bias": True}, "missing"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "some layers have no window"),
    ("mistral", {"sliding_window": 0}, "sliding_window must be an integer"),
    ("qwen2", {"layer_types": ["sliding_attention"]}, "for each of 2 layers"),
    ("qwen2", {"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types must list one of"),
    ("qwen2", {"use_sliding_window": False}, "layer_types must list one of full_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes"), SUPPORTED, ids=str)
def test_load_unusual_config_equals_transformers(
    case: str, changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_checkpoint(folders[case], read_config(folders[case]) | changes, tmp_path)
    want = hf_logits(CASES[case], folder)
    assert want is not None
    with torch.no_grad():
        torch.testing.assert_close(hw.load(folder)(IDS), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("case", "changes", "message"), UNSUPPORTED, ids=str)
def test_load_unsupported_config_raises(
    case: str, changes: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(hw.HeadwiseError, match=message):
        hw.load(write_checkpoint(folders[case], read_config(folders[case]) | changes, tmp_path))


# Tied outputs: the configuration and the tensors in the file may disagree.


@pytest.mark.parametrize("case", ["gpt2", "llama"])
@pytest.mark.parametrize("equal", [True, False])
def test_load_tied_config_with_output_tensor(case: str, equal: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[case] / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if "wte" in name or "embed_tokens" in name)
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(read_config(folders[case]) | {"tie_word_embeddings": True}))
    if equal:
        torch.testing.assert_close(load_logits(tmp_path), hf_logits(CASES[case], tmp_path), rtol=0, atol=1e-4)
    else:  # versions of transformers differ in which of the two they use
        with pytest.raises(hw.HeadwiseError, match="different output in lm_"):
            hw.load(tmp_path)


def test_load_untied_config_without_output_raises(tmp_path: Path) -> None:
    case = llama("", tie_word_embeddings=True)
    config = read_config(case.save(tmp_path)) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hf_logits(case, tmp_path) is None  # transformers would initialize it randomly
    with pytest.raises(hw.HeadwiseError, match=r"missing: lm_head\.weight"):
        hw.load(tmp_path)
