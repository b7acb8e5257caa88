"""Folders of attached models in transformers' format, with a metadata file about pruned heads, or in the original shape.

If all layers of a pruned model have the same number of heads, its configuration can say so, and plain transformers loads
the folder. Otherwise tensors are smaller than the configuration says: `hw.load` reads the metadata file and prunes before it
loads the weights, and plain transformers needs a remote-code modeling file (`remote_code_export.py`). Both can load a model
that was saved in its original shape, with zeros for pruned heads.
"""

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from headwise.attached.attach_support import copy_config
from headwise.attached.discover import find_attention_modules
from headwise.attached.head_slices import HEAD_COUNT_NAMES, KV_COUNT_NAMES, head_tensor_slices
from headwise.attached.infer_spec import infer_spec
from headwise.attached.layer import AttachedLayer, bias_of, check_no_adapters
from headwise.attached.masks import MaskConverter
from headwise.attached.offload import copy_to_memory, is_offloaded
from headwise.attached.per_head_packed_weights import PerHeadQuantizedMatrix, is_packed
from headwise.attached.prune_in_place import expand_kv_groups, prune_layers
from headwise.attached.quantize_in_place import blocks_with_mlps, quantization_of, quantize_in_place
from headwise.attached.remote_code_export import check_remote_code, uniform_config, write_remote_code
from headwise.errors import ArgumentError, FileFormatError, HeadwiseError, MissingDependencyError, UnsupportedModelError
from headwise.spec import CachePolicy, CacheRule, LayerAddress
from headwise.spec.migration import migrate_attached
from headwise.spec.plan import plans_from_dicts
from headwise.spec.weight_bits import FULL_PRECISION, WeightRule

METADATA_FILE = "headwise.json"
FORMAT = "headwise-attached-2"
# Layouts of the rows of q, k and v.
ROW_LAYOUTS = {"separate", "padded_per_head", "padded_at_end", "fused", "per_head", ""}
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
# Fields of a configuration that a uniformly pruned model changes. Some configurations have names of their own for them.
CONFIG_COUNTS = (
    *HEAD_COUNT_NAMES, *KV_COUNT_NAMES, "head_dim", "attention_head_dim", "d_kv", "kv_channels", "attention_heads",
    "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
PLANS_ATTRIBUTE = "_headwise_plans"  # attribute of a model that stores the plans by which it was pruned
CACHE_ATTRIBUTE = "_headwise_cache"  # attribute of a model that stores the cache rules of its KV heads


def save_attached(
    model: Any,
    layers: Sequence[AttachedLayer],
    processors: Sequence[Any],
    folder: str | Path,
    *,
    full_shape: bool,
    exported: bool = False,
    remote_code: bool = False,
) -> Path:
    """Write a model atomically. If `exported`, only an earlier export may be replaced."""
    if full_shape and quantization_of(model)[0]:
        raise UnsupportedModelError(
            "model: plain transformers does not read weights quantized per head. Dequantize it first: hw.dequantize(model)."
        )
    for name, module in model.named_modules():
        check_no_adapters(module, name, "saved")  # names and values would be those of the projections without adapters
    if remote_code:
        check_remote_code(model, layers)  # before weights are copied or written
    from headwise.io.atomic_write import EXPORT_MARKER, atomic_folder

    marker = EXPORT_MARKER if exported else "config.json"
    with atomic_folder(folder, (marker,)) as temp_folder, _progress_bars_off():
        if exported:
            (temp_folder / EXPORT_MARKER).write_text('{"to": "transformers"}', encoding="utf-8")
        filled = full_shape and (is_pruned(layers) or bool(added_biases(model, layers)))
        # transformers can save offloaded weights only with a device map.
        if is_offloaded(model) and (filled or not hasattr(model, "hf_device_map")):
            model = copy_to_memory(model)
            layers = make_attached_layers(model)
        if filled:
            _unpruned_copy(model, layers).save_pretrained(temp_folder)
        else:
            model.save_pretrained(temp_folder)  # a pruned model also writes its metadata file
        if remote_code:
            write_remote_code(model, layers, temp_folder)
        for processor in processors:  # tokenizer and image preprocessor
            if processor is not None:
                processor.save(temp_folder)
    return Path(folder)


@contextmanager
def _progress_bars_off() -> Iterator[None]:
    """Show no progress bars of transformers inside the context: each checkpoint of a run would show one."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def is_loadable_by_transformers(folder: Path) -> bool:
    """Return whether plain transformers can load a folder of a pruned model."""
    metadata = _read_metadata(folder)
    return metadata is None or bool(metadata["full_config"])


def is_pruned(layers: Sequence[AttachedLayer]) -> bool:
    """Return whether any of these layers is pruned."""
    return any(layer.info.kept_heads is not None for layer in layers)


def added_biases(model: Any, layers: Sequence[AttachedLayer]) -> set[str]:
    """Return the names of output biases that folding added and that the configuration of the model does not build."""
    names = {id(module): name for name, module in model.named_modules()}
    modules = [layer.info.output_module for layer in layers if layer.info.output_module is not None]
    biases = {f"{names[id(module)]}.bias" for module in modules if bias_of(module) is not None}
    if not biases or "save_pretrained" not in model.__dict__:  # only a changed model has its own save_pretrained
        return set()
    with torch.device("meta"), torch.random.fork_rng():
        built = type(model)(copy_config(model)).state_dict()
    return biases - built.keys()


def patch_save_pretrained(model: Any) -> None:
    """Make `save_pretrained` of a pruned model and its submodels write the metadata file, attached or not.

    Weights of a pruned model cannot be loaded without it.
    """
    from transformers import PreTrainedModel

    for submodel in model.modules():
        if isinstance(submodel, PreTrainedModel):
            submodel.__dict__["save_pretrained"] = partial(_save_with_metadata, submodel)


def _save_with_metadata(model: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
    """Run `save_pretrained` of a pruned model and write its metadata file."""
    from headwise.io.atomic_write import write_atomic

    save = type(model).save_pretrained
    bound_arguments = inspect.signature(save).bind(model, save_directory, *args, **kwargs).arguments
    if bound_arguments.get("push_to_hub"):
        raise ArgumentError(
            "push_to_hub=True: this model is pruned, and the upload would lack its metadata file. Save the model, then "
            "upload the folder."
        )
    if "save_original_format" not in bound_arguments:
        kwargs["save_original_format"] = False  # keep the current tensor names; only hw.load reads the folder
    save(model, save_directory, *args, **kwargs)
    if bound_arguments.get("is_main_process", True):
        layers = make_attached_layers(model)
        metadata = _prune_metadata(model, layers)
        fields = None if quantization_of(model)[0] or not is_pruned(layers) else uniform_config(model, layers)
        if fields is not None and set(fields) <= set(CONFIG_COUNTS):  # plain transformers can build the pruned model
            config_file = Path(save_directory) / "config.json"
            config = json.loads(config_file.read_text(encoding="utf-8"))
            metadata["full_config"] = {name: config.get(name) for name in fields}
            write_atomic(config_file, json.dumps(config | fields, indent=2).encode())
        write_atomic(Path(save_directory) / METADATA_FILE, json.dumps(metadata, indent=2).encode())


def load_model_and_layers(
    folder: Path, dtype: torch.dtype | None, device: torch.device | str
) -> tuple[Any, list[AttachedLayer]]:
    """Load a transformers model from a folder, pruned according to its metadata file. Returns the model and its layers."""
    metadata = _read_metadata(folder)
    architecture = transformers_class_of(folder, None if metadata is None else metadata["class"])
    if metadata is None:
        if not any(folder.glob("*.safetensors")):
            raise FileFormatError(
                f"{folder}: contains no safetensors file. For this model family only safetensors are supported."
            )
        model, loading_info = architecture.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
        )
        for issue in ("missing_keys", "mismatched_keys", "error_msgs"):
            if loading_info.get(issue):  # transformers would initialize them randomly
                examples = ", ".join(map(str, sorted(loading_info[issue], key=str)[:5]))
                raise FileFormatError(
                    f"{folder}: weights of {type(model).__name__} are missing or invalid ({issue.replace('_', ' ')}): "
                    f"{examples}. Download the model again."
                )
        return model.to(device).eval(), make_attached_layers(model)
    model = build_from_config(architecture, folder, "cpu", metadata)
    layers = prune_from_metadata(make_attached_layers(model), metadata)
    _quantize_from_metadata(model, layers, metadata)
    patch_save_pretrained(model)
    present_heads = [address for layer in layers for address in layer.hook_point.head_addresses]
    model.__dict__[PLANS_ATTRIBUTE] = plans_from_dicts(metadata["plans"], present_heads, METADATA_FILE)
    model.__dict__[CACHE_ATTRIBUTE] = _cache_rules(metadata["cache"])
    stored = _load_weights(model, layers, folder)
    dtypes = _dtypes(architecture, folder, metadata, dtype)
    _cast(model, dtypes, set() if dtype else stored)
    for packed in [module for module in model.modules() if isinstance(module, PerHeadQuantizedMatrix)]:
        packed.to(model.dtype)  # the dtype of dequantized weights
    return model.to(device=device).eval(), layers


def build_on_meta(folder: Path) -> tuple[Any, list[AttachedLayer]]:
    """Build a pruned or full transformers model on the meta device, without its weights. Returns the model and its layers."""
    metadata = _read_metadata(folder)
    architecture = transformers_class_of(folder, None if metadata is None else metadata["class"])
    model = build_from_config(architecture, folder, "meta", metadata)
    layers = make_attached_layers(model)
    return model, layers if metadata is None else prune_from_metadata(layers, metadata)


def make_attached_layers(model: Any) -> list[AttachedLayer]:
    """Create the attention layers of a model."""
    mask_converter = MaskConverter()
    return [AttachedLayer(info, mask_converter) for info in find_attention_modules(model)]


def can_attach(folder: Path) -> bool:
    """Return whether transformers is installed, supports the model of a folder, and runs it on its attention interface."""
    if find_spec("transformers") is None:
        return False
    try:
        architecture = transformers_class_of(folder)
    except (HeadwiseError, ValueError, OSError):
        return False
    # gpt-oss runs only transformers' eager attention, whose sinks Headwise computes, too
    supported = architecture._supports_sdpa or architecture.config_class.model_type == "gpt_oss"
    return bool(architecture._can_set_attn_implementation()) and bool(supported)


def transformers_class_of(folder: Path, name: str | None = None) -> Any:
    """Return the model class that a folder's configuration names."""
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            f"{folder}: Headwise does not implement this model family and needs transformers to load it. Run: "
            f"pip install 'headwise[attach]'"
        ) from None
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    name = name or next(iter(config.architectures or ()), None)
    architecture = getattr(transformers, name or "", None)
    if (
        architecture is None
        or not isinstance(architecture, type)
        or not issubclass(architecture, transformers.PreTrainedModel)
    ):
        raise UnsupportedModelError(
            f"{folder}: transformers {transformers.__version__} has no architecture {name!r}. Update it: "
            f"pip install -U transformers"
        )
    if architecture.config_class is None or architecture.config_class.model_type != config.model_type:
        raise FileFormatError(
            f"{folder}: config.json names the model type {config.model_type!r} and the architecture {name}, which do not "
            f"match. Correct the file, or download it again."
        )
    return architecture


def build_from_config(architecture: Any, folder: Path, device: str, metadata: dict[str, Any] | None = None) -> Any:
    """Build a model from a folder's configuration in its full size, without loading its weights."""
    config = architecture.config_class.from_pretrained(folder)
    for name, value in ({} if metadata is None else metadata["full_config"]).items():
        setattr(config, name, value)
    with torch.device(device), torch.random.fork_rng():
        return architecture(config)


def prune_from_metadata(layers: list[AttachedLayer], metadata: dict[str, Any]) -> list[AttachedLayer]:
    """Prune layers to the heads listed in the metadata file."""
    kept_heads = {LayerAddress.parse(name): set(heads) for name, heads in metadata["kept_heads"].items()}
    kv_expanded = {LayerAddress.parse(name) for name in metadata["kv_expanded"]}
    layer_addresses = {layer.hook_point.address for layer in layers}
    if not set(kept_heads) | kv_expanded <= layer_addresses:
        raise FileFormatError(
            f"{METADATA_FILE}: names layers that the model does not have. The folder is damaged; save the model again."
        )
    for layer in layers:
        layer.layouts |= metadata["layouts"].get(str(layer.hook_point.address), {})
        layer.num_outputs = metadata["num_outputs"].get(str(layer.hook_point.address), layer.num_outputs)
    pruned = [
        address
        for layer in layers
        for address in layer.hook_point.head_addresses
        if layer.hook_point.address in kept_heads and address.head not in kept_heads[layer.hook_point.address]
    ]
    return [
        expand_kv_groups(layer) if layer.hook_point.address in kv_expanded else layer
        for layer in prune_layers(layers, pruned)
    ]


def _quantize_from_metadata(model: Any, layers: list[AttachedLayer], metadata: dict[str, Any]) -> None:
    """Give a model packed weights of the sizes that the metadata file lists."""
    if not metadata["weight_rules"]:
        return
    try:
        rules = tuple(WeightRule(**rule | {"heads": tuple(rule["heads"])}) for rule in metadata["weight_rules"])
        spec = replace(infer_spec(model, layers), weight_rules=rules, activation_bits=metadata["activation_bits"])
    except (TypeError, KeyError, ValueError) as error:
        raise FileFormatError(f"{METADATA_FILE}: invalid weight_rules ({error}). Save the model again.") from None
    quantize_in_place(model, layers, blocks_with_mlps(model, layers), spec)


def _prune_metadata(model: Any, layers: Sequence[AttachedLayer]) -> dict[str, Any]:
    """Return the metadata of a pruned model: remaining heads, layers with expanded KV groups, layouts, dtypes and plans."""
    return {
        "format": FORMAT,
        "class": type(model).__name__,
        "kept_heads": {
            str(layer.hook_point.address): layer.info.kept_heads
            for layer in layers
            if layer.info.kept_heads is not None
        },
        "kv_expanded": [
            str(layer.hook_point.address) for layer in layers if layer.info.kv_expanded and layer.spec.head_ids
        ],
        "layouts": {
            str(layer.hook_point.address): layer.layouts for layer in layers if _has_nondefault_row_layout(layer)
        },
        "num_outputs": {str(layer.hook_point.address): layer.num_outputs for layer in layers if layer.num_outputs != 2},
        "dtype": _dtype_name(model.dtype),
        "other_dtypes": {
            name: _dtype_name(tensor.dtype)
            for name, tensor in _named_float_tensors(model)
            if tensor.dtype != model.dtype
        },
        "plans": [plan.to_dict() for plan in model.__dict__.get(PLANS_ATTRIBUTE, ())],
        "cache": [asdict(rule) for rule in model.__dict__.get(CACHE_ATTRIBUTE, ())],
        "weight_rules": [asdict(rule) for rule in quantization_of(model)[0]],
        "activation_bits": quantization_of(model)[1],
    }


def _has_nondefault_row_layout(layer: AttachedLayer) -> bool:
    """Return whether the layout of rows differs from the default for these projection names."""
    default_layout = None if layer.info.qkv_modules is None else layer.info.qkv_modules[0]
    return default_layout is not None and set(layer.layouts.values()) != {default_layout}


def _read_metadata(folder: Path) -> dict[str, Any] | None:
    from headwise.io.resolve_path import read_json, safe_child

    file = safe_child(folder, METADATA_FILE)
    if not file.is_file():
        return None
    metadata = {
        "kv_expanded": [],
        "plans": [],
        "layouts": {},
        "num_outputs": {},
        "dtype": None,
        "other_dtypes": {},
        "cache": [],
        "full_config": {},
        "weight_rules": [],
        "activation_bits": FULL_PRECISION,
    } | migrate_attached(read_json(file))
    kept_heads = metadata.get("kept_heads")
    is_valid = isinstance(kept_heads, dict) and all(
        isinstance(heads, list) and all(type(head) is int for head in heads) for heads in kept_heads.values()
    )
    is_valid = is_valid and all(isinstance(metadata[name], list) for name in ("kv_expanded", "plans", "weight_rules"))
    is_valid = is_valid and all(isinstance(rule, dict) for rule in metadata["weight_rules"])
    is_valid = is_valid and isinstance(metadata["full_config"], dict)
    is_valid = is_valid and all(
        name in CONFIG_COUNTS and (value is None or (type(value) is int and 0 < value < 1 << 20))
        for name, value in metadata["full_config"].items()
    )
    is_valid = is_valid and all(isinstance(layer_name, str) for layer_name in metadata["kv_expanded"])
    is_valid = is_valid and all(isinstance(metadata[name], dict) for name in ("layouts", "num_outputs", "other_dtypes"))
    is_valid = is_valid and all(
        isinstance(x, dict) and set(x) <= set("qkv") and set(x.values()) <= ROW_LAYOUTS
        for x in metadata["layouts"].values()
    )
    is_valid = is_valid and all(type(count) is int and 0 <= count < 9 for count in metadata["num_outputs"].values())
    is_valid = (
        is_valid
        and (metadata["dtype"] is None or metadata["dtype"] in FLOATS)
        and set(metadata["other_dtypes"].values()) <= set(FLOATS)
    )
    if metadata.get("format") != FORMAT or not isinstance(metadata.get("class"), str) or not is_valid:
        raise FileFormatError(
            f"{file}: not a valid metadata file of this version ({FORMAT}). Save the model again with save_pretrained."
        )
    return metadata


def _cache_rules(rules: Any) -> tuple[CacheRule, ...]:
    """Build the cache rules of a saved model."""
    try:
        return tuple(CacheRule(tuple(map(str, rule["heads"])), CachePolicy(**rule["policy"])) for rule in rules)
    except (TypeError, KeyError) as error:
        raise FileFormatError(
            f"{METADATA_FILE}: its cache rules are not valid ({error}). The folder is damaged; save the model again."
        ) from None


def _load_weights(model: Any, layers: Sequence[AttachedLayer], folder: Path) -> set[str]:
    """Load tensors into a pruned model in their stored dtypes, after adding output biases. Returns their names."""
    from headwise.io.resolve_path import weight_files
    from headwise.io.weight_readers import SafetensorsReader

    reader = SafetensorsReader(weight_files(folder, ("model",)))
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        output_module: Any = layer.info.output_module
        if (
            output_module is not None
            and output_module.bias is None
            and f"{names[id(output_module)]}.bias" in reader.shapes
        ):
            output_module.bias = torch.nn.Parameter(output_module.weight.new_zeros(layer.spec.width))
    state = {name: reader.get(name).clone() for name in reader.shapes}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:  # shapes do not match
        raise FileFormatError(
            f"{folder}: the weights do not match {METADATA_FILE}: {str(error).splitlines()[-1].strip()} Save the model again."
        ) from None
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # for example sinusoids, computed by the model
    unexplained = [name for name in missing if name not in tied.keys() | unsaved]
    if unexplained or unexpected:
        missing_text, unexpected_text = ", ".join(unexplained) or "nothing", ", ".join(unexpected) or "nothing"
        raise FileFormatError(
            f"{folder}: the weights do not match {METADATA_FILE}. Missing: {missing_text}. Unexpected: {unexpected_text}. "
            f"Save the model again."
        )
    if not any(is_packed(module) for module in model.modules() if isinstance(module, torch.nn.Embedding)):
        # Layers that shared their weights (Zamba) differ if other heads of each were pruned.
        for target in [name for name, source in tied.items() if _are_different(state, name, source)]:
            del tied[target]
        model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    return set(state)


def _are_different(state: Mapping[str, torch.Tensor], first: str, second: str) -> bool:
    """Return whether two stored tensors have different values."""
    return first in state and second in state and not torch.equal(state[first], state[second])


def _named_float_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point parameters and buffers of a model, by name; buffers that are not saved too."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(
    architecture: Any, folder: Path, metadata: dict[str, Any], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor: as it was when the model was saved, or as transformers builds it in `dtype`."""
    saved_dtype = None if metadata["dtype"] is None else FLOATS[metadata["dtype"]]
    stored_dtype = saved_dtype or architecture.config_class.from_pretrained(folder).dtype or torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or stored_dtype)
    try:
        # Rotary frequencies are float32 in every dtype.
        built = dict(_named_float_tensors(build_from_config(architecture, folder, "meta", metadata)))
    finally:
        torch.set_default_dtype(before)
    dtypes = {name: tensor.dtype for name, tensor in built.items()}
    if saved_dtype is None or dtype not in (None, saved_dtype):
        return dtypes
    return dict.fromkeys(dtypes, saved_dtype) | {
        name: FLOATS[other] for name, other in metadata["other_dtypes"].items()
    }


@torch.no_grad()
def _cast(model: Any, dtypes: Mapping[str, torch.dtype], stored: Collection[str]) -> None:
    """Convert parameters and buffers, except the `stored` ones, to their dtypes."""
    for name, tensor in _named_float_tensors(model):
        if name not in stored and name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


def _unpruned_copy(model: Any, layers: Sequence[AttachedLayer]) -> Any:
    """Return a copy of the model in its original shape, with zeros for pruned heads.

    If folding added output biases, the copy has `attention_bias=True`, and zeros as the biases of q, k and v.
    """
    config, new_biases = copy_config(model), added_biases(model, layers)
    if new_biases and getattr(config, "attention_bias", None) is False:
        config.attention_bias = True
    with torch.random.fork_rng():
        full = type(model)(config)
    if new_biases <= full.state_dict().keys():
        own_names = model.state_dict().keys()
        for name, parameter in full.named_parameters():
            if name not in own_names and name.endswith(".bias"):
                parameter.data.zero_()
    dtypes: dict[str, torch.dtype] = {name: model.dtype for name, _ in _named_float_tensors(full)}
    _cast(full, dtypes | {name: tensor.dtype for name, tensor in _named_float_tensors(model)}, ())
    full_layers = {layer.hook_point.address: layer for layer in make_attached_layers(full)}
    for layer in layers:
        if layer.info.kept_heads is not None:
            _copy_into_full_layer(layer, full_layers[layer.hook_point.address])
    state, full_state = model.state_dict(), full.state_dict()
    for name in state.keys() - full_state.keys():
        raise UnsupportedModelError(
            f"full_shape=True: folding added an output bias, the parameter {name}, which a plain "
            f"{type(model).__name__} does not have, and its configuration has no setting for it. Use model.save(folder) "
            f"instead."
        )
    # Tensors that pruning did not change.
    unchanged = {name: value for name, value in state.items() if value.shape == full_state[name].shape}
    full.load_state_dict(full_state | unchanged)
    if hasattr(model, "generation_config"):
        full.generation_config = model.generation_config
    return full


@torch.no_grad()
def _copy_into_full_layer(layer: AttachedLayer, full_layer: AttachedLayer) -> None:
    """Copy the remaining heads of a layer to their original positions, with zeros elsewhere."""
    spec, heads = layer.spec, list(layer.spec.head_ids)
    full_layer.copy_probe_results(layer)
    kv_heads = (
        [full_layer.spec.kv_of_head[head] for head in heads] if layer.info.kv_expanded else list(spec.kv_head_ids)
    )
    own_paths = dict(layer.info.parent.named_modules())
    full_paths = {id(module): path for path, module in full_layer.info.parent.named_modules()}
    for tensor_slice in head_tensor_slices(full_layer, heads, kv_heads):
        target = getattr(tensor_slice.holder, tensor_slice.name)
        target.zero_()
        value = getattr(own_paths.get(full_paths[id(tensor_slice.holder)]), tensor_slice.name, None)
        if not heads or value is None:  # a bias that only the copy has stays 0
            continue
        index = torch.tensor(tensor_slice.indices, device=target.device)
        target.index_copy_(tensor_slice.axis, index, value)
        if not torch.equal(target.index_select(tensor_slice.axis, index), value):  # several heads share one position
            raise UnsupportedModelError(
                f"full_shape=True: the heads of {layer.info.name} got separate keys and values when the model was detached, "
                f"and these differ after training, so they cannot be merged into shared KV heads. Use "
                f"model.save(folder) instead."
            )
