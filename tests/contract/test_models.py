"""The contract of models, over ours and fourteen architectures of others: calls, padding, caches, modes, heads, copies
and folders.

Every expected value comes another way: W_O changed by hand in a copy, texts alone instead of padded, no cache instead of one.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from headwise.model.protocols import AnyModel, is_model
from headwise.model.random_attention import randomize_attention
from tests.contract.attached_models import (
    DECODERS,
    ENCODERS,
    END,
    NAMES,
    NORMED,
    PAIRED,
    POST,
    TEXTS,
    TOKENIZER,
    UNCUT,
    UNWIRED,
    VOCAB,
    WRITERS,
    batch,
    close,
    each,
    edited,
    fresh,
    kept,
    logits,
    some_heads,
    training,
)

SIDES = ("none", "left", "right")
AND_SIDES = [(name, side) for name in NAMES for side in SIDES if (name, side) != ("bart", "left")]  # which it refuses


@each
def test_it_is_a_model(name: str) -> None:
    model: AnyModel = kept(name)
    assert is_model(model)
    assert model.spec.addresses == model.heads.addresses == tuple(a for site in model.sites() for a in site.addresses)
    assert [layer.site for layer in model.attention_layers()] == model.sites()
    kind = "encoder" if name in ENCODERS else "encoder-decoder" if name in PAIRED else "decoder"
    assert (model.spec.kind, model.spec.vocab, model.device.type) == (kind, VOCAB, "cpu")
    assert model.tokenizer.encode("the cat") == TOKENIZER.encode("the cat")
    assert (model.training, model.checkpointing, model.plans, model.whole_passes()) == (False, False, (), "")
    if name in PAIRED:
        assert model.start == END


# Calls: padding, modes, gates.


@each
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_on_either_side(name: str, side: str) -> None:
    model, given = kept(name), batch(name, side)
    if (name, side) == ("bart", "left"):
        with pytest.raises(hw.HeadwiseError, match="put padding on the right"):
            logits(model, given)
        return
    together = logits(model, given)
    alone = []
    for row in range(2):
        real = given["padding"][row]
        one = {"ids": given["ids"][row : row + 1, real]}
        if name in PAIRED:
            one["source"] = given["source"][row : row + 1, given["source_padding"][row]]
        alone.append(logits(model, one))
    assert (together - torch.cat(alone)).abs().max() <= close(name)


@each
def test_states_and_output_are_the_logits(name: str) -> None:
    model, given = kept(name), batch(name)
    with torch.no_grad():
        hidden = model(**given, hidden=True)
        assert (model.output(hidden) - model(**given)).abs().max() <= close(name)
    targets = torch.arange(hidden.shape[1]).expand(2, -1).flatten() % VOCAB
    with torch.no_grad():
        by_hand = torch.nn.functional.cross_entropy(model(**given).flatten(0, 1), targets)
        assert float(model.output.cross_entropy(hidden.flatten(0, 1), targets)) == pytest.approx(
            float(by_hand), abs=1e-6
        )


@pytest.mark.parametrize(("name", "side"), AND_SIDES)
def test_gates_are_w_o_scaled(name: str, side: str) -> None:
    model, given = kept(name), batch(name, side)
    for address in some_heads(model):
        with edited(model, address, 0.5) as twin:
            want = logits(twin, given)
        got = logits(model, given, gates={str(address): 0.5})
        site = {
            address.site: torch.where(torch.tensor(model.heads[address].layer.spec.head_ids) == address.head, 0.5, 1.0)
        }
        assert (got - want).abs().max() <= close(name)
        assert (logits(model, given, gates=site) - want).abs().max() <= close(name)
        twice = logits(model, given, gates={str(address): 0.5, f"{address.site}.*": 0.75})
        with model.heads[address].scaled(0.5), model.heads.select(f"{address.site}.*").scaled(0.75):
            assert (logits(model, given) - twice).abs().max() <= close(name)
    for wrong, told in (({"77.0": 0.0}, "77"), ({3: 0.0}, "gates name heads by address"), ([1], "gates map heads")):
        with pytest.raises(hw.HeadwiseError, match=told):
            logits(model, given, gates=wrong)


@pytest.mark.parametrize(("name", "side"), AND_SIDES)
def test_silence_is_w_o_at_zero_and_is_the_cut(name: str, side: str) -> None:
    model, given = kept(name), batch(name, side)
    whole = logits(model, given)
    for address in some_heads(model):
        with edited(model, address, 0.0) as twin:
            want = logits(twin, given)
        with model.heads[address].silenced():
            silent = logits(model, given)
        assert (silent - want).abs().max() <= close(name)
        assert (silent - whole).abs().max() > 1e-4
        if name in UNCUT:
            with pytest.raises(hw.HeadwiseError, match=UNCUT[name]):
                model.without(address)
            continue
        small = model.without(address)
        assert (logits(small, given) - want).abs().max() <= close(name)
        assert address not in small.heads.addresses
    assert torch.equal(logits(model, given), whole), "and nothing stays"


def test_what_cannot_be_cut_is_refused_by_the_model_itself() -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "vocab_size": VOCAB,
    }
    model = hw.attach(transformers.DogeForCausalLM(transformers.DogeConfig(**sizes, num_key_value_heads=3, head_dim=4)))
    with pytest.raises(hw.HeadwiseError, match=r"cannot be cut.*silence them instead"):
        model.without("0.1")


@each
def test_in_training_mode_every_part_drops_out_and_is_told_so(name: str) -> None:
    model, given = kept(name), batch(name)
    still = logits(model, given)
    with training(model):
        assert model.training
        torch.manual_seed(1)
        assert (logits(model, given) - still).abs().max() > 1e-6
    assert not model.training
    assert torch.equal(logits(model, given), still)


# Writing on, with a cache and without.


def greedy(model: Any, given: dict[str, torch.Tensor], tokens: int, gates: Any = None) -> torch.Tensor:
    """Token by token, each time from the beginning: (1, T + tokens)."""
    ids = given["ids"]
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat((ids, model(**{**given, "ids": ids}, gates=gates)[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("gated", [False, True])
def test_with_a_cache_it_writes_what_it_writes_without(name: str, gated: bool) -> None:
    model, ids = kept(name), batch(name)["ids"][:1]
    gates = {str(some_heads(model)[0]): 0.0} if gated else None
    want = greedy(model, {"ids": ids}, 8, gates)
    with training(model):
        assert torch.equal(torch.stack(list(model.stream(ids, 8, gates=gates)), 1), want[:, ids.shape[1] :])
        assert model.generate(ids[0].tolist(), 8, gates=gates) == want[0].tolist()
        assert model.generate("the cat", 4, gates=gates).startswith("the cat")


@pytest.mark.parametrize("name", PAIRED)
def test_an_encoder_decoder_writes_from_what_it_reads(name: str) -> None:
    model, text = kept(name), TEXTS[0]
    ids = TOKENIZER.encode(text)
    source = torch.tensor([[*ids, END] if name == "encoder-decoder" else ids])
    want = greedy(model, {"ids": torch.tensor([[END]]), "source": source}, 6)[0, 1:]
    with training(model):
        made = [int(step) for step in model.stream(text, 6)]
    stop = made.index(END) + 1 if END in made else 6
    assert made[:stop] == want.tolist()[:stop]


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_does_not_write(name: str) -> None:
    with pytest.raises(hw.HeadwiseError, match="generate"):
        list(kept(name).stream("the cat", 3))


@pytest.mark.parametrize("name", WRITERS)
def test_it_draws_alike_from_one_seed(name: str) -> None:
    model = kept(name)
    drawn = [torch.cat(list(model.stream("the cat", 6, temperature=1.5, seed=seed))).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


# How it is put together.


@each
def test_norms_are_those_heads_read_through(name: str) -> None:
    """What the norm gives for the stream is what the layer is seen to read; where a stack is post-norm there is none."""
    model, given = kept(name), batch(name)
    norms = model.norms()
    if name not in (*NORMED, *POST):
        assert norms is None
        return
    assert norms is not None
    assert list(norms) == [str(site.address) for site in model.sites()]
    gave: dict[Any, torch.Tensor] = {}
    reads: dict[str, torch.Tensor] = {}
    hooks = []
    for layer in model.attention_layers():
        where = str(layer.site.address)
        norm = norms[where][0]
        if norm is not None:
            hooks.append(norm.register_forward_hook(lambda part, given, made, norm=norm: gave.update({norm: made})))
        hooks.append(layer.register_forward_pre_hook(lambda part, given, where=where: reads.update({where: given[0]})))
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    assert reads.keys() == norms.keys()
    for where, (norm, _) in norms.items():
        if norm is not None:
            assert torch.equal(gave[norm], reads[where])
    assert any(norm is not None for norm, _ in norms.values()) == (name in NORMED)


@each
def test_layers_show_what_they_write(name: str) -> None:
    """A hook on a layer gives Σ z W_O + b_O, as its heads and bias say."""
    model, given = kept(name), batch(name)
    wrote: dict[Any, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda part, given, made, site=layer.site: wrote.update({site: made}))
        for layer in model.attention_layers()
    ]
    with torch.no_grad(), hw.record(model, what="z") as recording:
        model(**given)
    for hook in hooks:
        hook.remove()
    for layer in model.attention_layers():
        total = sum(recording[a].z @ model.heads[a].W_O for a in layer.site.addresses)
        total = total if layer.b_O is None else total + layer.b_O
        assert (wrote[layer.site] - total).abs().max() <= close(name)


@each
def test_the_wiring_is_told_or_refused(name: str) -> None:
    model = kept(name)
    if name in DECODERS and name not in UNWIRED:
        wiring = model.wiring()
        assert list(wiring.steps) == [0, 1]
        return
    with pytest.raises(hw.HeadwiseError, match=UNWIRED.get(name, r"logits|no sum")):
        model.wiring()


# Others like it.


@each
def test_a_copy_is_a_model_of_its_own(name: str) -> None:
    model, given = kept(name), batch(name)
    before, twin = logits(model, given), copy.deepcopy(kept(name))
    assert torch.equal(logits(twin, given), before)
    head = some_heads(model)[0]
    with twin.heads[head].silenced():
        assert torch.equal(logits(model, given), before)
        assert not torch.equal(logits(twin, given), before)
    with torch.no_grad():
        twin.heads[head].W_O.zero_()
    assert torch.equal(logits(model, given), before)


@each
def test_an_untrained_twin_has_the_shape_and_nothing_learned(name: str) -> None:
    model = kept(name)
    one, same, other = (model.untrained(seed) for seed in (0, 0, 1))
    assert one.heads.addresses == model.heads.addresses
    assert one.tokenizer is model.tokenizer
    head = some_heads(model)[0]
    W = [m.heads[head].W_Q.double() for m in (one, same, other, model)]
    assert torch.equal(W[0], W[1])
    assert all(not torch.equal(W[0], w) for w in W[2:])


@each
def test_randomize_attention_any_model_redraws_projections_alone(name: str) -> None:
    """Every head keeps the root mean square of each of its weights; every other tensor keeps its bits."""
    model = kept(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    one, same, other = (randomize_attention(model, seed) for seed in (0, 0, 1))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    redrawn = 0
    for head in model.heads.addresses:
        for weight in ("W_Q", "W_K", "W_V", "W_O"):
            old, new, again, next_seed = (getattr(m.heads[head], weight).detach() for m in (model, one, same, other))
            assert torch.equal(new, again)
            assert not torch.equal(new, next_seed)
            spread = 4 / (2 * new.numel()) ** 0.5  # four standard errors of a root mean square of normal numbers
            assert new.norm() / old.norm() == pytest.approx(1, abs=spread)
            cosine = torch.cosine_similarity(new.flatten(), old.flatten(), dim=0)
            assert abs(cosine) < 5 / new.numel() ** 0.5
            redrawn += new.numel()
    with torch.no_grad():
        for layer, twin in zip(model.attention_layers(), one.attention_layers(), strict=True):
            for letter in "qkv":
                twin.read.weight(letter).copy_(layer.read.weight(letter))
                if layer.read.bias(letter) is not None:
                    twin.read.bias(letter).copy_(layer.read.bias(letter))
            twin.site.W_O.copy_(layer.site.W_O)
    for key, value in one.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert redrawn


def test_randomize_attention_quantized_weights_raises() -> None:
    model = hw.quantise(fresh("decoder"), 4)
    with pytest.raises(hw.HeadwiseError, match="Dequantize"):
        randomize_attention(model)


@each
def test_a_folder_brings_it_back(name: str, tmp_path: Path) -> None:
    model, given = kept(name), batch(name)
    before = logits(model, given)
    model.save(tmp_path / "model")
    again = type(model).reopen(tmp_path / "model")
    assert not again.training
    assert (logits(again, given).double() - before).abs().max() <= 1e-4  # it comes back in single precision
    assert again.heads.addresses == model.heads.addresses
    if name == "gpt_neox":
        return  # transformers writes its folder with names from before, which only its own loading turns back
    spoilt = fresh(name)
    state = {key: value.clone() for key, value in load_file(tmp_path / "model" / "model.safetensors").items()}
    with torch.no_grad():
        for weight in spoilt.parameters():
            weight.add_(1)
    assert spoilt.restore({**state, "nothing": torch.zeros(1)}) == ["nothing"]
    assert torch.equal(logits(spoilt, given), before)


@pytest.mark.parametrize("name", ["decoder", "gpt2", "llama", "bert"])
def test_what_is_exported_plain_transformers_runs(name: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model, given = kept(name), batch(name)
    small = model.without(some_heads(model)[0])
    hw.export(small, tmp_path / "out", family="gpt2" if name == "decoder" else None)
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "out").double().eval()
    with torch.no_grad():
        assert (theirs(given["ids"]).logits.flatten(0, 1) - logits(small, given)).abs().max() <= 1e-6


def test_an_attached_model_stays_the_family_it_is(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match="stays what it is, gpt2"):
        hw.export(kept("gpt2"), tmp_path / "out", family="llama")
