"""Addresses: one head, sets of heads, and what is said when there is no such head."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.spec import Address, AttentionSpec, ModelSpec, SiteAddress, select
from headwise.spec.address import is_single
from tests.contract.variants import FIXED

THREE_BY_FOUR = tuple(Address("", layer, head) for layer in range(3) for head in range(4))
TWO_STACKS = ModelSpec(
    vocab=7, context=5, layers=2, kind="encoder-decoder", attention=AttentionSpec(width=6, heads=2)
).addresses

stacks = st.sampled_from(("", "enc", "dec", "cross"))
addresses = st.builds(Address, stacks, st.integers(0, 200), st.integers(0, 200))


def named(pattern: str, among: tuple[Address, ...] = THREE_BY_FOUR) -> list[str]:
    return [str(address) for address in select(pattern, among)]


# One head, one layer.


@FIXED
@given(address=addresses)
def test_an_address_is_read_back_from_what_it_prints(address: Address) -> None:
    assert Address.parse(str(address)) == address
    assert SiteAddress.parse(str(address.site)) == address.site
    assert address.site.head(address.head) == address


def test_an_address_prints_its_stack_only_where_there_are_several() -> None:
    assert str(Address("", 5, 1)) == "5.1"
    assert str(Address("cross", 5, 1)) == "cross.5.1"
    assert str(SiteAddress("", 5)) == "5"
    assert str(SiteAddress("enc", 5)) == "enc.5"
    assert Address.parse(" dec.10.03 ") == Address("dec", 10, 3), "spaces around and leading zeros do no harm"


def test_addresses_sort_by_number_and_not_by_text() -> None:
    shuffled = [Address("", 10, 0), Address("", 2, 11), Address("", 2, 9)]
    assert [str(address) for address in sorted(shuffled)] == ["2.9", "2.11", "10.0"]


@pytest.mark.parametrize("text", ["", "5", "5.*", "0-3.1", "5.1.2", "-1.0", "a.b", "encoder.5.1", "5.1,5.2", "cross.5"])
def test_what_is_not_one_head_is_refused(text: str) -> None:
    with pytest.raises(HeadwiseError, match=r"is not the address of one head; write layer\.head"):
        Address.parse(text)
    assert not is_single(text)


@pytest.mark.parametrize("text", ["", "5.1", "*", "0-3", "enc", "-1", "enc.*"])
def test_what_is_not_one_layer_is_refused(text: str) -> None:
    with pytest.raises(HeadwiseError, match=r"is not the address of a layer; write 5, or enc\.5"):
        SiteAddress.parse(text)


def test_only_one_written_head_is_single() -> None:
    assert is_single("5.1")
    assert is_single(" cross.5.1 ")
    assert is_single(Address("", 5, 1))
    assert not is_single(["5.1"])
    assert not is_single(5)


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
def test_a_pattern_names_heads_in_the_order_they_stand(pattern: str, want: list[str]) -> None:
    assert named(pattern) == want


def test_addresses_themselves_are_a_pattern_too() -> None:
    picked = (Address("", 2, 1), Address("", 0, 3))
    assert select(picked, THREE_BY_FOUR) == picked[::-1]
    assert select(picked[0], THREE_BY_FOUR) == picked[:1]
    assert select((), THREE_BY_FOUR) == ()


@FIXED
@given(picked=st.sets(st.sampled_from(THREE_BY_FOUR), min_size=1))
def test_any_set_can_be_written_down(picked: set[Address]) -> None:
    assert set(select(",".join(map(str, picked)), THREE_BY_FOUR)) == picked


def test_a_model_with_several_stacks_is_asked_by_stack() -> None:
    assert named("cross.1.*", TWO_STACKS) == ["cross.1.0", "cross.1.1"]
    assert named("enc.*.0,dec.0.1", TWO_STACKS) == ["enc.0.0", "enc.1.0", "dec.0.1"]
    assert named("dec.0.*", TWO_STACKS) == ["dec.0.0", "dec.0.1"]


def test_a_cut_head_leaves_a_gap() -> None:
    left = (Address("", 0, 0), Address("", 0, 3), Address("", 1, 2))
    assert named("*.0-2", left) == ["0.0", "1.2"]
    with pytest.raises(HeadwiseError, match=r"'0\.1' names no head here; layer 0 has heads 0,3; layer 1 has heads 2\."):
        select("0.1", left)


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
def test_a_pattern_without_heads_says_which_there_are(pattern: str, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        select(pattern, THREE_BY_FOUR)


def test_a_missing_stack_is_asked_for() -> None:
    with pytest.raises(
        HeadwiseError, match=r"does not say which stack; this model has cross, dec, enc: write enc\.0\.1"
    ):
        select("0.1", TWO_STACKS)


def test_an_address_that_is_not_there_is_named() -> None:
    with pytest.raises(HeadwiseError, match=r"there is no head 7\.0 here; layers 0, 1, 2 have heads 0-3"):
        select(Address("", 7, 0), THREE_BY_FOUR)
    with pytest.raises(HeadwiseError, match=r"there is no head cross\.0\.0 here"):
        select([Address("", 0, 0), Address("cross", 0, 0)], THREE_BY_FOUR)


def test_a_model_without_heads_says_so() -> None:
    with pytest.raises(HeadwiseError, match="there are no heads at all"):
        select("0.1", ())
