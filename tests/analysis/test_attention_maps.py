"""One sentence: words against tokens, rows that sum to 1, words by name, pictures."""

import json
from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise.analysis.recording.attention_maps import attend
from headwise.errors import HeadwiseError
from headwise.heads import Seen
from headwise.model import Transformer
from headwise.text import Tokenizer
from tests.contract.layers import MODELS, fill
from tests.parity.real import smollm2_folder

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "##s",
    "##walk",
    "sat",
    "on",
    "mat",
    ".",
    "it",
    "we",
]
TEXT = "The catwalks sat on the cats . It"
#  [CLS] the cat ##walk ##s sat on the cat ##s . it [SEP]
GROUPS = [[0], [1], [2, 3, 4], [5], [6], [7], [8, 9], [10], [11], [12]]
WORDS = ("[CLS]", "The", "catwalks", "sat", "on", "the", "cats", ".", "It", "[SEP]")


def reader(name: str = "encoder", **changes: object) -> Transformer:
    """A small model of random weights that reads words."""
    model = Transformer(replace(MODELS[name], **changes)).double().eval()  # pyright: ignore[reportArgumentType]
    fill(model)
    model.tokenizer = Tokenizer.from_wordpiece(PIECES)
    return model


def token_maps(model: Transformer, text: str) -> dict[str, torch.Tensor]:
    """Every head's dense map, by listening."""
    found: dict[str, torch.Tensor] = {}

    def hear(seen: Seen) -> None:
        found.update({str(a): m for a, m in zip(seen.site.addresses, seen.maps()[0], strict=True)})

    assert isinstance(model.tokenizer, Tokenizer)
    from contextlib import ExitStack

    with ExitStack() as stack, torch.no_grad():
        for site in model.sites():
            stack.enter_context(site.listen(hear))
        model(torch.tensor([model.tokenizer.encode(text)]))
    return found


@pytest.mark.parametrize("name", ["encoder", "decoder", "decoder, rotary", "decoder, windows", "decoder, cut"])
def test_words_sum_over_columns_and_average_over_rows(name: str) -> None:
    model = reader(name)
    seen = attend(model, TEXT)
    assert seen.words == WORDS
    assert seen.heads == tuple(map(str, model.spec.addresses))
    dense = token_maps(model, TEXT)
    for head in seen.heads:
        want = torch.zeros(len(GROUPS), len(GROUPS))
        for i, rows in enumerate(GROUPS):
            for j, columns in enumerate(GROUPS):
                want[i, j] = sum(float(dense[head][r, c]) for r in rows for c in columns) / len(rows)
        torch.testing.assert_close(seen.map(head), want, rtol=0, atol=1e-6)
        torch.testing.assert_close(seen.map(head).sum(1), torch.ones(len(WORDS)), rtol=0, atol=1e-5)


def test_tokens_are_the_map_itself() -> None:
    model = reader()
    seen = attend(model, TEXT, "1.2", words=False)
    assert seen.words[:6] == ("[CLS]", "The", "cat", "walk", "s", "sat")
    torch.testing.assert_close(seen.map().double(), token_maps(model, TEXT)["1.2"], rtol=0, atol=1e-6)


def test_a_uniform_head_gives_a_word_its_share_of_the_tokens() -> None:
    model = reader()
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.read.weight("q").zero_()
            layer.read.bias("q").zero_()  # pyright: ignore[reportOptionalMemberAccess]
    weights = attend(model, TEXT, "0.1").map()
    want = torch.tensor([len(group) / 13 for group in GROUPS])
    torch.testing.assert_close(weights, want.expand(len(WORDS), -1), rtol=0, atol=1e-6)


def test_a_row_is_the_maps_row_sorted_and_words_are_found_by_name_and_place() -> None:
    seen = attend(reader(), TEXT)
    row = seen.row("catwalks", head="1.3")
    assert [weight for _, weight in row] == sorted((w for _, w in row), reverse=True)
    want = dict(zip(seen.names, seen.map("1.3")[2].tolist(), strict=True))
    assert dict(row) == pytest.approx(want, abs=1e-6)
    assert seen.row(2, head="1.3") == row
    assert seen.row(-8, head="1.3") == row
    assert seen.row("CatWalks", head="1.3") == row, "another case will do where there is no doubt"
    assert seen.row("The", head="0.0") != seen.row("the", head="0.0")


def test_words_that_stand_twice_are_numbered_and_doubt_is_refused() -> None:
    seen = attend(reader(), "the cats sat on the mat", "0.1")
    assert seen.names == ("[CLS]", "the#1", "cats", "sat", "on", "the#2", "mat", "[SEP]")
    assert seen.row("the#2") == seen.row(5)
    with pytest.raises(HeadwiseError, match="'the' stands there 2 times; say which: the#1 or the#2"):
        seen.row("the")
    with pytest.raises(HeadwiseError, match=r"'dog' is not there; there are .*cats, sat, on, the#2, mat"):
        seen.row("dog")
    with pytest.raises(HeadwiseError, match="there is no word 8; there are 8"):
        seen.row(8)


def test_heads_for_a_pair_are_ranked_and_strongest_leaves_resting_out() -> None:
    seen = attend(reader("decoder"), TEXT)
    ranked = seen.heads_for("It", "cats", k=3)
    weights = {head: float(seen.map(head)[8, 6]) for head in seen.heads}
    best = sorted(weights, key=lambda head: -weights[head])[:3]
    assert [head for head, _ in ranked] == best
    assert [w for _, w in ranked] == pytest.approx([weights[head] for head in best], abs=1e-6)
    looks = seen.strongest(5)
    strongest = max(
        float(seen.map(head)[i, j]) for head in seen.heads for i in range(10) for j in range(1, 9) if i != j
    )
    assert looks[0].weight == pytest.approx(strongest, abs=1e-6)
    assert all(look.word != look.attended and look.attended not in ("[CLS]", "[SEP]") for look in looks)
    assert {look.word for look in seen.strongest(4, "sat")} == {"sat"}


def test_an_encoder_decoder_has_the_words_of_both_texts() -> None:
    model = reader("encoder-decoder")
    seen = attend(model, "it sat", source="the cats sat on the mat")
    assert seen.words == ("[CLS]", "it", "sat", "[SEP]")
    assert seen.source_words == ("[CLS]", "the", "cats", "sat", "on", "the", "mat", "[SEP]")
    shapes = {head: tuple(seen.map(head).shape) for head in ("enc.0.1", "dec.0.1", "cross.0.1")}
    assert shapes == {"enc.0.1": (8, 8), "dec.0.1": (4, 4), "cross.0.1": (4, 8)}
    assert all(head.startswith("cross.") for head, _ in seen.heads_for("it", "mat"))
    assert len(seen.row("it", "cross.1.1")) == 8
    with pytest.raises(HeadwiseError, match="'dog' is not there"):
        seen.heads_for("it", "dog")
    with pytest.raises(HeadwiseError, match="needs what it reads"):
        attend(model, "it sat")


def test_looking_changes_nothing_and_drops_nothing_out() -> None:
    model = reader("decoder", dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [part.training for part in model.modules()]
    one, other = (attend(model, TEXT, "1.1").map() for _ in range(2))
    assert torch.equal(one, other), "nothing is dropped out"
    assert [part.training for part in model.modules()] == modes
    assert not any(site.is_open for site in model.sites())


def test_it_is_plain_data_in_the_end() -> None:
    seen = attend(reader(), "the cats", "0.1,1.2")
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["words"] == ["[CLS]", "the", "cats", "[SEP]"]
    assert list(data["maps"]) == ["0.1", "1.2"]
    assert sum(data["maps"]["1.2"][2]) == pytest.approx(1)


def test_what_cannot_be_read_is_refused() -> None:
    model = reader()
    with pytest.raises(HeadwiseError, match="the text must be a string, got list"):
        attend(model, ["the cats"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="there are 8 heads; say which"):
        attend(model, "the cats").map()
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        attend(model, "the cats")


def test_an_empty_text_is_refused_where_no_special_token_stands_in() -> None:
    model = hw.load(smollm2_folder())
    with pytest.raises(HeadwiseError, match="the text is empty"):
        attend(model, "")
    seen = attend(model, "We  met\nZoë.", "0.0", words=False)
    assert "⏎" in seen.words
    assert not any("Ġ" in word for word in seen.words)
