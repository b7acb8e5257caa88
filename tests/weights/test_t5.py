"""T5, mT5 and T5 encoders: parity with transformers, generation, addresses, silencing, pruning, profile, export."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.kernels import attention_weights
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.weights import open_checkpoint
from tests.parity.cases import VOCAB, padding_variants, randomize
from tests.weights.checkpoints import assert_same_model

SIZES: dict[str, Any] = {
    "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": VOCAB,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class T5Case:
    name: str
    model: str = "T5ForConditionalGeneration"
    config: dict[str, Any] = field(default_factory=dict)
    own_output: bool = False  # an output that differs from the embedding
    slow: bool = True

    def save(self, folder: Path) -> Path:
        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = kind(kind.config_class(**SIZES | self.config))
        if self.own_output:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        randomize(model)
        model.save_pretrained(folder)
        return folder

    def oracle(self, folder: Path) -> Any:
        kind = getattr(transformers, self.model)
        return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


CASES = (
    T5Case("tied, scaled, relu", slow=False),
    T5Case("separate output, gated", config={"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
           own_output=True, slow=False),
    T5Case("separate output, scaled", own_output=True),
    T5Case("tied, not scaled", config={"scale_decoder_outputs": False, "layer_norm_epsilon": 1e-2}),
    T5Case("as many decoder layers, gated silu", config={"num_decoder_layers": None, "feed_forward_proj": "gated-silu"}),
    T5Case("gated relu, buckets", config={"feed_forward_proj": "gated-relu", "relative_attention_num_buckets": 6}),
    T5Case("gelu, distances", config={"feed_forward_proj": "gelu", "relative_attention_max_distance": 5}),
    T5Case("defaults of buckets", config={"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
    T5Case("mt5", "MT5ForConditionalGeneration"),
    T5Case("mt5, separate output", "MT5ForConditionalGeneration", own_output=True),
    T5Case("no output", "T5Model"),
    T5Case("mt5, no output", "MT5Model"),
    T5Case("encoder", "T5EncoderModel", slow=False),
    T5Case("mt5 encoder", "MT5EncoderModel"),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ()) for case in CASES]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[0].save(tmp_path_factory.mktemp("t5"))


@pytest.fixture
def model(folder: Path) -> Any:
    return hw.load(folder)


def random_ids(rows: int, length: int, seed: int = 2) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def run_with_maps(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return the output of a model and its attention maps by stack."""
    maps: dict[str, list[Tensor]] = {"enc": [], "dec": [], "cross": [], "": []}
    with ExitStack() as stack, torch.no_grad():
        for point in model.hook_points():
            own = maps[point.address.stack]
            stack.enter_context(
                point.listen(lambda call, own=own: own.append(attention_weights(call.q, call.k, call.params)))
            )
        out = model(ids, **inputs)
    return out, maps


def masks() -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Return masks of the source (B, 17) and the text (B, 13): without padding, and on both sides of both."""
    sources, texts = dict(padding_variants(17)), dict(padding_variants(13))
    yield None, None
    yield from ((sources[side], texts[other]) for side in ("left", "right") for other in ("left", "right"))


@each_case
def test_load_t5_equals_transformers(case: T5Case, tmp_path: Path) -> None:
    native, reference = hw.load(case.save(tmp_path)), case.oracle(tmp_path)
    source, ids = random_ids(3, 17), random_ids(3, 13, seed=3)
    is_encoder = "Encoder" in case.model
    for source_mask, mask in masks():
        kwargs = {} if source_mask is None or mask is None else {"attention_mask": source_mask.long()}
        if is_encoder:
            got, maps = run_with_maps(native, source, attention_mask=source_mask)
        else:
            kwargs |= {"decoder_input_ids": ids} | ({} if mask is None else {"decoder_attention_mask": mask.long()})
            got, maps = run_with_maps(
                native, ids, source=source, source_attention_mask=source_mask, attention_mask=mask
            )
        with torch.no_grad():
            want = reference(input_ids=source, output_attentions=True, **kwargs)
        pairs = (
            [(maps[""], want.attentions, source_mask)]
            if is_encoder
            else [
                (maps["enc"], want.encoder_attentions, source_mask),
                (maps["dec"], want.decoder_attentions, mask),
                (maps["cross"], want.cross_attentions, mask),
            ]
        )
        rows = pairs[-1][2] if pairs[-1][2] is not None else torch.ones(got.shape[:2], dtype=torch.bool)
        expected = want.logits if "logits" in want else want.last_hidden_state
        torch.testing.assert_close(got[rows], expected[rows], rtol=0, atol=1e-4)
        for own, expected_maps, real in pairs:
            assert len(own) == len(expected_maps) > 0
            for a, b in zip(own, expected_maps, strict=True):
                queries = torch.ones(a.shape[0], a.shape[2], dtype=torch.bool) if real is None else real
                torch.testing.assert_close(a.transpose(1, 2)[queries], b.transpose(1, 2)[queries], rtol=0, atol=1e-5)


@each_case
def test_t5_own_format_and_export_keep_the_model(case: T5Case, tmp_path: Path) -> None:
    model: Any = hw.load(case.save(tmp_path / "theirs"))
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    model.save(tmp_path / "ours")
    assert_same_model(hw.load(tmp_path / "ours"), model)
    hw.export(model, tmp_path / "out")
    inputs = {} if model.spec.kind == "encoder" else {"source": random_ids(2, 9)}
    ids = random_ids(2, 7)
    assert_same_model(hw.load(tmp_path / "out"), model)
    kind = getattr(transformers, json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0])
    reference = kind.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        want = reference(ids) if not inputs else reference(input_ids=inputs["source"], decoder_input_ids=ids)
        torch.testing.assert_close(
            model(ids, **inputs), want.logits if "logits" in want else want.last_hidden_state, rtol=0, atol=1e-4
        )


def test_t5_generate_with_cache_equals_transformers(folder: Path, model: Any) -> None:
    source, reference = random_ids(3, 11), CASES[0].oracle(folder)
    real = torch.arange(11)[None] >= torch.tensor([[0], [3], [6]])
    want = reference.generate(
        source, attention_mask=real.long(), max_new_tokens=9, min_new_tokens=9, do_sample=False, eos_token_id=None
    )
    start = torch.full((3, 1), model.decoder_start_token)
    for kind in ("dynamic", "static"):
        got = model.generate(start, 9, source=source, source_attention_mask=real, cache=model.cache(kind), stop=[])
        assert got.tolist() == want.tolist()
    full = model(want, source=source, source_attention_mask=real)
    cache = model.cache()
    memory = {"source": source, "source_attention_mask": real}
    steps = [model(want[:, i : i + 1], cache=cache, **(memory if i == 0 else {})) for i in range(want.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=0, atol=1e-5)


def test_t5_text_starts_with_the_pad_token_and_ends_with_eos(model: Any) -> None:
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        model.generate("a text")
    assert model.decoder_start_token == 0
    spec = model.spec.resized(context=300)
    wide = hw.Transformer(hw.ModelSpec.from_dict(spec.to_dict() | {"vocab": 300}))
    wide.tokenizer = byte_tokenizer()
    assert byte_tokenizer().special["eos"] not in (None, 0)
    texts = wide.generate(["to be", "or not"], max_new_tokens=3)
    assert len(texts) == 2


def test_t5_addresses_silencing_and_pruning(model: Any) -> None:
    addresses = [str(head) for head in model.spec.head_addresses]
    assert addresses[0] == "enc.0.0"
    assert len(addresses) == (3 + 2 + 2) * 4
    heads = "enc.0.1, enc.2.*, dec.0.0, dec.1.3, cross.1.0-2"
    source, ids = random_ids(2, 9), random_ids(2, 7)
    wide = model.double()
    with torch.no_grad():
        plain = wide(ids, source=source)
        with wide.heads[heads].silenced():
            silent = wide(ids, source=source)
        small = wide.prune(heads)
        torch.testing.assert_close(small(ids, source=source), silent, rtol=0, atol=1e-9)
        assert not torch.allclose(plain, silent)
        cache = small.cache()
        steps = [small(ids[:, i : i + 1], cache=cache, **({} if i else {"source": source})) for i in range(7)]
        torch.testing.assert_close(torch.cat(steps, 1), silent, rtol=0, atol=1e-9)
    assert small.spec.num_parameters == sum(parameter.numel() for parameter in small.parameters())
    assert small.blocks[0].attention.position_bias.shape == (3, 8)


def test_t5_export_of_pruned_model_equals_silenced_output(folder: Path, tmp_path: Path) -> None:
    model: Any = hw.load(folder)
    heads = "enc.0.1, enc.1-2.2, dec.0.0, dec.1.3, cross.1.0-2"
    hw.export(model.prune(heads), tmp_path / "out")
    reference: Any = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    source, ids = random_ids(2, 9), random_ids(2, 7)
    with torch.no_grad(), model.heads[heads].silenced():
        want = model(ids, source=source)
        torch.testing.assert_close(reference(input_ids=source, decoder_input_ids=ids).logits, want, rtol=0, atol=1e-4)


def test_t5_export_after_training_of_one_layer_raises(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        model.blocks[1].attention.position_bias.add_(1.0)
    with pytest.raises(HeadwiseError, match="one table for all layers"):
        hw.export(model, tmp_path / "out")


def test_t5_profile_covers_all_stacks(model: Any) -> None:
    spec = hw.ModelSpec.from_dict(model.spec.to_dict() | {"vocab": 300})
    wide = hw.Transformer(spec).eval()
    wide.tokenizer = byte_tokenizer()
    profile = hw.profile(wide, ["to be or not to be", "that is the question"], progress=False)
    assert [profile[str(head)].address for head in spec.head_addresses] == list(spec.head_addresses)


@pytest.mark.parametrize("heads", ["", pytest.param("enc.0.1, enc.2.*, dec.1.3", marks=pytest.mark.slow)])
def test_t5_to_native_equals_attached(folder: Path, heads: str) -> None:
    attached = hw.attach(transformers.T5ForConditionalGeneration.from_pretrained(folder).eval())
    attached = attached.prune(heads) if heads else attached
    native = hw.to_native(attached)
    source, ids = random_ids(2, 9), random_ids(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(native(ids, source=source), attached(ids, source=source), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj 'gated-tanh' is not supported"),
        ({"relative_attention_max_distance": 2}, "t5_max_distance=2"),
        ({"d_model": None}, "d_model is null"),
    ],
)
def test_load_t5_wrong_setting_raises(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(HeadwiseError, match=message):
        open_checkpoint(tmp_path)
