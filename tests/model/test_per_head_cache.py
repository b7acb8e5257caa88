"""Models with different cache policies per KV head equal the unchanged model with explicit masks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.block import BlockContext
from headwise.spec import CachePolicy, ModelSpec
from tests.cache.test_per_head_cache import expected_mask
from tests.contract.layers import MODELS, assert_equal, make_model, make_varied_model, token_ids

DECODERS = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut"]
SHORT_POLICY, TINY_POLICY = CachePolicy(sink_tokens=2, window=3), CachePolicy(sink_tokens=0, window=2)
T = 16
PIECES = {"whole": [T], "in chunks": [7, 9], "one by one": [1] * T, "a prompt, then more": [9, *[1] * (T - 9)]}

each_decoder = pytest.mark.parametrize("name", DECODERS)
each_split = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


def with_policies(spec: ModelSpec) -> ModelSpec:
    heads = list(map(str, spec.cached_kv_head_addresses))
    return spec.with_cache({heads[0]: SHORT_POLICY, heads[-1]: TINY_POLICY})


@torch.no_grad()
def masked_forward(plain: Transformer, spec: ModelSpec, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Run the unchanged model block by block with the masks of the cache policies."""
    x, context = plain.begin_forward(ids, attention_mask=attention_mask)
    starts = [0] * len(ids) if attention_mask is None else attention_mask.int().argmax(1).tolist()
    for block, layer_address in zip(plain.blocks, spec.layer_addresses, strict=True):
        layer = spec.attention_at(layer_address)
        mask = expected_mask(layer, layer.cache_policies, ids.shape[1], starts) if layer.head_ids else None
        x = block(
            x,
            BlockContext(
                causal=True, mask=mask, attention_mask=context.attention_mask, rotary_tables=context.rotary_tables
            ),
        )
    x = x if plain.norm is None else plain.norm(x)
    assert plain.output is not None
    return plain.output(x)


@each_decoder
@each_split
@torch.no_grad()
def test_per_head_cache_model_equals_mask(name: str, pieces: list[int]) -> None:
    spec = with_policies(MODELS[name])
    model, ids = make_model(spec), token_ids(2, T)
    want = masked_forward(make_model(MODELS[name]), spec, ids)
    assert_equal(model(ids), want)
    cache = model.cache()
    assert_equal(torch.cat([model(piece, cache=cache) for piece in ids.split(pieces, 1)], 1), want)


@each_decoder
@each_split
@torch.no_grad()
def test_per_head_cache_left_padding_is_ignored(name: str, pieces: list[int]) -> None:
    spec = with_policies(MODELS[name])
    model, ids = make_model(spec), token_ids(3, T)
    real_tokens = torch.arange(T) >= torch.tensor([0, 5, 8])[:, None]
    want = masked_forward(make_model(MODELS[name]), spec, ids, real_tokens)
    assert_equal(model(ids, attention_mask=real_tokens)[real_tokens], want[real_tokens])
    cache, outputs = model.cache(), []
    for piece, chunk_mask in zip(ids.split(pieces, 1), real_tokens.split(pieces, 1), strict=True):
        outputs.append(model(piece, attention_mask=chunk_mask, cache=cache))
    assert_equal(torch.cat(outputs, 1)[real_tokens], want[real_tokens])
    for row, start in enumerate([0, 5, 8]):
        assert_equal(model(ids[row : row + 1, start:])[0], want[row, start:])


@each_decoder
def test_generate_per_head_cache_equals_full_passes(name: str) -> None:
    spec = with_policies(MODELS[name])
    model, prompts = make_varied_model(spec), [[3, 1, 4, 1, 5], [9], [2, 6]]
    for prompt, generated in zip(prompts, model.generate(prompts, 12), strict=True):
        text = list(prompt)
        for _ in range(12):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert generated == text


@torch.no_grad()
def test_model_cache_reorder_selects_rows() -> None:
    spec = with_policies(MODELS["decoder, rotary"])
    model, ids = make_model(spec), token_ids(3, T)
    real = torch.arange(T) >= torch.tensor([0, 4, 6])[:, None]
    rows = torch.tensor([2, 0, 0, 1])
    cache = model.cache()
    model(ids[:, :9], attention_mask=real[:, :9], cache=cache)
    cache.reorder(rows)
    want = model(ids[rows], attention_mask=real[rows])[:, 9:]
    assert_equal(torch.cat([model(piece, cache=cache) for piece in ids[rows][:, 9:].split([1, 4, 2], 1)], 1), want)


@torch.no_grad()
def test_per_head_cache_encoder_decoder_equals_full_pass() -> None:
    spec = MODELS["encoder-decoder"].with_cache({"dec.0.1": SHORT_POLICY, "dec.1.*": TINY_POLICY})
    model, ids, source = make_model(spec), token_ids(2, T), token_ids(2, 7, seed=4)
    cache, want = model.cache(), model(ids, source=source)
    first = model(ids[:, :6], source=source, cache=cache)
    later_steps = [model(piece, cache=cache) for piece in ids[:, 6:].split(1, 1)]
    assert_equal(torch.cat([first, *later_steps], 1), want)
    assert (make_model(MODELS["encoder-decoder"])(ids, source=source) - want).abs().max() > 1e-3


@torch.no_grad()
def test_forward_failed_step_restores_cache() -> None:
    spec = with_policies(MODELS["decoder, rotary"])
    model, ids = make_model(spec), token_ids(2, T)
    cache = model.cache()
    model(ids[:, :8], cache=cache)

    def fails(*_: object) -> None:
        raise RuntimeError("in the last block")

    handle = model.blocks[-1].register_forward_pre_hook(fails)
    for piece in (token_ids(2, 5, seed=7), token_ids(2, 1, seed=8)):
        with pytest.raises(RuntimeError, match="in the last block"):
            model(piece, cache=cache)
    handle.remove()
    assert_equal(torch.cat([model(piece, cache=cache) for piece in ids[:, 8:].split([1, 7], 1)], 1), model(ids)[:, 8:])


def test_load_per_head_cache_model_keeps_policies(tmp_path: Path) -> None:
    spec = with_policies(MODELS["decoder, rotary"]).without("0.0")
    model = make_model(spec).float()
    again = hw.load(model.save(tmp_path / "m"))
    assert again.spec == spec
    ids = token_ids(2, T)
    assert torch.equal(again(ids), model(ids))
    assert again.generate(ids[:, :5], 8).equal(model.generate(ids[:, :5], 8))


def test_model_cache_fixed_size_generates_same() -> None:
    model = make_model(with_policies(MODELS["decoder"]))
    ids, cache = token_ids(2, 5), model.cache("static", 8)
    assert model.generate(ids, 3, cache=cache).equal(model.generate(ids, 3))
    with pytest.raises(HeadwiseError, match="Use kind='dynamic' or 'static'"):
        model.cache("sliding", 4)


@torch.no_grad()
def test_forward_right_padding_with_cache_raises() -> None:
    model, ids = make_model(with_policies(MODELS["decoder"])), token_ids(1, 5)
    with pytest.raises(HeadwiseError, match="padding follows a token"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 0, 0]]), cache=model.cache())


# Specs.


def test_model_spec_caching_groups_rules_and_invalid_raises() -> None:
    spec = MODELS["decoder, rotary"]  # two KV heads per layer
    cached = spec.with_cache({"*": 8, "0.1": SHORT_POLICY, "1.1": CachePolicy()})
    assert [(rule.heads, rule.policy) for rule in cached.cache] == [
        (("0.0", "1.0"), CachePolicy(bits=8)),
        (("0.1",), SHORT_POLICY),
    ]
    assert ModelSpec.from_json(cached.to_json()) == cached
    assert spec.with_cache({"0.*": CachePolicy()}) == spec
    assert [rule.heads for rule in cached.without("0.2,0.3").cache] == [("0.0", "1.0")], "nobody reads key head 0.1"
    assert cached.resized(layers=1).cache == ()
    with pytest.raises(HeadwiseError, match="no such head"):
        spec.with_cache({"0.2": 8})
    for bad, message in [({"0.1": 7}, "bits=7"), ({"0.1": "8"}, "must be a CachePolicy")]:
        with pytest.raises(HeadwiseError, match=message):
            spec.with_cache(bad)  # pyright: ignore[reportArgumentType]
    for fields, message in [
        ({"sink_tokens": 4}, "requires a window"),
        ({"window": 0}, "window=0"),
        ({"sink_tokens": -1, "window": 3}, "sink_tokens=-1"),
        ({"window": 2.5}, "window=2.5"),
    ]:
        with pytest.raises(HeadwiseError, match=message):
            CachePolicy(**fields)
    with pytest.raises(HeadwiseError, match="no KV cache, because an encoder"):
        MODELS["encoder"].with_cache({"0.0": SHORT_POLICY})
    with pytest.raises(HeadwiseError, match=r"no such head\. Layers dec"):
        MODELS["encoder-decoder"].with_cache({"cross.0.0": SHORT_POLICY})
    with pytest.raises(HeadwiseError, match=r"attention\.cache: applies to one layer"):
        replace(spec, attention=replace(spec.attention, cache=(SHORT_POLICY, SHORT_POLICY)))


# Prompts in chunks.


@each_decoder
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_generate_prompt_chunks_equal_full_prompt(name: str, chunk: int) -> None:
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]  # the second prompt is all padding in its first chunk
    for spec in (MODELS[name], with_policies(MODELS[name])):
        model = make_varied_model(spec)
        assert model.generate(prompts, 8, prompt_chunk=chunk) == model.generate(prompts, 8)
    with pytest.raises(HeadwiseError, match="prompt_chunk=0"):
        make_varied_model(MODELS[name]).generate(prompts, 8, prompt_chunk=0)


def test_generate_prompt_chunks_read_source_once() -> None:
    model, source = make_varied_model(MODELS["encoder-decoder"]), token_ids(2, 7, seed=4)
    want = model.generate([[1, 2, 3], [2]], 6, source=source)
    assert model.generate([[1, 2, 3], [2]], 6, source=source, prompt_chunk=2) == want


@pytest.mark.parametrize("to", ["transformers", "gguf"])
def test_export_per_head_cache_raises(tmp_path: Path, to: str) -> None:
    with pytest.raises(HeadwiseError, match="per-head cache policies"):
        hw.export(make_model(with_policies(MODELS["decoder, rotary"])), tmp_path / "out", to=to)
