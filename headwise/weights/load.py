"""`load`: read pretrained weights from a bundle, a folder, a file or the hub. Weights are never initialized randomly."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.attached import AttachedModel
from headwise.attached.save_load_transformers_folder import METADATA_FILE, can_attach
from headwise.attached.whisper_io import load_ggml_whisper
from headwise.distributed.distributed_checkpoint_reader import DistributedCheckpointReader
from headwise.distributed.model_shard import ShardedTransformer, build_shard, partitions_and_group_ops
from headwise.distributed.shard_axes import named_slices_for_rank
from headwise.errors import ArgumentError, FileFormatError, HeadwiseError, UnsupportedModelError
from headwise.heads.quantized_layers import QuantizedWeight
from headwise.io.aligned_safetensors import align, write_tensors
from headwise.io.atomic_write import atomic_folder
from headwise.io.ggml_whisper import is_ggml_whisper
from headwise.io.resolve_path import read_json, resolve_model_path, safe_child, weight_files
from headwise.io.weight_readers import GGUFReader, RenamedReader, SafetensorsReader, TorchReader, WeightReader
from headwise.kernels.resolve_device import resolve_device, resolve_dtype, stored_or_float32
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
from headwise.text.gguf_tokenizer import PLACEHOLDER_TOKENIZER, tokenizer_from_gguf
from headwise.weights.families import FAMILIES, ModelFamilySpec, family_of, missing_part
from headwise.weights.families.family import Config
from headwise.weights.families.gguf_decoders import (
    DECODER_FORMATS,
    ROTARY_FACTOR_TENSORS,
    decoder_spec_from_gguf,
    gguf_mappings,
)
from headwise.weights.families.gguf_deepseek import DEEPSEEK_MAPPINGS, SplitLatentReader, deepseek_spec_from_gguf
from headwise.weights.families.gguf_gpt2_bert import (
    bert_spec_from_gguf,
    gpt2_spec_from_gguf,
    modern_bert_spec_from_gguf,
)
from headwise.weights.families.gguf_t5 import T5_FORMATS, t5_gguf_mappings, t5_spec_from_gguf
from headwise.weights.families.llama_meta_and_gguf import spec_from_gguf, spec_from_meta
from headwise.weights.keymap import MappedTensor, TensorMapping, check_names_and_shapes, expand_mappings, find_prefix
from headwise.weights.save import PLANS_FILE, first_block_tensor_name, write_metadata

T = TypeVar("T", bound=Transformer)
OTHER_FORMATS = {  # architectures of GGUF files, besides Llama and those of DECODER_FORMATS
    "gpt2": gpt2_spec_from_gguf,
    "bert": bert_spec_from_gguf,
    "modern-bert": modern_bert_spec_from_gguf,
    "t5": t5_spec_from_gguf,
    "t5encoder": t5_spec_from_gguf,
    "deepseek2": deepseek_spec_from_gguf,
}
GGUF_MODEL_TYPES = {name: layout.model_type for name, layout in DECODER_FORMATS.items()} | {
    "modern-bert": "modernbert", "t5encoder": "t5", "deepseek2": "deepseek_v2",
}  # fmt: skip


@dataclass(frozen=True)
class UnloadedCheckpoint:
    """A model that was located, but whose weights are not loaded yet.

    Attributes:
        source: Folder or file.
        spec: Spec of the model.
        reader: Reader of its tensors.
        tokenizer: Loads the tokenizer on first use; None if the model comes without one.
        family: Model family; None for our own format.
        mappings: Tensor name map of the family.
        storage: How q, k and v are stored: `qkv` (one weight) or `q,k,v` (three weights).
        format: Version of our own format.
        fuse_qkv: Whether to fuse q, k and v after loading; free of cost if the reader copies tensors anyway.
    """

    source: Path
    spec: ModelSpec
    reader: WeightReader
    tokenizer: Callable[[], Tokenizer] | None
    family: ModelFamilySpec | None = None
    mappings: Sequence[TensorMapping] = ()
    storage: str = "qkv"
    format: int = FORMAT
    fuse_qkv: bool = False


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    check: bool = True,
    mesh: DeviceMesh | None = None,
) -> Transformer | AttachedModel:
    """Load a model with its weights and its tokenizer.

    A folder of a model family that Headwise does not implement is loaded with transformers, if installed, and attached; a
    message on stderr says so. The result is then an `AttachedModel`, which has the same interface. Folders to which a pruned
    attached model was saved are loaded in the same way.

    Args:
        source: Bundle name (smollm2, minilm, rxnmapper), folder, file (.safetensors, .gguf, .bin) or hub id.
        dtype: Data type of the weights: float32, bfloat16, float16 or float64. None: the dtype of the token embedding in the
            file, or float32 for GGUF files and for types that torch only stores, such as float8. A message on stderr names
            the dtype if it is not float32. Weights stay in the memory-mapped file if dtype and device allow it.
        device: Device of the weights. "auto": the first available of CUDA, XPU, MPS and CPU.
        check: Read all weights once and raise an error on NaN or infinite values. If False, weights are read on first use.
        mesh: Shard the model by heads over the processes of this mesh, as `hw.shard` does. Each process reads only its part.

    Returns:
        The model, in eval mode.

    Raises:
        HeadwiseError: The model is not found, damaged, or has a part that Headwise does not support. The device is not
            available, or does not compute in the dtype.

    >>> model = load("minilm")
    >>> model.spec.layers, model.spec.attention.heads
    (6, 12)
    """
    device = resolve_device(device)
    dtype, path = resolve_dtype(dtype, device), resolve_model_path(source)
    is_whisper = path.is_file() and is_ggml_whisper(path)
    if is_whisper or needs_transformers(path):
        if mesh is not None:
            raise UnsupportedModelError(
                f"{path}: this model runs in transformers (attached), and attached models cannot be sharded. Remove mesh."
            )
        return (
            load_ggml_whisper(path, dtype, device) if is_whisper else _load_attached(path, dtype, device, check=check)
        )
    if mesh is not None:
        return load_shard(path, mesh, dtype, device, check=check)
    return load_native(Transformer, path, dtype, device, check=check)


def load_native(
    model_class: type[T],
    source: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    check: bool = True,
) -> T:
    """Load a model of a supported family or of our own format as `model_class`."""
    checkpoint = open_checkpoint(source)
    model = model_class(checkpoint.spec, storage=checkpoint.storage, device="meta")
    state = dict(_named_tensors(checkpoint, model))
    if checkpoint.family is None:
        state = {name: align(tensor) for name, tensor in state.items()}  # so that outputs equal those before saving
    quantized = _quantized_names(model)
    dtype = dtype or _default_dtype(checkpoint, _dtype_of(state, quantized), device)
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
        model.to(dtype)  # dequantized weights get the dtype of the other weights
    return _set_metadata(model, checkpoint)


def load_shard(
    source: str | Path,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    check: bool = True,
) -> ShardedTransformer:
    """Load the part of a model that belongs to this process, slice by slice, one tensor at a time."""
    checkpoint = open_checkpoint(source)
    spec = checkpoint.spec
    partitions, collectives = partitions_and_group_ops(mesh, spec)
    full_model = Transformer(spec, storage=checkpoint.storage, device="meta")
    quantized, state = _quantized_names(full_model), dict[str, Tensor]()
    for name, tensor in _named_tensors(checkpoint, full_model):
        if dtype is None and name not in quantized:  # the embedding comes first, unless it is quantized
            dtype = _default_dtype(checkpoint, tensor.dtype, device)
        for own_name, own_slice in named_slices_for_rank(name, tensor, spec, partitions, collectives.rank).items():
            if check and own_slice.is_floating_point():
                _check_finite(checkpoint.source, name, own_slice)
            own_slice = own_slice.clone() if own_slice.numel() < tensor.numel() else own_slice  # frees the full tensor
            state[own_name] = align(own_slice.to(device=device, dtype=None if name in quantized else dtype))
    shard = build_shard(spec, partitions, collectives, state, checkpoint.storage)
    if quantized:
        shard.to(dtype or torch.float32)
    return _set_metadata(shard, checkpoint)


def _set_metadata(model: T, checkpoint: UnloadedCheckpoint) -> T:
    """Set tokenizer, family and plans, and switch to eval mode."""
    model.tokenizer = checkpoint.tokenizer
    model.family = None if checkpoint.family is None else checkpoint.family.name
    model.plans = _load_plans(checkpoint)
    return model.eval()


def _named_tensors(checkpoint: UnloadedCheckpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its native name, lazily."""
    return _native_state(checkpoint, model) if checkpoint.family is None else _mapped_state(checkpoint, model)


def _quantized_names(model: Transformer) -> set[str]:
    """Return the names of buffers of quantized weights, which keep their stored dtype."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedWeight)]
    return {
        f"{name}.{buffer_name}"
        for name, module in modules
        for buffer_name, _ in module.named_buffers()
        if buffer_name != "rows32"
    }


def _dtype_of(state: dict[str, Tensor], quantized: set[str]) -> torch.dtype:
    """Return the embedding's dtype, because norms may be stored in a wider one. If it is quantized, use any other tensor."""
    embedding = state.get("embed.tokens.weight")
    return (
        embedding.dtype
        if embedding is not None
        else next(t.dtype for name, t in state.items() if name not in quantized)
    )


def _default_dtype(checkpoint: UnloadedCheckpoint, stored: torch.dtype, device: torch.device | str) -> torch.dtype:
    """Return the dtype of the weights if the caller does not name one, and report it on stderr if it is a surprise."""
    if checkpoint.reader.default_dtype is not None:
        return checkpoint.reader.default_dtype
    dtype = stored_or_float32(stored, torch.device(device))
    _report_dtype(checkpoint.source, stored, dtype)
    return dtype


def _report_dtype(source: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Name the chosen dtype on stderr, unless it is float32 in the file too."""
    if not stored == dtype == torch.float32:
        stored_name, name = (str(kind).removeprefix("torch.") for kind in (stored, dtype))
        reason = "as in the file" if stored == dtype else f"because the device does not compute in {stored_name}"
        print(f"{source}: the weights are {name}, {reason}. Set dtype (--dtype) for another type.", file=sys.stderr)


def _load_plans(checkpoint: UnloadedCheckpoint) -> tuple[Plan, ...]:
    """Return the plans by which a model in our own format was pruned."""
    if checkpoint.family is not None or not (file := safe_child(checkpoint.source, PLANS_FILE)).is_file():
        return ()
    plans = read_json(file).get("plans")
    return plans_from_dicts(
        plans if checkpoint.format == FORMAT else migrate_plans(plans), checkpoint.spec.head_addresses, file
    )


def merge_sharded_checkpoint(source: Path, folder: Path) -> None:
    """Write a sharded checkpoint as a single one, with one tensor in memory at a time."""
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
    """Return whether a folder must be loaded with transformers: another family, or pruned while attached."""
    if not path.is_dir() or safe_child(path, "spec.json").is_file() or not safe_child(path, "config.json").is_file():
        return False
    return safe_child(path, METADATA_FILE).is_file() or (bool(_attach_reason(path)) and can_attach(path))


def _attach_reason(path: Path) -> str:
    """Return why a transformers folder must be attached, or an empty string if its family loads it, or raises an error."""
    config = read_json(safe_child(path, "config.json"))
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family.attach_reason(config)
    if not isinstance(model_type, str):
        return ""
    missing = missing_part(config)
    return f"Headwise does not implement {f'its {missing}' if missing else 'this model family'}"


def _load_attached(
    folder: Path, dtype: torch.dtype | None, device: torch.device | str, *, check: bool
) -> AttachedModel:
    attached = AttachedModel.reopen(folder, dtype, device)
    for name, tensor in attached.model.state_dict().items():
        if check and tensor.is_floating_point():
            _check_finite(folder, name, tensor)
    if dtype is None:
        _report_dtype(folder, attached.model.dtype, attached.model.dtype)
    reason = "it was pruned while attached" if safe_child(folder, METADATA_FILE).is_file() else _attach_reason(folder)
    print(f"{folder} ({attached.family}): loaded with transformers and attached, because {reason}.", file=sys.stderr)
    return attached


def open_checkpoint(source: str | Path) -> UnloadedCheckpoint:
    """Locate a model and read its spec, without reading its weights."""
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
        raise ArgumentError(
            f"{path}: contains {len(gguf)} GGUF files. Pass the path of one of them: {', '.join(f.name for f in gguf)}."
        )
    raise FileFormatError(
        f"{path}: contains no model. Expected spec.json, config.json, params.json or one GGUF file in the folder."
    )


def _open_file(path: Path) -> UnloadedCheckpoint:
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        if path.with_name("spec.json").is_file() and path.name == "model.safetensors":
            return _open_native(path.parent)
        if not path.with_name("config.json").is_file():
            raise FileFormatError(
                f"{path}: config.json is missing, and a weight file cannot be loaded without it. Put config.json into the "
                f"same folder."
            )
        return _open_hugging_face(path.parent, [path])
    raise ArgumentError(f"{path}: not a weight file. Supported file types: .safetensors, .gguf, .bin, .pt, .pth.")


def _open_native(folder: Path) -> UnloadedCheckpoint:
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
    return UnloadedCheckpoint(folder, spec, reader, _tokenizer(folder), storage=storage, format=version)


def _open_hugging_face(folder: Path, files: list[Path]) -> UnloadedCheckpoint:
    config = read_json(safe_child(folder, "config.json"))
    family = family_of(config.get("model_type"), config)
    reader = SafetensorsReader(files) if files[0].suffix == ".safetensors" else TorchReader(files)
    spec = family.adjust(
        _parse_spec(family.spec_from_config, config, folder / "config.json"), set(reader.shapes), config
    )
    return UnloadedCheckpoint(folder, spec, reader, _tokenizer(folder), family, family.mappings, family.storage)


def _parse_spec(to_spec: Callable[[Config], ModelSpec], config: Config, file: Path) -> ModelSpec:
    """Convert a configuration to a spec. Errors start with the name of the file."""
    try:
        return to_spec(config)
    except HeadwiseError as error:
        raise type(error)(f"{file}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FileFormatError(
            f"{file}: invalid configuration ({type(error).__name__}: {error}). Download it again."
        ) from None


def _open_meta(folder: Path) -> UnloadedCheckpoint:
    files = sorted(folder.glob("consolidated*.pth")) or sorted(folder.glob("consolidated*.safetensors"))
    if len(files) != 1:
        raise UnsupportedModelError(
            f"{folder}: contains {len(files)} consolidated files. Meta's format is supported only with a single file; use "
            f"the model in Hugging Face's format."
        )
    file = safe_child(folder, files[0].name)
    reader = TorchReader([file]) if file.suffix == ".pth" else SafetensorsReader([file])
    family = family_of("llama")
    params = safe_child(folder, "params.json")
    spec = _parse_spec(partial(spec_from_meta, shapes=reader.shapes), read_json(params), params)
    return UnloadedCheckpoint(
        folder, spec, reader, _tokenizer(folder), family, family.other_mappings["meta"], family.storage
    )


def _open_gguf(file: Path) -> UnloadedCheckpoint:
    reader = GGUFReader(file)
    fields = reader.fields()
    name = fields.get("general.architecture")
    is_decoder = name in DECODER_FORMATS
    family = family_of(GGUF_MODEL_TYPES.get(str(name), name), _expert_count_setting(fields))
    if not is_decoder and name not in OTHER_FORMATS and "gguf" not in family.other_mappings:
        raise UnsupportedModelError(
            f"{file}: contains a {family.name} model, but GGUF files are read only for llama, qwen2, "
            f"{', '.join((*DECODER_FORMATS, *OTHER_FORMATS))}. Use the model in Hugging Face's format."
        )
    if name == "deepseek2":
        reader = SplitLatentReader(reader)
    to_spec = decoder_spec_from_gguf if is_decoder else OTHER_FORMATS.get(str(name), spec_from_gguf)
    spec = _parse_spec(partial(to_spec, reader=reader), fields, file)
    mappings = gguf_mappings(name) if is_decoder else _other_gguf_mappings(family, fields, reader)
    has_tokenizer = fields.get("tokenizer.ggml.model") not in (None, PLACEHOLDER_TOKENIZER)
    tokenizer = partial(tokenizer_from_gguf, fields) if has_tokenizer else None
    return UnloadedCheckpoint(file, spec, reader, tokenizer, family, mappings, family.storage, fuse_qkv=True)


def _other_gguf_mappings(family: ModelFamilySpec, fields: Config, reader: WeightReader) -> Sequence[TensorMapping]:
    """Return the tensor name map of an architecture that is not one of DECODER_FORMATS."""
    if fields["general.architecture"] in T5_FORMATS:
        return t5_gguf_mappings(fields, reader)
    return DEEPSEEK_MAPPINGS if fields["general.architecture"] == "deepseek2" else family.other_mappings["gguf"]


def _expert_count_setting(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of experts of a GGUF file as config.json names it, for the message of an unsupported architecture."""
    return {"num_experts": fields.get(f"{fields.get('general.architecture')}.expert_count")}


def _tokenizer(folder: Path) -> Callable[[], Tokenizer] | None:
    """Read the tokenizer files now and parse them on first use. The model keeps its tokenizer if the files change later."""
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        safe_child(folder, name)  # raises an error for a link that leads outside the folder
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
    return Tokenizer.deferred_load(folder) if has_tokenizer else None


def _mapped_state(checkpoint: UnloadedCheckpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield external tensors under native names, as views, transposed if the family stores them transposed."""
    reader, family = checkpoint.reader, checkpoint.family
    assert family is not None
    mapped = list(expand_mappings(checkpoint.spec, checkpoint.mappings))
    prefix = find_prefix(
        reader, (entry.external_name for entry in mapped if not entry.external_name.startswith("/")), family.prefixes
    )
    names = {entry: _external_name(entry, prefix) for entry in mapped}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected_shapes = {name: _external_shape(entry, parameters[entry.native_name]) for entry, name in names.items()}
    check_names_and_shapes(
        reader,
        expected_shapes,
        checkpoint.source,
        lambda name: name.endswith((*family.ignored_suffixes, *ROTARY_FACTOR_TENSORS)),
    )
    used = set()
    for entry, name in names.items():
        stored = entry.mapping.select_part(_require_float(reader.get(name), checkpoint.source, name))
        tensor = entry.mapping.convert(stored)
        if tensor.ndim == 1:  # gains of norms over all heads have a head axis here
            tensor = tensor.view(parameters[entry.native_name].shape)
        if name in used:  # a tensor of several layers: each gets its own copy, which training can change
            tensor = tensor.clone()
        used.add(name)
        if checkpoint.spec.tied and entry.native_name == "embed.tokens.weight":
            _check_tied(checkpoint, tensor)
        yield entry.native_name, tensor


def _check_tied(checkpoint: UnloadedCheckpoint, embedding: Tensor) -> None:
    """Raise an error if the output is tied to the embedding but the file contains different output weights.

    Other libraries disagree on which of the two to use.
    """
    names = (
        mapping.external_name.removeprefix("/")
        for mapping in checkpoint.mappings
        if mapping.native_name == "output.vocabulary.weight"
    )
    for name in names:
        if name in checkpoint.reader.shapes and not torch.equal(checkpoint.reader.get(name), embedding):
            raise FileFormatError(
                f"{checkpoint.source}: the configuration ties the output to the embedding, but the weights contain a "
                f"different output in {name}. Set tie_word_embeddings to false in config.json to use it, or remove {name} "
                f"from the file."
            )


def _external_name(mapped: MappedTensor, prefix: str) -> str:
    """Return the name in the file. A name that starts with / has no prefix."""
    return mapped.external_name[1:] if mapped.external_name.startswith("/") else prefix + mapped.external_name


def _external_shape(mapped: MappedTensor, parameter: Tensor) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if mapped.native_name.endswith(("_norm.weight", "_norm.bias")):
        shape = (parameter.numel(),)  # gains of a norm over all heads have a head axis in the native model
    shape = (shape[0] * mapped.mapping.part[1], *shape[1:])
    return shape[::-1] if mapped.mapping.transposed else shape


def _native_state(checkpoint: UnloadedCheckpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    empty = model.state_dict()
    if checkpoint.spec.tied:
        empty.pop("output.vocabulary.weight", None)
    stored_shapes = checkpoint.reader.shapes
    stored_name = first_block_tensor_name if checkpoint.spec.shared_layers else str
    expected_shapes = {
        stored_name(name): tuple(tensor.shape)
        for name, tensor in empty.items()
        if tensor.numel() or stored_name(name) in stored_shapes
    }
    check_names_and_shapes(checkpoint.reader, expected_shapes, checkpoint.source)
    quantized = _quantized_names(model)
    for name in empty:
        source_name = stored_name(name)
        tensor = checkpoint.reader.get(source_name) if source_name in stored_shapes else torch.empty(empty[name].shape)
        if name not in quantized:
            _require_float(tensor, checkpoint.source, name)
        elif tensor.dtype != empty[name].dtype:
            raise FileFormatError(
                f"{checkpoint.source}: {name} has dtype {tensor.dtype}, but quantized weights require {empty[name].dtype}. "
                f"Save the model again."
            )
        yield name, tensor


def _require_float(tensor: Tensor, source: Path, name: str) -> Tensor:
    if not tensor.is_floating_point():
        raise UnsupportedModelError(
            f"{source}: {name} has dtype {tensor.dtype}, but weights must be floating-point. Use a version of the model "
            f"that is not quantized."
        )
    return tensor


def _check_finite(source: Path, name: str, tensor: Tensor) -> None:
    """Raise an error on NaN or infinite values. The sum is fast but may overflow, so a suspicious tensor is checked again."""
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no sums
    contiguous = tensor if tensor.is_contiguous() else tensor.mT
    if not contiguous.sum().isfinite() and not tensor.isfinite().all():
        bad_count = int((~tensor.isfinite()).sum())
        raise FileFormatError(
            f"{source}: the file is damaged: {name} contains {bad_count} NaN or infinite values. Download the model again, "
            f"or pass check=False to load it anyway."
        )
