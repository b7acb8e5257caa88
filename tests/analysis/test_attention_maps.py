"""Attention maps of one text: words and tokens, row sums, word names, images."""

import json
from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise.analysis.recording.attention_maps import attention_maps
from headwise.errors import HeadwiseError
from headwise.heads import AttentionCall
from headwise.model import Transformer
from headwise.text import Tokenizer
from tests.contract.layers import MODELS, randomize
from tests.parity.real import smollm2_folder

WORDPIECES = [
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


def word_model(name: str = "encoder", **changes: object) -> Transformer:
    """Make a small random model that reads words."""
    model = Transformer(replace(MODELS[name], **changes)).double().eval()  # pyright: ignore[reportArgumentType]
    randomize(model)
    model.tokenizer = Tokenizer.from_wordpiece(WORDPIECES)
    return model


def token_maps(model: Transformer, text: str) -> dict[str, torch.Tensor]:
    """Record the dense map of every head with a listener."""
    maps_by_head: dict[str, torch.Tensor] = {}

    def listen(call: AttentionCall) -> None:
        maps_by_head.update({str(a): m for a, m in zip(call.hook_point.head_addresses, call.maps()[0], strict=True)})

    assert isinstance(model.tokenizer, Tokenizer)
    from contextlib import ExitStack

    with ExitStack() as stack, torch.no_grad():
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(listen))
        model(torch.tensor([model.tokenizer.encode(text)]))
    return maps_by_head


@pytest.mark.parametrize("name", ["encoder", "decoder", "decoder, rotary", "decoder, windows", "decoder, cut"])
def test_attention_maps_words_sum_columns_and_average_rows(name: str) -> None:
    model = word_model(name)
    view = attention_maps(model, TEXT)
    assert view.words == WORDS
    assert view.heads == tuple(map(str, model.spec.head_addresses))
    dense = token_maps(model, TEXT)
    for head in view.heads:
        want = torch.zeros(len(GROUPS), len(GROUPS))
        for i, rows in enumerate(GROUPS):
            for j, cols in enumerate(GROUPS):
                want[i, j] = sum(float(dense[head][r, c]) for r in rows for c in cols) / len(rows)
        torch.testing.assert_close(view.map(head), want, rtol=0, atol=1e-6)
        torch.testing.assert_close(view.map(head).sum(1), torch.ones(len(WORDS)), rtol=0, atol=1e-5)


def test_attention_maps_without_words_equal_token_maps() -> None:
    model = word_model()
    view = attention_maps(model, TEXT, "1.2", words=False)
    assert view.words[:6] == ("[CLS]", "The", "cat", "walk", "s", "sat")
    torch.testing.assert_close(view.map().double(), token_maps(model, TEXT)["1.2"], rtol=0, atol=1e-6)


def test_attention_maps_uniform_head_weights_words_by_tokens() -> None:
    model = word_model()
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.qkv.weight_by_head("q").zero_()
            layer.qkv.bias_by_head("q").zero_()  # pyright: ignore[reportOptionalMemberAccess]
    weights = attention_maps(model, TEXT, "0.1").map()
    want = torch.tensor([len(group) / 13 for group in GROUPS])
    torch.testing.assert_close(weights, want.expand(len(WORDS), -1), rtol=0, atol=1e-6)


def test_view_row_is_sorted_and_found_by_name_or_index() -> None:
    view = attention_maps(word_model(), TEXT)
    row = view.attention_from_word("catwalks", head="1.3")
    assert [weight for _, weight in row] == sorted((w for _, w in row), reverse=True)
    want = dict(zip(view.unique_words, view.map("1.3")[2].tolist(), strict=True))
    assert dict(row) == pytest.approx(want, abs=1e-6)
    assert view.attention_from_word(2, head="1.3") == row
    assert view.attention_from_word(-8, head="1.3") == row
    assert view.attention_from_word("CatWalks", head="1.3") == row, "another case will do where there is no doubt"
    assert view.attention_from_word("The", head="0.0") != view.attention_from_word("the", head="0.0")


def test_view_repeated_words_are_numbered_and_ambiguity_raises() -> None:
    view = attention_maps(word_model(), "the cats sat on the mat", "0.1")
    assert view.unique_words == ("[CLS]", "the#1", "cats", "sat", "on", "the#2", "mat", "[SEP]")
    assert view.attention_from_word("the#2") == view.attention_from_word(5)
    with pytest.raises(HeadwiseError, match=r"'the': it occurs 2 times.*the#1 or the#2"):
        view.attention_from_word("the")
    with pytest.raises(HeadwiseError, match=r"'dog': not in the text.*cats, sat, on, the#2, mat"):
        view.attention_from_word("dog")
    with pytest.raises(HeadwiseError, match="word=8: the text has 8 words"):
        view.attention_from_word(8)


def test_view_heads_for_is_ranked_and_top_edges_skip_idle() -> None:
    view = attention_maps(word_model("decoder"), TEXT)
    ranked = view.top_heads_for_pair("It", "cats", k=3)
    weights = {head: float(view.map(head)[8, 6]) for head in view.heads}
    best = sorted(weights, key=lambda head: -weights[head])[:3]
    assert [head for head, _ in ranked] == best
    assert [w for _, w in ranked] == pytest.approx([weights[head] for head in best], abs=1e-6)
    edges = view.top_edges(5)
    strongest = max(
        float(view.map(head)[i, j]) for head in view.heads for i in range(10) for j in range(1, 9) if i != j
    )
    assert edges[0].weight == pytest.approx(strongest, abs=1e-6)
    assert all(edge.word != edge.attended and edge.attended not in ("[CLS]", "[SEP]") for edge in edges)
    assert {edge.word for edge in view.top_edges(4, "sat")} == {"sat"}


def test_attention_maps_encoder_decoder_has_words_of_both_texts() -> None:
    model = word_model("encoder-decoder")
    view = attention_maps(model, "it sat", source="the cats sat on the mat")
    assert view.words == ("[CLS]", "it", "sat", "[SEP]")
    assert view.source_words == ("[CLS]", "the", "cats", "sat", "on", "the", "mat", "[SEP]")
    shapes = {head: tuple(view.map(head).shape) for head in ("enc.0.1", "dec.0.1", "cross.0.1")}
    assert shapes == {"enc.0.1": (8, 8), "dec.0.1": (4, 4), "cross.0.1": (4, 8)}
    assert all(head.startswith("cross.") for head, _ in view.top_heads_for_pair("it", "mat"))
    assert len(view.attention_from_word("it", "cross.1.1")) == 8
    with pytest.raises(HeadwiseError, match="'dog': not in the text"):
        view.top_heads_for_pair("it", "dog")
    with pytest.raises(HeadwiseError, match="source=source_ids"):
        attention_maps(model, "it sat")


def test_attention_maps_keep_model_state_and_disable_dropout() -> None:
    model = word_model("decoder", dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    first, second = (attention_maps(model, TEXT, "1.1").map() for _ in range(2))
    assert torch.equal(first, second), "nothing is dropped out"
    assert [module.training for module in model.modules()] == modes
    assert not any(hook_point.is_active for hook_point in model.hook_points())


def test_view_to_dict_is_json_serializable() -> None:
    view = attention_maps(word_model(), "the cats", "0.1,1.2")
    data = json.loads(json.dumps(view.to_dict()))
    assert data["words"] == ["[CLS]", "the", "cats", "[SEP]"]
    assert list(data["maps"]) == ["0.1", "1.2"]
    assert sum(data["maps"]["1.2"][2]) == pytest.approx(1)


def test_attention_maps_invalid_input_raises() -> None:
    model = word_model()
    with pytest.raises(HeadwiseError, match="must be a string"):
        attention_maps(model, ["the cats"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="has 8 heads"):
        attention_maps(model, "the cats").map()
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        attention_maps(model, "the cats")


def test_attention_maps_empty_text_raises_without_special_token() -> None:
    model = hw.load(smollm2_folder())
    with pytest.raises(HeadwiseError, match="the text is empty"):
        attention_maps(model, "")
    view = attention_maps(model, "We  met\nZoë.", "0.0", words=False)
    assert "⏎" in view.words
    assert not any("Ġ" in word for word in view.words)
