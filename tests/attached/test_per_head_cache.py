"""Per-head caches of transformers models equal explicit masks per head without a cache, in eager attention, not attached."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from bench.tried_cache import check_cache, masked_by_hand
from headwise.errors import UnsupportedModelError
from headwise.kernels.quantization import fake_quantize
from tests.attached.models import BY_NAME, transformers

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 6, 3, 8, 97
POLICIES = {
    "0.0,1.*": hw.CachePolicy(sink_tokens=2, window=6),
    "2.0": hw.CachePolicy(window=4),
}
NEW_TOKENS = 20


def llama(seed: int = 0, layers: int = LAYERS) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "num_hidden_layers": layers, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    sizes |= {"num_key_value_heads": KV_HEADS, "intermediate_size": 64, "vocab_size": VOCAB, "bos_token_id": 1}
    config = transformers.LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)  # sharper attention
    return model


@pytest.fixture
def model() -> Any:
    return llama()


def prompt(length: int = 11, rows: int = 2) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@contextmanager
def explicit_masks(model: Any, policies: dict[str, hw.CachePolicy], rows: int) -> Iterator[None]:
    """Mask evicted tokens by hand in a model that is not attached."""
    with hw.attach(model) as attached:
        rules = attached.spec.with_cache(policies).cache
        policy_of = {head: rule.policy for rule in rules for head in rule.heads}
        per_head = {
            layer.module: [
                policy_of.get(str(layer.hook_point.address.head_address(kv)), hw.CachePolicy())
                for kv in layer.spec.kv_of_head
            ]
            for layer in attached.attention_layers()
        }
    with masked_by_hand(model, per_head, torch.ones(rows, 1)):
        yield


def logits_in_chunks(
    model: Any, ids: Tensor, cache: Any, chunks: tuple[int, ...], mask: Tensor | None = None
) -> Tensor:
    logits, start = [], cache.get_seq_length()
    for length in chunks:
        options = {} if mask is None else {"attention_mask": mask[:, : start + length]}
        with torch.no_grad():
            logits.append(model(ids[:, start : start + length], past_key_values=cache, **options).logits)
        start += length
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "falcon", "t5", "gemma2", "gpt_oss", "whisper"]
    + [
        pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "gemma3", "phi3", "bloom", "gptj", "gpt_neo")
    ],
)
def test_per_head_cache_equals_explicit_masks(name: str) -> None:
    case = BY_NAME[name]
    model = case.build()
    check_cache(model, model, case.inputs() if case.kind == "speech" else {})


@pytest.mark.parametrize("name", ["t5gemma", "exaone4"])
def test_per_head_cache_windows_equal_explicit_masks(name: str) -> None:
    """Windows shorter than the text, which cross-attention (T5Gemma) and full layers (EXAONE 4) must not use."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": VOCAB, "sliding_window": 5, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    if name == "t5gemma":
        stacks = [transformers.T5GemmaModuleConfig(**sizes, attn_logit_softcapping=None) for _ in range(2)]
        config = transformers.T5GemmaConfig(encoder=stacks[0], decoder=stacks[1], vocab_size=VOCAB)
        model = transformers.T5GemmaForConditionalGeneration(config).eval()
    else:
        model = transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**sizes)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    check_cache(model, model, {})


def test_per_head_cache_hybrid_that_its_own_cache_changes_says_so() -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "lru_width": 24, "attention_window_size": 16, "vocab_size": VOCAB}
    config = transformers.RecurrentGemmaConfig(**sizes, block_types=["recurrent", "recurrent", "attention"])
    torch.manual_seed(7)
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    with pytest.raises(UnsupportedModelError, match="With its own cache, they differ by"):
        hw.per_head_cache(hw.attach(model))


@pytest.mark.parametrize("name", ["GraniteSWA", "GraniteMoeSWA"])
def test_per_head_cache_learned_sinks_after_softmax_equal_sliding_window_of_transformers(name: str) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
    }
    sizes |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 3}
    sizes |= {"layer_rope_theta": [0, 10000.0]}  # the first layer has no positions
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2} if "Moe" in name else {}
    models = []
    for layer_type in ("full_attention", "sliding_attention"):
        config = getattr(transformers, f"{name}Config")(**sizes, layer_types=[layer_type] * 2)
        torch.manual_seed(3)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)  # sinks too, which are zero at first
        models.append(model)
    full, sliding = models
    ids = prompt(14)
    with torch.no_grad():
        expected, unlimited = sliding(ids, use_cache=False).logits, full(ids, use_cache=False).logits
    assert (expected - unlimited).abs().max() > 0.05 * expected.abs().max()  # the window matters
    with hw.attach(full) as attached:
        cache = hw.per_head_cache(attached, {"*": hw.CachePolicy(window=3)})
        actual = logits_in_chunks(full, ids, cache, (6, 1, 4, 1, 1, 1))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_per_head_cache_oracle_hides_evicted_tokens_from_logsumexp() -> None:
    scores = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(0))

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.softmax(-1), torch.logsumexp(x, dim=-1)

    module = Attention()
    with masked_by_hand(torch.nn.Sequential(module), {module: [hw.CachePolicy(window=2)] * 2}, torch.ones(1, 5)):
        weights, total = module(scores)
    expected = scores.masked_fill(torch.ones(5, 5).tril(-2).bool(), -torch.inf)
    torch.testing.assert_close(weights, expected.softmax(-1))
    torch.testing.assert_close(total, expected.exp().sum(-1).log())


@pytest.mark.parametrize("name", ["mimo_v2_flash", "musicgen"])
def test_per_head_cache_unsupported_models_raise(name: str) -> None:
    if name == "mimo_v2_flash":  # twice as many KV heads in layers with a window
        sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "v_head_dim": 8, "vocab_size": VOCAB, "pad_token_id": 0}
        sizes |= {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"]}
        model = transformers.MiMoV2FlashForCausalLM(transformers.MiMoV2FlashConfig(**sizes)).eval()
        message = "Got 4 KV heads in this layer, but 2 addresses"
    else:
        sizes = {
            "hidden_size": 32,
            "ffn_dim": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
        }
        config = transformers.MusicgenDecoderConfig(**sizes, pad_token_id=0, bos_token_id=1)
        model, message = transformers.MusicgenForCausalLM(config).eval(), "no single table of token embeddings"
    attached = hw.attach(model)
    with pytest.raises(UnsupportedModelError, match=message):
        hw.per_head_cache(attached, {"1.0": hw.CachePolicy(window=4)})
    with pytest.raises(UnsupportedModelError, match=message), hw.cached(attached, {"1.0": hw.CachePolicy(window=4)}):
        pass


def test_kv_heads_of_text_beside_tower_with_more_heads() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    text = sizes | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "pad_token_id": 0,
    }
    vision = sizes | {"num_attention_heads": 8, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90
    )
    attached = hw.attach(transformers.Gemma3ForConditionalGeneration(config).eval())
    kv_heads = [str(head) for head in attached.spec.cached_kv_head_addresses]
    assert kv_heads == ["text.0.0", "text.0.1", "text.1.0", "text.1.1"]


@pytest.mark.parametrize("chunks", [(31,), (11, 8, 1, 11), (1,) * 31, (2, 1, 28)])
def test_per_head_cache_chunks_float64_exact(model: Any, chunks: tuple[int, ...]) -> None:
    ids = prompt(31)
    with explicit_masks(model, POLICIES, 2):
        expected = model(ids, use_cache=False).logits
    attached = hw.attach(model)
    actual = logits_in_chunks(model, ids, hw.per_head_cache(attached, POLICIES), chunks)
    assert (actual - expected).abs().max() < 1e-12


def test_per_head_cache_left_padding_counts_sinks_from_first_token(model: Any) -> None:
    ids, mask = prompt(31), torch.ones(2, 31, dtype=torch.long)
    mask[1, :5] = 0
    with explicit_masks(model, POLICIES, 1):  # the second text alone, at its positions
        expected = model(ids[1:, 5:], position_ids=torch.arange(5, 31)[None], use_cache=False).logits
    attached = hw.attach(model)
    cache = hw.per_head_cache(attached, POLICIES)
    batched = logits_in_chunks(model, ids, cache, (11, 8, 1, 11), mask)
    assert (batched[1, 5:] - expected[0]).abs().max() < 1e-12


def test_per_head_cache_padding_after_token_raises(model: Any) -> None:
    ids, mask = prompt(), torch.ones(2, 11, dtype=torch.long)
    mask[1, -2:] = 0
    attached = hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match="padding must be on the left"):
        model(ids, attention_mask=mask, past_key_values=hw.per_head_cache(attached, POLICIES))


@pytest.mark.parametrize(
    ("options", "copies"),
    [({"do_sample": False}, 1), ({"do_sample": True, "top_k": 5}, 1), ({"num_beams": 3}, 3),
     ({"num_beams": 2, "do_sample": True}, 2), ({"do_sample": True, "num_return_sequences": 2}, 2)],
)  # fmt: skip
def test_per_head_cache_generate_equals_passes_without_cache(model: Any, options: dict[str, Any], copies: int) -> None:
    ids, attention_mask = prompt(), torch.ones(2, 11, dtype=torch.long)
    options = options | {"attention_mask": attention_mask, "max_new_tokens": NEW_TOKENS}
    with explicit_masks(model, POLICIES, 2 * copies):
        torch.manual_seed(3)
        expected = model.generate(ids, use_cache=False, **options)
    attached = hw.attach(model)
    torch.manual_seed(3)
    cache = hw.per_head_cache(attached, POLICIES)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    with hw.cached(attached, POLICIES) as scope:
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, **options), expected)
    assert scope.cache.nbytes == cache.nbytes
    assert "generate" not in model.__dict__


def test_per_head_cache_assisted_decoding_equals_greedy(model: Any) -> None:
    ids = prompt(rows=1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    with explicit_masks(model, POLICIES, 1):
        expected = model.generate(ids, use_cache=False, **options)
    assistant = copy.deepcopy(model)  # often right, so that some of its tokens are accepted
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.02 * torch.randn_like(assistant.lm_head.weight))
    attached = hw.attach(model)
    with hw.cached(attached, POLICIES):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)


def test_per_head_cache_several_calls_continue_one_cache(model: Any) -> None:
    ids = prompt(8)
    attached = hw.attach(model)
    cache = hw.per_head_cache(attached, POLICIES)
    options = {"do_sample": False, "max_new_tokens": 6}
    first = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    longer = torch.cat((first, prompt(5)), 1)
    second = model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache, **options)
    cache.reset()
    assert cache.nbytes == 0
    assert cache.get_seq_length() == 0
    again = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    assert torch.equal(again, first)
    with explicit_masks(model, POLICIES, 2):
        mask = torch.ones_like(longer)
        assert torch.equal(model.generate(longer, attention_mask=mask, use_cache=False, **options), second)


def test_per_head_cache_holds_bytes_of_policies(model: Any) -> None:
    attached = hw.attach(model)
    cache = hw.per_head_cache(attached, POLICIES)
    ids = prompt(200)
    logits_in_chunks(model, ids, cache, (200,))
    kv_heads = {"all": LAYERS * KV_HEADS - 1 - KV_HEADS - 1, "eight": 1 + KV_HEADS, "four": 1}
    tokens = kv_heads["all"] * 200 + kv_heads["eight"] * 8 + kv_heads["four"] * 4
    assert cache.nbytes == 2 * 2 * tokens * HEAD_DIM * 8  # rows, keys and values, tokens, channels, bytes
    assert [len({x.data_ptr() for group in layer.heads.groups for x in group.k.storage}) for layer in cache.layers] == [
        2,
        1,
        2,
    ]


def test_per_head_cache_select_repeat_and_copy_rows(model: Any) -> None:
    ids = prompt(24)
    with explicit_masks(model, POLICIES, 2):
        expected = model(ids, use_cache=False).logits[:, 20:]
    attached = hw.attach(model)
    cache = hw.per_head_cache(attached, POLICIES)
    logits_in_chunks(model, ids, cache, (20,))
    copied = copy.deepcopy(cache)
    assert copied.layers[0].owner() is attached
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1])
    assert (logits_in_chunks(model, ids[rows], repeated, (3, 1)) - expected[rows]).abs().max() < 1e-12
    cache.batch_select_indices(torch.tensor([1]))
    assert (logits_in_chunks(model, ids[1:], cache, (4,)) - expected[1:]).abs().max() < 1e-12
    assert (logits_in_chunks(model, ids, copied, (4,)) - expected).abs().max() < 1e-12


def test_per_head_cache_crop_before_and_after_eviction(model: Any) -> None:
    ids = prompt(24)
    with explicit_masks(model, POLICIES, 2):
        expected = model(ids, use_cache=False).logits
    attached = hw.attach(model)
    cache = hw.per_head_cache(attached, {"1.*": hw.CachePolicy(sink_tokens=2, window=6)})
    logits_in_chunks(model, prompt(8).flip(1), cache, (8,))
    cache.crop(-8)  # no token is evicted yet
    assert cache.get_seq_length() == 0
    cache = hw.per_head_cache(attached, POLICIES)
    logits_in_chunks(model, ids, cache, (12,))
    with pytest.raises(hw.HeadwiseError, match="evicted"):
        cache.crop(-1)
    assert not cache.is_croppable
    cache.activate_past_recording()
    wrong = torch.cat((ids[:, :15], prompt(4).flip(1)), 1)
    logits_in_chunks(model, wrong, cache, (7,))
    cache.crop(-4)  # of the last call
    assert (logits_in_chunks(model, ids, cache, (1, 8)) - expected[:, 15:]).abs().max() < 1e-12
    with pytest.raises(hw.HeadwiseError, match="negative"):
        cache.crop(3)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_per_head_cache_bits_equal_quantized_keys_and_values(model: Any, bits: int) -> None:
    """The reference quantizes the keys and values of each layer's projections, after rotation for keys."""
    ids = prompt(30)
    with explicit_masks(model, POLICIES, 2), quantized_kv(bits):
        expected = model(ids, use_cache=False).logits
    attached = hw.attach(model)
    rules = {"*": hw.CachePolicy(bits)} | {
        heads: hw.CachePolicy(bits, policy.sink_tokens, policy.window) for heads, policy in POLICIES.items()
    }
    cache = hw.per_head_cache(attached, rules)
    assert (logits_in_chunks(model, ids, cache, (12, 1, 17)) - expected).abs().max() < 1e-10
    full = hw.per_head_cache(attached, POLICIES)
    logits_in_chunks(model, ids, full, (30,))
    assert cache.nbytes < full.nbytes


@contextmanager
def quantized_kv(bits: int) -> Iterator[None]:
    """Quantize k and v in the eager attention of Llama."""
    module: Any = transformers.models.llama.modeling_llama
    eager = module.eager_attention_forward
    module.eager_attention_forward = lambda layer, q, k, v, *args, **kwargs: eager(
        layer, q, fake_quantize(k, bits), fake_quantize(v, bits), *args, **kwargs
    )
    try:
        yield
    finally:
        module.eager_attention_forward = eager


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_per_head_cache_half_precision_near_explicit_masks(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    ids = prompt(24)
    with explicit_masks(model, POLICIES, 2):
        expected = model(ids, use_cache=False).logits
    attached = hw.attach(model)
    cache = hw.per_head_cache(attached, POLICIES)
    actual = logits_in_chunks(model, ids, cache, (12, 1, 11))
    assert actual.dtype == dtype
    assert (actual - expected).abs().max() < 40 * torch.finfo(dtype).eps * expected.abs().max()


def test_per_head_cache_pruned_model_without_heads_in_first_layer(model: Any) -> None:
    attached = hw.prune(hw.attach(model), heads="0.*,1.0,2.4", fold_mean=False)
    pruned = attached.model
    ids = prompt(24)
    policies = {"1.1,2.0": hw.CachePolicy(sink_tokens=1, window=5)}
    cache = hw.per_head_cache(attached, policies)
    actual = logits_in_chunks(pruned, ids, cache, (12, 1, 11))
    silenced = hw.attach(model)
    layers = {layer.module: layer for layer in silenced.attention_layers()}
    per_head = {
        module: [policies["1.1,2.0"] if f"{layer.hook_point.address}.{kv}" in ("1.1", "2.0") else hw.CachePolicy()
                 for kv in layer.spec.kv_of_head]
        for module, layer in layers.items()
    }  # fmt: skip
    silenced.detach()
    with torch.no_grad():
        for head in ("0.0", "0.1", "0.2", "0.3", "0.4", "0.5", "1.0", "2.4"):
            layer, number = map(int, head.split("."))
            columns = slice(number * HEAD_DIM, (number + 1) * HEAD_DIM)
            model.model.layers[layer].self_attn.o_proj.weight[:, columns] = 0
    with masked_by_hand(model, per_head, torch.ones(2, 1)):
        expected = model(ids, use_cache=False).logits
    assert (actual - expected).abs().max() < 1e-12
    assert cache.get_seq_length() == 24


def test_per_head_cache_looking_keeps_bits_and_silencing_works(model: Any) -> None:
    ids, attached = prompt(24), hw.attach(model)
    plain = logits_in_chunks(model, ids, hw.per_head_cache(attached, POLICIES), (12, 1, 11))
    with hw.record(attached, tensors=("map", "z")) as recording:
        recorded = logits_in_chunks(model, ids, hw.per_head_cache(attached, POLICIES), (12, 1, 11))
    assert torch.equal(plain, recorded)
    weights = recording["1.2"].calls[-1].map()  # a streaming head: (2, 11, 24)
    assert weights.shape[-1] == 24
    assert (weights[:, -1, 2:18] == 0).all()
    assert (weights[:, -1, 18:] > 0).all()
    with attached.heads["1.2"].silenced():
        silent = logits_in_chunks(model, ids, hw.per_head_cache(attached, POLICIES), (12, 1, 11))
    with attached.heads["1.2"].silenced(), hw.cached(attached, POLICIES):
        assert not torch.equal(silent, plain)


def test_per_head_cache_static_caches_raise(model: Any) -> None:
    attached = hw.attach(model)
    ids = prompt()
    with hw.cached(attached, POLICIES):
        with pytest.raises(hw.HeadwiseError, match="cache_implementation"):
            model.generate(ids, cache_implementation="static", max_new_tokens=2)
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(hw.HeadwiseError, match="StaticCache"):
            model.generate(ids, past_key_values=static, max_new_tokens=2)
    with pytest.raises(hw.HeadwiseError, match="fixed size"):
        attached.cache("static")


def test_per_head_cache_wrong_uses_raise(model: Any) -> None:
    attached = hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match="no such"):
        hw.per_head_cache(attached, {"7.0": hw.CachePolicy(window=4)})
    with pytest.raises(hw.HeadwiseError, match="map KV heads"):
        hw.per_head_cache(attached, [hw.CachePolicy(window=4)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(hw.HeadwiseError, match="handle of a transformers model"):
        hw.per_head_cache(hw.Transformer(hw.preset("nano")), POLICIES)  # pyright: ignore[reportArgumentType]
    encoder = hw.attach(BY_NAME["bert"].build())
    with pytest.raises(hw.HeadwiseError, match="encoder"):
        hw.per_head_cache(encoder)
    with pytest.raises(hw.HeadwiseError, match=r"plan: must be a Plan.*Got 'plan\.json'.*hw\.Plan\.load"):
        hw.per_head_cache(attached, "plan.json")  # pyright: ignore[reportArgumentType]
    cache = hw.per_head_cache(attached, POLICIES)
    attached.detach()
    with pytest.raises(hw.HeadwiseError, match="not attached"):
        model(prompt(), past_key_values=cache)


@pytest.mark.parametrize(("name", "tolerance"), [("llama", 1e-10), ("gptj", 1e-6)])
def test_cache_plan_without_a_cache_accepts_padding_on_both_sides(name: str, tolerance: float) -> None:
    """GPT-J computes its scores itself, in float32 for all dtypes."""
    full = llama() if name == "llama" else BY_NAME[name].build().double()
    attached = hw.attach(full)
    changed = hw.apply(hw.plan_pruning(attached, cache={"*": hw.CachePolicy(sink_tokens=1, window=4)}), attached)
    ids, mask = prompt(17, rows=3) % 29 + 2, torch.ones(3, 17, dtype=torch.bool)
    mask[0, 11:] = False
    mask[1, :5] = mask[1, 14:] = False
    with torch.no_grad():
        batched = changed(ids, attention_mask=mask)
        for row, real in enumerate(mask):
            alone = changed(ids[row : row + 1, real])[0]
            assert (batched[row, real] - alone).abs().max() < tolerance
    mask[2, 8] = False  # a hole: streaming heads would count it as a token
    with pytest.raises(hw.HeadwiseError, match="padding must be on the left"):
        changed(ids, attention_mask=mask)


def test_apply_cache_plan_masks_every_call_and_generates_with_per_head_cache(model: Any, tmp_path: Path) -> None:
    ids = prompt(24)
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    with explicit_masks(model, POLICIES, 2):
        expected = model(ids, use_cache=False).logits
        tokens = model.generate(ids, use_cache=False, max_new_tokens=9, **options)
    attached = hw.attach(model)
    plan = hw.plan_pruning(attached, cache=POLICIES)
    changed = hw.apply(plan, attached)
    assert changed.spec.cache
    assert not attached.spec.cache
    with torch.no_grad():
        assert (changed(ids) - expected).abs().max() < 1e-12
    assert torch.equal(changed.generate(ids, max_new_tokens=9, **options), tokens)
    steps = torch.stack(list(changed.stream(ids, 9)), 1)
    assert torch.equal(steps, tokens[:, 24:])
    with pytest.raises(hw.HeadwiseError, match="per_head_cache"):
        changed.model.generate(ids, max_new_tokens=3)
    hw.Plan.save(plan, tmp_path / "plan.json")
    cache = hw.per_head_cache(attached, hw.Plan.load(tmp_path / "plan.json"))
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=9, **options), tokens)
    changed.save(tmp_path / "model")
    loaded = hw.attach(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64))
    assert not loaded.spec.cache, "plain transformers reads the weights"
    reopened = type(changed).reopen(tmp_path / "model", torch.float64)
    assert reopened.spec == changed.spec
    assert torch.equal(reopened.generate(ids, max_new_tokens=9, **options), tokens)
    assert copy.deepcopy(changed).spec.cache == changed.spec.cache
    smaller = hw.prune(changed, heads="1.0,1.1", fold_mean=False)
    assert [rule.heads for rule in smaller.spec.cache] == [("0.0", "1.1", "1.2"), ("2.0",)]
