"""Addresses: one head, sets of heads, and what is said when there is no such head."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.spec import Address, AttentionSpec, LayerAddress, ModelSpec, select
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


# One head, one layer.


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
    with pytest.raises(HeadwiseError, match=r"is not the address of one head; write layer\.head"):
        Address.parse(text)
    assert not is_single_head(text)


@pytest.mark.parametrize("text", ["", "5.1", "*", "0-3", "enc", "-1", "enc.*"])
def test_layer_address_parse_not_one_layer_raises(text: str) -> None:
    with pytest.raises(HeadwiseError, match=r"is not the address of a layer; write 5, or enc\.5"):
        LayerAddress.parse(text)


def test_is_single_only_for_one_written_head() -> None:
    assert is_single_head("5.1")
    assert is_single_head(" cross.5.1 ")
    assert is_single_head(Address("", 5, 1))
    assert not is_single_head(["5.1"])
    assert not is_single_head(5)


# Sets of heads.

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
    with pytest.raises(HeadwiseError, match=r"'0\.1' names no head here; layer 0 has heads 0,3; layer 1 has heads 2\."):
        select("0.1", remaining)


# What is said when it does not work out.

MISTAKES = {
    "5.1": r"'5\.1' names no head here; layers 0, 1, 2 have heads 0-3\.",
    "0.4": r"'0\.4' names no head here",
    "2-1.*": r"'2-1\.\*' names no head here",
    "enc.0.1": r"'enc\.0\.1' names no head here",
    "0.1,9.9": r"'9\.9' names no head here",
    "five": "'five' does not name heads; write 5.1, 5.*, 0-3.*, or several with commas: 5.1,6.9.",
    "": "'' does not name heads",
    "0.1,": "'' does not name heads",
    "0.1.2": "does not name heads",
    "0.-1": "does not name heads",
}


@pytest.mark.parametrize(("pattern", "message"), MISTAKES.items())
def test_select_pattern_without_heads_raises(pattern: str, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        select(pattern, THREE_BY_FOUR)


def test_select_missing_stack_raises() -> None:
    with pytest.raises(
        HeadwiseError, match=r"does not say which stack; this model has cross, dec, enc: write enc\.0\.1"
    ):
        select("0.1", TWO_STACKS)


def test_select_absent_address_raises() -> None:
    with pytest.raises(HeadwiseError, match=r"there is no head 7\.0 here; layers 0, 1, 2 have heads 0-3"):
        select(Address("", 7, 0), THREE_BY_FOUR)
    with pytest.raises(HeadwiseError, match=r"there is no head cross\.0\.0 here"):
        select([Address("", 0, 0), Address("cross", 0, 0)], THREE_BY_FOUR)


def test_select_no_heads_at_all_raises() -> None:
    with pytest.raises(HeadwiseError, match="there are no heads at all"):
        select("0.1", ())
