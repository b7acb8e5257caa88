"""Path patching: equal to a written-out reference, and its errors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, KVAddress, ModelSpec, Rotary, parse_node
from tests.analysis.path_reference import ReferenceRun, head_z, mlp_output, output_weights
from tests.distributed.models import relative_difference

SPEC = ModelSpec(
    vocab=13, context=16, layers=3, attention=AttentionSpec(width=24, heads=6, kv_heads=2), mlp_width=20, norm="rms"
)
ROTARY = replace(SPEC, positions="none", attention=replace(SPEC.attention, rotary=Rotary()), activation="swiglu")
PARALLEL = replace(SPEC, norm_placement="parallel", norm="layer")
SPECS = {"grouped": SPEC, "rotary, swiglu": ROTARY, "parallel, layer norm": PARALLEL}
GROUP = 3  # query heads per KV head


def random_model(spec: ModelSpec, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(spec).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name and "weight" in name))
    return model


def random_ids(seed: int) -> Tensor:
    return torch.randint(13, (2, 7), generator=torch.Generator().manual_seed(seed))


IDS, OTHER = random_ids(1), random_ids(2)


def sender_delta(model: Transformer, sender: str, clean: ReferenceRun, other: ReferenceRun) -> Tensor:
    """Return the change of the residual stream if a sender writes its output of the other run."""
    part = parse_node(sender)
    if sender == "embedding":
        return other.embedding - clean.embedding
    if isinstance(part, Address):
        key = part.layer, part.head
        return (other.z[key] - clean.z[key]) @ output_weights(model, *key)
    if isinstance(part, KVAddress):
        streams = {"q": clean.streams[part.layer], **dict.fromkeys("kv", other.streams[part.layer])}
        readers = range(part.kv_head * GROUP, part.kv_head * GROUP + GROUP)
        changes = [
            (head_z(model, part.layer, head, streams) - clean.z[part.layer, head])
            @ output_weights(model, part.layer, head)
            for head in readers
        ]
        return sum(changes[1:], changes[0])
    layer = int(sender.removeprefix("mlp."))
    return other.mlps[layer] - clean.mlps[layer]


def receiver_inputs(receiver: str) -> tuple[int, list[int], str]:
    """Return the layer, the heads and the inputs of a receiver such as `2.3.k` or `2.kv1`."""
    layer, head, *projection = receiver.split(".")
    if head.startswith("kv"):
        first = int(head.removeprefix("kv")) * GROUP
        return int(layer), list(range(first, first + GROUP)), projection[0] if projection else "kv"
    return int(layer), [int(head)], projection[0] if projection else "qkv"


def reference_logits(model: Transformer, path: Sequence[str], ids: Tensor = IDS, other_ids: Tensor = OTHER) -> Tensor:
    """Return the logits with one path patched, written out."""
    clean, other = ReferenceRun(model, ids), ReferenceRun(model, other_ids)
    delta = sender_delta(model, path[0], clean, other)
    last = clean
    for receiver in path[1:]:
        if receiver == "logits":
            return ReferenceRun(model, ids, final_change=delta).logits
        if receiver.startswith("mlp."):
            layer = int(receiver.removeprefix("mlp."))
            changed = mlp_output(model, layer, clean.mid_streams[layer] + delta)
            last, delta = ReferenceRun(model, ids, mlps={layer: changed}), changed - clean.mlps[layer]
        else:
            layer, heads, projections = receiver_inputs(receiver)
            stream = clean.streams[layer]
            streams = {name: stream + delta if name in projections else stream for name in "qkv"}
            z = {(layer, head): head_z(model, layer, head, streams) for head in heads}
            delta = torch.zeros_like(stream)
            for key, value in z.items():
                delta = delta + (value - clean.z[key]) @ output_weights(model, *key)
            last = ReferenceRun(model, ids, z=z)
    return last.logits


PATHS = [
    ("0.1", "2.3.q"),
    ("0.1", "2.3.k"),
    ("0.1", "2.3.v"),
    ("0.1", "2.3"),
    ("0.1", "2.kv1.k"),
    ("1.4", "2.kv0"),
    ("0.kv1", "2.2.k"),
    ("1.kv0", "logits"),
    ("embedding", "1.5.v"),
    ("mlp.0", "1.0.q"),
    ("mlp.1", "mlp.2"),
    ("1.3", "mlp.2"),
    ("2.0", "logits"),
    ("embedding", "logits"),
    ("0.2", "1.1.k", "2.3.q"),
    ("0.2", "mlp.1", "logits"),
]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("path", PATHS, ids=" → ".join)
@torch.no_grad()
def test_patched_path_equals_reference(name: str, path: tuple[str, ...]) -> None:
    model = random_model(SPECS[name])
    expected = reference_logits(model, path)
    with hw.patched(model, path=path, other=OTHER):
        actual = model(IDS)
        again = model(IDS)
    assert relative_difference(actual, expected) < 1e-12
    assert torch.equal(actual, again), "a second call in the same context"
    assert relative_difference(model(IDS), expected) > 1e-6, "the path changes the logits"


@pytest.mark.parametrize("path", [("1.2", "mlp.1"), ("1.kv1", "mlp.1"), ("0.3", "1.2.k", "mlp.1", "logits")], ids=str)
@torch.no_grad()
def test_patched_path_into_mlp_of_same_layer_equals_reference(path: tuple[str, ...]) -> None:
    model = random_model(SPEC)
    with hw.patched(model, path=path, other=OTHER):
        assert relative_difference(model(IDS), reference_logits(model, path)) < 1e-12


@torch.no_grad()
def test_patched_path_in_parallel_block_never_reaches_own_mlp() -> None:
    model = random_model(PARALLEL)
    with hw.patched(model, path=("1.2", "mlp.1"), other=OTHER):
        assert relative_difference(model(IDS), ReferenceRun(model, IDS).logits) < 1e-12


@torch.no_grad()
def test_patched_path_keys_of_one_reader_leave_other_readers_clean() -> None:
    """KV head 1 serves heads 3, 4 and 5. `.k` of head 3 changes z of head 3 only, `.kv1.k` that of all three."""
    model = random_model(SPEC)
    changed = {}
    for receiver in ("2.3.k", "2.kv1.k"):
        with hw.patched(model, path=("0.1", receiver), other=OTHER), hw.record(model, "2.*", tensors=("z",)) as run:
            model(IDS)
        with hw.record(model, "2.*", tensors=("z",)) as clean:
            model(IDS)
        changed[receiver] = [head for head in range(6) if not torch.equal(run[f"2.{head}"].z, clean[f"2.{head}"].z)]
    assert changed == {"2.3.k": [3], "2.kv1.k": [3, 4, 5]}


@torch.no_grad()
def test_patched_path_of_equal_texts_changes_nothing() -> None:
    model = random_model(SPEC)
    with hw.patched(model, path=("0.1", "2.3.k"), other=IDS), hw.patched(model, path=("mlp.0", "mlp.1"), other=IDS):
        assert torch.equal(model(IDS), model(IDS))
        inside = model(IDS)
    assert relative_difference(inside, model(IDS)) < 1e-14


@torch.no_grad()
def test_patched_path_positions_patches_only_those() -> None:
    model = random_model(SPEC)
    mixed = OTHER.clone()
    clean, other = ReferenceRun(model, IDS), ReferenceRun(model, mixed)
    delta = torch.zeros_like(clean.embedding)
    delta[:, [2, 6]] = ((other.z[1, 4] - clean.z[1, 4]) @ output_weights(model, 1, 4))[:, [2, 6]]
    expected = ReferenceRun(model, IDS, final_change=delta).logits
    with hw.patched(model, path=("1.4", "logits"), other=mixed, positions=[2, -1]):
        assert relative_difference(model(IDS), expected) < 1e-12
    with (
        pytest.raises(HeadwiseError, match="out of range for 7 tokens"),
        hw.patched(model, path=("1.4", "logits"), other=mixed, positions=[7]),
    ):
        model(IDS)


@torch.no_grad()
def test_patched_path_from_embedding_to_first_layer_equals_patched_head() -> None:
    """A head of the first layer reads only the embedding."""
    model = random_model(SPEC)
    with hw.patched(model, path=("embedding", "0.1"), other=OTHER):
        by_path = model(IDS)
    with hw.patched(model, "0.1", OTHER):
        assert relative_difference(by_path, model(IDS)) < 1e-13


@torch.no_grad()
def test_patched_path_of_pruned_model_keeps_addresses() -> None:
    model = random_model(SPEC).prune("2.0,2.1,2.2,1.4")
    with hw.patched(model, path=("1.5", "2.4.k"), other=OTHER):
        changed = model(IDS)
    assert relative_difference(changed, model(IDS)) > 1e-6
    with pytest.raises(HeadwiseError, match=r"does not have 2\.kv0\. Layer 2 has the KV heads 1\."):
        _open(model, path=("1.5", "2.kv0"), other=OTHER)


@torch.no_grad()
def test_patched_path_with_padding_equals_single_texts() -> None:
    model = random_model(ROTARY)
    mask = torch.tensor([[1] * 7, [0] * 2 + [1] * 5]).bool()
    with hw.patched(model, path=("0.1", "2.3.k"), other=OTHER[:1]):
        batched = model(IDS, attention_mask=mask)
        assert relative_difference(batched[:1], model(IDS[:1])) < 1e-12


def _open(model: Any, **options: Any) -> None:
    with hw.patched(model, **options):
        model(IDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ("0.1", "2.3.k")}, "needs other=, and either heads= or path="),
        ({"heads": "0.1", "path": ("0.1", "2.3.k"), "other": OTHER}, "either heads= or path="),
        ({"path": "0.1", "other": OTHER}, "needs a sender and a receiver"),
        ({"path": ("0.1",), "other": OTHER}, "needs a sender and a receiver"),
        ({"path": ("0.1", 3), "other": OTHER}, "3 is not an address"),
        ({"path": ("0.9", "2.3.k"), "other": OTHER}, r"does not have 0\.9\. Layer 0 has the heads 0, 1, 2, 3, 4, 5"),
        ({"path": ("0.1", "7.3.k"), "other": OTHER}, "has the layers 0 to 2"),
        ({"path": ("enc.0.1", "2.3.k"), "other": OTHER}, r"does not have enc\.0\.1"),
        ({"path": ("2.3", "2.4.k"), "other": OTHER}, r"2\.4\.k does not read the output of 2\.3"),
        ({"path": ("2.3", "0.4"), "other": OTHER}, "comes earlier in the model"),
        ({"path": ("mlp.1", "mlp.1"), "other": OTHER}, "at the same place"),
        ({"path": ("0.1.k", "2.3.k"), "other": OTHER}, r"0\.1\.k does not write to the residual stream.*example 0\.1"),
        ({"path": ("logits", "2.3.k"), "other": OTHER}, "logits does not write to the residual stream"),
        ({"path": ("0.1", "embedding"), "other": OTHER}, "the embedding does not read the residual stream"),
        ({"path": ("0.1", "logits"), "other": OTHER[:, :5]}, "Got 5 and 7"),
        ({"path": ("mlp.0", "logits"), "other": OTHER[:, :5]}, "same number of tokens"),
        ({"path": ("0.1", "2.kv0.q"), "other": OTHER}, "a KV head has keys and values, but no queries"),
    ],
)
def test_patched_path_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        _open(random_model(SPEC), **options)


def test_patched_path_unsupported_models_raise() -> None:
    encoder = Transformer(replace(SPEC, kind="encoder", output="none"))
    with pytest.raises(HeadwiseError, match="needs a decoder whose residual stream is a sum"):
        _open(encoder, path=("0.1", "2.3.k"), other=OTHER)
    gated = random_model(SPEC)
    with (
        pytest.raises(HeadwiseError, match="is not the attention of their q, k and v"),
        hw.patched(gated, path=("0.1", "2.3.k"), other=OTHER),
    ):
        gated(IDS, gates={"2.3": 0.5})
    with (
        pytest.raises(HeadwiseError, match="must be called without a KV cache"),
        hw.patched(gated, path=("0.1", "2.3.k"), other=OTHER),
    ):
        gated(IDS, cache=gated.cache())


@torch.no_grad()
def test_patched_path_of_learned_gates_equals_reference() -> None:
    model = random_model(replace(SPEC, attention=replace(SPEC.attention, gated=True)))
    plain = random_model(SPEC)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if not name.endswith("gate")})
    for layer, (gated, target) in enumerate(zip(model.attention_layers(), plain.attention_layers(), strict=True)):
        assert gated.gate is not None, layer
        target.hook_point.W_O.mul_(gated.gate[:, None, None])
    with hw.patched(model, path=("0.1", "2.3.k"), other=OTHER):
        assert relative_difference(model(IDS), reference_logits(plain, ("0.1", "2.3.k"))) < 1e-12
