"""Models whose key heads keep different things: with a cache they say what the untouched model says under masks by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.block import Beside
from headwise.spec import Keeps, ModelSpec
from tests.contract.layers import MODELS, assert_equal, make_lively_model, make_model, token_ids
from tests.heads.test_per_head_cache import seen_by_hand

DECODERS = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut"]
SHORT, TINY = Keeps(first=2, last=3), Keeps(first=0, last=2)
T = 16
PIECES = {"whole": [T], "in chunks": [7, 9], "one by one": [1] * T, "a prompt, then more": [9, *[1] * (T - 9)]}

each_decoder = pytest.mark.parametrize("name", DECODERS)
each_way = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


def with_keeps(spec: ModelSpec) -> ModelSpec:
    heads = list(map(str, spec.key_heads))
    return spec.caching({heads[0]: SHORT, heads[-1]: TINY})


@torch.no_grad()
def by_hand(plain: Transformer, spec: ModelSpec, ids: Tensor, real: Tensor | None = None) -> Tensor:
    """The untouched model, block by block, each layer under the mask its heads' caches amount to."""
    x, beside = plain.begin(ids, padding=real)
    starts = [0] * len(ids) if real is None else real.int().argmax(1).tolist()
    for block, site in zip(plain.blocks, spec.sites, strict=True):
        layer = spec.attention_at(site)
        mask = seen_by_hand(layer, layer.keeps, ids.shape[1], starts) if layer.head_ids else None
        x = block(x, Beside(causal=True, mask=mask, real=beside.real, angles=beside.angles))
    x = x if plain.norm is None else plain.norm(x)
    assert plain.output is not None
    return plain.output(x)


@each_decoder
@each_way
@torch.no_grad()
def test_a_cache_is_a_mask(name: str, pieces: list[int]) -> None:
    spec = with_keeps(MODELS[name])
    model, ids = make_model(spec), token_ids(2, T)
    want = by_hand(make_model(MODELS[name]), spec, ids)
    assert_equal(model(ids), want)
    cache = model.cache()
    assert_equal(torch.cat([model(piece, cache=cache) for piece in ids.split(pieces, 1)], 1), want)


@each_decoder
@each_way
@torch.no_grad()
def test_left_padding_stays_out_of_it(name: str, pieces: list[int]) -> None:
    spec = with_keeps(MODELS[name])
    model, ids = make_model(spec), token_ids(3, T)
    real = torch.arange(T) >= torch.tensor([0, 5, 8])[:, None]
    want = by_hand(make_model(MODELS[name]), spec, ids, real)
    assert_equal(model(ids, padding=real)[real], want[real])
    cache, made = model.cache(), []
    for piece, there in zip(ids.split(pieces, 1), real.split(pieces, 1), strict=True):
        made.append(model(piece, padding=there, cache=cache))
    assert_equal(torch.cat(made, 1)[real], want[real])
    for row, start in enumerate([0, 5, 8]):
        assert_equal(model(ids[row : row + 1, start:])[0], want[row, start:])


@each_decoder
def test_writing_on_is_reading_again(name: str) -> None:
    spec = with_keeps(MODELS[name])
    model, prompts = make_lively_model(spec), [[3, 1, 4, 1, 5], [9], [2, 6]]
    for prompt, made in zip(prompts, model.generate(prompts, 12), strict=True):
        text = list(prompt)
        for _ in range(12):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert made == text


@torch.no_grad()
def test_rows_are_reordered() -> None:
    spec = with_keeps(MODELS["decoder, rotary"])
    model, ids = make_model(spec), token_ids(3, T)
    real = torch.arange(T) >= torch.tensor([0, 4, 6])[:, None]
    rows = torch.tensor([2, 0, 0, 1])
    cache = model.cache()
    model(ids[:, :9], padding=real[:, :9], cache=cache)
    cache.reorder(rows)
    want = model(ids[rows], padding=real[rows])[:, 9:]
    assert_equal(torch.cat([model(piece, cache=cache) for piece in ids[rows][:, 9:].split([1, 4, 2], 1)], 1), want)


@torch.no_grad()
def test_an_encoder_decoder_writes_with_heads_that_forget() -> None:
    spec = MODELS["encoder-decoder"].caching({"dec.0.1": SHORT, "dec.1.*": TINY})
    model, ids, source = make_model(spec), token_ids(2, T), token_ids(2, 7, seed=4)
    cache, want = model.cache(), model(ids, source=source)
    first = model(ids[:, :6], source=source, cache=cache)
    rest = [model(piece, cache=cache) for piece in ids[:, 6:].split(1, 1)]
    assert_equal(torch.cat([first, *rest], 1), want)
    assert (make_model(MODELS["encoder-decoder"])(ids, source=source) - want).abs().max() > 1e-3


@torch.no_grad()
def test_a_step_that_fails_leaves_the_cache_as_it_was() -> None:
    spec = with_keeps(MODELS["decoder, rotary"])
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


def test_saved_and_loaded_it_keeps_the_same(tmp_path: Path) -> None:
    spec = with_keeps(MODELS["decoder, rotary"]).without("0.0")
    model = make_model(spec).float()
    again = hw.load(model.save(tmp_path / "m"))
    assert again.spec == spec
    ids = token_ids(2, T)
    assert torch.equal(again(ids), model(ids))
    assert again.generate(ids[:, :5], 8).equal(model.generate(ids[:, :5], 8))


def test_a_fixed_size() -> None:
    model = make_model(with_keeps(MODELS["decoder"]))
    ids, cache = token_ids(2, 5), model.cache("fixed", 8)
    assert model.generate(ids, 3, cache=cache).equal(model.generate(ids, 3))
    with pytest.raises(HeadwiseError, match="use kind='growing' or 'fixed'"):
        model.cache("sliding", 4)


@torch.no_grad()
def test_padding_on_the_right_is_refused_with_a_cache() -> None:
    model, ids = make_model(with_keeps(MODELS["decoder"])), token_ids(1, 5)
    with pytest.raises(HeadwiseError, match="padded on the left; padding follows a token"):
        model(ids, padding=torch.tensor([[1, 1, 1, 0, 0]]), cache=model.cache())


# What a spec says.


def test_specs_tell_rules_and_refuse_what_cannot_be() -> None:
    spec = MODELS["decoder, rotary"]  # two key heads a layer
    made = spec.caching({"*": 8, "0.1": SHORT, "1.1": Keeps()})
    assert [(rule.heads, rule.keeps) for rule in made.cache] == [(("0.0", "1.0"), Keeps(bits=8)), (("0.1",), SHORT)]
    assert ModelSpec.from_json(made.to_json()) == made
    assert spec.caching({"0.*": Keeps()}) == spec
    assert [rule.heads for rule in made.without("0.2,0.3").cache] == [("0.0", "1.0")], "nobody reads key head 0.1"
    assert made.resized(layers=1).cache == ()
    with pytest.raises(HeadwiseError, match="names no head here"):
        spec.caching({"0.2": 8})
    for bad, told in [({"0.1": 7}, "32, 16, 8, 4 bits; got 7"), ({"0.1": "8"}, "a key head keeps Keeps")]:
        with pytest.raises(HeadwiseError, match=told):
            spec.caching(bad)  # pyright: ignore[reportArgumentType]
    for fields, told in [
        ({"first": 4}, "also needs last="),
        ({"last": 0}, "last counts tokens, 1 or more; got 0"),
        ({"first": -1, "last": 3}, "first counts tokens, 0 or more; got -1"),
        ({"last": 2.5}, "got 2.5"),
    ]:
        with pytest.raises(HeadwiseError, match=told):
            Keeps(**fields)
    with pytest.raises(HeadwiseError, match="keeps no cache, for an encoder sees all tokens at once"):
        MODELS["encoder"].caching({"0.0": SHORT})
    with pytest.raises(HeadwiseError, match="names no head here; layers dec"):
        MODELS["encoder-decoder"].caching({"cross.0.0": SHORT})
    with pytest.raises(HeadwiseError, match=r"attention.cache applies to one layer"):
        replace(spec, attention=replace(spec.attention, cache=(SHORT, SHORT)))


# Prompts in chunks.


@each_decoder
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_prompt_in_chunks_is_the_prompt(name: str, chunk: int) -> None:
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]  # the second is all padding in its first chunk
    for spec in (MODELS[name], with_keeps(MODELS[name])):
        model = make_lively_model(spec)
        assert model.generate(prompts, 8, prompt_chunk=chunk) == model.generate(prompts, 8)
    with pytest.raises(HeadwiseError, match="prompt_chunk counts tokens, 1 or more; got 0"):
        make_lively_model(MODELS[name]).generate(prompts, 8, prompt_chunk=0)


def test_a_source_is_read_once_however_the_prompt_is() -> None:
    model, source = make_lively_model(MODELS["encoder-decoder"]), token_ids(2, 7, seed=4)
    want = model.generate([[1, 2, 3], [2]], 6, source=source)
    assert model.generate([[1, 2, 3], [2]], 6, source=source, prompt_chunk=2) == want


@pytest.mark.parametrize("to", ["transformers", "gguf"])
def test_no_engine_takes_caches_by_head(tmp_path: Path, to: str) -> None:
    with pytest.raises(HeadwiseError, match=f"{to} cannot let heads keep caches of their own"):
        hw.export(make_model(with_keeps(MODELS["decoder, rotary"])), tmp_path / "out", to=to)
