"""`load`, the one door: real weights, never random ones, from a bundle, a folder, a file or the hub."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.attached import Attached
from headwise.attached.save_load import NOTE, can_attach
from headwise.distributed.head_parallel import shares_on
from headwise.errors import HeadwiseError
from headwise.heads.quantized_weights import Packed
from headwise.io.aligned_safetensors import aligned, write_tensors
from headwise.io.atomic_write import whole_folder
from headwise.io.readers import GGUFReader, Reader, SafetensorsReader, TorchReader
from headwise.io.resolve_path import find, inside, read_json, read_text, weight_files
from headwise.io.sharded_reader import PiecesReader
from headwise.model import Transformer
from headwise.model.shard import Shard, build
from headwise.model.shard_axes import cut
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.text.gguf import tokenizer_from_gguf
from headwise.weights.families import FAMILIES, Family, family_of
from headwise.weights.families.family import Config
from headwise.weights.families.llama_files import spec_from_gguf, spec_from_meta
from headwise.weights.keymap import Found, Line, check_names, find_prefix, lines_for
from headwise.weights.save import PLANS, write_about

T = TypeVar("T", bound=Transformer)


@dataclass(frozen=True)
class Checkpoint:
    """A model that has been found but not yet loaded: what it is, and where its tensors are."""

    source: Path
    spec: ModelSpec
    reader: Reader
    tokenizer: Callable[[], Tokenizer] | None  # read when first asked for
    family: Family | None = None  # None: our own format
    lines: Sequence[Line] = ()
    storage: str = "qkv"
    joined: bool = False  # its tensors are made anew when read, so q, k and v may as well be put together


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    check: bool = True,
    mesh: DeviceMesh | None = None,
) -> Transformer | Attached:
    """A model with its weights and its tokenizer, ready to use.

    `source` is a bundle (smollm2, minilm), a folder, a file (.safetensors, .gguf, .bin) or a hub id. `dtype` None keeps the
    weights as they are stored. Weights stay in the mapped file until they are written to, where dtype and device allow.
    `check` reads them all once and refuses NaN and infinities; without it they are read when first used.

    A folder of a family that is not mapped here is attached to instead, if transformers is installed, and that is said; so is
    one that an attached model was saved to after heads were cut. What comes back then is an `Attached`, called alike.

    With a `mesh` the model is spread over its processes by heads, as `hw.shard` does it, and each reads its own part alone.

    >>> model = load("minilm")
    >>> model.spec.layers, model.spec.attention.heads
    (6, 12)
    """
    if is_theirs(path := find(source)):
        if mesh is not None:
            raise HeadwiseError(
                f"{path} is run by transformers, attached to, and cannot be spread over processes here."
            )
        return _attached(path, dtype, device, check)
    if mesh is not None:
        return load_part(path, mesh, dtype, device, check)
    return load_own(Transformer, path, dtype, device, check)


def load_own(
    kind: type[T],
    source: str | Path,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    check: bool = True,
) -> T:
    """The same, of a family that is mapped here or in our own format."""
    checkpoint = open_checkpoint(source)
    model = kind(checkpoint.spec, storage=checkpoint.storage, device="meta")
    state = dict(_tensors(checkpoint, model))
    if checkpoint.family is None:
        state = {name: aligned(tensor) for name, tensor in state.items()}  # the same bits out as before saving
    packed = _packed_names(model)
    dtype = dtype or _dtype_of(state, packed)
    for name, tensor in state.items():
        if check and tensor.is_floating_point():
            _check_numbers(checkpoint.source, name, tensor)
        state[name] = tensor.to(device=device, dtype=None if name in packed else dtype)
    if checkpoint.spec.tied and model.output is not None and "embed.tokens.weight" in state:
        state["output.vocabulary.weight"] = state["embed.tokens.weight"]
    model.load_state_dict(state, assign=True)
    if checkpoint.joined:
        for layer in model.attention_layers():
            layer.read.join()
    if packed:
        model.to(dtype)  # what is unpacked comes out like all else
    return _named(model, checkpoint)


def load_part(
    source: str | Path,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    check: bool = True,
) -> Shard:
    """What this process is to hold of a model: of each tensor its own slice, one tensor after the other."""
    checkpoint = open_checkpoint(source)
    spec = checkpoint.spec
    shares, together = shares_on(mesh, spec)
    whole = Transformer(spec, storage=checkpoint.storage, device="meta")
    packed, state = _packed_names(whole), dict[str, Tensor]()
    for name, tensor in _tensors(checkpoint, whole):
        dtype = dtype or (None if name in packed else tensor.dtype)
        for mine, part in cut(name, tensor, spec, shares, together.rank).items():
            if check and part.is_floating_point():
                _check_numbers(checkpoint.source, name, part)
            part = part.clone() if part.numel() < tensor.numel() else part  # the rest of the tensor is let go
            state[mine] = aligned(part.to(device=device, dtype=None if name in packed else dtype))
    made = build(spec, shares, together, state, checkpoint.storage)
    if packed:
        made.to(dtype or torch.float32)
    return _named(made, checkpoint)


def _named(model: T, checkpoint: Checkpoint) -> T:
    """The model with all that its folder says besides weights."""
    model.tokenizer = checkpoint.tokenizer
    model.family = None if checkpoint.family is None else checkpoint.family.name
    model.plans = _plans(checkpoint)
    return model.eval()


def _tensors(checkpoint: Checkpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name here, when it is asked for."""
    return _own_state(checkpoint, model) if checkpoint.family is None else _mapped_state(checkpoint, model)


def _packed_names(model: Transformer) -> set[str]:
    """The names of codes and scales of weights at few bits: they stay as they are stored."""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, Packed)]
    return {f"{name}.{held}" for name, part in parts for held, _ in part.named_buffers() if held != "rows32"}


def _dtype_of(state: dict[str, Tensor], packed: set[str]) -> torch.dtype:
    """One dtype for all, the embedding's: norms are sometimes stored finer. Where that is packed, all others have one."""
    table = state.get("embed.tokens.weight")
    return table.dtype if table is not None else next(t.dtype for name, t in state.items() if name not in packed)


def _plans(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """The plans by which heads of a model in our own format were cut, if by plans."""
    if checkpoint.family is not None or not (file := inside(checkpoint.source, PLANS)).is_file():
        return ()
    from headwise.compression.plan import read_plans  # a later room

    return read_plans(read_json(file).get("plans"), checkpoint.spec.addresses, file)


def save_as_whole(source: Path, folder: Path) -> None:
    """Write a model that lies there in pieces as one; of its tensors no more than one is held."""
    checkpoint = open_checkpoint(source)
    empty = Transformer(checkpoint.spec, device="meta")
    state = empty.state_dict()
    if checkpoint.spec.tied:
        state.pop("output.vocabulary.weight", None)
    told = {"format": "headwise-1", "storage": checkpoint.storage}
    with whole_folder(folder, ("spec.json",)) as new:
        write_tensors(state, new / "model.safetensors", told, checkpoint.reader.get)
        write_about(_named(empty, checkpoint), new)


def is_theirs(path: Path) -> bool:
    """Whether a place holds a model that is reached through transformers: of a family not mapped here, or cut there."""
    if not path.is_dir() or inside(path, "spec.json").is_file() or not inside(path, "config.json").is_file():
        return False
    kind = read_json(inside(path, "config.json")).get("model_type")
    mapped = any(kind in family.model_types for family in FAMILIES)
    return inside(path, NOTE).is_file() or (not mapped and isinstance(kind, str) and can_attach(path))


def _attached(folder: Path, dtype: torch.dtype | None, device: torch.device | str, check: bool) -> Attached:
    theirs = Attached.reopen(folder, dtype, device)
    for name, tensor in theirs.model.state_dict().items():
        if check and tensor.is_floating_point():
            _check_numbers(folder, name, tensor)
    why = (
        "heads were cut from it in transformers' shape"
        if inside(folder, NOTE).is_file()
        else "not a family mapped here"
    )
    print(f"{folder} ({theirs.family}): {why}, so transformers runs it, attached to.", file=sys.stderr)
    return theirs


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Find a model and read what it is, without reading its weights."""
    path = find(source)
    if path.is_file():
        return _open_file(path)
    if inside(path, "spec.json").is_file():
        return _open_own(path)
    if inside(path, "config.json").is_file():
        return _open_hugging_face(path, weight_files(path))
    if inside(path, "params.json").is_file():
        return _open_meta(path)
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return _open_gguf(inside(path, gguf[0].name))
    if gguf:
        raise HeadwiseError(f"{path} holds {len(gguf)} GGUF files; name one of {', '.join(f.name for f in gguf)}.")
    raise HeadwiseError(f"{path} holds no model; expected spec.json, config.json, params.json or one GGUF file in it.")


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        if path.with_name("spec.json").is_file() and path.name == "model.safetensors":
            return _open_own(path.parent)
        if not path.with_name("config.json").is_file():
            raise HeadwiseError(
                f"{path} holds tensors only; the config.json that says what they are must lie beside it."
            )
        return _open_hugging_face(path.parent, [path])
    raise HeadwiseError(f"{path} is not a weight file; known: .safetensors, .gguf, .bin, .pt, .pth.")


def _open_own(folder: Path) -> Checkpoint:
    spec = ModelSpec.from_json(read_text(inside(folder, "spec.json")))
    if inside(folder, "pieces").is_dir():  # a checkpoint that several processes wrote
        return Checkpoint(folder, spec, PiecesReader(folder / "pieces"), _tokenizer(folder))
    reader = SafetensorsReader([inside(folder, "model.safetensors")])
    return Checkpoint(folder, spec, reader, _tokenizer(folder), storage=reader.metadata.get("storage", "qkv"))


def _open_hugging_face(folder: Path, files: list[Path]) -> Checkpoint:
    config = read_json(inside(folder, "config.json"))
    family = family_of(config.get("model_type"))
    reader = SafetensorsReader(files) if files[0].suffix == ".safetensors" else TorchReader(files)
    spec = family.adjust(_understood(family.spec, config, folder / "config.json"), set(reader.shapes), config)
    return Checkpoint(folder, spec, reader, _tokenizer(folder), family, family.lines, family.storage)


def _understood(spec: Callable[[Config], ModelSpec], config: Config, file: Path) -> ModelSpec:
    """A configuration as a spec; what makes no sense is told with the file's name."""
    try:
        return spec(config)
    except HeadwiseError as error:
        raise HeadwiseError(f"{file}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise HeadwiseError(f"{file} makes no sense ({type(error).__name__}: {error}); fetch it again.") from None


def _open_meta(folder: Path) -> Checkpoint:
    files = sorted(folder.glob("consolidated*.pth")) or sorted(folder.glob("consolidated*.safetensors"))
    if len(files) != 1:
        raise HeadwiseError(
            f"{folder} holds {len(files)} consolidated files; Meta's layout is read where there is just one."
        )
    file = inside(folder, files[0].name)
    reader = TorchReader([file]) if file.suffix == ".pth" else SafetensorsReader([file])
    family = family_of("llama")
    params = inside(folder, "params.json")
    spec = _understood(partial(spec_from_meta, shapes=reader.shapes), read_json(params), params)
    return Checkpoint(folder, spec, reader, _tokenizer(folder), family, family.other_names["meta"], family.storage)


def _open_gguf(file: Path) -> Checkpoint:
    reader = GGUFReader(file)
    fields = reader.fields()
    family = family_of(fields.get("general.architecture"))
    if "gguf" not in family.other_names:
        raise HeadwiseError(f"{file} holds a {family.name} model; GGUF is read for the Llama family only.")
    spec = _understood(partial(spec_from_gguf, reader=reader), fields, file)
    tokenizer = partial(tokenizer_from_gguf, fields) if "tokenizer.ggml.model" in fields else None
    return Checkpoint(file, spec, reader, tokenizer, family, family.other_names["gguf"], family.storage, joined=True)


def _tokenizer(folder: Path) -> Callable[[], Tokenizer] | None:
    """Its files are read now, so that it stays this model's own, and understood when first asked for."""
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        inside(folder, name)  # a link that leads out is refused
    there = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
    return Tokenizer.prepare(folder) if there else None


def _mapped_state(checkpoint: Checkpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Their tensors under our names: views, turned where they keep them the other way round."""
    reader, family = checkpoint.reader, checkpoint.family
    assert family is not None
    found = list(lines_for(checkpoint.spec, checkpoint.lines))
    prefix = find_prefix(reader, (f.theirs for f in found if not f.theirs.startswith("/")), family.prefixes)
    names = {f: _their_name(f, prefix) for f in found}
    parameters = dict(model.named_parameters())
    wanted = {name: _their_shape(f, parameters[f.ours]) for f, name in names.items()}
    check_names(reader, wanted, checkpoint.source, lambda name: name.endswith(family.ignored))
    for f, name in names.items():
        tensor = f.line.turn(_floats(reader.get(name), checkpoint.source, name))
        if checkpoint.spec.tied and f.ours == "embed.tokens.weight":
            _check_tied(checkpoint, tensor)
        yield f.ours, tensor


def _check_tied(checkpoint: Checkpoint, embedding: Tensor) -> None:
    """An output that is said to be the embedding may lie in the file as well, but then it must be that: readers differ in
    which of the two they believe."""
    names = (line.theirs.removeprefix("/") for line in checkpoint.lines if line.ours == "output.vocabulary.weight")
    for name in names:
        if name in checkpoint.reader.shapes and not torch.equal(checkpoint.reader.get(name), embedding):
            raise HeadwiseError(
                f"{checkpoint.source} ties the output to the embedding, yet holds another output in {name}; set "
                f"tie_word_embeddings to false in config.json to use it, or take {name} out of the file."
            )


def _their_name(found: Found, prefix: str) -> str:
    """A name that begins with / has no prefix."""
    return found.theirs[1:] if found.theirs.startswith("/") else prefix + found.theirs


def _their_shape(found: Found, parameter: Tensor) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return shape[::-1] if found.line.transposed else shape


def _own_state(checkpoint: Checkpoint, model: Transformer) -> Iterator[tuple[str, Tensor]]:
    empty = model.state_dict()
    if checkpoint.spec.tied:
        empty.pop("output.vocabulary.weight", None)
    there = checkpoint.reader.shapes
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.items() if tensor.numel() or name in there}
    check_names(checkpoint.reader, wanted, checkpoint.source)
    packed = _packed_names(model)
    for name in empty:
        tensor = checkpoint.reader.get(name) if name in there else torch.empty(empty[name].shape)
        if name not in packed:
            _floats(tensor, checkpoint.source, name)
        elif tensor.dtype != empty[name].dtype:
            raise HeadwiseError(
                f"{checkpoint.source} keeps {name} as {tensor.dtype}; packed weights have {empty[name].dtype} there."
            )
        yield name, tensor


def _floats(tensor: Tensor, source: Path, name: str) -> Tensor:
    if not tensor.is_floating_point():
        raise HeadwiseError(f"{source} keeps {name} as {tensor.dtype}; weights are floating-point numbers.")
    return tensor


def _check_numbers(source: Path, name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinities. The sum is quick, in the order the numbers lie; it may overflow, so look again."""
    as_it_lies = tensor if tensor.is_contiguous() else tensor.mT
    if not as_it_lies.sum().isfinite() and not tensor.isfinite().all():
        bad = int((~tensor.isfinite()).sum())
        raise HeadwiseError(f"{source} is damaged: {name} holds {bad} numbers that are NaN or infinite.")
