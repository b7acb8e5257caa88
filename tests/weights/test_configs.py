"""What a configuration leaves out, sets to null or asks for: read as transformers reads the same file, or refused."""

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
from tests.parity.cases import VOCAB, Case, bert, gpt2, gpt_neo, llama

ROPE = {"rope_type": "default", "rope_theta": 77.0}
LLAMA = {"rms_norm_eps": 1e-2, "rope_parameters": ROPE, "num_hidden_layers": 2}

# Nothing is at its default that can be elsewhere without another tensor's shape: leaving it out must make a difference.
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
SIZES = {"vocab_size", "hidden_size", "n_embd", "num_layers", "n_layer", "num_hidden_layers", "intermediate_size"}
# No number depends on these once a model is trained.
IDLE = {
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
}
IDS = torch.randint(VOCAB, (2, 23), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: case.save(tmp_path_factory.mktemp(name)) for name, case in CASES.items()}


@cache
def written(case: str) -> tuple[str, ...]:
    """The settings transformers writes for a case."""
    kind = getattr(transformers, CASES[case].model).config_class
    return tuple(json.loads(kind(**CASES[case].config).to_json_string()))


def set_up(folder: Path, config: dict[str, Any], to: Path) -> Path:
    (to / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", to)
    return to


def of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def ours(folder: Path) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            return hw.load(folder)(IDS)
    except hw.HeadwiseError:
        return None


def theirs(case: Case, folder: Path) -> torch.Tensor | None:
    """transformers' logits, or None where it refuses; what it fills with random numbers is refused as well."""
    try:
        kind: Any = getattr(transformers, case.model)
        model, told = kind.from_pretrained(folder, output_loading_info=True)
        if told["missing_keys"] or told["mismatched_keys"]:
            return None
        with torch.no_grad():
            return model.eval()(IDS).logits
    except Exception:  # of many kinds
        return None


@pytest.mark.parametrize("how", ["left out", "null"])
@pytest.mark.parametrize(("case", "key"), [(case, key) for case in CASES for key in written(case) if key not in IDLE])
def test_a_setting_that_is_not_there(case: str, key: str, how: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = of(folders[case])
    config.pop(key)
    folder = set_up(folders[case], config | ({key: None} if how == "null" else {}), tmp_path)
    got = ours(folder)
    if key in SIZES and got is None:
        return  # refused; transformers takes the sizes of some model, and fills what the file lacks at random
    want = theirs(CASES[case], folder)
    if want is None:
        assert got is None, f"transformers refuses {key} {how}"
    else:
        assert got is not None, f"transformers reads {key} {how}"
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_settings_no_number_depends_on(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = of(folders[case])
    bare = {key: value for key, value in config.items() if key not in IDLE or key == "model_type"}
    got = ours(set_up(folders[case], bare, tmp_path))
    assert got is not None
    torch.testing.assert_close(got, ours(folders[case]), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt2", "gpt_neo", "bert"])
def test_the_least_a_configuration_can_say(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Only what has to be there, a deep model: every default, the late layers' windows too."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 30, "intermediate_size": 52}
    more = {"use_sliding_window": True} if kind == "qwen2" else {"num_hidden_layers": 24} if kind == "gpt_neo" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    if kind in ("gpt2", "bert"):
        sizes["hidden_size"] = 96  # 12 heads
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    spec, told = open_checkpoint(tmp_path).spec, transformers.AutoConfig.from_pretrained(tmp_path)
    assert spec.context == told.max_position_embeddings
    assert spec.attention.heads == told.num_attention_heads
    assert spec.attention.kv_heads == getattr(told, "num_key_value_heads", told.num_attention_heads)
    eps = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    assert spec.norm_eps == next(getattr(told, name) for name in eps if hasattr(told, name))
    assert spec.tied == told.tie_word_embeddings
    assert spec.token_types == getattr(told, "type_vocab_size", 0)
    windows = [spec.attention_at(site).window for site in spec.sites]
    assert windows == their_windows(kind, told)
    if kind in ("llama", "mistral", "qwen2"):
        assert spec.attention.rotary == hw.Rotary(told.rope_parameters["rope_theta"])


def their_windows(kind: str, told: Any) -> list[int | None]:
    if kind == "mistral":
        return [told.sliding_window] * told.num_hidden_layers
    if kind == "qwen2":
        return [told.sliding_window if name == "sliding_attention" else None for name in told.layer_types]
    kinds = getattr(told, "attention_layers", ["global"] * told.num_hidden_layers)
    return [told.window_size if name == "local" else None for name in kinds]


# Odd ones: as transformers reads them, or refused with a word of what is wrong.

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
READ: list[tuple[str, dict[str, Any]]] = [
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
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scores scaled by layer"),
    ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("gpt2", {"num_attention_heads": 4}, "n_head 6, num_attention_heads 4"),
    ("gpt2", {"activation_function": "gelu_fast"}, "activation 'gelu_fast' is not supported"),
    ("gpt2", {"scale_attn_weights": "no"}, "scale_attn_weights must be true or false"),
    ("gpt2", {"is_causal": False}, "is_causal false"),
    ("gpt_neo", {"attention_layers": ["global"] * 2}, "attention_layers must give global or local for each of 3 layers"),
    ("gpt_neo", {"window_size": 0}, "window_size must be a whole number of at least 1"),
    ("bert", {"position_embedding_type": "relative_key"}, "relative_key positions"),
    ("bert", {"is_decoder": True}, "a decoder made of BERT"),
    ("bert", {"type_vocab_size": 0}, "type_vocab_size must be a whole number of at least 1"),
    ("bert", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
    ("llama", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": {"full_attention": ROPE}}, "differ from layer to layer"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn' is not supported"),
    ("llama", {"rope_parameters": {"type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic' is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta is null"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("llama", {"head_dim": 0}, "head_dim must be a whole number"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads must be a whole number"),
    ("llama", {"is_causal": False}, "is_causal false"),
    ("llama", {"attention_bias": True}, "missing"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "gives some layers no window"),
    ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number"),
    ("qwen2", {"layer_types": ["sliding_attention"]}, "for each of 2 layers"),
    ("qwen2", {"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types must give one of"),
    ("qwen2", {"use_sliding_window": False}, "layer_types must give one of full_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes"), READ, ids=str)
def test_read_as_transformers_reads_it(
    case: str, changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = set_up(folders[case], of(folders[case]) | changes, tmp_path)
    want = theirs(CASES[case], folder)
    assert want is not None
    with torch.no_grad():
        torch.testing.assert_close(hw.load(folder)(IDS), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("case", "changes", "said"), REFUSED, ids=str)
def test_refused_by_name(
    case: str, changes: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(hw.HeadwiseError, match=said):
        hw.load(set_up(folders[case], of(folders[case]) | changes, tmp_path))


# Tied or not: what the configuration says and what the file holds.


@pytest.mark.parametrize("case", ["gpt2", "llama"])
@pytest.mark.parametrize("equal", [True, False])
def test_tied_with_an_output_in_the_file(case: str, equal: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[case] / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if "wte" in name or "embed_tokens" in name)
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(of(folders[case]) | {"tie_word_embeddings": True}))
    if equal:
        torch.testing.assert_close(ours(tmp_path), theirs(CASES[case], tmp_path), rtol=0, atol=1e-4)
    else:  # releases of transformers differ in which of the two they take
        with pytest.raises(
            hw.HeadwiseError, match=r"ties the output to the embedding, yet holds another output in lm_"
        ):
            hw.load(tmp_path)


def test_not_tied_and_no_output(tmp_path: Path) -> None:
    case = llama("", tie_word_embeddings=True)
    config = of(case.save(tmp_path)) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert theirs(case, tmp_path) is None  # transformers would make one up
    with pytest.raises(hw.HeadwiseError, match=r"missing: lm_head\.weight"):
        hw.load(tmp_path)
