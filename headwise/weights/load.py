"""`load`, the one door: real weights, never random ones, from a bundle, a folder, a file or the hub."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.attached import AttachedModel
from headwise.attached.save_load import METADATA_FILE, can_attach
from headwise.distributed.model_shard import ShardedTransformer, build_shard, partitions_and_collectives
from headwise.distributed.shard_axes import named_slices_for_rank
from headwise.distributed.sharded_reader import DistributedCheckpointReader
from headwise.errors import HeadwiseError
from headwise.heads.quantized_weights import QuantizedWeight
from headwise.io.aligned_safetensors import align, write_tensors
from headwise.io.atomic_write import atomic_folder
from headwise.io.resolve_path import read_json, resolve_model_path, safe_child, weight_files
from headwise.io.weight_readers import GGUFReader, RenamedReader, SafetensorsReader, TorchReader, WeightReader
from headwise.model import Transformer
from headwise.spec import ModelSpec, Plan
from headwise.spec.migration import (
    FORMAT,
    NATIVE_FORMAT,
    SHARD_FOLDERS,
    migrate_plans,
    migrate_spec,
    migrate_tensor_name,
)
from headwise.spec.plan import plans_from_dicts
from headwise.text import Tokenizer
from headwise.text.gguf_tokenizer import tokenizer_from_gguf
from headwise.weights.families import FAMILIES, ModelFamily, family_of
from headwise.weights.families.family import Config
from headwise.weights.families.llama_files import spec_from_gguf, spec_from_meta
from headwise.weights.keymap import MappedTensor, TensorMapping, check_names_and_shapes, expand_mappings, find_prefix
from headwise.weights.save import PLANS_FILE, write_metadata

T = TypeVar("T", bound=Transformer)


@dataclass(frozen=True)
class PretrainedCheckpoint:
    """A model that has been found but not yet loaded: what it is, and where its tensors are."""

    source: Path
    spec: ModelSpec
    reader: WeightReader
    tokenizer: Callable[[], Tokenizer] | None  # read when first asked for
    family: ModelFamily | None = None  # None: our own format
    mappings: Sequence[TensorMapping] = ()
    storage: str = "qkv"
    format: int = FORMAT  # of our own format
    fuse_qkv: bool = False  # its tensors are made anew when read, so q, k and v may as well be put together


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    check: bool = True,
    mesh: DeviceMesh | None = None,
) -> Transformer | AttachedModel:
    """A model with its weights and its tokenizer, ready to use.

    `source` is a bundle (smollm2, minilm), a folder, a file (.safetensors, .gguf, .bin) or a hub id. `dtype` None keeps the
    weights as they are stored. Weights stay in the mapped file until they are written to, where dtype and device allow.
    `check` reads them all once and refuses NaN and infinities; without it they are read when first used.

    A folder of a family that is not mapped here is attached to instead, if transformers is installed, and that is said; so is
    one that an attached model was saved to after heads were cut. What comes back then is an `AttachedModel`, called alike.

    With a `mesh` the model is spread over its processes by heads, as `hw.shard` does it, and each reads its own part alone.

    >>> model = load("minilm")
    >>> model.spec.layers, model.spec.attention.heads
    (6, 12)
    """
    if needs_transformers(path := resolve_model_path(source)):
        if mesh is not None:
            raise HeadwiseError(
                f"{path} is run by transformers, attached to, and cannot be spread over processes here."
            )
        return _load_attached(path, dtype, device, check)
    if mesh is not None:
        return load_shard(path, mesh, dtype, device, check)
    return load_native(Transformer, path, dtype, device, check)


def load_native(
    model_class: type[T],
    source: str | Path,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    check: bool = True,
) -> T:
    """The same, of a family that is mapped here or in our own format."""
    checkpoint = open_checkpoint(source)
    model = model_class(checkpoint.spec, storage=checkpoint.storage, device="meta")
    state = dict(_named_tensors(checkpoint, model))
    if checkpoint.family is None:
        state = {name: align(tensor) for name, tensor in state.items()}  # the same bits out as before saving
    quantized = _quantized_names(model)
    dtype = dtype or _dtype_of(state, quantized)
    for name, tensor in state.items():
        if check and tensor.is_floating_point():
            _check_finite(checkpoint.source, name, tensor)
        state[name] = tensor.to(device=device, dtype=None if name in quantized else dtype)
    if checkpoint.spec.tied and model.output is not None and "embed.tokens.weight" in state:
        state["output.vocabulary.weight"] = state["embed.tokens.weight"]
    model.load_state_dict(state, assign=True)
    if checkpoint.fuse_qkv:
        for layer in model.attention_layers():
            layer.qkv.fuse_qkv()
    if quantized:
        model.to(dtype)  # what is unpacked comes out like all else
    return _set_metadata(model, checkpoint)


def load_shard(
    source: str | Path,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    check: bool = True,
) -> ShardedTransformer:
    """What this process is to hold of a model: of each tensor its own slice, one tensor after the other."""
    checkpoint = open_checkpoint(source)
    spec = checkpoint.spec
    partitions, collectives = partitions_and_collectives(mesh, spec)
    full_model = Transformer(spec, storage=checkpoint.storage, device="meta")
    quantized, state = _quantized_names(full_model), dict[str, Tensor]()
    for name, tensor in _named_tensors(checkpoint, full_model):
        dtype = dtype or (None if name in quantized else tensor.dtype)
        for own_name, own_slice in named_slices_for_rank(name, tensor, spec, partitions, collectives.rank).items():
            if check and own_slice.is_floating_point():
                _check_finite(checkpoint.source, name, own_slice)
            own_slice = (
                own_slice.clone() if own_slice.numel() < tensor.numel() else own_slice
            )  # the rest of the tensor is let go
            state[own_name] = align(own_slice.to(device=device, dtype=None if name in quantized else dtype))
    shard = build_shard(spec, partitions, collectives, state, checkpoint.storage)
    if quantized:
        shard.to(dtype or torch.float32)
    return _set_metadata(shard, checkpoint)


def _set_metadata(model: T, checkpoint: PretrainedCheckpoint) -> T:
    """The model with all that its folder says besides weights."""
    model.tokenizer = checkpoint.tokenizer
    model.family = None if checkpoint.family is None else checkpoint.family.name
    model.plans = _load_plans(checkpoint)
    return model.eval()


def _named_tensors(checkpoint: PretrainedCheckpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name here, when it is asked for."""
    return _native_state(checkpoint, model) if checkpoint.family is None else _mapped_state(checkpoint, model)


def _quantized_names(model: Transformer) -> set[str]:
    """The names of codes and scales of weights at few bits: they stay as they are stored."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedWeight)]
    return {
        f"{name}.{buffer_name}"
        for name, module in modules
        for buffer_name, _ in module.named_buffers()
        if buffer_name != "rows32"
    }


def _dtype_of(state: dict[str, Tensor], quantized: set[str]) -> torch.dtype:
    """One dtype for all, the embedding's: norms are sometimes stored finer. Where that is packed, all others have one."""
    embedding = state.get("embed.tokens.weight")
    return (
        embedding.dtype
        if embedding is not None
        else next(t.dtype for name, t in state.items() if name not in quantized)
    )


def _load_plans(checkpoint: PretrainedCheckpoint) -> tuple[Plan, ...]:
    """The plans by which heads of a model in our own format were cut, if by plans."""
    if checkpoint.family is not None or not (file := safe_child(checkpoint.source, PLANS_FILE)).is_file():
        return ()
    plans = read_json(file).get("plans")
    return plans_from_dicts(
        plans if checkpoint.format == FORMAT else migrate_plans(plans), checkpoint.spec.head_addresses, file
    )


def merge_sharded_checkpoint(source: Path, folder: Path) -> None:
    """Write a model that lies there in pieces as one; of its tensors no more than one is held."""
    checkpoint = open_checkpoint(source)
    empty_model = Transformer(checkpoint.spec, device="meta")
    state = empty_model.state_dict()
    if checkpoint.spec.tied:
        state.pop("output.vocabulary.weight", None)
    metadata = {"format": NATIVE_FORMAT, "storage": checkpoint.storage}
    with atomic_folder(folder, ("spec.json",)) as temp_folder:
        write_tensors(state, temp_folder / "model.safetensors", metadata, checkpoint.reader.get)
        write_metadata(_set_metadata(empty_model, checkpoint), temp_folder)


def needs_transformers(path: Path) -> bool:
    """Whether a place holds a model that is reached through transformers: of a family not mapped here, or cut there."""
    if not path.is_dir() or safe_child(path, "spec.json").is_file() or not safe_child(path, "config.json").is_file():
        return False
    model_type = read_json(safe_child(path, "config.json")).get("model_type")
    mapped = any(model_type in family.model_types for family in FAMILIES)
    return safe_child(path, METADATA_FILE).is_file() or (
        not mapped and isinstance(model_type, str) and can_attach(path)
    )


def _load_attached(folder: Path, dtype: torch.dtype | None, device: torch.device | str, check: bool) -> AttachedModel:
    attached = AttachedModel.reopen(folder, dtype, device)
    for name, tensor in attached.model.state_dict().items():
        if check and tensor.is_floating_point():
            _check_finite(folder, name, tensor)
    reason = (
        "heads were cut from it in transformers' shape"
        if safe_child(folder, METADATA_FILE).is_file()
        else "not a family mapped here"
    )
    print(f"{folder} ({attached.family}): {reason}, so transformers runs it, attached to.", file=sys.stderr)
    return attached


def open_checkpoint(source: str | Path) -> PretrainedCheckpoint:
    """Find a model and read what it is, without reading its weights."""
    path = resolve_model_path(source)
    if path.is_file():
        return _open_file(path)
    if safe_child(path, "spec.json").is_file():
        return _open_native(path)
    if safe_child(path, "config.json").is_file():
        return _open_hugging_face(path, weight_files(path))
    if safe_child(path, "params.json").is_file():
        return _open_meta(path)
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return _open_gguf(safe_child(path, gguf[0].name))
    if gguf:
        raise HeadwiseError(f"{path} holds {len(gguf)} GGUF files; name one of {', '.join(f.name for f in gguf)}.")
    raise HeadwiseError(f"{path} holds no model; expected spec.json, config.json, params.json or one GGUF file in it.")


def _open_file(path: Path) -> PretrainedCheckpoint:
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        if path.with_name("spec.json").is_file() and path.name == "model.safetensors":
            return _open_native(path.parent)
        if not path.with_name("config.json").is_file():
            raise HeadwiseError(
                f"{path} holds tensors only; the config.json that says what they are must lie beside it."
            )
        return _open_hugging_face(path.parent, [path])
    raise HeadwiseError(f"{path} is not a weight file; known: .safetensors, .gguf, .bin, .pt, .pth.")


def _open_native(folder: Path) -> PretrainedCheckpoint:
    file = safe_child(folder, "spec.json")
    fields, version = migrate_spec(read_json(file), file)
    spec, storage = ModelSpec.from_dict(fields), "qkv"
    if (shards := safe_child(folder, SHARD_FOLDERS[version])).is_dir():
        reader = DistributedCheckpointReader(shards)
    else:
        reader = SafetensorsReader([safe_child(folder, "model.safetensors")])
        storage = reader.metadata.get("storage", storage)
    if version == 1:
        reader = RenamedReader(reader, migrate_tensor_name)
    return PretrainedCheckpoint(folder, spec, reader, _tokenizer(folder), storage=storage, format=version)


def _open_hugging_face(folder: Path, files: list[Path]) -> PretrainedCheckpoint:
    config = read_json(safe_child(folder, "config.json"))
    family = family_of(config.get("model_type"))
    reader = SafetensorsReader(files) if files[0].suffix == ".safetensors" else TorchReader(files)
    spec = family.adjust(
        _parse_spec(family.spec_from_config, config, folder / "config.json"), set(reader.shapes), config
    )
    return PretrainedCheckpoint(folder, spec, reader, _tokenizer(folder), family, family.mappings, family.storage)


def _parse_spec(to_spec: Callable[[Config], ModelSpec], config: Config, file: Path) -> ModelSpec:
    """A configuration as a spec; what makes no sense is told with the file's name."""
    try:
        return to_spec(config)
    except HeadwiseError as error:
        raise HeadwiseError(f"{file}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise HeadwiseError(f"{file} makes no sense ({type(error).__name__}: {error}); fetch it again.") from None


def _open_meta(folder: Path) -> PretrainedCheckpoint:
    files = sorted(folder.glob("consolidated*.pth")) or sorted(folder.glob("consolidated*.safetensors"))
    if len(files) != 1:
        raise HeadwiseError(
            f"{folder} holds {len(files)} consolidated files; Meta's layout is read where there is just one."
        )
    file = safe_child(folder, files[0].name)
    reader = TorchReader([file]) if file.suffix == ".pth" else SafetensorsReader([file])
    family = family_of("llama")
    params = safe_child(folder, "params.json")
    spec = _parse_spec(partial(spec_from_meta, shapes=reader.shapes), read_json(params), params)
    return PretrainedCheckpoint(
        folder, spec, reader, _tokenizer(folder), family, family.other_mappings["meta"], family.storage
    )


def _open_gguf(file: Path) -> PretrainedCheckpoint:
    reader = GGUFReader(file)
    fields = reader.fields()
    family = family_of(fields.get("general.architecture"))
    if "gguf" not in family.other_mappings:
        raise HeadwiseError(f"{file} holds a {family.name} model; GGUF is read for the Llama family only.")
    spec = _parse_spec(partial(spec_from_gguf, reader=reader), fields, file)
    tokenizer = partial(tokenizer_from_gguf, fields) if "tokenizer.ggml.model" in fields else None
    return PretrainedCheckpoint(
        file, spec, reader, tokenizer, family, family.other_mappings["gguf"], family.storage, fuse_qkv=True
    )


def _tokenizer(folder: Path) -> Callable[[], Tokenizer] | None:
    """Its files are read now, so that it stays this model's own, and understood when first asked for."""
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        safe_child(folder, name)  # a link that leads out is refused
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
    return Tokenizer.deferred_load(folder) if has_tokenizer else None


def _mapped_state(checkpoint: PretrainedCheckpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Their tensors under our names: views, turned where they keep them the other way round."""
    reader, family = checkpoint.reader, checkpoint.family
    assert family is not None
    mapped = list(expand_mappings(checkpoint.spec, checkpoint.mappings))
    prefix = find_prefix(
        reader, (entry.external_name for entry in mapped if not entry.external_name.startswith("/")), family.prefixes
    )
    names = {entry: _external_name(entry, prefix) for entry in mapped}
    parameters = dict(model.named_parameters())
    expected_shapes = {name: _external_shape(entry, parameters[entry.native_name]) for entry, name in names.items()}
    check_names_and_shapes(
        reader, expected_shapes, checkpoint.source, lambda name: name.endswith(family.ignored_suffixes)
    )
    for entry, name in names.items():
        tensor = entry.mapping.convert(_require_float(reader.get(name), checkpoint.source, name))
        if checkpoint.spec.tied and entry.native_name == "embed.tokens.weight":
            _check_tied(checkpoint, tensor)
        yield entry.native_name, tensor


def _check_tied(checkpoint: PretrainedCheckpoint, embedding: Tensor) -> None:
    """An output that is said to be the embedding may lie in the file as well, but then it must be that: readers differ in
    which of the two they believe."""
    names = (
        mapping.external_name.removeprefix("/")
        for mapping in checkpoint.mappings
        if mapping.native_name == "output.vocabulary.weight"
    )
    for name in names:
        if name in checkpoint.reader.shapes and not torch.equal(checkpoint.reader.get(name), embedding):
            raise HeadwiseError(
                f"{checkpoint.source} ties the output to the embedding, yet holds another output in {name}; set "
                f"tie_word_embeddings to false in config.json to use it, or take {name} out of the file."
            )


def _external_name(mapped: MappedTensor, prefix: str) -> str:
    """A name that begins with / has no prefix."""
    return mapped.external_name[1:] if mapped.external_name.startswith("/") else prefix + mapped.external_name


def _external_shape(mapped: MappedTensor, parameter: Tensor) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return shape[::-1] if mapped.mapping.transposed else shape


def _native_state(checkpoint: PretrainedCheckpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    empty = model.state_dict()
    if checkpoint.spec.tied:
        empty.pop("output.vocabulary.weight", None)
    stored_shapes = checkpoint.reader.shapes
    expected_shapes = {
        name: tuple(tensor.shape) for name, tensor in empty.items() if tensor.numel() or name in stored_shapes
    }
    check_names_and_shapes(checkpoint.reader, expected_shapes, checkpoint.source)
    quantized = _quantized_names(model)
    for name in empty:
        tensor = checkpoint.reader.get(name) if name in stored_shapes else torch.empty(empty[name].shape)
        if name not in quantized:
            _require_float(tensor, checkpoint.source, name)
        elif tensor.dtype != empty[name].dtype:
            raise HeadwiseError(
                f"{checkpoint.source} keeps {name} as {tensor.dtype}; packed weights have {empty[name].dtype} there."
            )
        yield name, tensor


def _require_float(tensor: Tensor, source: Path, name: str) -> Tensor:
    if not tensor.is_floating_point():
        raise HeadwiseError(f"{source} keeps {name} as {tensor.dtype}; weights are floating-point numbers.")
    return tensor


def _check_finite(source: Path, name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinities. The sum is quick, in the order the numbers lie; it may overflow, so look again."""
    contiguous = tensor if tensor.is_contiguous() else tensor.mT
    if not contiguous.sum().isfinite() and not tensor.isfinite().all():
        bad_count = int((~tensor.isfinite()).sum())
        raise HeadwiseError(f"{source} is damaged: {name} holds {bad_count} numbers that are NaN or infinite.")
