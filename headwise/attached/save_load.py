"""Attached models in folders: as transformers writes them, with a note of what was cut; or whole again, zeros for the cut.

A cut model has smaller tensors than its configuration says, so plain transformers refuses the folder; `hw.load` reads the
note and cuts before it loads. Written whole, anyone can load it.
"""

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from headwise.attached.discover import find
from headwise.attached.head_count_fields import slices
from headwise.attached.layer import Layer
from headwise.attached.masks import Masks
from headwise.attached.offload import is_offloaded, load_copy
from headwise.attached.prune_in_place import cut_layers, even_out
from headwise.attached.validate import own_config
from headwise.errors import HeadwiseError
from headwise.spec import SiteAddress

NOTE = "headwise.json"
FORMAT = "headwise-attached-1"
LAYOUTS = {"apart", "wide", "first", "joined", "by head", ""}  # ways in which rows are shared out among heads
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
PLANS = "_headwise_plans"  # where a model keeps the plans by which heads were cut from it


def write(
    model: Any, layers: Sequence[Layer], beside: Sequence[Any], folder: str | Path, whole: bool, exported: bool = False
) -> Path:
    """Write a model, whole or not at all; one that is `exported` replaces only what was exported before."""
    from headwise.io.atomic_write import EXPORTED, whole_folder

    with whole_folder(folder, (EXPORTED if exported else "config.json",)) as new:
        if exported:
            (new / EXPORTED).write_text('{"to": "transformers"}', encoding="utf-8")
        filled = whole and is_cut(layers)
        if is_offloaded(model) and (
            filled or not hasattr(model, "hf_device_map")
        ):  # by its map transformers loads weights
            model = load_copy(model)
            layers = make_layers(model)
        if filled:
            _filled_up(model, layers).save_pretrained(new)
        else:
            model.save_pretrained(new)  # a cut one writes its note
        for one in beside:  # what the model reads with: a tokenizer, or how pixels become numbers
            if one is not None:
                one.save(new)
    return Path(folder)


def is_cut(layers: Sequence[Layer]) -> bool:
    """Whether heads were cut from any of these layers."""
    return any(layer.found.kept is not None for layer in layers)


def keep_note(model: Any) -> None:
    """From now on this model, and any part of it that can be saved, writes beside its weights what was cut, attached or not.

    Weights of a cut model without that note would be of no use to anybody.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.__dict__["save_pretrained"] = partial(_save_noted, part)


def _save_noted(model: Any, save_directory: str | Path, *arguments: Any, **named: Any) -> None:
    """`save_pretrained` of a model from which heads were cut."""
    from headwise.io.atomic_write import whole_file

    save = type(model).save_pretrained
    given = inspect.signature(save).bind(model, save_directory, *arguments, **named).arguments
    if given.get("push_to_hub"):
        raise HeadwiseError(
            "heads were cut from this model, and what is pushed would lack the note of that; save it, then upload the folder."
        )
    if "save_original_format" not in given:
        named["save_original_format"] = False  # tensors by the names they have here: nobody else reads them
    save(model, save_directory, *arguments, **named)
    if given.get("is_main_process", True):
        whole_file(Path(save_directory) / NOTE, json.dumps(_note(model, make_layers(model)), indent=2).encode())


def read(folder: Path, dtype: torch.dtype | None, device: torch.device | str) -> tuple[Any, list[Layer]]:
    """A transformers model from a folder, cut as its note says, and its layers."""
    note = _read_note(folder)
    kind = model_class(folder, None if note is None else note["class"])
    if note is None:
        if not any(folder.glob("*.safetensors")):
            raise HeadwiseError(
                f"{folder} holds no safetensors; weights of other kinds are not read through transformers."
            )
        model, told = kind.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
        )
        for what in ("missing_keys", "mismatched_keys", "error_msgs"):
            if told.get(what):  # transformers would fill them with random numbers
                some = ", ".join(map(str, sorted(told[what], key=str)[:5]))
                raise HeadwiseError(
                    f"{folder} lacks weights of {type(model).__name__} ({what.replace('_', ' ')}): {some}."
                )
        return model.to(device).eval(), make_layers(model)
    model = build(kind, folder, "cpu")
    layers = cut_to(make_layers(model), note)
    keep_note(model)
    model.__dict__[PLANS] = _plans(note, layers)
    stored = _fill(model, layers, folder)
    _cast(model, _dtypes(kind, folder, note, dtype), set() if dtype else stored)
    return model.to(device=device).eval(), layers


def skeleton(folder: Path) -> tuple[Any, list[Layer]]:
    """The same without its weights: what a model is, and nothing else."""
    note = _read_note(folder)
    model = build(model_class(folder, None if note is None else note["class"]), folder, "meta")
    layers = make_layers(model)
    return model, layers if note is None else cut_to(layers, note)


def make_layers(model: Any) -> list[Layer]:
    """The attention layers of a model."""
    masks = Masks()
    return [Layer(found, masks) for found in find(model)]


def can_attach(folder: Path) -> bool:
    """Whether transformers is there, knows what a folder holds, and has its attention on the interface."""
    if find_spec("transformers") is None:
        return False
    try:
        kind = model_class(folder)
    except (HeadwiseError, ValueError, OSError):
        return False
    return bool(kind._can_set_attn_implementation()) and bool(kind._supports_sdpa)


def model_class(folder: Path, name: str | None = None) -> Any:
    """The class that a folder's configuration names."""
    try:
        import transformers
    except ImportError:
        raise HeadwiseError(
            f"{folder} holds a model of a family that is not mapped here; pip install 'headwise[attach]' to reach it through "
            f"transformers."
        ) from None
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    name = name or next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name or "", None)
    if kind is None or not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise HeadwiseError(
            f"{folder} names the architecture {name!r}, which transformers {transformers.__version__} lacks."
        )
    if kind.config_class is None or kind.config_class.model_type != config.model_type:
        raise HeadwiseError(f"{folder} says it is {config.model_type!r} and {name}, which do not belong together.")
    return kind


def build(kind: Any, folder: Path, device: str) -> Any:
    """A model as a folder's configuration says, without its weights."""
    config = kind.config_class.from_pretrained(folder)
    with torch.device(device), torch.random.fork_rng():
        return kind(config)


def cut_to(layers: list[Layer], note: dict[str, Any]) -> list[Layer]:
    """Layers cut to the heads a note tells."""
    kept = {SiteAddress.parse(site): set(heads) for site, heads in note["kept"].items()}
    apart = {SiteAddress.parse(site) for site in note["apart"]}
    there = {layer.site.address for layer in layers}
    if not set(kept) | apart <= there:
        raise HeadwiseError(f"{NOTE} names layers that the model has not; the folder is damaged.")
    for layer in layers:
        layer.layouts |= note["layouts"].get(str(layer.site.address), {})
        layer.gives = note["gives"].get(str(layer.site.address), layer.gives)
    gone = [
        address
        for layer in layers
        for address in layer.site.addresses
        if layer.site.address in kept and address.head not in kept[layer.site.address]
    ]
    return [even_out(layer) if layer.site.address in apart else layer for layer in cut_layers(layers, gone)]


def _note(model: Any, layers: Sequence[Layer]) -> dict[str, Any]:
    """What was cut: the heads there are, layers whose heads have keys of their own since, and the plans that said so."""
    return {
        "format": FORMAT,
        "class": type(model).__name__,
        "kept": {str(layer.site.address): layer.found.kept for layer in layers if layer.found.kept is not None},
        "apart": [str(layer.site.address) for layer in layers if layer.found.apart and layer.spec.head_ids],
        "layouts": {str(layer.site.address): layer.layouts for layer in layers if _is_unnamed(layer)},
        "gives": {str(layer.site.address): layer.gives for layer in layers if layer.gives != 2},
        "dtype": _dtype_name(model.dtype),
        "other_dtypes": {
            name: _dtype_name(tensor.dtype) for name, tensor in _floats(model) if tensor.dtype != model.dtype
        },
        "plans": [json.loads(plan.to_json()) for plan in model.__dict__.get(PLANS, ())],
    }


def _is_unnamed(layer: Layer) -> bool:
    """Whether rows are shared out otherwise than the names of projections say."""
    named = None if layer.found.reads is None else layer.found.reads[0]
    return named is not None and set(layer.layouts.values()) != {named}


def _plans(note: dict[str, Any], layers: Sequence[Layer]) -> tuple[Any, ...]:
    """The plans a note tells."""
    if not note["plans"]:
        return ()
    from headwise.compression.plan import read_plans  # a later room

    return read_plans(note["plans"], [address for layer in layers for address in layer.site.addresses], NOTE)


def _read_note(folder: Path) -> dict[str, Any] | None:
    from headwise.io.resolve_path import inside, read_json

    file = inside(folder, NOTE)
    if not file.is_file():
        return None
    note = {"apart": [], "plans": [], "layouts": {}, "gives": {}, "dtype": None, "other_dtypes": {}} | read_json(file)
    kept = note.get("kept")
    fits = isinstance(kept, dict) and all(
        isinstance(heads, list) and all(type(head) is int for head in heads) for heads in kept.values()
    )
    fits = fits and all(isinstance(note[name], list) for name in ("apart", "plans"))
    fits = fits and all(isinstance(site, str) for site in note["apart"])
    fits = fits and all(isinstance(note[name], dict) for name in ("layouts", "gives", "other_dtypes"))
    fits = fits and all(
        isinstance(x, dict) and set(x) <= set("qkv") and set(x.values()) <= LAYOUTS for x in note["layouts"].values()
    )
    fits = fits and all(type(count) is int and 0 <= count < 9 for count in note["gives"].values())
    fits = (
        fits
        and (note["dtype"] is None or note["dtype"] in FLOATS)
        and set(note["other_dtypes"].values()) <= set(FLOATS)
    )
    if note.get("format") != FORMAT or not isinstance(note.get("class"), str) or not fits:
        raise HeadwiseError(f"{file} is not a note of this version ({FORMAT}); write the model again.")
    return note


def _fill(model: Any, layers: Sequence[Layer], folder: Path) -> set[str]:
    """Load tensors into a pruned model, each in its stored dtype, and return their names; added output biases come first."""
    from headwise.io.readers import SafetensorsReader
    from headwise.io.resolve_path import weight_files

    reader = SafetensorsReader(weight_files(folder, ("model",)))
    names = {id(part): name for name, part in model.named_modules()}
    for layer in layers:
        writes: Any = layer.found.writes
        if writes is not None and writes.bias is None and f"{names[id(writes)]}.bias" in reader.shapes:
            writes.bias = torch.nn.Parameter(writes.weight.new_zeros(layer.spec.width))
    state = {name: reader.get(name).clone() for name in reader.shapes}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:  # sizes
        raise HeadwiseError(f"{folder} does not fit its note: {str(error).splitlines()[-1].strip()}") from None
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    unwritten = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # sinusoids, which the model makes itself
    missing = [name for name in missing if name not in tied | unwritten]
    if missing or unexpected:
        lacks, besides = ", ".join(missing) or "nothing", ", ".join(unexpected) or "nothing"
        raise HeadwiseError(f"{folder} does not fit its note: it lacks {lacks}, and has {besides} besides.")
    model.tie_weights()
    return set(state)


def _floats(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point parameters and buffers of a model, by name; buffers that are not saved too."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(kind: Any, folder: Path, note: dict[str, Any], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a model: as it was when the model was saved, or as transformers builds it in `dtype`."""
    known = None if note["dtype"] is None else FLOATS[note["dtype"]]
    stored = known or kind.config_class.from_pretrained(folder).dtype or torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or stored)
    try:
        built = dict(_floats(build(kind, folder, "meta")))  # rotary frequencies are float32 in every dtype
    finally:
        torch.set_default_dtype(before)
    dtypes = {name: tensor.dtype for name, tensor in built.items()}
    if known is None or dtype not in (None, known):
        return dtypes
    return dict.fromkeys(dtypes, known) | {name: FLOATS[other] for name, other in note["other_dtypes"].items()}


@torch.no_grad()
def _cast(model: Any, dtypes: Mapping[str, torch.dtype], kept: Collection[str]) -> None:
    """Convert parameters and buffers, except the `kept` ones, to their dtypes."""
    for name, tensor in _floats(model):
        if name not in kept and name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


def _filled_up(model: Any, layers: Sequence[Layer]) -> Any:
    """The model in its first shape: zeros where heads were, so that they read and write nothing."""
    with torch.random.fork_rng():
        full = type(model)(own_config(model))
    dtypes: dict[str, torch.dtype] = {name: model.dtype for name, _ in _floats(full)}
    _cast(full, dtypes | {name: tensor.dtype for name, tensor in _floats(model)}, ())
    firsts = {layer.site.address: layer for layer in make_layers(full)}
    for layer in layers:
        if layer.found.kept is not None:
            _spread_out(layer, firsts[layer.site.address])
    state, own = model.state_dict(), full.state_dict()
    for name in state.keys() - own.keys():
        raise HeadwiseError(
            f"{name} has no place in a plain {type(model).__name__}: means were folded into a bias it does not have. Save it "
            f"without whole=True."
        )
    same = {name: value for name, value in state.items() if value.shape == own[name].shape}  # what cutting left alone
    full.load_state_dict(own | same)
    if hasattr(model, "generation_config"):
        full.generation_config = model.generation_config
    return full


@torch.no_grad()
def _spread_out(layer: Layer, first: Layer) -> None:
    """Put what is left of a layer where it was, and zeros elsewhere."""
    spec, heads = layer.spec, list(layer.spec.head_ids)
    first.learned_of(layer)
    keys = [first.spec.kv_of_head[head] for head in heads] if layer.found.apart else list(spec.kv_ids)
    own = slices(layer, list(range(len(heads))), list(range(len(spec.kv_ids)))) if heads else []
    for number, kept in enumerate(slices(first, heads, keys)):
        target = getattr(kept.holder, kept.name)
        target.zero_()
        if not heads:
            continue
        value = getattr(own[number].holder, own[number].name)
        index = torch.tensor(kept.places, device=target.device)
        target.index_copy_(kept.axis, index, value)
        if not torch.equal(target.index_select(kept.axis, index), value):  # several heads stand in one place
            raise HeadwiseError(
                f"the heads of {layer.found.name} got keys of their own when the model was detached, and these have "
                f"learned different things since: they cannot be shared again. Save it without whole=True."
            )
