"""Addresses of heads, patterns that select several heads, and errors for missing heads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.spec import (
    Address,
    AttentionSpec,
    EmbeddingOrLogitsAddress,
    HeadInputAddress,
    KVAddress,
    LayerAddress,
    MLPAddress,
    ModelSpec,
    parse_node,
    select,
)
from headwise.spec.address import is_single_head
from tests.contract.variants import FIXED_SETTINGS

THREE_BY_FOUR = tuple(Address("", layer, head) for layer in range(3) for head in range(4))
TWO_STACKS = ModelSpec(
    vocab=7, context=5, layers=2, kind="encoder-decoder", attention=AttentionSpec(width=6, heads=2)
).head_addresses

stacks = st.sampled_from(("", "enc", "dec", "cross"))
addresses = st.builds(Address, stacks, st.integers(0, 200), st.integers(0, 200))


def selected_names(pattern: str, among: tuple[Address, ...] = THREE_BY_FOUR) -> list[str]:
    return [str(address) for address in select(pattern, among)]


# Addresses of one head and one layer.


@FIXED_SETTINGS
@given(address=addresses)
def test_address_parse_of_str_round_trips(address: Address) -> None:
    assert Address.parse(str(address)) == address
    assert LayerAddress.parse(str(address.layer_address)) == address.layer_address
    assert address.layer_address.head_address(address.head) == address


def test_address_str_shows_stack_if_several() -> None:
    assert str(Address("", 5, 1)) == "5.1"
    assert str(Address("cross", 5, 1)) == "cross.5.1"
    assert str(LayerAddress("", 5)) == "5"
    assert str(LayerAddress("enc", 5)) == "enc.5"
    assert Address.parse(" dec.10.03 ") == Address("dec", 10, 3), "spaces around and leading zeros do no harm"


def test_address_sorts_by_number() -> None:
    shuffled = [Address("", 10, 0), Address("", 2, 11), Address("", 2, 9)]
    assert [str(address) for address in sorted(shuffled)] == ["2.9", "2.11", "10.0"]


@pytest.mark.parametrize("text", ["", "5", "5.*", "0-3.1", "5.1.2", "-1.0", "a.b", "encoder.5.1", "5.1,5.2", "cross.5"])
def test_address_parse_not_one_head_raises(text: str) -> None:
    with pytest.raises(HeadwiseError, match="not the address of one head"):
        Address.parse(text)
    assert not is_single_head(text)


@pytest.mark.parametrize("text", ["", "5.1", "*", "0-3", "enc", "-1", "enc.*"])
def test_layer_address_parse_not_one_layer_raises(text: str) -> None:
    with pytest.raises(HeadwiseError, match="not the address of a layer"):
        LayerAddress.parse(text)


def test_is_single_only_for_one_written_head() -> None:
    assert is_single_head("5.1")
    assert is_single_head(" cross.5.1 ")
    assert is_single_head(Address("", 5, 1))
    assert not is_single_head(["5.1"])
    assert not is_single_head(5)


# Patterns.

PATTERNS = {
    "1.2": ["1.2"],
    "1.*": ["1.0", "1.1", "1.2", "1.3"],
    "*.2": ["0.2", "1.2", "2.2"],
    "0-1.3": ["0.3", "1.3"],
    "1-2.0-1": ["1.0", "1.1", "2.0", "2.1"],
    "2-2.3-3": ["2.3"],
    "2.1,0.3": ["0.3", "2.1"],
    " 2.1 , 0.3 ,2.*": ["0.3", "2.0", "2.1", "2.2", "2.3"],
    "1-9.3": ["1.3", "2.3"],
    "*": [str(address) for address in THREE_BY_FOUR],
}


@pytest.mark.parametrize(("pattern", "want"), PATTERNS.items())
def test_select_pattern_returns_heads_in_order(pattern: str, want: list[str]) -> None:
    assert selected_names(pattern) == want


def test_select_addresses_returns_them_in_order() -> None:
    picked = (Address("", 2, 1), Address("", 0, 3))
    assert select(picked, THREE_BY_FOUR) == picked[::-1]
    assert select(picked[0], THREE_BY_FOUR) == picked[:1]
    assert select((), THREE_BY_FOUR) == ()


@FIXED_SETTINGS
@given(picked=st.sets(st.sampled_from(THREE_BY_FOUR), min_size=1))
def test_select_joined_addresses_returns_same_set(picked: set[Address]) -> None:
    assert set(select(",".join(map(str, picked)), THREE_BY_FOUR)) == picked


def test_select_several_stacks_by_stack_name() -> None:
    assert selected_names("cross.1.*", TWO_STACKS) == ["cross.1.0", "cross.1.1"]
    assert selected_names("enc.*.0,dec.0.1", TWO_STACKS) == ["enc.0.0", "enc.1.0", "dec.0.1"]
    assert selected_names("dec.0.*", TWO_STACKS) == ["dec.0.0", "dec.0.1"]


def test_select_pruned_heads_leaves_gap() -> None:
    remaining = (Address("", 0, 0), Address("", 0, 3), Address("", 1, 2))
    assert selected_names("*.0-2", remaining) == ["0.0", "1.2"]
    with pytest.raises(HeadwiseError, match=r"no such head\. Layer 0 has heads 0,3\. Layer 1 has heads 2\."):
        select("0.1", remaining)


# Errors.

MISTAKES = {
    "5.1": r"'5\.1': the model has no such head\. Layers 0, 1, 2 have heads 0-3\.",
    "0.4": r"'0\.4': the model has no such head",
    "2-1.*": r"'2-1\.\*': the model has no such head",
    "enc.0.1": r"'enc\.0\.1': the model has no such head",
    "0.1,9.9": r"'9\.9': the model has no such head",
    "five": r"heads='five': not a valid head pattern\. Use 5\.1",
    "": "heads='': not a valid head pattern",
    "0.1,": "heads='': not a valid head pattern",
    "0.1.2": "not a valid head pattern",
    "0.-1": "not a valid head pattern",
}


@pytest.mark.parametrize(("pattern", "message"), MISTAKES.items())
def test_select_pattern_without_heads_raises(pattern: str, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        select(pattern, THREE_BY_FOUR)


def test_select_missing_stack_raises() -> None:
    with pytest.raises(HeadwiseError, match=r"stacks cross, dec, enc"):
        select("0.1", TWO_STACKS)


def test_select_absent_address_raises() -> None:
    with pytest.raises(HeadwiseError, match=r"not have head 7\.0\. Layers 0, 1, 2 have heads 0-3"):
        select(Address("", 7, 0), THREE_BY_FOUR)
    with pytest.raises(HeadwiseError, match=r"not have head cross\.0\.0"):
        select([Address("", 0, 0), Address("cross", 0, 0)], THREE_BY_FOUR)


def test_select_no_heads_at_all_raises() -> None:
    with pytest.raises(HeadwiseError, match="The model has no heads"):
        select("0.1", ())


# Other parts of a model: KV heads, inputs of heads, MLPs, and the ends of the residual stream.

numbers = st.integers(0, 200)
kv_addresses = st.builds(KVAddress, stacks, numbers, numbers)
nodes = st.one_of(
    addresses,
    kv_addresses,
    st.builds(HeadInputAddress, addresses, st.sampled_from("qkv")),
    st.builds(HeadInputAddress, kv_addresses, st.sampled_from("kv")),
    st.builds(MLPAddress, stacks, numbers),
    st.sampled_from(EmbeddingOrLogitsAddress),
)


@FIXED_SETTINGS
@given(node=nodes)
def test_node_parse_of_str_round_trips(
    node: Address | KVAddress | HeadInputAddress | MLPAddress | EmbeddingOrLogitsAddress,
) -> None:
    assert parse_node(f" {node} ") == node


def test_node_text_is_short() -> None:
    assert str(KVAddress("", 18, 2)) == "18.kv2"
    assert str(HeadInputAddress(Address("", 18, 6), "k")) == "18.6.k"
    assert str(HeadInputAddress(KVAddress("cross", 18, 2), "v")) == "cross.18.kv2.v"
    assert str(MLPAddress("dec", 3)) == "dec.mlp.3"
    assert [str(end) for end in EmbeddingOrLogitsAddress] == ["embedding", "logits"]
    assert HeadInputAddress.parse("18.kv2.k").layer_address == LayerAddress("", 18)
    assert KVAddress("", 1, 9) < KVAddress("", 1, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("18.kv2.q", r"a KV head has keys and values, but no queries\. Use 18\.kv2\.k"),
        ("18.*.k", "not the address of one input of a head"),
        ("18.k", "not the address of one input of a head"),
        ("18.kv", r"not the address of one part of a model\. Use 18\.6 \(query head\)"),
        ("18.kv*", "not the address of one part of a model"),
        ("18.6.x", "not the address of one part of a model"),
        ("18", "not the address of one part of a model"),
        ("18.6,18.7", "not the address of one part of a model"),
        ("mlp", "not the address of one part of a model"),
        ("logit", "not the address of one part of a model"),
        ("", "not the address of one part of a model"),
    ],
)
def test_parse_node_without_one_part_raises(text: str, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        parse_node(text)


def test_parse_of_another_kind_of_part_raises() -> None:
    with pytest.raises(HeadwiseError, match=r"not the address of one KV head\. Use layer\.kv"):
        KVAddress.parse("18.2")
    with pytest.raises(HeadwiseError, match="not the address of an MLP"):
        MLPAddress.parse("18.2")
    with pytest.raises(HeadwiseError, match="not the address of one head"):
        Address.parse("18.kv2")


@pytest.mark.parametrize("pattern", ["0.kv1", "0.1.k", "mlp.0", "logits", "0.*,0.kv1"])
def test_select_part_that_is_not_a_query_head_raises(pattern: str) -> None:
    with pytest.raises(HeadwiseError, match=r"query heads are needed here.*hw\.patched\(path=…\)"):
        select(pattern, THREE_BY_FOUR)
